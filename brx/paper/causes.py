"""Why do some optimizers tolerate delay better than others? The study of docs/protocol.md,
section 12, and the verdicts on its predictions.

It measures what delay costs with bases turned by an angle, with different momenta, with different
geometries of the step, and with corrections for delay.

The *cost* of a delay is the final validation loss with the delay minus the one without, seed by
seed, in nats. An *arm* is a method with its settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_hex

from brx.config.loading import Settings
from brx.config.schema import PipelineConfig, RunConfig
from brx.curvature.norm_result import SPACES, results_of
from brx.errors import UserError
from brx.paper import strict
from brx.paper.scales import SCALES, Experiments
from brx.plot.style import (
    Look,
    draw_points,
    finish_panel,
    look_of,
    new_figure,
    save,
    sequence_color,
)
from brx.runs.comparison import common_target, reached_by_seed, shared_seeds, with_diverged
from brx.runs.experiments import at_best_rates, by_experiment
from brx.runs.frames import SEED, load, read_run
from brx.sweep.spec import matches

RUNS = Path("results/causes")
SWEEPS = "configs/sweeps/causes/*.yaml"

# Delays, as section 12 names them.
NONE = "none"
ONE_UPDATE = "one update"
EIGHT = "8 stages"
DEEPEST = "32 stages"
DELAYED = (ONE_UPDATE, EIGHT, DEEPEST)

THETAS = (0.0, 0.1, 0.3, 1.0, "random")  # angles by which the bases are turned, in radians
MOMENTA = (0.9, 0.95, 0.99)
# For each method the setting that is its momentum, and the value that other panels compare.
MOMENTUM_KEYS = {
    "pipedream": ("optimizer.beta1", 0.9),
    "basis-rotation": ("optimizer.beta1", 0.9),
    "muon": ("optimizer.momentum", 0.95),
}


NAMES = {"pipedream": "AdamW", "basis-rotation": "basis rotation", "muon": "Muon"}


def turned(theta: float | str) -> str:
    """The arm of basis rotation in bases turned by an angle."""
    return f"turned, theta = {theta:g}" if isinstance(theta, float) else "turned, random"


def with_momentum(method: str, value: float) -> str:
    """The arm of a method with a momentum."""
    return f"{NAMES[method]}, momentum {value:g}"


# Arms.
ADAMW = with_momentum("pipedream", MOMENTUM_KEYS["pipedream"][1])
MUON = with_momentum("muon", MOMENTUM_KEYS["muon"][1])
EIGENBASIS = turned(THETAS[0])
RANDOM = turned(THETAS[-1])
LION = "Lion"
ROTATED_LION = "Lion in the eigenbasis"
SCION = "scion"
ADAN = "Adan"
PACI = "PACI"
ACCUMULATED = "AdamW, accumulated"
ADAMW_FEEDBACK = "AdamW, error feedback"
MUON_FEEDBACK = "Muon, error feedback"
# The names of some arms on an axis.
LABELS = {ADAMW: "AdamW", EIGENBASIS: "Basis rotation", MUON: "Muon", SCION: "Scion"}
BASES = tuple(turned(theta) for theta in THETAS)
SAME = (EIGENBASIS, with_momentum("basis-rotation", MOMENTUM_KEYS["basis-rotation"][1]))
"""Two arms with the same numbers, bit for bit: bases that are turned by 0 are basis rotation's.
Runs of either serve for both."""
SAME_WITHOUT_DELAY = {ADAMW_FEEDBACK: ADAMW, MUON_FEEDBACK: MUON}
"""Arms that are others where there is no delay: error feedback has nothing to correct there."""


def _arms() -> dict[str, Settings]:
    """The settings by which the runs of each arm are recognized."""
    study = "brx.methods.causes:"
    usual: Settings = {
        "pipeline.accumulation": 1,
        "pipeline.stash": "exact",
        "pipeline.error_feedback": 0.0,
    }
    corrected: Settings = {**usual, "pipeline.error_feedback": 1.0}
    accumulated: Settings = {"optimizer.method": "pipedream", "pipeline.accumulation": 4}
    arms: dict[str, Settings] = {}
    for theta in THETAS:
        arms[turned(theta)] = {
            "optimizer.method": f"{study}TurnedRotation",
            "optimizer.arguments.theta": theta,
        }
    for method, (key, _) in MOMENTUM_KEYS.items():
        for value in MOMENTA:
            arms[with_momentum(method, value)] = {"optimizer.method": method, key: value, **usual}
    arms[LION] = {"optimizer.method": "lion"}
    arms[ROTATED_LION] = {"optimizer.method": f"{study}RotatedLion"}
    arms[ADAN] = {"optimizer.method": "adan"}
    arms[PACI] = {**accumulated, "pipeline.stash": "none"}
    arms[ACCUMULATED] = {**accumulated, "pipeline.stash": "exact"}
    for arm, method in ((ADAMW_FEEDBACK, "pipedream"), (MUON_FEEDBACK, "muon")):
        key, value = MOMENTUM_KEYS[method]
        arms[arm] = {"optimizer.method": method, key: value, **corrected}
    return arms


ARMS = _arms()


def arm_of(config: RunConfig) -> str | None:
    """The arm of a run; None if the run does not belong to the study."""
    return next((arm for arm, settings in ARMS.items() if matches(config, settings)), None)


def delay_of(pipeline: PipelineConfig) -> str | None:
    """The study's name of a run's delay; None for a delay that the study does not have."""
    if pipeline.stages == 1:
        return NONE
    if pipeline.delay == "2bw":
        return ONE_UPDATE
    if getattr(pipeline.delay, "like", None) == 32:
        return DEEPEST
    if pipeline.stages == 8 and pipeline.delay == "pipeline":
        return EIGHT
    return None


class Study:
    """The runs of the study, by arm and delay."""

    def __init__(self, runs_by_place: Mapping[tuple[str, str], pd.DataFrame]) -> None:
        self.runs_by_place = dict(runs_by_place)  # rows of `at_best_rates`, diverged ones, too

    @classmethod
    def load(cls, folder: Path) -> Study:
        """Read the runs in a folder, and Scion's from the scale `tuned`, where its settings were
        searched.

        UserError if the folder has no run of the study, or two experiments of one arm and
        delay."""
        if not folder.is_dir():
            raise UserError(f"{folder}: no such folder; make the runs with brx sweep {SWEEPS}")
        found: dict[tuple[str, str], pd.DataFrame] = {}
        for seeds in by_experiment(at_best_rates(load([folder]), with_diverged=True)):
            config = read_run(Path(str(seeds.index[0]))).config
            arm = arm_of(config)
            delay = delay_of(config.pipeline)
            if arm is None or delay is None:
                continue
            if (arm, delay) in found:
                raise UserError(
                    f"{seeds.index[0]}: of another experiment than {found[arm, delay].index[0]}, "
                    f"but of the same arm ({arm}, delay: {delay}); move one of them away"
                )
            found[arm, delay] = _with_lost(seeds)
        if not found:
            raise UserError(f"{folder}: no runs of the study; make them with brx sweep {SWEEPS}")
        _share_equal_arms(found)
        return cls({**found, **_scion()})

    def has(self, arm: str, delay: str) -> bool:
        """Whether the cost of a delay is known."""
        return (arm, delay) in self.runs_by_place and (arm, NONE) in self.runs_by_place

    def pair(self, arm: str, delay: str) -> list[pd.DataFrame]:
        """The runs without delay and with it, on the seeds that both have; UserError if either is
        missing."""
        for place in ((arm, NONE), (arm, delay)):
            if place not in self.runs_by_place:
                raise UserError(f"no runs of {place[0]} yet (delay: {place[1]})")
        return shared_seeds(self.runs_by_place[arm, NONE], self.runs_by_place[arm, delay])

    def cost(self, arm: str, delay: str) -> pd.Series:
        """The cost of a delay for an arm, in nats, by seed; infinite if the run diverged with the
        delay."""
        without, delayed = (runs.set_index(SEED)["val_loss"] for runs in self.pair(arm, delay))
        with np.errstate(invalid="ignore"):  # infinity minus infinity: both diverged
            return delayed - without

    def costs(self, arms: Sequence[str], delay: str) -> pd.DataFrame:
        """A row per seed that all arms have, a column per arm."""
        return pd.DataFrame({arm: self.cost(arm, delay) for arm in arms}).dropna()

    def log_slowdowns(self, arms: Sequence[str], delay: str) -> pd.DataFrame:
        """Logarithms of the slowdowns to one target, the lowest loss that all of these arms reach:
        a row per seed, a column per arm. Infinite if a run never reaches the target."""
        pairs = {arm: self.pair(arm, delay) for arm in arms}
        target = common_target(pd.concat(list(chain.from_iterable(pairs.values()))))
        logs = {}
        for arm, pair in pairs.items():
            without, delayed = (reached_by_seed(runs, target) for runs in pair)
            by_seed = {}
            for seed, reached in delayed.items():
                if without[seed].is_reached:
                    ratio = reached.iterations / without[seed].iterations
                    by_seed[seed] = math.log(ratio) if reached.is_reached else math.inf
            logs[arm] = pd.Series(by_seed)
        return pd.DataFrame(logs).dropna()

    def norms(self, arms: Sequence[str], delay: str) -> pd.DataFrame:
        """The Hessian's (1,1)-norm per parameter at half of the training, in each arm's
        coordinates: a row per seed, a column per arm. AdamW's coordinates are the original
        ones."""
        norms: dict[str, dict[int, float]] = {}
        for arm in arms:
            space = SPACES[0] if arm == ADAMW else SPACES[1]
            _, delayed = self.pair(arm, delay)
            norms[arm] = {}
            for run, row in delayed[delayed["status"] == "finished"].iterrows():
                half = int(row["last_iteration"]) // 2
                measured = results_of(Path(str(run)), (space,), half)
                if space in measured:
                    norms[arm][int(row[SEED])] = measured[space].normalized
        return pd.DataFrame(norms).reindex(columns=list(arms)).dropna()


def _share_equal_arms(found: dict[tuple[str, str], pd.DataFrame]) -> None:
    """Give each arm of `SAME` the runs of the other, where it has none of its own, and those of
    `SAME_WITHOUT_DELAY` the others' runs without delay."""
    for arm, other in (SAME, SAME[::-1]):
        for delay in (NONE, *DELAYED):
            if (other, delay) in found:
                found.setdefault((arm, delay), found[other, delay])
    for arm, other in SAME_WITHOUT_DELAY.items():
        if (other, NONE) in found:
            found[arm, NONE] = found[other, NONE]


