"""The models of the paper's experiments at a scale, and the sweeps that train them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from brx.config.loading import Settings
from brx.paper.evidence.base import NotTriedError
from brx.paper.scales import Experiments


@dataclass(frozen=True)
class Model:
    """One of them.

    Attributes:
        preset: None for the scale's main one.
        settings: over the preset.
        sweep: that trains it; empty for the sweep of each method.
    """

    preset: str | None = None
    settings: Settings = field(default_factory=dict)
    sweep: str = ""


ModelOf = Callable[[Experiments], Model]


def main_model(_: Experiments) -> Model:
    """Of the main comparison."""
    return Model()


def mixture(experiments: Experiments) -> Model:
    """The model of experts."""
    return Model(experiments.scale.moe_preset, sweep="moe")


def smaller_model(experiments: Experiments) -> Model:
    """The main one, with as many blocks as the larger."""
    return Model(settings=experiments.scale.narrow, sweep="width")


def larger_model(experiments: Experiments) -> Model:
    """The paper's 1B, or what stands for it."""
    scale = experiments.scale
    return Model(scale.wide_preset, scale.wide, scale.wide_sweep)


def huge_model(experiments: Experiments) -> Model:
    """The paper's 3B.

    Raises:
        NotTriedError: the scale has none.
    """
    if experiments.scale.huge_preset is None:
        experiments.missing.append("basis-rotation with 3B parameters: brx sweep configs/sweeps/paper/3b.yaml")
        raise NotTriedError("a model of 3B parameters: at the paper's scale alone")
    return Model(experiments.scale.huge_preset, sweep="3b")
