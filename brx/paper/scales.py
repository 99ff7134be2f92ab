"""The two scales at which the paper is reproduced, and how its experiments are found among a scale's runs."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pandas as pd

from brx.config.loading import Settings, preset_with
from brx.errors import UserError
from brx.runs.comparison import common_target
from brx.runs.experiments import at_best_rates, main_origin, notes
from brx.runs.frames import SEED, experiment_id, load

VARIANTS: dict[str, Settings] = {
    "pipedream": {"optimizer.method": "pipedream"},
    "pipedream-lr": {"optimizer.method": "pipedream-lr"},
    "nesterov": {"optimizer.method": "nesterov"},
    "basis-rotation": {"optimizer.method": "basis-rotation"},
    "basis-rotation 2nd/unilateral": {"optimizer.method": "basis-rotation", "optimizer.geometry": "unilateral"},
    "basis-rotation 1st/bilateral": {"optimizer.method": "basis-rotation", "optimizer.source": "1st"},
    "basis-rotation 1st/unilateral": {
        "optimizer.method": "basis-rotation",
        "optimizer.source": "1st",
        "optimizer.geometry": "unilateral",
    },
    "soap": {"optimizer.method": "soap"},
    "muon": {"optimizer.method": "muon"},
    "scion": {"optimizer.method": "scion"},
    "delay-compensation": {"optimizer.method": "delay-compensation"},
}
MAIN = ("pipedream", "pipedream-lr", "nesterov", "basis-rotation")
STRATEGY_NAMES = (
    "basis-rotation",
    "basis-rotation 2nd/unilateral",
    "basis-rotation 1st/bilateral",
    "basis-rotation 1st/unilateral",
)
SEVEN = (*MAIN[:3], *reversed(STRATEGY_NAMES))
TARGET_METHODS = SEVEN[1:]
"""Those that the paper compares by their slowdown in more than one place: without plain PipeDream."""
LADDER_METHODS = ("basis-rotation", "nesterov", "pipedream-lr")
"""Those that are trained for several numbers of iterations."""
COMPENSATIONS = (0.04, 0.1, 0.5, 1.0)
FREQUENCIES = (1, 10, 100)


@dataclass(frozen=True)
class Scale:
    """Where the runs of a scale are and what they are made of.

    Attributes:
        name: `laptop` or `paper`.
        preset: of the main model.
        runs: folder of its results.
        depths: numbers of stages of the main comparison.
        blocks: models of the block scaling, one block per stage.
        narrow: settings, over the preset, of the smaller model at P = 24.
        wide: of the larger one.
        wide_preset: which preset that is over.
        wide_sweep: the sweep that trains it.
        moe_preset: of the mixture-of-experts model.
        huge_preset: of the 3B model; none at the scale of a laptop.
        lengths: of the trainings of the ladder, in iterations; none at the paper's scale.
        further_seeds: by sweep, the first seed that another one adds to its runs, and which.
        between_sweep: the sweep that makes the main comparison's runs between its ends.
        curvature: folder of the runs whose Hessians were measured.
        times: the benchmark's table of the time of an iteration at the main model's size, by method.
    """

    name: str
    preset: str
    runs: Path
    depths: tuple[int, ...]
    blocks: tuple[int, ...]
    narrow: Settings
    wide: Settings
    wide_preset: str
    moe_preset: str
    huge_preset: str | None
    curvature: Path
    wide_sweep: str = "width"
    lengths: tuple[int, ...] = ()
    further_seeds: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    between_sweep: str = "main"
    times: Path | None = None

    @property
    def deepest(self) -> int:
        """The largest number of stages of the main comparison."""
        return max(self.depths)

    def sweep(self, name: str) -> str:
        """The sweep file that makes the runs of an experiment."""
        return f"configs/sweeps/{self.name}/{name}.yaml"


SCALES = {
    "laptop": Scale(
        name="laptop",
        preset="laptop",
        runs=Path("results/laptop"),
        depths=(1, 2, 4, 8, 16, 32),
        blocks=(4, 8, 16, 32),
        narrow={},
        wide={"model.width": 64},
        wide_preset="laptop",
        moe_preset="laptop-moe",
        huge_preset=None,
        curvature=Path("results/laptop-curvature"),
        lengths=(2000, 4000, 8000, 16000, 32000, 64000, 128000),
        further_seeds={"main": (3, "seeds"), "strategies": (1, "strategies-seeds")},
        between_sweep="depths",
        times=Path("benchmarks/results/small_models.json"),
    ),
    "paper": Scale(
        name="paper",
        preset="paper-95m",
        runs=Path("runs/paper"),
        depths=(1, 2, 4, 8, 16, 32),
        blocks=(4, 8, 16, 32),
        narrow={"model.blocks": 24},
        wide={},
        wide_preset="paper-1b",
        moe_preset="paper-moe-100m",
        wide_sweep="1b",
        huge_preset="paper-3b",
        curvature=Path("runs/paper"),
    ),
}


def delays_of(depth: int, blocks: int) -> Settings:
    """The settings of a pipeline of P stages; more than the model has blocks are made up by their delays."""
    if depth <= blocks:
        return {"pipeline.stages": depth}
    return {"pipeline.stages": blocks, "pipeline.delay.like": depth}


@cache
def _blocks(preset: str) -> int:
    return preset_with(preset, {}).model.blocks


class Experiments:
    """Finds a scale's experiments among its runs, and remembers what was asked for: what was there and what was not.

    Args:
        scale: which.
        runs: all of its runs, rows of `load`.
        folder: where they are, for messages.

    Attributes:
        chosen: the runs at the best learning rate of each experiment.
        used: the runs of each experiment that was asked for, by its id.
        sweeps: the files that make these.
        missing: a line for each that is not there, or of which every run diverged; the last asked for comes last.
    """

    def __init__(self, scale: Scale, runs: pd.DataFrame, folder: Path) -> None:
        self.scale = scale
        self.folder = folder
        self.runs = runs
        self.chosen = at_best_rates(runs)
        self._origin = main_origin(self.chosen)
        self._by_experiment = dict(iter(self.chosen.groupby("experiment")))
        self._diverged = set(runs.loc[runs["status"] == "diverged", "experiment"]) - set(self._by_experiment)
        self.used: dict[str, pd.DataFrame] = {}
        self.sweeps: list[str] = []
        self.missing: list[str] = []

    @classmethod
    def load(cls, scale: Scale, folder: Path | None = None) -> Experiments:
        """Read the runs of a scale, from its own folder by default.

        Raises:
            UserError: there are no runs at all; names the sweep that makes them.
        """
        folder = folder or scale.runs
        if not folder.is_dir():
            raise UserError(f"{folder}: no such folder; make the runs with brx sweep {scale.sweep('main')}")
        return cls(scale, load(folder), folder)

    @property
    def notes(self) -> list[str]:
        """A line for everything that is left out."""
        return notes(self.runs, self.chosen)

    def with_wider_rates(self) -> Experiments:
        """Seed 0 of these runs and of those with learning rates beyond the paper's grid.

        The latter lie in FOLDER-rates, and are mixed with these nowhere else (docs/protocol.md, 3).

        Raises:
            UserError: there are none.
        """
        wider = self.folder.with_name(f"{self.folder.name}-rates")
        if not wider.is_dir():
            raise UserError(f"{wider}: no such folder, for rates beyond the paper's (brx sweep laptop/rates)")
        runs = load([self.folder, wider])
        return Experiments(self.scale, runs[runs[SEED] == 0], wider)

    def fresh(self) -> Experiments:
        """The same runs, with nothing asked for yet."""
        again = copy.copy(self)
        again.used, again.sweeps, again.missing = {}, [], []
        return again

    def find(
        self, method: str, stages: int, sweep: str, *, preset: str | None = None, settings: Settings | None = None
    ) -> pd.DataFrame | None:
        """The runs of a method at P stages, apart from `settings` at the preset's, at their best learning rate.

        Args:
            method: a key of VARIANTS.
            stages: P.
            sweep: the name of the sweep that makes them, for `missing`.
            preset: instead of the scale's main one.
            settings: further dotted keys.
        """
        settings = settings or {}
        experiment, seeds = self._look_up(method, stages, preset, settings)
        is_between = sweep == "main" and stages not in self.ends
        maker = self.scale.sweep(self.scale.between_sweep if is_between else sweep)
        if seeds is None:
            extra = "".join(f", {key} = {value}" for key, value in settings.items())
            why = "every run diverged, of " if experiment in self._diverged else ""
            line = f"{method} at P = {stages}{extra}: {why}brx sweep {maker}"
            self.missing = [*(other for other in self.missing if other != line), line]
        else:
            self.used[experiment] = seeds
            first, further = self.scale.further_seeds.get(sweep, (math.inf, ""))
            makers = [maker, self.scale.sweep(further)] if seeds[SEED].max() >= first else [maker]
            self.sweeps += [each for each in makers if each not in self.sweeps]
        return seeds

    def sweep_of_depth(self, method: str, blocks: int) -> str:
        """The sweep with a method's runs on so many blocks, one per stage: the preset's own depth is not repeated."""
        return sweep_of(method) if blocks == _blocks(self.scale.preset) else "block-scaling"

    def _look_up(
        self, method: str, stages: int, preset: str | None, settings: Settings
    ) -> tuple[str, pd.DataFrame | None]:
        blocks = settings.get("model.blocks") or _blocks(preset or self.scale.preset)
        wanted = preset_with(preset or self.scale.preset, {**delays_of(stages, blocks), **VARIANTS[method], **settings})
        experiment = experiment_id(wanted, *self._origin)
        return experiment, self._by_experiment.get(experiment)

    def slowdown_target(self) -> float | None:
        """The one target of all the paper's slowdowns at this scale; None while no method has both ends.

        It is the highest mean training loss over the last quarter, at P = 1 and at the deepest pipeline, of
        TARGET_METHODS.
        """
        finals = []
        for method in TARGET_METHODS:
            pair = [seeds for P in self.ends if (seeds := self._look_up(method, P, None, {})[1]) is not None]
            finals += [common_target(seeds) for seeds in pair if len(pair) == len(self.ends)]
        return max(finals, default=None)

    @property
    def ends(self) -> tuple[int, int]:
        """The numbers of stages between which a slowdown is taken."""
        return 1, self.scale.deepest

    @property
    def makers(self) -> list[str]:
        """The files of the sweeps that make what was asked for, there or not."""
        return list(dict.fromkeys([*self.sweeps, *self._makers_of_missing]))

    @property
    def what_to_run(self) -> str:
        """The commands that make what was missing."""
        return ", ".join(f"brx sweep {maker}" for maker in sorted(set(self._makers_of_missing)))

    @property
    def _makers_of_missing(self) -> list[str]:
        return [line.rpartition("brx sweep ")[2] for line in self.missing]


def sweep_of(method: str) -> str:
    """The sweep that a method's plain runs come from."""
    if method in MAIN:
        return "main"
    return "strategies" if method in STRATEGY_NAMES else "preconditioned"
