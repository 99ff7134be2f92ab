"""How little depends on rounding: noise floors, the largest early steps, and the effect of
perturbations of 1e-7.

Gradients do not depend on the weights here, so any growth of a difference comes from the optimizer.

    python -m benchmarks.first_steps noise
        floors against measured noise, up to 2688 x 10752 (a minute, 2 GB)
    python -m benchmarks.first_steps steps     early steps and perturbations (a quarter of an hour)
    python -m benchmarks.first_steps threads   one thread against 2 and 4 (a few minutes)
"""

import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from benchmarks.report import Table
from brx.config.loading import load_config
from brx.optim import BasisRotation
from brx.optim.elementwise import above_noise, noise_floor
from brx.train.loop import train

Shape = tuple[int, int]
Gradient = Callable[[torch.Generator, Shape, int], Tensor]
"""Draws the gradient (m, n) of an update, whose number counts from 1."""

SHAPES = ((16, 48), (48, 16), (32, 128), (64, 64), (128, 128), (256, 256))
SEEDS = range(10)
NUM_STEPS = 60
THREADS = (2, 4)
# Larger ones show nothing new: with more threads, products of these already add in another order.
THREAD_SHAPES = SHAPES[:5]
PERTURBATION = 1e-7


def _normal(generator: torch.Generator, shape: Shape, _: int = 0) -> Tensor:
    return torch.randn(shape, generator=generator)


def _low_rank(generator: torch.Generator, shape: Shape, rank: int) -> Tensor:
    rows, columns = shape
    return _normal(generator, (rows, rank)) @ _normal(generator, (rank, columns))


def _decaying(generator: torch.Generator, shape: Shape, _: int) -> Tensor:
    return torch.outer(*(torch.logspace(0, -2, size) for size in shape)) * _normal(generator, shape)


def _one_direction(generator: torch.Generator, shape: Shape, _: int) -> Tensor:
    always = torch.Generator().manual_seed(1)
    return _low_rank(always, shape, 1) * (1 + 0.3 * torch.randn((), generator=generator))


def _absent_rows(generator: torch.Generator, shape: Shape, _: int = 0) -> Tensor:
    gradient = _normal(generator, shape)
    gradient[: shape[0] // 3] = 0
    return gradient


def _absent_columns(generator: torch.Generator, shape: Shape, _: int) -> Tensor:
    return _absent_rows(generator, (shape[1], shape[0])).T.contiguous()


def _late_rows(generator: torch.Generator, shape: Shape, update: int) -> Tensor:
    gradient = _normal(generator, shape)
    for row, first in ((0, 11), (1, 15), (2, 21)):
        gradient[row] *= update >= first
    return gradient


def _one_hot_rows(generator: torch.Generator, shape: Shape, _: int) -> Tensor:
    gradient = torch.zeros(shape)
    rows = torch.randint(shape[0], (4,), generator=generator)
    gradient[rows] = _normal(generator, (4, shape[1]))
    return gradient


def _duplicated_rows(generator: torch.Generator, shape: Shape, _: int) -> Tensor:
    gradient = _normal(generator, shape)
    gradient[:, 1], gradient[3], gradient[-1] = gradient[:, 0], gradient[2], gradient[0]
    return gradient


def _few_entries(generator: torch.Generator, shape: Shape, _: int) -> Tensor:
    return _normal(generator, shape) * (torch.rand(shape, generator=generator) < 0.02)


def _same_few_entries(generator: torch.Generator, shape: Shape, _: int) -> Tensor:
    return _few_entries(torch.Generator().manual_seed(1), shape, 0).sign() * _normal(
        generator, shape
    )


def _few_tokens(generator: torch.Generator, shape: Shape, _: int) -> Tensor:
    return _low_rank(generator, shape, int(torch.randint(0, 3, (), generator=generator)))


GRADIENTS: dict[str, Gradient] = {
    "normal": _normal,
    "decaying spectrum": _decaying,
    "rank 1, always the same": _one_direction,
    "rank 1, always another": lambda generator, shape, _: _low_rank(generator, shape, 1),
    "absent rows": _absent_rows,
    "absent columns": _absent_columns,
    "rows from update 11, 15, 21": _late_rows,
    "four rows": _one_hot_rows,
    "duplicated rows and columns": _duplicated_rows,
    "2 % of entries": _few_entries,
    "2 % of entries, always the same": _same_few_entries,
    "an expert's, of 0, 1, 2 tokens": _few_tokens,
}

Make = Callable[[list[Tensor]], torch.optim.Optimizer]


def basis_rotation(**options: str | int) -> Make:
    """Makes a `BasisRotation` with a learning rate of 1, so that weights are in learning rates."""
    return lambda params: BasisRotation(params, lr=1.0, weight_decay=0.0, **options)  # type: ignore[arg-type]


def soap(params: list[Tensor]) -> torch.optim.Optimizer:
    """Makes a `SOAP` with a learning rate of 1."""
    from pytorch_optimizer import SOAP  # loaded here, as it takes a second and the rest needs none

    return SOAP(params, lr=1.0, betas=(0.9, 0.999), weight_decay=0.0, precondition_frequency=10)


OPTIMIZERS: dict[str, Make] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1.0, weight_decay=0.0),
    "2nd/bilateral": basis_rotation(),
    "1st/bilateral": basis_rotation(source="1st"),
    "2nd/unilateral": basis_rotation(geometry="unilateral"),
    "1st/unilateral": basis_rotation(source="1st", geometry="unilateral"),
    "2nd/bilateral, first basis at 10": basis_rotation(first_refresh=10),
    "SOAP (pytorch-optimizer)": soap,
}


