"""Reads runs into frames: `load` gives one with a row per run, `curves` one with a row per run and
iteration."""

import math
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from brx.config.loading import sections_of_code
from brx.config.schema import DelayCode, RunConfig
from brx.config.user_code import RUN_CODE, is_allowed
from brx.methods.trajectory_version import newest_alike, oldest_alike, recorded_version
from brx.names import path_text, shown
from brx.pipeline.delay import depth
from brx.runs.aspects import DEPTH as DEPTH  # others import it from here
from brx.runs.aspects import append_settings, experiment_id, first_names, text_of
from brx.runs.folder import find_runs, name_of_run, read_each
from brx.runs.run import Run, read_run, unusual_optimizer_settings
from brx.runs.slowdown import Series, last_quarter_loss

Folders = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


def load(folders: Folders) -> pd.DataFrame:
    """Read all runs of some folders that have losses or diverged: a row per run.

    A damaged run is left out and named on stderr (`brx.runs.folder.read_each`).

    Args:
        folders: one or several; each is a run's folder, or a folder that holds some.

    Returns:
        A frame whose index `run` is the path of the run's folder. Columns are all settings and all
        of summary.json by their dotted keys (`pipeline.stages`, `optimizer.method`,
        `versions.torch`; NaN where a run has no such key), and:

        - `name` of the run's folder. Like all texts, it has no control characters
          (`brx.names.shown`).
        - `architecture`, `method`, `variant`: the settings in a few words. Runs with one
          `architecture` have one model.
        - `experiment`: equal for runs that differ only in learning rate and seed.
        - `depth`: P, the stages of the pipeline whose delays the run has (`pipeline.stages`, or
          `pipeline.delay.like`).
        - `largest_delay` of a stage, in updates.
        - `examples_per_update`, in all micro-batches of an update together.
        - `status`: finished, diverged, failed, interrupted, or unfinished while there is no summary
          of the whole run.
        - `iteration`: the newest.
        - `train_loss`: the final training loss in nats, a mean over the last 2 % of the schedule;
          NaN for a run without losses, as the next.
        - `last_quarter_loss` in nats (docs/slowdown.md).
        - `val_loss`: the newest, in nats; infinite before the first.
        - `seconds` of training.
        - `seconds_per_iteration` while nothing else used the machine (`Run.undisturbed_pace`).

    Raises:
        UserError: one of `folders` is not a folder, or none has a readable run.
    """
    paths = find_runs([folders] if isinstance(folders, str | os.PathLike) else folders)
    readable = read_each(paths, _run_and_row)
    runs = [run for _, (run, _) in readable]
    rows = [row for _, (_, row) in readable]
    _note_unknown_delays(runs)
    frame = pd.json_normalize(rows)
    frame["trajectory_version"] = _common_versions(frame)
    frame["architecture"] = _distinct_architectures(frame)
    return frame.set_index(pd.Index([path_text(path) for path, _ in readable], name="run"))


def _distinct_architectures(runs: pd.DataFrame) -> pd.Series:
    """The model of each run in words. Models with the same words get the settings that differ
    between them: `8 blocks, d 64, heads 2` and `8 blocks, d 64, heads 4`."""
    settings = [key for key in runs.columns if key.startswith("model.")]
    architectures = runs["architecture"].copy()
    for _, alike in runs.groupby("architecture", sort=False):
        differing = [key for key in settings if alike[key].map(text_of).nunique() > 1]
        append_settings(architectures, alike, differing)
    return architectures


