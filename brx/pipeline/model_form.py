"""What a model consisted of when `delayed` was called, and whether that is still so."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from brx.errors import UserError
from brx.pipeline.delay import StageDelay
from brx.pipeline.delayed_arguments import optimized
from brx.pipeline.history import contents


class ModelForm:
    """The modules and parameters of a model and of its optimizers, as they are now.

    Attributes:
        places: each place where a module of the model holds a parameter: the module, the name of
            its attribute, and the parameter.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._model = model
        self._optimizers = optimizers
        self._num_parameters = _num_parameters(model)
        self._num_optimized = len(optimized(optimizers))
        self._children = _children(model)
        self.places = _places(model)

    def check(self) -> None:
        """UserError if the model or its optimizers have changed since."""
        for module, name, parameter in self.places:
            if module._parameters.get(name) is not parameter:
                raise UserError(
                    f"delayed: parameter {name} of {type(module).__name__} has been "
                    "replaced; call delayed after the model is final (after fully_shard, for "
                    "example), and functional_call within `with pipeline.micro_batch():`"
                )
        if len(optimized(self._optimizers)) != self._num_optimized:
            raise UserError(
                "delayed: an optimizer was given parameters later; call delayed after "
                "add_param_group"
            )
        self._check_number_of_parameters()

    def _check_number_of_parameters(self) -> None:
        """UserError if the model has other parameters than it had."""
        # A walk through all parameters takes as long as all other hooks together. So first see
        # whether any module has changed.
        if all(_holds(module, *held) for module, held in self._children.items()):
            return
        self._children = _children(self._model)
        if _num_parameters(self._model) != self._num_parameters:
            raise UserError(
                "delayed: the number of the model's parameters has changed; call delayed after it "
                "is final"
            )


def _num_parameters(model: nn.Module) -> int:
    return sum(1 for _ in model.parameters())


def _children(model: nn.Module) -> dict[nn.Module, tuple[int, list[nn.Module | None]]]:
    """The number of parameters and the child modules that each module of a model holds directly."""
    return {
        module: (len(module._parameters), list(module._modules.values()))
        for module in model.modules()
    }


def _holds(module: nn.Module, num_parameters: int, children: list[nn.Module | None]) -> bool:
    held = module._modules
    return len(module._parameters) == num_parameters and list(held.values()) == children


def _places(model: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter]]:
    places = []
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):  # its parameters stay the same objects
            continue
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.append((module, name, parameter))
    return places


class _Extent(NamedTuple):
    """Where a parameter lies in memory; in this order they sort by their place."""

    device: str
    begin: int
    end: int
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
            # Strided views may lie between each other's elements and share none of them.
            if type(weight) is Tensor and weight.is_contiguous() and weight.numel():
                begin = weight.data_ptr()
                device = str(weight.device)
                extents.append(_Extent(device, begin, begin + weight.nbytes, name, delay.tau))
    extents.sort()
    last: _Extent | None = None  # of those before, the one that ends last
    for extent in extents:
        if last is None or last.device != extent.device or last.end <= extent.begin:
            last = extent
            continue
        if last.tau != extent.tau:
            raise UserError(
                f"delayed: {last.name} and {extent.name} share memory, but their stages have the "
                f"delays {last.tau} and {extent.tau}; make them one parameter, or put them into "
                f"one stage"
            )
        if last.end < extent.end:
            last = extent
