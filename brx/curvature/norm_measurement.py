"""Measuring the (1,1)-norm of the training loss's Hessian at a checkpoint: resumable, by one
process or several.

It is the Hessian of the mean loss over one sample of batches, which all vectors share. Every
product is computed for both halves of the sample. Their mean is the product of the whole sample,
and their norms show how much of it is noise of the batches (`NormResult.norms`). Finished products
are in a hidden folder named by the settings. If the measurement is stopped, the same command
continues from there. The numbers depend on the settings alone."""

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
    find_checkpoint,
    load_checkpoint,
    num_trained_on,
)
from brx.curvature.hessian_norm import GeometricEstimate, Sums, below_resolution, cauchy_vector
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
from brx.errors import RunError, UserError
from brx.files import replacing
from brx.progress import ProgressBar
from brx.readers import read_tensors
from brx.runs.checkpoint import run_and_iteration
from brx.runs.frames import Run
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
    """One measurement per run (or checkpoint) and space, made now or read again if it has been.

    Without `spaces`: of the original coordinates, and of the rotated ones where a run has a basis.
    Without `iteration`: at each run's newest checkpoint. Asked to stop, it saves what is done and
    raises KeyboardInterrupt."""
    if settings.vectors < 3:
        raise UserError(
            f"--vectors {settings.vectors}: must be at least 3: fewer have no estimate of squares"
        )
    if settings.batches_per_vector % 2:
        raise UserError(
            f"--batches-per-vector {settings.batches_per_vector}: must be even, because it is"
            " halved"
        )
    if settings.basis_from:
        # Told before hours of other coordinates
        find_checkpoint(Run.load(Path(settings.basis_from)), None, "newest")
    original = settings.model_copy(update={"basis_from": None, "basis_batches": None})
    tasks = []
    for path in runs:
        folder, named = run_and_iteration(path)
        run = Run.load(folder)
        at = int(find_checkpoint(run, iteration if named is None else named, "newest").name)
        has_basis = settings != original or isinstance(run.config.optimizer, BasisRotationConfig)
        for space in spaces or (SPACES if has_basis else SPACES[:1]):
            tasks.append(_Task(folder, at, space, original if space == "original" else settings))
            if (tasks[-1].settings.basis_batches or 0) > (most := num_trained_on(run)):
                raise UserError(
                    f"--basis-batches {settings.basis_batches}: {folder} trained on {most} batches "
                    f"only"
                )
    return [_measure(task, jobs) for task in tasks]


@dataclass(frozen=True)
class _Task:  # what a process needs to know of a measurement
    run: Path
    iteration: int
    space: Space
    settings: NormSettings

    @property
    def folder(self) -> Path:  # while it is under way
        digest = hashlib.sha256(self.settings.model_dump_json().encode()).hexdigest()
        return (
            self.run / "analysis" / f".hessian-norm-{self.space}-{self.iteration:08d}-{digest[:8]}"
        )

    def load(self) -> Checkpoint:
        """The checkpoint, with the bases of these coordinates (none for the original ones)."""
        borrowed, dtype = self.settings.basis_from, DTYPES[self.settings.precision]
        checkpoint = load_checkpoint(self.run, self.iteration, dtype=dtype)
        if self.space == "original":
            return replace(checkpoint, bases={})
        if (num_batches := self.settings.basis_batches) is not None:
            strategy = () if self.space == "rotated" else strategy_of(self.space)
            return replace(checkpoint, bases=fit_bases(checkpoint, num_batches, *strategy))
        lender = (
            load_checkpoint(Path(borrowed), dtype=dtype, device=checkpoint.device)
            if borrowed
            else checkpoint
        )
        if not lender.bases:
            told = "give --basis-from a run of basis rotation, or --basis-batches N"
            raise UserError(f"{lender.path}: has no basis (method {lender.run.method}); {told}")
        check_same_model(lender.parameters, checkpoint.model, lender.path)
        return replace(checkpoint, bases=lender.bases)


def fit_bases(
    checkpoint: Checkpoint,
    num_batches: int,
    source: hessian.Source = "2nd",
    geometry: hessian.Geometry = "bilateral",
) -> hessian.Bases:
    """A strategy's bases, estimated on the spot from fresh gradients at the checkpoint's
    weights."""
    # Numbers below 1 are batches of the training itself: those that measurements take from 1 on
    #     stay unseen.
    numbers = range(1 - num_batches, 1)
    gradients = (
        hessian.gradient(checkpoint.model, checkpoint.parameters, batch)
        for _, batch in checkpoint.batches(numbers)
    )
    matrices = checkpoint.model.matrices
    return hessian.estimate_bases(matrices, checkpoint.parameters, gradients, source, geometry)


