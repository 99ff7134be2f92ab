"""What analyses of checkpoints share: which checkpoint they take, and the files of their results:
RUN/analysis/NAME-ITERATION.json."""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeVar

from pydantic import BaseModel, ValidationError

from brx.errors import UserError, counted
from brx.files import make_folder, write_text
from brx.pipeline.delay import depth
from brx.readers import read_json
from brx.runs.checkpoint import list_checkpoints, run_and_iteration
from brx.runs.folder import find_runs
from brx.runs.run import Run

# A checkpoint counts as midway within this distance of the middle, as a share of all iterations.
MIDWAY = 0.1


class Measured(BaseModel, frozen=True):
    """A measurement at one checkpoint; subclasses add the numbers.

    Its file is RUN/analysis/NAME-ITERATION.json. Settings that are not usual are in the file's
    name, too, so that no measurement takes the place of one with other settings."""

    command: ClassVar[str]  # the brx command that makes it

    run: str  # the run's folder, where it was measured
    method: str
    num_stages: int  # P (`brx.pipeline.delay.depth`)
    iteration: int  # the checkpoint's

    @property
    def name(self) -> str:
        """NAME in the file's name."""
        return self.command

    @property
    def settings_in_file_name(self) -> list[str]:
        """The settings that are not defaults, as words for the name of the file."""
        return []

    def path_in(self, run: Path) -> Path:
        """The file of this measurement in a run's folder."""
        words = [self.name, f"{self.iteration:08d}", *self.settings_in_file_name]
        return run / "analysis" / f"{'-'.join(words)}.json"

    def write(self, run: Path) -> None:
        """Write the measurement into a run's folder, one line per field."""
        path = self.path_in(run)
        make_folder(path.parent)
        lines = [
            f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in self.model_dump().items()
        ]
        write_text(path, "{\n" + ",\n".join(lines) + "\n}\n")

    @classmethod
    def all_of(cls, run: Path, iteration: int | None = None, name: str = "") -> list[Self]:
        """All measurements in a run's folder, ordered by checkpoint.

        Args:
            run: the run's folder.
            iteration: only measurements at this checkpoint; None for all checkpoints.
            name: NAME in the files' names; by default the command.

        UserError for a damaged file."""
        at = "" if iteration is None else f"{iteration:08d}"
        # After the iteration, a file's name may have settings that are not the usual ones.
        paths = (run / "analysis").glob(f"{name or cls.command}-{at}*.json")
        return [cls.read(path) for path in sorted(paths)]

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read one file; UserError if it is damaged or holds something else."""
        try:
            return cls.model_validate(read_json(path))
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(map(str, first["loc"]))
            fault = f"{field}: {first['msg'].lower()}"
        except ValueError as error:
            fault = str(error)
        raise UserError(
            f"{path}: not a result of {cls.command} ({fault}); remove it and measure again"
        )


def about(run: Run, iteration: int) -> dict[str, Any]:
    """The fields that every `Measured` begins with."""
    return {
        "run": str(run.path),
        "method": run.method,
        "num_stages": depth(run.config.pipeline),
        "iteration": iteration,
    }


Result = TypeVar("Result", bound=Measured)


def measured_in(
    paths: Sequence[Path],
    iteration: int | None,
    of_run: Callable[[Path, int | None], Iterable[Result]],
    command: str,
) -> list[Result]:
    """Read the results of `brx COMMAND` for several runs.

    Args:
        paths: runs, folders of runs, or checkpoints; a checkpoint gives its own results only.
        iteration: only results at this iteration; None for all.
        of_run: reads the results of one run, at one iteration or (None) at all iterations.
        command: the command with its options, for the message.

    UserError if there are no results at all."""
    results: list[Result] = []
    for path in runs_in_place(paths):
        run, named = run_and_iteration(path)
        results += of_run(run, iteration if named is None else named)
    if not results:
        at = "" if iteration is None else f" at iteration {iteration}"
        raise UserError(
            f"{paths[0]}: has no measured {command}{at}; run `brx {command} {paths[0]}` first"
        )
    return results


def refuse_two_checkpoints(paths: Iterable[Path], checkpoint: int | None) -> None:
    """UserError if `--checkpoint` is given and a path is a checkpoint already."""
    for path in paths:
        if checkpoint is not None and run_and_iteration(path)[1] is not None:
            raise UserError(
                f"--checkpoint {checkpoint}: {path} is a checkpoint already; give one of the two"
            )


def runs_in_place(paths: Iterable[Path]) -> list[Path]:
    """The paths, with each folder of runs replaced by the runs in it. Runs and checkpoints stay as
    they are.

    UserError for a folder without runs."""
    places: list[Path] = []
    for path in paths:
        run, _ = run_and_iteration(path)
        places += [path] if (run / "config.yaml").is_file() else find_runs([path])
    return places


Default = Literal["newest", "midway"]
"""Which checkpoint a command takes if none is named."""


def find_checkpoint(run: Run, iteration: int | None, default: Default) -> Path:
    """The folder of the checkpoint at `iteration`, or of the default one.

    UserError if there is no such checkpoint, or if none is named and the run is not finished."""
    available = _available_checkpoints(run)
    listed = ", ".join(map(str, available))
    if iteration is not None:
        if iteration not in available:
            raise UserError(
                f"{run.path}, iteration {iteration}: there is no such checkpoint; there are: "
                f"{listed}"
            )
        return available[iteration]

    last = run.config.training.last_iteration
    if run.status != "finished":
        raise UserError(
            f"{run.path}: the run {_why_unfinished(run)}name a checkpoint with --checkpoint: "
            f"{listed}"
        )
    target = last if default == "newest" else last // 2
    nearest = min(available, key=lambda candidate: abs(candidate - target))
    if default == "midway" and abs(nearest - target) > MIDWAY * last:
        raise UserError(
            f"{run.path}: has no checkpoint near the middle of its {counted(last, 'iteration')}; "
            f"name one with --checkpoint ({listed}), or train with training.keep_at=[{target}]"
        )
    return available[nearest]


def _available_checkpoints(run: Run) -> dict[int, Path]:
    """The run's checkpoints by iteration; UserError if there are none."""
    if run.config.is_recorded:
        raise UserError(
            f"{run.path}: was recorded from a loop of your own, so brx has no checkpoint of it"
        )
    available = {int(path.name): path for path in list_checkpoints(run.path)}
    if not available:
        raise UserError(
            f"{run.path}: has no checkpoint (checkpoints/ is empty or missing); train it again"
        )
    return available


def _why_unfinished(run: Run) -> str:
    """The beginning of the message about a run that diverged or was interrupted."""
    at = f"(iteration {run.iterations[-1]:.0f} of {run.config.training.last_iteration})"
    if run.status == "diverged":
        return f"diverged {at}; "
    return f"is not finished {at}; finish it with `brx train {run.path} --resume`, or "
