"""Measuring the (1,1)-norm of the training loss's Hessian at a checkpoint: resumable, by one process or several.

Vector i and its batches depend on the seed and i alone, so processes share the vectors in any way. Each process keeps
its part in a file of its own, under a hidden folder named by the settings; when all vectors are in, the parts become
the result and the folder goes. Stopped at any time, the same request goes on, to the same numbers.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import queue
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from brx.config.schema import BasisRotationConfig
from brx.curvature.bases import Bases, from_weights, to_weights
from brx.curvature.checkpoints import (
    Checkpoint,
    borrow_bases,
    check_basis_batches,
    find_checkpoint,
    fit_bases,
    load_checkpoint,
)
from brx.curvature.hessian import Vectors, mean_product
from brx.curvature.hessian_norm import GeometricEstimate, Sums, below_resolution, cauchy_vector, median_sums
from brx.curvature.norm_result import SPACES, Groups, NormResult, Space, block_of, kind_of, result_path, strategy_of
from brx.errors import RunError, UserError
from brx.files import replacing
from brx.pipeline.delay import depth
from brx.progress import ProgressBar
from brx.runs.checkpoint import run_and_iteration
from brx.runs.reading import Run
from brx.train.device import choose_device
from brx.train.interrupt import StopSignal

DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
SAVE_EVERY_S = 20.0
# Of the free disk space, what the median's samples may take.
USABLE_SHARE = 0.9


@dataclass(frozen=True)
class NormSettings:
    """What decides the numbers of a measurement.

    Attributes:
        vectors: n, Cauchy vectors.
        batches_per_vector: batches that each vector's product is a mean over; every vector has its own.
        estimator: see `hessian_norm`.
        precision: of weights and products.
        seed: of the vectors.
        basis_from: a run whose newest checkpoint lends its basis; None for the checkpoint's own.
        basis_batches: estimate the basis over so many batches instead.
    """

    vectors: int = 200
    batches_per_vector: int = 40
    estimator: Literal["geometric", "median"] = "geometric"
    precision: Literal["fp32", "fp64"] = "fp32"
    seed: int = 0
    basis_from: str | None = None
    basis_batches: int | None = None


class Stopped(Exception):
    """The user asked to stop; what was done is saved."""


def measure_runs(
    runs: Sequence[Path],
    spaces: Sequence[Space] | None,
    settings: NormSettings,
    *,
    iteration: int | None = None,
    jobs: int = 1,
    or_geometric: bool = False,
) -> list[NormResult]:
    """One measurement per run and space, made now or read again if it has been; see `measure`.

    Args:
        runs: their folders, or those of checkpoints.
        spaces: the coordinates; None for the original ones, and the rotated ones of runs that have a basis.
        settings: those of the basis count for the rotated coordinates alone.
        iteration: of the checkpoints of runs; None for each one's newest.
        jobs: processes that share the vectors.
        or_geometric: take the geometric estimate where the median's samples do not fit on the disk.

    Raises:
        UserError: a checkpoint is not there, or a run has too few batches for a basis: before anything is measured.
    """
    original = replace(settings, basis_from=None, basis_batches=None)
    has_basis_anyway = settings != original
    requests: list[tuple[Path, Space, NormSettings, int]] = []
    for path in runs:
        folder, named = run_and_iteration(path)
        run = Run.load(folder)
        at = int(find_checkpoint(run, iteration if named is None else named, "newest").name)
        has_basis = has_basis_anyway or isinstance(run.config.optimizer, BasisRotationConfig)
        for space in spaces or (SPACES if has_basis else SPACES[:1]):
            chosen = original if space == "original" else settings
            if chosen.basis_batches is not None:
                check_basis_batches(run, chosen.basis_batches)
            requests.append((folder, space, chosen, at))
    return [
        measure(folder, space, chosen, iteration=at, jobs=jobs, or_geometric=or_geometric)
        for folder, space, chosen, at in requests
    ]


def measure(
    run: Path,
    space: Space,
    settings: NormSettings,
    *,
    iteration: int | None = None,
    jobs: int = 1,
    or_geometric: bool = False,
) -> NormResult:
    """Measure, continue a measurement, or read it if it has been made.

    Args:
        run: the run's folder.
        space: the coordinates.
        settings: what decides the numbers.
        iteration: of the checkpoint; None for the newest one.
        jobs: processes that share the vectors.
        or_geometric: take the geometric estimate where the median's samples do not fit on the disk.

    Raises:
        UserError: the request cannot be carried out as written.
        RunError: a product was not finite, or a process was lost.
        Stopped: on request; the same call continues.
    """
    if settings.vectors < 3:
        raise UserError(f"--vectors {settings.vectors}: must be at least 3: fewer have no unbiased estimate of squares")
    iteration = int(find_checkpoint(Run.load(run), iteration, "newest").name)
    task = _Task(run, iteration, space, settings)
    checkpoint = _load(task)
    settings = _fit_to_disk(task, checkpoint.num_parameters, or_geometric)
    task = replace(task, settings=settings)
    path = result_path(run, space, iteration)
    if path.is_file() and (known := NormResult.read(path)).settings == asdict(settings):
        return known
    task.folder.mkdir(parents=True, exist_ok=True)
    if settings.estimator == "median":
        _open_samples(task, checkpoint.num_parameters, create=True)
    label = f"{run.name} {iteration} {space}"
    with StopSignal() as stop, ProgressBar(label, "vectors", settings.vectors, len(_done(task))) as progress:
        report = _EstimateProgress(progress, checkpoint.num_parameters)
        if jobs == 1:
            _work(task, checkpoint, 0, 1, report, lambda: stop.requested)
        else:
            _share_work(task, jobs, report, lambda: stop.requested)
    if len(_done(task)) < settings.vectors:
        raise Stopped(
            f"{label}: stopped after {len(_done(task))} of {settings.vectors} vectors; the same command continues"
        )
    result = _result(task, checkpoint)
    result.write(path)
    shutil.rmtree(task.folder)
    return result


@dataclass(frozen=True)
class _Task:
    """What a process needs to know."""

    run: Path
    iteration: int
    space: Space
    settings: NormSettings

    @property
    def folder(self) -> Path:
        """Of the parts, while the measurement is under way."""
        digest = hashlib.sha256(json.dumps(asdict(self.settings), sort_keys=True).encode()).hexdigest()
        return self.run / "analysis" / f".hessian-norm-{self.space}-{self.iteration:08d}-{digest[:8]}"


@dataclass
class _Part:
    """What one process has done.

    Attributes:
        vectors: their numbers, in order.
        estimate: over them (for the median too, as the running estimate).
        below_resolution: of each product.
    """

    vectors: list[int]
    estimate: GeometricEstimate
    below_resolution: list[float]


def _load(task: _Task) -> Checkpoint:
    """The checkpoint, with the bases of the task's coordinates (none for the original ones)."""
    settings = task.settings
    device, _ = choose_device(Run.load(task.run).config.runtime.device)
    checkpoint = load_checkpoint(task.run, task.iteration, dtype=DTYPES[settings.precision], device=device)
    bases: Bases = {}
    if task.space == "rotated":
        if settings.basis_from is not None:
            bases = borrow_bases(checkpoint, Path(settings.basis_from))
        elif settings.basis_batches is not None:
            bases = fit_bases(checkpoint, settings.basis_batches)
        else:
            bases = checkpoint.bases
        if not bases:
            raise UserError(
                f"{checkpoint.path}: has no basis (method {checkpoint.run.method}) for --rotated; give --basis-from RUN"
                " or --basis-batches N"
            )
    elif task.space != "original":
        assert settings.basis_batches is not None, "a strategy's bases are estimated at the checkpoint"
        bases = fit_bases(checkpoint, settings.basis_batches, *strategy_of(task.space))
    return replace(checkpoint, bases=bases)


