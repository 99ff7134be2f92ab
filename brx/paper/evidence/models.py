"""The models of the paper's experiments at a scale: a preset (None: the main one) and settings over it."""

from __future__ import annotations

from collections.abc import Callable

from brx.config.loading import Settings
from brx.paper.evidence.base import NotTriedError
from brx.paper.scales import Experiments

ModelOf = Callable[[Experiments], tuple[str | None, Settings]]


def main_model(_: Experiments) -> tuple[str | None, Settings]:
    """Of the main comparison."""
    return None, {}


def mixture(experiments: Experiments) -> tuple[str | None, Settings]:
    """The model of experts."""
    return experiments.scale.moe_preset, {}


def smaller_model(experiments: Experiments) -> tuple[str | None, Settings]:
    """The main one, with as many blocks as the larger."""
    return None, experiments.scale.narrow


def larger_model(experiments: Experiments) -> tuple[str | None, Settings]:
    """The paper's 1B, or what stands for it."""
    return experiments.scale.wide_preset, experiments.scale.wide


def huge_model(experiments: Experiments) -> tuple[str | None, Settings]:
    """The paper's 3B.

    Raises:
        NotTriedError: the scale has none.
    """
    if experiments.scale.huge_preset is None:
        experiments.missing.append("basis-rotation with 3B parameters: brx sweep configs/sweeps/paper/3b.yaml")
        raise NotTriedError("a model of 3B parameters: at the paper's scale alone")
    return experiments.scale.huge_preset, {}
