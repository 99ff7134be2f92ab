"""Optional copies of the metrics: TensorBoard, Weights & Biases, Trackio."""

import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from brx.config.schema import RunConfig
from brx.errors import RunError, UserError
from brx.files import write_text
from brx.runs.folder import name_of_run
from brx.runs.metrics import Record

# The trackers by setting, which is also the package to install: the module that each one imports.
MODULES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb", "trackio": "trackio"}


class Outlet(NamedTuple):
    """How a library takes numbers."""

    log: Callable[[dict[str, float], int], object]
    """Takes numbers by name, and their iteration."""
    close: Callable[[], object]


class Tracker:
    """Takes the numbers of each record that goes into metrics.jsonl.

    It is only a copy. If its library fails on the way, a line on stderr says so, and the training
    goes on without it.

    Args:
        setting: the setting that asks for it, for the line.
        outlet: passes the numbers on to the library.
    """

    def __init__(self, setting: str, outlet: Outlet) -> None:
        self._setting = setting
        self._outlet = outlet
        self._has_failed = False

    def log(self, scalars: dict[str, float], iteration: int) -> None:
        """Pass on numbers by name, and their iteration."""
        if not self._has_failed:
            self._try(lambda: self._outlet.log(scalars, iteration), f"iteration {iteration}")

    def close(self) -> None:
        """Close the tracker, after it has written what it still holds."""
        self._try(self._outlet.close, "the end")

    def _try(self, call: Callable[[], object], when: str) -> None:
        try:
            call()
        except Exception as error:  # whatever a library of others raises
            if not self._has_failed:
                note = f"{self._setting}: failed at {when}: {_in_one_line(error)}"
                print(f"brx: note: {note}; metrics.jsonl has all numbers", file=sys.stderr)
            self._has_failed = True


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def tensorboard(run: Path, first_iteration: int) -> Outlet:
    """Writes into the folder `tensorboard` of a run.

    Args:
        run: the run's folder.
        first_iteration: the first iteration of this session.
    """
    from torch.utils.tensorboard import SummaryWriter

    # A resumed run writes the iterations after its checkpoint again. `purge_step` drops what was
    # written of them before.
    writer = SummaryWriter(str(run / "tensorboard"), purge_step=first_iteration)

    def log(scalars: dict[str, float], iteration: int) -> None:
        for key, value in scalars.items():
            writer.add_scalar(key, value, iteration)

    return Outlet(log, writer.close)


def board(module: str, project: str, run: Path, config: RunConfig) -> Outlet:
    """A run on a board of Weights & Biases or Trackio, which have the same interface. A resumed run
    continues under the same name.

    Args:
        module: `wandb` or `trackio`.
        project: on the board.
        run: the run's folder.
        config: the run's configuration.
    """
    # A name that is unique on the board, kept for when this run resumes.
    id_file = run / "run_id.txt"
    if not id_file.is_file():
        write_text(id_file, uuid4().hex[:12] + "\n")
    run_id = id_file.read_text(encoding="utf-8").strip()
    name = name_of_run(run)
    settings: dict[str, Any] = {
        "project": project,
        "resume": "allow",
        "config": config.model_dump(mode="json"),
    }
    if module == "wandb":
        settings |= {"name": name, "id": run_id, "dir": str(run)}
    else:
        # Trackio knows a run by its name alone.
        settings |= {"name": f"{name}-{run_id}", "embed": False}
    # Trackio prints on stdout, which is for results.
    with redirect_stdout(sys.stderr):
        opened: Any = import_module(module).init(**settings)

    def log(scalars: dict[str, float], iteration: int) -> None:
        opened.log(scalars, step=iteration)

    def close() -> None:
        with redirect_stdout(sys.stderr):
            opened.finish()

    return Outlet(log, close)


def check_trackers(config: RunConfig) -> None:
    """Check that the configured trackers can be used, before there is a run folder.

    Raises:
        UserError: one is not installed or has no key.
    """
    asked = _asked(config)
    for setting in asked:
        try:
            import_module(MODULES[setting])
        except ImportError:
            raise UserError(
                f"logging.{setting}: {setting} is not installed: pip install {setting}"
            ) from None
    if "wandb" in asked:
        wandb: Any = import_module("wandb")
        try:
            wandb.login()
        except wandb.Error as error:
            problem = _in_one_line(error)
            raise UserError(f"logging.wandb: {problem} (or set WANDB_MODE=offline)") from None


def open_trackers(config: RunConfig, run: Path, first_iteration: int) -> list[Tracker]:
    """The configured trackers.

    Args:
        config: the run's configuration.
        run: the run's folder.
        first_iteration: the first iteration of this session.

    Raises:
        RunError: one cannot be opened.
    """
    trackers = []
    for setting, value in _asked(config).items():
        match setting:
            case "tensorboard":
                open_outlet = partial(tensorboard, run, first_iteration)
            case "wandb" | "trackio":
                open_outlet = partial(board, MODULES[setting], value, run, config)
            case _:
                raise NotImplementedError(f"open_trackers does not open {setting}")
        trackers.append(_opened(setting, open_outlet))
    return trackers


def _asked(config: RunConfig) -> dict[str, Any]:
    """The settings of the trackers that are configured, with their values."""
    values = {setting: getattr(config.logging, setting) for setting in MODULES}
    return {setting: value for setting, value in values.items() if value not in (False, None)}


def _opened(name: str, open_outlet: Callable[[], Outlet]) -> Tracker:
    """The tracker with this setting; RunError if its library cannot open it."""
    setting = f"logging.{name}"
    try:
        return Tracker(setting, open_outlet())
    except (UserError, RunError):
        raise
    except Exception as error:  # whatever a library of others raises
        raise RunError(f"{setting}: cannot be opened: {_in_one_line(error)}") from error


def scalars_of(record: Record) -> dict[str, float]:
    """The numbers of a record by name, without its iteration. A list with a number per stage
    becomes `KEY/stage_000`, `KEY/stage_001` and so on; what was not measured is left out."""
    numbers: dict[str, float | None] = {}
    for key, value in record.items():
        if isinstance(value, list):
            for stage, number in enumerate(value):
                numbers[f"{key}/stage_{stage:03d}"] = number
        elif key != "iteration":
            numbers[key] = value
    return {name: number for name, number in numbers.items() if number is not None}
