"""The older versions of a stage in a checkpoint of `delayed`."""

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
        check_shapes(stage.names, slot.views, kept)
        torch._foreach_copy_(slot.views, kept)
    if (stage.newest is None) != (saved["newest"] is None):
        raise ValueError("the state is of another stash mode or forecast")
    newest = saved["newest"] if stage.newest is not None else stage.held
    stage.extrapolation.load_state(saved["extrapolation"], newest)
    stage.slots.forget()


def check_shapes(names: Sequence[str], expected: Sequence[Tensor], saved: Sequence[Tensor]) -> None:
    """ValueError if saved weights have other shapes: a copy might broadcast them."""
    for name, here, there in zip(names, expected, saved, strict=True):
        if here.shape != there.shape:
            raise ValueError(
                f"the state comes from a model whose {name} has shape {tuple(there.shape)}, not "
                f"{tuple(here.shape)}"
            )
