"""Checkpoints: complete or absent, one file per stage, checked when read.

    checkpoints/00000500/stage-000.pt ... stage-007.pt, manifest.json

Stages are files of their own so that a run may resume on another number of devices. What a run may
continue from is decided before any data are prepared (`check_request`)."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, BinaryIO

import torch

from brx.config.schema import RunConfig
from brx.data.token_file import sha256
from brx.errors import RunError, UserError
from brx.files import replacing, sync_folder, write_json
from brx.methods.trajectory_version import check_trajectory_version
from brx.readers import Damaged, read_json, read_tensors
from brx.runs.folder import RunFolder, first_difference, telling, trajectory_of
from brx.runs.metrics import garbled_lines, missing_iterations


class DamagedError(UserError):
    """A checkpoint that cannot be continued from; an older one may be. `problem` says why, without
    a remedy."""

    def __init__(self, checkpoint: Path, problem: str) -> None:
        super().__init__(f"{problem}; remove {checkpoint} to resume before it")
        self.problem = problem


MANIFEST = "manifest.json"
Content = dict[str, Any]

PIECE_BYTES, SYNC_BYTES = 2**22, 2**26

# What a manifest has; `stages` holds the entries of `write_stage`.
_KINDS: dict[str, type | tuple[type, ...]] = {
    "iteration": int,
    "fingerprint": str,
    "trajectory_version": int,
    "settings": dict,
    "num_stages": int,
    "training_seconds": (int, float),
    "stages": list,
}


def checkpoint_folder(run: Path, iteration: int) -> Path:
    return run / "checkpoints" / f"{iteration:08d}"


def list_checkpoints(run: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    complete = [manifest.parent for manifest in run.glob(f"checkpoints/*/{MANIFEST}")]
    return sorted((path for path in complete if path.name.isdecimal()), key=iteration_of)


def iteration_of(checkpoint: Path) -> int:
    return int(checkpoint.name)


def run_and_iteration(path: Path) -> tuple[Path, int | None]:
    """The run of a path that is a run's folder or one of its checkpoints, and the checkpoint's
    iteration, if it is."""
    is_checkpoint = path.parent.name == "checkpoints" and path.name.isdecimal()
    return (path.parent.parent, iteration_of(path)) if is_checkpoint else (path, None)


def write_stage(
    run: Path,
    iteration: int,
    stage: int,
    state: Content,
    on_written: Callable[[int], None] = lambda num_bytes: None,
) -> Content:
    """Write one stage into the temporary folder; gives its entry for the manifest.

    Args:
        on_written: called again and again with the number of bytes that have arrived on the disk
            since the last time; with 0 at the end, when the file is in its place.

    Raises:
        RunError: the folder cannot be written to, or the disk is full.
    """
    path = _temporary(run, iteration) / _stage_file(stage)
    with telling(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)  # by whichever rank is first
    with replacing(path) as file:
        writer = _SteadyWriter(file, on_written)
        torch.save(state, writer)  # type: ignore[arg-type]  # it needs `write` alone
        writer.sync()
    on_written(0)  # the file is in its place, which takes slow storage as long as writing it
    return {"stage": stage, "bytes": path.stat().st_size, "sha256": writer.sha256.hexdigest()}


class _SteadyWriter:
    """Writes in pieces, and sees to it that they arrive on the disk one after the other, so that
    progress is seen and the end has little left to wait for."""

    def __init__(self, file: BinaryIO, on_written: Callable[[int], None]) -> None:
        self._file, self._on_written = file, on_written
        self._num_unsynced = 0
        self.sha256 = hashlib.sha256()  # covers everything written so far

    def write(self, data: bytes) -> int:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), PIECE_BYTES):
            piece = view[start : start + PIECE_BYTES]
            self.sha256.update(piece)
            self._file.write(piece)
            self._num_unsynced += len(piece)
            if self._num_unsynced >= SYNC_BYTES:
                self.sync()
        return len(view)

    def flush(self) -> None:
        self._file.flush()

    def sync(self) -> None:
        """Wait until all that was written is on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._on_written(self._num_unsynced)
        self._num_unsynced = 0


def finish(
    run: Path,
    iteration: int,
    content: Content,
    stages: list[Content],
    keep: int,
    keep_at: Collection[int] = (),
) -> Path:
    """Put the checkpoint in place, with a manifest of `content` and `stages` (entries of
    `write_stage`).

    The newest `keep` checkpoints stay, this one among them, and those at the iterations `keep_at`.

    Raises:
        RunError: the entries are not the `num_stages` stages of `content`, or nothing can be
            written.
    """
    temporary, final = _temporary(run, iteration), checkpoint_folder(run, iteration)
    if problem := _wrong_stages(stages, content["num_stages"]):
        raise RunError(f"{final}: {problem}; nothing is written: do all ranks train the same run?")
    content = content | {"iteration": iteration, "stages": stages}
    write_json(temporary / MANIFEST, content | {"sha256": _sha256_of_content(content)})
    with telling(final):
        shutil.rmtree(final, ignore_errors=True)  # half removed, if it is there: see `remove_after`
        temporary.rename(final)
        sync_folder(final.parent)
    for old in list_checkpoints(run)[:-keep]:
        if iteration_of(old) not in keep_at:
            _remove(old)
    return final


