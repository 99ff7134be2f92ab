"""Experiments against each other: what delay costs a method, and what a method saves over the best
baseline."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from brx.errors import UserError
from brx.runs import slowdown
from brx.runs.experiments import at_each_rate, by_experiment
from brx.runs.frames import (
    DEPTH,
    RATE,
    SEED,
    comparable,
    first_names,
    has_pipeline_delays,
    read_run,
    same_but_for,
)

CODE = "optimizer.code_sha256"
# What rows are made of: pandas takes its time with a hundred columns.
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
EARLY = 0.05  # the share of the iterations before which training has not settled


@dataclass(frozen=True)
class Comparison:
    """Everything that can be compared among some runs, each set of comparable ones by itself."""

    sets: list[pd.DataFrame]
    """The experiments, sorted by what makes losses comparable; most runs first."""
    slowdowns: pd.DataFrame
    reductions: pd.DataFrame
    notes: list[str]
    """A line for everything that does not compare, and for what to be careful with."""


def compare(
    runs: pd.DataFrame,
    target: float | None = None,
    reference_stages: int = 1,
    *,
    same_rate: bool = False,
) -> Comparison:
    """Slowdowns, relative to P = `reference_stages`, and reductions of all experiments (rows of
    `at_best_rates`).

    `target` is the training loss to reach, in nats: by default, in each set, its `common_target`.
    With `same_rate`, `runs` are rows of `load`: slowdowns at each learning rate that both sides
    have, and no reductions."""
    delays, savings, alone = [], [], []
    groups = at_each_rate(runs) if same_rate else [runs]
    for alike in (alike for group in groups for alike in comparable(group)):
        compared = with_reference(alike, reference_stages)
        delays.append(
            slowdowns(
                compared, common_target(compared) if target is None else target, reference_stages
            )
        )
        savings += [] if same_rate else [reductions(alike[alike["status"] == "finished"])]
        alone += [str(seeds.index[0]) for seeds in by_experiment(alike.drop(compared.index))]
    sets, delay_frame = comparable(runs[runs["status"] == "finished"]), concat(delays)
    notes = []
    if len(sets) > 1 and not same_rate:
        notes.append(
            f"{len(sets)} sets of runs that differ in data, trajectory version, model or budget, "
            f"each alone"
        )
    if alone:  # one line for all: the folder of a whole reproduction has many
        same = (
            f"no run of the same settings{' and learning rate' if same_rate else ''} at P = "
            f"{reference_stages}"
        )
        notes.append(f"no slowdown for want of a reference ({same}): {first_names(alone)}")
    if len(delay_frame) and delay_frame["is_early"].any():
        early = f"a reference reaches the target in its first {EARLY:.0%} of iterations"
        notes.append(
            f"{early}: such a ratio is about the start of training, and a lower target says more"
        )
    if len(delay_frame) and same_rate:
        delay_frame = delay_frame.sort_values(
            ["model", "method", "stages", "lr"], ignore_index=True
        )
    return Comparison(sets, delay_frame, concat(savings), notes)


def _columns(estimate: slowdown.IterationRatio | None) -> dict[str, float]:
    """Its `ratio`, `low` and `high`, NaN where there is none."""
    found = {key: getattr(estimate, key, None) for key in ("ratio", "low", "high")}
    return {key: math.nan if value is None else value for key, value in found.items()}


def concat(frames: list[pd.DataFrame]) -> pd.DataFrame:
    """Put frames below each other, without the empty ones, which have no columns."""
    filled = [frame for frame in frames if len(frame)]
    return pd.concat(filled, ignore_index=True) if filled else pd.DataFrame()


def passage(run: str, target: float) -> float | None:
    """The iterations that a run (of the index of `load`) needed to a training loss; None if it
    never got there."""
    read = read_run(Path(run))
    return slowdown.iterations_to_target(read.iterations, read.train_loss, target)


def reached_by_seed(seeds: pd.DataFrame, target: float) -> dict[int, slowdown.Reached]:
    """When each run of an experiment (rows of `at_best_rates`) passed a loss; those that diverged
    there did not."""
    last = float(seeds["last_iteration"].iloc[0])
    finished = seeds.loc[seeds["status"] == "finished", SEED]
    passages = {int(seed): passage(str(run), target) for run, seed in finished.items()}
    passages |= dict.fromkeys(seeds["diverged_seeds"].iloc[0])
    return {
        seed: slowdown.Reached(last if iteration is None else iteration, iteration is not None)
        for seed, iteration in sorted(passages.items())
    }


def common_target(runs: pd.DataFrame) -> float:
    """The loss to reach, in nats: the highest mean training loss over the last quarter of any of
    the finished runs."""
    return float(runs.loc[runs["status"] == "finished", "last_quarter_loss"].max())


def with_reference(chosen: pd.DataFrame, reference_stages: int = 1) -> pd.DataFrame:
    """Runs whose method has runs at the reference number of stages, those themselves among them."""
    labels = _but_for_delay(chosen)
    return chosen[labels.isin(labels[is_reference(chosen, reference_stages)])]


def is_reference(chosen: pd.DataFrame, reference_stages: int = 1) -> pd.Series:
    """Which runs have the delays of a pipeline of so many stages: at P = 1, none."""
    return (chosen[DEPTH] == reference_stages) & has_pipeline_delays(chosen)


def slowdowns(chosen: pd.DataFrame, target: float, reference_stages: int = 1) -> pd.DataFrame:
    """The slowdown of every experiment (of rows of `at_best_rates`) that has a reference, by
    variant and stages.

    Runs under other delays than a pipeline's are a variant of their own, with the same reference.
    Columns, in the words of docs/slowdown.md: `ratio` (NaN on a plateau, and where a reference run
    diverged or never reached the target), `low` and `high` (of the 95 % interval; NaN for a bound,
    and with fewer than two seeds in common), `resolution` (of the ratio, from the distance of the
    recorded iterations), `is_censored` (`ratio` is a lower bound), `is_plateau` (see
    `passage_error`), `is_early` (the reference reaches the target before training has settled), and
    what `_slowdown` names; `iterations` are of `shared_seeds`, if there are any; `target` is in
    nats."""
    rows = []
    shown = chosen[_SHOWN].assign(is_reference=is_reference(chosen, reference_stages))
    for _, alike in shown.groupby(_but_for_delay(chosen), sort=False):
        # Runs with `{like: 8}` may be there in addition to runs with 8 stages.
        references = next(by_experiment(alike[alike["is_reference"]]), None)
        if references is None:
            continue
        for delayed in by_experiment(alike[~alike["is_reference"]]):
            rows.append(_slowdown(delayed, references, target))
    return (
        pd.DataFrame(rows).sort_values(["method", "stages"], ignore_index=True)
        if rows
        else pd.DataFrame()
    )


def _slowdown(delayed: pd.DataFrame, references: pd.DataFrame, target: float) -> dict[str, object]:
    sides = delayed, references
    reached, reference_reached = passages = [reached_by_seed(seeds, target) for seeds in sides]
    shared_seeds = sorted(reached.keys() & reference_reached.keys())
    iterations, reference_iterations = (
        [side[seed].iterations for seed in shared_seeds or side] for side in passages
    )
    errors, steps = zip(*(_passage_quality(seeds, target) for seeds in sides), strict=True)
    is_plateau = max(errors) > slowdown.PLATEAU
    estimate = _columns(
        None if is_plateau else slowdown.iteration_ratio(reached, reference_reached)
    )
    first, reference = delayed.iloc[0], references.iloc[0]
    return {
        "model": first["architecture"],
        "method": first["variant"],
        "experiment": first["experiment"],
        "stages": first[DEPTH],
        "last_iteration": first["last_iteration"],
        **estimate,
        "resolution": estimate["ratio"] * sum(steps),
        "is_censored": not all(run.is_reached for run in reached.values()),
        "is_plateau": is_plateau,
        "is_early": slowdown.geometric_mean(reference_iterations)
        < EARLY * reference["last_iteration"],
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


def _passage_quality(seeds: pd.DataFrame, target: float) -> tuple[float, float]:
    """Medians over the runs that reach the target: the error of log(passage), and half the distance
    of the two recorded iterations around the passage (also in the logarithm)."""
    errors, steps = [0.0], [0.0]
    for run in seeds.index[seeds["status"] == "finished"]:
        read = read_run(Path(str(run)))
        iterations, losses = read.iterations, read.train_loss
        if (passed := slowdown.iterations_to_target(iterations, losses, target)) is not None:
            errors.append(slowdown.passage_error(iterations, losses, passed))
            after = int(np.clip(np.searchsorted(iterations, passed), 1, len(iterations) - 1))
            steps.append((iterations[after] - iterations[after - 1]) / 2 / passed)
    return float(np.median(errors[1:] or errors)), float(np.median(steps[1:] or steps))


def with_diverged(seeds: pd.DataFrame) -> pd.DataFrame:
    """An experiment's runs (of rows of `at_best_rates`) and the seeds that diverged, above all
    others: at infinity."""
    lost = {"status": "diverged", "train_loss": math.inf, "val_loss": math.inf}
    first, diverged = seeds.iloc[[0]], seeds["diverged_seeds"].iloc[0]
    rows = [
        first.assign(**lost, **{SEED: seed}).set_axis([f"{first.index[0]}, seed {seed}"])
        for seed in diverged
    ]
    return pd.concat([seeds, *rows]) if rows else seeds


def seeds_in_common(experiments: Sequence[pd.DataFrame]) -> set[int]:
    return set.intersection(*(set(runs[SEED]) for runs in experiments))


def shared_seeds(*experiments: pd.DataFrame) -> list[pd.DataFrame]:
    """The runs of each experiment with a seed that all have: it decides weights and order, so that
    they make pairs.

    `experiments` are of `with_diverged`; UserError where they have no seed in common.
    """
    if not (shared := seeds_in_common(experiments)):
        raise UserError(
            f"no seed in common among {', '.join(str(runs.index[0]) for runs in experiments)}"
        )
    pairs = []
    for runs in experiments:
        kept = runs[runs[SEED].isin(shared)]
        # Other seeds that diverged are forgotten, as others that finished are.
        lost = [
            [seed for seed in diverged if seed in shared] for diverged in kept["diverged_seeds"]
        ]
        pairs.append(kept.assign(diverged_seeds=pd.Series(lost, kept.index, dtype=object)))
    return pairs


def best_by_seed(experiments: Sequence[pd.DataFrame], loss: str) -> pd.DataFrame:
    """The run that ends lowest, for each seed: every seed repeats the paper's comparison with its
    own best baseline."""
    best = (
        pd.concat(experiments)
        .sort_values(loss, kind="stable")
        .drop_duplicates(SEED)
        .sort_values(SEED)
    )
    lost = best.loc[best["status"] == "diverged", SEED].tolist()
    return best.assign(diverged_seeds=pd.Series([lost] * len(best), best.index, dtype=object))


def variants_text(runs: pd.DataFrame) -> str:
    return " or ".join(runs["variant"].unique())


def saved_ratio(
    ours: pd.DataFrame, baseline: pd.DataFrame, times: Mapping[str, float] | None = None
) -> slowdown.IterationRatio | None:
    """Iterations to a baseline's `common_target`, over the baseline's; None if that never gets
    there.

    With `times` of an iteration, by method, the time that these take.
    """
    target = common_target(baseline)
    if math.isnan(target):
        return None
    reached = []
    for runs in (ours, baseline):
        passed = reached_by_seed(runs, target)
        if times:
            time = runs.set_index(SEED)["method"].map(times)
            passed = {
                seed: run._replace(iterations=run.iterations * time[seed])
                for seed, run in passed.items()
            }
        reached.append(passed)
    return slowdown.iteration_ratio(*reached)


def reductions(chosen: pd.DataFrame) -> pd.DataFrame:
    """How many fewer iterations a method needs to end where the best baseline ends, as the paper's
    headlines put it.

    A row per experiment (of rows of `at_best_rates`) that is no baseline and has some: settings but
    the optimizer's equal. A baseline has its usual settings or, where none has, those that most
    baselines share. The seeds are those that it and all baselines have, if there are any.
    `baseline` is the best of each of them (`best_by_seed`), `baseline_final_loss` the loss to
    reach, and `share` 1 - iterations needed / those of the baseline, with its interval; NaN if it
    is `missing`: why."""
    rows = []
    for _, alike in chosen[_SHOWN].groupby(same_but_for(chosen, "optimizer", SEED), sort=False):
        is_baseline = alike["method"].isin(BASELINES)
        if not is_baseline.any():
            continue
        settings = alike.loc[is_baseline, "unusual"]
        is_baseline &= alike["unusual"] == ("" if "" in settings.values else settings.mode()[0])
        baselines = [with_diverged(seeds) for seeds in by_experiment(alike[is_baseline])]
        for seeds in map(with_diverged, by_experiment(alike[~is_baseline])):
            sides = [seeds, *baselines]
            ours, *others = shared_seeds(*sides) if seeds_in_common(sides) else sides
            best = best_by_seed(others, "train_loss")
            ratio, first = saved_ratio(ours, best), seeds.iloc[0]
            needed = _columns(None if ratio is None or ratio.is_lower_bound else ratio)
            rows.append(
                {
                    "model": first["architecture"],
                    "method": first["variant"],
                    "experiment": first["experiment"],
                    "stages": first[DEPTH],
                    "last_iteration": first["last_iteration"],
                    "baseline": variants_text(best),
                    "baseline_final_loss": common_target(best),
                    "share": 1 - needed["ratio"],
                    "missing": "the best baseline diverged"
                    if ratio is None
                    else "never gets there",
                    "low": 1 - needed["high"],
                    "high": 1 - needed["low"],
                }
            )
    return (
        pd.DataFrame(rows).sort_values(["stages", "method"], ignore_index=True)
        if rows
        else pd.DataFrame()
    )


def _but_for_delay(chosen: pd.DataFrame) -> pd.Series:
    delay = ("pipeline.stages", "pipeline.delay", "pipeline.cut")
    return same_but_for(chosen, RATE, SEED, *delay)


def leaderboard(chosen: pd.DataFrame, delays: Sequence[str], target_method: str) -> pd.DataFrame:
    """A row per method and delay, the method that is best under the longest delay first (rank 1).

    `chosen` are rows of `at_best_rates` that compare, their `delay` one of `delays`: the first is
    none, the last the longest. Columns: `num_seeds` (the fewest of a delay), `milliseconds` per
    iteration of the fastest run, `loss` (final, mean over seeds), `target` in nats, which
    `target_method` reaches under every delay; those of the slowdown (`slowdowns`), but for the
    reference itself; and `saved`, the row of `reductions` or None."""
    chosen = chosen.assign(label=chosen["variant"])
    if CODE in chosen:  # a user's file made several of one name: they are told apart by its SHA-256
        is_ambiguous = chosen.groupby("variant")[CODE].transform("nunique") > 1
        chosen["label"] += (" (" + chosen[CODE].str[:6] + ")").where(is_ambiguous, "")
    of_target = chosen[chosen["variant"] == target_method]
    target = common_target(of_target) if len(of_target) else math.nan
    reduced = [
        row for _, alike in chosen.groupby("delay") for row in reductions(alike).to_dict("records")
    ]
    saved = {row["experiment"]: row for row in reduced}
    rows: list[dict[str, Any]] = []
    for rank, (_, alike) in enumerate(chosen.groupby(_but_for_delay(chosen), sort=False)):
        by_delay = {seeds["delay"].iloc[0]: seeds for seeds in by_experiment(alike)}
        of_method = {
            "method": alike["label"].iloc[0],
            "rank": rank,
            "num_seeds": min(len(seeds) for seeds in by_delay.values()),
            "milliseconds": 1e3 * alike["seconds_per_iteration"].min(),
            "target": target,
        }
        for delay, seeds in by_delay.items():
            first = seeds.iloc[0]
            row = {"delay": delay, "loss": seeds["train_loss"].mean(), "lr": first[RATE]}
            row |= {"lr_at_edge": first["lr_at_edge"], "saved": saved.get(first["experiment"])}
            # A run that diverged is placed last.
            row["place"] = math.inf if first["diverged_seeds"] else row["loss"]
            if delay != delays[0] and delays[0] in by_delay and not math.isnan(target):
                row = _slowdown(seeds, by_delay[delays[0]], target) | row
            rows.append(row | of_method)
    board = pd.DataFrame(rows)
    longest = max(board["delay"], key=list(delays).index)
    at_longest = (
        board[board["delay"] == longest].set_index("rank")["place"].reindex(board["rank"].unique())
    )
    places = at_longest.rank(method="first", na_option="bottom")
    return board.assign(rank=board["rank"].map(places)).sort_values(
        "rank", kind="stable", ignore_index=True
    )