def _measure(task: _Task, jobs: int) -> NormResult:
    for known in NormResult.all_of(task.run, task.iteration, f"hessian-norm-{task.space}"):
        if known.settings == task.settings and known.norm_of_half is not None:
            return known
    checkpoint = task.load()
    task.folder.mkdir(parents=True, exist_ok=True)
    state, total = _State(task, checkpoint), task.settings.vectors
    label = f"{task.run.name} {task.iteration} {task.space}"
    saved_at = time.monotonic()
    with (
        StopSignal() as stop,
        ProgressBar(label, "vectors", total, state.num_vectors) as progress,
        closing(_products(task, checkpoint, range(state.num_vectors, total), jobs)) as products,
    ):
        while state.num_vectors < total and not stop.requested:
            state.add(next(products))
            # One vector has no estimate: its correction cos(pi / 2) is zero
            if state.num_vectors > 1:
                norm = float(state.estimates[0].scales(1).sum()) / checkpoint.num_parameters
                progress.update(state.num_vectors, f"so far {norm:.4g} per parameter")
            if time.monotonic() - saved_at > SAVE_EVERY_S:
                state.save()
                saved_at = time.monotonic()
    state.save()
    if state.num_vectors < total:
        done = f"stopped after {state.num_vectors} of {total} vectors"
        raise KeyboardInterrupt(f"{label}: {done}; the same command continues")
    result = _result(
        task, checkpoint, [estimate.sums(state.names) for estimate in state.estimates], state.lost
    )
    result.write(task.run)
    shutil.rmtree(task.folder)
    return result


def vector_product(checkpoint: Checkpoint, settings: NormSettings, number: int) -> Tensor:
    """Q^T H Q z (2, d) for Cauchy vector `number`, H of the mean loss over either half of the
    sample; on the CPU."""
    vector = hessian.to_weights(
        checkpoint.bases, cauchy_vector(checkpoint.parameters, settings.seed, number)
    )
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
    """`vector_product` of each number, in their order."""
    if jobs == 1:
        yield from (vector_product(checkpoint, task.settings, number) for number in numbers)
        return
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"))
    try:
        threads = max(1, torch.get_num_threads() // jobs)
        yield from map(torch.from_numpy, pool.map(partial(_worker_product, task, threads), numbers))
    except BrokenProcessPool:
        raise RunError(
            "a process was lost (killed?); the same command continues what is saved"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _worker_product(task: _Task, num_threads: int, number: int) -> Any:
    return vector_product(_load_in_worker(task, num_threads), task.settings, number).numpy()


@lru_cache(maxsize=1)
def _load_in_worker(task: _Task, num_threads: int) -> Checkpoint:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process decides
    torch.set_num_threads(num_threads)
    return task.load()


class _State:
    """What is done, of the first `num_vectors` vectors; kept in the task's folder."""

    def __init__(self, task: _Task, checkpoint: Checkpoint) -> None:
        num_rows = [parameter.numel() for parameter in checkpoint.parameters.values()]
        self.names = list(checkpoint.parameters)
        # One estimate for the whole sample, and one for each half.
        self.estimates = [
            GeometricEstimate(num_rows, DTYPES[task.settings.precision]) for _ in range(3)
        ]
        self.lost: list[float] = []  # `below_resolution` of each product
        self._path = task.folder / "state.pt"
        if self._path.exists():
            self._go_on(task)

    def _go_on(self, task: _Task) -> None:
        """Take up what was measured before."""
        try:
            content = read_tensors(self._path)
            for estimate, known in zip(self.estimates, content["estimates"], strict=True):
                vars(estimate).update(known)
            self.lost = content["lost"]
        except (ValueError, LookupError, TypeError) as error:
            raise UserError(
                f"{self._path}: not readable: {error}; remove {task.folder} to measure anew"
            ) from None

    @property
    def num_vectors(self) -> int:
        return len(self.lost)

    def add(self, product: Tensor) -> None:  # the next vector's (2, d)
        self.lost.append(below_resolution(product.mean(0)))
        for estimate, part in zip(self.estimates, (product.mean(0), *product), strict=True):
            estimate.add(part)

    def save(self) -> None:
        with replacing(self._path) as file:
            torch.save(
                {"lost": self.lost, "estimates": [vars(estimate) for estimate in self.estimates]},
                file,
            )


def _result(task: _Task, checkpoint: Checkpoint, sums: list[Sums], lost: list[float]) -> NormResult:
    whole, *halves = sums
    inputs, _ = next(checkpoint.batches([1]))[1]
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
        below_resolution=float(np.mean(lost)),
        blocks=Groups.of(whole.grouped(block_of)),
        kinds=Groups.of(whole.grouped(kind_of)),
    )
