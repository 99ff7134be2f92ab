"""Baselines with little momentum, from made-up final losses."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import ttest_1samp

from brx.errors import UserError
from brx.paper import little_momentum
from brx.paper.little_momentum import Study, momentum_table
from brx.paper.scales import SCALES, VARIANTS
from tests.paper.helpers import LAPTOP, write_experiment

SEEDS = (0, 1, 2)
# Final validation losses by beta1: on the tuning seed, then on the reported seeds.
PIPEDREAM = {0.8: (1.71, (1.70, 1.72, 1.71)), 0.2: (1.59, (1.61, 1.60, 1.56))}
PIPEDREAM_LR = {0.9: (1.65, (1.64, 1.66, 1.65)), 0.2: (1.56, (1.52, 1.60, 1.57))}
NESTEROV = {0.99: (1.66, (1.55, 1.71, 1.72)), 0.2: (1.70, (1.69, 1.70, 1.71))}
OURS = (1.34, 1.35, 1.33)


def write(folder, method, tuning_loss, losses, **settings):
    """A method's runs on the tuning seed and the reported ones."""
    settings = {"pipeline.stages": 32, **VARIANTS[method], **settings}
    tuning = {**settings, "training.for_tuning": True}
    write_experiment(folder, LAPTOP.preset, tuning, seeds=(100,), val_loss=tuning_loss)
    for seed, loss in zip(SEEDS, losses, strict=True):
        write_experiment(folder, LAPTOP.preset, settings, seeds=(seed,), val_loss=loss)


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """The folders of sections 10 and 17, and of section 18."""
    tuned, little = tmp_path / "tuned", tmp_path / "little"
    scale = replace(SCALES["tuned"], models=LAPTOP.models, runs=tuned)
    monkeypatch.setitem(SCALES, "tuned", scale)
    annealing = {"optimizer.annealing_fraction": 0.219}
    write(tuned, "basis-rotation", 1.33, OURS)
    for beta1, losses in PIPEDREAM.items():
        write(tuned, "pipedream", *losses, **{"optimizer.beta1": beta1})
    write(tuned, "pipedream-lr", *PIPEDREAM_LR[0.9], **annealing)
    write(tuned, "nesterov", *NESTEROV[0.99])
    write(little, "pipedream-lr", *PIPEDREAM_LR[0.2], **annealing, **{"optimizer.beta1": 0.2})
    write(little, "nesterov", *NESTEROV[0.2], **{"optimizer.beta1": 0.2})
    return tuned, little


@pytest.fixture
def study(folders):
    return Study.load(folders[1])


def test_section_10_chooses_without_the_values_of_section_17(study):
    assert study.first["pipedream"].text == "lr 0.001, beta1 0.8 (0.8: 1.710)"
    expected = "lr 0.001, beta1 0.2, at the edge (0.2: 1.590, 0.8: 1.710)"
    assert study.later["pipedream"].text == expected


def test_loss_on_the_tuning_seed_decides_which_settings_count(study):
    assert study.better("pipedream-lr") is study.later["pipedream-lr"]
    assert study.better("nesterov") is study.first["nesterov"]
    assert study.better("nesterov").tuning_loss == 1.66


def test_lead_is_over_the_best_baseline_of_each_seed(study):
    chosen = {method: study.better(method) for method in study.first}
    lowest = np.min([PIPEDREAM[0.2][1], PIPEDREAM_LR[0.2][1], NESTEROV[0.99][1]], axis=0)
    assert study.lead(chosen).to_numpy() == pytest.approx(lowest - OURS)


def test_table_has_the_fall_by_seed(study):
    table = momentum_table(study).set_index("method")
    falls = np.subtract(PIPEDREAM[0.8][1], PIPEDREAM[0.2][1])
    interval = ttest_1samp(falls, 0.0).confidence_interval(0.95)
    expected = f"{falls.mean():.3f} [{interval.low:.3f}, {interval.high:.3f}]"
    assert table.loc["pipedream", "fall"] == expected
    assert table.loc["nesterov", "counts"] == "first"


def test_method_without_runs_names_the_sweep(folders, tmp_path):
    alone = tmp_path / "alone"
    write(alone, "pipedream-lr", *PIPEDREAM_LR[0.2], **{"optimizer.beta1": 0.2})
    with pytest.raises(UserError, match=f"with nesterov, must have .*{little_momentum.SWEEP}"):
        Study.load(alone)


def test_folder_that_is_missing_names_the_sweep(tmp_path):
    with pytest.raises(UserError, match=f"make the runs with brx sweep {little_momentum.SWEEP}"):
        Study.load(tmp_path / "missing")