def _with_lost(seeds: pd.DataFrame) -> pd.DataFrame:
    """The runs of an experiment, including diverged ones with an infinite loss."""
    if (seeds["status"] == "finished").any():
        return with_diverged(seeds)
    return seeds.assign(train_loss=math.inf, val_loss=math.inf)


def _scion() -> dict[tuple[str, str], pd.DataFrame]:
    """Scion's runs without delay and with the delays of 32 stages, if there are any.

    They belong to the scale `tuned`, for which Scion's learning rates and momentum were
    searched."""
    scale = SCALES["tuned"]
    if not scale.runs.is_dir():
        return {}
    experiments = Experiments.load(scale)
    found = {}
    for delay, num_stages in ((NONE, 1), (DEEPEST, 32)):
        seeds = experiments.find(SCION, num_stages)
        if seeds is not None:
            found[SCION, delay] = with_diverged(seeds)
    return found


# The predictions of section 12.

Outcome = Literal["holds", "refuted", "open", "not tried"]


@dataclass(frozen=True)
class Finding:
    """The verdict on a prediction."""

    outcome: Outcome
    text: str


@dataclass(frozen=True)
class Prediction:
    """One prediction of section 12. `judge` raises UserError if runs are missing."""

    name: str
    statement: str
    judge: Callable[[Study], Finding]


