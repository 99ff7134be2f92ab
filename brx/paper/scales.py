"""The scales at which the paper is reproduced, and how its experiments are found among a scale's
runs."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np
import pandas as pd

from brx.config.loading import PRESETS, Settings, preset_with
from brx.errors import UserError
from brx.runs.comparison import common_target
from brx.runs.experiments import at_best_rates, main_origin, notes, tried_rates
from brx.runs.frames import (
    RATE,
    experiment_id,
    load,
    read_run,
    unusual_settings,
    without_settings,
)

T = TypeVar("T")

MAIN = ("pipedream", "pipedream-lr", "nesterov", "basis-rotation")
PRECONDITIONED = ("soap", "muon", "scion")
_ROTATION = {"optimizer.method": "basis-rotation"}
VARIANTS: dict[str, Settings] = {
    **{method: {"optimizer.method": method} for method in MAIN},
    "basis-rotation 2nd/unilateral": _ROTATION | {"optimizer.geometry": "unilateral"},
    "basis-rotation 1st/bilateral": _ROTATION | {"optimizer.source": "1st"},
    "basis-rotation 1st/unilateral": _ROTATION
    | {"optimizer.source": "1st", "optimizer.geometry": "unilateral"},
    **{method: {"optimizer.method": method} for method in (*PRECONDITIONED, "delay-compensation")},
}
"""By label, the settings of a method, or of a strategy of basis rotation: those that differ from
2nd/bilateral."""
STRATEGY_NAMES = tuple(variant for variant in VARIANTS if variant.startswith("basis-rotation"))
BASELINES_AND_STRATEGIES = (*MAIN[:3], *reversed(STRATEGY_NAMES))
# Methods that were trained for several numbers of iterations.
LADDER_METHODS = ("basis-rotation", "nesterov", "pipedream-lr")
DEPTHS = (1, 2, 4, 8, 16, 32)  # numbers of stages P of the main comparison
DEEPEST = 32
ENDS = (1, DEEPEST)  # those between which a slowdown is taken
RUN_AT = {
    **dict.fromkeys((*MAIN, *STRATEGY_NAMES), DEPTHS),
    **dict.fromkeys(PRECONDITIONED, ENDS),
}
"""By variant, the numbers of stages of the main comparison at which it was trained."""
PER_BLOCK = "one block per stage"  # the model of the block scaling
BLOCKS = (4, 8, 16, 32)  # its depths
COMPENSATIONS = (0.04, 0.1, 0.5, 1.0)
FREQUENCIES = (1, 10, 100)


class Model(NamedTuple):
    """A model of a scale."""

    preset: str
    settings: Settings = MappingProxyType({})  # over the preset
    sweep: str = ""  # that trains it; empty: the sweep of each method
    # At which methods are compared; None: the largest number of the main comparison.
    stages: int | None = None


@dataclass(frozen=True)
class Scale:
    """A set of experiments that reproduces the paper: its models, and where its runs are."""

    name: str
    runs: Path
    curvature: Path  # the runs whose Hessians were measured
    models: Mapping[str, Model]
    # By number of iterations: further settings in which runs differ from the main model's.
    ladder: Mapping[int, Settings] = field(default_factory=dict)
    # Model and training grow together along the ladder: its law is fitted to each seed.
    grows: bool = False
    # By a sweep at both ends: the sweep of the depths between them; empty where there is none.
    between: Mapping[str, str] = field(default_factory=dict)
    # Sweeps of other scales whose runs this one's `main` makes.
    in_main: tuple[str, ...] = ()
    # Milliseconds per iteration, by size and method.
    times: Path = Path("benchmarks/results/small_models.json")
    # By method: the setting that was chosen in addition to the learning rate (docs/protocol.md,
    # 10).
    seconds: Mapping[str, str] = field(default_factory=dict)

    @property
    def preset(self) -> str:
        return self.models["main"].preset

    def sweep(self, name: str) -> str:
        """The path of a sweep file of the scale."""
        return f"configs/sweeps/{self.name}/{name}.yaml"

    def maker(self, sweep: str, stages: int) -> str:
        """The sweep file that makes the runs of an experiment at P stages; empty if no sweep of
        the scale does."""
        name = sweep if stages in ENDS else self.between.get(sweep, sweep)
        file = PRESETS / "sweeps" / self.name / f"{name}.yaml"
        return self.sweep(name) if name and file.is_file() else ""


def _rung(width: int, rate: float, warmup: float, beta2: float, decay: float) -> Settings:
    optimizer = {RATE: rate, "optimizer.beta2": beta2, "optimizer.weight_decay": decay}
    return {"model.width": width, "training.warmup_fraction": warmup, **optimizer}


SIMILAR_MODELS = {
    "main": Model("similar"),
    "smaller": Model("similar", sweep="width", stages=24),
    "larger": Model("similar", {"model.width": 128}, "width", 24),
    "mixture of experts": Model(
        "similar", {"model.moe": {"experts": 8, "top_k": 2, "every": 2}}, "moe"
    ),
    PER_BLOCK: Model("similar", {"model.width": 32}, "block-scaling"),
}
"""The models of `similar`, which `tuned` trains again with equal tuning."""

SECOND_SETTINGS = {
    "pipedream": "optimizer.beta1",
    "pipedream-lr": "optimizer.annealing_fraction",
    "nesterov": "optimizer.beta1",
    "basis-rotation": "optimizer.beta1",
    "soap": "optimizer.beta1",
    "muon": "optimizer.momentum",
    "scion": "optimizer.momentum",
}
"""By method: what equal tuning chooses in addition to the learning rate (docs/protocol.md, 10)."""

SCALES = {
    "laptop": Scale(
        name="laptop",
        runs=Path("results/laptop"),
        curvature=Path("results/laptop-curvature"),
        models={
            "main": Model("laptop"),
            "smaller": Model("laptop", sweep="width", stages=24),
            "larger": Model("laptop", {"model.width": 64}, "width", 24),
            "mixture of experts": Model("laptop-moe", sweep="moe"),
            PER_BLOCK: Model("laptop"),
        },
        ladder={iterations: {} for iterations in (2000, 4000, 8000, 16000, 32000, 64000, 128000)},
        between={"main": "depths"},
    ),
    "similar": Scale(
        name="similar",
        runs=Path("results/similar"),
        curvature=Path("results/similar-curvature"),
        models=SIMILAR_MODELS,
        ladder={  # docs/protocol.md, section 9
            8000: _rung(32, 2e-3, warmup=0.2, beta2=0.988, decay=0.02),
            18000: _rung(48, 1.333e-3, warmup=0.167, beta2=0.99467, decay=0.01333),
            32000: {RATE: 1e-3},
            72000: _rung(96, 6.667e-4, warmup=0.0418, beta2=0.998667, decay=0.006667),
        },
        grows=True,
        between={"main": "depths", "strategies": "depths"},
    ),
    "tuned": Scale(
        name="tuned",
        runs=Path("results/tuned"),
        curvature=Path("results/tuned-curvature"),
        models=SIMILAR_MODELS,
        in_main=("preconditioned",),
        between={"main": "depths"},
        seconds=SECOND_SETTINGS,
    ),
    "llama": Scale(  # docs/protocol.md, section 15
        name="llama",
        runs=Path("results/llama"),
        curvature=Path("results/llama-curvature"),
        models={"main": Model("similar-llama")},
        in_main=("preconditioned",),
        between={"main": ""},
        seconds=SECOND_SETTINGS,
    ),
    "paper": Scale(
        name="paper",
        runs=Path("runs/paper"),
        curvature=Path("runs/paper"),
        models={
            "main": Model("paper-95m"),
            "smaller": Model("paper-95m", {"model.blocks": 24}, "width", 24),
            "larger": Model("paper-1b", sweep="1b", stages=24),
            "mixture of experts": Model("paper-moe-100m", sweep="moe"),
            PER_BLOCK: Model("paper-95m"),
            "3B": Model("paper-3b", sweep="3b"),
        },
    ),
}


def depth_settings(depth: int, blocks: int) -> Settings:
    """The settings of a pipeline of P stages. Where the model has fewer blocks, each is a stage and
    they have the delays of P stages."""
    if depth <= blocks:
        return {"pipeline.stages": depth}
    return {"pipeline.stages": blocks, "pipeline.delay.like": depth}


@cache
def _blocks(preset: str) -> int:
    return preset_with(preset, {}).model.blocks


def at_best_seconds(runs: pd.DataFrame, seconds: Mapping[str, str]) -> pd.DataFrame:
    """Among runs that differ in a second setting, keep those with its best value, as one
    experiment.

    Args:
        runs: rows of `brx.runs.load`.
        seconds: by method, the second setting, a dotted key.

    The best value is the one whose lowest loss over the learning rates is the lowest, by the rule
    of `tried_rates`. In the result, `experiment` and `variant` no longer tell values apart. Its
    column `second` is a text with all values tried and their losses."""
    parts = []
    losses = tried_rates(runs).groupby("experiment")["score"].min()
    groups = _without_seconds(runs, seconds)
    for _, alike in runs.groupby(groups, sort=False):
        second = seconds.get(alike["method"].iloc[0])
        chosen, text = alike, ""
        if second is not None:
            best, text = _best_value(alike, second, losses)
            chosen = alike[alike["experiment"] == best]
        names = [_name_without(variant, second) for variant in chosen["variant"]]
        parts.append(chosen.assign(variant=names, second=text))
    if not parts:
        return runs.assign(second="")
    result = pd.concat(parts)
    return result.assign(experiment=groups[result.index])


def _best_value(alike: pd.DataFrame, second: str, losses: pd.Series) -> tuple[str, str]:
    """The experiment with the lowest loss, and a text such as `beta1 0.9 (0.9: 1.52, 0.95: 1.6)`.

    `losses` are the lowest of each experiment; one without a loss counts as the worst."""
    values = alike.groupby("experiment")[second].first()
    tried = losses.reindex(values.index).fillna(np.inf)
    best = str(tried.idxmin())
    shown = [
        f"{value:g}: {tried[experiment]:.3f}" for experiment, value in values.sort_values().items()
    ]
    name = second.rpartition(".")[2]
    return best, f"{name} {values[best]:g} ({', '.join(shown)})"


def _without_seconds(runs: pd.DataFrame, seconds: Mapping[str, str]) -> pd.Series:
    """The `experiment` of each run, whatever its second setting is."""
    ids = []
    for run, row in runs[["data_fingerprint", "trajectory_version"]].iterrows():
        config = read_run(Path(str(run))).config
        fingerprint, version = row["data_fingerprint"], row["trajectory_version"]
        identity = experiment_id(
            config,
            None if pd.isna(fingerprint) else fingerprint,
            None if pd.isna(version) else int(version),
            seconds.get(config.optimizer.method),
        )
        ids.append(identity)
    return pd.Series(ids, runs.index)


def _name_without(variant: str, second: str | None) -> str:
    """A variant's name without the value of a second setting."""
    if second is None:
        return variant
    key = second.rpartition(".")[2]
    return ", ".join(part for part in variant.split(", ") if not part.startswith(f"{key} "))


