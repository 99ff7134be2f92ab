"""Sharded parameters (DTensor): questions that have an answer for plain tensors, too."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

FSDP1 = (
    "FSDP1 flattens the parameters of a module (with use_orig_params, too), so that no matrix is "
    "left to rotate; shard the model with FSDP2 (torch.distributed.fsdp.fully_shard)"
)


def is_sharded(tensor: Any) -> bool:
    """Whether it is a DTensor."""
    # Without importing the package: if nobody has imported it, there are no DTensors.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_wrapper(tensor: Tensor) -> bool:
    """Whether it is a tensor subclass around other tensors (a quantized weight, for example), which
    decides by itself what an operation does, and not a DTensor."""
    return is_traceable_wrapper_subclass(tensor) and not is_sharded(tensor)


def is_flat(parameter: Any) -> bool:
    """Whether FSDP1 has made the parameter, or flattened it into one of its own."""
    is_flat_parameter = getattr(parameter, "_is_flat_param", False)
    return is_flat_parameter or getattr(parameter, "_fsdp_flattened", False)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor; a plain tensor itself."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def whole(tensor: Any) -> Any:
    """The whole tensor, on every rank; all ranks must call it together."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def like_parameter(tensor: Any, parameter: Any) -> Any:
    """A tensor of the parameter's shape (a gradient, a state), sharded as the parameter, or
    whole."""
    if not is_sharded(parameter):
        return whole(tensor)
    if not is_sharded(tensor):
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(tensor, parameter.device_mesh, parameter.placements)
    if tensor.placements != parameter.placements:
        return tensor.redistribute(placements=parameter.placements)
    return tensor