def _fit_to_disk(task: _Task, num_parameters: int, or_geometric: bool) -> NormSettings:
    """Settings whose samples fit on the disk.

    Raises:
        UserError: they do not, and the switch was not allowed.
    """
    settings = task.settings
    if settings.estimator == "geometric" or (task.folder / "samples.bin").exists():
        return settings
    row_bytes = num_parameters * DTYPES[settings.precision].itemsize
    free = shutil.disk_usage(task.run).free * USABLE_SHARE
    if settings.vectors * row_bytes <= free:
        return settings
    if or_geometric:
        return replace(settings, estimator="geometric")
    raise UserError(
        f"--vectors {settings.vectors}: the median needs every product at once: {settings.vectors} x {num_parameters:,}"
        f" parameters in {settings.precision} are {settings.vectors * row_bytes / 1e9:.3g} GB, {task.run} has room for"
        f" {free / 1e9:.3g} GB, that is {int(free // row_bytes)} vectors; lower --vectors, use --estimator geometric,"
        " or allow the switch with --or-geometric"
    )


def _open_samples(task: _Task, num_parameters: int, *, create: bool = False) -> NDArray[Any]:
    """|H z| of all vectors (n, d), on disk."""
    path = task.folder / "samples.bin"
    shape = (task.settings.vectors, num_parameters)
    dtype = np.float32 if task.settings.precision == "fp32" else np.float64
    mode: Literal["w+", "r+"] = "w+" if create and not path.exists() else "r+"
    return np.memmap(path, dtype=dtype, mode=mode, shape=shape)


