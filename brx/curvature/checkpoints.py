"""Loads a run's checkpoint for analyses of its curvature."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from brx.config.schema import OwnModelConfig
from brx.curvature.hessian import Bases, Basis, Vectors
from brx.data.batches import Batches
from brx.data.prepare import prepare
from brx.errors import UserError
from brx.model.stage import Stage, whole_model
from brx.model.trace import drop_values
from brx.pipeline.engine import MicroBatch
from brx.runs.checkpoint import check_data, check_stage_files, read_manifest, read_stage
from brx.runs.measured import Default, about, find_checkpoint
from brx.runs.run import Run
from brx.train.build import training_batches
from brx.train.device import choose_device


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
        return about(self.run, self.iteration)

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
        # A stage's file also has moments and older versions, for which a GPU may have no room.
        state = read_stage(path, stage, torch.device("cpu"), is_checked=True)
        for name, weight in state["versions"]["weights"].items():
            weights[name] = weight.to(device, dtype)
        for optimizer in state["optimizer"]:
            for name, kept in optimizer["state"].items():
                left = kept.get("left_basis")
                right = kept.get("right_basis")
                if left is not None or right is not None:
                    bases[name] = Basis(_moved(left, device, dtype), _moved(right, device, dtype))
    return weights, bases


def _moved(side: Tensor | None, device: torch.device, dtype: torch.dtype) -> Tensor | None:
    return None if side is None else side.to(device, dtype)


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
