"""What else says something on the paper's claims: measurements at checkpoints, the toy problems'
files, formulas."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
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
from brx.curvature.oscillation import Oscillation
from brx.errors import UserError
from brx.model.sizes import count_parameters
from brx.paper.evidence import Evidence, Margin, strictly_all
from brx.paper.printed import DEVICES_GB, LLAMA_3_8B, LLAMAS, MEMORY_GIB, PARAMETERS, STAGE_COUNTS
from brx.paper.scales import Experiments
from brx.paper.strict import FEWEST_SEEDS, Strict
from brx.planning.memory_tables import overhead_texts
from brx.planning.plan import overhead_elements
from brx.planning.stage_count import stage_count_table
from brx.readers import read_json
from brx.runs.experiments import at_best_rates
from brx.runs.frames import load, read_run
from brx.runs.slowdown import geometric_mean

TOYS = Path("results/toy")
MOST_CHANCE = 0.05
HARDLY = (
    1.1  # the slowdown below which delay hardly slows: by less than a tenth (docs/protocol.md, 6)
)
APPROXIMATELY = 0.01


def _folders(experiments: Experiments) -> list[Path]:
    """The runs among which the measured ones are: of each experiment those at its best rate."""
    return [Path(run) for run in at_best_rates(load([experiments.scale.curvature])).index]


def _norms(
    experiments: Experiments, spaces: Sequence[Space], batches: int | None = None
) -> list[NormResult]:
    """What was measured, by default with each run's largest sample.

    Each has the folder in which it lies as its run: exported ones name where they were made."""
    norms = []
    for folder in _folders(experiments):
        measured = results_of(folder, spaces, batches=batches)
        norms += [norm.model_copy(update={"run": str(folder)}) for norm in measured.values()]
    return norms


def _seed(run: str | Path) -> int:
    return read_run(Path(run)).config.training.seed


def norm_ratio(experiments: Experiments) -> Evidence:
    """Rotated over original norm, at checkpoints of basis rotation with the largest delay.

    Where half of the sample was measured, the interval holds the ratio extrapolated to an infinite
    one, too. Where there are several samples, the largest decides."""
    original, rotated = _deepest_pairs(experiments)
    if not original:
        raise UserError("not measured in both coordinates at one checkpoint yet")
    depth = original[0].num_stages
    rise = _log_ratios(rotated, original)
    sampled = [_log_interval(below, above) for below, above in zip(rotated, original, strict=True)]
    low, high = rise.interval or (min(low for low, _ in sampled), max(high for _, high in sampled))
    text = f"{_mean(original):.3g} to {_mean(rotated):.3g}, P = {depth}; "
    if all(min(norm.norms) > 0 and norm.norm_of_half is not None for norm in (*original, *rotated)):
        half, extrapolated = (_log_ratios(rotated, original, which) for which in (1, 2))
        ends = extrapolated.interval or (extrapolated.mean,)
        low, high = min(low, *ends), max(high, *ends)
        text += (
            f"{math.exp(half.mean):.3g} from half the sample, "
            f"{math.exp(extrapolated.mean):.3g} extrapolated"
        )
    else:
        text += "raised by the noise of the batches, by how much is not known"
    text += _smaller_samples(experiments, original[0].settings.batches_per_vector)
    low, high = math.exp(low), math.exp(high)
    return Evidence(
        math.exp(rise.mean), low, high, holds=high < 1, text=text, num_seeds=len(rise.by_seed)
    )


def _deepest_pairs(
    experiments: Experiments, batches: int | None = None
) -> tuple[list[NormResult], list[NormResult]]:
    """Original and rotated norms at the same checkpoints of basis rotation, with its largest delay;
    empty where there are none."""
    measured = _norms(experiments, SPACES, batches)
    of_ours = [norm for norm in measured if norm.method == "basis-rotation"]
    pairs = complete_measurements(of_ours, SPACES)
    deepest = max((norm.num_stages for norm, _ in pairs), default=None)
    shown = [pair for pair in pairs if pair[0].num_stages == deepest]
    return [original for original, _ in shown], [rotated for _, rotated in shown]


def _smaller_samples(experiments: Experiments, largest: int) -> str:
    """What samples of fewer batches said, and what their extrapolation promised of larger ones."""
    sizes = {
        norm.settings.batches_per_vector
        for folder in _folders(experiments)
        for space in SPACES
        for norm in NormResult.all_of(folder, name=f"hessian-norm-{space}")
    }
    text = ""
    for batches in sorted(size for size in sizes if size < largest):
        original, rotated = _deepest_pairs(experiments, batches)
        if not original:
            continue
        ratio = math.exp(_log_ratios(rotated, original).mean)
        text += f"; from {original[0].tokens:,} tokens {ratio:.3g}"
        if all(norm.norm_of_half is not None for norm in (*original, *rotated)):
            promised = math.exp(_log_ratios(rotated, original, 2).mean)
            text += f", which was extrapolated to {promised:.3g}"
    return text


def theorem_order(experiments: Experiments, source: str) -> Evidence:
    """Wherever all coordinates were measured, bilateral is below unilateral, and that below
    original.

    With three seeds or more by the intervals over them of the samples' norms and of those
    extrapolated, else by more than the intervals of every measurement."""
    measured = complete_measurements(_norms(experiments, STRATEGY_SPACES))
    if not measured:
        raise UserError("norms by strategy have not been measured on one checkpoint yet")
    falling = ("original", f"{source}-unilateral", f"{source}-bilateral")
    lines, holds, num_seeds, is_reversed = [], True, [], False
    of_all = [norm for of_run in measured for norm in of_run]
    for (method, P), of_seeds in sorted(by_method_and_depth(of_all).items()):
        norms = [[norm for norm in of_seeds if norm.space == space] for space in falling]
        unsure = [
            lower[0].space for higher, lower in pairwise(norms) if not _surely_above(higher, lower)
        ]
        holds = holds and not unsure
        steps_back = [_surely_above(lower, higher) for higher, lower in pairwise(norms)]
        is_reversed = is_reversed or all(steps_back)
        means = ", ".join(f"{_mean(of_space):.3g}" for of_space in norms)
        by_chance = "".join(f" ({space}: not by more than chance)" for space in unsure)
        lines.append(f"{method}, P = {P}: {means}{by_chance}")
        num_seeds.append(len({_seed(norm.run) for norm in norms[0]}))
    strictly: Strict = "open"
    if min(num_seeds) >= FEWEST_SEEDS:
        if holds:
            strictly = "yes"
        elif is_reversed:
            strictly = "no"
    return Evidence(holds=holds, text="; ".join(lines), num_seeds=min(num_seeds), strict=strictly)


def _mean(norms: Sequence[NormResult]) -> float:
    """Geometric, over seeds, per parameter."""
    return geometric_mean([norm.normalized for norm in norms])


def _log_ratios(
    norms: Sequence[NormResult], others: Sequence[NormResult], which: int = 0
) -> Margin:
    """The logarithm of the ratio of two norms of one run, by its seed; `which` of
    `NormResult.norms`."""
    logs = ([math.log(max(norm.norms[which], 1e-300)) for norm in side] for side in (norms, others))
    return Margin(
        pd.Series({_seed(norm.run): a - b for norm, a, b in zip(norms, *logs, strict=True)})
    )


def _log_interval(norm: NormResult, other: NormResult) -> tuple[float, float]:
    """An interval of the logarithm of the ratio of a run's two norms, from both intervals."""
    (low, high), (other_low, other_high) = norm.interval, other.interval
    return math.log(max(low, 1e-300) / other_high), math.log(high / max(other_low, 1e-300))