def cost_rises_with_the_angle(study: Study) -> Finding:
    """Whether costs and slowdowns rise along the angles: the rank test, and the ends."""
    costs = study.costs(BASES, DEEPEST)
    of_costs = strict.trend(costs)
    of_slowdowns = strict.trend(study.log_slowdowns(BASES, DEEPEST))
    ends = costs[RANDOM] - costs[EIGENBASIS]
    text = (
        f"cost {_by_arm(costs)}; rank test: chance {of_costs.chance:.2g} (costs), "
        f"{of_slowdowns.chance:.2g} (slowdowns); random minus eigenbasis {_mean_text(ends)}"
    )
    holds = strict.all_of([of_costs.verdict, of_slowdowns.verdict]) == "yes"
    return Finding(_outcome(holds, len(costs)), text)


def random_basis_is_no_better_than_none(study: Study) -> Finding:
    """Whether the cost in a random basis is within chance of AdamW's."""
    costs = study.costs([RANDOM, ADAMW], DEEPEST)
    difference = costs[ADAMW] - costs[RANDOM]
    holds = strict.direction(difference.tolist()) == "open"
    text = f"cost {_by_arm(costs)}; AdamW minus random basis {_mean_text(difference)}"
    return Finding(_outcome(holds, len(costs)), text)


