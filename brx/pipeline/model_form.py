"""What a model consisted of when `delayed` was called, and whether that is still so."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from brx.errors import UserError, some
from brx.pipeline.delay import StageDelay
from brx.pipeline.delayed_arguments import optimized
from brx.pipeline.history import contents


class Holder(NamedTuple):
    """A module that holds a parameter directly, as the attribute with the given name."""

    module: nn.Module
    name: str
    parameter: nn.Parameter


class ModelForm:
    """The modules and parameters of a model and of its optimizers, as they are now.

    Attributes:
        holders: each place where a module of the model holds a parameter. A tied one has several.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._model = model
        self._optimizers = optimizers
        # By id. The tensors are kept, so that no other one can have their ids.
        self._parameters = {id(parameter): parameter for parameter in model.parameters()}
        self._optimized = {id(parameter): parameter for parameter in optimized(optimizers)}
        self._children = _children(model)
        self.holders = _holders(model)

    def check(self) -> None:
        """UserError if the model or its optimizers have changed since."""
        for module, name, parameter in self.holders:
            if module._parameters.get(name) is not parameter:
                raise UserError(
                    f"delayed: parameter {name} of {type(module).__name__} has been "
                    "replaced; call delayed after the model is final (after fully_shard, for "
                    "example), and functional_call within `with pipeline.micro_batch():`"
                )
        # Those that an optimizer no longer has keep their versions.
        if any(id(parameter) not in self._optimized for parameter in optimized(self._optimizers)):
            raise UserError(
                "delayed: an optimizer was given parameters later; call delayed when it has all "
                "parameters that are to train"
            )
        self._check_parameters()

    def _check_parameters(self) -> None:
        """UserError if the model has other parameters than it had."""
        # A walk through all parameters takes as long as all other hooks together. So first see
        # whether any module has changed.
        if all(_holds(module, *held) for module, held in self._children.items()):
            return
        self._children = _children(self._model)
        if {id(parameter) for parameter in self._model.parameters()} != self._parameters.keys():
            raise UserError(
                "delayed: the set of the model's parameters has changed (a module was replaced, "
                "for example); call delayed after the model is final"
            )


def _children(model: nn.Module) -> dict[nn.Module, tuple[int, list[nn.Module | None]]]:
    """The number of parameters and the child modules that each module of a model holds directly."""
    return {
        module: (len(module._parameters), list(module._modules.values()))
        for module in model.modules()
    }


def _holds(module: nn.Module, num_parameters: int, children: list[nn.Module | None]) -> bool:
    held = module._modules
    return len(module._parameters) == num_parameters and list(held.values()) == children


def _holders(model: nn.Module) -> list[Holder]:
    holders = []
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):  # its parameters stay the same objects
            continue
        for name, parameter in module._parameters.items():
            if parameter is not None:
                holders.append(Holder(module, name, parameter))
    return holders


def refuse_lazy(trained: Mapping[str, Tensor]) -> None:
    """UserError for parameters of lazy modules that have no shape yet."""
    lazy = [name for name, parameter in trained.items() if is_lazy(parameter)]
    if lazy:
        raise UserError(
            f"delayed: {some(lazy)} without a shape yet: run a forward pass of the lazy modules "
            "first"
        )


def refuse_inference(trained: Mapping[str, Tensor]) -> None:
    """UserError for parameters that were made in inference mode: nothing can write them later."""
    made_there = [name for name, parameter in trained.items() if parameter.is_inference()]
    if made_there:
        raise UserError(
            f"delayed: {some(made_there)} from inference mode, so nothing can write them; make or "
            "load the model outside of torch.inference_mode(), or leave them out of the optimizer"
        )


def refuse_memory_of_processes(
    trained: Mapping[str, Tensor], by_stage: Sequence[Sequence[str]], delays: Sequence[StageDelay]
) -> None:
    """UserError if other processes share the memory of parameters in a stage with a delay
    (Hogwild). They would compute with this process's versions, and their steps would be lost."""
    for names, delay in zip(by_stage, delays, strict=True):
        for name in names:
            weight = contents(trained[name])
            # On a GPU, torch says of all memory that it is shared.
            is_of_cpu = weight.device.type == "cpu"
            if delay.tau and is_of_cpu and weight.is_shared():  # type: ignore[no-untyped-call]
                raise UserError(
                    f"delayed: {name} is in memory that processes share (share_memory()), where "
                    "each of them would meet the versions of the others; give each process a "
                    "model of its own"
                )


class _Extent(NamedTuple):
    """Where a parameter lies in memory; in this order they sort by their place."""

    device: str
    begin: int
    end: int  # behind its last element; a strided view has others between its own
    name: str
    tau: int


def refuse_shared_memory(
    trained: Mapping[str, Tensor], by_stage: Sequence[Sequence[str]], delays: Sequence[StageDelay]
) -> None:
    """UserError if parameters of stages with different delays share memory, which would have to
    hold two versions at once."""
    extents = []
    for names, delay in zip(by_stage, delays, strict=True):
        for name in names:
            weight = contents(trained[name])
            if type(weight) is Tensor and weight.layout is torch.strided and weight.numel():
                begin = weight.data_ptr()
                end = begin + _length(weight) * weight.itemsize
                extents.append(_Extent(str(weight.device), begin, end, name, delay.tau))
    extents.sort()
    overlapping: list[_Extent] = []  # earlier ones that have not ended where this one begins
    for extent in extents:
        overlapping = [earlier for earlier in overlapping if _reaches(earlier, extent)]
        for earlier in overlapping:
            if earlier.tau == extent.tau:
                continue
            weights = contents(trained[earlier.name]), contents(trained[extent.name])
            if _share_an_element(*weights):
                raise UserError(
                    f"delayed: {earlier.name} and {extent.name} share memory, but their stages "
                    f"have the delays {earlier.tau} and {extent.tau}; make them one parameter, or "
                    f"put them into one stage"
                )
        overlapping.append(extent)


def _reaches(earlier: _Extent, later: _Extent) -> bool:
    """Whether an extent ends behind the beginning of a later one."""
    return earlier.device == later.device and earlier.end > later.begin


def _length(weight: Tensor) -> int:
    """The number of elements from a tensor's first to its last one, with those between its own."""
    steps = zip(weight.shape, weight.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in steps)


def _share_an_element(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors whose extents overlap have an element in common. Strided views may also
    lie between each other's elements (the columns of one matrix)."""
    first = min(one.data_ptr(), other.data_ptr())
    # The bytes that each entry of the mask below stands for.
    unit = math.gcd(one.itemsize, other.itemsize, one.data_ptr() - other.data_ptr())
    ends = [weight.data_ptr() + _length(weight) * weight.itemsize for weight in (one, other)]
    is_used = torch.zeros((max(ends) - first) // unit, dtype=torch.bool, device="cpu")

    def entries_of(weight: Tensor) -> Tensor:
        per_element = weight.itemsize // unit
        strides = [stride * per_element for stride in weight.stride()]
        offset = (weight.data_ptr() - first) // unit
        return is_used.as_strided((*weight.shape, per_element), (*strides, 1), offset)

    entries_of(one).fill_(True)
    return bool(entries_of(other).any())
