"""Reads and writes a run's series: metrics.jsonl while it trains, curves.npz where results are kept
or shared.

metrics.jsonl has one JSON object per line, in order of iteration, flushed as it is written. An
export replaces it by curves.npz, which holds the losses in a hundredth of the space, and
staleness.jsonl, which holds the measures of staleness.
"""

import contextlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from brx.errors import UserError, counted
from brx.files import replacing, sync, sync_folder, write_errors_in_one_line, write_text
from brx.readers import Damaged, lines_of, parse_json, read_arrays
from brx.runs.folder import RunFolder

Record = dict[str, Any]
"""A line of metrics.jsonl: `iteration`, and either a training step or a validation.

- a step: `train_loss` in nats, `lr`, `grad_norm`, `tokens`, `seconds`;
- a step at a log point, in addition: `stage_grad_norms`, `stage_update_norms`, the keys of
  `MEASURED`, and `failed_refreshes`, how many refreshes of a basis have failed so far, if any has;
- a validation: `val_loss` in nats."""

MEASURED = frozenset(
    {
        "seconds",
        "tokens_per_second",
        "mfu",
        "update_seconds",
        "refresh_seconds",
        "peak_memory_bytes",
    }
)
"""Keys whose values are times, rates and memory: the only ones that differ between two runs of one
configuration."""

COMPACT = "curves.npz"
STALENESS = "staleness.jsonl"
STALENESS_MEASURES = (
    "stage_gradient_cosine",
    "stage_update_cosine",
    "stage_weight_distance",
    "stage_sign_changes",
    "stage_rotated_sign_changes",
    "stage_basis_angle",
)
"""Keys of a record with measures of staleness: a number per stage each."""
MOST_LACKING = 0.01
"""The share of the iterations that a damaged file may lack and still be read."""
SECONDS_EVERY = 20
"""An export holds the training time of every 20th iteration; it is interpolated in between."""
LOSS_STEPS = 1024
"""An export rounds losses to 1/1024 nat: a 280th of the noise of the loss of 128 tokens."""


class MetricsWriter:
    """Appends records to metrics.jsonl; RunError where the disk is full, read-only or gone."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with write_errors_in_one_line(path):
            self._file = path.open("a", encoding="utf-8")

    def write(self, records: Iterable[Record]) -> None:
        """Append the records and flush them to the operating system."""
        with write_errors_in_one_line(self.path):
            self._file.writelines(json.dumps(record) + "\n" for record in records)
            self._file.flush()

    def sync(self) -> None:
        """Make what was written survive a power cut: a checkpoint must not be newer than its
        metrics."""
        with write_errors_in_one_line(self.path):
            sync(self._file.fileno(), self.path)
            sync_folder(self.path.parent)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        # On a full disk the buffer cannot be flushed. That is reported unless another error already
        # is.
        with write_errors_in_one_line(self.path) if kind is None else contextlib.suppress(OSError):
            self._file.close()


def garbled_lines(path: Path) -> list[int]:
    """Numbers of the lines of a metrics file, from 1, that are not records.

    Garbled lines after the last record do not count: a crash cuts the last line off.
    """
    garbled = []
    pending = []  # not followed by a record yet
    for number, (_, record) in enumerate(_lines(path), start=1):
        if record is None:
            pending.append(number)
        else:
            garbled += pending
            pending = []
    return garbled


def missing_iterations(
    path: Path, iteration: int, is_validated: Callable[[int], bool]
) -> list[int]:
    """The iterations of a metrics file that lack a record, rising.

    An iteration that lacks both the record of its step and of its validation is there twice.

    Args:
        path: the file.
        iteration: the last iteration that should be there; the first is 1.
        is_validated: whether an iteration should have a validation.
    """
    trained = set()
    validated = set()
    for record in read_metrics(path):
        if "train_loss" in record:
            trained.add(record["iteration"])
        if "val_loss" in record:
            validated.add(record["iteration"])
    lacking = []
    for t in range(1, iteration + 1):
        if t not in trained:
            lacking.append(t)
        if is_validated(t) and t not in validated:
            lacking.append(t)
    return lacking


def read_metrics(path: Path) -> Iterator[Record]:
    """The records of a metrics file; lines that are not records are left out.

    Raises:
        UserError: the file cannot be read, or two processes have written it.
    """
    return (record for _, record in _lines(path) if record is not None)


def truncate_metrics(path: Path, iteration: int) -> None:
    """Drop what was written after `iteration`, so that a resumed run writes it again, once."""
    lines = list(_lines(path))
    while lines and (lines[-1][1] is None or lines[-1][1]["iteration"] > iteration):
        lines.pop()
    write_text(path, "".join(line for line, _ in lines))


def _lines(path: Path) -> Iterator[tuple[str, Record | None]]:
    """Each line of a metrics file with its record, or None for a line that is none; no line if the
    file does not exist.

    Raises:
        UserError: the file cannot be read, or its iterations do not rise as one process writes them
            (`_OrderCheck`).
    """
    if path.exists() and not path.is_file():  # reading a pipe might never end
        raise UserError(f"{path}: not an ordinary file")
    order = _OrderCheck(path)
    try:
        # An editor may have put a byte order mark first (utf-8-sig).
        with path.open(encoding="utf-8-sig", errors="replace") as file:
            for number, line in enumerate(lines_of(file), start=1):
                record = _parse(line)
                if record is not None:
                    order.check(record, number)
                yield line, record
    except FileNotFoundError:
        return
    except Damaged as error:
        raise UserError(f"{path}: {error}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None


class _OrderCheck:
    """Checks that the records of a file come from one process: each step comes once and in order,
    and so does each validation, after the step of its iteration."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._newest_step = 0
        self._newest_validation = 0

    def check(self, record: Record, number: int) -> None:
        """UserError if the record of line `number` does not follow those before."""
        iteration = record["iteration"]
        if "val_loss" in record:
            is_next = iteration > self._newest_validation and iteration >= self._newest_step
        else:
            is_next = iteration > self._newest_step
        if not is_next:
            newest = max(self._newest_step, self._newest_validation)
            raise UserError(
                f"{self._path}: line {number}: iteration {iteration} after iteration {newest}: two "
                f"processes have written here; train the run again in another folder"
            )
        if "val_loss" in record:
            self._newest_validation = iteration
        else:
            self._newest_step = iteration


