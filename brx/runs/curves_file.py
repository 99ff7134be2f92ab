"""curves.npz: a run's losses in a hundredth of the space of metrics.jsonl, for results that are kept or shared."""

from __future__ import annotations

import json
import os
import shutil
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from brx.errors import RunError, UserError
from brx.files import replace_folder, replacing, write_text
from brx.runs.folder import RunFolder
from brx.runs.metrics import read_metrics

NAME = "curves.npz"
STALENESS = "staleness.jsonl"
"""The measures of staleness (`logging.staleness_every`) of metrics.jsonl, beside the compact losses."""
STALENESS_MEASURES = (
    "stage_gradient_cosine",
    "stage_update_cosine",
    "stage_weight_distance",
    "stage_sign_changes",
    "stage_rotated_sign_changes",
    "stage_basis_angle",
)
MOST_LACKING = 0.01
"""The share of the iterations that may be missing from a damaged file without changing what is read off it."""
SECONDS_EVERY = 20
"""Training time is kept at every so many iterations and interpolated between them."""


class Curves(NamedTuple):
    """A run's series, float64: `iterations` from 1, `train_loss` and `val_loss` in nats, `seconds` of training."""

    iterations: NDArray[np.float64]
    train_loss: NDArray[np.float64]
    seconds: NDArray[np.float64]
    val_iterations: NDArray[np.float64]
    val_loss: NDArray[np.float64]


def read_curves(folder: Path) -> Curves:
    """The series of a run's folder, from metrics.jsonl, or from curves.npz where there is none.

    Of a file with a few garbled lines, what is left; a line on stderr says so. Of a run that diverged, maybe none.

    Raises:
        UserError: neither holds a training loss, they lack more than 1 % of them, or two processes have written them.
    """
    metrics, compact = folder / "metrics.jsonl", folder / NAME
    is_compact = compact.is_file() and not metrics.is_file()
    curves = _from_compact(compact) if is_compact else _from_metrics(metrics)
    if len(curves.iterations) == 0:
        if RunFolder(folder).has_diverged:
            return curves
        raise UserError(f"{metrics}: holds no training loss yet")
    summary, num_iterations = RunFolder(folder).read_summary(), int(curves.iterations[-1])
    if summary.get("status") == "finished":
        num_iterations = summary.get("iteration", num_iterations)
    num_lacking = num_iterations - len(curves.iterations)
    if num_lacking > 0:
        path = compact if is_compact else metrics
        problem = f"{path}: damaged: lacks {num_lacking} of the {num_iterations} iterations that the run has made"
        if num_lacking > MOST_LACKING * num_iterations:
            raise UserError(f"{problem}; restore it, or train it again")
        print(f"brx: note: {problem}", file=sys.stderr)
    return curves


def export(folder: Path, target: Path) -> Path:
    """Copy a run into the folder `target` in compact form: config.yaml, summary.json, curves.npz, log left behind.

    Losses keep their float32 values. What was measured at its checkpoints (analysis/*.json) and of staleness
    comes along. A folder that is there already is replaced as a whole.

    Raises:
        UserError: `folder` is no run with losses.
        RunError: `target` cannot be written to.
    """
    curves = read_curves(folder)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True, exist_ok=True)
        for name in ("config.yaml", "summary.json"):
            if (folder / name).is_file():
                shutil.copyfile(folder / name, temporary / name)
        for measured in (folder / "analysis").glob("*.json"):
            (temporary / "analysis").mkdir(exist_ok=True)
            shutil.copyfile(measured, temporary / "analysis" / measured.name)
        if lines := [json.dumps(record) + "\n" for record in read_staleness(folder)]:
            write_text(temporary / STALENESS, "".join(lines))
        _write_compact(temporary / NAME, curves)
        replace_folder(temporary, target)
    except OSError as error:
        raise RunError(f"{target}: cannot be written: {error.strerror}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def _write_compact(path: Path, curves: Curves) -> None:
    every = range(len(curves.seconds))
    kept = sorted({*every[::SECONDS_EVERY], *every[-1:]})
    with replacing(path) as file:
        np.savez_compressed(
            file,
            iterations=curves.iterations.astype(np.int32),
            train_loss=curves.train_loss.astype(np.float32),
            second_places=np.array(kept, dtype=np.int32),
            seconds=curves.seconds[kept].astype(np.float32),
            val_iterations=curves.val_iterations.astype(np.int32),
            val_loss=curves.val_loss,
        )


def read_staleness(folder: Path) -> list[dict[str, Any]]:
    """The records of the iterations at which staleness was measured: of the measures, a number per stage each."""
    metrics, compact = folder / "metrics.jsonl", folder / STALENESS
    kept = ("iteration", "train_loss", "seconds", *STALENESS_MEASURES)
    return [
        {name: record[name] for name in kept if name in record}
        for record in read_metrics(metrics if metrics.is_file() else compact)
        if any(name in record for name in STALENESS_MEASURES)
    ]


def _from_metrics(path: Path) -> Curves:
    steps, validations = [], []
    for record in read_metrics(path):
        if "train_loss" in record:
            steps.append((record["iteration"], record["train_loss"], record["seconds"]))
        if "val_loss" in record:
            validations.append((record["iteration"], record["val_loss"]))
    iterations, train_loss, seconds = np.array(steps, dtype=np.float64).reshape(-1, 3).T
    val_iterations, val_loss = np.array(validations, dtype=np.float64).reshape(-1, 2).T
    return Curves(iterations, train_loss, seconds, val_iterations, val_loss)


def _from_compact(path: Path) -> Curves:
    try:
        with np.load(path) as file:
            arrays = {name: file[name].astype(np.float64) for name in file.files}
        _check_arrays(arrays)
        indices = np.arange(len(arrays["iterations"]), dtype=np.float64)
        seconds = np.interp(indices, arrays["second_places"], arrays["seconds"]) if len(indices) else indices
        return Curves(arrays["iterations"], arrays["train_loss"], seconds, arrays["val_iterations"], arrays["val_loss"])
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise UserError(f"{path}: not readable: {error}") from None


def _check_arrays(arrays: Mapping[str, NDArray[np.float64]]) -> None:
    """Refuse what `write_compact` does not write: curves that are no functions of the iteration.

    Raises:
        ValueError: names the array, and what would be right.
    """
    for places, values in (("iterations", "train_loss"), ("second_places", "seconds"), ("val_iterations", "val_loss")):
        if not arrays[places].ndim == arrays[values].ndim == 1 or len(arrays[places]) != len(arrays[values]):
            raise ValueError(f"{places} and {values} must be two lists of one length")
        if (np.diff(arrays[places]) <= 0).any():
            raise ValueError(f"{places} must rise")
