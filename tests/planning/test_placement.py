"""Whether a run fits: one that cannot is refused in one line, with what would help."""

import pytest
import torch

from brx.config.loading import load_config
from brx.errors import UserError
from brx.model.stage import partition
from brx.pipeline.world import World
from brx.planning import placement
from brx.planning.free_memory import Free
from brx.planning.margin import MARGIN
from brx.planning.placement import (
    check_memory,
    fit_line,
    fits,
    size_text,
    smallest_num_ranks,
    what_would_fit,
)
from brx.planning.plan import plan_memory
from brx.train import loop
from brx.train.loop import train
from tests.train.helpers import tiny_config

CPU = torch.device("cpu")


def _leave_free(monkeypatch, num_bytes, where="on cpu", *, is_shared=True):
    free = [Free(num_bytes, where, is_shared)]
    monkeypatch.setattr(placement, "free_memory", lambda device: free)


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


@pytest.fixture
def too_large(tmp_path, monkeypatch):
    """A run that lacks one byte."""
    config = tiny_config(tmp_path, "training.batch_size=64", "checkpoint.background=false")
    needed = plan_memory(config, "cpu")[0].peak
    _leave_free(monkeypatch, needed - 1)
    return config


def test_run_that_cannot_fit_is_refused(too_large, tmp_path):
    expected = (
        r"rank 0 \(stages 0-3\): .* GB needed \(logits .*free on cpu; would fit: "
        r"pipeline\.recompute=true"
    )
    with pytest.raises(UserError, match=rf"^not enough memory: {expected}$"):
        train(too_large, tmp_path / "run")
    assert not (tmp_path / "data").exists()  # before any data are prepared


def test_copy_for_a_checkpoint_is_given_up_first(tmp_path, monkeypatch):
    config = tiny_config(tmp_path)
    needed = plan_memory(config, "cpu")[0].peak
    _leave_free(monkeypatch, needed - 1)
    with pytest.raises(UserError, match=r"would fit: checkpoint\.background=false$"):
        check_memory(config, CPU, World(), [range(4)])


def test_run_that_just_fits_is_planned(tmp_path, monkeypatch):
    config = tiny_config(tmp_path)
    needed = plan_memory(config, "cpu")[0].peak
    _leave_free(monkeypatch, needed)
    assert check_memory(config, CPU, World(), [range(4)]).peak == needed


def test_bf16_without_support_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100")
    monkeypatch.setattr(loop, "choose_device", lambda *_, **__: (torch.device("cuda"), "told so"))
    monkeypatch.setattr(loop, "set_up", lambda *_: None)
    expected = r"^runtime\.precision: bf16 is not supported by Tesla V100; use fp32$"
    with pytest.raises(UserError, match=expected):
        train(tiny_config(tmp_path, "runtime.precision=bf16"), tmp_path / "run")
    assert not (tmp_path / "data").exists()


class FourRanksOnTwoMachines:
    rank, num_ranks, local_rank, num_local_ranks = 2, 4, 0, 2


@pytest.fixture
def four_ranks(tmp_path):
    """A run on four devices, with their stages and peaks."""
    config = tiny_config(tmp_path, "pipeline.devices=4")
    ranges = partition(4, 4)
    return config, ranges, [rank.peak for rank in plan_memory(config, "cpu", ranges)]


def test_ranks_of_one_machine_share_its_memory(four_ranks, monkeypatch):
    config, ranges, peaks = four_ranks
    _leave_free(monkeypatch, peaks[2] + peaks[3])
    own = check_memory(config, CPU, FourRanksOnTwoMachines(), ranges)
    assert own.stages == range(2, 3)


def test_ranks_that_do_not_fit_together_are_refused(four_ranks, monkeypatch):
    config, ranges, peaks = four_ranks
    _leave_free(monkeypatch, peaks[2] + peaks[3] - 1)
    expected = "not enough memory: 2 ranks on this machine, the largest: "
    with pytest.raises(UserError, match=expected):
        check_memory(config, CPU, FourRanksOnTwoMachines(), ranges)


def test_limit_of_a_process_counts_per_rank(four_ranks, monkeypatch):
    """`ulimit -v` leaves each rank as much, whatever the others take."""
    config, ranges, peaks = four_ranks
    limit = "under the limit of a process (ulimit -v)"
    _leave_free(monkeypatch, peaks[2], limit, is_shared=False)
    assert check_memory(config, CPU, FourRanksOnTwoMachines(), ranges).peak == peaks[2]
    _leave_free(monkeypatch, peaks[2] - 1, limit, is_shared=False)
    expected = r"^not enough memory: rank 2 \(stages 2-2\): .* GB free under the limit of a process"
    with pytest.raises(UserError, match=expected):
        check_memory(config, CPU, FourRanksOnTwoMachines(), ranges)


@pytest.mark.parametrize("is_shared", [True, False])
def test_more_ranks_are_no_remedy_on_a_cpu(is_shared, tmp_path, monkeypatch):
    """They share the machine, and use up far more of a process's limit than one alone."""
    config = tiny_config(tmp_path)
    num_bytes = plan_memory(config, "cpu")[0].peak * 2 // 3
    assert "pipeline.devices" in what_would_fit(config, "cpu", num_bytes)[0]
    _leave_free(monkeypatch, num_bytes, is_shared=is_shared)
    with pytest.raises(UserError, match=r"^not enough memory: rank 0") as told:
        check_memory(config, CPU, World(), [range(4)])
    assert "pipeline.devices" not in str(told.value)


def test_larger_limit_may_be_the_one_that_refuses(four_ranks, monkeypatch):
    config, ranges, peaks = four_ranks
    limits = [Free(peaks[2], "under a limit", False), Free(peaks[2] + 1, "on cpu", True)]
    monkeypatch.setattr(placement, "free_memory", lambda device: limits)
    with pytest.raises(UserError, match=r"2 ranks on this machine, .* GB free on cpu$"):
        check_memory(config, CPU, FourRanksOnTwoMachines(), ranges)


def test_gpus_of_one_machine_share_nothing(four_ranks, monkeypatch):
    config, ranges, _ = four_ranks
    peaks = [rank.peak for rank in plan_memory(config, "cuda", ranges)]
    _leave_free(monkeypatch, peaks[2], "on cuda", is_shared=False)
    own = check_memory(config, torch.device("cuda"), FourRanksOnTwoMachines(), ranges)
    assert own.peak == peaks[2]


def test_full_device_leaves_no_margin():
    ranks = plan_memory(load_config("quick"), "cuda")
    assert not fits(ranks, ranks[0].peak)
    assert fits(ranks, ranks[0].peak / (1 - MARGIN))


def test_margin_is_stated():
    config = load_config("quick")
    said = fit_line(config, plan_memory(config, "cuda"), "cuda", 80e9)
    assert "per device with 5% to spare for CUDA's context and the allocator" in said


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(34_800_000, "34.8 MB"), (80e9, "80.0 GB"), (1e9, "1.0 GB")]
)
def test_small_sizes_are_in_megabytes(num_bytes, text):
    assert size_text(num_bytes) == text
