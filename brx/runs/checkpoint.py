"""Checkpoints: complete or absent, one file per stage, checked when read.

    checkpoints/00000500/stage-000.pt ... stage-007.pt, manifest.json

Each stage has its own file, so that a run may resume on another number of devices. Whether and from
where a run may continue is decided before any data are prepared (`check_request`).
"""

import contextlib
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
from brx.errors import RunError, UserError, counted
from brx.files import (
    make_folder,
    replacing,
    sync,
    sync_folder,
    write_errors_in_one_line,
    write_json,
)
from brx.methods.trajectory_version import check_trajectory_version
from brx.readers import Damaged, read_json, read_tensors
from brx.runs.folder import RunFolder
from brx.runs.metrics import garbled_lines, missing_iterations
from brx.runs.trajectory import deciding_settings, first_difference, trajectory_of


class DamagedError(UserError):
    """A checkpoint is damaged; a run may continue from an older one.

    `problem` says what is wrong, without the remedy that the message adds.
    """

    def __init__(self, checkpoint: Path, problem: str) -> None:
        super().__init__(f"{problem}; remove {checkpoint} to resume before it")
        self.problem = problem


MANIFEST = "manifest.json"
Content = dict[str, Any]

PIECE_BYTES = 2**22  # how much is written at a time
SYNC_BYTES = 2**26  # after this much, the writer waits until it is on the disk

# The keys of a manifest and their types; `stages` holds the entries of `write_stage`.
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
    """Where the checkpoint of an iteration is, in a run's folder."""
    return run / "checkpoints" / f"{iteration:08d}"


