"""Evidence on the paper's claims that does not come from sweeps: measurements at checkpoints, the
toy problems' files, and formulas.

As in `brx.paper.evidence`, every question is a function from a scale's `Experiments` to `Evidence`.
It raises a UserError if something has not been measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from brx.config.loading import preset_with
from brx.curvature.effective_delay import complete_measurements
from brx.curvature.norm_result import (
    SPACES,
    STRATEGY_SPACES,
    NormResult,
    Space,
    by_method_and_depth,
    results_of,
)
from brx.curvature.oscillation import Oscillation, usual_only
from brx.errors import UserError, counted
from brx.model.sizes import count_parameters
from brx.paper.evidence import Evidence, Margin, strictly_all
from brx.paper.measured_runs import measured_runs, refuse_doubles
from brx.paper.printed import DEVICES_GB, LLAMA_3_8B, LLAMAS, MEMORY_GIB, PARAMETERS, STAGE_COUNTS
from brx.paper.scales import Experiments
from brx.paper.strict import FEWEST_SEEDS, Strict
from brx.planning.memory_tables import overhead_texts
from brx.planning.plan import overhead_elements
from brx.planning.stage_count import stage_count_table
from brx.readers import read_json
from brx.runs.experiments import is_for_tuning, of_main_origin
from brx.runs.frames import DEPTH, load
from brx.runs.run import read_run
from brx.runs.slowdown import geometric_mean
from brx.runs.trajectory import RATE, SEED

TOYS = Path("results/toy")
MOST_CHANCE = 0.05  # p-value up to which a correlation counts
# A smaller slowdown counts as "hardly any" (docs/protocol.md, section 6).
HARDLY = 1.1
APPROXIMATELY = 0.01  # the relative error that the paper's "about" allows
SMALLEST = 1e-300  # takes the place of zero in a logarithm


def _folders(experiments: Experiments) -> list[Path]:
    """The folders of the scale's measured runs (`measured_runs`), which are read once."""
    scale = experiments.scale

    def runs() -> list[Path]:
        return measured_runs(scale, experiments)

    return experiments.once(("measured", scale.curvature), runs)


def _norms(
    experiments: Experiments, spaces: Sequence[Space], batches: int | None = None
) -> list[NormResult]:
    """The norms that were measured: for each run, those from its largest sample, or from the sample
    of `batches` batches.

    Their `run` is set to the folder in which the file is, because an exported file still names the
    folder where it was made."""
    norms = []
    for folder in _folders(experiments):
        measured = results_of(folder, spaces, batches=batches)
        norms += [norm.model_copy(update={"run": str(folder)}) for norm in measured.values()]
    return norms


def _seed(run: str | Path) -> int:
    """The seed of the run in a folder."""
    return read_run(Path(run)).config.training.seed


def norm_ratio(experiments: Experiments) -> Evidence:
    """The ratio of the Hessian's norm in rotated coordinates to the one in the original
    coordinates, at checkpoints of basis rotation with the largest delay.

    If half of the sample was measured, the interval also contains the ratio extrapolated to an
    infinite sample. If there are several samples, the largest decides."""
    original, rotated = _deepest_pairs(experiments)
    if not original:
        raise UserError("not measured in both coordinates at one checkpoint yet")
    depth = original[0].num_stages
    rise = _log_ratios(rotated, original)
    low, high = rise.interval or _range_of_intervals(rotated, original)
    text = f"{_mean(original):.3g} to {_mean(rotated):.3g}, P = {depth}; "
    if all(_has_extrapolation(norm) for norm in (*original, *rotated)):
        half = _log_ratios(rotated, original, which=1)
        extrapolated = _log_ratios(rotated, original, which=2)
        ends = extrapolated.interval or (extrapolated.mean,)
        low = min(low, *ends)
        high = max(high, *ends)
        text += (
            f"{math.exp(half.mean):.3g} from half the sample, "
            f"{math.exp(extrapolated.mean):.3g} extrapolated"
        )
    else:
        text += "raised by the noise of the batches, to an unknown extent"
    text += _smaller_samples(experiments, original[0].settings.batches_per_vector)
    return Evidence(
        math.exp(rise.mean),
        math.exp(low),
        math.exp(high),
        holds=math.exp(high) < 1,
        text=text,
        num_seeds=len(rise.by_seed),
    )


