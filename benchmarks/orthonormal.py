"""How orthogonal a refreshed basis is, by method, on the matrices of a training.

A power iteration ends with the QR decomposition of C Q. Here that matrix is taken at every refresh
of a short training of `quick` at width 128 (both sides of all attention and MLP matrices), its
columns scaled to length 1, and orthonormalised in several ways. The exact factor is Householder's
in float64.

    python -m benchmarks.orthonormal [--iterations 60]
"""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.report import Table
from brx.config.loading import load_config
from brx.optim import eigenbasis
from brx.train.loop import train

SETTINGS = [
    "optimizer.method=basis-rotation",
    "model.width=128",
    "model.blocks=4",
    "pipeline.stages=4",
]


def cholesky_qr(columns: Tensor, passes: int, shift: float = 0.0) -> Tensor:
    """Several passes of CholeskyQR in the columns' dtype; NaN if a factorisation fails."""
    for number in range(passes):
        gram = columns.mT @ columns
        if number == 0:
            gram.diagonal(dim1=-2, dim2=-1).add_(shift)
        lower, info = torch.linalg.cholesky_ex(gram)
        columns = torch.linalg.solve_triangular(lower, columns.mT, upper=False).mT
        columns = columns.masked_fill((info > 0)[:, None, None], torch.nan)
    return columns


def polar(columns: Tensor) -> Tensor:
    """Newton-Schulz: the nearest orthogonal matrix, which is not QR's."""
    result = columns / torch.linalg.matrix_norm(columns, 2)[:, None, None]
    for _ in range(30):
        result = 1.5 * result - 0.5 * result @ (result.mT @ result)
    return result


METHODS: dict[str, Callable[[Tensor], Tensor]] = {
    "Householder, float32 (the CPU's)": lambda c: torch.linalg.qr(c).Q,
    "CholeskyQR, float64": lambda c: cholesky_qr(c.double(), 1).to(c.dtype),
    "CholeskyQR, float32": lambda c: cholesky_qr(c, 1),
    "CholeskyQR twice, float32": lambda c: cholesky_qr(c, 2),
    "CholeskyQR three times, the first shifted, float32": lambda c: cholesky_qr(
        c, 3, 10 * c.shape[-1] * torch.finfo(c.dtype).eps
    ),
    "Newton-Schulz, float32": polar,
}


def matrices_of_a_training(iterations: int) -> list[Tensor]:
    """The columns (b, m, m) that were orthonormalised, of length 1."""
    seen: list[Tensor] = []
    usual = eigenbasis.orthonormalize

    def watched(matrices: Tensor) -> Tensor:
        seen.append(matrices / torch.linalg.vector_norm(matrices, dim=-2, keepdim=True))
        return usual(matrices)

    eigenbasis.orthonormalize = watched
    try:
        with tempfile.TemporaryDirectory() as folder:
            settings = [*SETTINGS, f"training.iterations={iterations}"]
            train(load_config("quick", settings), Path(folder) / "run")
    finally:
        eigenbasis.orthonormalize = usual
    return seen


def positive_diagonal(basis: Tensor, columns: Tensor) -> Tensor:
    """The same factor with the signs that make it unique."""
    signs = (basis.double() * columns.double()).sum(dim=-2, keepdim=True).sign()
    return basis * signs


def measure(name: str, columns: list[Tensor]) -> list[str]:
    """A row of the table."""
    losses: list[Tensor] = []
    errors: list[Tensor] = []
    for one in columns:
        basis = positive_diagonal(METHODS[name](one), one).double()
        exact = positive_diagonal(torch.linalg.qr(one.double()).Q, one)
        identity = torch.eye(basis.shape[-1], dtype=torch.float64)
        losses.append((basis.mT @ basis - identity).abs().amax(dim=(1, 2)))
        errors.append((basis - exact).norm(dim=-2).amax(dim=-1))
    loss, error = torch.cat(losses), torch.cat(errors)
    failed = int(loss.isnan().sum())
    loss, error = loss[~loss.isnan()], error[~error.isnan()]
    return [name, *(f"{x:.0e}" for x in (loss.median(), loss.max(), error.max())), str(failed)]


def main() -> None:
    """Train, measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=60)
    iterations = parser.parse_args().iterations
    columns = matrices_of_a_training(iterations)
    conditions = torch.cat([torch.linalg.cond(one.double()) for one in columns])
    sizes = sorted({one.shape[-1] for one in columns})
    table = Table(
        "orthonormal",
        ["method", "off identity: median", "largest", "off the exact factor: largest", "failed"],
    )
    for name in METHODS:
        table.add(*measure(name, columns))
    table.write(
        f"Orthonormal factors of {len(conditions):,} matrices of {sizes[0]} and {sizes[-1]} "
        f"columns, refreshed in {iterations} iterations",
        f"Condition numbers of the columns, scaled to length 1: median {conditions.median():.3g}, "
        f"99 of 100 below {conditions.quantile(0.99):.3g}, largest {conditions.max():.3g}. "
        "Newton-Schulz gives the polar factor, and that of C Q is Q itself: it cannot take the "
        "place of QR in a power iteration.",
    )


if __name__ == "__main__":
    main()
