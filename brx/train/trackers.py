"""Optional copies of the metrics: TensorBoard, Weights & Biases, Trackio."""

import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from brx.config.schema import RunConfig
from brx.errors import UserError
from brx.files import write_text
from brx.runs.metrics import Record

# By module: the setting, which is the extra's name, too.
SETTINGS = {"torch.utils.tensorboard": "tensorboard", "wandb": "wandb", "trackio": "trackio"}


class Tracker(NamedTuple):
    """Takes the numbers of each record that goes into metrics.jsonl."""

    log: Callable[[dict[str, float], int], object]  # takes numbers and their iteration
    close: Callable[[], object]


def tensorboard(run: Path, first_iteration: int) -> Tracker:
    from torch.utils.tensorboard import SummaryWriter

    # A resumed run writes the iterations after its checkpoint again: purge_step drops the first
    #     writing.
    writer = SummaryWriter(str(run / "tensorboard"), purge_step=first_iteration)

    def log(scalars: dict[str, float], iteration: int) -> None:
        for key, value in scalars.items():
            writer.add_scalar(key, value, iteration)

    return Tracker(log, writer.close)


def board(module: str, project: str, run: Path, config: RunConfig) -> Tracker:
    """A run on a board of Weights & Biases or Trackio, whose interfaces are the same; resumes under
    the same name."""
    # A unique name on the board, kept for when this run resumes.
    id_file = run / "run_id.txt"
    if not id_file.is_file():
        write_text(id_file, uuid4().hex[:12] + "\n")
    name, identity = run.name, id_file.read_text(encoding="utf-8").strip()
    settings: dict[str, Any] = {
        "project": project,
        "resume": "allow",
        "config": config.model_dump(mode="json"),
    }
    if module == "wandb":
        settings |= {"name": name, "id": identity, "dir": str(run)}
    else:  # which knows a run by its name, and prints on stdout, where results are
        settings |= {"name": f"{name}-{identity}", "embed": False}
    with redirect_stdout(sys.stderr):
        opened: Any = import_module(module).init(**settings)

    def close() -> None:
        with redirect_stdout(sys.stderr):
            opened.finish()

    return Tracker(lambda scalars, iteration: opened.log(scalars, step=iteration), close)


def check_trackers(config: RunConfig) -> None:
    """Refuse, with a UserError and before there is a run folder, a tracker that is not installed or
    has no key."""
    asked = {
        module: name
        for module, name in SETTINGS.items()
        if getattr(config.logging, name) not in (False, None)
    }
    for module, setting in asked.items():
        try:
            import_module(module)
        except ImportError:
            raise UserError(
                f"logging.{setting}: {setting} is not installed: pip install {setting}"
            ) from None
    if "wandb" in asked:
        wandb: Any = import_module("wandb")
        try:
            wandb.login()
        except wandb.Error as error:
            problem = " ".join(str(error).split())
            raise UserError(f"logging.wandb: {problem[:200]} (or set WANDB_MODE=offline)") from None


def open_trackers(config: RunConfig, run: Path, first_iteration: int) -> list[Tracker]:
    projects = {"wandb": config.logging.wandb, "trackio": config.logging.trackio}
    boards = [
        board(module, name, run, config) for module, name in projects.items() if name is not None
    ]
    return [tensorboard(run, first_iteration), *boards] if config.logging.tensorboard else boards


def scalars_of(record: Record) -> dict[str, float]:
    scalars: dict[str, float] = {}
    for key, value in record.items():
        numbers = (
            {f"{key}/stage_{k:03d}": v for k, v in enumerate(value)}
            if isinstance(value, list)
            else {key: value}
        )
        scalars |= {
            name: number
            for name, number in numbers.items()
            if number is not None and name != "iteration"
        }
    return scalars
