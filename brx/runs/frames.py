"""Reads runs for analyses.

`Run` is one run's folder, read. `load` gives a frame with a row per run, `curves` a frame with a
row per run and iteration. `comparable` divides runs into sets whose losses compare.
"""

import hashlib
import math
import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import pandas as pd

from brx.config.loading import config_of, sections_of_code
from brx.config.schema import (
    RECORDED,
    BasisRotationConfig,
    DelayCode,
    DelayCompensationConfig,
    DelayLike,
    RunConfig,
)
from brx.config.user_code import RUN_CODE, is_allowed, name_without_folder, reading
from brx.errors import UserError
from brx.methods.trajectory_version import newest_alike, oldest_alike, recorded_version
from brx.names import path_of_text, path_text, shown
from brx.pipeline.delay import StageDelay, depth, noted_delays, stage_delays
from brx.runs.cache import FileState, file_states, read_parsed
from brx.runs.folder import SEED as SEED
from brx.runs.folder import (
    decides_trajectory,
    find_runs,
    name_of_run,
    read_each,
    settings_key,
    status_of,
)
from brx.runs.slowdown import Series, last_quarter_loss

Folders = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]

RATE = "optimizer.lr"
DEPTH = "depth"
MOST_NAMES = 3  # how many runs a line names when there are many
ORIGIN = ("data_fingerprint", "trajectory_version", "last_iteration")
"""Properties that decide a run's losses in addition to its settings: its data, the version of brx's
numbers, and its last iteration."""

MOST_BYTES = 2**28
"""How much memory may keep runs that have been read: enough for 800 runs of 10,000 iterations."""
SETTINGS_BYTES = 20_000
"""About how much memory the settings and the summary of a run take."""

SMOOTHING = 0.02  # the share of a run's iterations over which its training loss is averaged
PACE_EVERY = 20  # iterations over which a run's pace is measured
UNDISTURBED = 0.05  # this quantile of a run's paces counts as its undisturbed pace

NAMED = {
    "method",
    "lr",
    "code_sha256",
    "facts",
    "source",
    "geometry",
    "refresh_schedule",
    "compensation",
}
"""Settings of optimizers that `unusual_settings` leaves out."""


