"""Where stages go: no cut is faster than the one by time, and a run that cannot fit is refused in
one line."""

from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from brx.config.loading import load_config
from brx.errors import UserError
from brx.model.stage import partition
from brx.pipeline.world import World
from brx.planning import placement
from brx.planning.margin import MARGIN
from brx.planning.placement import (
    assign,
    check_memory,
    fit_line,
    fits,
    measure_stage_costs,
    smallest_num_ranks,
    what_would_fit,
)
from brx.planning.plan import plan_memory
from brx.train import loop
from brx.train.loop import train
from tests.train.helpers import tiny_config

CPU = torch.device("cpu")


def largest(costs, ranges):
    return max(sum(costs[stage] for stage in part) for part in ranges)


@given(
    costs=st.lists(st.integers(0, 20).map(float), min_size=1, max_size=9), ranks=st.integers(1, 9)
)
def test_no_other_cut_is_faster(costs, ranks):
    ranks = min(ranks, len(costs))
    found = assign(costs, ranks)
    assert [stage for part in found for stage in part] == list(range(len(costs)))
    assert all(len(part) >= 1 for part in found)
    cuts = combinations(range(1, len(costs)), ranks - 1)
    others = (
        [range(a, b) for a, b in zip((0, *cut), (*cut, len(costs)), strict=True)] for cut in cuts
    )
    assert largest(costs, found) == min(largest(costs, other) for other in others)


def test_measured_costs_see_the_head(tmp_path):
    config = tiny_config(tmp_path, "data.tokenizer=gpt2", "model.width=32", "training.batch_size=4")
    costs = measure_stage_costs(config, CPU)
    assert len(costs) == 4
    assert min(costs) > 0
    assert costs[3] > 3 * costs[1]


@pytest.mark.parametrize("memory", [6e9, 16e9, 30e9, 45e9])
def test_what_is_said_to_fit_fits(memory):
    config = load_config("paper-1b")
    remedies = what_would_fit(config, "cuda", memory)
    for remedy in remedies:
        assert fits(plan_memory(load_config("paper-1b", remedy.split()), "cuda"), memory)
    assert memory < 10e9 or remedies
    smallest = smallest_num_ranks(config, "cuda", memory)
    for num_ranks in (smallest, smallest - 1) if smallest else ():
        assert fits(plan_memory(config, "cuda", partition(24, num_ranks)), memory) == (
            num_ranks == smallest
        )


def test_run_that_cannot_fit_or_compute_is_refused_in_one_line(tmp_path, monkeypatch):
    config = tiny_config(tmp_path, "training.batch_size=64")
    needed = plan_memory(config, "cpu")[0].peak
    monkeypatch.setattr(placement, "free_memory", lambda device: needed - 1)
    expected = (
        r"rank 0 \(stages 0-3\): .* GB needed \(weights .*free on cpu; would fit: "
        r"pipeline\.recompute=true"
    )
    with pytest.raises(UserError, match=rf"^not enough memory: {expected}$"):
        train(config, tmp_path / "run")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100")
    monkeypatch.setattr(loop, "choose_device", lambda *_, **__: (torch.device("cuda"), "told so"))
    monkeypatch.setattr(loop, "set_up", lambda *_: None)
    with pytest.raises(
        UserError, match=r"^runtime\.precision: bf16 is not supported by Tesla V100; use fp32$"
    ):
        train(tiny_config(tmp_path, "runtime.precision=bf16"), tmp_path / "run")
    assert not (tmp_path / "data").exists()  # before any data are prepared
    monkeypatch.setattr(placement, "free_memory", lambda device: needed)
    assert check_memory(config, CPU, World(), [range(4)]).peak == needed


class FourRanksOnTwoMachines:
    rank, num_ranks, local_rank, num_local_ranks = 2, 4, 0, 2


def test_ranks_of_one_machine_share_its_memory(tmp_path, monkeypatch):
    config = tiny_config(tmp_path, "pipeline.devices=4")
    ranges, world = partition(4, 4), FourRanksOnTwoMachines()
    peaks = [rank.peak for rank in plan_memory(config, "cpu", ranges)]
    monkeypatch.setattr(placement, "free_memory", lambda device: peaks[2] + peaks[3])
    assert check_memory(config, CPU, world, ranges).stages == range(2, 3)
    monkeypatch.setattr(placement, "free_memory", lambda device: peaks[2] + peaks[3] - 1)
    with pytest.raises(
        UserError, match="not enough memory: 2 ranks on this machine, the largest: "
    ):
        check_memory(config, CPU, world, ranges)
    monkeypatch.setattr(placement, "free_memory", lambda device: peaks[2])
    assert check_memory(config, torch.device("cuda"), world, ranges).peak <= peaks[2]


OLD = {
    "memory.limit_in_bytes": "900",
    "memory.usage_in_bytes": "100",
    "memory.stat": "inactive_file 1\n",
}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (
            {
                "memory.max": "1000",
                "memory.current": "700",
                "memory.stat": "anon 5\ninactive_file 50\n",
            },
            350,
        ),
        ({"memory.max": "1000", "memory.current": "1200"}, 0),
        ({"memory.max": "max", "memory.current": "700"}, None),
        ({f"memory/{name}": text for name, text in OLD.items()}, 801),
        (
            {
                "memory/" + name: text + "total_inactive_file 20\n" * ("stat" in name)
                for name, text in OLD.items()
            },
            820,
        ),
        ({}, None),
    ],
)
def test_free_memory_of_a_container_is_what_is_left_of_its_limit(
    files, expected, tmp_path, monkeypatch
):
    on_host = placement.free_memory(CPU)
    assert on_host is None or on_host > 2**20
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    monkeypatch.setattr(placement, "CONTROL_GROUPS", tmp_path)
    monkeypatch.setattr(placement, "_available_on_host", lambda: None)
    assert placement.free_memory(CPU) == expected


def test_what_fills_a_device_to_the_brim_does_not_fit():
    ranks = plan_memory(load_config("quick"), "cuda")
    assert not fits(ranks, ranks[0].peak)
    assert fits(ranks, ranks[0].peak / (1 - MARGIN))


def test_margin_is_stated():
    config = load_config("quick")
    said = fit_line(config, plan_memory(config, "cuda"), "cuda", 80e9)
    assert "per device with 5% to spare for communicators and the allocator" in said