def list_checkpoints(run: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    complete = [manifest.parent for manifest in run.glob(f"checkpoints/*/{MANIFEST}")]
    return sorted((path for path in complete if path.name.isdecimal()), key=iteration_of)


def iteration_of(checkpoint: Path) -> int:
    """The iteration of a checkpoint, by the name of its folder."""
    return int(checkpoint.name)


def run_and_iteration(path: Path) -> tuple[Path, int | None]:
    """Split a path into a run's folder and an iteration.

    Args:
        path: a run's folder, or the folder of one of its checkpoints.

    Returns:
        The run's folder, and the checkpoint's iteration or None.
    """
    is_checkpoint = path.parent.name == "checkpoints" and path.name.isdecimal()
    if not is_checkpoint:
        return path, None
    return path.parent.parent, iteration_of(path)


def write_stage(
    run: Path,
    iteration: int,
    stage: int,
    state: Content,
    on_written: Callable[[int], None] = lambda num_bytes: None,
) -> Content:
    """Write one stage of a checkpoint that `finish` will complete.

    Args:
        run: the run's folder.
        iteration: the checkpoint's.
        stage: the stage's number.
        state: tensors and plain values, in nested dictionaries and lists.
        on_written: called repeatedly while the file is written, with the number of bytes that have
            arrived on the disk since the last call. At the end, when the file is in its place, it
            is called with 0.

    Returns:
        The stage's entry for the manifest.

    Raises:
        RunError: the folder cannot be written to, or the disk is full.
    """
    path = _temporary(run, iteration) / _stage_file(stage)
    make_folder(path.parent)  # another rank may have made it
    with replacing(path) as file:
        writer = _SteadyWriter(file, path, on_written)
        torch.save(state, writer)  # type: ignore[arg-type]  # it needs `write` alone
        writer.sync()
    on_written(0)  # putting the file in its place may take slow storage as long as writing it
    return {"stage": stage, "bytes": path.stat().st_size, "sha256": writer.sha256.hexdigest()}


class _SteadyWriter:
    """A file object that syncs what was written every `SYNC_BYTES`.

    So progress can be reported while a large file is written, and the last sync does not take long.

    Args:
        file: the file to write to.
        path: the path that it will have, for messages.
        on_written: as for `write_stage`.
    """

    def __init__(self, file: BinaryIO, path: Path, on_written: Callable[[int], None]) -> None:
        self._file = file
        self._path = path
        self._on_written = on_written
        self._num_unsynced = 0  # bytes
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
        sync(self._file.fileno(), self._path)
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
    """Put a checkpoint whose stages are written in its place, and remove old checkpoints.

    Args:
        run: the run's folder.
        iteration: the checkpoint's.
        content: the manifest's, without `iteration` and `stages`.
        stages: what `write_stage` returned for each stage.
        keep: how many of the newest checkpoints stay, this one among them.
        keep_at: iterations whose checkpoints stay, however old they are.

    Returns:
        The checkpoint's folder.

    Raises:
        RunError: `stages` are not the `num_stages` stages of `content`, a stage's file is not here,
            or the checkpoint cannot be written.
    """
    temporary = _temporary(run, iteration)
    final = checkpoint_folder(run, iteration)
    if problem := _wrong_stages(stages, content["num_stages"]):
        raise RunError(f"{final}: {problem}; nothing is written: do all ranks train the same run?")
    for entry in stages:
        path = temporary / _stage_file(entry["stage"])
        if not path.is_file() or path.stat().st_size != entry["bytes"]:
            raise RunError(
                f"{final}: rank 0 does not see what was written of stage {entry['stage']}; all "
                f"machines must share the run's folder"
            )
    content = content | {"iteration": iteration, "stages": stages}
    write_json(temporary / MANIFEST, content | {"sha256": _digest(content)})
    with write_errors_in_one_line(final):
        shutil.rmtree(final, ignore_errors=True)  # what `_remove` left when it was cut off
        temporary.rename(final)
        sync_folder(final.parent)
    for old in list_checkpoints(run)[:-keep]:
        if iteration_of(old) not in keep_at:
            _remove(old)
    return final


def discard(run: Path, iteration: int, stages: Iterable[int]) -> None:
    """Remove the files of some stages of a checkpoint that will not be completed, and its folder if
    nothing else is in it, so that a full disk has room again. Files that cannot be removed stay
    until `recover`."""
    temporary = _temporary(run, iteration)
    leftovers = [temporary / MANIFEST, *(temporary / _stage_file(stage) for stage in stages)]
    for path in leftovers:
        with contextlib.suppress(OSError):
            path.unlink()
    with contextlib.suppress(OSError):  # other ranks have files there
        temporary.rmdir()


def _wrong_stages(stages: list[Content], num_stages: int) -> str:
    """The problem, in words, if the entries are not one for each stage; empty if they are."""
    numbers = sorted(entry["stage"] for entry in stages)
    if numbers == list(range(num_stages)):
        return ""
    return (
        f"has the stages {', '.join(map(str, numbers))}, must have 0 to {num_stages - 1}, each once"
    )


def recover(run: Path) -> None:
    """Remove the temporary folders that interrupted writes left behind."""
    for leftover in (run / "checkpoints").glob(".*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)


def remove_after(run: Path, iteration: int) -> None:
    """Remove the checkpoints after an iteration to which the run has fallen back. The run will
    write them again."""
    for checkpoint in list_checkpoints(run):
        if iteration_of(checkpoint) > iteration:
            _remove(checkpoint)


def read_manifest(checkpoint: Path) -> Content:
    """Read and check the manifest of a checkpoint.

    Raises:
        DamagedError: it cannot be read, or its checksum does not fit.
        UserError: another version of brx wrote it, or it is not of the iteration that the folder's
            name says.
    """
    path = checkpoint / MANIFEST
    remedy = f"remove {checkpoint} to resume before it"
    try:
        manifest = read_json(path)
    except ValueError as error:
        problem = f"{path}: not a readable checkpoint manifest: {error}"
        raise DamagedError(checkpoint, problem) from None
    if not isinstance(manifest, dict) or manifest.pop("sha256", None) != _digest(manifest):
        raise DamagedError(checkpoint, f"{path}: damaged (its SHA-256 does not fit its content)")
    for key, kind in _KINDS.items():
        if not isinstance(manifest.get(key), kind):
            raise UserError(f"{path}: was written by another version of brx: {key}; {remedy}")
    iteration = manifest["iteration"]
    if iteration != iteration_of(checkpoint):
        raise UserError(
            f"{path}: holds iteration {iteration}, but its folder has another name; {remedy}"
        )
    if problem := _wrong_stages(manifest["stages"], manifest["num_stages"]):
        raise DamagedError(checkpoint, f"{path}: {problem}")
    return manifest


def check_stage_files(checkpoint: Path, stages: Iterable[int]) -> None:
    """Read the files of some stages, and compare their sizes and checksums with the manifest.

    Raises:
        DamagedError: a file is missing or differs.
        UserError: as `read_manifest`.
    """
    # Read once for all stages: the manifest has an entry for each.
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
    """Read the state of one stage, as `write_stage` got it.

    Args:
        checkpoint: the checkpoint's folder.
        stage: the stage's number.
        device: the device for the tensors.
        is_checked: `check_stage_files` has been called before.

    Raises:
        UserError: the file is damaged or missing, or this torch cannot read it.
    """
    if not is_checked:
        check_stage_files(checkpoint, [stage])
    path = checkpoint / _stage_file(stage)
    try:
        state: Content = read_tensors(path, device)
    except Damaged as error:
        raise UserError(f"{path}: {error}") from None
    return state


def check_request(folder: RunFolder, config: RunConfig, *, resume: bool) -> None:
    """Refuse a run that cannot begin or continue in its folder. Nothing is written.

    Raises:
        UserError: the folder holds another run, or this run without `resume`; or what it holds
            cannot be continued with these settings.
    """
    folder.check(config, resume=resume)
    _check_reachable(folder.path / "checkpoints")
    checkpoint, _ = choose_checkpoint(folder, config)
    if checkpoint is None:
        if resume:
            _check_nothing_lost(folder)
        return
    manifest = read_manifest(checkpoint)
    check_trajectory_version(manifest, checkpoint, config.optimizer.method)
    saved_settings = deciding_settings(manifest["settings"])
    saved_settings.pop("data", None)  # data are compared by their fingerprint
    difference = first_difference(saved_settings, trajectory_of(config), ignore_new=True)
    if difference is not None:
        raise UserError(
            f"{checkpoint}: {difference}: it is not a checkpoint of this run; restore config.yaml"
        )
    _check_not_beyond(folder, checkpoint, config.training.last_iteration)


def _check_reachable(checkpoints: Path) -> None:
    """UserError if the folder of the checkpoints is a link to a disk that is not there. The run
    would begin again, and its metrics would be lost."""
    if os.path.lexists(checkpoints) and not checkpoints.is_dir():
        what = f"a link to {checkpoints.readlink()}" if checkpoints.is_symlink() else "a file"
        raise UserError(
            f"{checkpoints}: is {what}, and no folder is there; restore it, or remove "
            f"{checkpoints} to begin again"
        )


def _check_nothing_lost(folder: RunFolder) -> None:
    """UserError if a session in a folder without checkpoints has ended in good order, with a
    checkpoint that is gone. The run would begin again, and its metrics would be lost."""
    summary = folder.read_summary()
    done = summary.get("iteration", 0)
    if summary.get("status") in ("finished", "interrupted") and done > 0:
        raise UserError(
            f"{folder.path}: has made {counted(done, 'iteration')}, but no checkpoint is there to "
            f"continue from; restore {folder.path / 'checkpoints'}, or train it again in another "
            f"folder"
        )


def _check_not_beyond(folder: RunFolder, checkpoint: Path, last: int) -> None:
    """UserError if the run in a folder has gone beyond iteration `last`, or was about to."""
    done = iteration_of(checkpoint)
    is_beyond = done > last
    if done == last:
        # A run that ends at this iteration validates at it. Without a validation, the run was meant
        # to go on.
        is_beyond = last in missing_iterations(folder.metrics, last, lambda t: t == last)
    if is_beyond:
        raise UserError(
            f"training.stop_after: {last}: the run in {folder.path} has made {done} already; give "
            f"more"
        )


def choose_checkpoint(
    folder: RunFolder, config: RunConfig, damaged: Collection[Path] = ()
) -> tuple[Path | None, str]:
    """Choose the checkpoint from which a run continues: the newest one up to which the metrics lack
    no record.

    Records that are missing before the first checkpoint cannot be written again. If garbled lines
    explain them, the newest checkpoint is chosen, and the metrics stay without these records.

    Args:
        folder: the run's.
        config: the run's settings.
        damaged: checkpoints with damaged stages, which are left out.

    Returns:
        The checkpoint, or None if there is none at all; and what to tell the user, if anything.

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
    """The checkpoints up to the newest one with an intact manifest, oldest first.

    Args:
        run: the run's folder.
        damaged: checkpoints that are known to be damaged, which are left out.

    Returns:
        The checkpoints, and the problem of the newest checkpoint of all, in words; empty if it has
        none.

    Raises:
        DamagedError: there are checkpoints, and none of them is intact.
        UserError: as `read_manifest`, for the newest one.
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
    """The newest of these checkpoints up to which the metrics lack no record, and a note for the
    user."""
    newest = checkpoints[-1]
    every = config.training.validation_every
    last = config.training.iterations

    def is_validated(iteration: int) -> bool:
        return iteration % every == 0 or iteration == last

    missing = missing_iterations(folder.metrics, iteration_of(newest), is_validated)
    if not missing:
        return newest, ""
    usable = [path for path in checkpoints if iteration_of(path) < missing[0]]
    lacking = f"{folder.metrics}: lacks records after iteration {missing[0] - 1}"
    if usable:
        return usable[-1], f"{lacking}; continuing from {usable[-1]} instead of {newest.name}"
    # A garbled line was one record, or two if the line break between them is lost.
    garbled = garbled_lines(folder.metrics)
    if len(missing) <= 2 * len(garbled):
        lines = ", ".join(map(str, garbled))
        note = f"not readable in line {lines}; continuing from {newest} without what it said"
        return newest, f"{folder.metrics}: {note}"
    raise UserError(
        f"{lacking}, before the first checkpoint ({checkpoints[0].name}); restore it or start a "
        f"new run"
    )


def recorded_fingerprint(run: Path) -> str | None:
    """The fingerprint of the data that a run was trained on, from its newest intact checkpoint;
    None if it has none."""
    for path in reversed(list_checkpoints(run)):
        try:
            return str(read_manifest(path)["fingerprint"])
        except UserError:  # the resumed run reports the damage
            continue
    return None


def check_data(manifest: Content, checkpoint: Path, fingerprint: str) -> None:
    """Refuse to continue on other data.

    Args:
        manifest: the checkpoint's.
        checkpoint: its folder, for the message.
        fingerprint: the fingerprint of the data that are there now.

    Raises:
        UserError: the fingerprints differ.
    """
    if manifest["fingerprint"] != fingerprint:
        both = f"fingerprint {manifest['fingerprint'][:12]}, now {fingerprint[:12]}"
        raise UserError(
            f"{checkpoint}: was trained on other data ({both}); restore the token files or start a "
            f"new run"
        )


def what_is_saved(run: Path, iteration: int) -> str:
    """Say at which iteration a run was cut off, and which checkpoint it can continue from."""
    checkpoints = list_checkpoints(run)
    if not checkpoints:
        return f"cut off at iteration {iteration}; there is no checkpoint"
    newest = iteration_of(checkpoints[-1])
    saved = f"the newest checkpoint is from iteration {newest}"
    return f"cut off at iteration {iteration}; {saved}"


def _remove(checkpoint: Path) -> None:
    # The manifest goes first: without it, a folder that is half removed does not count as a
    # checkpoint.
    (checkpoint / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(checkpoint, ignore_errors=True)


def _temporary(run: Path, iteration: int) -> Path:
    return run / "checkpoints" / f".{iteration:08d}.tmp"


def _stage_file(stage: int) -> str:
    return f"stage-{stage:03d}.pt"


def _digest(manifest: Content) -> str:
    """The SHA-256 of a manifest, which is written into it."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
