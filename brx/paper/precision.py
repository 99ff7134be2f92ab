"""Does basis rotation lose anything if its matrix products are rounded as in a GPU's TF32, or if
only the gradients at refreshes enter its covariances? The study of docs/protocol.md, section 14,
and the rule that decides whether TF32 becomes the default on CUDA."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from brx.config.loading import Settings
from brx.config.schema import RunConfig
from brx.errors import UserError
from brx.paper.scales import ENDS
from brx.paper.strict import FEWEST_SEEDS
from brx.paper.study_runs import load_study_runs
from brx.runs.aspects import differences
from brx.runs.experiments import is_for_tuning
from brx.runs.run import read_run
from brx.runs.trajectory import SEED, trajectory_of
from brx.sweep.conditions import first_match

RUNS = Path("results/precision")
SWEEP = "configs/sweeps/tuned/precision.yaml"
SEEDS = (0, 1, 2)  # of the rule; a run with another seed does not count

FP32 = "fp32"
TF32_ROTATIONS = "TF32 rotations"
TF32_COVARIANCES = "TF32 covariances"
TF32 = "TF32"
INTERVAL = "interval"


def _arm(rotations: str, covariances: str, gradients: str) -> Settings:
    return {
        "optimizer.method": "basis-rotation",
        "optimizer.rotation_precision": rotations,
        "optimizer.covariance_precision": covariances,
        "optimizer.covariance": gradients,
    }


ARMS = {
    FP32: _arm("highest", "highest", "step"),
    TF32_ROTATIONS: _arm("tf32", "highest", "step"),
    TF32_COVARIANCES: _arm("highest", "tf32", "step"),
    TF32: _arm("tf32", "tf32", "step"),
    INTERVAL: _arm("highest", "highest", "interval"),
}
"""The settings that are compared; everything else is equal in all runs."""

Losses = dict[tuple[str, int], dict[int, float]]
"""Final validation losses in nats by arm and P, then by seed; infinite where a run diverged."""


@dataclass(frozen=True)
class Harm:
    """How much worse than fp32 an arm ends at one P, in nats of final validation loss."""

    mean: float  # of the arm's loss minus fp32's, over seeds
    standard_error: float  # of fp32's mean loss
    num_seeds: int

    @property
    def is_open(self) -> bool:
        """Whether nothing can be judged: there are too few seeds, or fp32 itself diverged."""
        return self.num_seeds < FEWEST_SEEDS or not math.isfinite(self.standard_error)

    @property
    def passes(self) -> bool:
        """Whether the arm loses at most one standard error."""
        return self.mean <= self.standard_error


def precision_table(losses: Losses) -> pd.DataFrame:
    """A row of texts per arm: its losses and its harm at each P, and whether it passes. The last
    row has the rule's decision."""
    rows = [_row(losses, arm) for arm in ARMS]
    return pd.DataFrame([*rows, {"setting": "the rule", "passes": decision(losses)}]).fillna("")


def losses_in(folder: Path) -> Losses:
    """The final validation losses of the study's runs in a folder.

    Raises:
        UserError: the folder has no run of the study, two of the same arm, P and seed, or runs that
            differ in more than arm, P and seed.
    """
    rows = _rows_of_the_study(load_study_runs(folder, SWEEP))
    if rows.empty:
        raise UserError(f"{folder}: no runs of the study; make them with brx sweep {SWEEP}")
    _check_equal(rows)
    losses: Losses = {}
    for run, row in rows.iterrows():
        arm, P, seed = row["arm"], row["depth"], row[SEED]
        by_seed = losses.setdefault((arm, P), {})
        if seed in by_seed:
            raise UserError(f"{run}: a second run of {arm} with seed {seed}; move one away")
        by_seed[seed] = row["val_loss"] if row["status"] == "finished" else math.inf
    return losses


def _rows_of_the_study(runs: pd.DataFrame) -> pd.DataFrame:
    """The runs to which the rule applies: ended, not for tuning, with an arm, a P and a seed of the
    study. Their column `arm` is new."""
    arms = [arm_of(read_run(Path(str(run))).config) for run in runs.index]
    runs = runs.assign(arm=arms)
    is_reported = runs["status"].isin(["finished", "diverged"]) & ~is_for_tuning(runs)
    is_in_study = runs["arm"].notna() & runs["depth"].isin(ENDS) & runs[SEED].isin(SEEDS)
    return runs[is_reported & is_in_study]


