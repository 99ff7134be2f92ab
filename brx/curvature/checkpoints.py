"""Loads a run's checkpoint for analyses, and keeps their results in the run's folder:
RUN/analysis/NAME-ITERATION.json."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeVar

import torch
from pydantic import BaseModel, ValidationError
from torch import Tensor

from brx.config.schema import OwnModelConfig
from brx.curvature.hessian import Bases, Basis, Vectors
from brx.data.batches import Batches
from brx.data.prepare import prepare
from brx.errors import UserError, counted
from brx.files import make_folder, write_text
from brx.model.stage import Stage, whole_model
from brx.model.trace import drop_values
from brx.pipeline.delay import depth
from brx.pipeline.engine import MicroBatch
from brx.readers import read_json
from brx.runs.checkpoint import (
    check_data,
    check_stage_files,
    list_checkpoints,
    read_manifest,
    read_stage,
    run_and_iteration,
)
from brx.runs.folder import find_runs
from brx.runs.run import Run
from brx.train.build import training_batches
from brx.train.device import choose_device

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


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint with its weights, bases and batches, on one device."""

    run: Run
    path: Path
    iteration: int
    model: Stage  # the structure of the whole model, on the meta device; see `parameters`
    parameters: Vectors  # the newest weights of all stages
    bases: Bases  # basis rotation's; empty for other methods
    _batches: Batches

    @property
    def about(self) -> dict[str, Any]:
        """The fields that every `Measured` at this checkpoint begins with."""
        return {
            "run": str(self.run.path),
            "method": self.run.method,
            "num_stages": depth(self.run.config.pipeline),
            "iteration": self.iteration,
        }

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(iter(self.parameters.values())).device

    def micro_batch(self, number: int) -> MicroBatch:
        """Token ids and next tokens, each (B, S), by the micro-batch's number in the training."""
        inputs, targets = self._batches.batch(number)
        return inputs.to(self.device), targets.to(self.device)

    def batches(self, numbers: Iterable[int]) -> Iterator[tuple[int, MicroBatch]]:
        """Micro-batches with their numbers, counted from the end of the training.

        Number 1 is the first micro-batch that the run would have used next, so the run has not
        trained on numbers from 1 on. Numbers up to 0 are the training's last micro-batches."""
        trained_on = num_trained_on(self.run)
        return ((number, self.micro_batch(trained_on + number)) for number in numbers)

    @property
    def num_parameters(self) -> int:
        """d, the dimension of the Hessian."""
        return sum(parameter.numel() for parameter in self.parameters.values())


def num_trained_on(run: Run) -> int:
    """How many micro-batches the whole training uses."""
    return run.config.training.last_iteration * run.config.pipeline.accumulation


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


def load_checkpoint(
    run_path: Path,
    iteration: int | None = None,
    *,
    default: Default = "newest",
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> Checkpoint:
    """Read a run's checkpoint (`find_checkpoint` chooses it).

    Args:
        dtype: the data type of weights and bases.
        device: their device; by default the one that the run's configuration asks for.

    UserError if the checkpoint is damaged or belongs to another model or other data."""
    run = Run.load(run_path)
    device = device or choose_device(run.config.runtime.device)[0]
    path = find_checkpoint(run, iteration, default)
    manifest = read_manifest(path)
    weights, bases = _read_stages(path, manifest["num_stages"], dtype, device)

    # The buffers of a user's own model may depend on the seed (a random projection, for example).
    seed = run.config.training.seed if isinstance(run.config.model, OwnModelConfig) else None
    model = whole_model(run.config.model, run.config.data.vocabulary_size, seed)
    # The checkpoint's weights take the place of the parameters, but buffers are constants that a
    # forward pass reads.
    drop_values(model)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)
    check_same_model(weights, model, path)

    data = prepare(run.config.data, fingerprint=manifest["fingerprint"])
    check_data(manifest, path, data.fingerprint)
    return Checkpoint(
        run=run,
        path=path,
        iteration=manifest["iteration"],
        model=model,
        parameters={name: weights[name] for name, _ in model.named_parameters()},
        bases=bases,
        _batches=training_batches(run.config, data),
    )


def _read_stages(
    path: Path, num_stages: int, dtype: torch.dtype, device: torch.device
) -> tuple[Vectors, Bases]:
    """The newest weights and the optimizer's bases of all stages, by parameter name."""
    weights: Vectors = {}
    bases: Bases = {}
    check_stage_files(path, range(num_stages))
    for stage in range(num_stages):
        state = read_stage(path, stage, device, is_checked=True)
        for name, weight in state["versions"]["weights"].items():
            weights[name] = weight.to(dtype)
        for optimizer in state["optimizer"]:
            for name, kept in optimizer["state"].items():
                left = kept.get("left_basis")
                right = kept.get("right_basis")
                if left is not None or right is not None:
                    bases[name] = Basis(_in_dtype(left, dtype), _in_dtype(right, dtype))
    return weights, bases


def _in_dtype(side: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if side is None else side.to(dtype)


def check_same_model(weights: Vectors, model: Stage, where: Path) -> None:
    """UserError if the weights' names or shapes are not the model's; it names the first difference.

    Args:
        where: the checkpoint that the weights are from, for the message."""
    expected = dict(model.named_parameters())
    for name in sorted(expected.keys() | weights.keys()):
        actual_shape = tuple(weights[name].shape) if name in weights else "missing"
        model_shape = tuple(expected[name].shape) if name in expected else "missing"
        if actual_shape != model_shape:
            raise UserError(
                f"{where}: is a checkpoint of another model: {name} is {actual_shape} in it and "
                f"{model_shape} in config.yaml"
            )
