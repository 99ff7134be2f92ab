"""What a step of each optimizer costs on the attention and MLP matrices of a Transformer, refreshes
included.

All optimizers take their steps in turn in one process, so that the ratios hold when the machine's
speed drifts.

    python -m benchmarks.optimizers [--threads 1 2] [--steps 20] [--device cuda] [--blocks 16
    --width 128]

On a GPU, the first basis is computed for one matrix of each shape and used for all of them.

The table keeps its rows for threads and sizes that this call does not measure.
"""

import itertools
import json
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pytorch_optimizer import SOAP
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.report import RESULTS, Table, parser_of, quick_first_basis, synchronize
from brx.optim import BasisRotation

try:
    import heavyball
except ImportError:  # then the table has no row for it
    heavyball = None

SIZES = {"cpu": [(16, 128), (8, 384)], "cuda": [(32, 384), (4, 1728)]}
"""(blocks, width) by device. All optimizers hold their states at the same time, so that 80 GB have
room for only four of the 1B model's 24 blocks."""

FREQUENCY = 10
OURS = "BasisRotation 2nd bilateral"
COLUMNS = [
    "matrices",
    "threads",
    "optimizer",
    "ms / step (mean)",
    "ordinary step",
    "refresh step",
    "first step",
]
COLUMNS += ["ratio to ours"]
STRAIGHTFORWARD = "straightforward (2nd bilateral)"


class Straightforward(torch.optim.Optimizer):
    """Algorithms 1 and 2 of the paper, written down matrix by matrix: three rotations and both
    covariances in every step."""

    def __init__(
        self, params: Iterable[Tensor], lr: float = 1e-3, weight_decay: float = 0.01
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update every matrix."""
        for group in self.param_groups:
            for weight in group["params"]:
                self.update(weight, self.state[weight], group["lr"], group["weight_decay"])

    def update(self, W: Tensor, state: dict[str, Any], lr: float, weight_decay: float) -> None:
        """One step of one matrix W (m, n), in the paper's symbols."""
        G, beta1, beta2 = W.grad, 0.9, 0.999
        assert G is not None
        if not state:
            rows, columns = W.shape
            state.update(t=0, M=torch.zeros_like(W), v=torch.zeros_like(W))
            state.update(L=W.new_zeros(rows, rows), R=W.new_zeros(columns, columns))
        state["t"] += 1
        t, M, v, L, R = (state[key] for key in ("t", "M", "v", "L", "R"))
        M.lerp_(G, 1 - beta1)
        L.lerp_(G @ G.T, 1 - beta2)
        R.lerp_(G.T @ G, 1 - beta2)
        if t == 1:
            state["U"], state["V"] = (torch.linalg.eigh(C).eigenvectors.flip(1) for C in (L, R))
        elif t % FREQUENCY == 0:
            for key, C, dim in (("U", L, 0), ("V", R, 1)):
                Q = state[key]
                order = torch.diag(Q.T @ C @ Q).argsort(descending=True)
                state[key] = torch.linalg.qr(C @ Q[:, order]).Q
                v.copy_(v.index_select(dim, order))
        U, V = state["U"], state["V"]
        rotated_gradient = U.T @ G @ V
        rotated_momentum = U.T @ M @ V
        v.mul_(beta2).addcmul_(rotated_gradient, rotated_gradient, value=1 - beta2)
        denominator = (v / (1 - beta2**t)).sqrt() + 1e-8
        update = U @ (rotated_momentum / (1 - beta1**t) / denominator) @ V.T
        W.mul_(1 - lr * weight_decay).sub_(update, alpha=lr)


def rotation_variant(**options: str) -> Callable[[list[Tensor]], torch.optim.Optimizer]:
    """Makes the optimizer of one strategy."""
    return lambda weights: BasisRotation(weights, frequency=FREQUENCY, **options)  # type: ignore[arg-type]


def heavyball_soap(weights: list[Tensor]) -> torch.optim.Optimizer:
    """HeavyBall's SOAP with the covariance at every step, uncompiled like all others."""
    heavyball.utils.compile_mode = None
    return heavyball.SOAP(
        weights,
        lr=1e-3,
        betas=(0.9, 0.999),
        shampoo_beta=0.999,
        precondition_frequency=FREQUENCY,
        max_precond_dim=max(max(weight.shape) for weight in weights),
        merge_dims=False,
    )


VARIANTS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "AdamW (torch, fused)": lambda weights: torch.optim.AdamW(weights, fused=True),
    "SOAP (pytorch-optimizer)": lambda weights: SOAP(
        weights, lr=1e-3, betas=(0.9, 0.999), precondition_frequency=FREQUENCY
    ),
    **({"SOAP (HeavyBall)": heavyball_soap} if heavyball else {}),
    STRAIGHTFORWARD: Straightforward,
    OURS: rotation_variant(),
    "BasisRotation 2nd bilateral, covariance at refreshes": rotation_variant(covariance="refresh"),
    "BasisRotation 2nd unilateral": rotation_variant(geometry="unilateral"),
    "BasisRotation 1st bilateral": rotation_variant(source="1st", covariance="refresh"),
    "BasisRotation 1st unilateral": rotation_variant(
        source="1st", geometry="unilateral", covariance="refresh"
    ),
}


