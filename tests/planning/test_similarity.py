"""The dimensionless numbers of a training, against the paper's and arithmetic by hand."""

import json

import pytest

from brx.config.loading import load_config
from brx.planning.similarity import dimensionless, similarity_table


def test_numbers_of_the_papers_main_run():
    expected = {
        "tokens / parameter of the blocks": 17.6,
        "tokens / parameter": 10.46,
        "lr x width": 0.384,
        "warm-up / tau": 0.012 * 244141 / 31,
        "second moment's memory, 1 / (1 - beta2), / T": 1000 / 244141,
        "lr x weight decay x T": 2.44,
    }
    settings = ["optimizer.lr=1e-3", "training.iterations=244141"]
    numbers = dimensionless(load_config("paper-95m", settings))
    assert {name: numbers[name] for name in expected} == pytest.approx(expected, rel=5e-3)


def test_tau_is_in_updates():
    settings = ["pipeline.stages=4", "pipeline.delay=8", "pipeline.accumulation=4"]
    config = load_config("quick", settings)
    assert dimensionless(config)["tau / T"] == pytest.approx(2 / config.training.iterations)


@pytest.mark.parametrize("name", ["tau / T", "warm-up / tau", "second moment's memory / tau"])
def test_lacking_numbers_are_none(name):
    config = load_config("quick", ["pipeline.stages=1", "optimizer.method=scion"])
    assert dimensionless(config)[name] is None


def marked(ours, theirs):
    """The numbers that the table marks."""
    table = similarity_table(ours, theirs, ("a", "b")).set_index("")
    return list(table.index[table["> 3 x"] == "<-"])


@pytest.mark.parametrize(
    ("factor", "expected"), [(2.9, []), (3.1, ["lr x width", "lr x weight decay x T"])]
)
def test_only_a_factor_of_three_is_marked(factor, expected):
    ours, theirs = (load_config("quick", [f"optimizer.lr={lr}"]) for lr in (1e-3 * factor, 1e-3))
    assert marked(ours, theirs) == expected


def test_zero_differs_from_any_number():
    ours = load_config("quick", ["optimizer.weight_decay=0"])
    assert marked(ours, load_config("quick")) == ["lr x weight decay x T"]


def test_number_that_one_run_lacks_is_not_marked():
    ours = load_config("quick", ["pipeline.stages=1"])
    assert "tau / T" not in marked(ours, load_config("quick"))


def test_papers_run_is_compared_by_default(printed):
    shown = printed("similarity", "laptop", "--set", "pipeline.delay.like=32", "--format", "json")
    rows = {row[""]: row for row in json.loads(shown)}
    assert [rows["warm-up / tau"][heading] for heading in ("paper-95m", "> 3 x")] == ["96.8", "<-"]
