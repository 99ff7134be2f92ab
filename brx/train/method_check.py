"""A method's first trial, on a model of no size, before anything is paid for a run."""

from __future__ import annotations

import torch

from brx.config.schema import RunConfig
from brx.methods.updater import MethodUpdater
from brx.train.build import build_stages


def check_method(config: RunConfig) -> None:
    """Make the method's optimizers for all stages of a model with the same parameters by name, two wide.

    Raises:
        UserError: a package is missing, a user's own method cannot be imported, does not construct, or leaves a
            parameter out or gives it to two optimizers.
    """
    model = config.model.model_copy(update={"width": 2, "heads": 1, "sequence_length": 2})
    data = config.data.model_copy(update={"tokenizer": "bytes"})
    runtime = config.runtime.model_copy(update={"compile": False})
    smallest = config.model_copy(update={"model": model, "data": data, "runtime": runtime})
    state = torch.get_rng_state()
    MethodUpdater(smallest, build_stages(smallest, torch.device("cpu"), range(config.pipeline.stages)))
    torch.set_rng_state(state)