class Experiments:
    """Finds a scale's experiments among its runs, and remembers which were asked for: those that
    were there (`used`) and those that were not (`missing`)."""

    def __init__(self, scale: Scale, runs: pd.DataFrame, folder: Path) -> None:
        # Settings that the scale's preset gives to every method do not distinguish methods.
        usual = unusual_settings(preset_with(scale.preset, {}))
        runs = runs.assign(variant=without_settings(runs["variant"], usual))
        if scale.seconds:
            runs = at_best_seconds(runs, scale.seconds)
        self.scale, self.runs, self.folder = scale, runs, folder
        self.chosen = at_best_rates(runs)  # of each experiment
        self._origin = main_origin(self.chosen)
        self._by_experiment = dict(iter(self.chosen.groupby("experiment")))
        self._diverged = set(runs.loc[runs["status"] == "diverged", "experiment"]) - set(
            self._by_experiment
        )
        # The runs of each experiment that was asked for and is there, by its id.
        self.used: dict[str, pd.DataFrame] = {}
        self.sweeps: list[str] = []  # the files that make these
        # A line for each experiment that is not there or diverged, with the file that makes it. The
        # one asked for last is at the end.
        self.missing: dict[str, str] = {}
        self._known: dict[Hashable, Any] = {}  # see `once`

    @classmethod
    def load(cls, scale: Scale, folder: Path | None = None) -> Experiments:
        """Read the runs of a scale, from its own folder by default."""
        folder = folder or scale.runs
        if not folder.is_dir():
            raise UserError(
                f"{folder}: no such folder; make the runs with brx sweep {scale.sweep('main')}"
            )
        return cls(scale, load(folder), folder)

    @property
    def notes(self) -> list[str]:
        return notes(self.runs, self.chosen)

    @cached_property
    def tried(self) -> pd.DataFrame:
        return tried_rates(self.runs)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of all runs and what they came to: what was drawn from others has another."""
        outcome = self.runs[["name", "status", "iteration", "train_loss", "val_loss"]]
        return hashlib.sha256(outcome.to_csv(index=False).encode()).hexdigest()[:16]

    def fresh(self) -> Experiments:
        """The same runs, with nothing asked for yet."""
        again = copy.copy(self)
        again.used, again.sweeps, again.missing = {}, [], {}
        return again

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` gives; the first result for this key, where it has been made for these runs
        before, also for another copy of them (`fresh`)."""
        if key not in self._known:
            self._known[key] = make()
        known: T = self._known[key]
        return known

    def at_rate(self, rate: float) -> Experiments:
        """The same runs at one learning rate. Experiments that are asked for there count as asked
        for here."""

        def make() -> Experiments:
            return Experiments(self.scale, self.runs[self.runs[RATE] == rate], self.folder)

        alone = copy.copy(self.once(("at rate", rate), make))
        alone._origin, alone.used, alone.sweeps, alone.missing = (
            self._origin,
            self.used,
            self.sweeps,
            self.missing,
        )
        return alone

    def find(
        self,
        method: str,
        stages: int | None = None,
        sweep: str = "",
        *,
        model: str = "main",
        settings: Settings | None = None,
    ) -> pd.DataFrame | None:
        """The runs of a method at its best learning rate; None where there are none.

        Args:
            method: a label of VARIANTS.
            stages: P; by default the one at which methods are compared with the model.
            sweep: the sweep that makes the runs, where it is not the usual one.
            model: a name of the scale's models.
            settings: dotted keys whose values differ from the model's.

        Raises:
            UserError: the scale does not have the model.
        """
        if model not in self.scale.models:
            self._refuse_model(method, model)
        entry = self.scale.models[model]
        stages = stages or entry.stages or DEEPEST
        settings = {**entry.settings, **(settings or {})}
        sweep = sweep or entry.sweep or self._sweep_of(method, settings)
        if sweep in self.scale.in_main:
            sweep = "main"
        delays = depth_settings(stages, settings.get("model.blocks") or _blocks(entry.preset))
        wanted = preset_with(entry.preset, {**delays, **VARIANTS[method], **settings})
        second = self.scale.seconds.get(wanted.optimizer.method)
        experiment = experiment_id(wanted, *self._origin, second)
        seeds = self._by_experiment.get(experiment)
        maker = self.scale.maker(sweep, stages)
        if seeds is None:
            extra = "".join(f", {key} = {value}" for key, value in settings.items())
            why = "every run diverged, of " if experiment in self._diverged else ""
            how = f"brx sweep {maker}" if maker else f"no sweep of {self.scale.name}"
            line = f"{method} at P = {stages}{extra}: {why}{how}"
            self.missing.pop(line, None)
            self.missing[line] = maker
            return None
        self.used[experiment] = seeds
        if maker and maker not in self.sweeps:
            self.sweeps.append(maker)
        return seeds

    def _refuse_model(self, method: str, model: str) -> NoReturn:
        """Note that runs are missing because this scale lacks their model, and raise UserError."""
        if model == "3B":
            maker = SCALES["paper"].sweep("3b")
            self.missing[f"{method} with 3B parameters: brx sweep {maker}"] = maker
            raise UserError("a model of 3B parameters: at the paper's scale alone")
        self.missing[f"{method} with the model '{model}': no sweep of {self.scale.name}"] = ""
        raise UserError(f"the scale {self.scale.name} has no model '{model}'")

    def find_all(self, wanted: Iterable[Mapping[str, Any]]) -> list[pd.DataFrame]:
        """The runs of each experiment that is there; `wanted` are arguments of `find`."""
        found = []
        for options in wanted:
            seeds = self.find(**options)
            if seeds is not None:
                found.append(seeds)
        return found

    def find_ends(self, *methods: str, **options: Any) -> pd.DataFrame | None:
        """The runs of methods without delay and at the deepest pipeline, or None if any is
        missing."""
        wanted = [{"method": method, "stages": P, **options} for method in methods for P in ENDS]
        found = self.find_all(wanted)
        return pd.concat(found) if len(found) == len(wanted) else None

    def _sweep_of(self, method: str, settings: Settings) -> str:
        """The sweep with a method's runs. The sweep of block scaling does not repeat the preset's
        own depth."""
        usual = _blocks(self.scale.preset)
        if settings.get("model.blocks", usual) != usual:
            return "block-scaling"
        if method in MAIN:
            return "main"
        return "strategies" if method in STRATEGY_NAMES else "preconditioned"

    def slowdown_target(self) -> float | None:
        """The one target of all the paper's slowdowns at this scale, a training loss in nats.

        All methods reach it whose slowdowns the paper compares in more than one place: the
        baselines but PipeDream, and the strategies. None while none of them has both ends."""
        quietly = self.fresh()
        pairs = [quietly.find_ends(method) for method in BASELINES_AND_STRATEGIES[1:]]
        return max((common_target(pair) for pair in pairs if pair is not None), default=None)

    @property
    def makers(self) -> list[str]:
        """The files of the sweeps that make what was asked for, there or not."""
        return list(dict.fromkeys([*self.sweeps, *filter(None, self.missing.values())]))

    @property
    def advice(self) -> str:
        """What to do about the missing runs: the commands that make them, if sweeps of the scale
        do."""
        makers = sorted(set(filter(None, self.missing.values())))
        if not makers:
            return f"no sweep of the scale {self.scale.name} makes them"
        commands = ", ".join(f"brx sweep {maker}" for maker in makers)
        return f"make them with {commands}"
