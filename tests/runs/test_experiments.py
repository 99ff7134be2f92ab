"""Tuning runs choose the learning rate, and stay out of everything else."""

import numpy as np
import pandas as pd
import pytest

from brx.runs.experiments import at_best_rates, at_each_rate, tried_rates
from brx.runs.frames import load
from tests.paper.helpers import write_experiment

TUNING_SEED = 100


@pytest.fixture
def tuned(tmp_path):
    """On the tuning seed 3e-3 is best; on the reported seeds, run at both rates, 1e-3 is."""
    for rate, of_tuning, of_reported in ((1e-3, 1.6, 1.2), (3e-3, 1.5, 1.3)):
        at_rate = {"pipeline.stages": 1, "optimizer.lr": rate}
        for_tuning = {**at_rate, "training.for_tuning": True}
        write_experiment(tmp_path, "laptop", for_tuning, seeds=(TUNING_SEED,), val_loss=of_tuning)
        write_experiment(tmp_path, "laptop", at_rate, seeds=(0, 1), val_loss=of_reported)
    return load(tmp_path)


def test_tuning_runs_alone_choose_the_rate(tuned):
    assert at_best_rates(tuned)["optimizer.lr"].unique().tolist() == [3e-3]


def test_tuning_runs_are_never_reported(tuned):
    assert at_best_rates(tuned)["training.seed"].tolist() == [0, 1]


def test_tuning_runs_stay_out_of_each_rate(tuned):
    seeds = [sorted(runs["training.seed"]) for runs in at_each_rate(tuned)]
    assert seeds == [[0, 1], [0, 1]]


def test_scores_of_rates_are_of_tuning(tuned):
    scores = tried_rates(tuned).set_index("optimizer.lr")["score"]
    pd.testing.assert_series_equal(scores, pd.Series({1e-3: 1.6, 3e-3: 1.5}), check_names=False)


def test_experiment_without_tuning_is_as_before(tuned):
    untuned = tuned[tuned["training.seed"] != TUNING_SEED]
    chosen = at_best_rates(untuned)
    assert chosen["optimizer.lr"].unique().tolist() == [1e-3]


def test_experiment_of_tuning_alone_has_no_rows(tuned):
    only_tuning = tuned[tuned["training.seed"] == TUNING_SEED]
    assert at_best_rates(only_tuning).empty


def test_recorded_run_without_the_mark_is_reported(tuned):
    unmarked = tuned.assign(**{"training.for_tuning": np.nan})
    assert TUNING_SEED in at_best_rates(unmarked)["training.seed"].tolist()
