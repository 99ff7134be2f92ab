"""Packet D: variants of basis rotation's step alone, each with its time and its error.

    python -m benchmarks.gpu.step [--blocks 32 --width 384] [--steps 20] [--gradients FILE]
        [--device cuda] [--ceilings FILE] [--seconds 420] --out results/gpu

Every variant takes the same steps on the same gradients: those of a training, which
`benchmarks.gpu.gradients` has saved in FILE, or noise with a decaying spectrum. Its error is the
distance between its weights and those of the same algorithm in float64, divided by the distance
that the float64 weights have moved. Float64 resolves directions that fp32 counts as noise, so
compare the errors of variants with each other.

A variant's time is predicted from its operations and bytes at the rates that
`benchmarks.gpu.ceilings` has measured; by default those in results/gpu. The table says to keep a
variant that gains at least 70 % of what was predicted. After two that do not, profile before trying
a third. No variant begins after --seconds, and Ctrl-C ends the packet; the rows measured so far are
written.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.optimizers import make_gradients, matrix_shapes
from benchmarks.report import Table, parser_of, quick_first_basis, synchronize
from brx.methods.product_costs import TWO_QR_OPERATIONS, rotation_products
from brx.optim import BasisRotation

CEILINGS = Path(__file__).parents[2] / "results/gpu/ceilings.json"
FREQUENCY = 10
NUM_GRADIENTS = 4
LEAST_SHARE = 0.7
"""A variant is kept if it gains at least this share of what was predicted."""
COMPILED = "compiled"
IN_FP32 = {"rotation_precision": "highest", "covariance_precision": "highest"}
"""What the variants have where they name no precision."""
VARIANTS: dict[str, dict[str, object]] = {
    "fp32": {},
    COMPILED: {"compiled": True},
    "TF32 rotations": {"rotation_precision": "tf32"},
    "TF32": {"rotation_precision": "tf32", "covariance_precision": "tf32"},
    "bf16 rotations": {"rotation_precision": "bf16"},
    "covariance at refreshes": {"covariance": "refresh"},
    "covariance of the interval": {"covariance": "interval"},
    "TF32 rotations, covariance of the interval": {
        "rotation_precision": "tf32",
        "covariance": "interval",
    },
    "one-sided": {"geometry": "unilateral"},
}
"""Options of `BasisRotation` by variant; the gain of each is over the first one. The compiled one
needs a GPU."""
HOW_EXACTLY = ("rotation_precision", "covariance_precision", "compiled")
"""Options that the float64 steps leave out: the others change what is computed."""

ELEMENTWISE_PASSES, COMPILED_PASSES = 60, 13
"""Reads and writes of all entries, in fp32, in the elementwise part of a step: counted in
brx/optim/elementwise.py, operation by operation, and as two compiled passes."""
SPLIT_BYTES = 18
"""Bytes per entry that move when a factor is split into bf16 parts (`reduced_precision._split`)."""


class Ceilings(NamedTuple):
    """The rates of a device, per second."""

    copy: float  # bytes
    fp32: float  # operations
    tf32: float
    bf16: float


@dataclass(frozen=True)
class Measured:
    """The seconds of a variant's steps, and their error."""

    ordinary: float
    refresh: float
    predicted: float  # on average over an interval between refreshes
    error: float

    @property
    def mean(self) -> float:
        """The seconds of a step, on average."""
        return ((FREQUENCY - 1) * self.ordinary + self.refresh) / FREQUENCY


def main() -> None:
    """Measure and print."""
    parser = parser_of(__doc__, blocks=32, width=384, steps=20)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--gradients", type=Path, help="saved ones; default: noise")
    parser.add_argument("--ceilings", type=Path, default=CEILINGS, help="the device's rates")
    parser.add_argument("--seconds", type=float, default=420, help="no variant begins after these")
    parser.add_argument("--out", type=Path, required=True, help="folder of the table")
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    device = torch.device(options.device)
    ceilings = read_ceilings(options.ceilings)
    gradients = load_gradients(options, device)
    shapes = [gradient.shape for gradient in gradients[0]]
    measured: dict[str, Measured] = {}
    with suppress(KeyboardInterrupt), quick_first_basis():
        for name, arguments in VARIANTS.items():
            if name == COMPILED and device.type != "cuda":
                continue
            if time.monotonic() > deadline:
                print(f"{name}: no time left", flush=True)
                continue
            ordinary, refresh = step_times(arguments, gradients, options.steps, device)
            error = error_of(arguments, [step[:6] for step in gradients], device)
            predicted = predicted_seconds(arguments, shapes, ceilings)
            measured[name] = Measured(ordinary, refresh, predicted, error)
            print(f"{name}: {measured[name]}", flush=True)
    write(measured, len(shapes), options)