def _surely_above(norms: Sequence[NormResult], others: Sequence[NormResult]) -> bool:
    whiches = (0, 2) if all(len(norm.norms) > 1 for norm in (*norms, *others)) else (0,)
    ratios = [_log_ratios(norms, others, which) for which in whiches]
    if ratios[0].interval:
        return all(ratio.holds for ratio in ratios)
    return all(_log_interval(norm, other)[0] > 0 for norm, other in zip(norms, others, strict=True))


def _variances(folders: Sequence[Path]) -> pd.DataFrame:
    """Variances of the updates of both methods along the dominant and a random direction, as
    logarithms."""
    columns = ["P", "method", "seed", "iteration", "dominant", "random", "eigenvalue", "rate"]
    rows = [
        (
            one.num_stages,
            one.method,
            _seed(folder),
            one.iteration,
            np.log(one.dominant.variance),
            np.log(one.random.variance),
            one.eigenvalue,
            read_run(folder).config.optimizer.lr,
        )
        for folder in folders
        for one in Oscillation.all_of(folder)
        if one.method in ("basis-rotation", "pipedream")
    ]
    if not rows:
        raise UserError("not measured yet")
    return pd.DataFrame(rows, columns=columns)


def oscillates_less(experiments: Experiments, *, delayed: bool) -> Evidence:
    """Variances of basis rotation and PipeDream at the same checkpoints: at P = 1, or at the
    largest P measured.

    Strictly those at one common learning rate count, since an update is as long as its rate; while
    there are no such runs, those over the square of the rate."""
    table = _variances(_folders(experiments))
    P = table["P"].max() if delayed else 1
    if delayed and P == 1:
        raise UserError("not measured under delay yet")
    ours, theirs = (
        table[(table["P"] == P) & (table["method"] == method)].set_index(["seed", "iteration"])
        for method in ("basis-rotation", "pipedream")
    )
    both = ours.merge(theirs, left_index=True, right_index=True, suffixes=("", "_of_pipedream"))
    if both.empty:
        raise UserError(f"not measured with both methods at P = {P} yet")
    less = Margin((both["dominant_of_pipedream"] - both["dominant"]).groupby("seed").mean())
    of_squares = 2 * np.log(both["rate"] / both["rate_of_pipedream"])
    differences = both["dominant_of_pipedream"] - both["dominant"]
    less_per_square = Margin((differences + of_squares).groupby("seed").mean())
    variances = [np.exp(both[column].mean()) for column in ("dominant", "dominant_of_pipedream")]
    text = f"variance along the dominant eigenvector at P = {P}: basis rotation {variances[0]:.2g},"
    text += f" PipeDream {variances[1]:.2g}"
    if less.interval:
        text += ", basis rotation over PipeDream [{:.2g}, {:.2g}]".format(
            *np.exp(-np.array(less.interval[::-1]))
        )
    counts = {"seed": len(less.by_seed), "checkpoint": len(both)}
    text += (
        f" ({', '.join(f'{count} {what}' + 's' * (count > 1) for what, count in counts.items())})"
    )
    if (of_squares != 0).any():
        ratio = np.exp(-less_per_square.mean)
        text += f"; over the square of the learning rate, basis rotation {ratio:.2g} of PipeDream's"
        if less_per_square.interval:
            low, high = np.exp(-np.array(less_per_square.interval[::-1]))
            text += f" [{low:.2g}, {high:.2g}]"
    if plateaus := int((both["eigenvalue_of_pipedream"] < 0).sum()):
        text += (
            f"; at {plateaus} of them PipeDream's dominant eigenvalue is negative, as on a plateau"
        )
    common_text, at_common_rate = _less_at_common_rate(experiments, P)
    if at_common_rate is None:
        return less.evidence(text, strictly=less_per_square.strictly)
    if (of_squares != 0).any():
        text += common_text
    return less.evidence(text, strictly=at_common_rate.strictly)


