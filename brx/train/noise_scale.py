"""The gradient noise scale of a configuration, measured by a short training."""

import statistics
from collections.abc import Iterable

import torch
from torch import Tensor

from brx.config.schema import RunConfig
from brx.data.prepare import prepare
from brx.errors import UserError
from brx.train.build import assemble, training_batches

# batches of the estimate; its relative error is about sqrt(2 / SAMPLES) where noise dominates
SAMPLES = 100


def gradient_noise_scale(config: RunConfig, iterations: int) -> float:
    """B_simple = tr(Sigma) / |G|^2 in tokens (arXiv:1812.06162), after some iterations without
    delay on the CPU."""
    undelayed = config.pipeline.model_copy(
        update={"stages": 1, "delay": "pipeline", "forecast": None}
    )
    if iterations > config.training.iterations:
        raise UserError(
            f"--noise-scale {iterations}: the training has {config.training.iterations} iterations"
        )
    config = config.model_copy(update={"pipeline": undelayed})
    engine = assemble(config, training_batches(config, prepare(config.data)).batch).engine
    for _ in engine.run(1, lambda: iterations):
        pass
    gradients = (
        [part.double() for stage in engine.fresh_gradients(iterations + sample) for part in stage]
        for sample in range(1, SAMPLES + 1)
    )
    return noise_over_signal(gradients) * config.tokens_per_update


def noise_over_signal(gradients: Iterable[list[Tensor]]) -> float:
    """tr(Sigma) / B over |G|^2, from independent gradients of B tokens each; UserError where noise
    hides G."""

    def square(vector: list[Tensor]) -> float:
        return float(torch.stack([part.square().sum() for part in vector]).sum())

    total: list[Tensor] = []
    squares = []
    for gradient in gradients:
        squares.append(square(gradient))
        total = [a + b for a, b in zip(total, gradient, strict=True)] if total else gradient
    # In expectation mean |g|^2 = |G|^2 + tr(Sigma) / B, and |mean g|^2 = |G|^2 + tr(Sigma) / (K B)
    # of K gradients.
    mean_square = statistics.fmean(squares)
    noise = (mean_square - square(total) / len(squares) ** 2) / (1 - 1 / len(squares))
    signal = mean_square - noise
    if signal <= 0:
        raise UserError(
            f"--noise-scale: {len(squares)} batches do not tell gradient and noise apart; use "
            f"larger ones"
        )
    return noise / signal
