"""A run's checkpoint as the analyses need it: the whole model's newest weights, its bases, and numbered batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from brx.curvature.bases import Bases, Geometry, Source, estimate_bases, read_basis
from brx.curvature.hessian import Vectors, gradient
from brx.data.batches import Batches
from brx.data.prepare import prepare
from brx.errors import UserError
from brx.model.stage import Stage, whole_model
from brx.pipeline.engine import MicroBatch
from brx.runs.checkpoint import checkpoint_folder, list_checkpoints, read_manifest, read_stage
from brx.runs.reading import Run
from brx.train.build import training_batches

CPU = torch.device("cpu")
MIDWAY = 0.1
"""How far from the middle, as a share of the iterations, a checkpoint still counts as midway."""


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint, read."""

    run: Run
    path: Path
    iteration: int
    model: Stage  # the whole model's structure, on the meta device: `parameters` holds the numbers
    parameters: Vectors  # the newest weights of all stages
    bases: Bases  # of basis rotation; empty for other methods
    _batches: Batches

    def batches(self, numbers: Iterable[int]) -> Iterator[tuple[int, MicroBatch]]:
        """Batches by number: 1 would have followed the run's last one, so it has not trained on those from 1 on."""
        device = next(iter(self.parameters.values())).device
        for number in numbers:
            inputs, targets = self._batches.batch(_num_trained_on(self.run) + number)
            yield number, (inputs.to(device), targets.to(device))

    @property
    def num_parameters(self) -> int:
        """d, the dimension of the Hessian."""
        return sum(parameter.numel() for parameter in self.parameters.values())


def find_checkpoint(run: Run, iteration: int | None, default: Literal["newest", "midway"]) -> Path:
    """The folder of the checkpoint to analyse: of an iteration, else the newest or the one nearest to the middle.

    Raises:
        UserError: there is none, none near the middle, or the run is not finished and no checkpoint was named.
    """
    available = {int(path.name): path for path in list_checkpoints(run.path)}
    if not available:
        raise UserError(f"{run.path}: has no checkpoint (checkpoints/ is empty or missing); train it again")
    listed = ", ".join(map(str, available))
    last = run.config.training.last_iteration
    if iteration is None and run.status != "finished":
        raise UserError(
            f"{run.path}: the run is not finished (iteration {run.iterations[-1]:.0f} of {last}); finish it with"
            f" `brx train {run.path} --resume`, or name a checkpoint with --checkpoint: {listed}"
        )
    wanted = iteration if iteration is not None else last if default == "newest" else last // 2
    nearest = min(available, key=lambda candidate: abs(candidate - wanted))
    if iteration not in (None, nearest):
        raise UserError(f"{checkpoint_folder(run.path, wanted)}: there is no such checkpoint; there are: {listed}")
    if iteration is None and default == "midway" and abs(nearest - wanted) > MIDWAY * last:
        raise UserError(
            f"{run.path}: has no checkpoint near the middle of its {last} iterations; name one with --checkpoint"
            f" ({listed}), or train with training.keep_at=[{wanted}]"
        )
    return available[nearest]


def load_checkpoint(
    run_path: Path,
    iteration: int | None = None,
    *,
    default: Literal["newest", "midway"] = "newest",
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
) -> Checkpoint:
    """Read a checkpoint of a run, as `find_checkpoint` finds it; weights and bases get this dtype and device.

    Raises:
        UserError: there is none, it is damaged, it is another model's, or the run's token files have changed.
    """
    run = Run.load(run_path)
    path = find_checkpoint(run, iteration, default)
    manifest = read_manifest(path)
    weights: Vectors = {}
    bases: Bases = {}
    for stage in range(manifest["num_stages"]):
        state = read_stage(path, stage, device)
        weights |= {name: tensor.to(dtype) for name, tensor in state["versions"]["weights"].items()}
        for entry in state["optimizer"]:
            of_all = {name: read_basis(parameter_state, dtype) for name, parameter_state in entry["state"].items()}
            bases |= {name: basis for name, basis in of_all.items() if basis is not None}
    with torch.device("meta"):
        model = whole_model(run.config.model, run.config.data.vocabulary_size)
    check_same_model({name: tuple(tensor.shape) for name, tensor in weights.items()}, model, path)
    data = prepare(run.config.data)
    if data.fingerprint != manifest["fingerprint"]:
        raise UserError(
            f"{path}: was trained on other data (fingerprint {manifest['fingerprint'][:12]}, now"
            f" {data.fingerprint[:12]}); restore the token files"
        )
    parameters = {name: weights[name] for name, _ in model.named_parameters()}
    batches = training_batches(run.config, data)
    return Checkpoint(run, path, manifest["iteration"], model, parameters, bases, batches)


def check_same_model(shapes: dict[str, tuple[int, ...]], model: Stage, where: Path) -> None:
    """Refuse weights whose names or shapes are not the model's.

    Raises:
        UserError: names the first difference.
    """
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    for name in sorted(expected.keys() | shapes.keys()):
        found, wanted = shapes.get(name, "missing"), expected.get(name, "missing")
        if found != wanted:
            raise UserError(
                f"{where}: is a checkpoint of another model: {name} is {found} in it and {wanted} in config.yaml"
            )


def borrow_bases(checkpoint: Checkpoint, other: Path) -> Bases:
    """The bases that another run of the same model has in its newest checkpoint.

    Raises:
        UserError: it has none, or is of another model.
    """
    parameter = next(iter(checkpoint.parameters.values()))
    lender = load_checkpoint(other, dtype=parameter.dtype, device=parameter.device)
    if not lender.bases:
        raise UserError(f"{lender.path}: has no basis (method {lender.run.method}); name a basis-rotation run")
    shapes = {name: tuple(tensor.shape) for name, tensor in lender.parameters.items()}
    check_same_model(shapes, checkpoint.model, lender.path)
    return lender.bases


def fit_bases(
    checkpoint: Checkpoint, num_batches: int, source: Source = "2nd", geometry: Geometry = "bilateral"
) -> Bases:
    """A strategy's bases, estimated on the spot from fresh gradients at the checkpoint's weights.

    Raises:
        UserError: the run's data have fewer batches.
    """
    check_basis_batches(checkpoint.run, num_batches)
    # Numbers below 1 are batches of the training itself: those that measurements take from 1 on stay unseen.
    numbers = range(1 - num_batches, 1)
    gradients = (gradient(checkpoint.model, checkpoint.parameters, batch) for _, batch in checkpoint.batches(numbers))
    return estimate_bases(checkpoint.parameters, gradients, source, geometry)


def check_basis_batches(run: Run, num_batches: int) -> None:
    """Refuse to estimate bases from more batches than the run has trained on, with a UserError."""
    trained_on = _num_trained_on(run)
    if num_batches > trained_on:
        raise UserError(f"--basis-batches {num_batches}: {run.path} has trained on {trained_on} batches only")


def _num_trained_on(run: Run) -> int:
    """Micro-batches of the whole training."""
    return run.config.training.last_iteration * run.config.pipeline.accumulation
