"""Compares experiments: what delay costs a method, and what a method saves over the best
baseline."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from brx.errors import UserError
from brx.runs import slowdown
from brx.runs.aspects import comparable, first_names, same_but_for, with_distinct_variants
from brx.runs.experiments import at_each_rate, by_experiment
from brx.runs.frames import DEPTH, has_pipeline_delays
from brx.runs.pace import fastest_paces
from brx.runs.run import read_run
from brx.runs.trajectory import RATE, SEED

CODE = "optimizer.code_sha256"
# The columns that results are made of. Others are dropped, because pandas is slow with a hundred
# columns.
_SHOWN = [
    "architecture",
    "method",
    "variant",
    "unusual",
    "experiment",
    "status",
    DEPTH,
    SEED,
    RATE,
    "lr_at_edge",
    "diverged_seeds",
    "last_iteration",
    "train_loss",
    "last_quarter_loss",
]
BASELINES = ("pipedream", "pipedream-lr", "nesterov")
EARLY = 0.05  # the share of the iterations, from the start, in which training has not settled yet


@dataclass(frozen=True)
class Comparison:
    """Everything that can be compared among some runs, each set of comparable ones by itself."""

    sets: list[pd.DataFrame]
    """The finished runs, divided into sets whose losses compare; the largest set first."""
    slowdowns: pd.DataFrame
    """See the function `slowdowns`; all sets below each other."""
    reductions: pd.DataFrame
    """See the function `reductions`; all sets below each other."""
    notes: list[str]
    """A line for everything that cannot be compared, and for results to be careful with."""


def compare(
    runs: pd.DataFrame,
    target: float | None = None,
    reference_stages: int = 1,
    *,
    same_rate: bool = False,
) -> Comparison:
    """Compare experiments: what delay costs each method, and what it saves over the baselines.

    Args:
        runs: rows of `at_best_rates`; with `same_rate`, rows of `load`.
        target: the training loss to reach, in nats; by default the `common_target` of each set.
        reference_stages: slowdowns are relative to the runs at this number of stages.
        same_rate: give slowdowns at each learning rate that both sides have, and no reductions.
    """
    parts = at_each_rate(runs) if same_rate else [runs]
    slowdown_frames = []
    reduction_frames = []
    alone: list[str] = []  # a run of each experiment without a reference
    for part in parts:
        for alike in map(with_distinct_variants, comparable(part)):
            compared = with_reference(alike, reference_stages)
            to_reach = common_target(compared) if target is None else target
            slowdown_frames.append(slowdowns(compared, to_reach, reference_stages))
            if not same_rate:
                reduction_frames.append(reductions(alike[alike["status"] == "finished"]))
            alone += [str(seeds.index[0]) for seeds in by_experiment(alike.drop(compared.index))]
    compared_delays = concat(slowdown_frames)
    if len(compared_delays) and same_rate:
        order = ["model", "method", "stages", "lr"]
        compared_delays = compared_delays.sort_values(order, ignore_index=True)
    finished = runs[runs["status"] == "finished"]
    sets = [with_distinct_variants(alike) for alike in comparable(finished)]
    notes = []
    if len(sets) > 1 and not same_rate:
        notes.append(
            f"{len(sets)} sets of runs that differ in data, trajectory version, model or budget, "
            f"each alone"
        )
    notes += _notes_on_slowdowns(compared_delays, alone, reference_stages, same_rate=same_rate)
    return Comparison(sets, compared_delays, concat(reduction_frames), notes)


def _notes_on_slowdowns(
    rows: pd.DataFrame,  # from `slowdowns`
    alone: Sequence[str],  # runs without a reference
    reference_stages: int,
    *,
    same_rate: bool,
) -> list[str]:
    """A line each for the slowdowns that are missing and for those to be careful with."""
    notes = []
    if alone:  # one line for all: the folder of a whole reproduction has many
        settings = "settings and learning rate" if same_rate else "settings"
        lacking = f"no run of the same {settings} at P = {reference_stages}"
        notes.append(f"no slowdown for want of a reference ({lacking}): {first_names(alone)}")
    if rows.empty:
        return notes
    unpaired = rows[rows["shared_seeds"].str.len() == 0]
    if len(unpaired):
        ends = [f"{row['method']} at P = {row['stages']}" for row in unpaired.to_dict("records")]
        notes.append(
            f"no seed in common with the reference, so the slowdown is over all seeds of either "
            f"side and has no interval: {first_names(list(dict.fromkeys(ends)))}"
        )
    if rows["is_early"].any():
        notes.append(
            f"a reference reaches the target in its first {EARLY:.0%} of iterations: such a ratio "
            f"is about the start of training, and a lower target says more"
        )
    return notes


def _columns(estimate: slowdown.IterationRatio | None) -> dict[str, float]:
    """The `ratio`, `low` and `high` of an estimate as numbers, with NaN for None."""
    if estimate is None:
        return {"ratio": math.nan, "low": math.nan, "high": math.nan}
    return {
        "ratio": estimate.ratio,
        "low": math.nan if estimate.low is None else estimate.low,
        "high": math.nan if estimate.high is None else estimate.high,
    }


def concat(frames: list[pd.DataFrame]) -> pd.DataFrame:
    """Put frames below each other. Empty ones are left out, as they have no columns."""
    filled = [frame for frame in frames if len(frame)]
    return pd.concat(filled, ignore_index=True) if filled else pd.DataFrame()


def passage(run: str, target: float) -> float | None:
    """How many iterations a run needed to reach a training loss; None if it never got there.

    Args:
        run: an entry of the index of `load`.
        target: the target loss, in nats.
    """
    read = read_run(Path(run))
    return slowdown.iterations_to_target(read.iterations, read.train_loss, target)


def reached_by_seed(seeds: pd.DataFrame, target: float) -> dict[int, slowdown.Reached]:
    """When each run of an experiment passed a loss, by seed; a run that diverged did not.

    Args:
        seeds: the experiment's rows of `at_best_rates`.
        target: the target loss, in nats.
    """
    last = float(seeds["last_iteration"].iloc[0])
    never = slowdown.Reached(last, False)
    finished = seeds.loc[seeds["status"] == "finished", SEED]
    reached: dict[int, slowdown.Reached] = {}
    for run, seed in finished.items():
        iterations = passage(str(run), target)
        reached[int(seed)] = never if iterations is None else slowdown.Reached(iterations, True)
    reached |= dict.fromkeys(seeds["diverged_seeds"].iloc[0], never)
    return dict(sorted(reached.items()))


def common_target(runs: pd.DataFrame) -> float:
    """A training loss that all finished runs reach, in nats: the highest of their means over the
    last quarter of the run."""
    return float(runs.loc[runs["status"] == "finished", "last_quarter_loss"].max())


def with_reference(chosen: pd.DataFrame, reference_stages: int = 1) -> pd.DataFrame:
    """The runs of methods that also have runs at the reference number of stages, including those
    runs."""
    labels = _but_for_delay(chosen)
    return chosen[labels.isin(labels[is_reference(chosen, reference_stages)])]


def is_reference(chosen: pd.DataFrame, reference_stages: int = 1) -> pd.Series:
    """Which runs have the delays of a pipeline with this number of stages; P = 1 has no delay."""
    return (chosen[DEPTH] == reference_stages) & has_pipeline_delays(chosen)


def slowdowns(chosen: pd.DataFrame, target: float, reference_stages: int = 1) -> pd.DataFrame:
    """The slowdown of every experiment that has a reference: one row each, sorted by variant and
    number of stages.

    Runs under other delays than a pipeline's are a variant of their own, with the same reference.
    docs/slowdown.md explains the words.

    Args:
        chosen: rows of `at_best_rates`.
        target: the training loss to reach, in nats.
        reference_stages: the number of stages of the reference.

    Returns:
        A frame with these columns, and further ones that `_slowdown` names:

        - `ratio`: NaN on a plateau, and where a reference run diverged or never reached the target.
        - `low`, `high`: the 95 % interval; NaN for a bound, and with fewer than two shared seeds.
        - `resolution` of the ratio, from the distance between recorded iterations.
        - `is_censored`: the ratio is a lower bound.
        - `is_plateau`: noise moves the passages too much (`slowdown.passage_error`).
        - `is_early`: the reference reaches the target before training has settled.
        - `iterations`, `reference_iterations`: of the shared seeds; of all if none is shared.

        An empty frame has no columns.
    """
    rows = []
    shown = chosen[_SHOWN].assign(is_reference=is_reference(chosen, reference_stages))
    for _, alike in shown.groupby(_but_for_delay(chosen), sort=False):
        # There may be several, as runs with the delay `{like: 8}` in addition to runs with 8
        # stages. The first one is the reference.
        references = next(by_experiment(alike[alike["is_reference"]]), None)
        if references is None:
            continue
        for delayed in by_experiment(alike[~alike["is_reference"]]):
            rows.append(_slowdown(delayed, references, target))
    return _sorted_frame(rows, by=["method", "stages"])


def _sorted_frame(rows: Sequence[Mapping[str, object]], *, by: list[str]) -> pd.DataFrame:
    if not rows:
        return pd.DataFrame()
    return pd.DataFrame(rows).sort_values(by, ignore_index=True)


def _what_ran(first: pd.Series) -> dict[str, Any]:
    """The first columns of every row, from any run of its experiment."""
    return {
        "model": first["architecture"],
        "method": first["variant"],
        "experiment": first["experiment"],
        "stages": first[DEPTH],
        "last_iteration": first["last_iteration"],
    }


def _slowdown(delayed: pd.DataFrame, references: pd.DataFrame, target: float) -> dict[str, object]:
    """A row of `slowdowns`, from the seeds of an experiment and of its reference."""
    reached = reached_by_seed(delayed, target)
    reference_reached = reached_by_seed(references, target)
    shared_seeds = sorted(reached.keys() & reference_reached.keys())
    iterations = slowdown.iterations_of(reached, shared_seeds)
    reference_iterations = slowdown.iterations_of(reference_reached, shared_seeds)
    mean_reference = slowdown.geometric_mean(reference_iterations)
    quality = _passage_quality(delayed, target)
    reference_quality = _passage_quality(references, target)
    is_plateau = quality.is_plateau or reference_quality.is_plateau
    ratio = None if is_plateau else slowdown.iteration_ratio(reached, reference_reached)
    estimate = _columns(ratio)
    first = delayed.iloc[0]
    reference = references.iloc[0]
    return {
        **_what_ran(first),
        **estimate,
        "resolution": estimate["ratio"] * (quality.half_step + reference_quality.half_step),
        "is_censored": not all(run.is_reached for run in reached.values()),
        "is_plateau": is_plateau,
        "is_early": mean_reference < EARLY * reference["last_iteration"],
        "shared_seeds": shared_seeds,
        "iterations": iterations,
        "lr": first[RATE],
        "lr_at_edge": first["lr_at_edge"],
        "reference_stages": reference[DEPTH],
        "reference_is_censored": not all(run.is_reached for run in reference_reached.values()),
        "reference_iterations": reference_iterations,
        "reference_lr": reference[RATE],
        "reference_lr_at_edge": reference["lr_at_edge"],
        "target": target,
    }


class _PassageQuality(NamedTuple):
    """How precisely the runs of an experiment determine log(iterations to the target)."""

    error: float  # the standard deviation due to the noise of the losses
    half_step: float  # half the distance of the two recorded iterations around the passage

    @property
    def is_plateau(self) -> bool:
        """Whether noise moves the passage too much for a slowdown."""
        return self.error > slowdown.PLATEAU


def is_on_plateau(seeds: pd.DataFrame, target: float) -> bool:
    """Whether a target loss, in nats, is on a plateau of an experiment's runs
    (docs/slowdown.md)."""
    return _passage_quality(seeds, target).is_plateau


def _passage_quality(seeds: pd.DataFrame, target: float) -> _PassageQuality:
    """Medians over the runs that reach the target; 0 if none does."""
    errors = []
    half_steps = []
    for path in seeds.index[seeds["status"] == "finished"]:
        run = read_run(Path(str(path)))
        passed = slowdown.iterations_to_target(run.iterations, run.train_loss, target)
        if passed is None:
            continue
        errors.append(slowdown.passage_error(run.iterations, run.train_loss, passed))
        place = np.searchsorted(run.iterations, passed)
        after = int(np.clip(place, 1, len(run.iterations) - 1))
        distance = run.iterations[after] - run.iterations[after - 1]
        half_steps.append(distance / 2 / passed)  # d log(t) = dt / t
    if not errors:
        return _PassageQuality(0.0, 0.0)
    return _PassageQuality(float(np.median(errors)), float(np.median(half_steps)))


def with_diverged(seeds: pd.DataFrame) -> pd.DataFrame:
    """Add a row for each diverged seed to an experiment's runs, with infinite losses.

    Args:
        seeds: the experiment's rows of `at_best_rates`.
    """
    first = seeds.iloc[[0]]
    lost = {"status": "diverged", "train_loss": math.inf, "val_loss": math.inf}
    rows = []
    for seed in seeds["diverged_seeds"].iloc[0]:
        row = first.assign(**lost, **{SEED: seed})
        rows.append(row.set_axis([f"{first.index[0]}, seed {seed}"]))
    return pd.concat([seeds, *rows]) if rows else seeds


def seeds_in_common(experiments: Sequence[pd.DataFrame]) -> set[int]:
    """The seeds that every one of some experiments has."""
    return set.intersection(*(set(runs[SEED]) for runs in experiments))


def shared_seeds(*experiments: pd.DataFrame) -> list[pd.DataFrame]:
    """The runs of each experiment whose seed all experiments have.

    A seed decides the initial weights and the order of the data, so such runs make pairs.

    Args:
        experiments: the runs of each experiment, from `with_diverged`.

    Raises:
        UserError: they have no seed in common.
    """
    shared = seeds_in_common(experiments)
    if not shared:
        names = ", ".join(str(runs.index[0]) for runs in experiments)
        raise UserError(f"no seed in common among {names}")
    pairs = []
    for runs in experiments:
        kept = runs[runs[SEED].isin(shared)]
        # `diverged_seeds` loses the other seeds as well.
        diverged = []
        for seeds in kept["diverged_seeds"]:
            diverged.append([seed for seed in seeds if seed in shared])
        pairs.append(kept.assign(diverged_seeds=pd.Series(diverged, kept.index, dtype=object)))
    return pairs


def best_by_seed(experiments: Sequence[pd.DataFrame], loss: str) -> pd.DataFrame:
    """For each seed, the run of some experiments that ends lowest.

    Each seed thus repeats the paper's comparison with its own best baseline.

    Args:
        experiments: the runs of each experiment, from `shared_seeds`.
        loss: the column that is compared.
    """
    ranked = pd.concat(experiments).sort_values(loss, kind="stable")
    best = ranked.drop_duplicates(SEED).sort_values(SEED)
    diverged = best.loc[best["status"] == "diverged", SEED].tolist()
    return best.assign(diverged_seeds=pd.Series([diverged] * len(best), best.index, dtype=object))


def variants_text(runs: pd.DataFrame) -> str:
    """The variants of some runs, in their order: `pipedream or nesterov`."""
    return " or ".join(runs["variant"].unique())


def saved_ratio(
    ours: pd.DataFrame, baseline: pd.DataFrame, times: Mapping[str, float] | None = None
) -> slowdown.IterationRatio | None:
    """Iterations to a baseline's `common_target`, divided by the iterations of the baseline.

    Args:
        ours: rows of `at_best_rates` or `shared_seeds`.
        baseline: the same for one baseline, or from `best_by_seed`.
        times: the time of an iteration, by method. With it, the ratio is one of times.

    Returns:
        None if the baseline itself never gets there.
    """
    target = common_target(baseline)
    if math.isnan(target):
        return None
    reached = []
    for runs in (ours, baseline):
        passed = reached_by_seed(runs, target)
        if times:
            seconds = runs.set_index(SEED)["method"].map(times)
            for seed, run in passed.items():
                passed[seed] = run._replace(iterations=run.iterations * seconds[seed])
        reached.append(passed)
    return slowdown.iteration_ratio(*reached)


def reductions(chosen: pd.DataFrame) -> pd.DataFrame:
    """How many fewer iterations a method needs to reach the final loss of the best baseline, as in
    the paper's headline numbers.

    A row per experiment that is not a baseline and has baselines: experiments whose settings are
    equal except for the optimizer's (`_usual_baselines` says which). If an experiment shares seeds
    with all its baselines, only these seeds count.

    Args:
        chosen: finished rows of `at_best_rates`.

    Returns:
        A frame with the columns `model`, `method` (the variant), `experiment`, `stages`,
        `last_iteration`, and:

        - `baseline`: the variant that is best; several if the seeds differ in it (`best_by_seed`).
        - `baseline_final_loss`: the loss to reach, in nats.
        - `share`: 1 - iterations / iterations of the baseline; `low` and `high`, its 95 % interval.
        - `missing`: why `share` is NaN, where it is.

        An empty frame has no columns.
    """
    rows = []
    for _, alike in chosen[_SHOWN].groupby(same_but_for(chosen, "optimizer", SEED), sort=False):
        is_baseline = _usual_baselines(alike)
        if not is_baseline.any():
            continue
        baselines = [with_diverged(seeds) for seeds in by_experiment(alike[is_baseline])]
        for seeds in by_experiment(alike[~is_baseline]):
            rows.append(_reduction(with_diverged(seeds), baselines))
    return _sorted_frame(rows, by=["stages", "method"])


def _usual_baselines(alike: pd.DataFrame) -> pd.Series:
    """Which runs are baselines with their usual settings.

    A baseline that never has these counts with those of its settings that most runs of baselines
    share; a search may have chosen others for each method.
    """
    baselines = alike[alike["method"].isin(BASELINES)]
    num_runs = baselines["unusual"].value_counts().sort_index(kind="stable")
    expected = {}
    for method, settings in baselines.groupby("method")["unusual"]:
        own = num_runs[num_runs.index.isin(settings)]
        expected[method] = "" if "" in own.index else own.idxmax()
    return alike["unusual"] == alike["method"].map(expected)


def _reduction(seeds: pd.DataFrame, baselines: Sequence[pd.DataFrame]) -> dict[str, object]:
    """A row of `reductions`, from the seeds of an experiment and of each of its baselines."""
    sides = [seeds, *baselines]
    if seeds_in_common(sides):
        sides = shared_seeds(*sides)
    ours, *others = sides
    best = best_by_seed(others, "train_loss")
    ratio = saved_ratio(ours, best)
    is_known = ratio is not None and not ratio.is_lower_bound
    needed = _columns(ratio if is_known else None)
    first = seeds.iloc[0]
    return {
        **_what_ran(first),
        "baseline": variants_text(best),
        "baseline_final_loss": common_target(best),
        "share": 1 - needed["ratio"],
        "missing": "the best baseline diverged" if ratio is None else "never gets there",
        "low": 1 - needed["high"],
        "high": 1 - needed["low"],
    }


def _but_for_delay(chosen: pd.DataFrame) -> pd.Series:
    """A label per run, equal for runs of the same method and budget that differ only in delay, rate
    and seed."""
    delay = ("pipeline.stages", "pipeline.delay", "pipeline.cut")
    return same_but_for(chosen, RATE, SEED, *delay)


def leaderboard(chosen: pd.DataFrame, delays: Sequence[str], target_method: str) -> pd.DataFrame:
    """A row per method and delay; the method that is best under the longest delay has rank 1.

    Args:
        chosen: rows of `at_best_rates` that compare, with a column `delay`.
        delays: the values of `delay`; the first is no delay, the last the longest.
        target_method: the method whose loss the others have to reach, for slowdowns.

    Returns:
        A frame sorted by `rank`, with the columns:

        - `method`: the variant; `num_seeds`: the fewest under one delay.
        - `milliseconds` per iteration of the fastest run.
        - `delay`, `lr`, `lr_at_edge`; `loss`: the final training loss, a mean over seeds.
        - `target`: the loss in nats that `target_method` reaches under every delay; NaN without it.
        - the columns of `slowdowns`, in rows that have a reference.
        - `saved`: the row of `reductions`, or None.
    """
    chosen = chosen.assign(label=_labels(chosen))
    target_runs = chosen[chosen["variant"] == target_method]
    target = common_target(target_runs) if len(target_runs) else math.nan
    saved = _reductions_by_experiment(chosen)
    rows: list[dict[str, Any]] = []
    by_method = [alike for _, alike in chosen.groupby(_but_for_delay(chosen), sort=False)]
    for number, (alike, seconds) in enumerate(
        zip(by_method, fastest_paces(by_method), strict=True)
    ):
        by_delay = {seeds["delay"].iloc[0]: seeds for seeds in by_experiment(alike)}
        method_columns = {
            "method": alike["label"].iloc[0],
            "rank": number,  # for now the place in `chosen`
            "num_seeds": min(len(seeds) for seeds in by_delay.values()),
            "milliseconds": 1e3 * seconds,
            "target": target,
        }
        reference = by_delay.get(delays[0])
        for delay, seeds in by_delay.items():
            row = _board_row(seeds, saved)
            if delay != delays[0] and reference is not None and not math.isnan(target):
                row = _slowdown(seeds, reference, target) | row
            rows.append(row | method_columns)
    return _ranked(pd.DataFrame(rows), delays)


def _labels(chosen: pd.DataFrame) -> pd.Series:
    """The variant of each run. Where several versions of a user's file have one name, the first
    digits of the file's SHA-256 tell them apart."""
    labels = chosen["variant"].copy()
    # The column is there, but without texts, if only runs that are not shown have a file.
    if CODE in chosen and chosen[CODE].notna().any():
        is_ambiguous = chosen.groupby("variant")[CODE].transform("nunique") > 1
        digits = " (" + chosen[CODE].str[:6] + ")"
        labels += digits.where(is_ambiguous, "")
    return labels


