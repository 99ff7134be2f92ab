"""How orthogonal a refreshed basis is, by method, and what a refresh's orthonormalisation costs.

A power iteration ends with two QR decompositions: of its columns in the order of their sizes, and
of what each column keeps along the directions that the first one found. `factors` takes the
matrices of both at every refresh of a short training of `quick` at width 128 (both sides of all
attention and MLP matrices), scales their columns to length 1, and orthonormalises them in several
ways. The exact factor is Householder's in float64. With --resume it takes the matrices from the
middle of a long training instead: it continues a copy of a run from an earlier checkpoint.

`times` compares brx's way with one QR decomposition, and with the same mathematics written out. The
variants take turns in one process.

    python -m benchmarks.orthonormal factors [--iterations 60] [--resume RUN --checkpoint NUMBER]
    python -m benchmarks.orthonormal times [--rounds 15]
"""

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.report import Table, parser_of, take_turns
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
    "CholeskyQR twice, the first shifted, float32": lambda c: cholesky_qr(
        c, 2, 10 * c.shape[-1] * torch.finfo(c.dtype).eps
    ),
    "CholeskyQR three times, the first shifted, float32": lambda c: cholesky_qr(
        c, 3, 10 * c.shape[-1] * torch.finfo(c.dtype).eps
    ),
    "Newton-Schulz, float32": polar,
}


def train_quick(iterations: int) -> None:
    """Train a small model from its start."""
    with tempfile.TemporaryDirectory() as folder:
        settings = [*SETTINGS, f"training.iterations={iterations}"]
        train(load_config("quick", settings), Path(folder) / "run")


def continue_run(run: Path, checkpoint: int, iterations: int) -> None:
    """Continue a copy of a run for some iterations, from one of its checkpoints."""
    settings = [f"training.stop_after={checkpoint + iterations}"]
    config = load_config(run / "config.yaml", settings)
    name = f"checkpoints/{checkpoint:08}"
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "run"
        shutil.copytree(run / name, copy / name)
        shutil.copy(run / "config.yaml", copy)
        shutil.copy(run / "metrics.jsonl", copy)
        train(config, copy, resume=True)


def matrices_of(training: Callable[[], None]) -> tuple[list[Tensor], list[Tensor]]:
    """The matrices (b, m, m) that the refreshes of a training decompose, with columns of length 1:
    those of the first decompositions (by size) and those of the second ones (what is kept)."""
    seen: list[Tensor] = []
    usual = eigenbasis._decompose

    def watched(padded: Tensor) -> Tensor:
        if padded.dtype == torch.float32:  # first bases are computed in float64
            columns = padded[:, : padded.shape[-1]]
            seen.append(columns / torch.linalg.vector_norm(columns, dim=-2, keepdim=True))
        return usual(padded)

    eigenbasis._decompose = watched
    try:
        training()
    finally:
        eigenbasis._decompose = usual
    return seen[0::2], seen[1::2]  # a refresh makes the two decompositions in turn


def positive_diagonal(basis: Tensor, columns: Tensor) -> Tensor:
    """The factor Q of the columns C, with the signs that make the diagonal of R = Q^T C positive
    and so Q unique."""
    signs = (basis.double() * columns.double()).sum(dim=-2, keepdim=True).sign()
    return basis * signs


def exact_factors(columns: list[Tensor]) -> list[Tensor]:
    """Householder's factors in float64."""
    return [positive_diagonal(torch.linalg.qr(one.double()).Q, one) for one in columns]


def measure(name: str, columns: list[Tensor], exact: list[Tensor]) -> list[str]:
    """The cells of a method's row: how far Q^T Q is from the identity (median and largest over
    matrices), how far Q is from the exact factor (largest), and how many matrices failed."""
    losses: list[Tensor] = []
    errors: list[Tensor] = []
    for one, exact_factor in zip(columns, exact, strict=True):
        basis = positive_diagonal(METHODS[name](one), one).double()
        identity = torch.eye(basis.shape[-1], dtype=torch.float64)
        losses.append((basis.mT @ basis - identity).abs().amax(dim=(1, 2)))
        errors.append((basis - exact_factor).norm(dim=-2).amax(dim=-1))
    loss, error = torch.cat(losses), torch.cat(errors)
    failed = int(loss.isnan().sum())
    loss, error = loss[~loss.isnan()], error[~error.isnan()]
    return [name, *(f"{x:.0e}" for x in (loss.median(), loss.max(), error.max())), str(failed)]


def conditions_of(columns: list[Tensor]) -> str:
    """A text about the condition numbers."""
    conditions = torch.cat([torch.linalg.cond(one.double()) for one in columns])
    return (
        f"median {conditions.median():.3g}, 99 of 100 below {conditions.quantile(0.99):.3g}, "
        f"largest {conditions.max():.3g}"
    )


