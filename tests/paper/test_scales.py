"""How experiments are found at a scale where a second setting was chosen on a tuning seed."""

from dataclasses import replace

import pytest

from brx.errors import UserError
from brx.methods.trajectory_version import TRAJECTORY_VERSION
from brx.paper.scales import SCALES, Experiments
from brx.paper.tables import TABLES
from brx.runs.comparison import common_target, slowdowns
from tests.paper.helpers import write_experiment, write_method

LAPTOP_MAIN = {"main": SCALES["laptop"].models["main"]}
TUNED = replace(SCALES["tuned"], models=SCALES["laptop"].models)


def write(folder, beta1, tuning_loss, rate=1e-3):
    """A tuning run of pipedream without delay, and three reported ones that end a nat lower."""
    settings = {"pipeline.stages": 1, "optimizer.beta1": beta1, "optimizer.lr": rate}
    tuning = {**settings, "training.for_tuning": True}
    write_experiment(folder, "laptop", tuning, seeds=(100,), val_loss=tuning_loss)
    write_experiment(folder, "laptop", settings, seeds=(0, 1, 2), val_loss=tuning_loss - 1)


@pytest.fixture
def experiments(tmp_path):
    write(tmp_path, 0.9, 2.0)
    write(tmp_path, 0.9, 1.9, rate=3e-3)
    write(tmp_path, 0.95, 1.5)
    write(tmp_path, 0.95, 1.6, rate=3e-3)
    return Experiments.load(TUNED, tmp_path)


def test_best_second_value_is_found_by_the_method(experiments):
    (text,) = experiments.find("pipedream", 1)["second"].unique()
    assert text.startswith("beta1 0.95, ")


def test_its_best_rate_is_found(experiments):
    assert experiments.find("pipedream", 1)["optimizer.lr"].unique().tolist() == [1e-3]


def test_tuning_seed_is_not_among_the_found(experiments):
    assert experiments.find("pipedream", 1)["training.seed"].tolist() == [0, 1, 2]


def test_variant_does_not_name_the_second_value(experiments):
    assert experiments.find("pipedream", 1)["variant"].unique().tolist() == ["pipedream"]


def test_table_of_rates_has_every_second_value(experiments):
    table = TABLES["learning-rates"].make(experiments)
    (text,) = table["second setting (lowest loss of each value)"]
    assert text == "beta1 0.95, at the edge (0.9: 1.900, 0.95: 1.500)"


def test_runs_at_one_rate_keep_the_choice(experiments):
    (text,) = experiments.at_rate(3e-3).find("pipedream", 1)["second"].unique()
    assert text.startswith("beta1 0.95, ")


def test_slowdown_compares_ends_with_their_own_second_values(tmp_path):
    for P, beta1 in ((1, 0.95), (32, 0.8)):
        settings = {"pipeline.stages": P, "optimizer.beta1": beta1}
        write_experiment(tmp_path, "laptop", settings, slowness=1.0 if P == 1 else 2.0)
    ends = Experiments.load(TUNED, tmp_path).find_ends("pipedream")
    (row,) = slowdowns(ends, common_target(ends)).to_dict("records")
    assert row["ratio"] == pytest.approx(2, rel=0.02)


def test_edges_are_marked_with_two_rates(experiments):
    assert TABLES["learning-rates"].make(experiments)["at the edge"].tolist() == ["yes"]


def test_main_makes_the_preconditioned_rivals(experiments):
    experiments.find("soap", 32)
    makers = [missing.maker for missing in experiments.missing.values()]
    assert makers == ["configs/sweeps/tuned/main.yaml"]


@pytest.mark.parametrize("method", ["pipedream", "soap"])
def test_depths_makes_what_lies_between_the_ends(method, experiments):
    experiments.find(method, 4)
    makers = [missing.maker for missing in experiments.missing.values()]
    assert makers == ["configs/sweeps/tuned/depths.yaml"]


@pytest.fixture
def llama(tmp_path):
    """One run at a scale that has one model, and no sweep between the ends."""
    write_experiment(tmp_path, "laptop", {"pipeline.stages": 1})
    return Experiments.load(replace(SCALES["llama"], models=LAPTOP_MAIN), tmp_path)


def test_runs_that_no_sweep_makes_are_told(llama):
    assert llama.find("muon", 4) is None
    assert list(llama.missing) == ["muon at P = 4: no sweep of llama"]


def test_advice_without_a_sweep_names_none(llama):
    llama.find("muon", 4)
    assert llama.advice == "no sweep of the scale llama makes them"


def test_advice_names_the_sweep(llama):
    llama.find("muon", 32)
    assert llama.advice == "make them with brx sweep configs/sweeps/llama/main.yaml"


def test_model_that_a_scale_lacks_is_refused(llama):
    with pytest.raises(UserError, match="the scale llama has no model 'smaller'"):
        llama.find("muon", 32, model="smaller")


def test_users_method_is_found_by_its_name(tmp_path):
    mine = "examples/methods/xpipe.py:XPipe"
    settings = {"pipeline.stages": 32, "optimizer.method": mine}
    write_experiment(tmp_path, "laptop", settings, seeds=(0, 1))
    experiments = Experiments.load(replace(SCALES["laptop"], models=LAPTOP_MAIN), tmp_path)
    assert len(experiments.find(mine, 32)) == 2


def test_unknown_method_is_refused(experiments):
    with pytest.raises(UserError, match="unknown method 'adamw'"):
        experiments.find("adamw", 1)


@pytest.mark.parametrize("methods", [["pipedream", "basis-rotation"], ["pipedream"]])
@pytest.mark.parametrize("version", range(1, TRAJECTORY_VERSION + 1))
def test_runs_of_any_version_are_found(methods, version, tmp_path):
    for method in methods:
        write_method(tmp_path, method, version=version)
    experiments = Experiments.load(SCALES["laptop"], tmp_path)
    assert [method for method in methods if experiments.find(method) is None] == []
