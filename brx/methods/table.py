"""The methods by name, and the method that a configuration selects.

A method is a subclass of `Method` (method.py), which overrides what it has something to say about: `matrices` and
`rest` return a torch optimizer for the weight matrices and for everything else, `lr_divisor` lowers a stage's learning
rate by its delay, `correct_gradients` sees the newest and the used weights, `forecast` predicts weights. Checkpoints,
devices and the learning-rate schedule come by themselves.

For your own use, the class lives in a file of yours, and nothing here changes: `optimizer.method=my_method.py:MyMethod`
(docs/methods.md; `torch.optim:Adamax` names any torch optimizer instead). To come with brx, it goes into builtin.py,
its settings into a section of brx/config/schema.py, and its name into `METHODS`.

What the backward pass sees (`pipeline.stash`) belongs to the pipeline: any method runs with any mode, but for one with
a forecast of its own, which needs `exact`.
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
"""Under this name `brx methods` lists what is given by file or import path; `find_method` loads that itself."""

METHODS: dict[str, Method] = {
    "pipedream": PipeDream(),  # AdamW as it is; PipeDream's delays are those of any method here
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
    """The method that a configuration selects, with that configuration as its `config`.

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
