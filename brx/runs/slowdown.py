"""Slowdown: how many times the iterations training needs with delay, from arrays of training losses
alone.

Three steps, each a function: `last_quarter_loss`, whose highest among the runs that are compared is
the loss to reach; `iterations_to_target`, when a run passes it; `iteration_ratio`, the ratio over
seeds with its interval. `passage_error` says where a passage is chance: on a plateau.
docs/slowdown.md says what the result means, and benchmarks/slowdown_study.py how far it is from the
truth on loss curves whose slowdown is known."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Series = NDArray[np.float64]

CONFIDENCE = 0.95

TAIL = 0.25
"""The share of a run, at its end, whose mean loss is the target that the run proposes."""

END = 0.02
"""The share of a run, at its end, whose mean loss tells whether it went further than its last
quarter."""

PLATEAU = 0.2
"""A target is on a plateau where noise alone moves log(passage) by more than this (standard
deviation): passages are then cut off by the runs' ends, and estimates of a slowdown of 3 come out
10 to 40 % low (tests/runs)."""

NUM_BLOCKS = 16
"""Into which the losses around a passage are cut to estimate the variance of correlated noise."""

CHERNOFF = math.sqrt(0.26355964)
"""Standard deviation of argmax(W(t) - t^2), W Brownian motion (Groeneboom and Wellner, 2001, table
4)."""


class Reached(NamedTuple):
    """When one run passed the target."""

    iterations: float
    """Where it did; for a run that did not, all the iterations that its schedule gave it."""
    is_reached: bool
    """Not so for a run that diverged, whatever it had reached before."""


@dataclass(frozen=True)
class IterationRatio:
    """Iterations of the delayed runs divided by iterations of the reference runs, as geometric mean
    over seeds.

    `low` and `high` end the 95 % interval: None for a bound, and with fewer than two seeds in
    common. The ratio is a lower bound where a delayed run never reached the target."""

    ratio: float
    low: float | None
    high: float | None
    is_lower_bound: bool


def last_quarter_loss(losses: Series) -> float:
    """A loss in nats that a run passes well before its end: the mean over its last quarter.

    It hardly moves with the noise of single iterations, and the run passes it about an eighth of
    its iterations before its end, so that what follows can confirm the passage. The highest of the
    runs that are compared is their target."""
    return float(np.mean(losses[-math.ceil(TAIL * len(losses)) :]))


def iterations_to_target(iterations: Series, losses: Series, target: float) -> float | None:
    """Where the monotone fit of a run's training losses falls to `target`.

    The decreasing curve nearest to the losses in least squares (isotonic regression) is above
    `target` exactly up to the iteration at which the running sum of `losses - target` is largest
    (the switching relation of Groeneboom, Estimating a monotone density, 1985). The run is thus
    split where the losses before lie above the target and those after below it as clearly as they
    can: no window's width is to be chosen, and noise moves it either way alike.

    `iterations` (n,) increase, `losses` (n,) and `target` are in nats; ValueError where the target
    is not finite.

    Returns: The middle between the last iteration above and the first one below; the first
        iteration if none is above; None if the run ends above, or holds a loss that is not finite.
    """
    if not math.isfinite(target):
        raise ValueError(f"target {target}: must be a finite loss, in nats")
    if not np.isfinite(losses).all() or _lowest_loss(losses) > target:
        return None
    sums = np.cumsum(losses - target)
    last_above = int(np.argmax(sums))
    if sums[last_above] <= 0:
        return float(iterations[0])
    if last_above + 1 == len(losses):
        return None
    return float(iterations[last_above] + iterations[last_above + 1]) / 2


def _lowest_loss(losses: Series) -> float:
    """What a run has surely reached; a few low losses at its end pull the fit further down, and
    nothing confirms it."""
    return min(last_quarter_loss(losses), float(np.mean(losses[-math.ceil(END * len(losses)) :])))


def passage_error(iterations: Series, losses: Series, passage: float) -> float:
    """The standard deviation of log(passage) that the noise of a run's losses makes; infinite where
    they do not fall.

    For the inverse of isotonic regression it is (4 S / (b^2 passage))^(1/3) times Chernoff's
    (Groeneboom, 1985). Losses fall by b nats per e-fold of iterations, and S is the variance of
    their noise per iteration, including the correlation of neighbours. Both are estimated from half
    the passage to twice it. `passage` comes from `iterations_to_target`."""
    around = (iterations >= passage / 2) & (iterations <= 2 * passage)
    x, y = np.log(iterations[around]), losses[around]
    if len(y) < 4 * NUM_BLOCKS:
        return 0.0  # too few to separate noise and trend
    x = x - x.mean()
    fall = -(x @ y) / (x @ x)
    if fall <= 0:
        return math.inf
    length = len(y) // NUM_BLOCKS  # blocks' means are nearly independent, where neighbours are not
    means = y[: NUM_BLOCKS * length].reshape(NUM_BLOCKS, length).mean(axis=1)
    # Second differences remove a smooth curve.
    variance = length * np.mean(np.diff(means, n=2) ** 2) / 6
    return float(CHERNOFF * (4 * variance / (fall**2 * passage)) ** (1 / 3))


def geometric_mean(iterations: Sequence[float]) -> float:
    return math.exp(np.mean(np.log(iterations)))


def iteration_ratio(
    delayed: Mapping[int, Reached], reference: Mapping[int, Reached]
) -> IterationRatio | None:
    """The ratio of iterations over seeds.

    Runs of one seed share their initial weights and the order of their data, so that the seeds that
    both sides have are compared in pairs: the interval is Student's t interval of the mean of
    log(delayed / reference) over them. It is of the spread between seeds, and so there is none of
    one seed.

    Returns: Over the seeds in common; if there are none, over all of each side. None if a reference
        run did not reach the target: then nothing bounds the ratio.
    """
    if not all(run.is_reached for run in reference.values()):
        return None
    shared = sorted(delayed.keys() & reference.keys())
    ours = [delayed[seed].iterations for seed in shared or delayed]
    theirs = [reference[seed].iterations for seed in shared or reference]
    ratio = geometric_mean(ours) / geometric_mean(theirs)
    if not all(run.is_reached for run in delayed.values()):
        return IterationRatio(ratio, None, None, is_lower_bound=True)
    if len(shared) < 2:
        return IterationRatio(ratio, None, None, is_lower_bound=False)
    spread = np.std(np.log(ours) - np.log(theirs), ddof=1) / math.sqrt(len(shared))
    from scipy.special import stdtrit  # not needed for one seed, and slow to load

    # A quantile of Student's t
    factor = math.exp(stdtrit(len(shared) - 1, (1 + CONFIDENCE) / 2) * spread)
    return IterationRatio(ratio, ratio / factor, ratio * factor, is_lower_bound=False)