def _common_versions(runs: pd.DataFrame) -> pd.Series:
    """A trajectory version for each run, such that the losses of runs with equal ones compare.

    A version may have changed one method alone. Then the other methods compute the same in it as in
    the version before, and a run of theirs fits several versions: a range, from an oldest to a
    newest. One version of the range has to be chosen, and it should be one that the other runs
    have, too.

    The choice: runs that fit one version alone have no choice. The newest of their versions is the
    `anchor`, and every other run gets the version of its range that is nearest to the anchor.

    For example, version 5 changed basis rotation alone, so that AdamW's runs fit 4 and 5:

    =========================  =========================  ==============
    runs of basis rotation     anchor                     AdamW's runs
    =========================  =========================  ==============
    of version 5               5                          5
    of version 4               4                          4
    of versions 4 and 5        5                          5
    none                       5, the newest of a range   5
    =========================  =========================  ==============

    In the third case, basis rotation of version 4 keeps its 4 and compares with none of the others.
    """
    oldest = runs["trajectory_version"]  # NaN while a run is under way
    newest = _newest_versions(runs)
    fits_one = oldest == newest
    anchor = oldest[fits_one].max() if fits_one.any() else newest.max()
    # min(max(anchor, oldest), newest); a run under way, which has no range, gets the anchor.
    raised = oldest.where(oldest >= anchor, anchor)
    return newest.where(newest <= anchor, raised)


def _newest_versions(runs: pd.DataFrame) -> pd.Series:
    """The newest version in which each run's method computes what it computed in the run."""
    newest = []
    for version, method in zip(runs["trajectory_version"], runs["optimizer.method"], strict=True):
        is_under_way = pd.isna(version)
        newest.append(version if is_under_way else newest_alike(int(version), method))
    return pd.Series(newest, runs.index)


def _run_and_row(path: Path) -> tuple[Run, dict[str, Any]]:
    run = read_run(path)
    return run, _row(run)


def _note_unknown_delays(runs: Sequence[Run]) -> None:
    """Say which runs of a delay function do not have its delays on record, and what to do."""
    unknown = []
    for run in runs:
        delay = run.config.pipeline.delay
        if isinstance(delay, DelayCode) and delay.facts is None:
            unknown.append(str(run.path))
    if unknown and not is_allowed():
        print(
            f"brx: note: {first_names(unknown)}: the delays of a delay function are left out: they "
            f"are not on record, as in runs of an older brx; `brx {RUN_CODE} COMMAND ...` asks the "
            f"function, which runs code that came with the run",
            file=sys.stderr,
        )


def curves(runs: pd.DataFrame | Folders) -> pd.DataFrame:
    """The losses of runs in long form: a row per run and iteration.

    Args:
        runs: rows of `load`, or folders.

    Returns:
        A frame with the columns `run` (the index of `load`), `iteration` from 1, `train_loss`,
        `smoothed` (`Run.smoothed`; NaN within half a window of either end) and `val_loss` in nats
        (NaN where there was no validation), `seconds` of training.
    """
    paths = (runs if isinstance(runs, pd.DataFrame) else load(runs)).index
    # Arrays, not a frame per run: pandas takes milliseconds for each.
    columns: dict[str, list[Series]] = {name: [] for name in _SERIES}
    for path in paths:
        run = read_run(Path(path))
        smoothed = np.full(len(run.iterations), np.nan)
        smoothed[run.centres] = run.smoothed
        columns["iteration"].append(run.iterations)
        columns["train_loss"].append(run.train_loss)
        columns["seconds"].append(run.seconds)
        columns["smoothed"].append(smoothed)
        columns["val_loss"].append(_at(run.iterations, run.val_iterations, run.val_loss))
    lengths = [len(iterations) for iterations in columns["iteration"]]
    frame = pd.DataFrame({name: np.concatenate(parts) for name, parts in columns.items()})
    frame["iteration"] = frame["iteration"].astype(int)
    frame.insert(0, "run", paths.repeat(lengths))
    return frame


_SERIES = ("iteration", "train_loss", "seconds", "smoothed", "val_loss")


def _at(
    iterations: Series,  # (n,), rising
    measured: Series,  # (m,), rising: the iterations of the values
    values: Series,  # (m,)
) -> Series:
    """The value of each iteration, (n,); NaN where there is none."""
    by_iteration = np.full(len(iterations), np.nan)
    _, places, measured_places = np.intersect1d(
        iterations, measured, assume_unique=True, return_indices=True
    )
    by_iteration[places] = values[measured_places]
    return by_iteration


