"""The methods by name, and the method that a configuration selects.

A further method is three things: a section of settings in brx/config/schema.py, a subclass of `Method` in builtin.py,
and an entry here. One for your own use needs none of them: `optimizer.method=my_method.py:MyMethod` (docs/methods.md).

What the backward pass sees (`pipeline.stash`) belongs to the pipeline: any method runs with any mode.
"""

from __future__ import annotations

import torch

from brx.config import schema
from brx.config.schema import RunConfig
from brx.methods.builtin import (
    BasisRotationMethod,
    DelayCompensation,
    Muon,
    Nesterov,
    PipeDream,
    PipeDreamLR,
    Scion,
    Soap,
)
from brx.methods.custom import AnyOptimizer, load_method
from brx.methods.method import Method

CUSTOM = "package.module:Class"
"""The key in `METHODS` of everything that is given by file or import path."""

METHODS: dict[str, Method] = {
    "pipedream": PipeDream(),
    "pipedream-lr": PipeDreamLR(),
    "nesterov": Nesterov(),
    "basis-rotation": BasisRotationMethod(),
    "delay-compensation": DelayCompensation(),
    "soap": Soap(),
    "muon": Muon(),
    "scion": Scion(),
    CUSTOM: AnyOptimizer(),
}


def find_method(config: RunConfig) -> Method:
    """The method that a configuration selects, at work in its run.

    Raises:
        UserError: it is a user's own, and cannot be loaded.
    """
    if isinstance(config.optimizer, schema.CustomConfig):
        return load_method(config.optimizer).bound_to(config)
    return METHODS[config.optimizer.method].bound_to(config)


def ring_matrix_dtype(config: RunConfig) -> torch.dtype:
    """The dtype in which the rings of older versions hold matrices: bf16 if autocast would cast them to it anyway.

    A gradient rule takes differences to the stashed versions, which bf16 would drown in rounding. In the modes that
    overwrite a slot before the backward pass there is no choice: from fp32, autocast would save a copy in the forward
    pass, and what is overwritten would never be seen.
    """
    takes_differences = find_method(config).corrects_gradients and config.pipeline.stash == "exact"
    return torch.bfloat16 if config.runtime.precision == "bf16" and not takes_differences else torch.float32
