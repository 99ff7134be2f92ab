"""Slowdown: how many times as many iterations training needs with delay. It is computed from arrays
of training losses alone.

Three steps, each a function:

1. `last_quarter_loss`: the highest among the runs that are compared is the loss to reach.
2. `iterations_to_target`: when a run passes this loss.
3. `iteration_ratio`: the ratio over seeds, with its interval.

`passage_error` says where chance decides the passage: on a plateau. docs/slowdown.md explains the
result, and benchmarks/slowdown_study.py compares it with the truth on loss curves whose slowdown is
known.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Series = NDArray[np.float64]

CONFIDENCE = 0.95

TAIL = 0.25
"""The last part of a run, as a share, whose mean loss the run proposes as the target."""

END = 0.02
"""The last part of a run, as a share, whose mean loss tells whether the run went on falling."""

PLATEAU = 0.2
"""A target is on a plateau if noise alone moves log(passage) by more than this standard deviation.
Then the ends of the runs cut passages off, and estimates of a slowdown of 3 come out 10 to 40 % low
(tests/runs)."""

NUM_BLOCKS = 16
"""The losses around a passage are cut into this number of blocks, to estimate the variance of
correlated noise."""

CHERNOFF = math.sqrt(0.26355964)
"""Standard deviation of argmax(W(t) - t^2), W Brownian motion (Groeneboom and Wellner, 2001, table
4)."""


class Reached(NamedTuple):
    """When one run passed the target."""

    iterations: float
    """The iterations until then; for a run that did not pass it, all that its schedule has."""
    is_reached: bool
    """False for a run that diverged, whatever it had reached before."""


@dataclass(frozen=True)
class IterationRatio:
    """Iterations of the delayed runs divided by iterations of the reference runs: the geometric
    mean over seeds."""

    ratio: float
    low: float | None
    """The lower end of the 95 % interval; None for a bound, and with fewer than two shared seeds.
    """
    high: float | None
    is_lower_bound: bool
    """A delayed run never reached the target."""


def last_quarter_loss(losses: Series) -> float:
    """A loss in nats that a run passes well before its end: the mean over its last quarter.

    It hardly moves with the noise of single iterations. The run passes it about an eighth of its
    iterations before its end, so that the rest of the run can confirm the passage.
    """
    return _mean_of_last(losses, TAIL)


def _mean_of_last(losses: Series, share: float) -> float:
    num_losses = math.ceil(share * len(losses))
    return float(np.mean(losses[-num_losses:]))


def iterations_to_target(iterations: Series, losses: Series, target: float) -> float | None:
    """When the monotone fit of a run's training losses falls to `target`.

    The fit is the decreasing curve nearest to the losses in least squares (isotonic regression).
    It is above `target` exactly up to the iteration at which the running sum of `losses - target`
    is largest (the switching relation of Groeneboom, Estimating a monotone density, 1985). Unlike a
    running mean it needs no window, and noise moves the passage either way alike.

    Args:
        iterations: (n,), increasing.
        losses: (n,), in nats.
        target: the target loss, in nats.

    Returns:
        The middle between the last iteration above the target and the first one below; the first
        iteration if none is above; None if the run ends above, or holds a loss that is not finite.

    Raises:
        ValueError: the target is not finite.
    """
    if not math.isfinite(target):
        raise ValueError(f"target {target}: must be a finite loss, in nats")
    if not np.isfinite(losses).all() or _lowest_loss(losses) > target:
        return None
    # S_t = sum over s <= t of (loss_s - target)
    sums = np.cumsum(losses - target)
    last_above = int(np.argmax(sums))
    if sums[last_above] <= 0:
        return float(iterations[0])
    if last_above + 1 == len(losses):
        return None
    return float(iterations[last_above] + iterations[last_above + 1]) / 2


def _lowest_loss(losses: Series) -> float:
    """The lowest loss that a run has surely reached.

    A few low losses at its very end pull the fit further down, but nothing after them confirms it.
    """
    return min(_mean_of_last(losses, TAIL), _mean_of_last(losses, END))


def passage_error(iterations: Series, losses: Series, passage: float) -> float:
    """The standard deviation of log(passage) that the noise of a run's losses makes.

    For the inverse of isotonic regression (Groeneboom, 1985) it is

        CHERNOFF (4 S / (b^2 passage))^(1/3).

    Losses fall by b nats per e-fold of iterations, and S is the variance of their noise per
    iteration, including the correlation of neighbours. Both are estimated from the iterations
    between half the passage and twice the passage.

    Args:
        iterations: (n,), increasing.
        losses: (n,), in nats.
        passage: when the losses passed the target, from `iterations_to_target`.

    Returns:
        Infinity if the losses do not fall there; 0 if there are too few to tell noise from trend.
    """
    around = (iterations >= passage / 2) & (iterations <= 2 * passage)
    x = np.log(iterations[around])
    y = losses[around]
    if len(y) < 4 * NUM_BLOCKS:
        return 0.0
    # b: minus the slope of the least-squares line through (log t, loss)
    x = x - x.mean()
    fall = -(x @ y) / (x @ x)
    if fall <= 0:
        return math.inf
    # S: neighbouring losses are correlated, means of long blocks hardly. A second difference of the
    # means m[i] - 2 m[i+1] + m[i+2] removes a smooth curve, and has 1 + 4 + 1 times their variance.
    length = len(y) // NUM_BLOCKS
    means = y[: NUM_BLOCKS * length].reshape(NUM_BLOCKS, length).mean(axis=1)
    variance = length * np.mean(np.diff(means, n=2) ** 2) / 6
    return float(CHERNOFF * (4 * variance / (fall**2 * passage)) ** (1 / 3))


def geometric_mean(iterations: Sequence[float]) -> float:
    """exp(mean of log)."""
    return math.exp(np.mean(np.log(iterations)))


def iterations_of(reached: Mapping[int, Reached], shared_seeds: Sequence[int]) -> list[float]:
    """The iterations of the shared seeds; of all seeds if none is shared.

    Args:
        reached: when the runs of one side passed the target, by seed.
        shared_seeds: the seeds that both sides have.
    """
    seeds = shared_seeds or list(reached)
    return [reached[seed].iterations for seed in seeds]


def iteration_ratio(
    delayed: Mapping[int, Reached], reference: Mapping[int, Reached]
) -> IterationRatio | None:
    """Divide the iterations of delayed runs by the iterations of reference runs.

    Runs of one seed share their initial weights and the order of their data, so the seeds that both
    sides have are compared in pairs. The interval is Student's t interval of the mean of
    log(delayed / reference) over these seeds. It comes from the spread between seeds, so a single
    seed has none.

    Args:
        delayed: when each delayed run passed the target, by seed.
        reference: the same for the reference runs.

    Returns:
        The ratio over the shared seeds; if there are none, over all seeds of each side. None if a
        reference run did not reach the target: then nothing bounds the ratio.
    """
    if not all(run.is_reached for run in reference.values()):
        return None
    shared = sorted(delayed.keys() & reference.keys())
    with_delay = iterations_of(delayed, shared)
    without = iterations_of(reference, shared)
    ratio = geometric_mean(with_delay) / geometric_mean(without)
    if not all(run.is_reached for run in delayed.values()):
        return IterationRatio(ratio, None, None, is_lower_bound=True)
    if len(shared) < 2:
        return IterationRatio(ratio, None, None, is_lower_bound=False)
    from scipy.special import stdtrit  # not needed for one seed, and slow to load

    log_ratios = np.log(with_delay) - np.log(without)
    standard_error = np.std(log_ratios, ddof=1) / math.sqrt(len(shared))
    t_quantile = stdtrit(len(shared) - 1, (1 + CONFIDENCE) / 2)
    factor = math.exp(t_quantile * standard_error)
    return IterationRatio(ratio, ratio / factor, ratio * factor, is_lower_bound=False)