@dataclass(frozen=True)
class Run:
    """One run's folder, read; losses in nats."""

    path: Path
    config: RunConfig
    summary: dict[str, Any]  # empty while the run is under way
    iterations: Series  # (n,): iterations of the training losses, from 1
    train_loss: Series  # (n,)
    seconds: Series  # (n,): training time up to each iteration, without validations and checkpoints
    val_iterations: Series  # (m,)
    val_loss: Series  # (m,)

    @classmethod
    def load(cls, path: Path, states: tuple[FileState, ...] | None = None) -> Self:
        """Read a run's folder.

        Args:
            path: the folder.
            states: the states of its files (`brx.runs.cache.file_states`), if they have just been
                taken.

        Raises:
            UserError: it is not a run's folder, is damaged, or has no training loss yet.
        """
        config_path = path / "config.yaml"
        if not config_path.is_file():
            raise UserError(f"{path}: not a run's folder (it has no config.yaml)")
        parsed = read_parsed(path, states)
        config = config_of(parsed.settings, str(config_path))
        return cls(path, config, parsed.summary, *parsed.curves)

    @property
    def delays(self) -> list[StageDelay]:
        """The delay of each stage.

        If a function of the user's own gives the delays, these are the ones that the run recorded.

        Raises:
            UserError: the run is older than such records, and its function may not run.
        """
        pipeline = self.config.pipeline
        if isinstance(pipeline.delay, DelayCode) and pipeline.delay.facts is not None:
            return noted_delays(pipeline)
        with reading():
            return stage_delays(pipeline, self.config.training.seed)

    @property
    def largest_delay(self) -> float:
        """The largest delay of a stage, in updates: 0 without delay, NaN if `delays` fails."""
        try:
            return max(delay.tau_updates for delay in self.delays)
        except UserError:
            return math.nan

    @property
    def architecture(self) -> str:
        """The model in a few words; the task if the run was recorded from a user's own loop."""
        if self.config.is_recorded:
            return self.config.data.source
        return self.config.model.in_words

    @property
    def method(self) -> str:
        """The method, with its strategy if that is not the usual one: `basis-rotation
        1st/unilateral`."""
        optimizer = self.config.optimizer
        if self.config.is_recorded:
            return optimizer.method.removeprefix(RECORDED).replace("_", "-")
        name = name_without_folder(optimizer.method)
        if isinstance(optimizer, BasisRotationConfig):
            if (optimizer.source, optimizer.geometry) != ("2nd", "bilateral"):
                name += f" {optimizer.source}/{optimizer.geometry}"
            if optimizer.refresh_schedule != "uniform":
                name += f" {optimizer.refresh_schedule}"
        return name

    @property
    def variant(self) -> str:
        """The method and everything else about it that differs from its usual form, separated by
        commas."""
        optimizer = self.config.optimizer
        pipeline = self.config.pipeline
        parts = [self.method, *unusual_settings(self.config)]
        if isinstance(optimizer, BasisRotationConfig) and optimizer.frequency != 10:
            parts.append(f"refresh every {optimizer.frequency}")
        if isinstance(optimizer, DelayCompensationConfig):
            parts.append(f"lambda {optimizer.compensation:g}")
        if pipeline.stash == "none":
            parts.append("no stashing")
        if pipeline.stash == "predict":
            parts.append("weight prediction")
        if pipeline.forecast is not None:
            parts.append(f"forecast by {pipeline.forecast.replace('-', ' ')}")
        if pipeline.delay != "pipeline" and not isinstance(pipeline.delay, DelayLike):
            parts.append(f"delay {pipeline.delay_text}")
        if self.config.is_recorded and pipeline.accumulation > 1:
            parts.append(f"M = {pipeline.accumulation}")
        return ", ".join(parts)

    @property
    def status(self) -> str:
        """finished, diverged, failed, interrupted or unfinished (`brx.runs.folder.status_of`)."""
        return status_of(self.summary, self.config)

    @cached_property
    def smoothed(self) -> Series:
        """Running means of the training loss, in nats: the window is 2 % of the schedule.

        A mean belongs to the middle of its window: `iterations[centres]`.
        """
        window = self._window
        # The mean of losses i+1 .. i+w is (S[i+w] - S[i]) / w, with the sums S[0] = 0, S[1], ...
        sums = np.cumsum(np.concatenate([[0.0], self.train_loss]))
        with np.errstate(invalid="ignore"):  # NaN after the first loss that is infinite
            means: Series = (sums[window:] - sums[:-window]) / window
        return means

    @property
    def centres(self) -> slice:
        """The indices, into `iterations`, of the smoothed losses."""
        return slice(self._window // 2, len(self.iterations) - self._window // 2)

    @property
    def _window(self) -> int:
        """The length of the window of `smoothed`: an odd number of iterations."""
        longest = min(SMOOTHING * self.config.training.iterations, len(self.iterations))
        return max(1, 2 * math.ceil(longest / 2) - 1)

    @property
    def undisturbed_pace(self) -> float:
        """Seconds per iteration while nothing else used the machine.

        Other work only slows a run, so a low quantile of its paces comes from its quiet moments.
        """
        marks = self.seconds[::PACE_EVERY]
        if len(marks) < 2:
            return float(self.seconds[-1] / self.iterations[-1])
        return _quantile(np.diff(marks) / PACE_EVERY, UNDISTURBED)


def _quantile(
    values: Series,  # (n,)
    share: float,
) -> float:
    """The same as `numpy.quantile`, ten times as fast: a frame needs one per run."""
    ordered = np.sort(values)  # NaN at the end
    if np.isnan(ordered[-1]):
        return math.nan
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    low = float(ordered[below])
    high = float(ordered[min(below + 1, len(ordered) - 1)])
    part = place - below
    # From the nearer end, as numpy does.
    return high - (high - low) * (1 - part) if part >= 0.5 else low + (high - low) * part


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
        differing = [key for key in settings if alike[key].map(_as_text).nunique() > 1]
        for key in differing:
            values = alike[key].map(_as_text)
            parts = f", {key.removeprefix('model.')} " + values
            architectures[alike.index] += parts.where(values != "", "")
    return architectures


def _as_text(value: Any) -> str:
    """A setting as a text; empty where it is missing (None, NaN)."""
    is_missing = value is None or value != value
    return "" if is_missing else str(value)


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
            f"brx: note: {first_names(unknown)}: trained before brx noted the delays of a delay "
            f"function, which are left out; brx {RUN_CODE} COMMAND ... runs the function, of code "
            f"that came with the run",
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


def same_but_for(runs: pd.DataFrame, *settings: str) -> pd.Series:
    """Label runs so that two runs with the same label are equal except for the named settings.

    The origin (`ORIGIN`) and all other settings that decide numbers are compared.

    Args:
        runs: rows of `load`.
        settings: dotted keys (`training.seed`) or whole sections (`optimizer`).

    Returns:
        An integer per run.
    """
    ignored = tuple(f"{setting}." for setting in settings)
    decisive = [key for key in runs.columns if decides_trajectory(key)]
    kept = [key for key in decisive if not f"{key}.".startswith(ignored)]
    # Each run's values as one text: pandas takes milliseconds to group by a hundred columns, and
    # some of them hold lists.
    rows = zip(*(runs[key].tolist() for key in (*ORIGIN, *kept)), strict=True)
    texts = [repr([_without_nan(value) for value in row]) for row in rows]
    return pd.Series(pd.factorize(pd.Series(texts, dtype=object))[0], runs.index)


def _without_nan(value: Any) -> Any:
    """The value; None in the place of NaN, by which pandas says that a run has no such setting."""
    return None if value != value else value


def experiment_id(
    config: RunConfig,
    data_fingerprint: str | None,
    trajectory_version: int | None,
    second: str | None = None,
) -> str:
    """The text that is equal for runs that differ only in learning rate and seed.

    Args:
        config: the settings of a run.
        data_fingerprint: the fingerprint of the data that it was trained on.
        trajectory_version: the trajectory version of the brx that trained it, or any other in which
            its method computes the same: the text is equal for all of them.
        second: a further setting, as a dotted key, in which the runs may differ.
    """
    if trajectory_version is not None:
        trajectory_version = oldest_alike(trajectory_version, config.optimizer.method)
    ignored = [RATE, SEED]
    if second:
        ignored.append(second)
    settings = settings_key(config, without=ignored)
    text = f"{settings} {config.training.last_iteration} {data_fingerprint} {trajectory_version}"
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def has_pipeline_delays(runs: pd.DataFrame) -> pd.Series:
    """Whether the delays of runs are a pipeline's: its own, or a deeper one's (`like`)."""
    # A column is missing if no run has the setting.
    settings = runs.reindex(columns=["pipeline.delay", "pipeline.delay.like"])
    return settings["pipeline.delay.like"].notna() | (settings["pipeline.delay"] == "pipeline")


def comparable(runs: pd.DataFrame, *, any_split: bool = False) -> list[pd.DataFrame]:
    """Divide runs into sets whose losses compare, the largest set first.

    Settings shared by every method of a set are dropped from variant names.

    Args:
        runs: rows of `load`.
        any_split: runs compare if their updates have equal numbers of examples, however these are
            divided into micro-batches.
    """
    keys: list[str] = []
    for columns in _aspects(runs, any_split=any_split).values():
        keys += columns
    sets = []
    for _, alike in runs.groupby(keys, dropna=False, sort=False):
        variants = without_settings(alike["variant"], _shared_settings(alike))
        sets.append(alike.assign(variant=variants))
    return sorted(sets, key=len, reverse=True)


def _shared_settings(runs: pd.DataFrame) -> list[str]:
    """The unusual settings that are shared by all runs whose methods have such a setting.

    A setting that only one method has is not among them: it belongs to the method's name.
    """
    texts = runs["unusual"].str.split(", ")  # by run, each as `key value`
    shared = []
    for text in texts.explode().unique():
        key, _, _ = text.partition(" ")
        settings = runs.get(f"optimizer.{key}")
        if settings is None:
            continue
        has_it = np.array([text in run_texts for run_texts in texts])
        is_of_all = (has_it == settings.notna()).all()
        num_methods = runs.loc[has_it, "method"].nunique()
        if is_of_all and num_methods > 1:
            shared.append(text)
    return shared


def without_settings(variants: pd.Series, unusual: Sequence[str]) -> pd.Series:
    """Names of variants (`Run.variant`) without some of `unusual_settings`."""

    def shorten(variant: str) -> str:
        return ", ".join(part for part in variant.split(", ") if part not in unusual)

    return variants.map(shorten)


def differences(runs: pd.DataFrame) -> list[str]:
    """Say what makes runs incomparable with the first of them: a line for all that differ from it
    in the same aspects."""
    first = runs.index[0]
    aspects = _differing_aspects(runs)
    lines = []
    for differing, others in aspects[aspects != ""].groupby(aspects, sort=False):
        names = first_names([*others.index])
        lines.append(f"{names} and {first} differ in {differing}: their losses do not compare")
    return lines


def _differing_aspects(runs: pd.DataFrame, *, any_split: bool = False) -> pd.Series:
    """For each run but the first: the aspects in which it cannot be compared with the first, in
    words; empty if there are none."""
    differing: list[list[str]] = [[] for _ in range(len(runs))]
    for aspect, keys in _aspects(runs, any_split=any_split).items():
        # A tuple per run with a value per key: pandas takes a millisecond to compare two rows.
        rows = list(zip(*(runs[key].tolist() for key in keys), strict=True))
        for aspects, row in zip(differing, rows, strict=True):
            if not all(map(_is_same, row, rows[0])):
                aspects.append(aspect)
    texts = [", ".join(aspects) for aspects in differing[1:]]
    return pd.Series(texts, runs.index[1:], dtype=object)


def _is_same(one: Any, other: Any) -> bool:
    """Whether two values of a frame are equal, or both missing (None, NaN)."""
    is_missing = [value is None or value != value for value in (one, other)]
    return all(is_missing) or bool(one == other)


def left_out(
    shown: pd.DataFrame, others: list[pd.DataFrame], *, any_split: bool = False
) -> dict[str, pd.DataFrame]:
    """The runs of other sets of `comparable`, by what makes them incomparable with those shown.

    Keys are texts, such as `data fingerprint, iterations`.
    """
    first_and_others = pd.concat([shown.iloc[:1], *others])
    aspects = _differing_aspects(first_and_others, any_split=any_split)
    return dict(iter(first_and_others.iloc[1:].groupby(aspects, sort=False)))


def first_names(names: Sequence[str]) -> str:
    """The first few names, and how many more there are: `a, b, c and 4 more`."""
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


def _aspects(runs: pd.DataFrame, *, any_split: bool) -> dict[str, list[str]]:
    """The columns that must be equal for losses to be comparable, by a name for what they are."""
    aspects = {
        "data fingerprint": ["data_fingerprint"],
        "trajectory version": ["trajectory_version"],
        "model": [key for key in runs.columns if key.startswith("model.")],
        "iterations": ["training.iterations", "last_iteration"],
    }
    if any_split:
        aspects["examples per update"] = ["examples_per_update"]
    else:
        aspects["batch size"] = ["training.batch_size"]
        aspects["micro-batches per update"] = ["pipeline.accumulation"]
    return aspects


def read_run(path: Path) -> Run:
    """Read a run's folder; it is read again only after one of its files has changed.

    Args:
        path: the folder, also as a frame's index has it (`brx.names.path_text`).

    Raises:
        UserError: as `Run.load`.
    """
    path = path_of_text(path)
    return _recent.run(path, file_states(path))


def unusual_settings(config: RunConfig) -> list[str]:
    """The optimizer's settings that are not defaults, as `key value`.

    Settings that `Run.method` or `Run.variant` names in its own words are left out.
    """
    optimizer = config.optimizer
    unusual = {key: getattr(optimizer, key) for key in optimizer.model_dump(exclude_defaults=True)}
    unusual |= unusual.pop("arguments", {})  # the arguments of an optimizer of the user's choice
    named = NAMED
    if isinstance(optimizer, BasisRotationConfig):
        named = NAMED | {"frequency"}
    texts = []
    for key, value in unusual.items():
        if key not in named:
            text = f"{value:g}" if isinstance(value, float) else str(value)
            texts.append(f"{key} {text}")
    return texts


class _RecentRuns:
    """The runs that were read last, as many as fit into `MOST_BYTES`.

    Commands read all runs several times in the same order. With room for n runs, a folder of n + 1
    would be parsed again in each pass, so the room is large and counted in bytes.
    """

    def __init__(self) -> None:
        self._runs: OrderedDict[Path, tuple[tuple[FileState, ...], Run]] = OrderedDict()
        self._num_bytes = 0

    def run(self, path: Path, states: tuple[FileState, ...]) -> Run:
        """The run in a folder whose files have these states: kept, or read now."""
        known = self._runs.get(path)
        if known is not None and known[0] == states:
            self._runs.move_to_end(path)
            return known[1]
        run = Run.load(path, states)
        self._drop(path)
        self._runs[path] = (states, run)
        self._num_bytes += _size(run)
        while self._num_bytes > MOST_BYTES:
            self._drop(next(iter(self._runs)))
        return run

    def _drop(self, path: Path) -> None:
        if path in self._runs:
            _, run = self._runs.pop(path)
            self._num_bytes -= _size(run)


def _size(run: Run) -> int:
    """About the bytes that a run takes in memory."""
    # iterations, train_loss, seconds and smoothed; val_iterations and val_loss
    num_values = 4 * len(run.iterations) + 2 * len(run.val_iterations)
    return 8 * num_values + SETTINGS_BYTES


_recent = _RecentRuns()


def _row(run: Run) -> dict[str, Any]:
    """The row of `load`. It is nested as the files are: `json_normalize` makes dotted keys."""
    fingerprint = run.summary.get("data_fingerprint")
    version = _oldest_version(run)
    settings = _settings(run.config)
    batch_size = settings["training"]["batch_size"]  # None if it is not known
    row = {
        "name": name_of_run(run.path),
        "experiment": experiment_id(run.config, fingerprint, version),
        "architecture": run.architecture,
        "method": run.method,
        "variant": run.variant,
        "unusual": ", ".join(unusual_settings(run.config)),
        "depth": depth(run.config.pipeline),
        "largest_delay": run.largest_delay,
        "examples_per_update": batch_size and batch_size * run.config.pipeline.accumulation,
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