def norm_orders_the_costs(study: Study) -> Finding:
    """Whether costs rise with the norms, by the rank test over the bases and AdamW."""
    arms = [*BASES, ADAMW]
    norms = study.norms(arms, DEEPEST)
    if norms.empty:
        raise UserError("the Hessian's norms have not been measured at half of the training yet")
    costs = study.costs(arms, DEEPEST)
    seeds = norms.index.intersection(costs.index)
    total = 0
    for seed in seeds:
        by_norm = norms.loc[seed].sort_values().index
        total += strict.kendall_s(costs.loc[seed, by_norm].tolist())
    chance = strict.chance_of_s(len(arms), len(seeds), total) if len(seeds) else math.nan
    text = f"norm {_by_arm(norms.loc[seeds])}; rank test: chance {chance:.2g}"
    return Finding(_outcome(chance <= strict.CHANCE, len(seeds)), text)


def momentum_lowers_the_cost(study: Study, method: str) -> Finding:
    """Whether a method's cost at a delay of one update falls with its momentum, by the rank
    test."""
    costs = study.costs([with_momentum(method, value) for value in MOMENTA], ONE_UPDATE)
    chance = strict.chance_of_rise(-costs) if len(costs) else math.nan
    text = f"cost {_by_arm(costs)}; rank test: chance {chance:.2g}"
    return Finding(_outcome(chance <= strict.CHANCE, len(costs)), text)


def geometry_is_enough(study: Study) -> Finding:
    """Whether Lion outside the eigenbasis costs no more than basis rotation, and Muon as much."""
    costs = study.costs([EIGENBASIS, LION, MUON], DEEPEST)
    of_lion = costs[LION] - costs[EIGENBASIS]
    of_muon = costs[MUON] - costs[EIGENBASIS]
    lion_costs_more = strict.direction(of_lion.tolist()) == "yes"
    muon_is_within_chance = strict.direction(of_muon.tolist()) == "open"
    text = (
        f"cost above basis rotation's: Lion {_mean_text(of_lion)}, Muon {_mean_text(of_muon)} nats"
    )
    return Finding(_outcome(muon_is_within_chance and not lion_costs_more, len(costs)), text)


def eigenbasis_helps_lion(study: Study) -> Finding:
    """Whether Lion costs less inside the eigenbasis than outside."""
    return _costs_less(study, ROTATED_LION, LION, DEEPEST)


def muon_costs_less_than_adamw(study: Study) -> Finding:
    """Whether AdamW's cost at a delay of one update is above Muon's."""
    return _costs_less(study, MUON, ADAMW, ONE_UPDATE)


def _costs_less(study: Study, better: str, worse: str, delay: str) -> Finding:
    costs = study.costs([better, worse], delay)
    difference = costs[worse] - costs[better]
    holds = strict.direction(difference.tolist()) == "yes"
    text = f"cost {_by_arm(costs)}; {worse} minus {better} {_mean_text(difference)}"
    return Finding(_outcome(holds, len(costs)), text)


