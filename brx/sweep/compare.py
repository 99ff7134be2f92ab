"""The protocol of `brx compare`: the same runs for every method. docs/compare.md says why these."""

import math
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from brx.config.loading import load_config, validate
from brx.config.parsing import parse_value
from brx.errors import UserError, counted
from brx.files import temporary_for, write_errors_in_one_line
from brx.methods.trajectory_version import TRAJECTORY_VERSION, newest_alike, recorded_version
from brx.runs.aspects import comparable, left_out
from brx.runs.comparison import leaderboard
from brx.runs.experiments import at_best_rates
from brx.runs.folder import RunFolder
from brx.runs.frames import DEPTH, has_pipeline_delays, load
from brx.runs.lock import lock
from brx.runs.trajectory import SEED
from brx.sweep.cell import CELLS_LOCK, folders_in
from brx.sweep.choice import tried_cells
from brx.sweep.spec import Sweep, SweepSpec

PRESET = "compare"
RATES = (1e-3, 3e-3, 3e-4)
# Tried one after another, as long as the best rate is the lowest or highest of those tried.
FURTHER_RATES = (3e-5, 1e-4, 1e-2, 3e-2)
# The delays of pipelines with these numbers of stages, all on the same eight blocks.
DELAYS: dict[str, dict[str, Any]] = {
    "none": {"pipeline.stages": 1},
    "8 stages": {"pipeline.stages": 8},
    "32 stages": {"pipeline.stages": 8, "pipeline.delay.like": 32},
}
# Slowdowns are measured at the loss that this method reaches under every delay, so that a new
# method does not change the slowdowns of the others.
TARGET_METHOD = "pipedream"


def protocol(method: str, settings: Mapping[str, Any], num_seeds: int, out: Path) -> Sweep:
    """The runs of one method: every delay and rate with seed 0, and the further seeds at the best
    rate of each delay.

    Args:
        method: the method's name, or FILE.py:NAME.
        settings: dotted keys of the section `optimizer`, from `parse_settings`.
        num_seeds: seeds per delay, 0 among them.
        out: the folder for the runs.
    """
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


def protocols(
    methods: Sequence[str],
    settings: Mapping[str, Any],
    rest_lrs: Sequence[float],
    num_seeds: int,
    out: Path,
) -> list[Sweep]:
    """The runs of some methods, after the runs of `TARGET_METHOD`, which slowdowns need.

    Args:
        methods: names, or FILE.py:NAME.
        settings: as in `protocol`.
        rest_lrs: values of `optimizer.rest_lr`; each makes a further variant of every method.
        num_seeds: as in `protocol`.
        out: the folder for the runs.

    Returns:
        A sweep per method and variant; none without methods.
    """
    variants = [dict(settings)]
    for rate in rest_lrs:
        variants.append({**settings, "optimizer.rest_lr": rate})
    sweeps = []
    for method in methods:
        for variant in variants:
            sweeps.append(protocol(method, variant, num_seeds, out))
    has_target = TARGET_METHOD in methods and not settings
    if methods and not has_target:
        sweeps.insert(0, protocol(TARGET_METHOD, {}, num_seeds, out))
    return sweeps


def take_committed(
    sweeps: Sequence[Sweep], committed: Path, data_fingerprint: str | None = None
) -> int:
    """Copy the committed runs that sweeps ask for into the folders of their cells.

    Runs of another trajectory version are not copied.

    Args:
        sweeps: the sweeps that `protocol` returned.
        committed: the folder of the committed runs.
        data_fingerprint: copy only runs on this corpus; None: on any.

    Returns:
        How many runs were copied.
    """
    if not committed.is_dir():
        return 0
    usable: dict[str, Path] = {}  # by trajectory id
    for trajectory_id, path in folders_in(committed).items():
        summary = RunFolder(path).read_summary()
        is_of_this_corpus = data_fingerprint in (None, summary.get("data_fingerprint"))
        if summary and is_of_this_corpus and _is_of_this_version(path, summary):
            usable[trajectory_id] = path
    num_copied = 0
    for sweep in sweeps:
        # Repeatedly, because the result of a copied run may ask for a run beyond the grid.
        while copied := _copy_runs(sweep, usable):
            num_copied += copied
    return num_copied


def _copy_runs(sweep: Sweep, usable: Mapping[str, Path]) -> int:
    """Copy the runs that the sweep asks for now and lacks; returns how many.

    Args:
        sweep: a method's sweep.
        usable: the folders of the committed runs, by trajectory id.
    """
    cells = tried_cells(sweep)
    num_copied = 0
    for cell in cells + sweep.repetitions(cells):
        source = usable.get(cell.trajectory_id)
        if source is not None and not cell.folder.exists() and _copy_run(source, cell.folder):
            num_copied += 1
    return num_copied


