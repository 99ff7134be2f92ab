"""How little rounding decides: the largest early steps of an optimizer, and what perturbations of 1e-7 do to it.

Gradients do not depend on the weights here, so that what grows has grown in the optimizer.

    python -m benchmarks.first_steps
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from pytorch_optimizer import SOAP
from torch import Tensor

from benchmarks.report import Table
from brx.optim import BasisRotation

Gradient = Callable[[torch.Generator, tuple[int, int]], Tensor]

SHAPES = ((32, 32), (16, 48))
NUM_EARLY = 100
NUM_STEPS = 300
PERTURBATION = 1e-7


def _normal(generator: torch.Generator, shape: tuple[int, int]) -> Tensor:
    return torch.randn(shape, generator=generator)


def _low_rank(generator: torch.Generator, shape: tuple[int, int], rank: int) -> Tensor:
    rows, columns = shape
    return _normal(generator, (rows, rank)) @ _normal(generator, (rank, columns))


def _decaying(generator: torch.Generator, shape: tuple[int, int]) -> Tensor:
    return torch.outer(*(torch.logspace(0, -2, size) for size in shape)) * _normal(generator, shape)


def _one_direction(generator: torch.Generator, shape: tuple[int, int]) -> Tensor:
    always = torch.Generator().manual_seed(1)
    return _low_rank(always, shape, 1) * (1 + 0.3 * torch.randn((), generator=generator))


def _zero_rows_and_columns(generator: torch.Generator, shape: tuple[int, int]) -> Tensor:
    gradient = _normal(generator, shape)
    gradient[:3], gradient[:, 5:7] = 0, 0
    return gradient


def _repeated_row_and_column(generator: torch.Generator, shape: tuple[int, int]) -> Tensor:
    gradient = _normal(generator, shape)
    gradient[:, 1], gradient[3] = gradient[:, 0], gradient[2]
    return gradient


def _few_tokens(generator: torch.Generator, shape: tuple[int, int]) -> Tensor:
    return _low_rank(generator, shape, int(torch.randint(0, 3, (), generator=generator)))


GRADIENTS: dict[str, Gradient] = {
    "normal": _normal,
    "decaying spectrum": _decaying,
    "rank 1, always the same": _one_direction,
    "rank 1, always another": lambda generator, shape: _low_rank(generator, shape, 1),
    "zero rows and columns": _zero_rows_and_columns,
    "repeated row and column": _repeated_row_and_column,
    "an expert's, of 0, 1, 2 tokens": _few_tokens,
}

OPTIMIZERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1.0, weight_decay=0.0),
    "BasisRotation, every 10": lambda params: BasisRotation(params, lr=1.0, weight_decay=0.0),
    "BasisRotation, every 10, 1st": lambda params: BasisRotation(params, lr=1.0, weight_decay=0.0, source="1st"),
    "BasisRotation, every 10, staggered": lambda params: BasisRotation(
        params, lr=1.0, weight_decay=0.0, staggered=True
    ),
    "BasisRotation, every 2": lambda params: BasisRotation(params, lr=1.0, weight_decay=0.0, frequency=2),
    "BasisRotation, every 1": lambda params: BasisRotation(params, lr=1.0, weight_decay=0.0, frequency=1),
    "SOAP (pytorch-optimizer), every 10": lambda params: SOAP(
        params, lr=1.0, betas=(0.9, 0.999), weight_decay=0.0, precondition_frequency=10
    ),
}


def weights(
    make: Callable[[list[Tensor]], torch.optim.Optimizer],
    gradient: Gradient,
    shape: tuple[int, int],
    num_steps: int,
    perturbation: float = 0.0,
) -> Iterator[Tensor]:
    """Weights after each step from zero; every entry of a gradient is perturbed by that share of itself."""
    generator, noise = torch.Generator().manual_seed(0), torch.Generator().manual_seed(99)
    weight = torch.nn.Parameter(torch.zeros(shape))
    optimizer = make([weight])
    for _ in range(num_steps):
        weight.grad = gradient(generator, shape)
        weight.grad *= 1 + perturbation * torch.randn(shape, generator=noise)
        optimizer.step()
        yield weight.detach().clone()


def largest_step(make: Callable[[list[Tensor]], torch.optim.Optimizer], gradient: Gradient, num_steps: int) -> float:
    """The largest entry of the first updates, in learning rates, over the shapes."""
    largest = 0.0
    for shape in SHAPES:
        series = torch.stack([torch.zeros(shape), *weights(make, gradient, shape, num_steps)])
        largest = max(largest, series.diff(dim=0).abs().max().item())
    return largest


def drift(make: Callable[[list[Tensor]], torch.optim.Optimizer], gradient: Gradient, num_steps: int) -> float:
    """How far a perturbation of 1e-7 has moved the weights at the end (norm, in learning rates), over the shapes."""
    distances = []
    for shape in SHAPES:
        *_, straight = weights(make, gradient, shape, num_steps)
        *_, perturbed = weights(make, gradient, shape, num_steps, PERTURBATION)
        distances.append((straight - perturbed).norm().item())
    return max(distances)


def main() -> None:
    """Write the table."""
    torch.set_num_threads(1)
    table = Table("first_steps", ["gradients", *OPTIMIZERS])
    for name, gradient in GRADIENTS.items():
        of_adamw = drift(OPTIMIZERS["AdamW"], gradient, NUM_STEPS)
        cells = []
        for make in OPTIMIZERS.values():
            moved = drift(make, gradient, NUM_STEPS)
            cells.append(f"{largest_step(make, gradient, NUM_EARLY):.1f}, {moved:.0e} ({moved / of_adamw:.2g} x)")
        table.add(name, *cells)
    table.write(
        f"Largest entry of an update in the first {NUM_EARLY} steps, in learning rates; and how far a perturbation of "
        f"{PERTURBATION:g} of every entry of every gradient has moved the weights after {NUM_STEPS} steps (norm, in "
        "learning rates; in brackets over AdamW's).",
        "The larger one of matrices of 32 x 32 and 16 x 48, from weights of zero; float32, one seed.",
    )


if __name__ == "__main__":
    main()
