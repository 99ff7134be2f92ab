"""How far the slowdowns of brx are from the truth, on loss curves whose slowdown is known.

Every run is a smooth curve plus independent noise at each iteration, with the noise of the
committed runs (autocorrelation below 0.05; standard deviation 0.16 to 0.21 nats; correlation 0.8
between two runs with the same seed, which see the same batches). The delayed curve is either the
reference's with its iterations multiplied by s, or another curve altogether. In the latter case,
the truth is the ratio of the iterations at which the two noise-free curves pass the target. Each
seed stretches a run's iterations by a lognormal factor, independently on both sides.

There are two tables: the estimate that `brx slowdown` uses, on every cell, and all candidates for
it, on a few cells.

    python -m benchmarks.slowdown_study [--repeats 2000] [--table estimate]
        # about 10 minutes on one core
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from benchmarks.report import Table, parser_of
from brx.runs.slowdown import (
    CONFIDENCE,
    Reached,
    iteration_ratio,
    iterations_to_target,
    last_quarter_loss,
)

Series = NDArray[np.float64]
Curve = Callable[[Series], Series]
"""Noise-free loss in nats at (fractional) iterations."""

ITERATIONS = 4000
NOISES = (0.02, 0.1, 0.2, 0.3)
STRETCHES = (1.0, 1.27, 2.0, 5.0)
SEEDS = (1, 3, 5)
SHARED_NOISE = 0.8
CHUNK = 100


def steep(x: Series) -> Series:
    """Power law; falls by 0.2 nats per e-fold at iteration 3,600."""
    return 1.2 + 6.0 * (x + 20) ** -0.25


def flat(x: Series) -> Series:
    """Power law that has almost converged; falls by 0.05 nats per e-fold at iteration 3,600."""
    return 2.5 + 2.5 * (x + 10) ** -0.35


def annealed(x: Series, length: float = ITERATIONS) -> Series:
    """Like the committed runs without delay: a power law, and what the cosine schedule gains on top
    of it."""
    return 1.55 + 4 * (x + 15) ** -0.35 + 0.15 * (1 + np.cos(np.pi * np.clip(x / length, 0, 1)))


def plateau(x: Series, length: float = ITERATIONS) -> Series:
    """Like the committed runs at P = 32: hardly any progress until the schedule has lowered the
    learning rate."""
    return 2.35 + 2.0 * (x + 20) ** -0.5 + 0.25 * (1 + np.cos(np.pi * np.clip(x / length, 0, 1)))


@dataclass(frozen=True)
class Cell:
    """One kind of comparison.

    Attributes:
        name: the name of its curves.
        reference: the noise-free curve without delay.
        delayed: the noise-free curve with delay.
        stretch: s; None if neither curve is a stretch of the other.
        spread: standard deviations over seeds of log(iterations), for the reference and for the
            delayed runs.
        length: iterations of every run.
        others: the number of further runs, as slow as the delayed ones, that help to choose the
            target.
        alike: the correlation between the factors that a seed gives to the two sides.
    """

    name: str
    reference: Curve
    delayed: Curve
    stretch: float | None
    spread: tuple[float, float]
    length: int = ITERATIONS
    others: int = 0
    alike: float = 0.0

    def log_ratio(self, target: float) -> float:
        """The true slowdown at a target, as a logarithm."""
        if self.stretch is not None:
            return math.log(self.stretch)
        # np.interp needs rising values, and both curves fall. Seeds do not change the truth: the
        # logarithm of a seed's factor has a mean of 0.
        log_x, (delayed, reference) = self._inverses
        return float(np.interp(-target, -delayed, log_x) - np.interp(-target, -reference, log_x))

    @cached_property
    def _inverses(self) -> tuple[Series, tuple[Series, Series]]:
        log_x = np.linspace(0, math.log(2.0 * self.length), 20_000)
        return log_x, (self.delayed(np.exp(log_x)), self.reference(np.exp(log_x)))


class Runs(NamedTuple):
    """Losses of both sides, (seeds, iterations), and of the other runs that help to choose the
    target."""

    reference: Series
    delayed: Series
    others: Series


def stretched(curve: Curve, stretch: float) -> Curve:
    """The curve that reaches every loss after `stretch` times as many iterations."""
    return lambda x: curve(x / stretch)


def cells() -> Iterator[Cell]:
    """The comparisons of the first table."""
    for spread, stretches in (((0.0, 0.0), STRETCHES), ((0.1, 0.2), (1.27, 5.0))):
        for curve in (steep, flat, annealed, plateau):
            for stretch in stretches:
                yield Cell(curve.__name__, curve, stretched(curve, stretch), stretch, spread)
        yield Cell("annealed, plateau", annealed, plateau, None, spread)
        yield Cell("annealed, flat", annealed, flat, None, spread)
    yield Cell("annealed, plateau", annealed, plateau, None, (0.1, 0.5))
    yield Cell(
        "annealed, 20 more runs", annealed, stretched(annealed, 2.0), 2.0, (0.1, 0.2), others=20
    )
    for stretch in (1.27, 5.0):
        curve = long_annealed
        yield Cell(
            "annealed, 32,000", curve, stretched(curve, stretch), stretch, (0.1, 0.2), length=32_000
        )


def long_annealed(x: Series) -> Series:
    """`annealed` over 32,000 iterations."""
    return annealed(x, 32_000)


def simulate(
    cell: Cell, noises: tuple[float, ...], repeats: int, seed: int
) -> Iterator[tuple[float, Runs]]:
    """Draw the runs of `repeats` comparisons at every noise, as pairs of the noise and the runs.

    One draw serves all noises. Numbers are rounded up to whole chunks."""
    rng = np.random.default_rng(seed)
    iterations = np.arange(1, cell.length + 1, dtype=np.float32)
    seeds, chunk = max(SEEDS), max(1, CHUNK * ITERATIONS // cell.length)
    for _ in range(0, repeats, chunk):
        # Of the reference, the delayed and the other runs: factors of seeds, and noise.
        slow, errors = [], []
        for number in (seeds, seeds, cell.others):
            slow.append(rng.standard_normal((chunk, number, 1)))
            errors.append(rng.standard_normal((chunk, number, cell.length), dtype=np.float32))
        # Correlate the delayed runs with the reference runs of the same seed.
        for drawn, correlation in ((slow, cell.alike), (errors, SHARED_NOISE)):
            drawn[1] = correlation * drawn[0] + math.sqrt(1 - correlation**2) * drawn[1]
        clean = [
            curve(iterations * np.exp(-spread * one).astype(np.float32))
            for curve, spread, one in (
                (cell.reference, cell.spread[0], slow[0]),
                (cell.delayed, cell.spread[1], slow[1]),
                (cell.delayed, cell.spread[1], slow[2]),
            )
        ]
        for noise in noises:
            noisy = [one + noise * error for one, error in zip(clean, errors, strict=True)]
            for runs in zip(*noisy, strict=True):
                yield noise, Runs(*runs)


@dataclass
class Outcome:
    """The errors of a rule over the repeats of one cell, at one noise and one number of seeds."""

    errors: list[float] = field(default_factory=list)
    """log(estimate / truth)."""
    covered: list[bool] = field(default_factory=list)
    widths: list[float] = field(default_factory=list)
    """Logarithm of the interval's upper end over its lower one."""
    num_bounds: int = 0
    """Repeats in which a run never reached the target."""

    @property
    def bias(self) -> float:
        """How far the geometric mean of the estimates is from the truth, as a share of it."""
        return math.expm1(np.mean(self.errors))

    @property
    def coverage(self) -> float:
        """The share of the intervals that contain the truth."""
        return float(np.mean(self.covered))

    @property
    def width(self) -> float:
        """The median over intervals of upper end / lower end."""
        return math.exp(np.median(self.widths))

    def add(self, truth: float, ratio: float, low: float | None, high: float | None) -> None:
        """Add an estimate with the ends of its interval; `truth` is a logarithm."""
        self.errors.append(math.log(ratio) - truth)
        if low is not None and high is not None:
            self.covered.append(math.log(low) - 1e-12 <= truth <= math.log(high) + 1e-12)
            self.widths.append(math.log(high / low))