def _range_of_intervals(
    norms: Sequence[NormResult], others: Sequence[NormResult]
) -> tuple[float, float]:
    """The lowest and the highest end of the intervals of all pairs, as logarithms of ratios."""
    intervals = [_log_interval(norm, other) for norm, other in zip(norms, others, strict=True)]
    return min(low for low, _ in intervals), max(high for _, high in intervals)


def _has_extrapolation(norm: NormResult) -> bool:
    """Whether the norm extrapolated to an infinite sample is known, and all norms have a
    logarithm."""
    return min(norm.norms) > 0 and norm.norm_of_half is not None


def _deepest_pairs(
    experiments: Experiments, batches: int | None = None
) -> tuple[list[NormResult], list[NormResult]]:
    """Original and rotated norms at the same checkpoints of basis rotation with the largest delay;
    empty if there are none."""
    measured = _norms(experiments, SPACES, batches)
    our_norms = [norm for norm in measured if norm.method == "basis-rotation"]
    pairs = complete_measurements(our_norms, SPACES)
    deepest = max((norm.num_stages for norm, _ in pairs), default=None)
    shown = [pair for pair in pairs if pair[0].num_stages == deepest]
    return [original for original, _ in shown], [rotated for _, rotated in shown]


def _smaller_samples(experiments: Experiments, largest: int) -> str:
    """A text about samples of fewer batches than `largest`: the ratio from each, and what it was
    extrapolated to."""
    sizes = set()
    for folder, space in product(_folders(experiments), SPACES):
        for norm in NormResult.all_of(folder, name=f"hessian-norm-{space}"):
            sizes.add(norm.settings.batches_per_vector)
    text = ""
    for batches in sorted(size for size in sizes if size < largest):
        original, rotated = _deepest_pairs(experiments, batches)
        if not original:
            continue
        ratio = math.exp(_log_ratios(rotated, original).mean)
        text += f"; from {original[0].tokens:,} tokens {ratio:.3g}"
        if all(norm.norm_of_half is not None for norm in (*original, *rotated)):
            extrapolated = math.exp(_log_ratios(rotated, original, which=2).mean)
            text += f", which was extrapolated to {extrapolated:.3g}"
    return text


def theorem_order(experiments: Experiments, source: str) -> Evidence:
    """Wherever all coordinates were measured, the bilateral norm is below the unilateral norm, and
    the unilateral norm is below the original norm.

    `source` is the strategies' source, `1st` or `2nd`. With three seeds or more, intervals over the
    seeds decide, both of the samples' norms and of the extrapolated ones. With fewer seeds, the
    intervals of the single measurements must not overlap."""
    measured = complete_measurements(_norms(experiments, STRATEGY_SPACES))
    if not measured:
        raise UserError("norms by strategy have not been measured on one checkpoint yet")
    falling = ("original", f"{source}-unilateral", f"{source}-bilateral")
    all_norms = list(chain.from_iterable(measured))
    orders = []
    for (method, num_stages), alike in sorted(by_method_and_depth(all_norms).items()):
        norms = [[norm for norm in alike if norm.space == space] for space in falling]
        orders.append(_NormOrder.of(f"{method}, P = {num_stages}", norms))
    holds = all(order.holds for order in orders)
    num_seeds = min(order.num_seeds for order in orders)
    strictly: Strict = "open"
    if num_seeds >= FEWEST_SEEDS:
        if holds:
            strictly = "yes"
        elif any(order.is_reversed for order in orders):
            strictly = "no"
    text = "; ".join(order.text for order in orders)
    return Evidence(holds=holds, text=text, num_seeds=num_seeds, strict=strictly)