def weights_of_seeds(
    make: Make,
    gradient: Gradient,
    shape: Shape,
    num_steps: int,
    perturbation: float = 0.0,
    seeds: Sequence[int] = (0,),
) -> Tensor:
    """The weights at the start (zero) and after every step (num_steps + 1, seeds, m, n). One
    optimizer has one matrix per seed.

    Every entry of every gradient is multiplied by 1 + perturbation times standard normal noise."""
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    noises = [torch.Generator().manual_seed(99) for _ in seeds]
    parameters: list[Tensor] = [torch.nn.Parameter(torch.zeros(shape)) for _ in seeds]
    optimizer = make(parameters)
    series = [torch.zeros(len(parameters), *shape)]
    for update in range(1, num_steps + 1):
        for parameter, generator, noise in zip(parameters, generators, noises, strict=True):
            change = 1 + perturbation * torch.randn(shape, generator=noise)
            parameter.grad = gradient(generator, shape, update) * change
        optimizer.step()
        series.append(torch.stack([parameter.detach() for parameter in parameters]))
    return torch.stack(series)


def weights(
    make: Make,
    gradient: Gradient,
    shape: Shape,
    num_steps: int,
    perturbation: float = 0.0,
    seed: int = 0,
) -> Tensor:
    """`weights_of_seeds` for one seed (num_steps + 1, m, n)."""
    return weights_of_seeds(make, gradient, shape, num_steps, perturbation, (seed,))[:, 0]


@dataclass
class Sensitivity:
    """What one matrix did in the first updates, in learning rates.

    Attributes:
        largest_step: the largest entry of an update.
        moved: how far the perturbation moved the final weights (norm over entries).
        moved_most: how far it moved the entry that it moved most.
    """

    shape: Shape
    seed: int
    largest_step: float
    moved: float
    moved_most: float

    @property
    def place(self) -> str:
        return f"{self.shape[0]} x {self.shape[1]}, seed {self.seed}"


def sensitivities(
    make: Make, gradient: Gradient, shape: Shape, seeds: Sequence[int]
) -> list[Sensitivity]:
    """The sensitivity of a matrix of this shape for each seed."""
    straight = weights_of_seeds(make, gradient, shape, NUM_STEPS, 0.0, seeds)
    perturbed = weights_of_seeds(make, gradient, shape, NUM_STEPS, PERTURBATION, seeds)
    steps = straight.diff(dim=0)  # (updates, seeds, m, n)
    change = (straight[-1] - perturbed[-1]).flatten(1)  # (seeds, m n)
    found = []
    for index, seed in enumerate(seeds):
        largest_step = steps[:, index].abs().max().item()
        moved = change[index].norm().item()
        moved_most = change[index].abs().max().item()
        found.append(Sensitivity(shape, seed, largest_step, moved, moved_most))
    return found


