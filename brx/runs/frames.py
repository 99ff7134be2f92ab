"""Runs as the analyses read them: `Run`; `load` gives a frame of a row per run, `curves` their
losses in long form."""

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
    read_each,
    settings_key,
    status_of,
)
from brx.runs.slowdown import Series, last_quarter_loss

Folders = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]

RATE, DEPTH = "optimizer.lr", "depth"
MOST_NAMES = 3  # runs that one line names, out of many
ORIGIN = ("data_fingerprint", "trajectory_version", "last_iteration")
"""Properties that decide a run's losses in addition to its settings: its data, the version of brx's
numbers, and its last iteration."""

MOST_BYTES = 2**28
"""Of runs that stay in memory: 800 of 10,000 iterations."""
SETTINGS_BYTES = 20_000
"""About what the settings and the summary of a run take in memory."""

SMOOTHING = 0.02  # the share of a run's iterations over which its training loss is averaged

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
    iterations: Series  # iterations of the training losses, from 1
    train_loss: Series
    seconds: Series  # training time at each iteration, without validations and checkpoints
    val_iterations: Series
    val_loss: Series

    @classmethod
    def load(cls, path: Path, states: tuple[FileState, ...] | None = None) -> Self:
        """Read a run's folder.

        Args:
            path: the folder.
            states: of its files, if they have just been taken (`brx.runs.cache.file_states`).

        Raises:
            UserError: it is no run's folder, or has no training loss yet.
        """
        config_path = path / "config.yaml"
        if not config_path.is_file():
            raise UserError(f"{path}: not a run's folder (it has no config.yaml)")
        parsed = read_parsed(path, states)
        config = config_of(parsed.settings, str(config_path))
        return cls(path, config, parsed.summary, *parsed.curves)

    @property
    def delays(self) -> list[StageDelay]:
        """The delay of each stage; of a function of the user's own, what the run has noted of it.

        Raises:
            UserError: the run is older than such notes, and its function may not run.
        """
        pipeline = self.config.pipeline
        if isinstance(pipeline.delay, DelayCode) and pipeline.delay.facts is not None:
            return noted_delays(pipeline)
        with reading():
            return stage_delays(pipeline, self.config.training.seed)

    @property
    def largest_delay(self) -> float:
        """The largest delay of a stage, in updates; 0 without delay, NaN where it is not known (see
        `delays`)."""
        try:
            return max(delay.tau_updates for delay in self.delays)
        except UserError:
            return math.nan

    @property
    def architecture(self) -> str:
        """The model in a few words; of a recorded run the task."""
        if self.config.is_recorded:
            return self.config.data.source
        return self.config.model.in_words

    @property
    def method(self) -> str:
        """The method with what tells its variants apart, for example `basis-rotation
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
        """The method, and what else about it differs from its usual form."""
        optimizer, parts = self.config.optimizer, [self.method, *unusual_settings(self.config)]
        if isinstance(optimizer, BasisRotationConfig) and optimizer.frequency != 10:
            parts.append(f"refresh every {optimizer.frequency}")
        if isinstance(optimizer, DelayCompensationConfig):
            parts.append(f"lambda {optimizer.compensation:g}")
        if self.config.pipeline.stash != "exact":
            parts.append(
                {"none": "no stashing", "predict": "weight prediction"}[self.config.pipeline.stash]
            )
        if self.config.pipeline.forecast is not None:
            parts.append(f"forecast by {self.config.pipeline.forecast.replace('-', ' ')}")
        delay = self.config.pipeline.delay
        if delay != "pipeline" and not isinstance(delay, DelayLike):
            parts.append(f"delay {self.config.pipeline.delay_text}")
        if self.config.is_recorded and self.config.pipeline.accumulation > 1:
            parts.append(f"M = {self.config.pipeline.accumulation}")
        return ", ".join(parts)

    @property
    def status(self) -> str:
        return status_of(self.summary, self.config)

    @cached_property
    def smoothed(self) -> Series:
        """Means of the training loss over 2 % of the schedule, each of the middle of its window
        (`centres`)."""
        window = self._window
        sums = np.cumsum(np.concatenate([[0.0], self.train_loss]))
        means: Series = (sums[window:] - sums[:-window]) / window
        return means

    @property
    def centres(self) -> slice:
        """The indices, into `iterations`, of the smoothed losses."""
        return slice(self._window // 2, len(self.iterations) - self._window // 2)

    @property
    def _window(self) -> int:
        """An odd number of iterations."""
        longest = min(SMOOTHING * self.config.training.iterations, len(self.iterations))
        return max(1, 2 * math.ceil(longest / 2) - 1)

    @property
    def undisturbed_pace(self) -> float:
        """Seconds per iteration, the 5 % quantile of the pace over 20: other work of a machine only
        slows runs."""
        marks = self.seconds[::20]
        if len(marks) < 2:
            return float(self.seconds[-1] / self.iterations[-1])
        return _quantile(np.diff(marks) / 20, 0.05)


def _quantile(
    values: Series,  # (n,)
    share: float,
) -> float:
    """What `numpy.quantile` gives, in a tenth of its time: a frame needs one per run."""
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
    """All runs of some folders (runs, or folders that hold some) that have losses or diverged, a
    row per run.

    The index `run` is the path of its folder. Columns are all settings and all of summary.json by
    their dotted keys (`pipeline.stages`, `optimizer.method`, `versions.torch`; NaN where a run has
    no such key), and:

    - `name` of the run's folder (texts are without control characters: `brx.names.shown`);
      `architecture`, `method`, `variant`: the settings in a few words; `architecture` is equal for
      runs of one model only; `experiment`: equal for runs that differ only in learning rate and
      seed.
    - `depth`: P, the stages of the pipeline whose delays it has (`pipeline.stages`, or
      `pipeline.delay.like`); `largest_delay` of its stages, in updates; `examples_per_update`, of
      all its micro-batches together.
    - `status`: finished, diverged, failed, interrupted, or unfinished where there is no summary of
      the whole run yet; `iteration`: the newest.
    - `train_loss`: the final training loss in nats, a mean over the last 2 % of the schedule;
      `last_quarter_loss` (see docs/slowdown.md); `val_loss`: the newest, infinite before the first.
      NaN where a run has no losses.
    - `seconds` of training; `seconds_per_iteration` while nothing else used the machine
      (`Run.undisturbed_pace`).

    A damaged run is left out, and named on stderr (`brx.runs.folder.read_each`). UserError where
    one of them is no folder, or there is no readable run in any."""
    paths = find_runs([folders] if isinstance(folders, str | os.PathLike) else folders)
    found = read_each(paths, _run_and_row)
    _note_unknown_delays([run for _, (run, _) in found])
    frame = pd.json_normalize([row for _, (_, row) in found])
    frame["trajectory_version"] = _common_versions(frame)
    frame["architecture"] = _distinct_architectures(frame)
    return frame.set_index(pd.Index([path_text(path) for path, _ in found], name="run"))


def _distinct_architectures(runs: pd.DataFrame) -> pd.Series:
    """The model of each run in words. Models with the same words get the settings that differ
    between them: `8 blocks, d 64, heads 2` and `8 blocks, d 64, heads 4`."""
    settings = [key for key in runs.columns if key.startswith("model.")]
    architectures = runs["architecture"].copy()
    for _, alike in runs.groupby("architecture", sort=False):
        differing = [key for key in settings if alike[key].map(_as_text).nunique() > 1]
        for key in differing:
            values = alike[key].map(_as_text)
            parts = values.map(lambda value, key=key: f", {key.partition('.')[2]} {value}")
            architectures[alike.index] += parts.where(values != "", "")
    return architectures


def _as_text(value: Any) -> str:
    """A setting as a text; empty where it is missing (None, NaN)."""
    is_missing = value is None or value != value
    return "" if is_missing else str(value)


def _common_versions(runs: pd.DataFrame) -> pd.Series:
    """The trajectory version of each run, such that runs with equal ones may be compared.

    A version that changed one method alone left the others as they were. So a run of another
    method has the numbers of several versions, from an oldest to a newest. It gets the one that
    most other runs can have, too: the newest version that some run has alone, or the end of its own
    range that is nearest to it. Where no run has one version alone, it is the newest of all.

    For example, version 5 changed basis rotation alone. Then AdamW has the numbers of versions 4
    and 5, whichever of them recorded a run. Next to basis rotation of version 5 its runs get 5.
    Next to basis rotation of version 4 alone they get 4. Next to both they get 5, and basis
    rotation of version 4 compares with none of the others.
    """
    oldest = runs["trajectory_version"]
    newest_of_runs = []
    for version, method in zip(oldest, runs["optimizer.method"], strict=True):
        newest_of_runs.append(version if pd.isna(version) else newest_alike(int(version), method))
    newest = pd.Series(newest_of_runs, runs.index)
    only_one = oldest[oldest == newest]
    common = only_one.max() if len(only_one) else newest.max()
    nearest = oldest.where(oldest >= common, common)
    return newest.where(newest <= common, nearest)


def _run_and_row(path: Path) -> tuple[Run, dict[str, Any]]:
    run = read_run(path)
    return run, _row(run)


def _note_unknown_delays(runs: Sequence[Run]) -> None:
    """Say which runs are older than what brx notes of delay functions, and what to do."""
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
    """The losses of runs (rows of `load`, or folders) in long form: a row per run and iteration.

    Columns: `run` (the index of `load`), `iteration` from 1, `train_loss` and `val_loss` in nats
    (NaN where there was no validation), `smoothed` (see `Run.smoothed`; NaN within half a window of
    either end), `seconds` of training."""
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
    found = np.full(len(iterations), np.nan)
    _, places, measured_places = np.intersect1d(
        iterations, measured, assume_unique=True, return_indices=True
    )
    found[places] = values[measured_places]
    return found


def smoothed_loss(run: str) -> pd.Series:
    read = read_run(Path(run))
    return pd.Series(read.smoothed, read.iterations[read.centres])


def validation_loss(run: str) -> pd.Series:
    read = read_run(Path(run))
    return pd.Series(read.val_loss, read.val_iterations)


def side_by_side(
    runs: pd.DataFrame, loss: Callable[[str], pd.Series] = smoothed_loss
) -> pd.DataFrame:
    """The losses of runs: a column per run, a row per iteration that all of them have."""
    return pd.concat({run: loss(run) for run in runs.index}, axis="columns", join="inner")


def same_but_for(runs: pd.DataFrame, *settings: str) -> pd.Series:
    """A label per run. Runs with one origin have equal labels if their settings that decide numbers
    agree, except for the named ones.

    Named are dotted keys (`training.seed`) or whole sections (`optimizer`).
    """
    left_out = tuple(f"{setting}." for setting in settings)
    kept = [
        key
        for key in runs.columns
        if decides_trajectory(key) and not f"{key}.".startswith(left_out)
    ]
    # As texts: pandas takes milliseconds to group by a hundred columns, and some hold lists. NaN is
    #     no value.
    rows = zip(*(runs[key].tolist() for key in (*ORIGIN, *kept)), strict=True)
    texts = [repr([None if value != value else value for value in row]) for row in rows]
    return pd.Series(pd.factorize(pd.Series(texts, dtype=object))[0], runs.index)


def experiment_id(
    config: RunConfig,
    data_fingerprint: str | None,
    trajectory_version: int | None,
    second: str | None = None,
) -> str:
    """The `experiment` of runs with these settings, whatever their learning rate and seed, and of
    this origin; with `second`, whatever that setting is, too (a dotted key)."""
    settings = settings_key(config, without=(RATE, SEED, *((second,) if second else ())))
    text = f"{settings} {config.training.last_iteration} {data_fingerprint} {trajectory_version}"
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def has_pipeline_delays(runs: pd.DataFrame) -> pd.Series:
    """Whether the delays of runs are a pipeline's: its own, or a deeper one's (`like`)."""
    # A column is missing if no run has the setting.
    settings = runs.reindex(columns=["pipeline.delay", "pipeline.delay.like"])
    return settings["pipeline.delay.like"].notna() | (settings["pipeline.delay"] == "pipeline")


def comparable(runs: pd.DataFrame, *, any_split: bool = False) -> list[pd.DataFrame]:
    """Sort runs by what makes losses comparable (`_aspects`); most runs first. `any_split`: in any
    micro-batches.

    Settings shared by every method of a set are dropped from variant names.
    """
    keys = [key for aspect in _aspects(runs, any_split=any_split).values() for key in aspect]
    sets = [alike for _, alike in runs.groupby(keys, dropna=False, sort=False)]
    sets = [
        alike.assign(variant=without_settings(alike["variant"], _shared_settings(alike)))
        for alike in sets
    ]
    return sorted(sets, key=len, reverse=True)


def _shared_settings(runs: pd.DataFrame) -> list[str]:
    """Those of `unusual_settings` that several methods have, and every run whose method has such a
    setting."""
    texts = runs["unusual"].str.split(", ")
    shared = []
    for text in texts.explode().unique():
        has_it = np.array([text in of_run for of_run in texts])
        settings = runs.get(f"optimizer.{text.split(' ')[0]}")
        if (
            settings is not None
            and (has_it == settings.notna()).all()
            and runs.loc[has_it, "method"].nunique() > 1
        ):
            shared.append(text)
    return shared


def without_settings(variants: pd.Series, unusual: Sequence[str]) -> pd.Series:
    """Names of variants without some of `unusual_settings`."""
    return variants.map(
        lambda variant: ", ".join(part for part in variant.split(", ") if part not in unusual)
    )


def differences(runs: pd.DataFrame) -> list[str]:
    """What makes runs incomparable with the first of them: a line per run, none if they compare."""
    by_run = _differing_aspects(runs).items()
    first = runs.index[0]
    return [
        f"{run} and {first} differ in {aspects}: their losses do not compare"
        for run, aspects in by_run
        if aspects
    ]


def _differing_aspects(runs: pd.DataFrame, *, any_split: bool = False) -> pd.Series:
    """What makes each run incomparable with the first of them, in words; see `comparable`."""
    differing: list[list[str]] = [[] for _ in range(len(runs))]
    for aspect, keys in _aspects(runs, any_split=any_split).items():
        # A row per run, (keys,): pandas takes a millisecond to compare two rows.
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
    """The runs of other sets of `comparable` by what makes them incomparable with those shown, in
    words."""
    rest = pd.concat([shown.iloc[:1], *others])
    return dict(
        iter(rest.iloc[1:].groupby(_differing_aspects(rest, any_split=any_split), sort=False))
    )


def first_names(names: Sequence[str]) -> str:
    """The first few, and how many more there are."""
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


def _aspects(runs: pd.DataFrame, *, any_split: bool) -> dict[str, list[str]]:
    """The columns that must be equal for losses to compare, by what they are about."""
    whole = {"examples per update": ["examples_per_update"]}
    split = {
        "batch size": ["training.batch_size"],
        "micro-batches per update": ["pipeline.accumulation"],
    }
    return {
        "data fingerprint": ["data_fingerprint"],
        "trajectory version": ["trajectory_version"],
        "model": [key for key in runs.columns if key.startswith("model.")],
        "iterations": ["training.iterations", "last_iteration"],
        **(whole if any_split else split),
    }


def read_run(path: Path) -> Run:
    """A run, read again only after one of its files has changed (`brx.runs.cache.file_states`).

    Args:
        path: its folder, also as a frame's index has it (`brx.names.path_text`).
    """
    path = path_of_text(path)
    return _recent.run(path, file_states(path))


def unusual_settings(config: RunConfig) -> list[str]:
    """The optimizer's settings that are not defaults, and that `method` and `variant` do not name,
    as `key value`."""
    optimizer = config.optimizer
    unusual = {key: getattr(optimizer, key) for key in optimizer.model_dump(exclude_defaults=True)}
    unusual |= unusual.pop("arguments", {})
    named = NAMED | ({"frequency"} if isinstance(optimizer, BasisRotationConfig) else set())
    return [
        f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in unusual.items()
        if key not in named
    ]


class _RecentRuns:
    """The runs that were read last, as many as `MOST_BYTES` of curves.

    Commands read all runs several times in the same order. A limit on their number would make each
    pass parse them again as soon as there is one more.
    """

    def __init__(self) -> None:
        self._runs: OrderedDict[Path, tuple[tuple[FileState, ...], Run]] = OrderedDict()
        self._num_bytes = 0

    def run(self, path: Path, states: tuple[FileState, ...]) -> Run:
        """The run whose files have these states."""
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
    """The bytes of a run's series, smoothed losses among them, and about the bytes of the rest."""
    num_values = 4 * len(run.iterations) + 2 * len(run.val_iterations)
    return 8 * num_values + SETTINGS_BYTES