def _outcome(holds: bool, num_seeds: int) -> Outcome:
    """With too few seeds nothing is decided."""
    if num_seeds < strict.FEWEST_SEEDS:
        return "open"
    return "holds" if holds else "refuted"


def _by_arm(table: pd.DataFrame) -> str:
    """The mean of each column."""
    return ", ".join(f"{mean:.3f} ({arm})" for arm, mean in table.mean().items())


def _mean_text(by_seed: pd.Series) -> str:
    """A mean, with its interval if there are enough seeds for one."""
    values = by_seed.tolist()
    if len(values) < strict.FEWEST_SEEDS or not np.isfinite(values).all():
        return f"{by_seed.mean():+.3f}"
    interval = strict.interval_of(values)
    return f"{interval.mean:+.3f} [{interval.low:+.3f}, {interval.high:+.3f}]"


def _of_momentum(method: str) -> Prediction:
    return Prediction(
        f"4, {NAMES[method]}",
        f"with more momentum a delay of one update costs {NAMES[method]} less",
        lambda study: momentum_lowers_the_cost(study, method),
    )


def _of_error_feedback(arm: str, other: str) -> Prediction:
    name = LABELS[other]
    return Prediction(
        f"7, {name}",
        f"with error feedback a delay of one update costs {name} less",
        lambda study: _costs_less(study, arm, other, ONE_UPDATE),
    )


PREDICTIONS = (
    Prediction(
        "1",
        "the further the bases are turned from the eigenbasis, the more the delays of 32 stages "
        "cost",
        cost_rises_with_the_angle,
    ),
    Prediction(
        "2",
        "a random basis is no better than none",
        random_basis_is_no_better_than_none,
    ),
    Prediction(
        "3",
        "the larger the Hessian's (1,1)-norm in the coordinates, the more delay costs",
        norm_orders_the_costs,
    ),
    *map(_of_momentum, MOMENTUM_KEYS),
    Prediction(
        "5, geometry",
        "Lion costs no more than basis rotation, and Muon as much as basis rotation",
        geometry_is_enough,
    ),
    Prediction(
        "5, alignment",
        "Lion costs less inside the eigenbasis than outside",
        eigenbasis_helps_lion,
    ),
    Prediction(
        "6",
        "a delay of one update costs AdamW more than Muon",
        muon_costs_less_than_adamw,
    ),
    *(_of_error_feedback(arm, other) for arm, other in SAME_WITHOUT_DELAY.items()),
)


def prediction_table(folder: Path) -> pd.DataFrame:
    """A row per prediction; all cells are texts. UserError if the folder has no runs of the
    study."""
    study = Study.load(folder)
    rows = []
    for prediction in PREDICTIONS:
        try:
            finding = prediction.judge(study)
        except UserError as error:
            finding = Finding("not tried", str(error))
        rows.append(
            {
                "prediction": prediction.name,
                "statement": prediction.statement,
                "verdict": finding.outcome,
                "here": finding.text,
            }
        )
    return pd.DataFrame(rows)


# The figure: a panel per question that has runs.

COST_LABEL = "cost of delay (nats)"
CAPTION = (
    "What the delay costs in final validation loss: (a) in bases turned away from the eigenbasis, "
    "(b) by momentum, (c) by the geometry of the step, (d) with corrections, (e) with error "
    "feedback. Points: means over seeds; bars: 95 % intervals, from three seeds on; crosses: a "
    "seed diverged."
)


@dataclass(frozen=True)
class Panel:
    """A panel of the figure. It is drawn if the cost of any delay is known for one of `arms`."""

    title: str
    arms: Sequence[str]
    draw: Callable[[Study, Axes], None]

    def has_runs(self, study: Study) -> bool:
        """Whether there is anything to draw."""
        return any(study.has(arm, delay) for arm, delay in product(self.arms, DELAYED))


