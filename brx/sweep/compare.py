"""The protocol of `brx compare`: the same runs for every method (docs/compare.md says why
these)."""

import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from brx.config.loading import load_config, validate
from brx.config.parsing import parse_value
from brx.errors import UserError
from brx.methods.trajectory_version import TRAJECTORY_VERSION, newest_alike, recorded_version
from brx.runs.comparison import leaderboard
from brx.runs.experiments import at_best_rates
from brx.runs.folder import RunFolder
from brx.runs.frames import DEPTH, SEED, comparable, has_pipeline_delays, left_out, load
from brx.sweep.choice import tried_cells
from brx.sweep.spec import Sweep, SweepSpec

PRESET = "compare"
RATES = (1e-3, 3e-3, 3e-4)
# One after another, as long as the best rate is the lowest or highest tried.
FURTHER_RATES = (
    3e-5,
    1e-4,
    1e-2,
    3e-2,
)
# Each entry has the delays of a pipeline with this number of stages, on the same eight blocks.
DELAYS: dict[str, dict[str, Any]] = {
    "none": {"pipeline.stages": 1},
    "8 stages": {"pipeline.stages": 8},
    "32 stages": {"pipeline.stages": 8, "pipeline.delay.like": 32},
}
# Slowdowns are at the loss that it reaches under every delay, so that a new method moves nobody
# else's.
TARGET_METHOD = "pipedream"


def protocol(method: str, settings: Mapping[str, Any], num_seeds: int, out: Path) -> Sweep:
    """The runs of one method: every delay and rate with seed 0, the further seeds at each delay's
    best rate."""
    content: dict[str, Any] = {
        "base": PRESET,
        "set": {"optimizer.method": method, **settings},
        "grid": {"delay": list(DELAYS.values()), "optimizer.lr": list(RATES)},
        "choose": {"over": "optimizer.lr", "further": list(FURTHER_RATES)},
    }
    if num_seeds > 1:
        content["repeat"] = {"set": {"training.seed": list(range(1, num_seeds))}}
    name = " ".join(["compare", method, *(f"{key}={value}" for key, value in settings.items())])
    return Sweep.expand(Path(name), validate(content, SweepSpec, name), out)


def take_committed(
    sweeps: Sequence[Sweep], committed: Path, data_fingerprint: str | None = None
) -> int:
    """Copy the committed runs that the sweeps ask for, of this trajectory version and corpus;
    returns how many."""
    if not committed.is_dir():
        return 0
    kept: dict[str, Path] = {}
    for path in sorted(committed.iterdir()):
        summary = RunFolder(path).read_summary()
        is_of_this_corpus = data_fingerprint in (None, summary.get("data_fingerprint"))
        if summary and is_of_this_corpus and _is_of_this_version(path, summary):
            kept[path.name.rpartition("--")[2]] = path
    copied: set[Path] = set()
    for sweep in sweeps:
        num_before = -1
        while len(copied) > num_before:  # a kept run may ask for one beyond the grid
            num_before = len(copied)
            cells = tried_cells(sweep)
            for cell in cells + sweep.repetitions(cells):
                source = kept.get(cell.folder.name.rpartition("--")[2])
                if source is not None and not cell.folder.exists():
                    cell.folder.parent.mkdir(parents=True, exist_ok=True)
                    partial = cell.folder.with_name(f".{cell.folder.name}.tmp")
                    shutil.rmtree(partial, ignore_errors=True)
                    shutil.copytree(source, partial).rename(cell.folder)
                    copied.add(cell.folder)
    return len(copied)


def _is_of_this_version(path: Path, summary: Mapping[str, Any]) -> bool:
    """Whether this brx computes what a finished run's method computed."""
    if recorded_version(summary) == TRAJECTORY_VERSION:
        return True
    method = load_config(path / "config.yaml").optimizer.method
    return newest_alike(recorded_version(summary), method) == TRAJECTORY_VERSION


def parse_settings(texts: Sequence[str]) -> dict[str, Any]:
    """`optimizer.KEY=VALUE` as dotted keys and values; UserError for any other: the rest is the
    protocol's."""
    settings = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if (
            not equals
            or not key.startswith("optimizer.")
            or key in ("optimizer.lr", "optimizer.method")
        ):
            right = (
                "must be optimizer.KEY=VALUE, KEY neither lr nor method: the rest is the protocol's"
            )
            raise UserError(f"--set {text}: {right}")
        settings[key] = parse_value(value, f"--set {text}")
    return settings


def with_delays(runs: pd.DataFrame) -> pd.DataFrame:
    """Those under one of `DELAYS`, with its name as `delay`."""
    names = runs[DEPTH].map(lambda stages: "none" if stages == 1 else f"{stages} stages")
    return runs.assign(delay=names)[names.isin(DELAYS) & has_pipeline_delays(runs)]


class Board(NamedTuple):  # a leaderboard (`brx.runs.comparison`)
    rows: pd.DataFrame
    runs: str
    notes: list[str]


def read_board(folders: Sequence[Path], asked: Collection[str] = ()) -> Board:
    """The leaderboard of the set of runs that compare with most of the methods `asked` for, then
    with most runs."""
    there = [folder for folder in folders if folder.is_dir() and any(folder.iterdir())]
    if not there:
        raise UserError(f"METHOD: needed, since no run is in {' or '.join(map(str, folders))}")
    runs = load(there)
    runs = runs[~runs["name"].duplicated()]  # a kept run that was copied
    chosen = with_delays(at_best_rates(runs))
    if chosen.empty:
        raise UserError(
            f"{', '.join(map(str, there))}: no run is finished under delays of {', '.join(DELAYS)}"
        )
    sets = comparable(chosen)
    sets.sort(
        key=lambda alike: (alike["optimizer.method"].isin(asked).sum(), len(alike)), reverse=True
    )
    shown, *others = sets
    notes = []
    for aspects, alike in left_out(shown, others).items():
        variants = ", ".join(sorted(set(alike["variant"])))
        notes.append(
            f"left out, since they differ from the rest in {aspects}: {len(alike)} runs of "
            f"{variants}"
        )
    seeds = ", ".join(map(str, sorted(shown[SEED].unique())))
    source = (
        f"{len(shown)} runs at the best rates in {' and '.join(map(str, there))}, seeds {seeds}"
    )
    return Board(leaderboard(shown, list(DELAYS), TARGET_METHOD), source, notes)


def board_legend(board: Board) -> list[str]:
    target = board.rows["target"].iloc[0]
    reached = (
        f"of {target:.3f}, which {TARGET_METHOD} reaches under every delay"
        if pd.notna(target)
        else "to be set"
    )
    return [
        f"Of {board.runs}.",
        f"Slowdown: iterations to a training loss {reached}, over those of the same method without "
        f"delay.",
        "Saved: iterations over the best of PipeDream, PipeDream-LR and Nesterov, under the "
        "longest delay.",
        "lr: without delay / with each; *: at the edge of the rates that were tried.",
    ]
