"""The runs of the study, and what each delay costs each arm."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import pandas as pd

from brx.curvature.norm_result import SPACES, results_of
from brx.errors import UserError
from brx.paper.causes.arms import (
    ADAMW,
    DELAYED,
    EQUAL_WITHOUT_DELAY,
    NONE,
    SAME,
    arm_of,
    delay_of,
)
from brx.paper.study_runs import load_study_runs
from brx.runs.comparison import (
    common_target,
    is_on_plateau,
    reached_by_seed,
    seeds_in_common,
    shared_seeds,
    with_diverged,
)
from brx.runs.experiments import at_best_rates, by_experiment
from brx.runs.run import read_run
from brx.runs.slowdown import Reached
from brx.runs.trajectory import SEED

RUNS = Path("results/causes")
SWEEPS = "configs/sweeps/causes/*.yaml"


class Study:
    """The runs of the study.

    Args:
        folder: the folder of the runs.
        runs_by_place: for each pair of arm and delay, its rows of `at_best_rates`, including those
            of diverged runs.
    """

    def __init__(self, folder: Path, runs_by_place: Mapping[tuple[str, str], pd.DataFrame]) -> None:
        self.folder = folder
        self.runs_by_place = dict(runs_by_place)

    @classmethod
    def load(cls, folder: Path) -> Study:
        """Read the runs in a folder; UserError if it has no run of the study, or two experiments of
        one arm and delay."""
        runs = at_best_rates(load_study_runs(folder, SWEEPS), with_diverged=True)
        by_place: dict[tuple[str, str], pd.DataFrame] = {}
        for seeds in by_experiment(runs):
            config = read_run(Path(str(seeds.index[0]))).config
            arm = arm_of(config)
            delay = delay_of(config.pipeline)
            if arm is None or delay is None:
                continue
            if (arm, delay) in by_place:
                first_run = by_place[arm, delay].index[0]
                raise UserError(
                    f"{seeds.index[0]}: of another experiment than {first_run}, "
                    f"but of the same arm ({arm}, delay: {delay}); move one of them away"
                )
            by_place[arm, delay] = _with_diverged_runs(seeds)
        if not by_place:
            raise UserError(f"{folder}: no runs of the study; make them with brx sweep {SWEEPS}")
        _share_equal_arms(by_place)
        return cls(folder, by_place)

    def has(self, arm: str, delay: str) -> bool:
        """Whether the cost of a delay is known: whether some seed has runs with the delay and
        without."""
        without = self.runs_by_place.get((arm, NONE))
        delayed = self.runs_by_place.get((arm, delay))
        if without is None or delayed is None:
            return False
        return bool(seeds_in_common([without, delayed]))

    def pair(self, arm: str, delay: str) -> list[pd.DataFrame]:
        """The runs without delay and with it, on the seeds that both have; UserError if either is
        missing, or if they share no seed."""
        for each in (NONE, delay):
            if (arm, each) not in self.runs_by_place:
                raise UserError(f"no runs of {arm} yet (delay: {each})")
        return shared_seeds(self.runs_by_place[arm, NONE], self.runs_by_place[arm, delay])

    def cost(self, arm: str, delay: str) -> pd.Series:
        """The cost of a delay for an arm, in nats, by seed. It is infinite if the run with the
        delay diverged. A seed on which the run without delay diverged says nothing about delay, and
        is left out.

        Raises:
            UserError: runs are missing.
        """
        without, delayed = (runs.set_index(SEED)["val_loss"] for runs in self.pair(arm, delay))
        return (delayed - without)[np.isfinite(without)]

    def costs(self, arms: Sequence[str], delay: str) -> pd.DataFrame:
        """The costs of a delay in nats: a row per seed that all arms have, a column per arm.

        Raises:
            UserError: runs are missing, or the arms share no seed.
        """
        costs = pd.DataFrame({arm: self.cost(arm, delay) for arm in arms}).dropna()
        if costs.empty:
            raise UserError(f"no seed in common among {', '.join(arms)} (delay: {delay})")
        return costs

    def log_slowdowns(self, arms: Sequence[str], delay: str) -> pd.DataFrame:
        """Logarithms of the slowdowns to one target, the lowest training loss that all of these
        arms reach: a row per seed, a column per arm. A logarithm is infinite if the run with the
        delay never reaches the target.

        Raises:
            UserError: runs are missing, the target is on a plateau (docs/slowdown.md), or no seed
                has a slowdown of every arm.
        """
        pairs = {arm: self.pair(arm, delay) for arm in arms}
        all_runs = pd.concat(list(chain.from_iterable(pairs.values())))
        target = common_target(all_runs)
        logs = {}
        for arm, (without, delayed) in pairs.items():
            if is_on_plateau(without, target) or is_on_plateau(delayed, target):
                raise UserError(f"target loss {target:.2f}: is on a plateau for {arm}")
            reached_without = reached_by_seed(without, target)
            reached_delayed = reached_by_seed(delayed, target)
            logs[arm] = _log_ratios(reached_delayed, reached_without)
        slowdowns = pd.DataFrame(logs).dropna()
        if slowdowns.empty:
            raise UserError(f"no seed has a slowdown of each of {', '.join(arms)} (delay: {delay})")
        return slowdowns

    def norms(self, arms: Sequence[str], delay: str, *, in_original: bool = False) -> pd.DataFrame:
        """The Hessian's (1,1)-norm per parameter halfway through the training, in each arm's
        coordinates: a row per seed that all arms have, a column per arm. It is measured on the run
        with the delay. AdamW's coordinates are the original ones; with `in_original`, every
        arm's."""
        original, rotated = SPACES
        norms: dict[str, dict[int, float]] = {}
        for arm in arms:
            space = original if in_original or arm == ADAMW else rotated
            _, delayed = self.pair(arm, delay)
            norms[arm] = {}
            for run, row in delayed[delayed["status"] == "finished"].iterrows():
                half = int(row["last_iteration"]) // 2
                measured = results_of(Path(str(run)), (space,), half)
                if space in measured:
                    norms[arm][int(row[SEED])] = measured[space].normalized
        return pd.DataFrame(norms).reindex(columns=list(arms)).dropna()


def _log_ratios(delayed: Mapping[int, Reached], without: Mapping[int, Reached]) -> pd.Series:
    """log(iterations with the delay / without it) by seed: infinite if the run with the delay never
    reaches the target, and left out if the run without it never does."""
    logs = {}
    for seed, reached in delayed.items():
        if not without[seed].is_reached:
            continue
        ratio = reached.iterations / without[seed].iterations
        logs[seed] = math.log(ratio) if reached.is_reached else math.inf
    return pd.Series(logs)


def _share_equal_arms(by_place: dict[tuple[str, str], pd.DataFrame]) -> None:
    """Give each arm of `SAME` the other arm's runs where it has none of its own, and each arm of
    `EQUAL_WITHOUT_DELAY` the runs without delay of its equal."""
    for arm, other in (SAME, SAME[::-1]):
        for delay in (NONE, *DELAYED):
            if (other, delay) in by_place:
                by_place.setdefault((arm, delay), by_place[other, delay])
    for arm, other in EQUAL_WITHOUT_DELAY.items():
        if (other, NONE) in by_place:
            by_place[arm, NONE] = by_place[other, NONE]


def _with_diverged_runs(seeds: pd.DataFrame) -> pd.DataFrame:
    """The runs of an experiment, including diverged ones, whose losses are infinite."""
    if (seeds["status"] == "finished").any():
        return with_diverged(seeds)
    return seeds.assign(train_loss=math.inf, val_loss=math.inf)