@dataclass(frozen=True)
class _NormOrder:
    """Whether the norms of one method at one number of stages fall as the theorem says."""

    text: str
    holds: bool  # each norm is below the one before by more than chance
    is_reversed: bool  # each norm is above the one before by more than chance
    num_seeds: int

    @classmethod
    def of(cls, name: str, norms: Sequence[Sequence[NormResult]]) -> _NormOrder:
        """Compare the norms of each space with those of the next one.

        Args:
            name: the method and its number of stages, for the text.
            norms: for each space, the norms of all seeds; the spaces are in the order in which the
                norms should fall.
        """
        unsure = []
        steps_back = []
        for higher, lower in pairwise(norms):
            steps_back.append(_surely_above(lower, higher))
            if not _surely_above(higher, lower):
                unsure.append(lower[0].space)
        means = ", ".join(f"{_mean(in_space):.3g}" for in_space in norms)
        by_chance = "".join(f" ({space}: not by more than chance)" for space in unsure)
        return cls(
            text=f"{name}: {means}{by_chance}",
            holds=not unsure,
            is_reversed=all(steps_back),
            num_seeds=len({_seed(norm.run) for norm in norms[0]}),
        )


def _mean(norms: Sequence[NormResult]) -> float:
    """The geometric mean over seeds, per parameter."""
    return geometric_mean([norm.normalized for norm in norms])


def _log_ratios(
    norms: Sequence[NormResult], others: Sequence[NormResult], which: int = 0
) -> Margin:
    """log(norm / other) of the pairs, by seed.

    `which` is an index into `NormResult.norms`: the sample's (0), half the sample's (1), or the
    extrapolated norm (2)."""
    by_seed = {}
    for norm, other in zip(norms, others, strict=True):
        by_seed[_seed(norm.run)] = _log(norm.norms[which]) - _log(other.norms[which])
    return Margin(pd.Series(by_seed))


def _log(norm: float) -> float:
    """The logarithm of a norm that may be zero."""
    return math.log(max(norm, SMALLEST))


def _log_interval(norm: NormResult, other: NormResult) -> tuple[float, float]:
    """The interval of log(norm / other) for one run, from the intervals of both."""
    low, high = norm.interval
    other_low, other_high = other.interval
    return math.log(max(low, SMALLEST) / other_high), math.log(high / max(other_low, SMALLEST))


def _surely_above(norms: Sequence[NormResult], others: Sequence[NormResult]) -> bool:
    """Whether norms are above others by more than chance.

    With enough seeds for an interval over them, that interval decides: the one of the samples'
    norms, and if all extrapolated norms are known, also theirs. Without it, the interval of every
    single measurement has to lie above the other's."""
    ratios = [_log_ratios(norms, others)]
    if all(len(norm.norms) > 1 for norm in (*norms, *others)):
        ratios.append(_log_ratios(norms, others, which=2))
    if ratios[0].interval:
        return all(ratio.holds for ratio in ratios)
    lowest, _ = _range_of_intervals(norms, others)
    return lowest > 0


def _variances(folders: Sequence[Path]) -> pd.DataFrame:
    """A row per checkpoint of basis rotation and PipeDream.

    The columns `dominant` and `random` are logarithms: of the variance of the updates there along
    the dominant eigenvector, and along a random direction."""
    rows = []
    for folder in folders:
        for measured in usual_only(Oscillation.all_of(folder)):
            if measured.method not in ("basis-rotation", "pipedream"):
                continue
            row = {
                "P": measured.num_stages,
                "method": measured.method,
                "seed": _seed(folder),
                "iteration": measured.iteration,
                "dominant": np.log(measured.dominant.variance),
                "random": np.log(measured.random.variance),
                "eigenvalue": measured.eigenvalue,
                "rate": read_run(folder).config.optimizer.lr,
            }
            rows.append(row)
    if not rows:
        raise UserError("not measured yet")
    return pd.DataFrame(rows)


