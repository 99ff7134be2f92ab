"""What a run may continue from: what is refused before any data are prepared, and which checkpoint is taken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from brx.config.schema import RunConfig
from brx.errors import UserError
from brx.methods.trajectory_version import check_trajectory_version
from brx.runs.checkpoint import iteration_of, list_checkpoints, read_manifest
from brx.runs.folder import RunFolder, first_difference, trajectory_of
from brx.runs.metrics import MetricsFile


def check_request(folder: RunFolder, config: RunConfig, *, resume: bool) -> None:
    """Refuse a run that its folder has no room for, or that cannot be continued; writes nothing.

    Raises:
        UserError: the folder holds a run and `resume` is off, another run, a damaged one, or more iterations of this
            one than it is to have.
    """
    folder.check(config, resume=resume)
    checkpoint, _ = choose_checkpoint(folder, config)
    if checkpoint is None:
        return
    manifest = read_manifest(checkpoint)
    check_trajectory_version(manifest, checkpoint)
    then = {section: values for section, values in manifest["settings"].items() if section != "data"}
    difference = first_difference(then, trajectory_of(config), ignore_new=True)  # of data, the fingerprint counts
    if difference is not None:
        raise UserError(f"{checkpoint}: {difference}: it is not a checkpoint of this run; restore config.yaml")
    last = config.training.last_iteration
    if iteration_of(checkpoint) > last:
        raise UserError(
            f"training.stop_after: {last}: the run in {folder.path} has made {iteration_of(checkpoint)} iterations"
            " already; give at least that many"
        )


def choose_checkpoint(folder: RunFolder, config: RunConfig) -> tuple[Path | None, str]:
    """The newest checkpoint up to which the metrics lack no record, and what there is to tell about the choice.

    Where lines of the metrics were garbled before the first checkpoint, what they said cannot be written again: then
    the newest checkpoint it is, and the metrics go on without them. None if there is no checkpoint at all.

    Raises:
        UserError: the metrics end before the first checkpoint, or two processes have written them.
    """
    checkpoints = list_checkpoints(folder.path)
    if not checkpoints:
        return None, ""
    training = config.training
    metrics = MetricsFile.read(folder.metrics)
    newest = checkpoints[-1]
    missing = metrics.missing(
        iteration_of(newest), lambda t: t % training.validation_every == 0 or t == training.iterations
    )
    if not missing:
        return newest, ""
    complete = missing[0] - 1
    usable = [path for path in checkpoints if iteration_of(path) <= complete]
    lacking = f"{folder.metrics}: lacks records after iteration {complete}"
    if usable:
        return usable[-1], f"{lacking}; continuing from {usable[-1]} instead of {newest.name}"
    # A garbled line is one record, or two where the line break between them went.
    if len(missing) <= 2 * len(metrics.garbled):
        lines = ", ".join(map(str, metrics.garbled))
        return newest, f"{folder.metrics}: not readable in line {lines}; continuing from {newest} without what it said"
    raise UserError(f"{lacking}, before the first checkpoint ({checkpoints[0].name}); restore it or start a new run")


def check_data(manifest: dict[str, Any], checkpoint: Path, fingerprint: str) -> None:
    """Refuse a checkpoint that was trained on other data: a UserError with both fingerprints."""
    if manifest["fingerprint"] != fingerprint:
        raise UserError(
            f"{checkpoint}: was trained on other data (fingerprint {manifest['fingerprint'][:12]}, now"
            f" {fingerprint[:12]}); restore the token files or start a new run"
        )


def what_is_saved(run: Path, iteration: int) -> str:
    """What there is to continue from when a run is cut off at an iteration, in words."""
    checkpoints = list_checkpoints(run)
    if not checkpoints:
        return f"cut off at iteration {iteration}; there is no checkpoint"
    newest = iteration_of(checkpoints[-1])
    lost = f"there is none of iteration {iteration}, " if newest < iteration else ""
    return f"cut off at iteration {iteration}; {lost}the newest checkpoint is that of iteration {newest}"
