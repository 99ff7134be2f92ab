"""The choice among values of a setting: by the seeds that all of them have, and by tuning runs,
which stay out of everything else."""

import numpy as np
import pandas as pd
import pytest

from brx.runs.experiments import at_best_rates, at_each_rate, score_values, tried_rates
from brx.runs.frames import load
from tests.paper.helpers import write_experiment

TUNING_SEED = 100


def scored(*by_value):
    """The rows of `score_values` for one group, from the scores by seed of the values 1, 2, ..."""
    rows = []
    for value, scores in enumerate(by_value, start=1):
        for seed, score in scores.items():
            rows.append({"group": "g", "value": value, "training.seed": seed, "score": score})
    return score_values(pd.DataFrame(rows), group="group", over="value")


def best_of(*by_value):
    """The best value, and the scores of all values that were compared."""
    rows = scored(*by_value)
    (best,) = rows.loc[rows["is_best"], "value"]
    return best, dict(zip(rows["value"], rows["score"], strict=True))


def test_score_is_the_mean_over_seeds():
    # Value 2 is lower on seed 0 alone.
    assert best_of({0: 3.0, 1: 2.0}, {0: 2.5, 1: 4.0}) == (1, {1: 2.5, 2: 3.25})


def test_seeds_that_some_values_lack_do_not_count():
    # Over all of its seeds, value 1 would lose.
    assert best_of({0: 1.0, 1: 5.0}, {0: 2.0}) == (1, {1: 1.0, 2: 2.0})


def test_lowest_seed_decides_without_a_common_one():
    # Over all of its seeds, value 1 would win; on the lowest seed, value 2 does.
    assert best_of({0: 3.0, 2: 0.1}, {0: 2.0}, {1: 0.5}) == (2, {1: 3.0, 2: 2.0})


def test_groups_have_their_own_seeds():
    rows = [("a", 1, 0, 1.0), ("a", 2, 0, 2.0), ("b", 1, 1, 4.0), ("b", 2, 1, 3.0)]
    frame = pd.DataFrame(rows, columns=["group", "value", "training.seed", "score"])
    found = score_values(frame, group="group", over="value")
    assert found.loc[found["is_best"], ["group", "value"]].to_numpy().tolist() == [
        ["a", 1],
        ["b", 2],
    ]


def test_diverged_value_is_never_best():
    best, scores = best_of({0: np.inf}, {0: 9.0})
    assert (best, scores[1]) == (2, np.inf)


@pytest.mark.parametrize(
    ("scores", "at_edge"),
    [((1.0, 2.0, 3.0), True), ((2.0, 1.0, 3.0), False), ((3.0, 2.0, 1.0), True), ((1.0,), True)],
)
def test_edge_is_the_lowest_or_highest_value(scores, at_edge):
    rows = scored(*({0: score} for score in scores))
    assert rows["at_edge"].tolist() == [at_edge] * len(scores)


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
