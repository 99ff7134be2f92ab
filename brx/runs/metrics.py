"""A run's series on disk: metrics.jsonl while it trains, and curves.npz in its place where results
are kept or shared.

metrics.jsonl has one JSON object per line, in order of iteration, flushed as it is written.
curves.npz holds its losses in a hundredth of the space, and staleness.jsonl its measures of
staleness."""

import contextlib
import json
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from brx.config.loading import load_config
from brx.errors import RunError, UserError
from brx.files import (
    replace_folder,
    replacing,
    sync,
    sync_folder,
    temporary_beside,
    write_text,
)
from brx.readers import Damaged, lines_of, parse_json, read_arrays
from brx.runs.folder import CACHE, ENDED, RunFolder, find_runs, read_each, status_of, telling

Record = dict[str, Any]
"""`iteration`, then either a training step (`train_loss` in nats, `lr`, `grad_norm`, `tokens`,
`seconds`) or a validation (`val_loss` in nats). A step at a log point has more: `stage_grad_norms`,
`stage_update_norms`, those of `MEASURED`, and `failed_refreshes`, the number so far of bases that
stayed as they were, once there has been one."""

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

COMPACT, STALENESS = "curves.npz", "staleness.jsonl"
# The last file tells a sweep that a diverged run has ended.
KEPT = (
    "config.yaml",
    "summary.json",
    "failed.txt",
)
STALENESS_MEASURES = (
    "stage_gradient_cosine",
    "stage_update_cosine",
    "stage_weight_distance",
    "stage_sign_changes",
    "stage_rotated_sign_changes",
    "stage_basis_angle",
)
# of the iterations may be missing from a damaged file without changing what is read off it
MOST_LACKING = 0.01
SECONDS_EVERY = 20  # iterations, between which training time is interpolated
# per nat in an export: a 280th of the noise of the loss of 128 tokens, and two fifths fewer bytes
LOSS_STEPS = 1024
# iterations, over which an export averages the training losses of a tuning run
TUNING_BLOCK = 100