def largest_step_and_drift(
    make: Make, gradient: Gradient, shape: Shape, seed: int = 0
) -> tuple[float, float]:
    """The largest entry of an update, and how far a perturbation of 1e-7 moves the final weights
    (norm); both in learning rates."""
    (found,) = sensitivities(make, gradient, shape, [seed])
    return found.largest_step, found.moved


def sensitivities_of_all(make: Make, gradient: Gradient, seeds: Sequence[int]) -> list[Sensitivity]:
    found = []
    for shape in SHAPES:
        found += sensitivities(make, gradient, shape, seeds)
    return found


def summary_of(found: Sequence[Sensitivity], of_adamw: Sequence[Sensitivity]) -> str:
    """The text of a cell: the largest step, how far the perturbation moved the weights over
    AdamW's (median, largest), and the entry that it moved most."""
    reference = {(one.shape, one.seed): one.moved for one in of_adamw}
    factors = [one.moved / reference[one.shape, one.seed] for one in found]
    most = max(found, key=lambda one: one.moved_most)
    largest_step = max(one.largest_step for one in found)
    return (
        f"{largest_step:.1f}; {statistics.median(factors):.2g} x, {max(factors):.2g} x; "
        f"{most.moved_most:.1g} lr ({most.place})"
    )


def steps() -> None:
    """Write the table of early steps and perturbations, over shapes and seeds."""
    table = Table("first_steps", ["gradients", *list(OPTIMIZERS)[1:]])
    for name, gradient in GRADIENTS.items():
        of_adamw = sensitivities_of_all(OPTIMIZERS["AdamW"], gradient, SEEDS)
        texts = []
        for label, make in list(OPTIMIZERS.items())[1:]:
            seeds = SEEDS if "/" in label else SEEDS[:1]  # SOAP, for comparison: one seed
            texts.append(summary_of(sensitivities_of_all(make, gradient, seeds), of_adamw))
        table.add(name, *texts)
        print(name, *texts, sep=" | ", flush=True)
    shapes = ", ".join(f"{m} x {n}" for m, n in SHAPES)
    table.write(
        f"Largest entry of an update in the first {NUM_STEPS} updates, in learning rates; how far "
        f"a perturbation of {PERTURBATION:g} of every entry of every gradient moved the weights "
        "(norm), over AdamW's: the median and the largest; and how far it moved the entry that "
        "moved most, in learning rates, with its matrix.",
        f"Over matrices of {shapes} and seeds 0 to {SEEDS[-1]} (SOAP: seed 0); from weights of "
        "zero, in float32, refreshes every 10 updates. AdamW's largest step is 1.1 to 1.6.",
    )


def threads() -> None:
    """Write the table of how far apart training on one thread and on several ends."""
    strategies = [label for label in OPTIMIZERS if "/" in label]
    table = Table("first_steps_threads", ["gradients", *strategies])
    for name, gradient in GRADIENTS.items():
        texts = [_apart(OPTIMIZERS[label], gradient) for label in strategies]
        table.add(name, *texts)
        print(name, *texts, sep=" | ", flush=True)
    shapes = ", ".join(f"{m} x {n}" for m, n in THREAD_SHAPES)
    numbers = " and ".join(map(str, THREADS))
    table.write(
        f"How far weights after {NUM_STEPS} updates under {numbers} threads are "
        "from those under one: the entry that is furthest, in learning rates. AdamW: 0.",
        f"Over matrices of {shapes} and seeds 0 to {SEEDS[-1]}, with the gradients of first_steps.",
    )


def _apart(make: Make, gradient: Gradient) -> str:
    """The largest difference of any weight to one thread's, for each of `THREADS`."""
    furthest = dict.fromkeys(THREADS, 0.0)
    for shape in THREAD_SHAPES:
        alone = weights_of_seeds(make, gradient, shape, NUM_STEPS, seeds=SEEDS)[-1]
        for num_threads in THREADS:
            torch.set_num_threads(num_threads)
            together = weights_of_seeds(make, gradient, shape, NUM_STEPS, seeds=SEEDS)[-1]
            torch.set_num_threads(1)
            distance = (together - alone).abs().max().item()
            furthest[num_threads] = max(furthest[num_threads], distance)
    return ", ".join(f"{distance:.1g}" for distance in furthest.values())


NOISE_SHAPES = ((16, 48), (32, 128), (128, 512), (384, 1536), (1024, 4096), (2688, 10752))
NUM_SAMPLED = 48
"""How many columns of a rotated gradient are also computed in float64."""


