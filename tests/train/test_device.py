"""Which GPU a rank computes on, and the state of its random numbers."""

import os
from types import SimpleNamespace

import pytest
import torch

from brx.config.schema import RuntimeConfig
from brx.errors import UserError
from brx.pipeline.world import World
from brx.train.device import (
    check_gpus_differ,
    choose_device,
    generator_states,
    set_generator_states,
    set_up,
)


@pytest.fixture
def gpus(monkeypatch):
    """Pretends that the machine has some number of GPUs, all visible."""

    def pretend(number):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: number)

    return pretend


class TwoRanks(World):
    """Rank 1 of two; everybody's GPU is known."""

    rank, num_ranks = 1, 2

    def __init__(self, other):
        super().__init__()
        self.other = other

    def gather(self, value):
        return [self.other, value]


def chosen(local_rank, **options):
    return choose_device("auto", local_rank, **options)[0]


def test_each_rank_has_its_own_gpu(gpus):
    gpus(2)
    assert [chosen(rank) for rank in range(2)] == [torch.device("cuda", 0), torch.device("cuda", 1)]


def test_more_ranks_than_gpus_are_refused(gpus):
    gpus(2)
    with pytest.raises(
        UserError, match=r"rank 2 needs a GPU of its own, there are 2; .*share_gpus"
    ):
        chosen(2)


def test_shared_gpus_are_taken_in_turn(gpus):
    gpus(2)
    assert [chosen(rank, share_gpus=True).index for rank in range(4)] == [0, 1, 0, 1]


def test_launcher_may_show_one_gpu(gpus, monkeypatch):
    gpus(1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert chosen(3) == torch.device("cuda", 0)


@pytest.fixture
def gpu_a(monkeypatch):
    """Every device is the GPU `a` of the machine `host`."""
    properties = SimpleNamespace(uuid="a")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr("socket.gethostname", lambda: "host")
    return torch.device("cuda", 0)


def test_two_ranks_on_one_gpu_are_refused(gpu_a):
    with pytest.raises(UserError, match=r"^ranks 0, 1 see the same GPU \(host\); .*share_gpus"):
        check_gpus_differ(TwoRanks(("host", "a")), gpu_a)


@pytest.mark.parametrize("other", [("host", "b"), ("another", "a")])
def test_different_gpus_pass(other, gpu_a):
    check_gpus_differ(TwoRanks(other), gpu_a)


@pytest.fixture
def gpu_generator(monkeypatch):
    """A GPU's generator, as its states by the GPU's name."""
    states = {"cuda:1": torch.tensor([7])}
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda gpu: states[str(gpu)])
    monkeypatch.setattr(
        torch.cuda, "set_rng_state", lambda state, gpu: states.update({str(gpu): state})
    )
    return states


def test_generator_of_the_gpu_continues(gpu_generator):
    saved = generator_states(torch.device("cuda", 1))
    gpu_generator["cuda:1"] = torch.tensor([8])
    set_generator_states(torch.device("cuda", 1), saved)
    assert gpu_generator["cuda:1"].tolist() == [7]


def test_state_from_a_cpu_leaves_the_generator_of_the_gpu(gpu_generator):
    set_generator_states(torch.device("cuda", 1), generator_states(torch.device("cpu")))
    assert gpu_generator["cuda:1"].tolist() == [7]


@pytest.mark.parametrize(("given", "found"), [(None, ":4096:8"), (":16:8", ":16:8")])
def test_deterministic_products_on_a_gpu_have_their_workspace(given, found, monkeypatch):
    """torch 2.9 refuses them without this variable."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", given or "")
    if given is None:
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    runtime = RuntimeConfig(deterministic=True, threads=torch.get_num_threads())
    try:
        set_up(runtime, torch.device("cuda", 0), num_local_ranks=1)
    finally:
        torch.use_deterministic_algorithms(False)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == found
