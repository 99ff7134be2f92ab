"""Measures the (1,1)-norm of the training loss's Hessian at a checkpoint, in one process or
several; a stopped measurement can be continued.

It is the Hessian of the mean loss over one sample of batches, which all vectors share. Every
product is computed for both halves of the sample. Their mean is the product of the whole sample,
and their norms show how much of the norm is noise of the batches (`NormResult.norms`). Finished
products are kept in a hidden folder named after the settings. If the measurement is stopped, the
same command continues from there. The numbers depend on the settings alone."""

from __future__ import annotations

import hashlib
import math
import multiprocessing
import shutil
import signal
import time
from collections.abc import Generator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from brx.config.schema import BasisRotationConfig
from brx.curvature import hessian
from brx.curvature.checkpoints import (
    Checkpoint,
    check_same_model,
    load_checkpoint,
    num_trained_on,
)
from brx.curvature.hessian_norm import GeometricEstimate, below_resolution, cauchy_vector
from brx.curvature.norm_result import (
    SPACES,
    Groups,
    NormResult,
    NormSettings,
    Space,
    block_of,
    kind_of,
    strategy_of,
)
from brx.errors import RunError, UserError, counted
from brx.files import make_folder, replacing
from brx.progress import ProgressBar
from brx.readers import read_tensors
from brx.runs.checkpoint import run_and_iteration
from brx.runs.measured import find_checkpoint
from brx.runs.run import Run
from brx.train.device import StopSignal

DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
SAVE_EVERY_S = 20.0


def measure_runs(
    runs: Sequence[Path],
    spaces: Sequence[Space] | None,
    settings: NormSettings,
    *,
    iteration: int | None = None,
    jobs: int = 1,
) -> list[NormResult]:
    """One measurement per run and space; finished ones are read, the others are made now.

    Args:
        runs: runs or checkpoints.
        spaces: coordinates to measure in; by default the original ones, and the rotated ones of
            each run that has a basis.
        settings: the same for all runs; the ones about a basis are ignored in the original
            coordinates.
        iteration: the checkpoint of each run; by default its newest one.
        jobs: number of processes.

    Raises:
        UserError: a setting is impossible, or a run does not have what it needs.
        KeyboardInterrupt: the process was asked to stop; finished measurements have been saved.
    """
    _check_settings(settings)
    original = settings.model_copy(update={"basis_from": None, "basis_batches": None})
    tasks = []
    for path in runs:
        folder, named = run_and_iteration(path)
        run = Run.load(folder)
        at = int(find_checkpoint(run, iteration if named is None else named, "newest").name)
        has_basis = settings != original or isinstance(run.config.optimizer, BasisRotationConfig)
        for space in spaces or (SPACES if has_basis else SPACES[:1]):
            task = _Task(folder, at, space, original if space == "original" else settings)
            _check_basis_batches(task.settings, run, folder)
            tasks.append(task)
    return [_measure(task, jobs) for task in tasks]


def _check_settings(settings: NormSettings) -> None:
    if settings.vectors < 3:
        raise UserError(
            f"--vectors {settings.vectors}: must be at least 3: fewer have no estimate of squares"
        )
    if settings.batches_per_vector % 2:
        raise UserError(
            f"--batches-per-vector {settings.batches_per_vector}: must be even, because it is "
            "halved"
        )
    if settings.basis_from:
        # An error here comes now, not after hours of work in other coordinates.
        find_checkpoint(Run.load(Path(settings.basis_from)), None, "newest")


def _check_basis_batches(settings: NormSettings, run: Run, folder: Path) -> None:
    """UserError if a basis needs more batches than the run trained on."""
    most = num_trained_on(run)
    if settings.basis_batches is not None and settings.basis_batches > most:
        raise UserError(
            f"--basis-batches {settings.basis_batches}: {folder} trained on only "
            f"{counted(most, 'batch')}"
        )


