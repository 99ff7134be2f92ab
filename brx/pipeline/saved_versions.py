"""The older versions of a model in a checkpoint of `delayed`."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from brx.pipeline.history import StageHistory


def stage_state(stage: StageHistory) -> dict[str, Any]:
    stage.slots.wait()
    return {
        "slots": [slot.views for slot in stage.slots.slots],
        "newest": None if stage.newest is None else stage.newest.views,
        "extrapolation": stage.extrapolation.state,
    }


@torch.no_grad()
def load_stage(stage: StageHistory, saved: Mapping[str, Any]) -> None:
    """Restore what `stage_state` returned; ValueError if it is of another delay, stash mode or
    forecast."""
    if len(saved["slots"]) != len(stage.slots.slots):
        raise ValueError("the state comes from a pipeline with other delays")
    for slot, kept in zip(stage.slots.slots, saved["slots"], strict=True):
        _check_shapes(stage.names, slot.views, kept)
        torch._foreach_copy_(slot.views, kept)
    if (stage.newest is None) != (saved["newest"] is None):
        raise ValueError("the state is of another stash mode or forecast")
    newest = saved["newest"] if stage.newest is not None else stage.held
    stage.extrapolation.load_state(saved["extrapolation"], newest)
    stage.slots.forget()


def load_initial(
    saved: Mapping[str, Tensor] | None, now: Mapping[str, Tensor], *, has_delay: bool
) -> dict[str, Tensor]:
    """Version 0 of a state that was saved after the first update, by name; ValueError if it does
    not fit.

    Args:
        saved: version 0; None in the states of earlier versions of brx.
        now: what the parameters hold now, by name.
        has_delay: whether any stage has a delay, and so uses version 0 again.
    """
    if saved is None:
        if has_delay:
            raise ValueError(
                "the state was saved after the first update by an earlier brx, which left out "
                "version 0; load one of a later update"
            )
        return dict(now)
    if saved.keys() != now.keys():
        raise ValueError("the state comes from a model with other parameters")
    _check_shapes(list(now), list(now.values()), [saved[name] for name in now])
    initial = {}
    for name, weight in now.items():
        initial[name] = torch.empty_like(weight).copy_(saved[name])
    return initial


def _check_shapes(
    names: Sequence[str], expected: Sequence[Tensor], saved: Sequence[Tensor]
) -> None:
    """ValueError if saved weights have other shapes: a copy might broadcast them."""
    for name, here, there in zip(names, expected, saved, strict=True):
        if here.shape != there.shape:
            raise ValueError(
                f"the state comes from a model whose {name} has shape {tuple(there.shape)}, not "
                f"{tuple(here.shape)}"
            )