def _work(
    task: _Task,
    checkpoint: Checkpoint,
    worker: int,
    num_workers: int,
    report: Callable[[int, int, float], None],
    stop_requested: Callable[[], bool],
) -> None:
    """Take this worker's share of the vectors that are not done, in order, and save every now and then."""
    settings = task.settings
    path = _part_path(task, worker)
    part = _load_part(path) if path.exists() else _Part([], GeometricEstimate(checkpoint.parameters), [])
    done = _done(task)
    samples = _open_samples(task, checkpoint.num_parameters) if settings.estimator == "median" else None
    saved_at = time.monotonic()
    for number in range(worker, settings.vectors, num_workers):
        if number in done:
            continue
        if stop_requested():
            break
        product = vector_product(checkpoint, settings, number)
        part.estimate.add(product)
        part.vectors.append(number)
        part.below_resolution.append(below_resolution(product))
        if samples is not None:
            samples[number] = torch.cat([value.flatten() for value in product.values()]).abs().cpu().numpy()
        report(worker, len(part.vectors), part.estimate.norm())
        if time.monotonic() - saved_at > SAVE_EVERY_S:
            _save_part(path, part, samples)
            saved_at = time.monotonic()
    _save_part(path, part, samples)


def vector_product(checkpoint: Checkpoint, settings: NormSettings, number: int) -> Vectors:
    """Q^T H Q z for Cauchy vector `number`, H being the Hessian of the mean loss over that vector's own batches."""
    vector = cauchy_vector(checkpoint.parameters, settings.seed, number)
    first = 1 + number * settings.batches_per_vector
    batches = checkpoint.batches(range(first, first + settings.batches_per_vector))
    in_weights = to_weights(checkpoint.bases, vector)
    product = mean_product(
        checkpoint.model, checkpoint.parameters, batches, in_weights, f"{checkpoint.path}: vector {number}"
    )
    return from_weights(checkpoint.bases, product)


def _share_work(task: _Task, jobs: int, report: _EstimateProgress, stop_requested: Callable[[], bool]) -> None:
    """Run `jobs` processes until their shares are done, or until asked to stop."""
    context = multiprocessing.get_context("spawn")
    messages: multiprocessing.Queue[tuple[Any, ...]] = context.Queue()
    stop = context.Event()
    arguments = [(task, worker, jobs, torch.get_num_threads(), messages, stop) for worker in range(jobs)]
    processes = [context.Process(target=_process, args=values, daemon=True) for values in arguments]
    for process in processes:
        process.start()
    errors: list[Exception] = []
    num_ended = 0
    try:
        while num_ended < jobs:
            if stop_requested() or errors:
                stop.set()
            try:
                kind, *content = messages.get(timeout=0.2)
            except queue.Empty:
                if any(process.exitcode not in (None, 0) for process in processes):
                    raise RunError("a process was lost (killed?); the same command continues what is saved") from None
                continue
            if kind == "vector":
                report(*content)
            else:
                num_ended += 1
                errors += [content[0]] if kind == "error" else []
    finally:
        stop.set()
        for process in processes:
            process.join(timeout=None if num_ended == jobs else 10)
            process.terminate()
    if errors:
        raise errors[0]


