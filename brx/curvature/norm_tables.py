"""Measured Hessian norms for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import pandas as pd
from rich.table import Table

from brx.curvature.norm_result import NormResult, by_stage, strategy_of

# More rows than this below the resolution of their vector's largest entry are worth a second look in fp64.
NOTABLE_SHARE = 0.01
NORM_TITLE = "(1,1)-norm of the training loss's Hessian, per parameter (sample: vectors x batches)"
USUAL = ("geometric", "fp32")


def norm_table(results: Sequence[NormResult]) -> pd.DataFrame:
    """A row per measurement, texts; under `NORM_TITLE`."""
    columns = ["run", "P", "at", "coordinates", "norm", "95 % low", "95 % high", "sample"]
    rows = []
    for result in results:
        numbers = (f"{value:.4g}" for value in (result.normalized, *result.interval))
        name = Path(result.run).name
        where = (str(result.num_stages), str(result.iteration), _coordinates(result))
        rows.append([name, *where, *numbers, _how(result)])
    return pd.DataFrame(rows, columns=columns)


def _coordinates(result: NormResult) -> str:
    """Which, and whose basis they are rotated with."""
    if result.space == "original":
        return "original"
    if result.space != "rotated":
        return f"{'/'.join(strategy_of(result.space))}, {result.settings['basis_batches']} batches"
    if result.settings["basis_from"] is not None:
        return f"rotated, {Path(result.settings['basis_from']).name}"
    if result.settings["basis_batches"] is not None:
        return f"rotated, {result.settings['basis_batches']} batches"
    return "rotated, own basis"


def _how(result: NormResult) -> str:
    """The numbers of vectors and batches, and what is not the default of large models."""
    unusual = [result.settings[key] for key in ("estimator", "precision") if result.settings[key] not in USUAL]
    return ", ".join(["{vectors} x {batches_per_vector}".format(**result.settings), *unusual])


def breakdown_table(result: NormResult, by: Literal["stage", "kind"]) -> Table:
    """One row per stage, or a kind of parameter."""
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
