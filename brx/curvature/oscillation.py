"""Measures how updates move along the Hessian's dominant eigenvector, and along a random direction
orthogonal to it.

This is the paper's figure "oscillation". Training goes on from a checkpoint midway, with the run's
own delay and method. Each update w(t) - w(t - 1) is projected on the two directions, which stay
fixed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
import pandas as pd
import torch
from pydantic import BaseModel
from torch import Tensor

from brx.curvature.checkpoints import Checkpoint, load_checkpoint
from brx.curvature.hessian import Vectors, mean_product
from brx.errors import RunError, UserError, counted
from brx.files import make_folder
from brx.methods.trajectory_version import check_trajectory_version
from brx.pipeline.delay import depth
from brx.runs.checkpoint import read_manifest, run_and_iteration
from brx.runs.measured import Measured, measured_in, runs_in_place
from brx.runs.run import read_run
from brx.train.build import assemble

DIRECTIONS = ("dominant", "random")


class Track(BaseModel, frozen=True):
    """Projections of the updates on one direction, one per iteration."""

    projections: list[float]
    # The share of the motion that is along the direction: the sum of the squared projections over
    # the sum of the updates' squared norms. It does not depend on the method's step size.
    share: float
    sign_changes: float  # share of updates that go the other way than the one before
    variance: float  # of the projections

    @classmethod
    def of(cls, projections: list[float], total: float) -> Track:
        """From the projections, and the sum of the squared norms of the updates."""
        signs = np.sign(projections)
        return cls(
            projections=projections,
            share=float(np.square(projections).sum() / total),
            sign_changes=float((signs[1:] != signs[:-1]).mean()),
            variance=float(np.var(projections)),
        )


class OscillationSettings(BaseModel, frozen=True):
    """Everything that decides the numbers of a measurement, apart from the checkpoint."""

    iterations: int = 100  # to train on
    batches: int = 64  # the Hessian is the one of the mean loss over this many batches
    # The power iteration stops at this residual (`dominant_eigenvector`),
    tolerance: float = 1e-2
    power_iterations: int = 200  # or after this many iterations
    seed: int = 0  # of the first vector of the power iteration, and of the random direction

    @property
    def unusual(self) -> list[str]:
        """The settings that are not defaults, as words for the name of a file."""
        usual = OscillationSettings()
        words = []
        for key, value in self:
            if value != getattr(usual, key):
                words.append(f"{key.replace('_', '-')}-{value}")
        return words


class Oscillation(Measured):
    """The updates after one checkpoint along both directions.

    A measurement with other settings than the usual ones has a file of its own, with these settings
    in its name. In files of older versions, which do not tell their settings, they are the usual
    ones."""

    command: ClassVar[str] = "oscillation"

    settings: OscillationSettings = OscillationSettings()
    eigenvalue: float
    residual: float  # see `dominant_eigenvector`
    num_power_iterations: int
    dominant: Track
    random: Track

    @property
    def settings_in_file_name(self) -> list[str]:
        """The settings that are not defaults, as words for the name of the file."""
        return self.settings.unusual


def measure_oscillation(
    run_path: Path,
    *,
    iteration: int | None = None,
    settings: OscillationSettings = OscillationSettings(),  # noqa: B008 (frozen)
    report: Callable[[str], None] = lambda line: None,
) -> Oscillation:
    """Find both directions at a checkpoint, train on from it, and project the updates.

    The result is written into the run's folder.

    Args:
        run_path: the run's folder.
        iteration: the checkpoint; by default the one nearest to the middle of the run.
        settings: how to measure.
        report: called with a line about the eigenvalue.

    Raises:
        UserError: there is no such checkpoint, this version of brx would train differently from it,
            or the run's learning-rate schedule ends before the iterations do.
    """
    checkpoint = load_checkpoint(run_path, iteration, default="midway")
    _check_training(checkpoint, settings.iterations)
    # If the folder cannot be written to, this fails before the work begins.
    make_folder(run_path / "analysis")
    batches = list(checkpoint.batches(range(1, settings.batches + 1)))
    where = str(checkpoint.path)

    def product(vector: Vectors) -> Vectors:
        return mean_product(checkpoint.model, checkpoint.parameters, batches, vector, where)

    generator = torch.Generator().manual_seed(settings.seed)
    start = _random_like(checkpoint.parameters, generator)
    top = dominant_eigenvector(product, start, settings.tolerance, settings.power_iterations)
    most = counted(settings.power_iterations, "iteration")
    limits = f"stop at {settings.tolerance:g} or {most}"
    report(
        f"{checkpoint.path}: eigenvalue {top.value:.4g}, residual {top.residual:.2g} after "
        f"{counted(top.num_iterations, 'power iteration')} ({limits})"
    )
    other = orthogonal_to(top.vector, _random_like(checkpoint.parameters, generator))
    dominant, random = track_updates(checkpoint, [top.vector, other], settings.iterations)
    result = Oscillation(
        **checkpoint.about,
        settings=settings,
        eigenvalue=top.value,
        residual=top.residual,
        num_power_iterations=top.num_iterations,
        dominant=dominant,
        random=random,
    )
    result.write(run_path)
    return result


def _check_training(checkpoint: Checkpoint, num_iterations: int) -> None:
    """UserError if the training cannot go on as the run did, or has fewer iterations left."""
    config = checkpoint.run.config
    manifest = read_manifest(checkpoint.path)
    check_trajectory_version(manifest, checkpoint.path, config.optimizer.method)
    last = config.training.last_iteration
    if checkpoint.iteration + num_iterations > last:
        raise UserError(
            f"{checkpoint.path}: {counted(num_iterations, 'iteration')} from here would pass the "
            f"run's last one, {last}; name an earlier checkpoint with --checkpoint, or fewer "
            f"--iterations"
        )


def oscillations_in(paths: Sequence[Path], iteration: int | None = None) -> list[Oscillation]:
    """All measurements of each run (`measured_in`)."""
    return measured_in(paths, iteration, Oscillation.all_of, Oscillation.command)


def usual_only(results: Sequence[Oscillation]) -> list[Oscillation]:
    """The measurements with the usual settings, which alone enter figures and verdicts of the
    paper."""
    return [result for result in results if not result.settings.unusual]


def refuse_mixed(results: Sequence[Oscillation]) -> None:
    """UserError if the measurements have different settings: a figure would compare them."""
    first = results[0]
    for result in results:
        if result.settings != first.settings:
            words = [each.settings.unusual or ["the usual ones"] for each in (first, result)]
            here, there = (", ".join(each) for each in words)
            raise UserError(
                f"{result.run} at {result.iteration}: measured with other settings ({there}) than "
                f"{first.run} ({here}), and a figure cannot compare them; move one file away"
            )


def refuse_mixed_rates(paths: Iterable[Path]) -> None:
    """UserError if measured runs of one method and P have different learning rates: a figure would
    average over both.

    Args:
        paths: runs, folders of runs, or checkpoints.
    """
    first_by_place: dict[tuple[str, int], tuple[float, Path]] = {}
    for path in runs_in_place(paths):
        run, _ = run_and_iteration(path)
        if not Oscillation.all_of(run):
            continue
        config = read_run(run).config
        num_stages = depth(config.pipeline)
        place = config.optimizer.method, num_stages
        rate, first = first_by_place.setdefault(place, (config.optimizer.lr, run))
        if config.optimizer.lr != rate:
            raise UserError(
                f"{run}: has optimizer.lr {config.optimizer.lr:g}, and {first} has {rate:g}; a "
                f"figure cannot average {place[0]} at P = {num_stages} over both, so name runs of "
                "one rate"
            )


def representative(results: Sequence[Oscillation]) -> Oscillation:
    """The one result whose projections a figure shows for several results: the middle checkpoint of
    the first run.

    Args:
        results: results of one method and P.
    """
    first_run = [result for result in results if result.run == results[0].run]
    first_run.sort(key=lambda result: result.iteration)
    return first_run[len(first_run) // 2]


class DominantEigenvector(NamedTuple):
    """The result of a power iteration."""

    value: float  # v . H v
    vector: Vectors  # v, of norm 1
    residual: float  # |H v - value v| / |value|
    num_iterations: int


def dominant_eigenvector(
    product: Callable[[Vectors], Vectors], start: Vectors, tolerance: float, max_iterations: int
) -> DominantEigenvector:
    """The eigenvector of the largest |eigenvalue| of a symmetric H, by power iteration.

    Args:
        product: returns H z for z.
        start: the first vector.
        tolerance: stop at this residual,
        max_iterations: or after this many iterations.

    Raises:
        RunError: H times a vector is zero.
    """
    vector = _scaled(start, 1 / _dot(start, start) ** 0.5)
    for number in range(1, max_iterations + 1):
        image = product(vector)
        value = _dot(vector, image)
        norm = _dot(image, image) ** 0.5
        if norm == 0:
            raise RunError(
                "the Hessian times a vector is zero: there is no dominant direction here"
            )
        # |H v - value v|^2 = |H v|^2 - value^2 for a unit vector v.
        residual = max(0.0, norm**2 - value**2) ** 0.5 / max(abs(value), 1e-300)
        if residual <= tolerance or number == max_iterations:
            break
        vector = _scaled(image, 1 / norm)
    return DominantEigenvector(value, vector, residual, number)


def orthogonal_to(direction: Vectors, vector: Vectors) -> Vectors:
    """The part of `vector` that is orthogonal to `direction` (of norm 1), scaled to norm 1."""
    along = _dot(direction, vector)
    rest = {name: value - along * direction[name] for name, value in vector.items()}
    return _scaled(rest, 1 / _dot(rest, rest) ** 0.5)


def track_updates(
    checkpoint: Checkpoint, directions: list[Vectors], num_iterations: int
) -> list[Track]:
    """Train on from the checkpoint exactly as the run did, and project the updates.

    Returns one track per direction, with a projection per iteration."""
    assembly = assemble(checkpoint.run.config, checkpoint.micro_batch, device=checkpoint.device)
    assembly.restore(checkpoint.path)
    newest: Vectors = {}  # the tensors that the engine updates in place
    for stage in assembly.engine.stages:
        newest.update(stage.newest)
    before = _copies(newest)
    projections: list[list[float]] = [[] for _ in directions]
    squared_norms = []
    last = checkpoint.iteration + num_iterations
    for _ in assembly.engine.run(checkpoint.iteration + 1, lambda: last):
        now = _copies(newest)
        update = {name: weight - before[name] for name, weight in now.items()}
        squared_norms.append(_dot(update, update))
        for direction, series in zip(directions, projections, strict=True):
            series.append(_dot(direction, update))
        before = now
    return [Track.of(series, sum(squared_norms)) for series in projections]


def _copies(vector: Vectors) -> Vectors:
    return {name: value.detach().clone() for name, value in vector.items()}


def _random_like(parameters: Vectors, generator: torch.Generator) -> Vectors:
    """Standard normal entries, drawn on the CPU."""
    return {
        name: torch.randn(value.shape, generator=generator).to(value)
        for name, value in parameters.items()
    }


def _scaled(vector: Vectors, factor: float) -> Vectors:
    return {name: factor * value for name, value in vector.items()}


def _dot(left: Vectors, right: Vectors) -> float:
    """The dot product, computed in float64."""
    parts: list[Tensor] = [(left[name].double() * right[name].double()).sum() for name in left]
    return float(torch.stack(parts).sum())


def oscillation_table(results: Sequence[Oscillation]) -> pd.DataFrame:
    """Two rows per checkpoint: along the dominant eigenvector, and along a random direction.

    All cells are texts. Settings that are not usual are in a column of their own, if there are
    any."""
    rows = []
    for result in results:
        eigenvalue = f"{result.eigenvalue:.4g}"
        rows.append(_track_row(result, "dominant", eigenvalue, result.dominant))
        rows.append(_track_row(result, "random", "", result.random))
    table = pd.DataFrame(rows)
    if not table["settings"].any():
        return table.drop(columns="settings")
    return table


def _track_row(
    result: Oscillation, direction: str, eigenvalue: str, track: Track
) -> dict[str, str]:
    return {
        "run": Path(result.run).name,
        "at": str(result.iteration),
        "settings": ", ".join(result.settings.unusual),
        "direction": direction,
        "eigenvalue": eigenvalue,
        "sign changes": f"{track.sign_changes:.0%}",
        "variance": f"{track.variance:.3g}",
        "share": f"{track.share:.2g}",
    }