@dataclass(frozen=True)
class _Task:
    """One measurement, as a process needs to know it."""

    run: Path
    iteration: int
    space: Space
    settings: NormSettings

    @property
    def folder(self) -> Path:
        """Holds the finished products until the measurement is complete."""
        digest = hashlib.sha256(self.settings.model_dump_json().encode()).hexdigest()
        name = f".hessian-norm-{self.space}-{self.iteration:08d}-{digest[:8]}"
        return self.run / "analysis" / name

    def load(self) -> Checkpoint:
        """The checkpoint with the bases of these coordinates (none for the original ones)."""
        dtype = DTYPES[self.settings.precision]
        checkpoint = load_checkpoint(self.run, self.iteration, dtype=dtype)
        if self.space == "original":
            return replace(checkpoint, bases={})
        num_batches = self.settings.basis_batches
        if num_batches is not None:
            strategy = () if self.space == "rotated" else strategy_of(self.space)
            return replace(checkpoint, bases=fit_bases(checkpoint, num_batches, *strategy))
        source = checkpoint  # the checkpoint that has the bases
        if self.settings.basis_from:
            source = load_checkpoint(
                Path(self.settings.basis_from), dtype=dtype, device=checkpoint.device
            )
        if not source.bases:
            remedy = "give --basis-from a run of basis rotation, or --basis-batches N"
            raise UserError(f"{source.path}: has no basis (method {source.run.method}); {remedy}")
        check_same_model(source.parameters, checkpoint.model, source.path)
        return replace(checkpoint, bases=source.bases)


def fit_bases(
    checkpoint: Checkpoint,
    num_batches: int,
    source: hessian.Source = "2nd",
    geometry: hessian.Geometry = "bilateral",
) -> hessian.Bases:
    """A strategy's bases, estimated from gradients at the checkpoint's weights.

    The gradients are of the last `num_batches` micro-batches of the training. So the bases do not
    depend on the batches of the measurement itself, whose numbers begin at 1."""
    numbers = range(1 - num_batches, 1)
    gradients = (
        hessian.gradient(checkpoint.model, checkpoint.parameters, batch)
        for _, batch in checkpoint.batches(numbers)
    )
    matrices = checkpoint.model.matrices
    return hessian.estimate_bases(matrices, checkpoint.parameters, gradients, source, geometry)


def _measure(task: _Task, jobs: int) -> NormResult:
    """Read the measurement if it is complete, else make or continue it, and write its file."""
    for known in NormResult.all_of(task.run, task.iteration, f"hessian-norm-{task.space}"):
        if known.settings == task.settings and known.norm_of_half is not None:
            return known
    checkpoint = task.load()
    make_folder(task.folder)
    state = _State(task, checkpoint)
    _add_products(state, task, checkpoint, jobs)
    result = _result(task, checkpoint, state)
    result.write(task.run)
    shutil.rmtree(task.folder)
    return result


def _add_products(state: _State, task: _Task, checkpoint: Checkpoint, jobs: int) -> None:
    """Add the products of all vectors that the state does not have yet. The state is saved every
    `SAVE_EVERY_S` seconds and at the end. KeyboardInterrupt if the process was asked to stop."""
    total = task.settings.vectors
    label = f"{task.run.name} {task.iteration} {task.space}"
    saved_at = time.monotonic()
    with (
        StopSignal() as stop,
        ProgressBar(label, "vectors", total, state.num_vectors) as progress,
        closing(_products(task, checkpoint, range(state.num_vectors, total), jobs)) as products,
    ):
        while state.num_vectors < total and not stop.requested:
            state.add(next(products))
            # One vector gives no estimate: its correction cos(pi / 2) is zero.
            if state.num_vectors > 1:
                norm = float(state.estimates[0].scales(1).sum()) / checkpoint.num_parameters
                progress.update(state.num_vectors, f"so far {norm:.4g} per parameter")
            if time.monotonic() - saved_at > SAVE_EVERY_S:
                state.save()
                saved_at = time.monotonic()
    state.save()
    if state.num_vectors < total:
        done = f"stopped after {state.num_vectors} of {counted(total, 'vector')}"
        raise KeyboardInterrupt(f"{label}: {done}; the same command continues")


def vector_product(checkpoint: Checkpoint, settings: NormSettings, number: int) -> Tensor:
    """Q^T H Q z (2, d) for Cauchy vector `number`, on the CPU.

    Row i has the Hessian H of the mean loss over half i of the sample, and Q is the checkpoint's
    rotation. RunError if a product is not finite."""
    cauchy = cauchy_vector(checkpoint.parameters, settings.seed, number)
    vector = hessian.to_weights(checkpoint.bases, cauchy)
    where = f"{checkpoint.path}: --precision {settings.precision}: vector {number}"
    half = settings.batches_per_vector // 2
    products = []
    for first in (1, 1 + half):
        batches = checkpoint.batches(range(first, first + half))
        product = hessian.mean_product(
            checkpoint.model, checkpoint.parameters, batches, vector, where
        )
        product = hessian.from_weights(checkpoint.bases, product)
        products.append(torch.cat([part.flatten() for part in product.values()]))
    return torch.stack(products).cpu()


