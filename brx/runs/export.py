"""Exports: the compact form in which runs are kept and shared."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from brx.config.loading import load_config
from brx.errors import UserError
from brx.files import cannot_write, replace_folder, temporary_for, write_text
from brx.runs.folder import CACHE, ENDED, RunFolder, find_runs, read_each
from brx.runs.metrics import COMPACT, STALENESS, read_curves, read_staleness, write_compact
from brx.runs.run import read_run
from brx.runs.trajectory import first_difference, trajectory_of

KEPT = (
    "config.yaml",
    "summary.json",
    "failed.txt",  # tells a sweep that a diverged run has ended
)
"""The files that an export copies as they are."""

TUNING_BLOCK = 100
"""Iterations over which an export averages the training losses of a tuning run."""


def export_runs(
    folders: Sequence[Path], target: Path, *, unfinished: bool = False
) -> tuple[int, int]:
    """Export runs that have ended, each to a folder of its name below `target`.

    Runs that diverged are exported, too: they count when learning rates are chosen, and bound
    slowdowns.

    Args:
        folders: runs, or folders that hold some.
        target: the folder for the exports.
        unfinished: export runs that have not ended as well.

    Returns:
        How many runs were exported, and how many were not.

    Raises:
        UserError: two runs have one name, or an export would replace what is not an earlier export
            of the same run.
        RunError: an export cannot be written.
    """
    statuses = read_each(find_runs(folders), lambda path: read_run(path).status)
    chosen = [path for path, status in statuses if unfinished or status in ENDED]
    sources: dict[str, Path] = {}  # by the name of the export
    for path in chosen:
        place = path.resolve()
        other = sources.setdefault(place.name, path)
        if other != path:
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
        _check_same_run(target / place.name, path)
    for name, path in sources.items():
        export(path, target / name)
    return len(chosen), len(statuses) - len(chosen)


def _check_no_links(run: Path) -> None:
    """Refuse a run in which a link would put a file from elsewhere into the export."""
    names = [*KEPT, "metrics.jsonl", COMPACT, STALENESS, "analysis"]
    inside = [*(run / name for name in names), *(run / "analysis").glob("*.json")]
    for path in inside:
        if path.is_symlink():
            raise UserError(
                f"{path}: is a link, but exports are shared and must hold the files themselves; "
                f"put the file itself there"
            )


def _check_target(target: Path) -> None:
    """UserError if `target` exists and is not an export, which would be lost."""
    if target.is_symlink():
        raise UserError(f"--to: {target} is a link; remove it, or name another folder")
    if not target.exists():
        return
    if not target.is_dir():
        raise UserError(f"--to: {target} is a file; name another folder")
    strangers = [path for path in target.iterdir() if not _is_of_export(path.name)]
    strangers += [path for path in target.glob("analysis/*") if path.suffix != ".json"]
    if strangers:
        raise UserError(
            f"--to: {target} holds {min(strangers).relative_to(target)}, which belongs to no "
            f"export and would be lost; move it away, or name another folder"
        )


def _check_same_run(target: Path, run: Path) -> None:
    """UserError if `target` is the export of another run, or of this run when it was complete: no
    copy of that may be left.

    Runs of two folders easily share a name, since the default names hold few settings.
    """
    there = RunFolder(target)
    if not there.config.is_file():
        return
    old_summary = there.read_summary()
    new_summary = RunFolder(run).read_summary()
    old_data = old_summary.get("data_fingerprint", "")
    new_data = new_summary.get("data_fingerprint", "")
    old_settings = trajectory_of(load_config(there.config))
    new_settings = trajectory_of(load_config(run / "config.yaml"))
    new_settings.pop("data")  # data are compared by their fingerprint
    difference = first_difference(old_settings, new_settings)
    are_data_known = old_data and new_data
    if difference is None and are_data_known and old_data != new_data:
        difference = f"the fingerprint of its data was {old_data[:8]} and is now {new_data[:8]}"
    if difference is not None:
        raise UserError(
            f"--to: {target} is an export of another run than {run}: {difference}; name another "
            f"folder, or remove the old export"
        )
    if old_summary.get("status") in ENDED and new_summary.get("status") not in ENDED:
        raise UserError(
            f"--to: {target} is an export of the whole run, and {run} has not ended; name another "
            f"folder, or remove the old export"
        )


def _is_of_export(name: str) -> bool:
    """Whether an export may hold a file or folder of this name."""
    is_of_cache = name.startswith(CACHE)  # the cache, or what a kill left of it
    return is_of_cache or name in {*KEPT, COMPACT, STALENESS, "analysis"}


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
    """Replace the folder `target` by a run's compact form.

    It holds the settings, the summary, the measurements in analysis/, the measures of staleness and
    the curves, with the losses rounded. The training losses of a tuning run (`training.for_tuning`)
    are means over `TUNING_BLOCK` iterations: only its final losses are ever read, and its file is a
    tenth as large.

    Returns:
        `target`.

    Raises:
        UserError: the run is damaged.
        RunError: the folder cannot be written.
    """
    curves = read_curves(folder)
    temporary = temporary_for(target)
    try:
        temporary.mkdir(parents=True, exist_ok=True)
        for file in [*(folder / name for name in KEPT), *(folder / "analysis").glob("*.json")]:
            if file.is_file():
                copy = temporary / file.relative_to(folder)
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, copy)
        lines = [json.dumps(record) + "\n" for record in read_staleness(folder)]
        if lines:
            write_text(temporary / STALENESS, "".join(lines))
        if load_config(folder / "config.yaml").training.for_tuning:
            means = block_means(curves.train_loss, TUNING_BLOCK)
            curves = curves._replace(train_loss=means)
        write_compact(temporary / COMPACT, curves)
        replace_folder(temporary, target)
    except OSError as error:
        raise cannot_write(target, error) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target
