"""Modules under FSDP. They gather whole parameters for a pass, and may keep them for the next one.

Needs torch alone, and does not import `torch.distributed`: the modules are known by their methods.
"""

from typing import Any

from torch import nn


def gathers_parameters(module: nn.Module) -> bool:
    """Whether FSDP manages parameters of the module itself."""
    is_fsdp2 = hasattr(module, "unshard") and hasattr(module, "reshard")
    return is_fsdp2 or _flat_handle(module) is not None


def drop_gathered(module: nn.Module) -> None:
    """Drop the whole parameters of a module, because the shards that they were gathered from have
    new contents. The next pass gathers them again."""
    handle = _flat_handle(module)
    if handle is None:
        module.reshard()  # type: ignore[operator]
    elif _has_gathered(handle):
        handle.reshard(free_unsharded_flat_param=True)
        handle.post_reshard()


def _has_gathered(handle: Any) -> bool:
    if not handle.uses_sharded_strategy:
        return False
    # This attribute exists from the first pass on, which allocates the whole parameter.
    has_run = hasattr(handle.flat_param, "_full_param_padded")
    return has_run and not handle.needs_unshard()


def _flat_handle(module: nn.Module) -> Any:
    """FSDP1's handle of a module's flat parameter; None for other modules, and for those without a
    flat parameter."""
    handle = getattr(module, "_handle", None)
    return handle if hasattr(handle, "needs_unshard") else None