@dataclass
class Runner:
    """One optimizer at work on its own copy of the weights."""

    optimizer: torch.optim.Optimizer
    weights: list[Tensor]
    seconds: list[float] = field(default_factory=list)  # of every timed step

    def step(self, gradients: list[Tensor]) -> float:
        """Take one step; the seconds it took."""
        for weight, gradient in zip(self.weights, gradients, strict=True):
            weight.grad = gradient
        synchronize(gradients[0].device)
        started = time.perf_counter()
        self.optimizer.step()
        synchronize(gradients[0].device)
        return time.perf_counter() - started


def main() -> None:
    """Measure and print."""
    parser = parser_of(__doc__, steps=20)
    parser.add_argument("--threads", type=int, nargs="+", help="default: 1 2; on a GPU 1")
    parser.add_argument("--device", choices=list(SIZES), default="cpu")
    parser.add_argument("--blocks", type=int, help="measure this size only (with --width)")
    parser.add_argument("--width", type=int)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the table")
    parser.add_argument(
        "--only",
        nargs="*",
        help="names of variants that contain one of these texts; writes no files",
    )
    options = parser.parse_args()
    device = torch.device(options.device)
    sizes = [(options.blocks, options.width)] if options.blocks else SIZES[options.device]
    table = Table(
        "optimizers" if options.device == "cpu" else f"optimizers-{options.device}", COLUMNS
    )
    notes = []
    threads = options.threads or ([1] if device.type == "cuda" else [1, 2])
    with suppress(KeyboardInterrupt):  # Ctrl-C ends the measurement, but keeps its rows
        for (blocks, width), num_threads in itertools.product(sizes, threads):
            torch.set_num_threads(num_threads)
            matrices = f"{blocks} blocks, d {width}"
            chosen = [
                name
                for name in VARIANTS
                if not options.only or any(text in name for text in options.only)
            ]
            runners, first_steps, rate = measure(chosen, blocks, width, device, options.steps)
            means = {name: statistics.mean(runner.seconds) for name, runner in runners.items()}
            for name, runner in runners.items():
                numbered = list(enumerate(runner.seconds, start=FREQUENCY + 1))
                ordinary = [seconds for step, seconds in numbered if step % FREQUENCY != 0]
                refresh = [seconds for step, seconds in numbered if step % FREQUENCY == 0]
                table.add(
                    matrices,
                    str(num_threads),
                    name,
                    *(
                        f"{1e3 * seconds:.1f}"
                        for seconds in (means[name], statistics.mean(ordinary))
                    ),
                    f"{1e3 * statistics.mean(refresh):.0f}",
                    "" if device.type == "cuda" else f"{1e3 * first_steps[name]:.0f}",
                    f"{means[name] / means[OURS]:.2f}" if OURS in means else "",
                )
            if OURS in means:
                about = f"{matrices}, {num_threads} thread(s)"
                notes.append(
                    about
                    + ", 2nd bilateral: "
                    + explain(blocks, width, means[OURS], rate, runners[OURS])
                )
    title = f"{options.device}, fp32, frequency {FREQUENCY}, mean of {options.steps} steps"
    if options.only:
        table.show(title, *notes)
    else:
        table.write(title, *keep_others(table, notes, options.out), folder=options.out)


def keep_others(table: Table, notes: list[str], folder: Path) -> list[str]:
    """Add the rows and notes of the table in a folder that have not been measured again; returns
    all notes."""
    path = folder / f"{table.name}.json"
    if not path.exists():
        return notes
    written = json.loads(path.read_text(encoding="utf-8"))
    measured = {(row[0], row[1]) for row in table.rows}
    table.rows += [row for row in written["rows"] if (row[0], row[1]) not in measured]
    # By width, then blocks, then threads: the first cell is `16 blocks, d 128`.
    table.rows.sort(
        key=lambda row: ([int(n) for n in re.findall(r"\d+", row[0])][::-1], int(row[1]))
    )
    return notes + [
        note
        for note in written["notes"]
        if not any(note.startswith(f"{m}, {t} thread(s)") for m, t in measured)
    ]


