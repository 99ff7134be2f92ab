"""What follows from numbers alone: peaks by name, overhead of bases, stage counts, and what makes trainings similar."""

import json

import pytest

from brx.cli.main import main
from brx.config.loading import load_config
from brx.planning.planned_run import peak_flops
from brx.planning.similarity import dimensionless, similarity_table
from brx.planning.stage_count import ModelShape, block_memory, stage_count


def test_peak_by_name():
    peaks = {
        "NVIDIA A100-SXM4-80GB": 312e12,
        "NVIDIA H100 80GB HBM3": 989e12,
        "NVIDIA H100 PCIe": 756e12,
        "NVIDIA GeForce RTX 3090": 71e12,
        "NVIDIA L40S": 362e12,
        "NVIDIA L40": None,
        "NVIDIA RTX A1000": None,
    }
    assert {name: peak_flops(name, "bf16") for name in peaks} == peaks
    assert peak_flops("a100", "fp32") == 19.5e12


def test_stage_counts_by_hand():
    model = ModelShape("tiny", hidden=10, heads=2, params_per_block=1000, blocks=7)
    # 16 1000 + 34 100 3 10 + 5 3 2 100^2
    assert block_memory(model, sequence_length=100, batch_size=3) == 16_000 + 102_000 + 300_000
    for memory, expected in ((418_000, "7"), (417_999, ">= 14"), (3 * 418_000, "3"), (100 * 418_000, "1")):
        assert stage_count(model, memory, 100, 3) == expected


def test_numbers_of_the_papers_main_run():
    expected = {
        "tokens / parameter of the blocks": 17.6,
        "tokens / parameter": 10.46,
        "lr x width": 0.384,
        "warm-up / tau": 0.012 * 244141 / 31,
        "second moment's memory, 1 / (1 - beta2), / T": 1000 / 244141,
        "lr x weight decay x T": 2.44,
    }
    numbers = dimensionless(load_config("paper-95m", ["optimizer.lr=1e-3", "training.iterations=244141"]))
    assert {name: numbers[name] for name in expected} == pytest.approx(expected, rel=5e-3)

    # Tau is in updates, and what a run does not have is absent.
    delayed = dimensionless(load_config("quick", ["pipeline.stages=4", "pipeline.delay=8", "pipeline.accumulation=4"]))
    undelayed = dimensionless(load_config("quick", ["pipeline.stages=1", "optimizer.method=scion"]))
    assert delayed["tau / T"] == pytest.approx(2 / load_config("quick").training.iterations)
    assert [undelayed[name] for name in ("tau / T", "warm-up / tau", "second moment's memory / tau")] == [None] * 3


@pytest.mark.parametrize(("factor", "marked"), [(2.9, []), (3.1, ["lr x width", "lr x weight decay x T"])])
def test_only_what_is_beyond_a_factor_of_three_is_marked(factor, marked):
    ours, like = (load_config("quick", [f"optimizer.lr={lr}"]) for lr in (1e-3 * factor, 1e-3))
    table = similarity_table(ours, like, ("a", "b")).set_index("")
    assert list(table.index[table["> 3 x"] == "<-"]) == marked


def test_similarity_is_to_the_papers_run_by_default(capsys):
    assert main(["similarity", "laptop", "--set", "pipeline.delay.like=32", "--format", "json"]) == 0
    rows = {row[""]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["warm-up / tau"]["paper-95m"] == "96.8"
    assert rows["warm-up / tau"]["> 3 x"] == "<-"
    assert main(["similarity", "laptop", "--like", "no-such"]) == 2
    assert "no-such" in capsys.readouterr().err