def _copy_run(source: Path, folder: Path) -> bool:
    """Copy a run to a cell's folder; False if another process has made that folder meanwhile.

    Raises:
        RunError: the folder cannot be written.
    """
    temporary = temporary_for(folder)
    try:
        with write_errors_in_one_line(folder):
            shutil.copytree(source, temporary)
            with lock(folder.parent, patience_s=math.inf, name=CELLS_LOCK):
                if folder.exists():
                    return False
                temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return True


def _is_of_this_version(path: Path, summary: Mapping[str, Any]) -> bool:
    """Whether this brx computes the same numbers as the one that trained the run."""
    if recorded_version(summary) == TRAJECTORY_VERSION:
        return True
    method = load_config(path / "config.yaml").optimizer.method
    return newest_alike(recorded_version(summary), method) == TRAJECTORY_VERSION


def parse_settings(texts: Sequence[str]) -> dict[str, Any]:
    """Read `--set optimizer.KEY=VALUE` as dotted keys and values.

    Raises:
        UserError: a text sets something else; the protocol decides that.
    """
    settings = {}
    for text in texts:
        key, equals, value = text.partition("=")
        is_free = key.startswith("optimizer.") and key not in ("optimizer.lr", "optimizer.method")
        if not equals or not is_free:
            raise UserError(
                f"--set {text}: must be optimizer.KEY=VALUE, with a KEY other than lr and "
                f"method: the protocol fixes everything else"
            )
        settings[key] = parse_value(value, f"--set {text}")
    return settings


def with_delays(runs: pd.DataFrame) -> pd.DataFrame:
    """The runs under one of `DELAYS`, with its name in the column `delay`."""
    names = runs[DEPTH].map(_name_of_delay)
    return runs.assign(delay=names)[names.isin(DELAYS) & has_pipeline_delays(runs)]


def _name_of_delay(stages: int) -> str:
    return "none" if stages == 1 else f"{stages} stages"


class Board(NamedTuple):
    """A leaderboard, as `brx compare` shows it."""

    rows: pd.DataFrame  # from `brx.runs.comparison.leaderboard`
    runs: str  # which runs they come from, in words
    notes: list[str]  # what is left out


def read_board(folders: Sequence[Path], asked: Collection[str] = ()) -> Board:
    """Make the leaderboard of the runs in some folders.

    If not all of them can be compared with each other, one comparable set is shown: the one with
    the most runs of the methods in `asked`, and of equal ones the one with the most runs.

    Args:
        folders: folders of runs; those that do not exist or are empty are left out.
        asked: names of methods, as in the settings.

    Raises:
        UserError: no run is there, or none is finished under one of `DELAYS`.
    """
    present = [folder for folder in folders if folder.is_dir() and any(folder.iterdir())]
    if not present:
        raise UserError(f"METHOD: needed, since no run is in {' or '.join(map(str, folders))}")
    runs = load(present)
    runs = runs[~runs["name"].duplicated()]  # a committed run and its copy
    chosen = with_delays(at_best_rates(runs))
    if chosen.empty:
        raise UserError(
            f"{', '.join(map(str, present))}: no run is finished under delays of "
            f"{', '.join(DELAYS)}"
        )

    def num_runs(alike: pd.DataFrame) -> tuple[int, int]:
        """The number of runs of the methods in `asked`, and of all runs."""
        return alike["optimizer.method"].isin(asked).sum(), len(alike)

    shown, *others = sorted(comparable(chosen), key=num_runs, reverse=True)
    notes = []
    for aspects, alike in left_out(shown, others).items():
        variants = ", ".join(sorted(set(alike["variant"])))
        notes.append(
            f"left out, different from the rest in {aspects}: {counted(len(alike), 'run')} of "
            f"{variants}"
        )
    seeds = ", ".join(map(str, sorted(shown[SEED].unique())))
    places = " and ".join(map(str, present))
    source = f"{counted(len(shown), 'run')} at the best rates in {places}, seeds {seeds}"
    return Board(leaderboard(shown, list(DELAYS), TARGET_METHOD), source, notes)


def board_legend(board: Board) -> list[str]:
    """The lines below a leaderboard that explain its columns."""
    target = board.rows["target"].iloc[0]
    loss = "a training loss to be set"
    if pd.notna(target):
        loss = f"a training loss of {target:.3f}, which {TARGET_METHOD} reaches under every delay"
    return [
        f"From {board.runs}.",
        f"Slowdown: iterations to {loss}, divided by the iterations of the same method without "
        f"delay.",
        "Saved: iterations over the best of PipeDream, PipeDream-LR and Nesterov, under the "
        "longest delay.",
        "lr: without delay / with each; *: at the edge of the rates that were tried.",
    ]
