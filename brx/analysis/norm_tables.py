"""Measured Hessian norms for the terminal."""

from __future__ import annotations

from typing import Literal

from rich.table import Table

from brx.analysis.norm_result import NormResult, by_stage

# More rows than this below the resolution of their vector's largest entry are worth a second look in fp64.
NOTABLE_SHARE = 0.01


def norm_table(results: list[NormResult]) -> Table:
    """A row for each coordinates of one checkpoint: the norm per parameter with its interval."""
    first = results[0]
    of = "{vectors} vectors x {batches_per_vector} batches, {estimator}, {precision}".format(**first.settings)
    table = Table(title=f"{first.run}, iteration {first.iteration}\n(1,1)-norm of the Hessian, {of}")
    for column in ("coordinates", "norm / parameter", "95 % interval"):
        table.add_column(column, no_wrap=True)
    for result in results:
        low, high = result.interval
        table.add_row(result.space, f"{result.normalized:.4g}", f"{low:.4g} .. {high:.4g}")
    return table


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
