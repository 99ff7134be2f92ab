"""The gradient noise scale of a configuration, measured by a short training."""

import statistics
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from brx.config.schema import RunConfig
from brx.data.prepare import prepare
from brx.errors import UserError, counted
from brx.pipeline.engine import Engine
from brx.train.build import assemble, training_batches

# Batches of the estimate. Where noise dominates, its relative error is about sqrt(2 / SAMPLES).
SAMPLES = 100


def gradient_noise_scale(config: RunConfig, iterations: int) -> float:
    """The gradient noise scale B_simple = tr(Sigma) / |G|^2 in tokens (arXiv:1812.06162, section
    2.2). G is the true gradient, Sigma the covariance of the gradient of a single token.

    Args:
        config: the run's configuration. It is trained on the CPU, without delay.
        iterations: how many iterations to train before measuring.

    Raises:
        UserError: the run has fewer iterations, or the noise hides the gradient.
    """
    undelayed = config.pipeline.model_copy(
        update={"stages": 1, "delay": "pipeline", "forecast": None}
    )
    if iterations > config.training.iterations:
        raise UserError(
            f"--noise-scale {iterations}: the training has "
            f"{counted(config.training.iterations, 'iteration')}"
        )
    config = config.model_copy(update={"pipeline": undelayed})
    engine = assemble(config, training_batches(config, prepare(config.data)).batch).engine
    for _ in engine.run(1, lambda: iterations):
        pass
    gradients = _fresh_gradients(engine, iterations)
    return noise_over_signal(gradients) * config.tokens_per_update


def _fresh_gradients(engine: Engine, iterations: int) -> Iterator[list[Tensor]]:
    """The gradients of the next `SAMPLES` updates, all at the newest weights, in float64."""
    for sample in range(1, SAMPLES + 1):
        gradient: list[Tensor] = []
        for stage_gradient in engine.fresh_gradients(iterations + sample):
            gradient += [part.double() for part in stage_gradient]
        yield gradient


def noise_over_signal(gradients: Iterable[list[Tensor]]) -> float:
    """The estimate of (tr(Sigma) / B) / |G|^2.

    Args:
        gradients: independent gradients of B tokens each. Each is a list of tensors, which counts
            as one vector.

    Raises:
        UserError: the noise hides G.
    """

    def square(vector: list[Tensor]) -> float:
        return float(torch.stack([part.square().sum() for part in vector]).sum())

    total: list[Tensor] = []
    squares = []
    for gradient in gradients:
        squares.append(square(gradient))
        total = [a + b for a, b in zip(total, gradient, strict=True)] if total else gradient
    # With K gradients g, the expected values are
    #     mean of |g|^2  = |G|^2 + tr(Sigma) / B
    #     |mean of g|^2  = |G|^2 + tr(Sigma) / (K B)
    K = len(squares)
    mean_square = statistics.fmean(squares)
    square_of_mean = square(total) / K**2
    noise = (mean_square - square_of_mean) / (1 - 1 / K)
    signal = mean_square - noise
    if signal <= 0:
        raise UserError(
            f"--noise-scale: {K} batches do not tell gradient and noise apart; use larger ones"
        )
    return noise / signal