def smoothed_loss(run: str) -> pd.Series:
    """The smoothed training losses of a run (of the index of `load`), in nats, by iteration."""
    read = read_run(Path(run))
    return pd.Series(read.smoothed, read.iterations[read.centres])


def validation_loss(run: str) -> pd.Series:
    """The validation losses of a run (of the index of `load`), in nats, by iteration."""
    read = read_run(Path(run))
    return pd.Series(read.val_loss, read.val_iterations)


def side_by_side(
    runs: pd.DataFrame, loss: Callable[[str], pd.Series] = smoothed_loss
) -> pd.DataFrame:
    """The losses of runs: a column per run, a row per iteration that all of them have."""
    return pd.concat({run: loss(run) for run in runs.index}, axis="columns", join="inner")


def has_pipeline_delays(runs: pd.DataFrame) -> pd.Series:
    """Whether the delays of runs are a pipeline's: its own, or a deeper one's (`like`)."""
    # A column is missing if no run has the setting.
    settings = runs.reindex(columns=["pipeline.delay", "pipeline.delay.like"])
    return settings["pipeline.delay.like"].notna() | (settings["pipeline.delay"] == "pipeline")


def _row(run: Run) -> dict[str, Any]:
    """The row of `load`. It is nested as the files are: `json_normalize` makes dotted keys."""
    fingerprint = run.summary.get("data_fingerprint")
    version = _oldest_version(run)
    settings = _settings(run.config)
    examples_per_update = None
    batch_size = settings["training"]["batch_size"]  # None if it is not known
    if batch_size is not None:
        examples_per_update = batch_size * run.config.pipeline.accumulation
    row = {
        "name": name_of_run(run.path),
        "experiment": experiment_id(run.config, fingerprint, version),
        "architecture": run.architecture,
        "method": run.method,
        "variant": run.variant,
        "unusual": ", ".join(unusual_optimizer_settings(run.config)),
        "depth": depth(run.config.pipeline),
        "largest_delay": run.largest_delay,
        "examples_per_update": examples_per_update,
        **_numbers(run),
        **run.summary,
        "iteration": int(run.iterations[-1]) if len(run.iterations) else 0,
        "status": run.status,
        "data_fingerprint": fingerprint,
        "trajectory_version": version,
        "last_iteration": run.config.training.last_iteration,
    }
    # Somebody else chose the names and texts, and a damaged file may hold anything; terminals show
    # them.
    texts = {key: shown(value) for key, value in row.items() if isinstance(value, str)}
    return row | texts | settings


def _oldest_version(run: Run) -> int | None:
    """The oldest trajectory version in which the run's method computes what it computed in the run;
    None while the run is under way."""
    if not run.summary:
        return None
    return oldest_alike(recorded_version(run.summary), run.config.optimizer.method)


def _settings(config: RunConfig) -> dict[str, Any]:
    """The settings by section and key; None for those that a recorded run, from a user's own loop,
    does not know."""
    settings = config.model_dump(mode="json")
    if config.is_recorded:
        known = config.model_dump(mode="json", exclude_unset=True)
        for name, section in settings.items():
            settings[name] = dict.fromkeys(section) | known.get(name, {})
    for section in sections_of_code(settings):
        section.pop("facts", None)  # follow from the settings, and tell no runs apart
    return settings


def _numbers(run: Run) -> dict[str, float]:
    """The columns of `load` with a run's losses and times; NaN for a run without training
    losses."""
    numbers = {
        "train_loss": math.nan,
        "last_quarter_loss": math.nan,
        "val_loss": float(run.val_loss[-1]) if len(run.val_loss) else math.inf,
        "seconds": math.nan,
        "seconds_per_iteration": math.nan,
    }
    if len(run.train_loss):
        numbers["train_loss"] = float(run.smoothed[-1])
        numbers["last_quarter_loss"] = last_quarter_loss(run.train_loss)
        numbers["seconds"] = float(run.seconds[-1])
        numbers["seconds_per_iteration"] = run.undisturbed_pace
    return numbers