def study(cell: Cell, repeats: int, seed: int) -> Mapping[tuple[float, int], Outcome]:
    """How good the estimate of `brx slowdown` is on a cell, by noise and number of seeds."""
    outcomes = {(noise, seeds): Outcome() for noise in NOISES for seeds in SEEDS}
    iterations = np.arange(1.0, cell.length + 1)

    def reached(runs: Series, target: float) -> dict[int, Reached]:
        passages = [iterations_to_target(iterations, losses, target) for losses in runs]
        return {
            seed: Reached(cell.length if one is None else one, one is not None)
            for seed, one in enumerate(passages)
        }

    for noise, runs in simulate(cell, NOISES, repeats, seed):
        for seeds in SEEDS:
            sides = runs.reference[:seeds], runs.delayed[:seeds]
            target = max(map(last_quarter_loss, (*sides[0], *sides[1], *runs.others)))
            estimate = iteration_ratio(reached(sides[1], target), reached(sides[0], target))
            outcome = outcomes[noise, seeds]
            if estimate is None or estimate.is_lower_bound:
                outcome.num_bounds += 1
            else:
                outcome.add(cell.log_ratio(target), estimate.ratio, estimate.low, estimate.high)
    return outcomes


# The other candidates differ in how the target is chosen, when a run passes it, and how the
# interval is computed.


