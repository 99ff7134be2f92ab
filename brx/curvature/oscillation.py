"""How updates move along the Hessian's dominant eigenvector, and along a random direction
orthogonal to it.

The paper's figure "oscillation": from a checkpoint midway, train on with the run's own delay and
method, and project each update w(t) - w(t - 1) on the two directions, which stay fixed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import pandas as pd
import torch
from pydantic import BaseModel
from torch import Tensor

from brx.curvature.checkpoints import Checkpoint, Measured, load_checkpoint, measured_in
from brx.curvature.hessian import Vectors, mean_product
from brx.errors import RunError, UserError
from brx.methods.trajectory_version import check_trajectory_version
from brx.runs.checkpoint import read_manifest
from brx.train.build import assemble

DIRECTIONS = ("dominant", "random")


class Track(BaseModel, frozen=True):
    """Projections of the updates on one direction, one per iteration."""

    projections: list[float]
    # Mean square of the projections over that of the updates' norms: how much of the motion is
    # along the direction, whatever the methods' step sizes.
    share: float
    sign_changes: float  # share of updates that go the other way than the one before
    variance: float  # of the projections

    @classmethod
    def of(cls, projections: list[float], total: float) -> Track:
        """From the projections of updates, whose squared norms have a sum."""
        signs = np.sign(projections)
        return cls(
            projections=projections,
            share=float(np.square(projections).sum() / total),
            sign_changes=float((signs[1:] != signs[:-1]).mean()),
            variance=float(np.var(projections)),
        )


class Oscillation(Measured):
    command: ClassVar[str] = "oscillation"

    eigenvalue: float
    residual: float  # see `dominant_eigenvector`
    num_power_iterations: int
    dominant: Track
    random: Track


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
    """Find the directions at a checkpoint, train on from it, and project; the run's folder gets the
    result.

    It is the Hessian of the mean loss over `num_batches` at the checkpoint of `iteration` (None:
    the one nearest to the middle). UserError where there is none, or the run's schedule ends before
    the iterations do."""
    checkpoint = load_checkpoint(run_path, iteration, default="midway")
    method = checkpoint.run.config.optimizer.method
    check_trajectory_version(read_manifest(checkpoint.path), checkpoint.path, method)
    last = checkpoint.run.config.training.last_iteration
    if checkpoint.iteration + num_iterations > last:
        raise UserError(
            f"{checkpoint.path}: {num_iterations} iterations from here pass the run's last one, "
            f"{last}; name an earlier"
            " checkpoint with --checkpoint, or fewer --iterations"
        )
    # A folder that cannot be written to is found out before the work
    (run_path / "analysis").mkdir(exist_ok=True)
    batches = list(checkpoint.batches(range(1, num_batches + 1)))

    def product(vector: Vectors) -> Vectors:
        return mean_product(
            checkpoint.model, checkpoint.parameters, batches, vector, str(checkpoint.path)
        )

    generator = torch.Generator().manual_seed(seed)
    start = _random_like(checkpoint.parameters, generator)
    value, vector, residual, number = dominant_eigenvector(
        product, start, tolerance, max_power_iterations
    )
    report(
        f"{checkpoint.path}: eigenvalue {value:.4g}, residual {residual:.2g} after {number}"
        f" power iterations (stop at {tolerance:g} or {max_power_iterations} iterations)"
    )
    other = orthogonal_to(vector, _random_like(checkpoint.parameters, generator))
    dominant, random = track_updates(checkpoint, [vector, other], num_iterations)
    oscillation = Oscillation(
        **checkpoint.about,
        eigenvalue=value,
        residual=residual,
        num_power_iterations=number,
        dominant=dominant,
        random=random,
    )
    oscillation.write(run_path)
    return oscillation


def oscillations_in(paths: Sequence[Path], iteration: int | None = None) -> list[Oscillation]:
    """All measurements of each run (see `measured_in`)."""
    return measured_in(paths, iteration, Oscillation.all_of, Oscillation.command)


def representative(results: Sequence[Oscillation]) -> Oscillation:
    """The one, of several of one method and P, whose projections are shown: the first run's middle
    checkpoint."""
    of_run = sorted(
        (run for run in results if run.run == results[0].run), key=lambda run: run.iteration
    )
    return of_run[len(of_run) // 2]


def dominant_eigenvector(
    product: Callable[[Vectors], Vectors], start: Vectors, tolerance: float, max_iterations: int
) -> tuple[float, Vectors, float, int]:
    """The largest |eigenvalue| of a symmetric H, by power iteration with `product`, z to H z.

    Gives value = v . H v, the vector v, the residual |H v - value v| / |value|, and the number of
    iterations."""
    vector = _scaled(start, 1 / _dot(start, start) ** 0.5)
    for number in range(1, max_iterations + 1):
        image = product(vector)
        value, norm = _dot(vector, image), _dot(image, image) ** 0.5
        if norm == 0:
            raise RunError(
                "the Hessian times a vector is zero: there is no dominant direction here"
            )
        # |H v - value v|^2 = |H v|^2 - value^2 for a unit vector v.
        residual = max(0.0, norm**2 - value**2) ** 0.5 / max(abs(value), 1e-300)
        if residual <= tolerance or number == max_iterations:
            break
        vector = _scaled(image, 1 / norm)
    return value, vector, residual, number


def orthogonal_to(
    direction: Vectors, vector: Vectors
) -> Vectors:  # the part of a vector that is, scaled to norm 1
    along = _dot(direction, vector)
    rest = {name: value - along * direction[name] for name, value in vector.items()}
    return _scaled(rest, 1 / _dot(rest, rest) ** 0.5)


def track_updates(
    checkpoint: Checkpoint, directions: list[Vectors], num_iterations: int
) -> list[Track]:
    """Train on from the checkpoint exactly as the run did, and project each update on each
    direction."""
    assembly = assemble(checkpoint.run.config, checkpoint.micro_batch, device=checkpoint.device)
    assembly.restore(checkpoint.path)
    newest: Vectors = {
        name: weight for stage in assembly.engine.stages for name, weight in stage.newest.items()
    }
    before = {name: weight.detach().clone() for name, weight in newest.items()}
    projections: list[list[float]] = [[] for _ in directions]
    squared_norms = []
    last = checkpoint.iteration + num_iterations
    for _ in assembly.engine.run(checkpoint.iteration + 1, lambda: last):
        now = {name: weight.detach().clone() for name, weight in newest.items()}
        update = {name: weight - before[name] for name, weight in now.items()}
        squared_norms.append(_dot(update, update))
        for direction, series in zip(directions, projections, strict=True):
            series.append(_dot(direction, update))
        before = now
    return [Track.of(series, sum(squared_norms)) for series in projections]


def _random_like(parameters: Vectors, generator: torch.Generator) -> Vectors:
    return {
        name: torch.randn(value.shape, generator=generator).to(value)
        for name, value in parameters.items()
    }


def _scaled(vector: Vectors, factor: float) -> Vectors:
    return {name: factor * value for name, value in vector.items()}


def _dot(left: Vectors, right: Vectors) -> float:  # summed in float64
    parts: list[Tensor] = [(left[name].double() * right[name].double()).sum() for name in left]
    return float(torch.stack(parts).sum())


def oscillation_table(results: Sequence[Oscillation]) -> pd.DataFrame:
    """Two rows per checkpoint: along the dominant eigenvector, and along a random direction;
    texts."""
    return pd.DataFrame(
        {
            "run": Path(result.run).name,
            "at": str(result.iteration),
            "direction": direction,
            "eigenvalue": f"{result.eigenvalue:.4g}" if direction == "dominant" else "",
            "sign changes": f"{track.sign_changes:.0%}",
            "variance": f"{track.variance:.3g}",
            "share": f"{track.share:.2g}",
        }
        for result in results
        for direction, track in zip(DIRECTIONS, (result.dominant, result.random), strict=True)
    )
