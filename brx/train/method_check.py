"""A method's first trial, on a small model, before anything is paid for a run."""

from __future__ import annotations

import torch

from brx.config.schema import CustomConfig, RunConfig
from brx.errors import RunError, UserError
from brx.pipeline.delay import stage_delays
from brx.pipeline.engine import MicroBatch
from brx.train.build import Assembly, assemble

TRIED_WIDTH = 64
"""At most, of the model that a user's own method trains; the others are known to fit any width."""
UPDATES = 2
"""Of a user's own method: one from version 0 everywhere, and one after which weights have moved on."""


def check_method(config: RunConfig, device: torch.device) -> None:
    """Make the method's optimizers for a small model with the same parameters by name; train a user's own two updates.

    The model's stages are one update old where the run's are older, so that the trial needs no more memory for these.

    Raises:
        UserError: a package is missing; or a user's own method cannot be imported, does not construct, leaves a
            parameter out or gives it to two optimizers, or one of its rules fails.
    """
    is_own = isinstance(config.optimizer, CustomConfig)
    trial = _small(config, min(config.model.width, TRIED_WIDTH) if is_own else 2)
    state = torch.get_rng_state()
    try:
        trial_device = device if is_own else torch.device("cpu")
        assembly = assemble(trial, lambda n: _random_micro_batch(trial, n, trial_device), device=trial_device)
        if is_own:
            _try(assembly, config)
    except RunError as error:
        if error.__cause__ is not None:  # otherwise the small model diverged, which says nothing of the run's own
            raise UserError(f"{error} (in a trial on a small model)") from None
    finally:
        torch.set_rng_state(state)


def _small(config: RunConfig, width: int) -> RunConfig:
    delays = [min(delay.tau, config.pipeline.accumulation) for delay in stage_delays(config.pipeline)]
    changes = {
        "model": {"width": width, "heads": 1, "sequence_length": 4},
        "data": {"tokenizer": "bytes"},
        "pipeline": {"delay": delays, "devices": 1, "rings": "device", "recompute": False},
        "training": {"batch_size": 1},
        "logging": {"staleness_every": None},
        "runtime": {"compile": False, "precision": "fp32"},
    }
    sections = {name: getattr(config, name).model_copy(update=update) for name, update in changes.items()}
    return config.model_copy(update=sections)


def _random_micro_batch(config: RunConfig, n: int, device: torch.device) -> MicroBatch:
    generator = torch.Generator().manual_seed(n)
    tokens = torch.randint(256, (1, config.model.sequence_length + 1), generator=generator).to(device)
    return tokens[:, :-1], tokens[:, 1:]


def _try(assembly: Assembly, config: RunConfig) -> None:
    for step in assembly.engine.run(1, lambda: UPDATES):
        for delay in stage_delays(config.pipeline):
            assembly.updater.lr_divisor(delay.tau_updates, step.iteration)