def _wrong_stages(stages: list[Content], num_stages: int) -> str:
    """Why these entries are not a checkpoint's stages, each of them once; empty if they are."""
    found = sorted(entry["stage"] for entry in stages)
    if found == list(range(num_stages)):
        return ""
    return (
        f"has the stages {', '.join(map(str, found))}, must have 0 to {num_stages - 1}, each once"
    )


def recover(run: Path) -> None:
    """Remove what an interrupted write left behind."""
    for leftover in (run / "checkpoints").glob(".*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)


def remove_after(run: Path, iteration: int) -> None:
    """Remove checkpoints whose metrics are no longer there: the run, which fell back, comes to them
    again."""
    for checkpoint in list_checkpoints(run):
        if iteration_of(checkpoint) > iteration:
            _remove(checkpoint)


def read_manifest(checkpoint: Path) -> Content:
    """The manifest of a checkpoint.

    Raises:
        DamagedError: it cannot be read, or is not what its checksum says.
        UserError: it is of another brx, or of another iteration than its folder's name says.
    """
    path = checkpoint / MANIFEST
    remedy = f"remove {checkpoint} to resume before it"
    try:
        manifest = read_json(path)
    except ValueError as error:
        problem = f"{path}: not a readable checkpoint manifest: {error}"
        raise DamagedError(checkpoint, problem) from None
    if not isinstance(manifest, dict) or manifest.pop("sha256", None) != _sha256_of_content(
        manifest
    ):
        raise DamagedError(checkpoint, f"{path}: damaged (its SHA-256 is not that of its content)")
    if wrong := [key for key, kind in _KINDS.items() if not isinstance(manifest.get(key), kind)]:
        raise UserError(f"{path}: was written by another version of brx: {wrong[0]}; {remedy}")
    if (iteration := manifest["iteration"]) != iteration_of(checkpoint):
        raise UserError(
            f"{path}: holds iteration {iteration}, but its folder has another name; {remedy}"
        )
    if problem := _wrong_stages(manifest["stages"], manifest["num_stages"]):
        raise DamagedError(checkpoint, f"{path}: {problem}")
    return manifest


def check_stages(checkpoint: Path, stages: Iterable[int]) -> None:
    """Read the files of some stages once, and compare them with the manifest.

    Raises:
        DamagedError: one is not there, or not what the manifest says.
    """
    # Once for all of them: the manifest has an entry per stage.
    entries = {entry["stage"]: entry for entry in read_manifest(checkpoint)["stages"]}
    for stage in stages:
        path = checkpoint / _stage_file(stage)
        if stage not in entries or not path.is_file():
            raise DamagedError(checkpoint, f"{path}: the checkpoint lacks stage {stage}")
        entry = entries[stage]
        if path.stat().st_size != entry["bytes"] or sha256(path) != entry["sha256"]:
            raise DamagedError(checkpoint, f"{path}: damaged (its SHA-256 is not the manifest's)")


def read_stage(
    checkpoint: Path, stage: int, device: torch.device, *, is_checked: bool = False
) -> Content:
    """One stage's state.

    Args:
        is_checked: `check_stages` has been called before.

    Raises:
        UserError: the file is damaged or not there, or this torch cannot read it.
    """
    if not is_checked:
        check_stages(checkpoint, [stage])
    path = checkpoint / _stage_file(stage)
    try:
        state: Content = read_tensors(path, device)
    except Damaged as error:
        raise UserError(f"{path}: {error}") from None
    return state


def check_request(folder: RunFolder, config: RunConfig, *, resume: bool) -> None:
    """Refuse a run that its folder has no room for, or that cannot be continued: a UserError;
    writes nothing."""
    folder.check(config, resume=resume)
    checkpoint, _ = choose_checkpoint(folder, config)
    if checkpoint is None:
        return
    manifest = read_manifest(checkpoint)
    check_trajectory_version(manifest, checkpoint, config.optimizer.method)
    then = {
        section: values for section, values in manifest["settings"].items() if section != "data"
    }
    # Data are compared by their fingerprint.
    difference = first_difference(then, trajectory_of(config), ignore_new=True)
    if difference is not None:
        raise UserError(
            f"{checkpoint}: {difference}: it is not a checkpoint of this run; restore config.yaml"
        )
    done, last = iteration_of(checkpoint), config.training.last_iteration
    # It validates at its last iteration, where one that was interrupted has not.
    if done > last or (
        done == last and last in missing_iterations(folder.metrics, last, lambda t: t == last)
    ):
        raise UserError(
            f"training.stop_after: {last}: the run in {folder.path} has made {done} already; give "
            f"more"
        )


def choose_checkpoint(
    folder: RunFolder, config: RunConfig, damaged: Collection[Path] = ()
) -> tuple[Path | None, str]:
    """The newest checkpoint up to which the metrics lack no record (None if there is none at all),
    and what to tell.

    Lines that were garbled before the first checkpoint cannot be written again: then the newest
    checkpoint it is, without them.

    Args:
        damaged: checkpoints that are out of the question, as stages of theirs are damaged.

    Raises:
        UserError: no checkpoint is intact, the metrics end before the first one, or two processes
            have written the metrics.
    """
    checkpoints, problem = _intact_checkpoints(folder.path, damaged)
    if not checkpoints:
        return None, ""
    chosen, note = _up_to_metrics(folder, config, checkpoints)
    if problem and not note:
        note = f"{problem}; continuing from {chosen}"
    return chosen, note


def _intact_checkpoints(run: Path, damaged: Collection[Path]) -> tuple[list[Path], str]:
    """The checkpoints up to the newest one with an intact manifest, oldest first, without those
    known to be damaged; and why the newest of all is not among them, if it is not.

    Raises:
        DamagedError: there are checkpoints, and none of them is intact.
        UserError: the newest one is intact, and not of this brx or of its folder's name.
    """
    checkpoints = [path for path in list_checkpoints(run) if path not in damaged]
    first_error = None
    while checkpoints:
        try:
            read_manifest(checkpoints[-1])
            break
        except DamagedError as error:
            first_error = first_error or error
            checkpoints.pop()
    if first_error is None:
        return checkpoints, ""
    if not checkpoints:
        raise first_error
    return checkpoints, first_error.problem


def _up_to_metrics(
    folder: RunFolder, config: RunConfig, checkpoints: list[Path]
) -> tuple[Path, str]:
    """The newest of these checkpoints up to which the metrics lack no record, and what to tell."""
    every, last, newest = (
        config.training.validation_every,
        config.training.iterations,
        checkpoints[-1],
    )
    missing = missing_iterations(
        folder.metrics, iteration_of(newest), lambda t: t % every == 0 or t == last
    )
    if not missing:
        return newest, ""
    usable = [path for path in checkpoints if iteration_of(path) < missing[0]]
    lacking = f"{folder.metrics}: lacks records after iteration {missing[0] - 1}"
    if usable:
        return usable[-1], f"{lacking}; continuing from {usable[-1]} instead of {newest.name}"
    # A garbled line is one record, or two where the line break between them went.
    garbled = garbled_lines(folder.metrics)
    if len(missing) <= 2 * len(garbled):
        lines = ", ".join(map(str, garbled))
        return (
            newest,
            f"{folder.metrics}: not readable in line {lines}; continuing from {newest} without "
            f"what it said",
        )
    raise UserError(
        f"{lacking}, before the first checkpoint ({checkpoints[0].name}); restore it or start a "
        f"new run"
    )


def recorded_fingerprint(run: Path) -> str | None:
    """The fingerprint of the data that a run was trained on, by its newest intact checkpoint; None
    where it has none."""
    for path in reversed(list_checkpoints(run)):
        try:
            return str(read_manifest(path)["fingerprint"])
        except UserError:  # the resumed run reports the damage
            continue
    return None


def check_data(manifest: Content, checkpoint: Path, fingerprint: str) -> None:
    if manifest["fingerprint"] != fingerprint:
        both = f"fingerprint {manifest['fingerprint'][:12]}, now {fingerprint[:12]}"
        raise UserError(
            f"{checkpoint}: was trained on other data ({both}); restore the token files or start a "
            f"new run"
        )


def what_is_saved(run: Path, iteration: int) -> str:
    """What there is to continue from when a run is cut off at an iteration, in words."""
    checkpoints = list_checkpoints(run)
    if not checkpoints:
        return f"cut off at iteration {iteration}; there is no checkpoint"
    newest = iteration_of(checkpoints[-1])
    saved = f"the newest checkpoint is from iteration {newest}"
    return f"cut off at iteration {iteration}; {saved}"


def _remove(checkpoint: Path) -> None:
    # The manifest goes first: what is half removed is no checkpoint any more.
    (checkpoint / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(checkpoint, ignore_errors=True)


def _temporary(run: Path, iteration: int) -> Path:
    return run / "checkpoints" / f".{iteration:08d}.tmp"


def _stage_file(stage: int) -> str:
    return f"stage-{stage:03d}.pt"


def _sha256_of_content(manifest: Content) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