_recent = _RecentRuns()


def _row(run: Run) -> dict[str, Any]:
    """Nested as the files are: `json_normalize` makes dotted keys of it."""
    has_losses = len(run.train_loss) > 0
    fingerprint = run.summary.get("data_fingerprint")
    method = run.config.optimizer.method
    # Versions that left the method alone count as one.
    version = oldest_alike(recorded_version(run.summary), method) if run.summary else None
    settings = run.config.model_dump(mode="json")
    if run.config.is_recorded:  # None for settings that are unknown for a user's own loop
        known = run.config.model_dump(mode="json", exclude_unset=True)
        settings = {
            name: dict.fromkeys(section) | known.get(name, {}) for name, section in settings.items()
        }
    for section in sections_of_code(settings):
        section.pop("facts", None)  # no setting: it tells no runs apart
    batch_size = settings["training"]["batch_size"]
    row = {
        "name": run.path.name,
        "experiment": experiment_id(run.config, fingerprint, version),
        "architecture": run.architecture,
        "method": run.method,
        "variant": run.variant,
        "unusual": ", ".join(unusual_settings(run.config)),
        "depth": depth(run.config.pipeline),
        "largest_delay": run.largest_delay,
        "examples_per_update": batch_size and batch_size * run.config.pipeline.accumulation,
        "train_loss": float(run.smoothed[-1]) if has_losses else math.nan,
        "last_quarter_loss": last_quarter_loss(run.train_loss) if has_losses else math.nan,
        "val_loss": float(run.val_loss[-1]) if len(run.val_loss) else math.inf,
        "seconds": float(run.seconds[-1]) if has_losses else math.nan,
        "seconds_per_iteration": run.undisturbed_pace if has_losses else math.nan,
        **run.summary,
        "iteration": int(run.iterations[-1]) if has_losses else 0,
        "status": run.status,
        "data_fingerprint": fingerprint,
        "trajectory_version": version,
        "last_iteration": run.config.training.last_iteration,
    }
    # Names and texts are somebody's, maybe of a damaged file; tables and terminals show them.
    texts = {key: shown(value) for key, value in row.items() if isinstance(value, str)}
    return row | texts | settings