def _parse(line: str) -> Record | None:
    """The record of a line; None if the line is cut off, garbled, or lacks a key of records."""
    if not line.endswith("\n"):
        return None
    try:
        record = parse_json(line)
    except Damaged:
        return None
    if not isinstance(record, dict) or type(record.get("iteration")) is not int:
        return None
    needed = ("val_loss",) if "val_loss" in record else ("train_loss", "seconds")
    is_complete = all(isinstance(record.get(key), int | float) for key in needed)
    return record if is_complete else None


def exact(value: float) -> float:
    """A float32 as the shortest decimal that reads back to it."""
    return float(f"{value:.9g}")


class Curves(NamedTuple):
    """A run's series, as float64."""

    iterations: NDArray[np.float64]  # (n,): of the training losses, rising from 1
    train_loss: NDArray[np.float64]  # (n,), in nats
    seconds: NDArray[np.float64]  # (n,), of training up to the iteration
    val_iterations: NDArray[np.float64]  # (m,), rising
    val_loss: NDArray[np.float64]  # (m,), in nats


def is_compact(folder: Path) -> bool:
    """Whether a run's curves are in the compact form of an export (`COMPACT`)."""
    return (folder / COMPACT).is_file() and not (folder / "metrics.jsonl").is_file()


def read_curves(folder: Path) -> Curves:
    """The series of a run's folder; they may be empty for a run that diverged.

    If up to 1 % of the training losses are missing, a line on stderr says so.

    Raises:
        UserError: the file is damaged, has no training losses or lacks more, or two processes have
            written it; or a finished run has a loss that is not finite.
    """
    if is_compact(folder):
        path = folder / COMPACT
        curves = _from_compact(path)
    else:
        path = folder / "metrics.jsonl"
        curves = _from_metrics(path)
    summary = RunFolder(folder).read_summary()
    if len(curves.iterations) == 0:
        if summary.get("status") == "diverged":
            return curves
        made = summary.get("iteration", 0)
        if made > 0:
            raise UserError(
                f"{path}: holds no training loss, but summary.json says that the run has made "
                f"{counted(made, 'iteration')}; restore it, or train it again"
            )
        raise UserError(f"{path}: holds no training loss yet")
    lacking = num_lacking(curves, summary)
    if lacking > 0:
        num_iterations = lacking + len(curves.iterations)
        problem = (
            f"{path}: damaged: lacks {lacking} of the {counted(num_iterations, 'iteration')} that "
            f"the run has made"
        )
        if lacking > MOST_LACKING * num_iterations:
            raise UserError(f"{problem}; restore it, or train it again")
        print(f"brx: note: {problem}", file=sys.stderr)
    if summary.get("status") == "finished":
        _check_finite(curves, path)
    return curves


def _check_finite(curves: Curves, path: Path) -> None:
    """Refuse the series of a finished run with a loss that is not a number: a UserError.

    A run ends as diverged before it writes such a loss. A validation loss of infinity stands for
    none."""
    is_wrong = ~np.isfinite(curves.train_loss)
    is_wrong_validation = np.isnan(curves.val_loss)
    for what, iterations, losses, wrong in (
        ("training", curves.iterations, curves.train_loss, is_wrong),
        ("validation", curves.val_iterations, curves.val_loss, is_wrong_validation),
    ):
        if wrong.any():
            first = int(np.argmax(wrong))
            raise UserError(
                f"{path}: damaged: the {what} loss of iteration {iterations[first]:.0f} is "
                f"{losses[first]}, but summary.json says that the run has finished; restore it, or "
                f"train it again"
            )


