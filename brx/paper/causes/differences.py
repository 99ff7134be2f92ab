"""How the study's arms differ from one another by seed, as a table.

The verdicts of `predictions` judge what section 12 of the protocol predicted. These differences are
of what it only asks, such as whether corrections help.
"""

from __future__ import annotations

import pandas as pd

from brx.errors import UserError
from brx.paper import strict
from brx.paper.causes.arms import (
    ACCUMULATED,
    ADAMW,
    ADAMW_LITTLE,
    ADAN,
    DEEPEST,
    DELAYED,
    EIGENBASIS,
    EIGENBASIS_LITTLE,
    EIGHT,
    LION,
    MOMENTA,
    MOMENTUM_KEYS,
    MUON,
    ONE_UPDATE,
    PACI,
    RANDOM,
    RANDOM_LITTLE,
    ROTATED_LION,
    SCION,
    WITH_FEEDBACK,
    with_momentum,
)
from brx.paper.causes.study import Study
from brx.runs.trajectory import SEED

ArmAndDelay = tuple[str, str]  # an arm and a delay


def _pairs(arm: str, other: str, *delays: str) -> list[tuple[ArmAndDelay, ArmAndDelay]]:
    """Two arms under the same delays."""
    return [((arm, delay), (other, delay)) for delay in delays]


def _momenta() -> list[tuple[ArmAndDelay, ArmAndDelay]]:
    """Each method with the most momentum and with the least, under the longest delay."""
    pairs = []
    for method in MOMENTUM_KEYS:
        most = with_momentum(method, MOMENTA[-1])
        least = with_momentum(method, MOMENTA[0])
        pairs += _pairs(most, least, DEEPEST)
    return pairs


def _feedback() -> list[tuple[ArmAndDelay, ArmAndDelay]]:
    pairs = []
    for arm, without in WITH_FEEDBACK.items():
        pairs += _pairs(arm, without, ONE_UPDATE)
    return pairs


# Each with the place that it is compared with.
COMPARISONS = (
    *_pairs(RANDOM, ADAMW, *DELAYED),
    *_pairs(SCION, EIGENBASIS, DEEPEST),
    *_pairs(MUON, EIGENBASIS, DEEPEST),
    *_pairs(ROTATED_LION, EIGENBASIS, DEEPEST),
    *_pairs(LION, ADAMW, DEEPEST),
    *_momenta(),
    *_pairs(RANDOM_LITTLE, EIGENBASIS_LITTLE, DEEPEST),
    *_pairs(RANDOM_LITTLE, ADAMW_LITTLE, DEEPEST),
    *_pairs(ADAN, ADAMW, DEEPEST),
    *_pairs(ACCUMULATED, ADAMW, DEEPEST),
    # Over four micro-batches, 31 micro-batches are 7.75 updates; a pipeline of 8 stages has 7.
    ((ACCUMULATED, DEEPEST), (ADAMW, EIGHT)),
    *_pairs(ACCUMULATED, EIGENBASIS, DEEPEST),
    *_pairs(PACI, ACCUMULATED, DEEPEST),
    *_feedback(),
)


def difference_table(study: Study) -> pd.DataFrame:
    """A row per comparison whose runs there are: by how many nats the first arm's cost of delay,
    and its final validation losses with and without delay, are above the second's. Means over
    seeds with 95 % intervals. All cells are texts.

    Raises:
        UserError: there are no runs of two arms that are compared.
    """
    rows = []
    for ours, theirs in COMPARISONS:
        if not (study.has(*ours) and study.has(*theirs)):
            continue
        differences = _losses(study, ours) - _losses(study, theirs)
        differences = differences.dropna()  # seeds that one of the two lacks
        if len(differences):
            rows.append(_row(ours, theirs, differences))
    if not rows:
        raise UserError(f"{study.folder}: no runs of two arms that are compared")
    return pd.DataFrame(rows)


def _row(ours: ArmAndDelay, theirs: ArmAndDelay, differences: pd.DataFrame) -> dict[str, str]:
    row = {
        "arm": ours[0],
        "delay": ours[1],
        "compared with": theirs[0],
        "its delay": theirs[1],
        "seeds": str(len(differences)),
    }
    for name, by_seed in differences.items():
        row[str(name)] = strict.mean_text(by_seed.tolist(), "+")
    return row


def _losses(study: Study, place: ArmAndDelay) -> pd.DataFrame:
    """The final validation losses and the cost of an arm, in nats: a row per seed."""
    without, delayed = study.pair(*place)
    return pd.DataFrame(
        {
            "cost": study.cost(*place),
            "loss with delay": delayed.set_index(SEED)["val_loss"],
            "loss without": without.set_index(SEED)["val_loss"],
        }
    )
