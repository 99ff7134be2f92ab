"""Leads on more validation data, from made-up losses."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import ttest_1samp

from brx.errors import UserError
from brx.paper import larger_validation, little_momentum
from brx.paper.larger_validation import EXAMPLES, Study, validation_table
from brx.paper.leads import BEST_BASELINE
from brx.paper.scales import SCALES, VARIANTS
from brx.runs import load
from brx.train.evaluation import Evaluation
from tests.paper.helpers import LAPTOP, write_experiment

SEEDS = (0, 1, 2)
ANNEALING = {"optimizer.annealing_fraction": 0.219}
# By method and P: the losses by seed on the few examples, and those on the many.
LOSSES = {
    ("basis-rotation", 1): ((1.30, 1.31, 1.29), (1.330, 1.331, 1.329)),
    ("basis-rotation", 32): ((1.34, 1.35, 1.33), (1.360, 1.362, 1.358)),
    ("pipedream", 1): ((1.40, 1.41, 1.42), (1.430, 1.431, 1.434)),
    ("pipedream", 32): ((1.61, 1.60, 1.56), (1.640, 1.645, 1.620)),
    ("pipedream-lr", 1): ((1.41, 1.41, 1.41), (1.440, 1.440, 1.442)),
    ("pipedream-lr", 32): ((1.65, 1.66, 1.64), (1.670, 1.671, 1.675)),
    ("nesterov", 1): ((1.39, 1.42, 1.40), (1.410, 1.411, 1.412)),
    ("nesterov", 32): ((1.70, 1.71, 1.72), (1.720, 1.700, 1.710)),
    ("soap", 1): ((1.29, 1.31, 1.30), (1.331, 1.333, 1.330)),
    ("soap", 32): ((1.35, 1.34, 1.35), (1.370, 1.371, 1.369)),
}
# PipeDream-LR's and Nesterov's at P = 32 with little momentum
LITTLE = {
    "pipedream-lr": ((1.55, 1.60, 1.57), (1.610, 1.615, 1.600)),
    "nesterov": ((1.69, 1.70, 1.71), (1.700, 1.710, 1.720)),
}


def write(folder, method, P, losses, **more):
    """Runs of a method on the tuning seed and on the others."""
    settings = {"pipeline.stages": P, **VARIANTS[method], **more}
    tuning = {**settings, "training.for_tuning": True}
    write_experiment(folder, LAPTOP.preset, tuning, seeds=(100,), val_loss=losses[0])
    for seed, loss in zip(SEEDS, losses, strict=True):
        write_experiment(folder, LAPTOP.preset, settings, seeds=(seed,), val_loss=loss)


def evaluate_all(folder, large_losses):
    """Evaluations of all runs in a folder but those of the tuning seed.

    Args:
        large_losses: by the small loss of a run, method and P.
    """
    runs = load(folder)
    for path, run in runs.iterrows():
        if run["training.seed"] == 100:
            continue
        evaluation(
            Path(str(path)), run, large_losses[run["method"], run["depth"]][run["training.seed"]]
        )


def evaluation(path, run, loss, examples=EXAMPLES):
    result = Evaluation(
        run=str(path),
        method=run["method"],
        num_stages=run["depth"],
        iteration=run["training.iterations"],
        examples=examples,
        tokens=32 * examples,
        loss=loss,
        standard_error=0.005,
    )
    result.write(path)


@pytest.fixture
def folders(tmp_path, monkeypatch):
    tuned, little = tmp_path / "tuned", tmp_path / "little"
    scale = replace(SCALES["tuned"], models=LAPTOP.models, runs=tuned)
    monkeypatch.setitem(SCALES, "tuned", scale)
    monkeypatch.setattr(little_momentum, "RUNS", little)
    for (method, P), (small, _) in LOSSES.items():
        write(tuned, method, P, small, **(ANNEALING if method == "pipedream-lr" else {}))
    write(
        little,
        "pipedream-lr",
        32,
        LITTLE["pipedream-lr"][0],
        **ANNEALING,
        **{"optimizer.beta1": 0.2},
    )
    write(little, "nesterov", 32, LITTLE["nesterov"][0], **{"optimizer.beta1": 0.2})
    return tuned, little


@pytest.fixture
def table(folders):
    tuned, little = folders
    evaluate_all(tuned, {key: large for key, (_, large) in LOSSES.items()})
    evaluate_all(little, {(method, 32): large for method, (_, large) in LITTLE.items()})
    return validation_table(Study.load(tuned)).set_index("rival")


def text(differences):
    interval = ttest_1samp(differences, 0.0).confidence_interval(0.95)
    return f"{np.mean(differences):.3f} [{interval.low:.3f}, {interval.high:.3f}]"


def lead(method, P, which):
    return np.subtract(LOSSES[method, P][which], LOSSES["basis-rotation", P][which])


def test_lead_is_that_of_the_larger_set(table):
    total, without = lead("soap", 32, 1), lead("soap", 1, 1)
    assert table.loc["soap", "lead at P = 32"] == text(total)
    assert table.loc["soap", "of it without delay"] == text(without)
    assert table.loc["soap", "from delay"] == text(total - without)
    assert table.loc["soap", "at P = 32"] == "ahead"


def test_lead_on_the_small_set_is_next_to_it(table):
    assert table.loc["soap", "lead on 200 examples"] == text(lead("soap", 32, 0))


def test_best_baseline_of_each_seed_is_that_of_the_larger_set(table):
    lowest = np.min(
        [LOSSES[method, 32][1] for method in ("pipedream", "pipedream-lr", "nesterov")], 0
    )
    expected = text(lowest - np.array(LOSSES["basis-rotation", 32][1]))
    assert table.loc[BEST_BASELINE, "lead at P = 32"] == expected


def test_last_row_lets_all_baselines_have_little_momentum(table):
    # By the tuning seed's losses, PipeDream-LR's little momentum counts, and Nesterov's, too.
    lowest = np.min(
        [LOSSES["pipedream", 32][1], LITTLE["pipedream-lr"][1], LITTLE["nesterov"][1]], 0
    )
    expected = text(lowest - np.array(LOSSES["basis-rotation", 32][1]))
    assert table.iloc[-1]["lead at P = 32"] == expected


def test_run_without_an_evaluation_does_not_count(folders):
    tuned, little = folders
    evaluate_all(tuned, {key: large for key, (_, large) in LOSSES.items()})
    evaluate_all(little, {(method, 32): large for method, (_, large) in LITTLE.items()})
    runs = load(tuned)
    is_one = (runs["method"] == "soap") & (runs["depth"] == 32) & (runs["training.seed"] == 2)
    [path] = runs.index[is_one]
    [file] = (Path(path) / "analysis").iterdir()
    file.unlink()
    table = validation_table(Study.load(tuned)).set_index("rival")
    assert table.loc["soap", "seeds"] == "2"
    assert table.loc["soap", "at P = 32"] == "too few seeds"


def test_evaluation_on_another_number_of_examples_does_not_count(folders):
    tuned, _ = folders
    runs = load(tuned)
    for path, run in runs.iterrows():
        evaluation(Path(str(path)), run, 1.0, examples=400)
    with pytest.raises(UserError, match=f"evaluate them with {larger_validation.COMMAND}"):
        Study.load(tuned)