def _reductions_by_experiment(chosen: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """The rows of `reductions` under each delay, by experiment."""
    saved: dict[str, dict[str, Any]] = {}
    for _, alike in chosen.groupby("delay"):
        for row in reductions(alike).to_dict("records"):
            saved[row["experiment"]] = row
    return saved


def _board_row(seeds: pd.DataFrame, saved: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The columns of a row of `leaderboard` that depend on one experiment alone."""
    first = seeds.iloc[0]
    loss = seeds["train_loss"].mean()
    return {
        "delay": first["delay"],
        "loss": loss,
        "lr": first[RATE],
        "lr_at_edge": first["lr_at_edge"],
        "saved": saved.get(first["experiment"]),
        # A method with a run that diverged comes last.
        "loss_for_rank": math.inf if first["diverged_seeds"] else loss,
    }


def _ranked(board: pd.DataFrame, delays: Sequence[str]) -> pd.DataFrame:
    """The board, sorted by the losses that methods reach under the longest delay with any runs.
    Methods without runs under it come last."""
    longest = max(board["delay"], key=list(delays).index)
    at_longest = board[board["delay"] == longest].set_index("rank")["loss_for_rank"]
    at_longest = at_longest.reindex(board["rank"].unique())
    ranks = at_longest.rank(method="first", na_option="bottom")
    board = board.assign(rank=board["rank"].map(ranks))
    return board.sort_values("rank", kind="stable", ignore_index=True)
