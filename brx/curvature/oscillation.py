"""How updates move along the Hessian's dominant eigenvector, and along a random direction orthogonal to it.

The paper's figure "oscillation": from a checkpoint midway, train on with the run's own delay and method, and project
each update w(t) - w(t - 1) on the two directions, which stay fixed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from rich.table import Table
from torch import Tensor

from brx.curvature.checkpoints import Checkpoint, load_checkpoint
from brx.curvature.hessian import Vectors, mean_product
from brx.curvature.places import runs_in_place
from brx.data.prepare import prepare
from brx.errors import RunError, UserError
from brx.files import write_json
from brx.pipeline.delay import depth
from brx.pipeline.engine import Engine, MicroBatch
from brx.runs.checkpoint import checkpoint_folder, run_and_iteration
from brx.runs.reading import Run
from brx.train.build import assemble, training_batches
from brx.train.device import choose_device

DIRECTIONS = ("dominant", "random")


@dataclass(frozen=True)
class Eigenpair:
    """An approximate eigenvector.

    Attributes:
        value: v . H v.
        vector: v, of norm 1.
        residual: |H v - value v| / |value|.
        num_iterations: of the power iteration.
    """

    value: float
    vector: Vectors
    residual: float
    num_iterations: int


@dataclass(frozen=True)
class Track:
    """Projections of the updates on one direction.

    Attributes:
        projections: one for each iteration.
        share: the mean square of the projections over that of the updates' norms: how much of the motion is along the
            direction, whatever the methods' step sizes.
    """

    projections: list[float]
    share: float

    @property
    def sign_changes(self) -> float:
        """The share of updates that go the other way than the one before."""
        signs = np.sign(self.projections)
        return float((signs[1:] != signs[:-1]).mean())

    @property
    def variance(self) -> float:
        """The variance of the projections."""
        return float(np.var(self.projections))


@dataclass(frozen=True)
class Oscillation:
    """What one run does along the two directions.

    Attributes:
        run: its folder.
        method: its method.
        num_stages: its P (`brx.pipeline.delay.depth`).
        iteration: of the checkpoint.
        eigenvalue: of the dominant eigenvector.
        residual: see `Eigenpair`.
        num_power_iterations: see `Eigenpair`.
        dominant: along that eigenvector.
        random: along the random direction.
    """

    run: str
    method: str
    num_stages: int
    iteration: int
    eigenvalue: float
    residual: float
    num_power_iterations: int
    dominant: Track
    random: Track

    def write(self, path: Path) -> None:
        """Keep it, with its numbers."""
        content = asdict(self)
        for name in DIRECTIONS:
            track: Track = getattr(self, name)
            content[name] |= {"sign_changes": track.sign_changes, "variance": track.variance}
        write_json(path, content)

    @classmethod
    def read(cls, path: Path) -> Oscillation:
        """Read a file that `write` made.

        Raises:
            UserError: it is not one.
        """
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            tracks = {name: Track(content[name]["projections"], content[name]["share"]) for name in DIRECTIONS}
            return cls(**content | tracks)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}: not a result of oscillation ({error}); remove it and measure again") from None


def measure_oscillation(
    run_path: Path,
    *,
    iteration: int | None = None,
    num_iterations: int = 100,
    num_batches: int = 64,
    tolerance: float = 1e-2,
    max_power_iterations: int = 200,
    seed: int = 0,
    report: Callable[[str], None] = lambda line: None,
) -> Oscillation:
    """Find the directions at a checkpoint, train on from it, and project; the run's folder gets the result.

    Args:
        run_path: the run's folder.
        iteration: of the checkpoint; None for the one nearest to the middle of the run.
        num_iterations: training iterations to follow.
        num_batches: batches whose mean loss the Hessian is of.
        tolerance: the power iteration stops at this residual |H v - value v| / |value|,
        max_power_iterations: or after this many iterations.
        seed: of the start vector and the random direction.
        report: is told how good the eigenvector is.

    Raises:
        UserError: there is no such checkpoint, or the run's schedule ends before the iterations do.
        RunError: a product or a loss is not finite.
    """
    device, _ = choose_device(Run.load(run_path).config.runtime.device)
    checkpoint = load_checkpoint(run_path, iteration, default="midway", device=device)
    last = checkpoint.run.config.training.last_iteration
    if checkpoint.iteration + num_iterations > last:
        raise UserError(
            f"{checkpoint.path}: {num_iterations} iterations from here pass the run's last one, {last}; name an earlier"
            " checkpoint with --checkpoint, or fewer --iterations"
        )
    kept = run_path / "analysis" / f"oscillation-{checkpoint.iteration:08d}.json"
    kept.parent.mkdir(exist_ok=True)  # a folder that cannot be written to is found out before the work
    generator = torch.Generator().manual_seed(seed)
    start = _random_like(checkpoint.parameters, generator)
    pair = dominant_eigenvector(_hessian(checkpoint, num_batches), start, tolerance, max_power_iterations)
    report(
        f"{checkpoint.path}: eigenvalue {pair.value:.4g}, residual {pair.residual:.2g} after {pair.num_iterations}"
        f" power iterations (stop at {tolerance:g} or {max_power_iterations} iterations)"
    )
    other = orthogonal_to(pair.vector, _random_like(checkpoint.parameters, generator))
    dominant, random = track_updates(checkpoint, [pair.vector, other], num_iterations)
    oscillation = Oscillation(
        run=str(run_path),
        method=checkpoint.run.method,
        num_stages=depth(checkpoint.run.config.pipeline),
        iteration=checkpoint.iteration,
        eigenvalue=pair.value,
        residual=pair.residual,
        num_power_iterations=pair.num_iterations,
        dominant=dominant,
        random=random,
    )
    oscillation.write(kept)
    return oscillation


def _hessian(checkpoint: Checkpoint, num_batches: int) -> Callable[[Vectors], Vectors]:
    """z to H z at the checkpoint, for the mean loss of batches that the run did not train on."""
    batches = list(checkpoint.batches(range(1, num_batches + 1)))

    def product(vector: Vectors) -> Vectors:
        return mean_product(checkpoint.model, checkpoint.parameters, batches, vector, str(checkpoint.path))

    return product


def measured_oscillations(run_path: Path, iteration: int | None = None) -> list[Oscillation]:
    """What has been measured of a run before, in the order of the checkpoints.

    Args:
        run_path: the run's folder.
        iteration: of the checkpoint; None for all that there are.

    Raises:
        UserError: nothing has.
    """
    wanted = "*" if iteration is None else f"{iteration:08d}"
    files = sorted((run_path / "analysis").glob(f"oscillation-{wanted}.json"))
    if not files:
        path = run_path if iteration is None else checkpoint_folder(run_path, iteration)
        raise UserError(f"{path}: has no measured oscillation; run `brx oscillation {path}` first")
    return [Oscillation.read(file) for file in files]


def oscillations_in(paths: Iterable[Path], iteration: int | None = None) -> list[Oscillation]:
    """What has been measured of runs or at checkpoints; in a folder of runs, of those of which anything has been.

    Args:
        paths: of runs, checkpoints, or folders of runs.
        iteration: of the checkpoint, where a path names none.

    Raises:
        UserError: nothing has of one of them.
    """
    results = []
    for path in paths:
        places = runs_in_place([path])
        if places != [path]:
            places = with_oscillation(places)
            if not places:
                raise UserError(f"{path}: of no run in it has oscillation been measured")
        for place in places:
            run, at = run_and_iteration(place)
            results += measured_oscillations(run, at or iteration)
    return results


def with_oscillation(runs: Iterable[Path]) -> list[Path]:
    """The runs of which it has been measured."""
    return [run for run in runs if any((run / "analysis").glob("oscillation-*.json"))]


def representative(results: Sequence[Oscillation]) -> Oscillation:
    """Which of several, of one method and P, has its projections shown: the first run at its middle checkpoint."""
    of_run = sorted((run for run in results if run.run == results[0].run), key=lambda run: run.iteration)
    return of_run[len(of_run) // 2]


def dominant_eigenvector(
    product: Callable[[Vectors], Vectors], start: Vectors, tolerance: float, max_iterations: int
) -> Eigenpair:
    """The eigenvector of the largest |eigenvalue|, by power iteration.

    Args:
        product: z to H z, for a symmetric H.
        start: not orthogonal to that eigenvector.
        tolerance: stop at this relative residual,
        max_iterations: or after this many products.

    Raises:
        RunError: H times the vector is zero.
    """
    vector = _scaled(start, 1 / _dot(start, start) ** 0.5)
    for number in range(1, max_iterations + 1):
        image = product(vector)
        value, norm = _dot(vector, image), _dot(image, image) ** 0.5
        if norm == 0:
            raise RunError("the Hessian times a vector is zero: there is no dominant direction here")
        # |H v - value v|^2 = |H v|^2 - value^2 for a unit vector v.
        residual = max(0.0, norm**2 - value**2) ** 0.5 / max(abs(value), 1e-300)
        if residual <= tolerance or number == max_iterations:
            break
        vector = _scaled(image, 1 / norm)
    return Eigenpair(value, vector, residual, number)


def orthogonal_to(direction: Vectors, vector: Vectors) -> Vectors:
    """The part of a vector that is orthogonal to a unit direction, scaled to norm 1."""
    along = _dot(direction, vector)
    rest = {name: value - along * direction[name] for name, value in vector.items()}
    return _scaled(rest, 1 / _dot(rest, rest) ** 0.5)


def track_updates(checkpoint: Checkpoint, directions: list[Vectors], num_iterations: int) -> list[Track]:
    """Train on from the checkpoint exactly as the run did, and project each update on each direction."""
    engine = _continue_run(checkpoint)
    live: Vectors = {name: weight for stage in engine.stages for name, weight in stage.live.items()}
    before = {name: weight.detach().clone() for name, weight in live.items()}
    projections: list[list[float]] = [[] for _ in directions]
    squared_norms = []
    last = checkpoint.iteration + num_iterations
    for _ in engine.run(checkpoint.iteration + 1, lambda: last):
        update = {name: weight.detach() - before[name] for name, weight in live.items()}
        squared_norms.append(_dot(update, update))
        for direction, series in zip(directions, projections, strict=True):
            series.append(_dot(direction, update))
        for name, weight in live.items():
            before[name].copy_(weight.detach())
    return [Track(series, float(np.square(series).sum() / sum(squared_norms))) for series in projections]


def _continue_run(checkpoint: Checkpoint) -> Engine:
    """The engine of the checkpoint's run, in the state that the checkpoint has."""
    config = checkpoint.run.config
    device = next(iter(checkpoint.parameters.values())).device
    batches = training_batches(config, prepare(config.data))

    def micro_batch(iteration: int) -> MicroBatch:
        inputs, targets = batches.batch(iteration)
        return inputs.to(device), targets.to(device)

    assembly = assemble(config, micro_batch, device=device)
    assembly.restore(checkpoint.path)
    return assembly.engine


def _random_like(parameters: Vectors, generator: torch.Generator) -> Vectors:
    return {name: torch.randn(value.shape, generator=generator).to(value) for name, value in parameters.items()}


def _scaled(vector: Vectors, factor: float) -> Vectors:
    return {name: factor * value for name, value in vector.items()}


def _dot(left: Vectors, right: Vectors) -> float:
    """Inner product, summed in float64."""
    parts: list[Tensor] = [(left[name].double() * right[name].double()).sum() for name in left]
    return float(torch.stack(parts).sum())


def oscillation_table(results: Sequence[Oscillation]) -> Table:
    """Two rows per checkpoint: along the dominant eigenvector, and along a random direction."""
    table = Table("run", "at", "direction", "eigenvalue", "sign changes", "variance", "share")
    for result in results:
        for direction, track, eigenvalue in (
            ("dominant", result.dominant, f"{result.eigenvalue:.4g}"),
            ("random", result.random, ""),
        ):
            numbers = (f"{track.sign_changes:.0%}", f"{track.variance:.3g}", f"{track.share:.2g}")
            table.add_row(Path(result.run).name, str(result.iteration), direction, eigenvalue, *numbers)
    return table