def _less_at_common_rate(experiments: Experiments, P: int) -> tuple[str, Margin | None]:
    """The variance of basis rotation's updates over PipeDream's at a common learning rate, the one
    with the most checkpoints: a text, and logarithms by seed. None if they share no rate."""
    runs = load([experiments.scale.curvature])
    finished = runs.index[runs["status"] == "finished"]
    table = _variances([Path(str(run)) for run in finished])
    at_depth = table[table["P"] == P]
    keys = ["rate", "seed", "iteration"]
    ours, theirs = (
        at_depth[at_depth["method"] == method].set_index(keys)["dominant"]
        for method in ("basis-rotation", "pipedream")
    )
    differences = (theirs - ours).dropna()
    if differences.empty:
        return "", None
    rate = differences.groupby("rate").size().idxmax()
    less = Margin(differences.loc[rate].groupby("seed").mean())
    text = f"; at the common rate {rate:g}, basis rotation {np.exp(-less.mean):.2g} of PipeDream's"
    if less.interval:
        low, high = np.exp(-np.array(less.interval[::-1]))
        text += f" [{low:.2g}, {high:.2g}]"
    return text, less


def stable_elsewhere(experiments: Experiments) -> Evidence:
    """Along a random direction the updates of both methods vary less than along the dominant one,
    at every P."""
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
    """What is taken from a file that `brx toy` keeps."""
    path = TOYS / f"{name}.json"
    if not path.is_file():
        raise UserError(f"{path} is not there yet")
    try:
        return take(read_json(path))
    except (LookupError, TypeError, ValueError) as error:
        raise UserError(f"{path}: not readable: {error}; brx toy writes it anew") from None