def oscillates_less(experiments: Experiments, *, delayed: bool) -> Evidence:
    """At the same checkpoints, basis rotation's updates vary less along the dominant eigenvector
    than PipeDream's: at P = 1, or (`delayed`) at the largest P that was measured.

    Updates are proportional to the learning rate, and their variances to its square. So the strict
    verdict compares runs at one common learning rate; if there are none, it compares the variances
    divided by the square of the rate."""
    table = _variances(_folders(experiments))
    P = table["P"].max() if delayed else 1
    if delayed and P == 1:
        raise UserError("not measured under delay yet")
    both = _at_same_checkpoints(table[table["P"] == P])
    if both.empty:
        raise UserError(f"not measured with both methods at P = {P} yet")

    # log(PipeDream's variance / basis rotation's). Adding `rate_terms` divides each variance by the
    # square of its learning rate.
    differences = both["dominant_of_pipedream"] - both["dominant"]
    rate_terms = 2 * np.log(both["rate"] / both["rate_of_pipedream"])
    less = Margin(differences.groupby("seed").mean())
    less_per_square = Margin((differences + rate_terms).groupby("seed").mean())
    has_other_rates = bool((rate_terms != 0).any())

    text = _variances_text(both, P)
    if less.interval:
        text += f", basis rotation over PipeDream {_ratio_interval(less)}"
    text += f" ({counted(len(less.by_seed), 'seed')}, {counted(len(both), 'checkpoint')})"
    if has_other_rates:
        text += _per_square_text(less_per_square)
    num_plateaus = int((both["eigenvalue_of_pipedream"] < 0).sum())
    if num_plateaus:
        text += (
            f"; at {num_plateaus} of them PipeDream's dominant eigenvalue is negative, as on a "
            f"plateau"
        )
    common_text, at_common_rate = _less_at_common_rate(experiments, P)
    if at_common_rate is None:
        return less.evidence(text, strictly=less_per_square.strictly)
    if has_other_rates:
        text += common_text
    return less.evidence(text, strictly=at_common_rate.strictly)


def _per_square_text(less: Margin) -> str:
    """The ratio of basis rotation's variance to PipeDream's, each divided by the square of its
    learning rate; `less` has the logarithms of the inverse ratio."""
    ratio = np.exp(-less.mean)
    text = f"; over the square of the learning rate, basis rotation {ratio:.2g} of PipeDream's"
    if less.interval:
        text += f" {_ratio_interval(less)}"
    return text


def _at_same_checkpoints(table: pd.DataFrame) -> pd.DataFrame:
    """Basis rotation's rows of `_variances`, each with PipeDream's row at the same seed and
    iteration, whose columns end in `_of_pipedream`."""
    keys = ["seed", "iteration"]
    ours = table[table["method"] == "basis-rotation"].set_index(keys)
    theirs = table[table["method"] == "pipedream"].set_index(keys)
    return ours.merge(theirs, left_index=True, right_index=True, suffixes=("", "_of_pipedream"))


def _variances_text(both: pd.DataFrame, num_stages: int) -> str:
    """The geometric means of both methods' variances."""
    ours = np.exp(both["dominant"].mean())
    theirs = np.exp(both["dominant_of_pipedream"].mean())
    return (
        f"variance along the dominant eigenvector at P = {num_stages}: "
        f"basis rotation {ours:.2g}, PipeDream {theirs:.2g}"
    )


def _ratio_interval(less: Margin) -> str:
    """The interval of basis rotation's variance over PipeDream's; `less` is the logarithm of the
    inverse ratio."""
    assert less.interval is not None
    # The inverse ratio has the opposite logarithm, so the ends change places.
    low, high = np.exp(-np.array(less.interval[::-1]))
    return f"[{low:.2g}, {high:.2g}]"