def cosines(size: int, generator: torch.Generator) -> Tensor:
    """An orthogonal matrix (size, size) without small entries: the discrete cosine transform, whose
    rows get random signs."""
    angles = torch.outer(torch.arange(size).double() + 0.5, torch.arange(size).double()) * (
        math.pi / size
    )
    transform = angles.cos_().mul_(math.sqrt(2 / size))
    transform[:, 0] = math.sqrt(1 / size)
    signs = torch.randint(0, 2, (size, 1), generator=generator) * 2 - 1
    return transform.mul_(signs).float()


def floor_over_noise(shape: Shape, rank: int | None, seed: int = 0) -> float:
    """How many times larger the noise floor is than the rounding noise of U^T G V in float32, by
    the root mean square over entries of noise / floor."""
    generator = torch.Generator().manual_seed(seed)
    left, right = (cosines(size, generator) for size in shape)
    gradient = _normal(generator, shape) if rank is None else _low_rank(generator, shape, rank)
    rotated = left.mT @ (gradient @ right)
    columns = torch.linspace(0, shape[1] - 1, min(shape[1], NUM_SAMPLED)).long()
    exact = left.double().mT @ (gradient.double() @ right[:, columns].double())
    squares = rotated.square()
    floor = noise_floor(squares.mean(1, keepdim=True), squares.mean(0, keepdim=True)).sqrt()[
        :, columns
    ]
    return 1 / ((rotated[:, columns] - exact) / floor).square().mean().sqrt().item()


def trained_second_moments() -> Tensor:
    """All second moments in rotated coordinates of a model after 1,000 iterations, each divided by
    the mean of its matrix, sorted."""
    settings = [
        "optimizer.method=basis-rotation",
        "training.iterations=1000",
        "training.checkpoint_every=1000",
    ]
    with TemporaryDirectory() as folder:
        train(load_config("laptop", [*settings, "pipeline.stages=1"]), Path(folder) / "run")
        states = [
            torch.load(path, weights_only=True)
            for path in Path(folder).glob("run/checkpoints/*/stage*.pt")
        ]
    found: list[Tensor] = []

    def collect(value: object) -> None:
        if isinstance(value, dict):
            if "left_basis" in value:
                found.append((value["exp_avg_sq"] / value["exp_avg_sq"].mean()).flatten())
            for inner in value.values():
                collect(inner)
        elif isinstance(value, list):
            for inner in value:
                collect(inner)

    collect(states)
    return torch.cat(found).sort().values


def noise() -> None:
    """Write the table of the floor over measured noise, and of how many entries of a trained model
    it damps."""
    trained = trained_second_moments()
    table = Table(
        "noise_floor",
        ["matrix", "normal: floor / noise", "rank 1: floor / noise", "damped by over 10 %"],
    )
    for shape in NOISE_SHAPES:
        places = torch.randint(len(trained), shape, generator=torch.Generator().manual_seed(0))
        damped = (above_noise(trained[places]) < 0.9).float().mean().item()
        ratios = [f"{floor_over_noise(shape, rank):.1f}" for rank in (None, 1)]
        table.add(f"{shape[0]} x {shape[1]}", *ratios, f"{100 * damped:.4f} %")
        print(*table.rows[-1], flush=True)
    quantiles = ", ".join(
        f"{trained[int(len(trained) * q)]:.0e} ({q:g})" for q in (1e-4, 1e-3, 1e-2, 0.1, 0.5)
    )
    table.write(
        "The noise floor over the root mean square of the rounding noise of U^T G V in float32, "
        "against float64; and "
        "the entries that it damps by over 10 % where second moments are drawn from those of a "
        "trained model.",
        f"U and V are cosine transforms with random signs; {NUM_SAMPLED} columns are sampled. "
        f"Second moments of the "
        f"preset `laptop` after 1,000 iterations, over the mean of their matrix, by quantile: "
        f"{quantiles}.",
    )


PARTS = {"noise": noise, "steps": steps, "threads": threads}


def main() -> None:
    """Write the tables that are asked for; all by default."""
    torch.set_num_threads(1)
    for part in sys.argv[1:] or list(PARTS):
        PARTS[part]()


if __name__ == "__main__":
    main()
