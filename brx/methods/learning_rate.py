"""The learning rate over a run (appendix "Experimental Details")."""

from __future__ import annotations

import math

from brx.config.schema import TrainingConfig


def num_warmup_iterations(training: TrainingConfig) -> int:
    """The iterations of the linear warm-up."""
    return round(training.warmup_fraction * training.iterations)


def lr_factor(iteration: int, training: TrainingConfig) -> float:
    """The learning rate of update `iteration` (from 1) relative to the peak.

    Linear warm-up over the first `warmup_fraction` of the iterations, then a cosine down to `final_lr_fraction`.
    """
    warmup = num_warmup_iterations(training)
    if iteration <= warmup:
        return iteration / warmup
    progress = (iteration - warmup) / max(1, training.iterations - warmup)
    floor = training.final_lr_fraction
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))