def _check_equal(rows: pd.DataFrame) -> None:
    """UserError if runs differ in anything but arm, P and seed."""
    why_not_comparable = differences(rows)
    if why_not_comparable:
        raise UserError(f"{why_not_comparable[0]}; move one of them away")
    first = rows.index[0]
    expected = _settings_that_must_agree(first)
    for run in rows.index[1:]:
        for key, value in _settings_that_must_agree(run).items():
            wanted = expected.get(key)
            if value != wanted:
                raise UserError(
                    f"{run}: {key} is {value}, in {first} {wanted}, and the rule compares runs "
                    "that are equal but for the arm, P and the seed; move one of them away"
                )


def _settings_that_must_agree(run: Hashable) -> dict[str, object]:
    """A run's settings, by dotted key, without those in which runs of the study may differ."""
    sections = trajectory_of(read_run(Path(str(run))).config)
    settings = {
        f"{section}.{key}": value
        for section, values in sections.items()
        for key, value in values.items()
    }
    varied = {SEED, "pipeline.stages", "pipeline.delay"}.union(*ARMS.values())
    return {key: value for key, value in settings.items() if key not in varied}


def arm_of(config: RunConfig) -> str | None:
    """The arm of a run; None if the run does not belong to the study."""
    return first_match(config, ARMS)


def harm(losses: Losses, arm: str, P: int) -> Harm:
    """How much worse than fp32 an arm ends at one P, over the seeds that both have. The numbers are
    NaN with fewer than three such seeds, or if fp32 diverged on one of them."""
    ours = losses.get((arm, P), {})
    fp32 = losses.get((FP32, P), {})
    seeds = sorted(ours.keys() & fp32.keys())
    if len(seeds) < FEWEST_SEEDS:
        return Harm(math.nan, math.nan, len(seeds))
    our_losses = [ours[seed] for seed in seeds]
    fp32_losses = [fp32[seed] for seed in seeds]
    if math.inf in fp32_losses:
        return Harm(math.nan, math.nan, len(seeds))
    above_fp32 = np.subtract(our_losses, fp32_losses)
    standard_error = float(np.std(fp32_losses, ddof=1)) / math.sqrt(len(seeds))
    return Harm(float(np.mean(above_fp32)), standard_error, len(seeds))


def verdict(losses: Losses, arm: str) -> str:
    """Whether an arm passes at both P: yes, no, or open."""
    if any(math.inf in losses.get((arm, P), {}).values() for P in ENDS):
        return "no"  # a run diverged
    harms = [harm(losses, arm, P) for P in ENDS]
    if any(not each.is_open and not each.passes for each in harms):
        return "no"
    return "open" if any(each.is_open for each in harms) else "yes"


def decision(losses: Losses) -> str:
    """The default on CUDA that the rule chooses."""
    undecided = "open: runs are missing"
    if any(math.inf in losses.get((FP32, P), {}).values() for P in ENDS):
        undecided = "open: fp32 itself diverged"
    by_arm = {arm: verdict(losses, arm) for arm in (TF32, TF32_ROTATIONS, TF32_COVARIANCES)}
    # In the rule's order: both, else the rotations, which take more time, else the covariances.
    for arm, passes in by_arm.items():
        if passes == "yes":
            return f"{arm} on CUDA"
        if passes == "open":
            return undecided
    return "fp32 everywhere"


def _row(losses: Losses, arm: str) -> dict[str, str]:
    row = {"setting": arm}
    for P in ENDS:
        by_seed = losses.get((arm, P), {})
        row[f"seeds, P = {P}"] = str(len(by_seed))
        row[f"loss, P = {P}"] = f"{np.mean(list(by_seed.values())):.4f}" if by_seed else ""
        row[f"harm, P = {P}"] = "" if arm == FP32 else _harm_text(harm(losses, arm, P))
    row["passes"] = "" if arm == FP32 else verdict(losses, arm)
    return row


def _harm_text(measured: Harm) -> str:
    """A harm with fp32's standard error; empty if there are too few seeds."""
    if measured.is_open:
        return ""
    return f"{measured.mean:+.4f} (standard error {measured.standard_error:.4f})"
