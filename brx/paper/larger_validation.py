"""Basis rotation's leads on a validation set a hundred times as large as that of the trainings. The
study of docs/protocol.md, section 20."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from brx.errors import UserError
from brx.paper import little_momentum, strict
from brx.paper.leads import BEST_BASELINE, lead_finding, lead_parts, lead_row
from brx.paper.scales import DEEPEST, SCALES, Experiments
from brx.paper.study_runs import load_study_runs
from brx.runs.experiments import is_for_tuning
from brx.train.evaluation import Evaluation

EXAMPLES = 20_000
SMALL = 200  # examples in the trainings' own validations
COMMAND = f"brx evaluate RUN --examples {EXAMPLES}"


@dataclass(frozen=True)
class Study:
    """The runs of the fairer search that have been evaluated, with both losses.

    Attributes:
        large: with the losses on `EXAMPLES` examples.
        small: the same runs with the losses on `SMALL` examples.
        large_lead: basis rotation's lead over the best baseline, in nats by seed, if all baselines
            may have little momentum (section 18); on `EXAMPLES` examples.
        small_lead: the same on `SMALL` examples.
    """

    large: Experiments
    small: Experiments
    large_lead: pd.Series
    small_lead: pd.Series

    @classmethod
    def load(cls, folder: Path) -> Study:
        """Read the runs of sections 10 and 17 in a folder, and those of section 18 from theirs.

        Raises:
            UserError: no run has been evaluated, or a method has no runs.
        """
        scale = SCALES["tuned"]
        tuned = _evaluated(load_study_runs(folder, scale.sweep("main")))
        if is_for_tuning(tuned).all():
            raise UserError(f"{folder}: no run has been evaluated; evaluate them with {COMMAND}")
        momentum = _evaluated(load_study_runs(little_momentum.RUNS, little_momentum.SWEEP))
        return cls(
            large=Experiments(scale, _with_large_losses(tuned), folder),
            small=Experiments(scale, tuned, folder),
            large_lead=_lead(_with_large_losses(momentum), _with_large_losses(tuned)),
            small_lead=_lead(momentum, tuned),
        )


def _evaluated(runs: pd.DataFrame) -> pd.DataFrame:
    """The runs whose last weights have been evaluated on `EXAMPLES` examples, with the result in
    the column `large_val_loss`; and all runs of the tuning seed, which choose by their own losses.
    """
    losses = [_large_loss(Path(str(run)), last) for run, last in runs["last_iteration"].items()]
    runs = runs.assign(large_val_loss=losses)
    return runs[runs["large_val_loss"].notna() | is_for_tuning(runs)]


def _large_loss(run: Path, last_iteration: int) -> float | None:
    """The loss of a run's last weights on `EXAMPLES` examples; None if it has not been measured."""
    for result in Evaluation.all_of(run, last_iteration):
        if result.examples == EXAMPLES:
            return result.loss
    return None


def _with_large_losses(runs: pd.DataFrame) -> pd.DataFrame:
    """The runs with their losses on `EXAMPLES` examples; those of the tuning seed as they are."""
    return runs.assign(val_loss=runs["val_loss"].where(is_for_tuning(runs), runs["large_val_loss"]))


def _lead(momentum: pd.DataFrame, tuned: pd.DataFrame) -> pd.Series:
    """The lead over the best baseline by seed, where each baseline has the better of its settings
    of sections 10, 17 and 18."""
    study = little_momentum.Study.of(momentum, tuned, little_momentum.RUNS)
    return study.lead(study.better_settings)


def validation_table(study: Study) -> pd.DataFrame:
    """A row of texts per rival: the lead and its parts on `EXAMPLES` examples, and the lead on
    `SMALL`. The last row is the lead over the best baseline if all may have little momentum."""
    small = {parts.rival: parts for parts in lead_parts(study.small)}
    rows = []
    for parts in lead_parts(study.large):
        small_lead = small[parts.rival].total.dropna().tolist()
        row = lead_row(parts)
        row[f"lead on {SMALL} examples"] = strict.mean_text(small_lead)
        rows.append(row)
    last = {
        "rival": f"{BEST_BASELINE}, little momentum",
        "seeds": str(len(study.large_lead)),
        f"lead at P = {DEEPEST}": strict.mean_text(study.large_lead.tolist()),
        f"at P = {DEEPEST}": lead_finding(study.large_lead),
        f"lead on {SMALL} examples": strict.mean_text(study.small_lead.tolist()),
    }
    return pd.DataFrame([*rows, last]).fillna("")
