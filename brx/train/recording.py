"""`record`: ordinary run folders from anybody's training loop, for `brx slowdown`, `plot`, `report`
and `export`."""

from __future__ import annotations

import atexit
import hashlib
import math
import os
import re
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch
from pydantic_core import to_jsonable_python

from brx.config.loading import dump_config, load_config
from brx.config.loading import validate as check
from brx.config.schema import RECORDED, RunConfig
from brx.errors import DivergedError, UserError
from brx.files import write_text
from brx.runs.folder import RunFolder, hold
from brx.runs.metrics import MetricsWriter, Record, exact, read_metrics, truncate_metrics
from brx.train.recorder import write_summary

if TYPE_CHECKING:
    from brx.pipeline.anywhere import DelayedPipeline


class Recording:
    """A run's folder as `brx train` writes it, for a loop of your own; a context manager.

        with brx.record("runs/mine", method="lion", stages=32, seed=0, lr=1e-3) as run:
            run.log(t, loss)  # after each update t, from 1

    Without `with`, the first `log` begins the run, and `close()` or the end of the program ends it.

    It has config.yaml (with what is known of such a loop), metrics.jsonl and summary.json. A loss
    that is not finite ends the block, quietly: the run has diverged. UserError where the folder
    holds another run already, or is in use.

    Args: method: a name for figures and tables; what is no letter or digit becomes a hyphen.
        stages: P of a plain pipeline; by default that of `pipeline`, or 1. pipeline: what `delayed`
        returned, which says it all. task: a name for model, data and tokens together: runs of
        different ones are never compared silently. By default
            of the script's name and, with `pipeline`, the model's class and shapes.
        iterations: T, the updates of the whole run. By default as many as are logged: runs of other
            numbers of updates do not compare, so that one which diverges is not counted.
        settings: anything else to keep (but `lr`), under `arguments` in config.yaml; what JSON has
            no form for as text.
        resume: go on with the run in the folder; what was logged from the next `t` on is written
            anew.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        method: str,
        *,
        lr: float,
        seed: int = 0,
        stages: int | None = None,
        pipeline: DelayedPipeline | None = None,
        task: str | None = None,
        iterations: int | None = None,
        batch_size: int | None = None,
        settings: Mapping[str, Any] = {},
        resume: bool = False,
    ) -> None:
        self._folder, self._pipeline, self._resume = RunFolder(Path(folder)), pipeline, resume
        self._task, self._counts = task or _task(pipeline), iterations is None
        self._stack = ExitStack()
        self._is_open = False
        self._has_ended = False
        self._is_in_block = False  # of `with`
        self._metrics: MetricsWriter | None = None
        self._t, self._validated, self._seconds, self._started = 0, 0, 0.0, time.perf_counter()
        delays: dict[str, Any] = {
            "stages": 1 if stages is None else stages,
            "delay": "pipeline",
            "accumulation": 1,
        }
        if pipeline is not None:
            delays = pipeline.settings()
        if stages is not None and stages != delays["stages"]:
            raise UserError(f"record: stages is {stages}, but the pipeline has {delays['stages']}")
        if resume and self._folder.config.is_file():
            old = load_config(self._folder.path)
            # More than were logged: somebody has said so.
            self._counts &= old.training.iterations <= max(
                1, self._folder.read_summary().get("iteration", 0)
            )
            iterations = old.training.iterations if iterations is None else iterations
            if "cut" not in delays and old.pipeline.cut is not None:  # not known yet
                delays["cut"] = old.pipeline.cut
        kept = to_jsonable_python(
            {k: v for k, v in settings.items() if k not in ("lr", "params")}, fallback=str
        )
        training = {"iterations": 1 if iterations is None else iterations, "seed": seed}
        training |= {} if batch_size is None else {"batch_size": batch_size}
        content = {
            "data": {"source": self._task},
            "pipeline": delays,
            "optimizer": {
                "method": RECORDED + re.sub(r"\W+", "_", method),
                "lr": lr,
                "arguments": kept,
            },
            "training": training,
        }
        self._config = check(content, RunConfig, "record")

    def __enter__(self) -> Self:
        if self._is_open:
            raise UserError(f"record: {self._folder.path}: the run is being recorded already")
        self._begin()
        self._is_in_block = True
        return self

    def _begin(self) -> None:
        if self._has_ended:
            raise UserError(
                f"record: {self._folder.path}: this recording has ended; to go on with the run, "
                f"make another one with resume=True"
            )
        with ExitStack() as stack:
            stack.enter_context(hold(self._folder.path))
            self._folder.create(self._config, resume=self._resume)
            if self._folder.metrics.is_file():
                self._find_place()
            self._started = time.perf_counter()
            self._write_summary("unfinished")
            self._stack = stack.pop_all()
        self._is_open = True

    def close(self) -> None:
        """End the run, for a loop without `with`; nothing where none is under way."""
        if self._is_open:
            self.__exit__(None, None)

    def log(self, t: int, loss: float | torch.Tensor, **numbers: float | torch.Tensor) -> None:
        """Write the training loss of update t in nats, mean over its micro-batches, and any other
        numbers (`lr`)."""
        t = int(t)  # numpy's integers, too
        if not self._is_open:  # without `with`
            self._begin()
            atexit.register(self.close)
        if self._metrics is None:
            self._open(t)
        if t != self._t + 1:
            raise UserError(
                f"record: {self._folder.path}: iteration {t} after iteration {self._t}: log every "
                f"update"
            )
        value = _number(loss)
        if taken := numbers.keys() & {"iteration", "train_loss", "seconds", "val_loss"}:
            raise UserError(
                f"record: log: {', '.join(sorted(taken))} is written anyway; give the number "
                f"another name"
            )
        if not math.isfinite(value):
            self._diverge(f"iteration {t}: the loss is {value}")
        self._t = t
        others = {name: _number(number) for name, number in numbers.items()}
        self._write(
            {
                "iteration": t,
                "train_loss": exact(value),
                "seconds": self._seconds_so_far(4),
                **others,
            }
        )

    def validate(self, t: int, loss: float | torch.Tensor) -> None:
        """Write a validation loss in nats, taken after update t."""
        t = int(t)
        if self._metrics and (t != self._t or t == self._validated):
            what = (
                "validated already"
                if t == self._validated
                else f"iteration {self._t} is the newest"
            )
            raise UserError(f"record: {self._folder.path}: validation of iteration {t}: {what}")
        if not math.isfinite(value := _number(loss)):
            self._diverge(f"iteration {t}: the validation loss is {value}")
        self._write({"iteration": t, "val_loss": value})
        self._validated = t

    def _open(self, t: int) -> None:
        if self._resume:
            truncate_metrics(self._folder.metrics, t - 1)
        self._find_place()
        self._complete_config()  # M is known by now; a process may be killed
        self._metrics = self._stack.enter_context(MetricsWriter(self._folder.metrics))

    def _find_place(self) -> None:
        """The newest iteration in the metrics, and its seconds."""
        self._t, self._seconds = 0, 0.0
        for entry in read_metrics(self._folder.metrics):
            self._t, self._seconds = entry["iteration"], entry.get("seconds", self._seconds)

    def _write(self, entry: Record) -> None:
        if self._metrics is None:
            raise UserError(
                f"record: {self._folder.path}: log the first update before its validation"
            )
        self._metrics.write([entry])

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *trace: object
    ) -> bool:
        diverged = isinstance(error, DivergedError)
        self._is_open = False
        self._has_ended = True
        atexit.unregister(self.close)
        with self._stack:
            self._complete_config()
            status = (
                "finished"
                if error is None and self._t >= self._config.training.iterations
                else "interrupted"
            )
            if isinstance(error, Exception):  # a KeyboardInterrupt is none
                status = "diverged" if diverged else "failed"
            self._write_summary(status, str(error) if error else None)
        if diverged:
            alone = (
                "; without iterations= no longer run is compared with it" if self._counts else ""
            )
            print(f"brx: {self._folder.path}: diverged: {error}{alone}", file=sys.stderr)
        return diverged

    def _diverge(self, problem: str) -> NoReturn:
        """Leave the block of `with` quietly; without one, end the run and tell the loop."""
        error = DivergedError(problem)
        if not self._is_in_block:
            self.__exit__(DivergedError, error)
        raise error

    def _complete_config(self) -> None:
        """What is known after the updates: their number, and the micro-batches of each."""
        content = self._config.model_dump(exclude_unset=True)
        if self._counts and self._t:
            content["training"]["iterations"] = self._t
        if self._pipeline is not None and self._pipeline.updates:
            content["pipeline"] |= self._pipeline.settings()
        self._config = check(content, RunConfig, "record")
        write_text(self._folder.config, dump_config(self._config))

    def _write_summary(self, status: str, error: str | None = None) -> None:
        fingerprint = hashlib.sha256(self._task.encode()).hexdigest()
        measured = {"training_seconds": self._seconds_so_far(3), "task": self._task}
        write_summary(self._folder, self._config, status, error, self._t, fingerprint, **measured)

    def _seconds_so_far(self, digits: int) -> float:
        return round(self._seconds + time.perf_counter() - self._started, digits)


record = Recording


def _number(value: float | torch.Tensor) -> float:
    return float(value.detach() if isinstance(value, torch.Tensor) else value)


def _task(pipeline: DelayedPipeline | None) -> str:
    script = Path(sys.argv[0] or "interactive").name
    if pipeline is None:
        return script
    shapes = repr(
        [(name, tuple(weight.shape)) for name, weight in pipeline.model.named_parameters()]
    )
    return (
        f"{script}, {type(pipeline.model).__name__} "
        f"{hashlib.sha256(shapes.encode()).hexdigest()[:8]}"
    )
