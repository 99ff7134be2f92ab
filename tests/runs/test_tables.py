"""Tables of runs whose loops have no validation."""

import math

import pandas as pd
import pytest

from brx.runs.comparison import reductions
from brx.runs.experiments import at_best_rates
from brx.runs.formats import terminal_text
from brx.runs.frames import load
from brx.runs.tables import experiment_table, rate_table, reduction_table
from tests.runs.helpers import write_run


@pytest.fixture
def without_validation(tmp_path):
    for seed in (0, 1):
        write_run(tmp_path, f"s{seed}", f"training.seed={seed}", val_loss=math.inf)
    return load(tmp_path / "runs")


def test_validation_loss_of_runs_without_validation_is_none(without_validation):
    (loss,) = experiment_table(at_best_rates(without_validation))["final validation loss"]
    assert loss == "none"


def test_rates_say_that_training_losses_chose(without_validation):
    table = rate_table(without_validation, at_best_rates(without_validation))
    (losses,) = table["final validation loss of each"]
    assert losses.endswith(" (training losses)")


def test_a_narrow_terminal_shows_the_iterations_saved(tmp_path):
    for method, crossing in (("nesterov", 200), ("basis-rotation", 100)):
        write_run(tmp_path, method, f"optimizer.method={method}", crosses_3_at=crossing)
    table = reduction_table(reductions(at_best_rates(load(tmp_path / "runs"))))
    long = pd.concat([table] * len(table.columns))  # a shorter one would be turned on its side
    shown = terminal_text(long, 60)
    assert "Too narrow for: " in shown
    assert table["iterations saved"].item() in shown