def final_loss(losses: Series) -> float:
    """The mean over the last 2 % of the iterations."""
    return float(np.mean(losses[-len(losses) // 50 :]))


def last_tenth(losses: Series) -> float:
    """The mean over the last tenth."""
    return float(np.mean(losses[-len(losses) // 10 :]))


def last_passage(iterations: Series, losses: Series, target: float) -> float | None:
    """The iteration from which a centred mean over 2 % of the iterations stays at or below the
    target."""
    window = len(losses) // 100 * 2 - 1
    sums = np.cumsum(np.concatenate([[0.0], losses]))
    means = (sums[window:] - sums[:-window]) / window
    above = np.flatnonzero(means > target)
    if len(above) == 0:
        return float(iterations[window // 2])
    return None if above[-1] + 1 == len(means) else float(iterations[window // 2 + above[-1]] + 0.5)


def line_through_passage(iterations: Series, losses: Series, target: float) -> float | None:
    """The iteration at which a fitted line meets the target.

    The line is fitted in log(iteration), from 1 / 1.3 to 1.3 times the iteration at which the
    monotone fit passes the target. That iteration is the answer if the line meets the target
    outside of this range."""
    passage = iterations_to_target(iterations, losses, target)
    if passage is None:
        return None
    part = slice(int(passage / 1.3), max(int(passage * 1.3), int(passage / 1.3) + 3))
    slope, level = np.polyfit(np.log(iterations[part] / passage), losses[part], 1)
    shift = math.exp((target - level) / slope) if slope < 0 else 1.0
    return passage * shift if 1 / 1.3 < shift < 1.3 else passage


def whole_curve_stretch(reference: Series, delayed: Series) -> float:
    """The stretch by which the reference's curve fits the delayed one best, by least squares over
    log(iteration).

    Both curves are averaged over steps of 2 % in iterations, from iteration 40 on.
    """
    edges = np.unique(
        (40 * 1.02 ** np.arange(math.log(len(reference) / 40) / math.log(1.02))).astype(int)
    )
    centres = np.log((edges[:-1] + edges[1:]) / 2)
    means = [
        np.add.reduceat(losses[: edges[-1]], edges[:-1]) / np.diff(edges)
        for losses in (reference, delayed)
    ]
    shifts = np.log(np.geomspace(0.5, 10, 150))
    distances = []
    for shift in shifts:
        overlap = (centres - shift >= centres[0]) & (centres - shift <= centres[-1])
        moved = np.interp(centres[overlap] - shift, centres, means[0])
        distances.append(np.mean((moved - means[1][overlap]) ** 2))
    return math.exp(shifts[int(np.argmin(distances))])


Interval = Callable[[Series, Series], tuple[float, float, float]]
"""Takes the logarithms of the iterations that delayed and reference runs needed. Returns the
logarithm of the ratio and of the ends of its interval."""


def paired_t(ours: Series, theirs: Series) -> tuple[float, float, float]:
    """The interval of `brx slowdown`."""
    ratio = iteration_ratio(
        *({i: Reached(math.exp(x), True) for i, x in enumerate(side)} for side in (ours, theirs))
    )
    assert ratio is not None
    assert ratio.low is not None
    assert ratio.high is not None
    return math.log(ratio.ratio), math.log(ratio.low), math.log(ratio.high)


def welch(ours: Series, theirs: Series) -> tuple[float, float, float]:
    """The interval of two independent means of unequal variances."""
    variances = np.array([np.var(side, ddof=1) / len(side) for side in (ours, theirs)])
    centre, total = float(ours.mean() - theirs.mean()), float(variances.sum())
    freedom = total**2 / max(float((variances**2).sum()), 1e-300) * (len(ours) - 1)
    half = float(stdtrit(max(freedom, 1.0), (1 + CONFIDENCE) / 2)) * math.sqrt(total)
    return centre, centre - half, centre + half


def bootstrap(ours: Series, theirs: Series) -> tuple[float, float, float]:
    """The ratio of means, with a percentile bootstrap over pairs of runs."""
    draws = np.random.default_rng(0).integers(len(ours), size=(999, len(ours)))
    ratios = np.log(np.exp(ours)[draws].mean(axis=1) / np.exp(theirs)[draws].mean(axis=1))
    low, high = np.quantile(ratios, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(np.log(np.exp(ours).mean() / np.exp(theirs).mean())), float(low), float(high)


class Rule(NamedTuple):
    """A candidate for the estimate: how it chooses the target, finds when a run passes it, and
    computes the interval."""

    name: str
    candidate_target: Callable[[Series], float]
    passage: Callable[[Series, Series, float], float | None]
    interval: Interval


RULES = (
    Rule(
        "before: final loss, last passage of a 2 % mean, bootstrap",
        final_loss,
        last_passage,
        bootstrap,
    ),
    Rule("before, with the t interval", final_loss, last_passage, paired_t),
    Rule("last quarter, last passage of a 2 % mean, t", last_quarter_loss, last_passage, paired_t),
    Rule("final loss, monotone fit, t", final_loss, iterations_to_target, paired_t),
    Rule("last tenth, monotone fit, t", last_tenth, iterations_to_target, paired_t),
    Rule("**last quarter, monotone fit, t**", last_quarter_loss, iterations_to_target, paired_t),
    Rule("last quarter, monotone fit, Welch's t", last_quarter_loss, iterations_to_target, welch),
    Rule(
        "last quarter, monotone fit, bootstrap", last_quarter_loss, iterations_to_target, bootstrap
    ),
    Rule(
        "last quarter, monotone fit refined by a line, t",
        last_quarter_loss,
        line_through_passage,
        paired_t,
    ),
)
WHOLE_CURVES = "stretch of the whole curves, t"


def candidate_cells() -> Iterator[tuple[str, Cell, float]]:
    """The comparisons of the second table, with their noise."""
    for name, noise, spread in (
        ("noise 0.02", 0.02, (0.0, 0.0)),
        ("noise 0.2, seeds", 0.2, (0.1, 0.2)),
    ):
        for curve, stretch in (
            (steep, 1.0),
            (steep, 5.0),
            (flat, 1.27),
            (flat, 5.0),
            (annealed, 2.0),
        ):
            yield (
                name,
                Cell(curve.__name__, curve, stretched(curve, stretch), stretch, spread),
                noise,
            )
        yield name, Cell("annealed, plateau", annealed, plateau, None, spread), noise
    yield (
        "noise 0.2, seeds alike",
        Cell("annealed", annealed, stretched(annealed, 2.0), 2.0, (0.2, 0.2), alike=0.9),
        0.2,
    )


def compare(
    cell: Cell, noise: float, repeats: int, seed: int, seeds: int = 3
) -> Mapping[str, Outcome]:
    """How good every candidate is on one cell."""
    outcomes = {name: Outcome() for name in [*(rule.name for rule in RULES), WHOLE_CURVES]}
    iterations = np.arange(1.0, cell.length + 1)
    for _, runs in simulate(cell, (noise,), repeats, seed):
        reference, delayed = runs.reference[:seeds], runs.delayed[:seeds]
        for rule in RULES:
            target = max(rule.candidate_target(losses) for losses in (*reference, *delayed))
            passages = np.array(
                [
                    [rule.passage(iterations, losses, target) or cell.length for losses in side]
                    for side in (delayed, reference)
                ]
            )
            ratio, low, high = rule.interval(*np.log(passages))
            outcomes[rule.name].add(cell.log_ratio(target), *map(math.exp, (ratio, low, high)))
        stretches = [whole_curve_stretch(*pair) for pair in zip(reference, delayed, strict=True)]
        estimate = paired_t(np.log(stretches), np.zeros(seeds))
        target = max(map(last_quarter_loss, (*reference, *delayed)))
        outcomes[WHOLE_CURVES].add(cell.log_ratio(target), *map(math.exp, estimate))
    return outcomes


def write_estimate_table(repeats: int) -> None:
    """Write the table of the estimate of `brx slowdown`, on every cell."""
    table = Table(
        "slowdown", ["curves", "s", "seeds vary by", *(f"noise {noise:g}" for noise in NOISES)]
    )
    biases: dict[tuple[float, int], list[float]] = defaultdict(list)
    coverages: dict[tuple[float, int], list[float]] = defaultdict(list)
    of_same_curves: list[float] = []
    num_bounds = 0
    for number, cell in enumerate(cells()):
        outcomes = study(cell, repeats, number)
        texts = []
        for noise in NOISES:
            one, three, five = (outcomes[noise, seeds] for seeds in SEEDS)
            texts.append(f"{three.bias:+.1%}; {three.coverage:.1%}, {five.coverage:.1%}")
            num_bounds += one.num_bounds + three.num_bounds + five.num_bounds
            for seeds, outcome in zip(SEEDS, (one, three, five), strict=True):
                biases[noise, seeds].append(outcome.bias)
                if seeds > 1:
                    is_same = cell.stretch == 1 and cell.spread == (0, 0)
                    (of_same_curves if is_same else coverages[noise, seeds]).append(
                        outcome.coverage
                    )
        stretch = "no stretch" if cell.stretch is None else f"{cell.stretch:g}"
        table.add(cell.name, stretch, f"{cell.spread[0]:g}, {cell.spread[1]:g}", *texts)
        print(*table.rows[-1], sep=" | ", flush=True)
    table.write(
        f"The estimate of `brx slowdown` on runs whose slowdown is known, {repeats:,} repeats per "
        f"cell",
        "Per cell: bias with three seeds; coverage of the 95 % interval with three and with five. "
        "s: stretch of the"
        " delayed curve; seeds vary by: standard deviation over seeds of log(iterations), of the "
        "reference and of the"
        " delayed runs; noise: per iteration, in nats. Bias: of the geometric mean over repeats. "
        "4,000 iterations"
        " where nothing else is said; the curves are in benchmarks/slowdown_study.py. The tables' "
        "own standard errors:"
        " half a point of coverage, and of bias up to 0.7 % (at the widest spread over seeds; 1.2 "
        "% with one seed).",
        f"Bias at noise up to 0.2: {_ranges(biases, NOISES[:-1], '+.1%')}. At noise 0.3:"
        f" {_ranges(biases, NOISES[-1:], '+.1%')}.",
        f"Coverage at noise up to 0.2: {_ranges(coverages, NOISES[:-1], '.1%')}. At noise 0.3:"
        f" {_ranges(coverages, NOISES[-1:], '.1%')}. Without the cells of one and the same curve "
        f"(s = 1, seeds that do"
        " not vary), where both runs pass the target at the same lucky batch, most differences are "
        "exactly 0, and the"
        f" interval is too wide: {min(of_same_curves):.1%} to {max(of_same_curves):.1%}.",
        f"Repeats with a bound instead of an estimate: {num_bounds}.",
    )


def _ranges(
    numbers: Mapping[tuple[float, int], list[float]], noises: Sequence[float], form: str
) -> str:
    """Lowest and highest over cells, by number of seeds."""
    texts = []
    for seeds in SEEDS:
        if of_seeds := [number for noise in noises for number in numbers.get((noise, seeds), [])]:
            name = "one seed" if seeds == 1 else f"{seeds} seeds"
            texts.append(f"{name} {min(of_seeds):{form}} to {max(of_seeds):{form}}")
    return "; ".join(texts)


def write_candidate_table(repeats: int) -> None:
    """Write the table of all candidates, on a few cells."""
    chosen = list(candidate_cells())
    heads = [
        f"{name}: {cell.name}, {'no stretch' if cell.stretch is None else f's {cell.stretch:g}'}"
        for name, cell, _ in chosen
    ]
    table = Table("slowdown-candidates", ["target, passage, interval", *heads])
    outcomes = [compare(cell, noise, repeats, seed) for seed, (_, cell, noise) in enumerate(chosen)]
    for name in outcomes[0]:
        table.add(
            name,
            *(
                f"{by_name[name].bias:+.1%}, {by_name[name].coverage:.0%}, x "
                f"{by_name[name].width:.2f}"
                for by_name in outcomes
            ),
        )
    table.write(
        f"Candidates for the estimate of a slowdown, three seeds, {repeats:,} repeats per cell",
        "Bias, coverage of the 95 % interval, its median width (upper over lower end). In bold: "
        "what `brx slowdown`"
        " uses. A run that does not reach the target counts with all its iterations. The first six "
        "cells: noise 0.02"
        " nats per iteration and no other difference between seeds; the others: noise 0.2, and "
        "seeds vary by a factor"
        " with a standard deviation of 0.1 (reference) and 0.2 (delayed) in log(iterations); in "
        "the last cell of 0.2"
        " on both sides, with a correlation of 0.9.",
    )


def main() -> None:
    """Write the tables."""
    parser = parser_of(__doc__, repeats=2000)
    parser.add_argument(
        "--candidate-repeats", type=int, default=500, help="per cell of the second table"
    )
    parser.add_argument("--table", choices=["estimate", "candidates"], help="only this one")
    options = parser.parse_args()
    if options.table != "candidates":
        write_estimate_table(options.repeats)
    if options.table != "estimate":
        write_candidate_table(options.candidate_repeats)


if __name__ == "__main__":
    main()
