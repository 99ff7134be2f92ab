"""Packet D: variants of basis rotation's step alone, each with its time and its error.

    python -m benchmarks.gpu.step [--blocks 32 --width 384] [--steps 20] [--gradients FILE]
        [--device cuda] --out results/gpu

Every variant takes the same steps on the same gradients: those of FILE (a list of lists of
matrices, by step, saved with torch.save), or noise with a decaying spectrum. Its error is the
distance between its weights and those of the same algorithm in float64, divided by the distance
that the float64 weights have moved. Float64 resolves directions that fp32 counts as noise, so
compare the errors of variants with each other.

To predict a variant's time, take its multiply-adds and bytes at the device's ceilings
(`benchmarks.gpu.ceilings`). Keep a variant that gains at least 70 % of what was predicted. After
two that do not, profile before trying a third.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.optimizers import make_gradients, matrix_shapes
from benchmarks.report import Table, parser_of, quick_first_basis, synchronize
from brx.optim import BasisRotation

FREQUENCY = 10
NUM_GRADIENTS = 4
VARIANTS: dict[str, dict[str, object]] = {
    "fp32": {},
    "TF32": {"rotation_precision": "tf32"},
    "covariance at refreshes": {"covariance": "refresh"},
    "covariance of the interval": {"covariance": "interval"},
    "TF32, covariance of the interval": {"rotation_precision": "tf32", "covariance": "interval"},
    "one-sided": {"geometry": "unilateral"},
}
"""Options of `BasisRotation` by variant. Errors are against float64 with the same options, except
for the precision."""


def main() -> None:
    """Measure and print."""
    parser = parser_of(__doc__, blocks=32, width=384, steps=20)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--gradients", type=Path, help="saved ones; default: noise")
    parser.add_argument("--out", type=Path, required=True, help="folder of the table")
    options = parser.parse_args()
    device = torch.device(options.device)
    gradients = load_gradients(options, device)
    table = Table("step", ["variant", "ms / ordinary step", "ms / refresh step", "mean", "error"])
    with quick_first_basis():
        for name, arguments in VARIANTS.items():
            ordinary, refresh = step_times(arguments, gradients, options.steps, device)
            mean = ((FREQUENCY - 1) * ordinary + refresh) / FREQUENCY
            error = error_of(arguments, [step[:6] for step in gradients], device)
            milliseconds = (f"{1e3 * seconds:.2f}" for seconds in (ordinary, refresh, mean))
            table.add(name, *milliseconds, f"{error:.1e}")
            print(table.rows[-1], flush=True)
    table.write(
        f"Steps of basis rotation on {len(gradients[0])} matrices",
        f"Frequency {FREQUENCY}, median of ordinary and of refresh steps out of {options.steps}. "
        "Error: of the weights of the first six matrices after 12 steps, relative to float64.",
        folder=options.out,
    )


def load_gradients(options: argparse.Namespace, device: torch.device) -> list[list[Tensor]]:
    """Gradients by step and matrix."""
    if options.gradients is not None:
        saved: list[list[Tensor]] = torch.load(options.gradients, weights_only=True)
        return [[gradient.to(device) for gradient in step] for step in saved]
    shapes = matrix_shapes(options.blocks, options.width)
    return [make_gradients(shapes, seed, device) for seed in range(NUM_GRADIENTS)]


def step_times(
    arguments: dict[str, object],
    gradients: list[list[Tensor]],
    num_steps: int,
    device: torch.device,
) -> tuple[float, float]:
    """Seconds of an ordinary step and of one with a refresh, each the median."""
    step, _ = stepper(arguments, gradients, device, torch.float32)
    ordinary, refresh = [], []
    for number in range(1, FREQUENCY + num_steps + 1):
        synchronize(device)
        started = time.perf_counter()
        step(number)
        synchronize(device)
        seconds = time.perf_counter() - started
        if number > FREQUENCY:
            (refresh if number % FREQUENCY == 0 else ordinary).append(seconds)
    return statistics.median(ordinary), statistics.median(refresh)


def error_of(
    arguments: dict[str, object], gradients: list[list[Tensor]], device: torch.device
) -> float:
    """The distance between the weights and those in float64 after some steps, divided by the
    distance that the latter have moved."""
    exactly = {key: value for key, value in arguments.items() if key != "rotation_precision"}
    step, weights = stepper(arguments, gradients, device, torch.float32)
    exact_step, exact_weights = stepper(exactly, gradients, device, torch.float64)
    for number in range(1, FREQUENCY + 3):
        step(number)
        exact_step(number)
    pairs = list(zip(weights, exact_weights, strict=True))
    apart = sum(float((weight - exact).square().sum()) for weight, exact in pairs)
    moved = sum(float(exact.square().sum()) for _, exact in pairs)  # they began at zero
    return (apart / moved) ** 0.5


def stepper(
    arguments: dict[str, object],
    gradients: list[list[Tensor]],
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[Callable[[int], None], list[Tensor]]:
    """A function that takes step n, and the weights that it changes."""
    shapes = [gradient.shape for gradient in gradients[0]]
    weights = [torch.zeros(s, device=device, dtype=dtype, requires_grad=True) for s in shapes]
    optimizer = BasisRotation(weights, frequency=FREQUENCY, **arguments)  # type: ignore[arg-type]

    def step(number: int) -> None:
        chosen = gradients[number % len(gradients)]
        for weight, gradient in zip(weights, chosen, strict=True):
            weight.grad = gradient.to(dtype)
        optimizer.step()

    return step, weights


if __name__ == "__main__":
    main()
