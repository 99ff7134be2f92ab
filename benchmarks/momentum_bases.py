"""Does it matter how the bases of source `1st` are refreshed? M M^T U and M^T M V (algorithm 2)
against M V and M^T U.

brx does what the paper's text says. The authors' implementation multiplies by the other side's
basis instead of a second factor, which saves a product and weighs directions by singular values
instead of their squares. Both have the same fixed points. Trains the model of `brx compare` at
P = 8 with each of them, with three seeds at learning rate 1e-3. When called again, it continues
where it stopped.

    python -m benchmarks.momentum_bases
"""

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.as_published import final_loss
from benchmarks.report import Table
from brx.optim import basis_rotation, refresh
from brx.optim.matrix_batch import MatrixBatch

SETTINGS = ["pipeline.stages=8", "optimizer.method=basis-rotation", "optimizer.source=1st"]
SEEDS = (0, 1, 2)
OTHER = {"left": "right", "right": "left"}
RUNS = Path("runs/momentum-bases")


def product_of_other_side(factor: Tensor, basis: Tensor, other: Tensor) -> Tensor:
    """M V for U, or M^T U for V, with signs that agree with the present basis; zeros beyond the
    factor's rank.

    The factor is M seen from the side to refresh (b, m, n).
    """
    product = torch.zeros_like(basis)  # (b, m, m)
    num_columns = min(factor.shape[-2:])
    product[..., :num_columns] = (factor @ other)[..., :num_columns]
    agreement = (basis * product).sum(dim=-2, keepdim=True)
    return product * agreement.sign()


@contextmanager
def refreshed_from_the_other_side() -> Iterator[None]:
    """Inside the block, source `1st` refreshes each basis from the other side's basis."""
    usual = basis_rotation.estimate_eigenbasis
    usual_product = refresh.factor_product

    def estimate(batch: MatrixBatch, gradient: Tensor, exact: bool) -> None:
        sides = iter(batch.sides)  # `factor_product` is called once per side, in this order
        refresh.factor_product = lambda factor, basis: product_of_other_side(
            factor, basis, batch.matrices(f"{OTHER[next(sides)]}_basis")
        )
        usual(batch, gradient, exact)

    basis_rotation.estimate_eigenbasis = estimate
    try:
        yield
    finally:
        basis_rotation.estimate_eigenbasis = usual
        refresh.factor_product = usual_product


def train_all(name: str) -> list[float]:
    """Train with every seed; returns the final validation losses."""
    return [
        final_loss(RUNS / f"{name}-s{seed}", [*SETTINGS, f"training.seed={seed}"]) for seed in SEEDS
    ]


def main() -> None:
    """Train and print."""
    as_printed = train_all("own-side")
    with refreshed_from_the_other_side():
        from_other = train_all("other-side")
    table = Table("momentum_bases", ["refreshed from", "final validation loss by seed", "mean"])
    for name, losses in (
        ("M M^T U, M^T M V (the paper, brx)", as_printed),
        ("M V, M^T U (the authors)", from_other),
    ):
        table.add(
            name, " ".join(f"{loss:.3f}" for loss in losses), f"{statistics.mean(losses):.3f}"
        )
    table.write(
        "Basis rotation 1st/bilateral at P = 8: 4,000 iterations of the model of brx compare, rate "
        "1e-3"
    )


if __name__ == "__main__":
    main()