def num_lacking(curves: Curves, summary: Mapping[str, Any]) -> int:
    """How many iterations a run has made whose training loss is missing."""
    made = int(curves.iterations[-1]) if len(curves.iterations) else 0
    if summary.get("status") == "finished":
        made = summary.get("iteration", made)
    return made - len(curves.iterations)


def read_staleness(folder: Path) -> list[Record]:
    """The records of the iterations at which a run measured staleness.

    They have the keys `iteration`, `train_loss`, `seconds` and some of `STALENESS_MEASURES`.
    """
    path = folder / "metrics.jsonl"
    if not path.is_file():
        path = folder / STALENESS
    kept = ("iteration", "train_loss", "seconds", *STALENESS_MEASURES)
    records = []
    for record in read_metrics(path):
        if any(name in record for name in STALENESS_MEASURES):
            records.append({name: record[name] for name in kept if name in record})
    return records


def _from_metrics(path: Path) -> Curves:
    steps = []
    validations = []
    for record in read_metrics(path):
        if "train_loss" in record:
            steps.append((record["iteration"], record["train_loss"], record["seconds"]))
        if "val_loss" in record:
            validations.append((record["iteration"], record["val_loss"]))
    iterations, train_loss, seconds = np.array(steps, dtype=np.float64).reshape(-1, 3).T
    val_iterations, val_loss = np.array(validations, dtype=np.float64).reshape(-1, 2).T
    return Curves(iterations, train_loss, seconds, val_iterations, val_loss)


def _from_compact(path: Path) -> Curves:
    """The curves of a file that `export` wrote, here or in an older brx."""
    try:
        arrays = read_arrays(path)
        if arrays["train_loss"].ndim == 2:
            arrays["train_loss"] = _loss_of_bytes(arrays["train_loss"])
        arrays = {name: values.astype(np.float64) for name, values in arrays.items()}
        # Differences between iterations take a quarter less space than the iterations themselves,
        # which older exports have.
        if "steps" in arrays:
            arrays["iterations"] = np.cumsum(arrays["steps"])
        _check_curve(arrays, "iterations", "train_loss")
        _check_curve(arrays, "second_places", "seconds")
        _check_curve(arrays, "val_iterations", "val_loss")
        seconds = np.arange(len(arrays["iterations"]), dtype=np.float64)
        if len(seconds):
            seconds = np.interp(seconds, arrays["second_places"], arrays["seconds"])
        return Curves(
            arrays["iterations"],
            arrays["train_loss"],
            seconds,
            arrays["val_iterations"],
            arrays["val_loss"],
        )
    except (ValueError, LookupError, TypeError) as error:
        raise UserError(
            f"{path}: not readable: {error}; restore it, or export the run again"
        ) from None


def _check_curve(arrays: Mapping[str, NDArray[np.float64]], places: str, values: str) -> None:
    """Refuse arrays that are not a function of the iteration: a ValueError."""
    x = arrays[places]
    y = arrays[values]
    if x.ndim != 1 or y.ndim != 1 or len(x) != len(y):
        raise ValueError(f"{places} and {values} must be two lists of one length")
    if (np.diff(x) <= 0).any():
        raise ValueError(f"{places} must rise")


def _bytes_of_loss(
    train_loss: NDArray[np.float64],  # (n,), in nats
) -> NDArray[Any]:
    """The losses for an export, rounded to `LOSS_STEPS`.

    Each takes two bytes, (2, n): first all low bytes, then all high ones. Similar bytes are thus
    next to each other, and the file is a quarter smaller than with float32. If a loss does not fit
    into two bytes, as after a divergence, all stay float64 (n,).
    """
    steps = (train_loss * LOSS_STEPS).round()
    fits = (abs(steps) < 2**15).all()
    if not fits:
        return np.asarray(steps / LOSS_STEPS)
    return steps.astype("<i2").view(np.uint8).reshape(-1, 2).T


def _loss_of_bytes(
    train_loss: NDArray[np.uint8],  # (2, n)
) -> NDArray[np.float64]:
    """The losses that `_bytes_of_loss` packed, (n,)."""
    steps = np.ascontiguousarray(train_loss.T).view("<i2")[:, 0]
    return np.asarray(steps / LOSS_STEPS)


def write_compact(path: Path, curves: Curves) -> None:
    """Write the curves of an export (`COMPACT`)."""
    places = range(len(curves.seconds))
    kept = sorted({*places[::SECONDS_EVERY], *places[-1:]})
    with replacing(path) as file:
        np.savez_compressed(
            file,
            steps=np.diff(curves.iterations, prepend=0).astype(np.int32),
            train_loss=_bytes_of_loss(curves.train_loss),
            second_places=np.array(kept, dtype=np.int32),
            seconds=curves.seconds[kept].astype(np.float32),
            val_iterations=curves.val_iterations.astype(np.int32),
            val_loss=curves.val_loss,
        )
