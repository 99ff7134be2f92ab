"""The scales at which the paper is reproduced, and how its experiments are found among a scale's
runs."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np
import pandas as pd

from brx.config.loading import PRESETS, Settings, find_config, preset_with
from brx.errors import UserError
from brx.paper.study_runs import load_study_runs
from brx.runs.aspects import experiment_id, without_settings
from brx.runs.comparison import common_target
from brx.runs.experiments import at_best_rates, main_origin, notes, tried_rates
from brx.runs.run import read_run, unusual_optimizer_settings
from brx.runs.trajectory import RATE

T = TypeVar("T")

OURS = "basis-rotation"  # the paper's method, which is compared with all others
MAIN = ("pipedream", "pipedream-lr", "nesterov", OURS)
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
"""The settings of each method, and of each strategy of basis rotation, by label. For a strategy,
they are the settings that differ from 2nd/bilateral."""
STRATEGY_NAMES = tuple(variant for variant in VARIANTS if variant.startswith("basis-rotation"))
BASELINES_AND_STRATEGIES = (*MAIN[:3], *reversed(STRATEGY_NAMES))
# The methods of the ladder: they were trained for several numbers of iterations.
LADDER_METHODS = ("basis-rotation", "nesterov", "pipedream-lr")
DEPTHS = (1, 2, 4, 8, 16, 32)  # numbers of stages P of the main comparison
DEEPEST = 32
ENDS = (1, DEEPEST)  # a slowdown compares these two
RUN_AT = {
    **dict.fromkeys((*MAIN, *STRATEGY_NAMES), DEPTHS),
    **dict.fromkeys(PRECONDITIONED, ENDS),
}
"""For each variant, the numbers of stages P at which the main comparison trains it."""
PER_BLOCK = "one block per stage"  # the model of the block scaling
BLOCKS = (4, 8, 16, 32)  # its depths
COMPENSATIONS = (0.04, 0.1, 0.5, 1.0)
FREQUENCIES = (1, 10, 100)


class Model(NamedTuple):
    """A model of a scale."""

    preset: str
    settings: Settings = MappingProxyType({})  # in place of the preset's
    sweep: str = ""  # the sweep that trains it; empty: the sweep of each method
    # P at which methods are compared with this model; None: the largest of the main comparison.
    stages: int | None = None


@dataclass(frozen=True)
class Scale:
    """A set of experiments that reproduces the paper: its models, and where its runs are."""

    name: str
    runs: Path
    curvature: Path  # the runs whose Hessians were measured
    models: Mapping[str, Model]
    # The ladder's lengths in iterations, each with further settings that differ from the main
    # model's.
    ladder: Mapping[int, Settings] = field(default_factory=dict)
    # Model and training grow together along the ladder; its laws are fitted to a point per seed.
    grows: bool = False
    # For a sweep that has runs at both ends only, the sweep of the depths between them; empty if
    # there is none.
    between: Mapping[str, str] = field(default_factory=dict)
    # Sweeps whose runs are in this scale's sweep `main`.
    in_main: tuple[str, ...] = ()
    # Milliseconds per iteration, by size and method.
    times: Path = Path("benchmarks/results/small_models.json")
    # By method, the key of the setting that was chosen in addition to the learning rate
    # (docs/protocol.md, section 10).
    second_keys: Mapping[str, str] = field(default_factory=dict)

    @property
    def preset(self) -> str:
        """The preset of the main model."""
        return self.models["main"].preset

    def sweep(self, name: str) -> str:
        """The path of a sweep file of the scale."""
        return f"configs/sweeps/{self.name}/{name}.yaml"

    def maker(self, sweep: str, stages: int) -> str:
        """The sweep file that makes the runs of an experiment at P stages; empty if no sweep of
        the scale does."""
        name = sweep
        if stages not in ENDS:
            name = self.between.get(sweep, sweep)
        file = PRESETS / "sweeps" / self.name / f"{name}.yaml"
        return self.sweep(name) if name and file.is_file() else ""


def _rung(width: int, rate: float, warmup: float, beta2: float, decay: float) -> Settings:
    """The settings of one rung: one length of a ladder whose model grows with the training."""
    return {
        "model.width": width,
        "training.warmup_fraction": warmup,
        RATE: rate,
        "optimizer.beta2": beta2,
        "optimizer.weight_decay": decay,
    }


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
"""For each method the setting that equal tuning chooses in addition to the learning rate
(docs/protocol.md, section 10)."""

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
        second_keys=SECOND_SETTINGS,
    ),
    "llama": Scale(  # docs/protocol.md, section 15
        name="llama",
        runs=Path("results/llama"),
        curvature=Path("results/llama-curvature"),
        models={"main": Model("similar-llama")},
        in_main=("preconditioned",),
        between={"main": ""},
        second_keys=SECOND_SETTINGS,
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


def settings_of(method: str) -> Settings:
    """The settings of a label in VARIANTS. For any other method, new or a user's own, the label is
    the method's name."""
    return VARIANTS.get(method, {"optimizer.method": method})