def delay_hurts_where_misaligned(_: Experiments) -> Evidence:
    """On the quadratic, delay slows Adam with the eigenvectors between the axes, and hardly along
    them."""

    def of_adam(kept: Any) -> list[float]:  # None: it never arrived
        cases = {
            case["aligned"]: case["slowdown"]
            for case in kept["slowdowns"]
            if case["optimizer"] == "Adam"
        }
        return [
            math.inf if cases[aligned] is None else float(cases[aligned])
            for aligned in (True, False)
        ]

    aligned, misaligned = _toy("quadratic", of_adam)
    text = f"slowdown of Adam: aligned {aligned:.2f}, misaligned {misaligned:.2f}"
    return Evidence(holds=misaligned > aligned and aligned < HARDLY, text=text)


def misalignment_slows_on_the_spiral(_: Experiments) -> Evidence:
    """As the paper sets the spiral up, misalignment and slowdown rise together, on a trajectory
    that arrives."""

    def of_spiral(kept: Any) -> tuple[bool, float, float]:
        """Whether Adam arrives, the rank correlation, and its p-value; NaN for None, since a
        constant has no correlation."""
        correlation, p_value = np.array([kept["spearman"], kept["p_value"]], dtype=float)
        return bool(kept["arrived"]), float(correlation), float(p_value)

    arrived, correlation, p_value = _toy("spiral", of_spiral)
    small_arrived, with_small_steps, _p = _toy("spiral-small-steps", of_spiral)
    text = f"rank correlation of misalignment and slowdown {correlation:.2f}"
    if not arrived:
        text += ", but Adam stops on the way"
    ending = "arrives" if small_arrived else "stops"
    text += f"; with smaller steps it {ending}: {with_small_steps:.2f}"
    return Evidence(holds=arrived and correlation > 0 and p_value < MOST_CHANCE, text=text)


def memory_share(_: Experiments) -> Evidence:
    """1st/unilateral of an MLP matrix of Llama-3-8B, over 4 m n, as the paper counts; Adam's two
    moments are 2 m n."""
    m, n = LLAMA_3_8B["MLP"]
    overhead = overhead_elements((m, n), "1st", "unilateral")
    of_moments = overhead / (2 * m * n)
    text = (
        f"of 4mn as the paper counts, {1 / 16:.2%} with its m = 4n; {of_moments:.1%} of Adam's "
        f"two moments"
    )
    return Evidence(overhead / (4 * m * n), text=text)


def llama_overhead() -> pd.DataFrame:
    """What the strategies of basis rotation add for one matrix of Llama-3-8B's attention and of its
    MLP, texts."""
    names = {shape: name for name, shape in LLAMA_3_8B.items()}
    return overhead_texts(dict.fromkeys(names, 1), names)[1]


def memory_of_strategies(_: Experiments) -> Evidence:
    table = llama_overhead()
    sizes = table.iloc[:, 4:6].to_numpy().tolist()
    strategies = table["source"] + "/" + table["geometry"]
    text = ", ".join(
        f"{name} {' and '.join(both)}" for name, both in zip(strategies, sizes, strict=True)
    )
    return Evidence(holds=sizes == MEMORY_GIB, text=f"attention and MLP: {text} GiB")


def parameter_counts(_: Experiments) -> Evidence:
    counts = {}
    for preset in PARAMETERS:
        config = preset_with(preset, {})
        counts[preset] = count_parameters(config.model, config.data.vocabulary_size)[0]
    text = ", ".join(f"{preset} {count / 1e6:,.1f} M" for preset, count in counts.items())
    holds = all(
        abs(count / PARAMETERS[preset] - 1) < APPROXIMATELY for preset, count in counts.items()
    )
    return Evidence(holds=holds, text=text)


def stage_counts(_: Experiments) -> Evidence:
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
