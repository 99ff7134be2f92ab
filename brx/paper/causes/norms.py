"""The Hessian's norms in the coordinates of each basis, as a table."""

from __future__ import annotations

import pandas as pd

from brx.errors import UserError
from brx.paper import strict
from brx.paper.causes.arms import BASES, DEEPEST
from brx.paper.causes.study import Study


def ratio_table(study: Study) -> pd.DataFrame:
    """A row per basis: the (1,1)-norm per parameter in its coordinates and in the original ones, at
    the same weights, and their ratio. All cells are texts.

    Raises:
        UserError: no norm was measured in both coordinates.
    """
    rows = []
    for arm in BASES:
        if not study.has(arm, DEEPEST):
            continue
        own = study.norms([arm], DEEPEST)[arm]
        original = study.norms([arm], DEEPEST, in_original=True)[arm]
        seeds = own.index.intersection(original.index)
        if len(seeds):
            ratios = own[seeds] / original[seeds]
            rows.append(
                {
                    "basis": arm,
                    "seeds": str(len(seeds)),
                    "norm in its coordinates": f"{own[seeds].mean():.3f}",
                    "in the original ones": f"{original[seeds].mean():.3f}",
                    "ratio": strict.mean_text(ratios.tolist()),
                }
            )
    if not rows:
        raise UserError(f"{study.folder}: no run of a basis has been measured in both coordinates")
    return pd.DataFrame(rows)
