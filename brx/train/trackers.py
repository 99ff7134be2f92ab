"""Optional copies of the metrics: TensorBoard and Weights & Biases."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

from brx.config.schema import RunConfig
from brx.errors import UserError
from brx.files import write_text
from brx.runs.metrics import Record


class Tracker(Protocol):
    """Takes the records that go into metrics.jsonl."""

    def log(self, records: list[Record]) -> None:
        """Take in records."""

    def close(self) -> None:
        """Write out what is left."""


class TensorBoard:
    """Event files in the run folder."""

    def __init__(self, folder: Path, first_iteration: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UserError(
                "logging.tensorboard: TensorBoard is not installed: pip install 'brx[tensorboard]'"
            ) from None
        # A resumed run writes the iterations after its checkpoint again: purge_step drops the first writing.
        self._writer = SummaryWriter(str(folder), purge_step=first_iteration)

    def log(self, records: list[Record]) -> None:
        for record in records:
            for key, value in _scalars(record).items():
                self._writer.add_scalar(key, value, record["iteration"])

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run in a Weights & Biases project; resumes under the same id."""

    def __init__(self, project: str, run: Path, config: RunConfig) -> None:
        try:
            import wandb
        except ImportError:
            raise UserError("logging.wandb: Weights & Biases is not installed: pip install 'brx[wandb]'") from None
        self._run: Any = wandb.init(
            project=project, name=run.name, id=_own_id(run), resume="allow", dir=str(run), config=config.model_dump()
        )

    def log(self, records: list[Record]) -> None:
        for record in records:
            self._run.log(_scalars(record), step=record["iteration"])

    def close(self) -> None:
        self._run.finish()


def _own_id(run: Path) -> str:
    """A name for the run at Weights & Biases that no other run has, kept in its folder for when it resumes."""
    path = run / "wandb_id.txt"
    if not path.is_file():
        write_text(path, uuid4().hex[:12] + "\n")
    return path.read_text(encoding="utf-8").strip()


def open_trackers(config: RunConfig, run: Path, first_iteration: int) -> list[Tracker]:
    """The trackers that the configuration asks for.

    Raises:
        UserError: one of them is not installed.
    """
    trackers: list[Tracker] = []
    if config.logging.tensorboard:
        trackers.append(TensorBoard(run / "tensorboard", first_iteration))
    if config.logging.wandb is not None:
        trackers.append(WeightsAndBiases(config.logging.wandb, run, config))
    return trackers


def _scalars(record: Record) -> dict[str, float]:
    scalars: dict[str, float] = {}
    for key, value in record.items():
        if isinstance(value, list):
            numbers = {f"{key}/stage_{stage:03d}": number for stage, number in enumerate(value)}
            scalars |= {name: number for name, number in numbers.items() if number is not None}
        elif key != "iteration":
            scalars[key] = value
    return scalars