def _less_at_common_rate(experiments: Experiments, P: int) -> tuple[str, Margin | None]:
    """Basis rotation's variance compared with PipeDream's at the common learning rate with the most
    checkpoints: a text, and the logarithms by seed (None if they share no rate)."""
    runs = load([experiments.scale.curvature])
    reported = runs[(runs["status"] == "finished") & ~is_for_tuning(runs)]
    reported = of_main_origin(reported)
    refuse_doubles(reported, RATE, "method", DEPTH, SEED)
    table = _variances([Path(str(run)) for run in reported.index])
    at_depth = table[table["P"] == P]
    by_place = at_depth.set_index(["rate", "seed", "iteration"])
    ours = by_place.loc[by_place["method"] == "basis-rotation", "dominant"]
    theirs = by_place.loc[by_place["method"] == "pipedream", "dominant"]
    differences = (theirs - ours).dropna()
    if differences.empty:
        return "", None
    rate = differences.groupby("rate").size().idxmax()
    less = Margin(differences.loc[rate].groupby("seed").mean())
    text = f"; at the common rate {rate:g}, basis rotation {np.exp(-less.mean):.2g} of PipeDream's"
    if less.interval:
        text += f" {_ratio_interval(less)}"
    return text, less


def stable_elsewhere(experiments: Experiments) -> Evidence:
    """At every P, the updates of both methods vary less along a random direction than along the
    dominant one."""
    table = _variances(_folders(experiments))
    if table["method"].nunique() < 2:
        raise UserError("not measured with both methods yet")
    table = table.assign(less=table["dominant"] - table["random"])
    margins = {
        key: Margin(rows.groupby("seed")["less"].mean())
        for key, rows in table.groupby(["method", "P"])
    }
    ratios = ", ".join(
        f"{method} at P = {P} {np.exp(-less.mean):.2g}" for (method, P), less in margins.items()
    )
    text = f"variance along a random direction over that along the dominant one: {ratios}"
    num_seeds = min(len(less.by_seed) for less in margins.values())
    return Evidence(
        holds=all(less.holds for less in margins.values()),
        text=text,
        num_seeds=num_seeds,
        strict=strictly_all(margins.values()),
    )


def _toy(name: str, take: Callable[[Any], Any]) -> Any:
    """Read a file that `brx toy` writes.

    Args:
        name: the name of the toy's file, without `.json`.
        take: picks the numbers from the file's content.

    Raises:
        UserError: the file is missing or damaged.
    """
    path = TOYS / f"{name}.json"
    if not path.is_file():
        raise UserError(f"{path} is not there yet")
    try:
        return take(read_json(path))
    except (LookupError, TypeError, ValueError) as error:
        raise UserError(f"{path}: not readable: {error}; brx toy writes it again") from None


def delay_hurts_where_misaligned(_: Experiments) -> Evidence:
    """On the quadratic, delay slows Adam if the eigenvectors lie between the axes, and hardly at
    all if they lie along the axes."""
    aligned, misaligned = _toy("quadratic", _slowdowns_of_adam)
    text = f"slowdown of Adam: aligned {aligned:.2f}, misaligned {misaligned:.2f}"
    return Evidence(holds=misaligned > aligned and aligned < HARDLY, text=text)


def _slowdowns_of_adam(content: Any) -> tuple[float, float]:
    """Adam's slowdowns, aligned and misaligned, from the content of `quadratic.json`; infinite if
    Adam never arrived."""
    slowdowns = {}
    for case in content["slowdowns"]:
        if case["optimizer"] == "Adam":
            slowdown = case["slowdown"]
            slowdowns[case["aligned"]] = math.inf if slowdown is None else float(slowdown)
    return slowdowns[True], slowdowns[False]


