"""A run's checkpoint as the analyses need it, and their results in the run's folder:
RUN/analysis/NAME-ITERATION.json."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeVar

import torch
from pydantic import BaseModel, ValidationError

from brx.curvature.hessian import Bases, Basis, Vectors
from brx.data.batches import Batches
from brx.data.prepare import prepare
from brx.errors import UserError
from brx.files import write_text
from brx.model.stage import Stage, whole_model
from brx.pipeline.delay import depth
from brx.pipeline.engine import MicroBatch
from brx.readers import read_json
from brx.runs.checkpoint import (
    check_data,
    check_stages,
    list_checkpoints,
    read_manifest,
    read_stage,
    run_and_iteration,
)
from brx.runs.folder import find_runs
from brx.runs.frames import Run
from brx.train.build import training_batches
from brx.train.device import choose_device

# how far from the middle, as a share of the iterations, a checkpoint still counts as midway
MIDWAY = 0.1


class Measured(BaseModel, frozen=True):  # at one checkpoint
    command: ClassVar[str]  # the brx command that makes it

    run: str  # the run's folder, where it was measured
    method: str
    num_stages: int  # P (`brx.pipeline.delay.depth`)
    iteration: int  # the checkpoint's

    @property
    def name(self) -> str:  # NAME of its file
        return self.command

    def path_in(self, run: Path) -> Path:
        return run / "analysis" / f"{self.name}-{self.iteration:08d}.json"

    def write(self, run: Path) -> None:
        """Write it into a run's folder, a line per field."""
        lines = [
            f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in self.model_dump().items()
        ]
        self.path_in(run).parent.mkdir(parents=True, exist_ok=True)
        write_text(self.path_in(run), "{\n" + ",\n".join(lines) + "\n}\n")

    @classmethod
    def all_of(cls, run: Path, iteration: int | None = None, name: str = "") -> list[Self]:
        """Those of a run by their NAME, in the order of the checkpoints, or at one; UserError for a
        damaged file."""
        # What follows the iteration in a file's name tells settings apart.
        at = "" if iteration is None else f"{iteration:08d}"
        paths = (run / "analysis").glob(f"{name or cls.command}-{at}*.json")
        return [cls.read(path) for path in sorted(paths)]

    @classmethod
    def read(cls, path: Path) -> Self:
        try:
            return cls.model_validate(read_json(path))
        except ValueError as error:
            first = error.errors()[0] if isinstance(error, ValidationError) else None
            what = f"{'.'.join(map(str, first['loc']))}: {first['msg'].lower()}" if first else error
            raise UserError(
                f"{path}: not a result of {cls.command} ({what}); remove it and measure again"
            ) from None


Result = TypeVar("Result", bound=Measured)


def measured_in(
    paths: Sequence[Path],
    iteration: int | None,
    of_run: Callable[[Path, int | None], Iterable[Result]],
    command: str,
) -> list[Result]:
    """Results of `command` for runs (also runs in folders) at `iteration` (None: any), or at
    checkpoints."""
    places = [run_and_iteration(path) for path in runs_in_place(paths)]
    results = [
        result
        for run, named in places
        for result in of_run(run, iteration if named is None else named)
    ]
    if not results:
        at = "" if iteration is None else f" at iteration {iteration}"
        raise UserError(
            f"{paths[0]}: has no measured {command}{at}; run `brx {command} {paths[0]}` first"
        )
    return results


def refuse_two_checkpoints(paths: Iterable[Path], checkpoint: int | None) -> None:
    for path in paths:
        if checkpoint is not None and run_and_iteration(path)[1] is not None:
            raise UserError(
                f"--checkpoint {checkpoint}: {path} is a checkpoint already; give one of the two"
            )


def runs_in_place(paths: Iterable[Path]) -> list[Path]:
    """The paths, of runs or checkpoints; in place of what is neither, the runs in that folder (or a
    UserError)."""
    places: list[Path] = []
    for path in paths:
        run, _ = run_and_iteration(path)
        places += [path] if (run / "config.yaml").is_file() else find_runs([path])
    return places


