"""What each delay costs each arm, as a table."""

from __future__ import annotations

import pandas as pd

from brx.paper import strict
from brx.paper.causes.arms import ARMS, DELAYED
from brx.paper.causes.study import Study
from brx.runs.trajectory import RATE


def cost_table(study: Study) -> pd.DataFrame:
    """A row per delay and arm whose cost is known, the lowest cost of a delay first: final
    validation losses in nats, their difference, and the learning rates. All cells are texts."""
    rows = []
    for delay in DELAYED:
        arms = [arm for arm in ARMS if study.has(arm, delay)]
        arms.sort(key=lambda arm: float(study.cost(arm, delay).mean()))
        rows += [_row(study, arm, delay) for arm in arms]
    return pd.DataFrame(rows)


def _row(study: Study, arm: str, delay: str) -> dict[str, str]:
    without, delayed = study.pair(arm, delay)
    costs = study.cost(arm, delay)
    return {
        "delay": delay,
        "arm": arm,
        "seeds": str(len(costs)),
        "without delay": f"{without['val_loss'].mean():.3f}",
        "with it": f"{delayed['val_loss'].mean():.3f}",
        "cost": strict.mean_text(costs.tolist()),
        "lr without delay": _rate(without),
        "lr with it": _rate(delayed),
    }


def _rate(runs: pd.DataFrame) -> str:
    """The learning rate of runs, which is one for all of them."""
    return f"{runs[RATE].iloc[0]:g}"
