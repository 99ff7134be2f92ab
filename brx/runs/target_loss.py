"""The training loss that a run proposes as the target of a slowdown; apart from `slowdown.py`, which needs scipy."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Series = NDArray[np.float64]

TAIL = 0.25
"""The share of a run, at its end, whose mean loss is the target that the run proposes."""


def last_quarter_loss(losses: Series) -> float:
    """A loss in nats that a run passes well before its end: the mean over its last quarter.

    It hardly moves with the noise of single iterations, and the run passes it about an eighth of its iterations before
    its end, so that what follows can confirm the passage. The highest of the runs that are compared is their target.

    Args:
        losses: (iterations,), the training loss of each in nats.
    """
    return float(np.mean(losses[-math.ceil(TAIL * len(losses)) :]))
