"""Modules under FSDP, which gather whole parameters for a pass and may keep them for the next one.

Needs torch alone, and does not import `torch.distributed`: the modules are known by their methods.
"""

from typing import Any

from torch import nn


def gathers_parameters(module: nn.Module) -> bool:
    """Whether FSDP manages parameters of the module itself."""
    is_fsdp2 = hasattr(module, "unshard") and hasattr(module, "reshard")
    return is_fsdp2 or _flat_handle(module) is not None


def drop_gathered(module: nn.Module) -> None:
    """Let go of whole parameters, which were gathered from shards that have other contents now; the
    next pass gathers them anew."""
    handle = _flat_handle(module)
    if handle is None:
        module.reshard()  # type: ignore[operator]
    elif _has_gathered(handle):
        handle.reshard(free_unsharded_flat_param=True)
        handle.post_reshard()


def _has_gathered(handle: Any) -> bool:
    if not handle.uses_sharded_strategy:
        return False
    # The first pass makes room for the whole parameter.
    has_run = hasattr(handle.flat_param, "_full_param_padded")
    return has_run and not handle.needs_unshard()


def _flat_handle(module: nn.Module) -> Any:
    """What FSDP1 keeps a module's flat parameter with; None for other modules, and where it has
    none."""
    handle = getattr(module, "_handle", None)
    return handle if hasattr(handle, "needs_unshard") else None
