"""What little momentum gains the baselines under the delays of 32 stages, and what it leaves of
basis rotation's lead over the best of them. The study of docs/protocol.md, section 18.

Three searches are compared. The *first* one is section 10's, with three values of each method's
second setting. For PipeDream, section 17 goes on to lower values of beta1; for PipeDream-LR and
Nesterov, section 18 searches low values. A method's later settings count if they end lower on the
tuning seed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from brx.errors import UserError
from brx.paper import strict
from brx.paper.evidence import losses_by_seed, margin, runs_of
from brx.paper.leads import BEST_BASELINE
from brx.paper.scales import DEEPEST, OURS, SCALES, Experiments, at_best_second_keys
from brx.paper.study_runs import load_study_runs
from brx.runs.comparison import BASELINES, best_by_seed, shared_seeds, with_diverged
from brx.runs.experiments import at_best_rates, by_experiment, tried_rates
from brx.runs.trajectory import RATE

RUNS = Path("results/little-momentum")
SWEEP = "configs/sweeps/tuned/little-momentum.yaml"
BETA1 = "optimizer.beta1"
FIRST_VALUES = (0.8, 0.9, 0.95)  # of PipeDream's beta1, in section 10
SEARCHED = ("pipedream-lr", "nesterov")  # the methods that section 18 searches


@dataclass(frozen=True)
class Choice:
    """What a search chose for a method."""

    runs: pd.DataFrame  # on the reported seeds, from `with_diverged`
    tuning_loss: float  # final validation loss on the tuning seed, in nats

    @property
    def text(self) -> str:
        """The learning rate, and the second setting with all its values."""
        first = self.runs.iloc[0]
        return f"lr {first[RATE]:g}, {first['second']}"


@dataclass(frozen=True)
class Study:
    """The choices under the delays of 32 stages.

    Attributes:
        ours: basis rotation's.
        first: each baseline's, from section 10's search.
        later: each baseline's, from the search that has low values of beta1.
    """

    ours: Choice
    first: Mapping[str, Choice]
    later: Mapping[str, Choice]

    @classmethod
    def load(cls, folder: Path) -> Study:
        """Read the runs of section 18 in a folder, and those of sections 10 and 17 from the folder
        of the scale `tuned`.

        Raises:
            UserError: a method has no runs.
        """
        scale = SCALES["tuned"]
        tuned_runs = load_study_runs(scale.runs, scale.sweep("main"))
        return cls.of(load_study_runs(folder, SWEEP), tuned_runs, folder)

    @classmethod
    def of(cls, runs: pd.DataFrame, tuned_runs: pd.DataFrame, folder: Path) -> Study:
        """The study of some runs.

        Args:
            runs: those of section 18.
            tuned_runs: those of sections 10 and 17.
            folder: where those of section 18 were read, for the message.

        Raises:
            UserError: a method has no runs.
        """
        scale = SCALES["tuned"]
        is_pipedream = tuned_runs["method"] == "pipedream"
        is_of_section_17 = is_pipedream & ~tuned_runs[BETA1].isin(FIRST_VALUES)
        tuned = Experiments(scale, tuned_runs, scale.runs)
        section_10 = Experiments(scale, tuned_runs[~is_of_section_17], scale.runs)
        searched = {method: _choice_in(runs, folder, method) for method in SEARCHED}
        return cls(
            ours=_choice_of(tuned, OURS),
            first={method: _choice_of(section_10, method) for method in BASELINES},
            later={"pipedream": _choice_of(tuned, "pipedream"), **searched},
        )

    def better(self, method: str) -> Choice:
        """A baseline's choice with the lower loss on the tuning seed."""
        return min(self.first[method], self.later[method], key=lambda choice: choice.tuning_loss)

    @property
    def better_settings(self) -> dict[str, Choice]:
        """Each baseline's choice that counts: the one with the lower loss on the tuning seed."""
        return {method: self.better(method) for method in BASELINES}

    def lead(self, choices: Mapping[str, Choice]) -> pd.Series:
        """How many nats basis rotation ends below the best baseline of each seed."""
        ours, *baselines = shared_seeds(self.ours.runs, *(each.runs for each in choices.values()))
        return margin(ours, best_by_seed(baselines, "val_loss")).by_seed


def _choice_of(experiments: Experiments, method: str) -> Choice:
    """The choice of a method among the runs of the scale."""
    runs = runs_of(experiments, method, DEEPEST)
    return Choice(runs, _tuning_loss(experiments.tried, runs))


def _choice_in(runs: pd.DataFrame, folder: Path, method: str) -> Choice:
    """The choice of a method among the runs of section 18, which were read in `folder`."""
    runs = at_best_second_keys(runs[runs["method"] == method], {method: BETA1})
    chosen = list(by_experiment(at_best_rates(runs)))
    if len(chosen) != 1:
        raise UserError(
            f"{folder}: has reported runs of {len(chosen)} experiments with {method}, must have "
            f"those of one; make them with brx sweep {SWEEP}"
        )
    return Choice(with_diverged(chosen[0]), _tuning_loss(tried_rates(runs), chosen[0]))


def _tuning_loss(tried: pd.DataFrame, runs: pd.DataFrame) -> float:
    """The loss by which these runs' settings were chosen."""
    first = runs.iloc[0]
    is_theirs = (tried["experiment"] == first["experiment"]) & (tried[RATE] == first[RATE])
    return float(tried.loc[is_theirs, "score"].iloc[0])


def momentum_table(study: Study) -> pd.DataFrame:
    """A row of texts per baseline: what both searches chose, and how far its loss falls from one to
    the other; then a row with basis rotation's lead over the best baseline."""
    rows = [_row(study, method) for method in BASELINES]
    before = study.lead(study.first)
    after = study.lead(study.better_settings)
    lead = {
        "method": f"lead of {OURS} over the {BEST_BASELINE}",
        "first loss": strict.mean_text(before.tolist()),
        "later loss": strict.mean_text(after.tolist()),
        "fall": strict.mean_text((before - after).dropna().tolist()),
    }
    return pd.DataFrame([*rows, lead]).fillna("")


def _row(study: Study, method: str) -> dict[str, str]:
    first = study.first[method]
    later = study.later[method]
    return {
        "method": method,
        "first settings": first.text,
        "first loss": f"{losses_by_seed(first.runs).mean():.3f}",
        "later settings": later.text,
        "later loss": f"{losses_by_seed(later.runs).mean():.3f}",
        "fall": strict.mean_text(margin(later.runs, first.runs).by_seed.tolist()),
        "counts": "later" if study.better(method) is later else "first",
    }