def depth_settings(depth: int, blocks: int) -> Settings:
    """The settings of a pipeline of P stages.

    If the model has fewer blocks than P, each block is a stage, with the delays of P stages."""
    if depth <= blocks:
        return {"pipeline.stages": depth}
    return {"pipeline.stages": blocks, "pipeline.delay.like": depth}


@cache
def _blocks(preset: str) -> int:
    """How many blocks the preset's model has."""
    return preset_with(preset, {}).model.blocks


def at_best_second_keys(runs: pd.DataFrame, second_keys: Mapping[str, str]) -> pd.DataFrame:
    """Among runs that differ only in a method's second setting, keep those with its best value.

    The best value is the one with the lowest loss at its best learning rate, by the rule of
    `tried_rates`. In the result, `experiment`, `variant` and the setting's own column are as if the
    second setting were not a setting at all: its best value may differ with and without delay. The
    new column `second` is a text with all values tried and their losses.

    Args:
        runs: rows of `brx.runs.load`.
        second_keys: the second setting of each method, a dotted key.
    """
    if runs.empty:
        return runs.assign(second="")  # pd.concat needs a part
    parts = []
    losses = tried_rates(runs).groupby("experiment")["score"].min()
    groups = _without_second_keys(runs, second_keys)
    for _, alike in runs.groupby(groups, sort=False):
        second = second_keys.get(alike["method"].iloc[0])
        chosen = alike
        text = ""
        if second is not None:
            best, text = _best_value(alike, second, losses)
            chosen = alike[alike["experiment"] == best].assign(**{second: np.nan})
        names = [_name_without(variant, second) for variant in chosen["variant"]]
        parts.append(chosen.assign(variant=names, second=text))
    result = pd.concat(parts)
    return result.assign(experiment=groups[result.index])


def _best_value(alike: pd.DataFrame, second: str, losses: pd.Series) -> tuple[str, str]:
    """The experiment with the lowest loss, and a text such as `beta1 0.9 (0.8: 1.7, 0.9: 1.52,
    0.95: 1.6)`, which says so if the best value is the lowest or highest tried.

    `losses` has the lowest loss of each experiment; an experiment without a loss counts as the
    worst."""
    values = alike.groupby("experiment")[second].first()
    tried = losses.reindex(values.index).fillna(np.inf)
    best = str(tried.idxmin())
    shown = []
    for experiment, value in values.sort_values().items():
        shown.append(f"{value:g}: {tried[experiment]:.3f}")
    name = second.rpartition(".")[2]
    is_at_edge = len(values) > 1 and values[best] in (values.min(), values.max())
    mark = ", at the edge" if is_at_edge else ""
    return best, f"{name} {values[best]:g}{mark} ({', '.join(shown)})"


def _without_second_keys(runs: pd.DataFrame, second_keys: Mapping[str, str]) -> pd.Series:
    """The `experiment` of each run, computed as if runs did not differ in their second setting;
    index: as in `runs`."""
    ids = []
    for run, row in runs[["data_fingerprint", "trajectory_version"]].iterrows():
        config = read_run(Path(str(run))).config
        fingerprint = row["data_fingerprint"]
        version = row["trajectory_version"]
        experiment = experiment_id(
            config,
            None if pd.isna(fingerprint) else fingerprint,
            None if pd.isna(version) else int(version),
            second_keys.get(config.optimizer.method),
        )
        ids.append(experiment)
    return pd.Series(ids, runs.index)


def _name_without(variant: str, second: str | None) -> str:
    """A variant's name without the value of a second setting."""
    if second is None:
        return variant
    key = second.rpartition(".")[2]
    return ", ".join(part for part in variant.split(", ") if not part.startswith(f"{key} "))


@dataclass(frozen=True)
class Missing:
    """An experiment that was asked for and has no finished run."""

    what: str
    maker: str
    """The file of the sweep that makes its runs; empty if none does."""
    how: str
    """How to get its runs, in words."""
    all_diverged: bool = False
    """Whether there are runs, which all diverged."""

    @property
    def line(self) -> str:
        why = "every run diverged, of " if self.all_diverged else ""
        return f"{self.what}: {why}{self.how}"