def misalignment_slows_on_the_spiral(_: Experiments) -> Evidence:
    """With the paper's settings of the spiral, misalignment and slowdown rise together, on a
    trajectory that arrives."""
    arrived, correlation, p_value = _toy("spiral", _correlation_on_spiral)
    small_arrived, with_small_steps, _ = _toy("spiral-small-steps", _correlation_on_spiral)
    text = f"rank correlation of misalignment and slowdown {correlation:.2f}"
    if not arrived:
        text += ", but Adam stops on the way"
    ending = "arrives" if small_arrived else "stops"
    text += f"; with smaller steps it {ending}: {with_small_steps:.2f}"
    return Evidence(holds=arrived and correlation > 0 and p_value < MOST_CHANCE, text=text)


def _correlation_on_spiral(content: Any) -> tuple[bool, float, float]:
    """Whether Adam arrives, the rank correlation, and its p-value.

    A constant has no correlation; the file then has null, which becomes NaN."""
    correlation, p_value = np.array([content["spearman"], content["p_value"]], dtype=float)
    return bool(content["arrived"]), float(correlation), float(p_value)


def memory_share(_: Experiments) -> Evidence:
    """The memory that 1st/unilateral adds for an MLP matrix of Llama-3-8B, divided by 4 m n, as the
    paper counts. (Adam's two moments are 2 m n.)"""
    m, n = LLAMA_3_8B["MLP"]
    overhead = overhead_elements((m, n), "1st", "unilateral")
    moment_share = overhead / (2 * m * n)
    text = (
        f"of 4mn as the paper counts, {1 / 16:.2%} with its m = 4n; {moment_share:.1%} of Adam's "
        f"two moments"
    )
    return Evidence(overhead / (4 * m * n), text=text)


def llama_overhead() -> pd.DataFrame:
    """A row per strategy of basis rotation: the memory that it adds for one attention matrix and
    one MLP matrix of Llama-3-8B. All cells are texts."""
    names = {shape: name for name, shape in LLAMA_3_8B.items()}
    _, texts = overhead_texts(dict.fromkeys(names, 1), names)
    return texts


def memory_of_strategies(_: Experiments) -> Evidence:
    """The memory of each strategy for Llama-3-8B's matrices is as printed."""
    table = llama_overhead()
    sizes = table.iloc[:, 4:6].to_numpy().tolist()  # columns of the attention and MLP matrices
    strategies = table["source"] + "/" + table["geometry"]
    texts = []
    for name, (attention, mlp) in zip(strategies, sizes, strict=True):
        texts.append(f"{name} {attention} and {mlp}")
    return Evidence(holds=sizes == MEMORY_GIB, text=f"attention and MLP: {', '.join(texts)} GiB")


def parameter_counts(_: Experiments) -> Evidence:
    """The presets have about as many parameters as the paper's models."""
    texts = []
    holds = True
    for preset, printed in PARAMETERS.items():
        config = preset_with(preset, {})
        count, _in_blocks = count_parameters(config.model, config.data.vocabulary_size)
        texts.append(f"{preset} {count / 1e6:,.1f} M")
        holds = holds and abs(count / printed - 1) < APPROXIMATELY
    return Evidence(holds=holds, text=", ".join(texts))


def stage_counts(_: Experiments) -> Evidence:
    """The least numbers of stages by model and device are as printed."""
    table = stage_count_table(LLAMAS, DEVICES_GB).set_index("model").filter(like=" GB")
    ours = {model: row.tolist() for model, row in table.iterrows()}
    differing = [model for model, counts in STAGE_COUNTS.items() if ours[model] != counts]
    text = f"{len(ours) - len(differing)} of {len(ours)} models as printed"
    if differing:
        text += (
            f"; not {', '.join(differing)}: the paper's formula, P >= 2 L, gives "
            f"{ours[differing[0]][0]}"
        )
    return Evidence(holds=not differing, text=text)
