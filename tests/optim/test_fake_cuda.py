"""Steps and loading on CUDA, with torch's fake tensors, which have a device but no values.

Operations on tensors of two devices raise an error, and so does every question for a value, for
which the host would wait."""

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from brx.optim import BasisRotation
from tests.optim.helpers import random, train

SHAPES = [(8, 8), (8, 8), (16, 8), (2, 4, 4), (8,), (12, 4), (6, 4, 3, 3)]
OPTIONS = [
    {},
    {"source": "1st", "maximize": True},
    {"geometry": "unilateral", "covariance": "refresh"},
    {"covariance": "interval", "staggered": True, "weight_decay": 0.1},
    {"rotation_precision": "bf16", "covariance_precision": "highest"},
    {"rotate": False},
]


# A torch without CUDA cannot index fake tensors on CUDA.
needs_cuda_build = pytest.mark.skipif(
    not torch.backends.cuda.is_built(), reason="needs a torch built with CUDA, but no GPU"
)


@pytest.fixture(autouse=True)
def gpu_with_tf32(monkeypatch):
    monkeypatch.setattr("brx.optim.reduced_precision._has_tf32", lambda device: True)


class FusedAdamW(TorchDispatchMode):
    """Looks only at the devices of the fused kernel's tensors. It has no form for fake ones."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is not torch.ops.aten._fused_adamw_.tensor_lr:
            return function(*args, **(kwargs or {}))
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        assert len({tensor.device for tensor in tensors}) == 1
        return None


def parameters_on_cuda(device="cuda:0"):
    series = [torch.nn.Parameter(torch.empty(shape, device=device)) for shape in SHAPES]
    half = torch.empty(8, 8, device=device, dtype=torch.bfloat16)
    series.append(torch.nn.Parameter(half))
    for parameter in series:
        parameter.grad = torch.empty_like(parameter)
    return series


def count_updates_as(num, optimizer):
    for member in optimizer._layout.members.values():
        member.num_updates = num


@needs_cuda_build
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
def test_steps_mix_no_devices_and_ask_for_no_value(device, options):
    with FakeTensorMode(allow_non_fake_inputs=True), FusedAdamW():
        series = parameters_on_cuda(device)
        optimizer = BasisRotation(series, frequency=10, **options)
        optimizer.step()
        count_updates_as(20, optimizer)
        optimizer.step()
        count_updates_as(29, optimizer)
        with torch.no_grad(), optimizer.planned_step() as plan:
            assert plan.is_refresh == options.get("rotate", True)
            optimizer.run(plan, without_waiting=True)
        for state in optimizer.state.values():
            assert {value.device for value in state.values()} == {torch.device(device)}


@needs_cuda_build
def test_waiting_for_a_value_is_seen():
    with FakeTensorMode(allow_non_fake_inputs=True), FusedAdamW():
        optimizer = BasisRotation(parameters_on_cuda(), frequency=10)
        optimizer.step()
        with pytest.raises(DataDependentOutputException):
            optimizer.step()  # the first bases


class NewOnCuda(TorchDispatchMode):
    """Counts the numbers in new tensors on CUDA."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        if not function.is_view:
            for result in tree_leaves(results):
                if isinstance(result, torch.Tensor) and result.device.type == "cuda":
                    self.count += result.numel()
        return results


def test_loaded_state_is_on_the_device_once():
    """It may fill most of the device."""
    series = [torch.nn.Parameter(random(*shape, seed=k)) for k, shape in enumerate(SHAPES)]
    trained = BasisRotation(series)
    train(trained, series, 0, 3)
    with FakeTensorMode(allow_non_fake_inputs=True):
        saved = tree_map_only(torch.Tensor, torch.empty_like, trained.state_dict())
        optimizer = BasisRotation(parameters_on_cuda()[: len(SHAPES)])
        with NewOnCuda() as new:
            optimizer.load_state_dict(saved)
        loaded = [value for state in optimizer.state.values() for value in state.values()]
        assert {value.device.type for value in loaded} == {"cuda"}
        assert new.count == sum(value.numel() for value in loaded)