def draw_causes(folder: Path, path: Path) -> list[Path]:
    """Draw the panels that have runs; the caption names the others. Gives the files written.

    Args:
        folder: of the study's runs.
        path: the figure's path without suffix.

    Raises:
        UserError: no panel has runs.
    """
    study = Study.load(folder)
    shown = [panel for panel in PANELS if panel.has_runs(study)]
    left_out = [panel.title for panel in PANELS if panel not in shown]
    if not shown:
        raise UserError(
            f"{folder}: no arm has runs both without delay and with it; make them with brx sweep "
            f"{SWEEPS}"
        )
    columns = min(2, len(shown))
    rows = math.ceil(len(shown) / columns)
    with new_figure(width=3.5, height=2.9 * rows, columns=columns) as figure:
        places = figure.subplots(rows, columns, squeeze=False).ravel()
        for panel, axes in zip(shown, places, strict=False):
            panel.draw(study, axes)
        for axes in places[len(shown) :]:
            axes.set_axis_off()
        caption = CAPTION
        if left_out:
            caption += f"\nLeft out, for want of runs: {', '.join(left_out)}."
        details = {"costs": cost_records(study)}
        return save(figure, path, caption, command="brx plot causes", details=details)


def cost_records(study: Study) -> list[dict[str, Any]]:
    """The known costs of each delay for each arm, by seed."""
    records = []
    for arm, delay in product((*ARMS, SCION), DELAYED):
        if study.has(arm, delay):
            costs = study.cost(arm, delay)
            by_seed = {str(seed): round(cost, 4) for seed, cost in costs.items()}
            records.append({"arm": arm, "delay": delay, "cost by seed": by_seed})
    return records