def _products(
    task: _Task, checkpoint: Checkpoint, numbers: Sequence[int], jobs: int
) -> Generator[Tensor]:
    """`vector_product` of each number, in the order of the numbers."""
    if jobs == 1:
        yield from (vector_product(checkpoint, task.settings, number) for number in numbers)
        return
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"))
    num_threads = max(1, torch.get_num_threads() // jobs)
    product_of = partial(_worker_product, task, num_threads)
    try:
        yield from map(torch.from_numpy, pool.map(product_of, numbers))
    except BrokenProcessPool:
        raise RunError(
            "a process was lost (killed?); run the same command again to continue"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _worker_product(task: _Task, num_threads: int, number: int) -> Any:
    """`vector_product` in a worker process, as a numpy array."""
    return vector_product(_load_in_worker(task, num_threads), task.settings, number).numpy()


@lru_cache(maxsize=1)
def _load_in_worker(task: _Task, num_threads: int) -> Checkpoint:
    """The task's checkpoint; each worker process reads it once."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process decides
    torch.set_num_threads(num_threads)
    return task.load()


class _State:
    """The estimates from the first `num_vectors` vectors, and their file in the task's folder."""

    def __init__(self, task: _Task, checkpoint: Checkpoint) -> None:
        num_rows = [parameter.numel() for parameter in checkpoint.parameters.values()]
        self.names = list(checkpoint.parameters)
        # For the whole sample, the first half and the second half.
        self.estimates = [
            GeometricEstimate(num_rows, DTYPES[task.settings.precision]) for _ in range(3)
        ]
        self.lost: list[float] = []  # `below_resolution` of each product
        self._path = task.folder / "state.pt"
        if self._path.exists():
            self._restore(task)

    def _restore(self, task: _Task) -> None:
        """Continue from the file; UserError if it cannot be read."""
        try:
            content = read_tensors(self._path)
            for estimate, known in zip(self.estimates, content["estimates"], strict=True):
                vars(estimate).update(known)
            self.lost = content["lost"]
        except (ValueError, LookupError, TypeError) as error:
            raise UserError(
                f"{self._path}: not readable: {error}; remove {task.folder} to measure again"
            ) from None

    @property
    def num_vectors(self) -> int:
        """How many vectors are done."""
        return len(self.lost)

    def add(self, product: Tensor) -> None:
        """Add the next vector's product for both halves of the sample, (2, d)."""
        whole = product.mean(0)
        self.lost.append(below_resolution(whole))
        for estimate, part in zip(self.estimates, (whole, *product), strict=True):
            estimate.add(part)

    def save(self) -> None:
        """Write the file, in place of an older one."""
        content = {
            "lost": self.lost,
            "estimates": [vars(estimate) for estimate in self.estimates],
        }
        with replacing(self._path) as file:
            torch.save(content, file)


def _result(task: _Task, checkpoint: Checkpoint, state: _State) -> NormResult:
    """The result from the estimates of all vectors."""
    whole, *halves = [estimate.sums(state.names) for estimate in state.estimates]
    _, (inputs, _) = next(checkpoint.batches([1]))
    return NormResult(
        **checkpoint.about,
        num_own_stages=checkpoint.run.config.pipeline.stages,
        space=task.space,
        settings=task.settings,
        tokens=task.settings.batches_per_vector * inputs.numel(),
        num_parameters=checkpoint.num_parameters,
        norm=float(whole.sums[0].sum()),
        norm_of_half=float(np.mean([half.sums[0].sum() for half in halves])),
        standard_error=math.sqrt(whole.grouped(lambda name: "all").covariance(1)[0, 0]),
        below_resolution=float(np.mean(state.lost)),
        blocks=Groups.of(whole.grouped(block_of)),
        kinds=Groups.of(whole.grouped(kind_of)),
    )