def read_ceilings(path: Path) -> Ceilings:
    """The rates in a table of `benchmarks.gpu.ceilings`."""
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    rates = {what: 1e12 * float(rate.split()[0]) for what, rate, _ in rows}  # "51.2 TFLOP/s"
    products = (rates[f"product, {precision}"] for precision in ("fp32", "tf32", "bf16"))
    return Ceilings(rates["copy"], *products)


def predicted_seconds(
    arguments: dict[str, object], shapes: Sequence[Sequence[int]], ceilings: Ceilings
) -> float:
    """The least time of a variant's step on matrices of these shapes (m, n), on average."""
    rates = {
        "highest": ceilings.fp32,
        "tf32": ceilings.tf32,
        "bf16": ceilings.bf16 / 3,  # a product of factors in two parts is three
    }
    rotation_precision = str(arguments.get("rotation_precision", "highest"))
    covariance_precision = str(arguments.get("covariance_precision", "highest"))
    is_every_step = arguments.get("covariance", "step") == "step"
    is_one_sided = arguments.get("geometry") == "unilateral"
    passes = COMPILED_PASSES if arguments.get("compiled") else ELEMENTWISE_PASSES
    seconds = 0.0
    for m, n in shapes:
        sides = [min(m, n)] if is_one_sided else [m, n]
        products = rotation_products(
            (m, n),
            sides,
            covariance_interval=1 if is_every_step else FREQUENCY,
            refresh_interval=FREQUENCY,
            refresh_operations=TWO_QR_OPERATIONS,
        )
        seconds += products.rotations / rates[rotation_precision]
        seconds += products.covariances / rates[covariance_precision]
        seconds += products.refreshes / ceilings.fp32
        num_bytes = 4 * passes * m * n
        if rotation_precision == "bf16":
            # For the gradient and for the update, each side takes a product of the matrix and the
            # basis.
            num_bytes += 2 * SPLIT_BYTES * sum(m * n + side**2 for side in sides)
        seconds += num_bytes / ceilings.copy
    return seconds


def write(measured: dict[str, Measured], num_matrices: int, options: argparse.Namespace) -> None:
    """Write the table, with what was predicted and whether to keep each variant."""
    columns = ["variant", "ms / ordinary step", "ms / refresh step", "mean", "predicted"]
    table = Table("step", [*columns, "gain, of the predicted one", "keep", "error"])
    base = next(iter(measured.values()), None)
    for name, own in measured.items():
        times = (own.ordinary, own.refresh, own.mean, own.predicted)
        share, keep = "", ""
        if base is not None and base.predicted > own.predicted:
            gained = (base.mean - own.mean) / (base.predicted - own.predicted)
            share, keep = f"{gained:.0%}", "yes" if gained >= LEAST_SHARE else "no"
        milliseconds = (f"{1e3 * seconds:.2f}" for seconds in times)
        table.add(name, *milliseconds, share, keep, f"{own.error:.1e}")
    table.write(
        f"Steps of basis rotation on {num_matrices} matrices",
        f"Frequency {FREQUENCY}, median of ordinary and of refresh steps out of {options.steps}. "
        "Predicted: the mean, from operations and bytes at the device's ceilings. Keep: the gain "
        f"over the first row is at least {LEAST_SHARE:.0%} of the predicted one. Error: of the "
        "weights of the first six matrices after 12 steps, relative to float64.",
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
    exactly = {key: value for key, value in arguments.items() if key not in HOW_EXACTLY}
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
    options = {**IN_FP32, **arguments}
    optimizer = BasisRotation(weights, frequency=FREQUENCY, **options)  # type: ignore[arg-type]

    def step(number: int) -> None:
        chosen = gradients[number % len(gradients)]
        for weight, gradient in zip(weights, chosen, strict=True):
            weight.grad = gradient.to(dtype)
        optimizer.step()

    return step, weights


if __name__ == "__main__":
    main()
