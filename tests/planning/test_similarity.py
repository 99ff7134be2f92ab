"""The dimensionless numbers of a training, against the paper's own and by hand."""

import json

import pytest

from brx.cli.main import main
from brx.config.loading import load_config
from brx.planning.similarity import dimensionless, similarity_table


def test_numbers_of_the_papers_main_run():
    numbers = dimensionless(load_config("paper-95m", ["optimizer.lr=1e-3", "training.iterations=244141"]))
    assert numbers["tokens / parameter of the blocks"] == pytest.approx(17.6, abs=0.1)
    assert numbers["tokens / parameter"] == pytest.approx(10.46, abs=0.05)
    assert numbers["lr x width"] == pytest.approx(0.384)
    assert numbers["warm-up / tau"] == pytest.approx(0.012 * 244141 / 31, rel=1e-3)
    assert numbers["second moment's memory, 1 / (1 - beta2), / T"] == pytest.approx(1000 / 244141)
    assert numbers["lr x weight decay x T"] == pytest.approx(2.44, abs=0.01)


def test_tau_is_in_updates_and_absent_without_delay():
    delayed = dimensionless(load_config("quick", ["pipeline.stages=4", "pipeline.delay=8", "pipeline.accumulation=4"]))
    undelayed = dimensionless(load_config("quick", ["pipeline.stages=1"]))
    iterations = load_config("quick", []).training.iterations
    assert delayed["tau / T"] == pytest.approx(2 / iterations)
    assert undelayed["tau / T"] is None
    assert undelayed["warm-up / tau"] is None


def test_a_method_without_second_moment_has_no_memory_of_one():
    assert dimensionless(load_config("quick", ["optimizer.method=scion"]))["second moment's memory / tau"] is None


def test_only_what_is_beyond_a_factor_of_three_is_marked():
    like = load_config("quick", [])
    table = similarity_table(
        load_config("quick", ["optimizer.lr=2.9e-3"]), load_config("quick", ["optimizer.lr=1e-3"]), ("a", "b")
    )
    assert set(table["> 3 x"]) == {""}
    larger = like.model_copy(update={"optimizer": like.optimizer.model_copy(update={"lr": 3.1 * like.optimizer.lr})})
    table = similarity_table(larger, like, ("a", "b")).set_index("")
    assert list(table.index[table["> 3 x"] == "<-"]) == ["lr x width", "lr x weight decay x T"]


def test_command_compares_with_the_papers_run_by_default(capsys):
    assert main(["similarity", "laptop", "--set", "pipeline.delay.like=32", "--format", "json"]) == 0
    rows = {row[""]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["warm-up / tau"]["paper-95m"] == "96.8"
    assert rows["warm-up / tau"]["> 3 x"] == "<-"
    assert main(["similarity", "laptop", "--like", "no-such"]) == 2
    assert "no-such" in capsys.readouterr().err