@dataclass(frozen=True)
class Point:
    """An arm's mean cost over seeds, and the ends of its interval.

    With fewer than three seeds both ends are the mean. The mean is infinite if a seed diverged."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, study: Study, arm: str, delay: str) -> Point:
        """The cost of a delay for an arm; it must be known."""
        costs = study.cost(arm, delay).dropna()
        mean = float(costs.mean())
        if len(costs) < strict.FEWEST_SEEDS or not np.isfinite(costs).all():
            return cls(mean, mean, mean)
        interval = strict.interval_of(costs.tolist())
        return cls(mean, interval.low, interval.high)


def _draw_costs(
    axes: Axes,
    study: Study,
    places: Mapping[str, float],  # x of each arm
    delay: str,
    look: Look,
    **style: Any,
) -> list[float]:
    """Draw the known costs of some arms; gives their means. Arms that diverged are crosses at the
    top."""
    points = {arm: Point.of(study, arm, delay) for arm in places if study.has(arm, delay)}
    finite = {arm: point for arm, point in points.items() if math.isfinite(point.mean)}
    lost = [places[arm] for arm in points if arm not in finite]
    axes.plot(lost, [0.97] * len(lost), "x", color=look.color, transform=axes.get_xaxis_transform())
    if finite:
        x = np.array([places[arm] for arm in finite])
        y = np.array([point.mean for point in finite.values()])
        low = np.array([point.low for point in finite.values()])
        high = np.array([point.high for point in finite.values()])
        draw_points(axes, x, y, (low, high), look, **style)
    return [point.mean for point in points.values()]


def _draw_bases(study: Study, axes: Axes) -> None:
    """The cost against the angle of the bases, and AdamW at the right end."""
    places = {arm: float(place) for place, arm in enumerate(BASES)}
    places[ADAMW] = len(BASES) + 0.2  # apart: it has no basis
    for index, delay in enumerate(DELAYED):
        look = Look(f"delay: {delay}", to_hex(sequence_color(index, len(DELAYED))), "o")
        of_bases = {arm: places[arm] for arm in BASES}
        _draw_costs(axes, study, of_bases, delay, look, linestyle="-", label=look.label)
        _draw_costs(axes, study, {ADAMW: places[ADAMW]}, delay, look, fillstyle="none")
    labels = [f"{theta:g}" if isinstance(theta, float) else theta for theta in THETAS]
    axes.set_xticks(list(places.values()), [*labels, "AdamW"], fontsize=7)
    title = "(a) bases turned away"
    if study.has(EIGENBASIS, DEEPEST) and study.has(RANDOM, DEEPEST):
        in_eigenbasis = study.cost(EIGENBASIS, DEEPEST).mean()
        in_random = study.cost(RANDOM, DEEPEST).mean()
        title += f": {in_eigenbasis:.2f} nats in the eigenbasis,\n{in_random:.2f} in a random basis"
    finish_panel(axes, "angle theta of the turn (radians)", COST_LABEL, title)


def _draw_momenta(study: Study, axes: Axes) -> None:
    """A line per method and delay: solid at one update, dashed under 32 stages."""
    styles = {ONE_UPDATE: "-", DEEPEST: "--"}
    changes = []
    for method in MOMENTUM_KEYS:
        look = look_of(method)
        places = {with_momentum(method, value): float(i) for i, value in enumerate(MOMENTA)}
        for delay, line in styles.items():
            label = f"{NAMES[method]}, {delay}"
            means = _draw_costs(axes, study, places, delay, look, linestyle=line, label=label)
            if delay == ONE_UPDATE and len(means) == len(MOMENTA):
                changes.append(f"{NAMES[method]} {means[-1] - means[0]:+.2f}")
    axes.set_xticks(range(len(MOMENTA)), [f"{value:g}" for value in MOMENTA])
    title = "(b) momentum"
    if changes:
        title += f", 0.9 to 0.99 at one update:\n{', '.join(changes)}"
    finish_panel(axes, "momentum", COST_LABEL, title, columns=2)


def _draw_rows(
    arms: Sequence[str], question: str, delay: str = DEEPEST
) -> Callable[[Study, Axes], None]:
    """A panel with a row per arm for which the cost of the delay is known.

    The arm that loses least is at the top."""

    def draw(study: Study, axes: Axes) -> None:
        points = {arm: Point.of(study, arm, delay) for arm in arms if study.has(arm, delay)}
        ordered = sorted(points, key=lambda arm: -points[arm].mean)
        names = []
        for place, arm in enumerate(ordered):
            look = look_of(LOOKS.get(arm, arm))
            point = points[arm]
            axes.plot(point.mean, place, look.marker, color=look.color, markersize=5)
            axes.plot([point.low, point.high], [place, place], color=look.color)
            diverged = "" if math.isfinite(point.mean) else " (diverged)"
            names.append(LABELS.get(arm, arm) + diverged)
        axes.set_yticks(range(len(ordered)), names)
        axes.set_ylim(-0.5, len(ordered) - 0.5)
        axes.axvline(0.0, color="black", linewidth=0.5)
        title = f"{question}, {delay}"
        if ordered:
            title += f":\n{names[-1]} loses least"
        finish_panel(axes, COST_LABEL, "", title)

    return draw


# The method whose look an arm has.
LOOKS = {
    ADAMW: "pipedream",
    EIGENBASIS: "basis-rotation",
    MUON: "muon",
    ADAMW_FEEDBACK: "pipedream",
    MUON_FEEDBACK: "muon",
}
GEOMETRIES = (ADAMW, LION, ROTATED_LION, MUON, SCION, EIGENBASIS)
CORRECTIONS = (ADAMW, ADAN, PACI, ACCUMULATED, EIGENBASIS)
FEEDBACK = (ADAMW, ADAMW_FEEDBACK, MUON, MUON_FEEDBACK)

PANELS = (
    Panel("bases", BASES, _draw_bases),
    Panel(
        "momentum",
        [arm for arm in ARMS if "momentum" in arm and arm not in (ADAMW, MUON, SAME[1])],
        _draw_momenta,
    ),
    Panel("geometry", [LION, ROTATED_LION, SCION], _draw_rows(GEOMETRIES, "(c) geometry")),
    Panel("corrections", [ADAN, PACI, ACCUMULATED], _draw_rows(CORRECTIONS, "(d) corrections")),
    Panel(
        "error feedback",
        [ADAMW_FEEDBACK, MUON_FEEDBACK],
        _draw_rows(FEEDBACK, "(e) error feedback", ONE_UPDATE),
    ),
)
