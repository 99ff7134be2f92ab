"""Measured Hessian norms for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from rich.table import Table

from brx.analysis.norm_result import NormResult, by_stage

# More rows than this below the resolution of their vector's largest entry are worth a second look in fp64.
NOTABLE_SHARE = 0.01


def norm_rows(results: Sequence[NormResult]) -> tuple[list[str], list[list[str]]]:
    """A row a measurement: columns and rows, for `formats.format_table`."""
    columns = ["run", "P", "iteration", "coordinates", "norm / parameter", "95 % interval", "how"]
    rows = []
    for result in results:
        low, high = result.interval
        rows.append(
            [
                Path(result.run).name,
                str(result.num_stages),
                str(result.iteration),
                result.space + _basis_of(result),
                f"{result.normalized:.4g}",
                f"{low:.4g} .. {high:.4g}",
                "{vectors} x {batches_per_vector}, {estimator}, {precision}".format(**result.settings),
            ]
        )
    return columns, rows


def _basis_of(result: NormResult) -> str:
    """Whose basis rotated coordinates are of, where it is not the checkpoint's own."""
    if result.settings.get("basis_from"):
        return f" (basis of {Path(result.settings['basis_from']).name})"
    if result.settings.get("basis_batches"):
        return f" (basis from {result.settings['basis_batches']} batches)"
    return ""


def breakdown_table(result: NormResult, by: Literal["stage", "kind"]) -> Table:
    """A row a stage, or a kind of parameter."""
    table = Table(title=result.space)
    for column in (by, "parameters", "share", "norm / parameter", "std. error"):
        table.add_column(column, no_wrap=True)
    if by == "stage":
        groups = by_stage(result)
    else:
        kinds = result.kinds
        groups = (kinds.names, kinds.num_rows, kinds.sums[0], kinds.standard_errors())
    for name, num_rows, total, error in zip(*groups, strict=True):
        share = total / result.norm if result.norm else 0.0
        table.add_row(name, f"{num_rows:,}", f"{share:.1%}", f"{total / num_rows:.4g}", f"{error / num_rows:.2g}")
    return table


def resolution_warning(result: NormResult) -> str | None:
    """What to say when rounding may have drowned small rows."""
    if result.below_resolution <= NOTABLE_SHARE:
        return None
    return (
        f"{result.space}: {result.below_resolution:.1%} of the rows lie below the resolution of"
        f" {result.settings['precision']} beside their vector's largest entry; compare with --precision fp64"
    )