def measure(
    names: list[str], blocks: int, width: int, device: torch.device, num_steps: int
) -> tuple[dict[str, Runner], dict[str, float], float]:
    """Time the optimizers in turns, after ten warm-up steps that end in a refresh.

    Returns:
        The runners, the seconds of their first steps (which compute exact eigenvectors), and the
        rate of matrix products (FLOP/s).
    """
    shapes = matrix_shapes(blocks, width)
    gradients = [make_gradients(shapes, seed, device) for seed in range(4)]
    runners, first_steps = {}, {}
    for name in names:
        weights = [torch.zeros(shape, device=device, requires_grad=True) for shape in shapes]
        runners[name] = Runner(VARIANTS[name](weights), weights)
        with quick_first_basis() if device.type == "cuda" else nullcontext():
            first_steps[name] = runners[name].step(gradients[0])
    rates = []
    for step in range(2, FREQUENCY + num_steps + 1):
        for runner in runners.values():
            seconds = runner.step(gradients[step % len(gradients)])
            if step > FREQUENCY:
                runner.seconds.append(seconds)
        rates.append(product_rate(width, device))
    return runners, first_steps, statistics.median(rates)


def matrix_shapes(blocks: int, width: int) -> list[tuple[int, int]]:
    """The shapes of q, k, v, output projection and both MLP matrices of every block."""
    return [(width, width)] * 4 * blocks + [(4 * width, width), (width, 4 * width)] * blocks


def make_gradients(shapes: list[tuple[int, int]], seed: int, device: torch.device) -> list[Tensor]:
    """Noise whose rows and columns have decaying sizes, so that the covariances have a spectrum."""
    generator = torch.Generator(device).manual_seed(seed)
    gradients = []
    for rows, columns in shapes:
        row_sizes = torch.arange(1, rows + 1, device=device)[:, None] ** -0.5
        column_sizes = torch.arange(1, columns + 1, device=device) ** -0.5
        gradients.append(
            1e-2
            * row_sizes
            * column_sizes
            * torch.randn(rows, columns, device=device, generator=generator)
        )
    return gradients


def product_rate(width: int, device: torch.device) -> float:
    """FLOP/s of the product that dominates, (4d, 4d) times (4d, d)."""
    left = torch.randn(4 * width, 4 * width, device=device)
    right = torch.randn(4 * width, width, device=device)
    repeats = max(1, int(2e9 / (32 * width**3)))  # a product has 2 (4d) (4d) d = 32 d^3 FLOPs
    left @ right
    synchronize(device)
    started = time.perf_counter()
    for _ in range(repeats):
        left @ right
    synchronize(device)
    return repeats * 32 * width**3 / (time.perf_counter() - started)


def explain(blocks: int, width: int, seconds: float, rate: float, runner: Runner) -> str:
    """A text: the time that the counted multiply-adds take at best, how close the step comes to it,
    and where the time goes."""
    step, refresh = counted_multiply_adds(matrix_shapes(blocks, width))
    floor = 2 * (step + refresh / FREQUENCY) / rate
    activities = [
        ProfilerActivity.CPU,
        *([ProfilerActivity.CUDA] if torch.cuda.is_available() else []),
    ]
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the profiler does not see work on the optimizer's other threads
    with profile(activities=activities) as profiler:
        for _ in range(FREQUENCY):
            runner.optimizer.step()
    torch.set_num_threads(num_threads)
    spent: dict[str, float] = defaultdict(float)
    for event in profiler.key_averages():
        spent[kind_of(event.key)] += max(event.self_cpu_time_total, event.self_device_time_total)
    total = sum(spent.values())
    shares = ", ".join(
        f"{kind} {100 * spent[kind] / total:.0f} %"
        for kind in sorted(spent, key=lambda kind: -spent[kind])
    )
    return (
        f"{step / 1e9:.2f} G multiply-adds per step and {refresh / 1e9:.2f} G per refresh; at the "
        f"measured "
        f"{rate / 1e9:.0f} GFLOP/s the floor is {1e3 * floor:.1f} ms per step, of which "
        f"{100 * floor / seconds:.0f} % is reached. The time goes to: {shares}."
    )


def counted_multiply_adds(shapes: list[tuple[int, int]]) -> tuple[int, int]:
    """The fewest multiply-adds of 2nd bilateral with covariances at every step: per step, and in
    addition per refresh."""
    step = refresh = 0
    for m, n in shapes:
        rotation = m * n * (m + n)
        step += 2 * rotation  # the gradient in, the update out
        refresh += rotation  # the momentum into the new basis
        for size, other in ((m, n), (n, m)):
            step += size * size * other // 2  # a covariance, which is symmetric
            power = size**3
            # Gram matrix (1/2), its Cholesky factor (1/6), triangular solve (1/2).
            orthonormalisation = 7 * size**3 // 6
            refresh += power + orthonormalisation
    return step, refresh


def kind_of(operation: str) -> str:
    """The part of a step that an operation of the profile belongs to."""
    kinds = {
        "products": ("mm", "gemm", "matmul"),
        "orthonormalisation": ("qr", "geqrf", "orgqr", "householder", "cholesky", "triangular"),
        "Adam": ("adam",),
        "copies": ("copy", "cat", "stack", "gather", "clone", "Memcpy"),
    }
    for kind, fragments in kinds.items():
        if any(fragment in operation for fragment in fragments):
            return kind
    return "rest"


if __name__ == "__main__":
    main()