@dataclass(frozen=True)
class Checkpoint:
    run: Run
    path: Path
    iteration: int
    model: Stage  # the whole model's structure, on the meta device: `parameters` holds the numbers
    parameters: Vectors  # the newest weights of all stages
    bases: Bases  # basis rotation's; empty for other methods
    _batches: Batches

    @property
    def about(self) -> dict[str, Any]:
        """What every `Measured` of it begins with."""
        of_run = {
            "run": str(self.run.path),
            "method": self.run.method,
            "num_stages": depth(self.run.config.pipeline),
        }
        return of_run | {"iteration": self.iteration}

    @property
    def device(self) -> torch.device:
        return next(iter(self.parameters.values())).device

    def micro_batch(self, number: int) -> MicroBatch:  # by its number in the training
        inputs, targets = self._batches.batch(number)
        return inputs.to(self.device), targets.to(self.device)

    def batches(self, numbers: Iterable[int]) -> Iterator[tuple[int, MicroBatch]]:
        """Batches by number: 1 would have followed the run's last one, so it has not trained on
        those from 1 on."""
        return ((number, self.micro_batch(num_trained_on(self.run) + number)) for number in numbers)

    @property
    def num_parameters(self) -> int:  # d, the dimension of the Hessian
        return sum(parameter.numel() for parameter in self.parameters.values())


def num_trained_on(run: Run) -> int:  # micro-batches of the whole training
    return run.config.training.last_iteration * run.config.pipeline.accumulation


def find_checkpoint(run: Run, iteration: int | None, default: Literal["newest", "midway"]) -> Path:
    """The folder of an iteration, or the default; UserError where there is none such, or the run
    goes on."""
    if run.config.is_recorded:
        raise UserError(
            f"{run.path}: was recorded from a loop of your own, so brx has no checkpoint of it"
        )
    available = {int(path.name): path for path in list_checkpoints(run.path)}
    if not available:
        raise UserError(
            f"{run.path}: has no checkpoint (checkpoints/ is empty or missing); train it again"
        )
    listed = ", ".join(map(str, available))
    last = run.config.training.last_iteration
    if iteration is None and run.status != "finished":
        is_lost = run.status == "diverged"
        finish = "" if is_lost else f"finish it with `brx train {run.path} --resume`, or "
        raise UserError(
            f"{run.path}: the run {'diverged' if is_lost else 'is not finished'} (iteration "
            f"{run.iterations[-1]:.0f} of"
            f" {last}); {finish}name a checkpoint with --checkpoint: {listed}"
        )
    wanted = iteration if iteration is not None else last if default == "newest" else last // 2
    nearest = min(available, key=lambda candidate: abs(candidate - wanted))
    if iteration not in (None, nearest):
        raise UserError(
            f"{run.path}, iteration {wanted}: there is no such checkpoint; there are: {listed}"
        )
    if iteration is None and default == "midway" and abs(nearest - wanted) > MIDWAY * last:
        raise UserError(
            f"{run.path}: has no checkpoint near the middle of its {last} iterations; name one "
            f"with --checkpoint"
            f" ({listed}), or train with training.keep_at=[{wanted}]"
        )
    return available[nearest]


def load_checkpoint(
    run_path: Path,
    iteration: int | None = None,
    *,
    default: Literal["newest", "midway"] = "newest",
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> Checkpoint:
    """Read a checkpoint (`find_checkpoint`); UserError if it is damaged or of another model or
    other data."""
    run = Run.load(run_path)
    device = device or choose_device(run.config.runtime.device)[0]
    path = find_checkpoint(run, iteration, default)
    manifest = read_manifest(path)
    weights: Vectors = {}
    bases: Bases = {}
    check_stages(path, range(manifest["num_stages"]))
    for stage in range(manifest["num_stages"]):
        state = read_stage(path, stage, device, is_checked=True)
        weights |= {name: tensor.to(dtype) for name, tensor in state["versions"]["weights"].items()}
        for name, kept in (item for entry in state["optimizer"] for item in entry["state"].items()):
            left, right = kept.get("left_basis"), kept.get("right_basis")
            if left is not None or right is not None:
                bases[name] = Basis(
                    *(None if side is None else side.to(dtype) for side in (left, right))
                )
    model = whole_model(run.config.model, run.config.data.vocabulary_size, seed=None)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)
    check_same_model(weights, model, path)
    data = prepare(run.config.data, fingerprint=manifest["fingerprint"])
    check_data(manifest, path, data.fingerprint)
    parameters = {name: weights[name] for name, _ in model.named_parameters()}
    return Checkpoint(
        run,
        path,
        manifest["iteration"],
        model,
        parameters,
        bases,
        training_batches(run.config, data),
    )


def check_same_model(weights: Vectors, model: Stage, where: Path) -> None:
    """Refuse other names or shapes than the model's: a UserError names the first difference."""
    expected = dict(model.named_parameters())
    for name in sorted(expected.keys() | weights.keys()):
        found, wanted = (
            tuple(of[name].shape) if name in of else "missing" for of in (weights, expected)
        )
        if found != wanted:
            raise UserError(
                f"{where}: is a checkpoint of another model: {name} is {found} in it and {wanted} "
                f"in config.yaml"
            )