# The ids of experiments by what was asked for. Claims ask for the same experiments hundreds of
# times, and each time it would take a millisecond to check the configuration.
_IDS: dict[Hashable, str] = {}


class Experiments:
    """Finds a scale's experiments among its runs, and remembers which ones were asked for.

    Args:
        scale: the scale.
        runs: rows of `brx.runs.load`.
        folder: where they were read.

    Attributes:
        runs: the given runs, only those with the best value of each method's second setting.
        chosen: the runs of each experiment at its best learning rate.
        used: experiments that were asked for and have runs: their runs by id.
        sweeps: the files of the sweeps that make `used`.
        missing: experiments that were asked for and have no runs, or whose runs all diverged, by
            the lines about them. The one asked for last is at the end.
    """

    def __init__(self, scale: Scale, runs: pd.DataFrame, folder: Path) -> None:
        # Settings that the scale's preset gives to every method do not distinguish methods.
        usual = unusual_optimizer_settings(preset_with(scale.preset, {}))
        runs = runs.assign(variant=without_settings(runs["variant"], usual))
        # Runs that come from other Experiments (`at_rate`) are at their best values already. These
        # were chosen among all rates, and stay as they are.
        is_chosen = "second" in runs
        if scale.second_keys and not is_chosen:
            runs = at_best_second_keys(runs, scale.second_keys)
        self.scale = scale
        self.runs = runs
        self.folder = folder
        # A copy keeps columns of a kind in one block, which makes it quicker to take out the small
        # frames that claims are judged from.
        self.chosen = at_best_rates(runs).copy()
        self._origin = main_origin(self.chosen)
        self._by_experiment = dict(iter(self.chosen.groupby("experiment")))
        with_diverged_runs = set(runs.loc[runs["status"] == "diverged", "experiment"])
        self._diverged = with_diverged_runs - set(self._by_experiment)
        self.used: dict[str, pd.DataFrame] = {}
        self.sweeps: list[str] = []
        self.missing: dict[str, Missing] = {}
        self._known: dict[Hashable, Any] = {}  # see `once`

    @classmethod
    def load(cls, scale: Scale, folder: Path | None = None) -> Experiments:
        """Read the runs of a scale, by default from its own folder; UserError if there is none."""
        folder = folder or scale.runs
        return cls(scale, load_study_runs(folder, scale.sweep("main")), folder)

    @property
    def notes(self) -> list[str]:
        """Lines about runs that are left out, or do not compare."""
        return notes(self.runs, self.chosen)

    @cached_property
    def tried(self) -> pd.DataFrame:
        """The losses at all learning rates (`tried_rates`)."""
        return tried_rates(self.runs)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of all runs and their results. A figure that has a different one was drawn from
        other runs."""
        outcome = self.runs[["name", "status", "iteration", "train_loss", "val_loss"]]
        return hashlib.sha256(outcome.to_csv(index=False).encode()).hexdigest()[:16]

    def fresh(self) -> Experiments:
        """The same runs, with nothing asked for yet."""
        again = copy.copy(self)
        again.used = {}
        again.sweeps = []
        again.missing = {}
        return again

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """The result of `make`, which is called only once per key: this object and its copies
        (`fresh`) share the results."""
        if key not in self._known:
            self._known[key] = make()
        known: T = self._known[key]
        return known

    def at_rate(self, rate: float) -> Experiments:
        """The runs at one learning rate. Experiments that are asked for there also count as asked
        for here."""

        def make() -> Experiments:
            return Experiments(self.scale, self.runs[self.runs[RATE] == rate], self.folder)

        alone = copy.copy(self.once(("at rate", rate), make))
        alone._origin = self._origin
        alone.used = self.used
        alone.sweeps = self.sweeps
        alone.missing = self.missing
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
        """The runs of a method at its best learning rate; None if there are none.

        Args:
            method: a label in VARIANTS, or the name of another method.
            stages: P; by default the one at which methods are compared with the model.
            sweep: the sweep that makes the runs, if it is not the usual one.
            model: a name of the scale's models.
            settings: dotted keys whose values differ from the model's.

        Raises:
            UserError: the scale does not have the model, or there is no such method.
        """
        if model not in self.scale.models:
            self._refuse_model(method, model)
        entry = self.scale.models[model]
        stages = stages or entry.stages or DEEPEST
        settings = {**entry.settings, **(settings or {})}
        maker = self._maker_of(method, stages, sweep or entry.sweep, settings)
        experiment = self._id_of(method, stages, entry.preset, settings)
        seeds = self._by_experiment.get(experiment)
        if seeds is None:
            extra = "".join(f", {key} = {value}" for key, value in settings.items())
            what = f"{method} at P = {stages}{extra}"
            self._note_missing(what, maker, all_diverged=experiment in self._diverged)
            return None
        self.used[experiment] = seeds
        if maker and maker not in self.sweeps:
            self.sweeps.append(maker)
        return seeds

    def _id_of(self, method: str, stages: int, preset: str, settings: Settings) -> str:
        """The `experiment` that runs would have with these settings in place of the preset's."""
        delays = depth_settings(stages, settings.get("model.blocks") or _blocks(preset))
        changed = {**delays, **settings_of(method), **settings}
        second_keys = tuple(self.scale.second_keys.items())
        asked = (find_config(preset), repr(sorted(changed.items())), self._origin, second_keys)
        if asked not in _IDS:
            config = preset_with(preset, changed)
            second = self.scale.second_keys.get(config.optimizer.method)
            _IDS[asked] = experiment_id(config, *self._origin, second)
        return _IDS[asked]

    def _maker_of(self, method: str, stages: int, sweep: str, settings: Settings) -> str:
        """The file of the sweep that makes an experiment, or ""; an empty `sweep` means the usual
        one."""
        sweep = sweep or self._sweep_of(method, settings)
        if sweep in self.scale.in_main:
            sweep = "main"
        return self.scale.maker(sweep, stages)

    def _refuse_model(self, method: str, model: str) -> NoReturn:
        """Note that runs are missing because this scale lacks their model, and raise UserError."""
        if model == "3B":
            self._note_missing(f"{method} with 3B parameters", SCALES["paper"].sweep("3b"))
            raise UserError("a model of 3B parameters: only at the paper's scale")
        self._note_missing(f"{method} with the model '{model}'", "")
        raise UserError(f"the scale {self.scale.name} has no model '{model}'")

    def _note_missing(self, what: str, maker: str, *, all_diverged: bool = False) -> None:
        how = f"brx sweep {maker}" if maker else f"no sweep of {self.scale.name}"
        missing = Missing(what, maker, how, all_diverged)
        self.missing.pop(missing.line, None)  # so that it goes to the end
        self.missing[missing.line] = missing

    def find_all(self, wanted: Iterable[Mapping[str, Any]]) -> list[pd.DataFrame]:
        """The runs of each experiment that has any; `wanted` are arguments of `find`."""
        present = []
        for options in wanted:
            seeds = self.find(**options)
            if seeds is not None:
                present.append(seeds)
        return present

    def find_ends(self, *methods: str, **options: Any) -> pd.DataFrame | None:
        """The runs of methods without delay and at the deepest pipeline; None if any are
        missing."""
        wanted = [
            {"method": method, "stages": P, **options} for method, P in product(methods, ENDS)
        ]
        present = self.find_all(wanted)
        return pd.concat(present) if len(present) == len(wanted) else None

    def _sweep_of(self, method: str, settings: Settings) -> str:
        """The usual sweep of a method's runs. Block scaling has a sweep of its own, which leaves
        out the preset's own number of blocks."""
        usual = _blocks(self.scale.preset)
        if settings.get("model.blocks", usual) != usual:
            return "block-scaling"
        if method in MAIN:
            return "main"
        return "strategies" if method in STRATEGY_NAMES else "preconditioned"

    def slowdown_target(self) -> float | None:
        """The target of all slowdowns at this scale, a training loss in nats.

        It is the lowest loss that these methods all reach: the baselines except PipeDream, and the
        strategies of basis rotation. (The paper compares their slowdowns in more than one place.)
        None if none of them has runs at both ends."""
        target: float | None = self.once("slowdown target", self._find_target)
        return target

    def _find_target(self) -> float | None:
        # Asks a copy, so that these experiments count neither as used nor as missing.
        quietly = self.fresh()
        pairs = [quietly.find_ends(method) for method in BASELINES_AND_STRATEGIES[1:]]
        return max((common_target(pair) for pair in pairs if pair is not None), default=None)

    @property
    def makers(self) -> list[str]:
        """The files of the sweeps that make all experiments that were asked for."""
        return list(dict.fromkeys([*self.sweeps, *self._makers_of_missing]))

    @property
    def advice(self) -> str:
        """How to get the missing runs: the commands that make them, if sweeps of the scale do."""
        makers = sorted(set(self._makers_of_missing))
        if not makers:
            return f"no sweep of the scale {self.scale.name} makes them"
        commands = ", ".join(f"brx sweep {maker}" for maker in makers)
        return f"make them with {commands}"

    @property
    def _makers_of_missing(self) -> list[str]:
        return [missing.maker for missing in self.missing.values() if missing.maker]