def _process(task: _Task, worker: int, num_workers: int, num_threads: int, messages: Any, stop: Any) -> None:
    """One of several processes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process decides
    torch.set_num_threads(max(1, num_threads // num_workers))
    try:
        report = lambda *values: messages.put(("vector", *values))  # noqa: E731
        _work(task, _load(task), worker, num_workers, report, stop.is_set)
    except (UserError, RunError) as error:
        messages.put(("error", error))
    else:
        messages.put(("end",))


class _EstimateProgress:
    """Shows the mean of the workers' running estimates, weighted by their vectors."""

    def __init__(self, progress: ProgressBar, num_parameters: int) -> None:
        self._progress = progress
        self._num_parameters = num_parameters
        self._newest: dict[int, tuple[int, float]] = {}

    def __call__(self, worker: int, num_vectors: int, norm: float) -> None:
        self._newest[worker] = num_vectors, norm
        total = sum(count for count, _ in self._newest.values())
        # One vector has no unbiased estimate: its correction cos(pi / 2) is zero.
        estimates = [(count, norm) for count, norm in self._newest.values() if count > 1]
        mean = sum(count * norm for count, norm in estimates) / max(1, sum(count for count, _ in estimates))
        estimate = f"{mean / self._num_parameters:.4g} per parameter" if estimates else "-"
        self._progress.update(total, f"so far {estimate}")


def _result(task: _Task, checkpoint: Checkpoint) -> NormResult:
    """The parts put together."""
    parts = [_load_part(path) for path in _parts(task)]
    names = list(checkpoint.parameters)
    if task.settings.estimator == "median":
        num_rows = [parameter.numel() for parameter in checkpoint.parameters.values()]
        sums = median_sums(_open_samples(task, checkpoint.num_parameters), names, num_rows)
    else:
        parts_with_vectors = [part.estimate for part in parts if part.vectors]
        estimate = parts_with_vectors[0]
        for other in parts_with_vectors[1:]:
            estimate.merge(other)
        sums = estimate.sums()
    lost = [share for part in parts for share in part.below_resolution]
    return make_result(task.run, checkpoint, task.space, task.settings, sums, sum(lost) / len(lost))


def make_result(
    run: Path, checkpoint: Checkpoint, space: Space, settings: NormSettings, sums: Sums, lost: float
) -> NormResult:
    """A measurement from its sums by tensor."""
    total = sums.grouped(lambda name: "all")
    return NormResult(
        run=str(run),
        method=checkpoint.run.method,
        num_stages=depth(checkpoint.run.config.pipeline),
        num_own_stages=checkpoint.run.stages,
        iteration=checkpoint.iteration,
        space=space,
        settings=asdict(settings),
        num_parameters=checkpoint.num_parameters,
        norm=float(total.sums[0, 0]),
        standard_error=float(total.covariance(1)[0, 0]) ** 0.5,
        below_resolution=lost,
        blocks=Groups.of(sums.grouped(block_of)),
        kinds=Groups.of(sums.grouped(kind_of)),
    )


def _parts(task: _Task) -> list[Path]:
    return sorted(task.folder.glob("part-*.pt"))


def _part_path(task: _Task, worker: int) -> Path:
    return task.folder / f"part-{worker:03d}.pt"


def _done(task: _Task) -> set[int]:
    """The vectors that saved parts hold."""
    return {number for path in _parts(task) for number in _load_part(path).vectors}


def _load_part(path: Path) -> _Part:
    content = torch.load(path, weights_only=True)
    estimate = GeometricEstimate.from_state(content["estimate"])
    return _Part(content["vectors"], estimate, content["below_resolution"])


def _save_part(path: Path, part: _Part, samples: NDArray[Any] | None) -> None:
    """Replace the part's file in one step; the samples it counts are on disk before."""
    with replacing(path) as file:
        if isinstance(samples, np.memmap):
            samples.flush()
        torch.save({**vars(part), "estimate": part.estimate.state_dict()}, file)