class MetricsWriter:
    """Appends records to metrics.jsonl; RunError where the disk is full, read-only or gone."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with telling(path):
            self._file = path.open("a", encoding="utf-8")

    def write(self, records: Iterable[Record]) -> None:
        with telling(self.path):
            self._file.writelines(json.dumps(record) + "\n" for record in records)
            self._file.flush()

    def sync(self) -> None:
        """Let what was written survive a power cut; before a checkpoint that continues from it is
        complete."""
        with telling(self.path):
            sync(self._file.fileno(), self.path)
            sync_folder(self.path.parent)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        # On a full disk the buffer cannot be flushed: told, where nothing else is.
        with telling(self.path) if kind is None else contextlib.suppress(OSError):
            self._file.close()


def garbled_lines(path: Path) -> list[int]:
    """Numbers of the lines of a metrics file, from 1, that are no records but are followed by
    some."""
    are_records = [record is not None for _, record in _lines(path)]
    return [
        n
        for n, is_record in enumerate(are_records, start=1)
        if not is_record and any(are_records[n:])
    ]


def missing_iterations(
    path: Path, iteration: int, is_validated: Callable[[int], bool]
) -> list[int]:
    """The iterations up to this one that lack a record (of their step, or of their validation): an
    entry each."""
    records = list(read_metrics(path))
    trained, validated = (
        {r["iteration"] for r in records if key in r} for key in ("train_loss", "val_loss")
    )
    lacking = [t for t in range(1, iteration + 1) if t not in trained]
    lacking += [t for t in range(1, iteration + 1) if is_validated(t) and t not in validated]
    return sorted(lacking)


def read_metrics(path: Path) -> Iterator[Record]:
    """The records of a metrics file, without lines that are none; a UserError where two processes
    have written it."""
    return (record for _, record in _lines(path) if record is not None)


def truncate_metrics(path: Path, iteration: int) -> None:
    """Drop what was written after `iteration`, so that a resumed run writes it again, once."""
    lines = list(_lines(path))
    while lines and (lines[-1][1] is None or lines[-1][1]["iteration"] > iteration):
        lines.pop()
    write_text(path, "".join(line for line, _ in lines))


def _lines(path: Path) -> Iterator[tuple[str, Record | None]]:
    """Each line with its record: steps once each in order, validations likewise, after their
    iteration's step."""
    newest = {"train_loss": 0, "val_loss": 0}
    if path.exists() and not path.is_file():  # reading a pipe might never end
        raise UserError(f"{path}: not an ordinary file")
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for number, line in enumerate(lines_of(file), start=1):
                record = _parse(line)
                if record is not None:
                    kind, iteration = (
                        "val_loss" if "val_loss" in record else "train_loss",
                        record["iteration"],
                    )
                    if iteration <= newest[kind] or iteration < newest["train_loss"]:
                        raise UserError(
                            f"{path}: line {number}: iteration {iteration} after iteration "
                            f"{max(newest.values())}: two"
                            " processes have written here; train the run again in another folder"
                        )
                    newest[kind] = iteration
                yield line, record
    except FileNotFoundError:
        return
    except Damaged as error:
        raise UserError(f"{path}: {error}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None


def _parse(line: str) -> Record | None:
    try:
        record = parse_json(line) if line.endswith("\n") else None
    except Damaged:
        return None
    if not isinstance(record, dict) or type(record.get("iteration")) is not int:
        return None
    needed = ("val_loss",) if "val_loss" in record else ("train_loss", "seconds")
    return record if all(isinstance(record.get(key), int | float) for key in needed) else None


def exact(value: float) -> float:
    """A float32 as the shortest decimal that reads back to it."""
    return float(f"{value:.9g}")


class Curves(NamedTuple):
    """A run's series, float64: `iterations` from 1, `train_loss` and `val_loss` in nats, `seconds`
    of training."""

    iterations: NDArray[np.float64]
    train_loss: NDArray[np.float64]
    seconds: NDArray[np.float64]
    val_iterations: NDArray[np.float64]
    val_loss: NDArray[np.float64]


def read_curves(folder: Path) -> Curves:
    """The series of a run's folder; of one that diverged, maybe empty.

    A line on stderr says that a few are missing; UserError where all are, or over 1 %, or two
    processes wrote them."""
    path, read = folder / "metrics.jsonl", _from_metrics
    if (folder / COMPACT).is_file() and not path.is_file():
        path, read = folder / COMPACT, _from_compact
    curves, summary = read(path), RunFolder(folder).read_summary()
    if len(curves.iterations) == 0:
        if summary.get("status") == "diverged":
            return curves
        raise UserError(f"{path}: holds no training loss yet")
    lacking = num_lacking(curves, summary)
    if lacking > 0:
        num_iterations = lacking + len(curves.iterations)
        problem = (
            f"{path}: damaged: lacks {lacking} of the {num_iterations} iterations that "
            f"the run has made"
        )
        if lacking > MOST_LACKING * num_iterations:
            raise UserError(f"{problem}; restore it, or train it again")
        print(f"brx: note: {problem}", file=sys.stderr)
    return curves


def num_lacking(curves: Curves, summary: Mapping[str, Any]) -> int:
    """The number of iterations that a run has made and whose training loss is not there."""
    made = int(curves.iterations[-1]) if len(curves.iterations) else 0
    if summary.get("status") == "finished":
        made = summary.get("iteration", made)
    return made - len(curves.iterations)


def read_staleness(folder: Path) -> list[Record]:
    """The records of the iterations at which staleness was measured: of the measures, a number per
    stage each."""
    metrics = folder / "metrics.jsonl"
    kept = ("iteration", "train_loss", "seconds", *STALENESS_MEASURES)
    return [
        {name: record[name] for name in kept if name in record}
        for record in read_metrics(metrics if metrics.is_file() else folder / STALENESS)
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
    pairs = (
        ("iterations", "train_loss"),
        ("second_places", "seconds"),
        ("val_iterations", "val_loss"),
    )
    try:
        arrays = read_arrays(path)
        # Bytes of losses in steps, first the low bytes, then the high ones
        if arrays["train_loss"].ndim == 2:
            arrays["train_loss"] = (
                np.ascontiguousarray(arrays["train_loss"].T).view("<i2")[:, 0] / LOSS_STEPS
            )
        arrays = {name: values.astype(np.float64) for name, values in arrays.items()}
        # Steps take a quarter less space than iterations, which older exports have.
        if "steps" in arrays:
            arrays["iterations"] = np.cumsum(arrays["steps"])
        for places, values in pairs:  # curves that are functions of the iteration
            if not arrays[places].ndim == arrays[values].ndim == 1 or len(arrays[places]) != len(
                arrays[values]
            ):
                raise ValueError(f"{places} and {values} must be two lists of one length")
            if (np.diff(arrays[places]) <= 0).any():
                raise ValueError(f"{places} must rise")
        indices = np.arange(len(arrays["iterations"]), dtype=np.float64)
        seconds = (
            np.interp(indices, arrays["second_places"], arrays["seconds"])
            if len(indices)
            else indices
        )
        return Curves(
            arrays["iterations"],
            arrays["train_loss"],
            seconds,
            arrays["val_iterations"],
            arrays["val_loss"],
        )
    except (ValueError, LookupError, TypeError) as error:
        raise UserError(f"{path}: not readable: {error}") from None


def export_runs(
    folders: Sequence[Path], target: Path, *, unfinished: bool = False
) -> tuple[int, int]:
    """Export runs that have ended, each to a folder of its name below `target`; how many were, and
    how many not."""
    found = read_each(find_runs(folders), _status_if_readable)
    # Those that diverged are among them: they count where learning rates are chosen and slowdowns
    #     bounded.
    chosen = [path for path, status in found if unfinished or status in ENDED]
    sources: dict[str, Path] = {}
    for path in chosen:
        place = path.resolve()
        if (other := sources.setdefault(place.name, path)) != path:
            raise UserError(
                f"RUNS: {other} and {path} would both become {target / place.name}; export one"
            )
        if place.parent == target.resolve():
            raise UserError(f"--to {target}: is where {path} lies already; name another folder")
        if (target / place.name / "metrics.jsonl").exists():
            raise UserError(
                f"--to {target}: {place.name} there is a whole run, which its copy would replace"
            )
        _check_no_links(place)
        _check_target(target / place.name)
    for name, path in sources.items():
        export(path, target / name)
    return len(chosen), len(found) - len(chosen)


def _status_if_readable(folder: Path) -> str:
    """The run's status; UserError where its curves, which an export is about, are damaged."""
    read_curves(folder)
    return _status(folder)


def _check_no_links(run: Path) -> None:
    """Refuse a run in which a link would let a file from elsewhere into what is shared."""
    names = [*KEPT, "metrics.jsonl", COMPACT, STALENESS, "analysis"]
    inside = [*(run / name for name in names), *(run / "analysis").glob("*.json")]
    for path in inside:
        if path.is_symlink():
            raise UserError(
                f"{path}: is a link, and an export, which is to be shared, takes no files from "
                f"elsewhere; put the file itself there"
            )


def _check_target(target: Path) -> None:
    """Refuse to replace what is no export: a UserError."""
    if target.is_symlink():
        raise UserError(f"--to: {target} is a link; remove it, or name another folder")
    if not target.exists():
        return
    if not target.is_dir():
        raise UserError(f"--to: {target} is a file; name another folder")
    known = {*KEPT, COMPACT, STALENESS, "analysis"}
    strangers = [
        path
        for path in target.iterdir()
        if path.name not in known and not path.name.startswith(CACHE)  # with what a kill left of it
    ]
    strangers += [path for path in target.glob("analysis/*") if path.suffix != ".json"]
    if strangers:
        raise UserError(
            f"--to: {target} holds {min(strangers).relative_to(target)}, which is of no export and "
            f"would be lost; move it away, or name another folder"
        )


def _status(folder: Path) -> str:
    return status_of(RunFolder(folder).read_summary(), load_config(folder / "config.yaml"))


def block_means(
    values: NDArray[np.float64],  # (n,)
    length: int,
) -> NDArray[np.float64]:
    """Each value replaced by the mean of its block of neighbours, (n,). Blocks are counted from the
    end, so that the first one may be shorter."""
    num_blocks = -(-len(values) // length)
    # Padded at the front to a whole number of blocks.
    padded = np.full(num_blocks * length, np.nan)
    padded[len(padded) - len(values) :] = values
    means = np.nanmean(padded.reshape(num_blocks, length), axis=1)
    repeated: NDArray[np.float64] = np.repeat(means, length)[len(padded) - len(values) :]
    return repeated


def export(folder: Path, target: Path) -> Path:
    """Replace the folder `target` by a run's compact form: settings, summary, measurements, losses
    rounded.

    The training losses of a tuning run (`training.for_tuning`) are means over `TUNING_BLOCK`
    iterations: nothing but its final losses is ever read, and its file is a tenth as large."""
    curves = read_curves(folder)
    temporary = temporary_beside(target)
    try:
        temporary.mkdir(parents=True, exist_ok=True)
        for file in [*(folder / name for name in KEPT), *(folder / "analysis").glob("*.json")]:
            if file.is_file():
                copy = temporary / file.relative_to(folder)
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, copy)
        if lines := [json.dumps(record) + "\n" for record in read_staleness(folder)]:
            write_text(temporary / STALENESS, "".join(lines))
        train_loss = curves.train_loss
        if load_config(folder / "config.yaml").training.for_tuning:
            train_loss = block_means(train_loss, TUNING_BLOCK)
        every, steps = range(len(curves.seconds)), (train_loss * LOSS_STEPS).round()
        # Two bytes each, alike ones together: a quarter smaller than as float32. A run that
        #     diverged has larger ones.
        is_small = (abs(steps) < 2**15).all()
        losses = (
            steps.astype("<i2").view(np.uint8).reshape(-1, 2).T if is_small else steps / LOSS_STEPS
        )
        kept = sorted({*every[::SECONDS_EVERY], *every[-1:]})
        with replacing(temporary / COMPACT) as compact:
            np.savez_compressed(
                compact,
                steps=np.diff(curves.iterations, prepend=0).astype(np.int32),
                train_loss=losses,
                second_places=np.array(kept, dtype=np.int32),
                seconds=curves.seconds[kept].astype(np.float32),
                val_iterations=curves.val_iterations.astype(np.int32),
                val_loss=curves.val_loss,
            )
        replace_folder(temporary, target)
    except OSError as error:
        raise RunError(f"{target}: cannot be written: {error.strerror}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target