def factors(training: Callable[[], None], name: str, when: str) -> None:
    """Train, measure and write the table of orthonormal factors.

    Args:
        name: of the table.
        when: the iterations of which training.
    """
    by_size, kept = matrices_of(training)
    table = Table(
        name,
        [
            "columns",
            "method",
            "off identity: median",
            "largest",
            "off the exact factor: largest",
            "failed",
        ],
    )
    for label, columns in (("by size", by_size), ("what is kept", kept)):
        exact = exact_factors(columns)
        for method in METHODS:
            table.add(label, *measure(method, columns, exact))
    num_matrices = sum(len(one) for one in by_size)
    sizes = sorted({one.shape[-1] for one in by_size})
    table.write(
        f"Orthonormal factors of {num_matrices:,} matrices of {sizes[0]} and {sizes[-1]} "
        f"columns, refreshed in {when}",
        f"Condition numbers of the columns, scaled to length 1. By size: {conditions_of(by_size)}. "
        f"What is kept: {conditions_of(kept)}. "
        "Newton-Schulz gives the polar factor, and the polar factor of C Q is Q itself: it cannot "
        "take the place of QR in a power iteration.",
    )


SHAPES = ((24, 128), (12, 384), (4, 768), (1, 1536))
"""Pairs of the number of matrices that are orthonormalised together, and their size."""


def one_qr(columns: Tensor, _: Tensor) -> Tensor:
    """One decomposition, of the columns in the order in which they come (trajectory version 5)."""
    return eigenbasis._householder_qr(columns)


def written_out(
    columns: Tensor,  # (b, m, m)
    sizes: Tensor,  # (b, m)
) -> Tensor:
    """The mathematics of brx, but every factor is formed as a matrix."""
    order = sizes.argsort(dim=-1, descending=True, stable=True)
    by_size = eigenbasis._householder_qr(eigenbasis.select_columns(columns, order))
    directions = eigenbasis.select_columns(by_size, order.argsort(dim=-1))
    parts = directions.mT @ columns
    kept = (eigenbasis.FAR_LARGER * sizes[:, None, :] / sizes[:, :, None]).clamp_(max=1).square_()
    return eigenbasis._householder_qr(directions @ parts.mul_(kept))


def in_brx(columns: Tensor, sizes: Tensor) -> Tensor:
    return eigenbasis._orthonormalize_without_order(columns, sizes)


TIMED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "one QR": one_qr,
    "two QR, written out": written_out,
    "two QR, as in brx": in_brx,
}


def timed_case(num: int, size: int) -> tuple[Tensor, Tensor]:
    """Columns (num, size, size) close to a random basis, scaled by their sizes (num, size).

    The sizes fall from 1 to 1e-4 on the whole, but neighbours may come in any order."""
    generator = torch.Generator().manual_seed(0)
    disorder = torch.randn(num, size, generator=generator)
    sizes = torch.logspace(0, -4, size) * disorder.mul(0.5).exp()
    noise = torch.randn(num, size, size, generator=generator) / size
    basis = eigenbasis._householder_qr(torch.randn(num, size, size, generator=generator))
    columns = basis @ (torch.eye(size) + noise) * sizes[:, None, :]
    return columns.mT.contiguous().mT, sizes


def times(rounds: int) -> None:
    """Time the variants and write their table."""
    table = Table("orthonormal_times", ["matrices", *TIMED, "as in brx / one QR", "/ written out"])
    for num, size in SHAPES:
        columns, sizes = timed_case(num, size)
        torch.testing.assert_close(
            written_out(columns, sizes), in_brx(columns, sizes), rtol=0, atol=1e-4
        )

        def repeat(
            variant: Callable[[Tensor, Tensor], Tensor],
            columns: Tensor = columns,
            sizes: Tensor = sizes,
        ) -> Callable[[int], None]:
            def run(num_times: int) -> None:
                for _ in range(num_times):
                    variant(columns, sizes)

            return run

        variants = {name: repeat(variant) for name, variant in TIMED.items()}
        # Processor time: other work on the machine does not count.
        turns = take_turns(variants, rounds, clock=time.process_time)
        medians = {name: 1000 * statistics.median(seconds) for name, seconds in turns.items()}
        ours = medians["two QR, as in brx"]
        ratios = [ours / medians["one QR"], ours / medians["two QR, written out"]]
        table.add(
            f"{num} of {size} x {size}",
            *(f"{median:.1f}" for median in medians.values()),
            *(f"{ratio:.2f}" for ratio in ratios),
        )
        print(*table.rows[-1], sep=" | ", flush=True)
    table.write(
        "Milliseconds of processor time of the orthonormalisation in a refresh, float32, one "
        f"thread, median of {rounds} turns",
        "One QR is what trajectory version 5 did. Two QR are of the columns by size and of what "
        "they keep; written out, with both factors and two products as matrices.",
    )


def main() -> None:
    """Write the tables that are asked for; all by default."""
    parser = parser_of(__doc__, iterations=60, rounds=15)
    parser.add_argument("parts", nargs="*", metavar="PART", help="factors, times")
    parser.add_argument("--resume", type=Path, metavar="RUN", help="with the checkpoint below")
    parser.add_argument("--checkpoint", type=int, metavar="ITERATION", default=16_000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    parts = options.parts or ["factors", "times"]
    iterations, checkpoint = options.iterations, options.checkpoint
    if "factors" in parts and options.resume is None:
        factors(
            lambda: train_quick(iterations), "orthonormal", f"the first {iterations} iterations"
        )
    elif "factors" in parts:
        factors(
            lambda: continue_run(options.resume, checkpoint, iterations),
            "orthonormal_late",
            f"{iterations} iterations after {checkpoint:,} of {options.resume.name}",
        )
    if "times" in parts:
        times(options.rounds)


if __name__ == "__main__":
    main()
