"""`record`: writes the same run folders as `brx train`, from a training loop of your own, for
`brx slowdown`, `plot`, `report` and `export`."""

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
from brx.pipeline.delayed_arguments import is_whole
from brx.runs.folder import RunFolder
from brx.runs.lock import hold
from brx.runs.metrics import MetricsWriter, Record, exact, read_metrics, truncate_metrics
from brx.train.recorder import write_summary

if TYPE_CHECKING:
    from brx.pipeline.delayed import DelayedPipeline


class Recording:
    """A run's folder as `brx train` writes it, for a loop of your own; a context manager.

        with brx.record("runs/mine", method="lion", stages=32, seed=0, lr=1e-3) as run:
            run.log(t, loss)  # after each update t, from 1

    Without `with`, the first `log` begins the run, and `close()` or the end of the program ends it.

    The folder has config.yaml (with the settings that are known of such a loop), metrics.jsonl and
    summary.json. If a loss is not finite, the run has diverged: the block ends quietly.

    Args:
        folder: the run's folder; made if it does not exist.
        method: a name for figures and tables. Characters other than letters and digits become
            hyphens there.
        lr: the learning rate; of a schedule, its largest.
        seed: the run's seed.
        stages: P of a plain pipeline; by default the number of stages of `pipeline`, or 1.
        pipeline: what `delayed` returned. It says stages, delays and stash mode.
        task: a name for model, data and tokens together. Runs of different tasks are never compared
            silently. By default the script's name and, with `pipeline`, the model's class and
            shapes.
        iterations: T, the updates of the whole run. By default as many as are logged. Runs with
            different numbers of updates are not compared, so without it a run that diverges is not
            counted. If more updates are logged, their number becomes T.
        batch_size: examples per micro-batch.
        settings: anything else to keep, such as a group of an optimizer (without its `lr` and
            `params`). It is in config.yaml under `arguments`; values that JSON has no form for
            become text.
        resume: continue the run in the folder. What was logged from the next `t` on is replaced.

    Raises:
        UserError: the folder holds another run, or is in use; or a setting is wrong.
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
        self._folder = RunFolder(Path(folder))
        self._pipeline = pipeline
        self._resume = resume
        self._task = task or _task(pipeline)
        # Whether T becomes the number of updates that are logged, because nobody has given it.
        self._counts_updates = iterations is None
        self._stack = ExitStack()
        self._is_open = False
        self._has_ended = False
        self._is_in_block = False  # of `with`
        self._metrics: MetricsWriter | None = None
        self._t = 0  # the newest update that is logged
        self._validated = 0  # the newest update with a validation loss
        self._seconds = 0.0  # of earlier sessions
        self._started = time.perf_counter()
        delays = _delays(stages, pipeline)
        if resume and self._folder.config.is_file():
            old = load_config(self._folder.path)
            num_logged = self._folder.read_summary().get("iteration", 0)
            if old.training.iterations > max(1, num_logged):
                self._counts_updates = False  # somebody gave T: it is more than were logged
            if iterations is None:
                iterations = old.training.iterations
            # The cut of this pipeline may not be known yet.
            if "cut" not in delays and old.pipeline.cut is not None:
                delays["cut"] = old.pipeline.cut
        others = {name: value for name, value in settings.items() if name not in ("lr", "params")}
        training = {
            "iterations": 1 if iterations is None else _whole(iterations),
            "seed": _whole(seed),
        }
        if batch_size is not None:
            training["batch_size"] = _whole(batch_size)
        content = {
            "data": {"source": self._task},
            "pipeline": delays,
            "optimizer": {
                "method": RECORDED + re.sub(r"\W+", "_", method),
                "lr": lr,
                "arguments": to_jsonable_python(others, fallback=str, inf_nan_mode="null"),
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
        """Take possession of the folder, and write config.yaml and a first summary."""
        if self._has_ended:
            raise UserError(
                f"record: {self._folder.path}: this recording has ended; to go on with the run, "
                f"make another one with resume=True"
            )
        with ExitStack() as stack:
            stack.enter_context(hold(self._folder.path))
            self._folder.create(self._config, resume=self._resume)
            if self._folder.metrics.is_file():
                self._read_progress()
            self._started = time.perf_counter()
            self._write_summary("unfinished")
            self._stack = stack.pop_all()
        self._is_open = True

    def close(self) -> None:
        """End the run, in a loop without `with`. Does nothing if no run is being recorded."""
        if self._is_open:
            self.__exit__(None, None)

    def log(self, t: int, loss: float | torch.Tensor, **numbers: float | torch.Tensor) -> None:
        """Write the numbers of one update.

        Args:
            t: the update, from 1. Each update has to be logged, in order.
            loss: the training loss in nats, the mean over the update's micro-batches.
            numbers: any others, by name (`lr`, for example).

        Raises:
            UserError: `t` is not the next update, or a number has a name that is taken.
            DivergedError: the loss is not finite; `with` ends its block quietly then.
        """
        t = int(t)  # numpy's integers, too
        if not self._is_open:  # without `with`
            self._begin()
            atexit.register(self.close)
        if self._metrics is None:
            self._open(t)
        if t != self._t + 1:
            raise UserError(
                f"record: {self._folder.path}: iteration {t}, but {self._t + 1} is next: log every "
                f"update, counted from 1"
            )
        value = _number("the loss", loss)
        taken = numbers.keys() & {"iteration", "train_loss", "seconds", "val_loss"}
        if taken:
            raise UserError(
                f"record: log: {', '.join(sorted(taken))} is written anyway; give the number "
                f"another name"
            )
        if not math.isfinite(value):
            self._diverge(f"iteration {t}: the loss is {value}")
        self._t = t
        entry = {
            "iteration": t,
            "train_loss": exact(value),
            "seconds": self._seconds_so_far(4),
        }
        for name, number in numbers.items():
            entry[name] = _number(name, number)
        self._write(entry)

    def validate(self, t: int, loss: float | torch.Tensor) -> None:
        """Write a validation loss, taken after update t.

        Args:
            t: the update that was logged last.
            loss: the loss, in nats.

        Raises:
            UserError: `t` is another update, or has a validation loss already.
            DivergedError: the loss is not finite; `with` ends its block quietly then.
        """
        t = int(t)
        problem = None
        if self._metrics is not None and t == self._validated:
            problem = "validated already"
        elif self._metrics is not None and t != self._t:
            problem = f"iteration {self._t} is the newest"
        if problem is not None:
            raise UserError(f"record: {self._folder.path}: validation of iteration {t}: {problem}")
        value = _number("the loss", loss)
        if not math.isfinite(value):
            self._diverge(f"iteration {t}: the validation loss is {value}")
        self._write({"iteration": t, "val_loss": value})
        self._validated = t

    def _open(self, t: int) -> None:
        """Open the metrics, to continue with update t."""
        if self._resume:
            truncate_metrics(self._folder.metrics, t - 1)
        self._read_progress()
        self._complete_config()  # M is known by now; a process may be killed
        self._metrics = self._stack.enter_context(MetricsWriter(self._folder.metrics))

    def _read_progress(self) -> None:
        """Continue after the newest iteration in the metrics, and from its seconds."""
        self._t = 0
        self._seconds = 0.0
        for entry in read_metrics(self._folder.metrics):
            self._t = entry["iteration"]
            self._seconds = entry.get("seconds", self._seconds)

    def _write(self, entry: Record) -> None:
        if self._metrics is None:
            raise UserError(
                f"record: {self._folder.path}: log the first update before its validation"
            )
        self._metrics.write([entry])

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *trace: object
    ) -> bool:
        has_diverged = isinstance(error, DivergedError)
        self._is_open = False
        self._has_ended = True
        atexit.unregister(self.close)
        with self._stack:
            self._complete_config()
            is_complete = error is None and self._t >= self._config.training.iterations
            status = "finished" if is_complete else "interrupted"
            if has_diverged:
                status = "diverged"
            elif isinstance(error, Exception):  # KeyboardInterrupt is not one
                status = "failed"
            self._write_summary(status, str(error) if error else None)
        if has_diverged:
            hint = ""
            if self._counts_updates:
                hint = "; without iterations= no longer run is compared with it"
            print(f"brx: {self._folder.path}: diverged: {error}{hint}", file=sys.stderr)
        return has_diverged

    def _diverge(self, problem: str) -> NoReturn:
        """Raise DivergedError. Within `with`, this leaves the block; without it, the run ends
        here."""
        error = DivergedError(problem)
        if not self._is_in_block:
            self.__exit__(DivergedError, error)
        raise error

    def _complete_config(self) -> None:
        """Write to config.yaml what is known only after updates: their number, and the pipeline's
        settings."""
        content = self._config.model_dump(exclude_unset=True)
        # More updates than `iterations` said make a longer run, which only compares with others of
        # its length.
        is_longer = self._t > self._config.training.iterations
        if is_longer and not self._counts_updates:
            print(
                f"brx: note: {self._folder.path}: {self._t} updates were logged, more than "
                f"iterations={self._config.training.iterations}; config.yaml has their number",
                file=sys.stderr,
            )
        if is_longer or (self._counts_updates and self._t):
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


def _number(name: str, value: float | torch.Tensor) -> float:
    """A value as a number; UserError, with the name, if it is not one."""
    try:
        return float(value.detach() if isinstance(value, torch.Tensor) else value)
    except (TypeError, ValueError, RuntimeError):
        shape = getattr(value, "shape", None)
        got = repr(value) if shape is None else f"an array of shape {tuple(shape)}"
        raise UserError(f"record: {name} must be one number, got {got}") from None


def _whole(value: int) -> int:
    """A whole number in Python's own type (numpy's integers, too); other values as they are."""
    return int(value) if is_whole(value) else value


def _delays(stages: int | None, pipeline: DelayedPipeline | None) -> dict[str, Any]:
    """The section `pipeline` of the configuration; UserError if `stages` contradicts the
    pipeline."""
    if pipeline is None:
        num_stages = 1 if stages is None else _whole(stages)
        return {"stages": num_stages, "delay": "pipeline", "accumulation": 1}
    delays = pipeline.settings()
    if stages is not None and stages != delays["stages"]:
        raise UserError(f"record: stages is {stages}, but the pipeline has {delays['stages']}")
    return delays


def _task(pipeline: DelayedPipeline | None) -> str:
    """The script's name, and the model's class with a fingerprint of its shapes."""
    script = Path(sys.argv[0] or "interactive").name
    if pipeline is None:
        return script
    shapes = [(name, tuple(weight.shape)) for name, weight in pipeline.model.named_parameters()]
    fingerprint = hashlib.sha256(repr(shapes).encode()).hexdigest()[:8]
    return f"{script}, {type(pipeline.model).__name__} {fingerprint}"
