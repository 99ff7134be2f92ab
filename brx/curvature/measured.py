"""What is measured at checkpoints: how it is kept beside its run, and how runs and checkpoints are named."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from brx.errors import UserError
from brx.files import write_text
from brx.runs.checkpoint import run_and_iteration
from brx.runs.frames import find_runs


class Measured(BaseModel):
    """A measurement at one checkpoint, kept in RUN/analysis/NAME-ITERATION.json."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)
    command: ClassVar[str]
    """That makes it."""

    run: str
    """The run's folder, where it was made."""
    method: str
    num_stages: int
    """P (`brx.pipeline.delay.depth`)."""
    iteration: int
    """Of the checkpoint."""

    def write(self, path: Path) -> None:
        """Replace the file's content, one line for each field."""
        lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in self.model_dump().items()]
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, "{\n" + ",\n".join(lines) + "\n}\n")

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file that `write` made.

        Raises:
            UserError: it is not one.
        """
        try:
            return cls.model_validate(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            first = error.errors()[0] if isinstance(error, ValidationError) else None
            what = f"{'.'.join(map(str, first['loc']))}: {first['msg'].lower()}" if first else error
            raise UserError(f"{path}: not a result of {cls.command} ({what}); remove it and measure again") from None

    @classmethod
    def all_of(cls, run: Path, name: str, iteration: int | None = None) -> list[Self]:
        """Those of a run by their NAME, in the order of the checkpoints; of all checkpoints or of one."""
        at = "*" if iteration is None else f"{iteration:08d}"
        return [cls.read(path) for path in sorted((run / "analysis").glob(f"{name}-{at}.json"))]


def analysis_path(run: Path, name: str, iteration: int) -> Path:
    """Where a measurement is kept."""
    return run / "analysis" / f"{name}-{iteration:08d}.json"


def refuse_two_checkpoints(paths: Iterable[Path], checkpoint: int | None) -> None:
    """Refuse an iteration beside paths that name one already, with a UserError."""
    for path in paths:
        if checkpoint is not None and run_and_iteration(path)[1] is not None:
            raise UserError(f"--checkpoint {checkpoint}: {path} is a checkpoint already; give one of the two")


def runs_in_place(paths: Iterable[Path]) -> list[Path]:
    """The paths, of runs or checkpoints; in place of a folder that is neither, the runs in it.

    Raises:
        UserError: there is none in such a folder.
    """
    places: list[Path] = []
    for path in paths:
        run, iteration = run_and_iteration(path)
        is_folder_of_runs = iteration is None and run.is_dir() and not (run / "config.yaml").is_file()
        places += find_runs([path]) if is_folder_of_runs else [path]
    return places
