"""The cost and the accuracy of a first basis and of a refresh on a device, for the paper's
matrices.

    python -m benchmarks.gpu.bases [--sizes 384x1536 ...] [--device cuda] [--out DIR]

For each matrix m x n (m <= n), it takes the covariance of the rows (m x m) and the one of the
columns (n x n); both have rank m.
"""

import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.optimizers import make_gradients
from benchmarks.report import RESULTS, Table, parser_of, synchronize
from brx.optim.eigenbasis import Refreshed, covariance_product, exact_eigenbasis, power_iteration


def main() -> None:
    """Measure and print."""
    parser = parser_of(__doc__)
    parser.add_argument(
        "--sizes", nargs="+", default=["384x1536", "1728x6912", "2688x10752"], metavar="MxN"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the table")
    options = parser.parse_args()
    device = torch.device(options.device)
    columns = [
        "matrix",
        "side",
        "first basis, s",
        "refresh, ms",
        "off identity: first",
        "refreshed",
        "off diagonal",
    ]
    table = Table("first_basis", columns)
    exact_eigenbasis(torch.eye(8, device=device)[None])  # loads the device's libraries
    for size in options.sizes:
        shape = tuple(map(int, size.split("x")))
        assert len(shape) == 2
        (gradient,) = make_gradients([shape], 0, device)
        (other,) = make_gradients([shape], 1, device)
        for side, first, second in (("rows", gradient, other), ("columns", gradient.mT, other.mT)):
            covariance = (first @ first.mT)[None]
            first_basis, seconds = timed(exact_eigenbasis, covariance)
            residual = off_diagonal(first_basis[0], covariance[0])
            later = covariance.lerp((second @ second.mT)[None], 0.01)
            basis, _ = timed(refresh, later, first_basis)
            _, refresh_seconds = timed(refresh, later, first_basis)
            table.add(
                size,
                side,
                f"{seconds:.2f}",
                f"{1e3 * refresh_seconds:.1f}",
                f"{off_identity(first_basis[0]):.1e}",
                f"{off_identity(basis[0]):.1e}",
                f"{residual:.1e}",
            )
    table.write(
        "The first basis (exact, in float64) and a refresh (power iteration, CholeskyQR in "
        "float64) of one matrix",
        "Off identity: the largest absolute entry of U^T U - 1, in float64. Off diagonal: the "
        "Frobenius norm of U^T C U"
        " off its diagonal over that of C.",
        folder=options.out,
    )


def refresh(covariance: Tensor, basis: Tensor) -> Refreshed:
    """A refresh as the optimizer makes it."""
    return power_iteration(covariance_product(covariance, basis), basis)


def timed(estimate: Callable[..., Refreshed], *matrices: Tensor) -> tuple[Tensor, float]:
    """The basis, and the seconds that it took."""
    synchronize(matrices[0].device)
    started = time.perf_counter()
    basis = estimate(*matrices).basis
    synchronize(matrices[0].device)
    return basis, time.perf_counter() - started


def off_identity(basis: Tensor) -> float:
    """The largest absolute entry of U^T U - 1."""
    basis = basis.double()
    return float(
        (basis.mT @ basis - torch.eye(len(basis), dtype=basis.dtype, device=basis.device))
        .abs()
        .max()
    )


def off_diagonal(basis: Tensor, covariance: Tensor) -> float:
    """The Frobenius norm of U^T C U off its diagonal, divided by that of C."""
    basis, covariance = basis.double(), covariance.double()
    rotated = basis.mT @ covariance @ basis
    return float((rotated - rotated.diagonal().diag()).norm() / covariance.norm())


if __name__ == "__main__":
    main()
