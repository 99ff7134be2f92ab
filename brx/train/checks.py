"""Refuses, before data are prepared, a run whose settings do not go together or whose method fails.

A user's own method is tried on a small model: it must train, its checkpoint must restore it, and
its updates must not depend on which stages share a device.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from brx.config.schema import BasisRotationConfig, CustomConfig, OwnModelConfig, RunConfig
from brx.errors import RunError, UserError
from brx.methods.custom import user_code
from brx.methods.table import find_method
from brx.methods.updater import MethodUpdater
from brx.model.head import CHUNK_LOGITS
from brx.model.stage import partition
from brx.pipeline.delay import VaryingDelay, stage_delays
from brx.pipeline.engine import MicroBatch
from brx.pipeline.slots import copy_tensors
from brx.pipeline.versions import StageVersions
from brx.train.build import Assembly, assemble, build_stages
from brx.train.device import generator_states, set_generator_states

# The largest width of the model on which a user's own method is tried. Other methods fit any width.
TRIED_WIDTH = 64
# The number of updates in that trial. The first update begins at version 0 everywhere, the second
# one after the weights have changed.
TRIED_UPDATES = 2
# The number of updates after which stages that share a device are compared with stages that do not.
# An optimizer that learns its step size from all its parameters may need five before it changes it.
COMPARED_UPDATES = 6
# The comparison is made once with small gradients and once with large ones; these are the typical
# sizes of their entries. Small ones show what is divided by the size of all gradients, such as a
# weight decay. Large ones show what is compared with a number, such as a limit for the norm of all.
GRADIENT_SIZES = (0.01, 1.0)
# The largest difference between the two, relative to what the updates have changed, that counts as
# rounding: a batch of matrix products may round differently if the batch has another size.
ROUNDING = 1e-3


def check_head(config: RunConfig) -> None:
    """Refuse a head whose backward pass would not see that its weights have been overwritten
    (docs/semantics.md).

    Raises:
        UserError: `pipeline.stash` overwrites weights between the passes, and the head would
            compute with a copy of them.
    """
    pipeline, training = config.pipeline, config.training
    if pipeline.stash == "exact":
        return
    delays = stage_delays(pipeline)
    is_bf16 = config.runtime.precision == "bf16"
    is_own_model = isinstance(config.model, OwnModelConfig)
    if is_own_model and is_bf16 and any(delay.tau for delay in delays):
        raise UserError(
            f"pipeline.stash: {pipeline.stash} with a model of your own needs runtime.precision:"
            " fp32: under autocast it may compute with copies, which are not overwritten"
        )
    tau_of_head = delays[-1].tau
    if tau_of_head == 0:  # as in a pipeline
        return
    num_tokens = training.batch_size * config.model.sequence_length
    num_logits = num_tokens * config.data.vocabulary_size
    # Under autocast, and with a loss in chunks, the head's backward pass computes with copies that
    # the forward pass has saved.
    if is_bf16:
        needed = "runtime.precision: fp32"
    elif num_logits > CHUNK_LOGITS:
        needed = (
            f"at most {CHUNK_LOGITS:,} logits per micro-batch (training.batch_size, data.tokenizer)"
        )
    else:
        return
    raise UserError(
        f"pipeline.stash: {pipeline.stash} with a delay of {tau_of_head} at the last stage needs "
        f"{needed}: its head would not see the overwritten weights; or use exact"
    )


def _check_error_feedback(config: RunConfig) -> None:
    """UserError if error feedback is configured with delays for which it is not defined. Its paper
    defines it for a delay of one update. A stage without delay makes no error."""
    if not config.pipeline.error_feedback:
        return
    for stage, delay in enumerate(stage_delays(config.pipeline, config.training.seed)):
        if isinstance(delay, VaryingDelay):
            problem = "varies"
        elif delay.tau in (0, delay.accumulation):
            continue
        else:
            problem = f"is {delay.tau_updates:g}"
        raise UserError(
            f"pipeline.error_feedback: defined only for a delay of one update, but the delay of "
            f"stage {stage} {problem}; set it to 0, or pipeline.delay to 2bw"
        )


def _check_graphs(config: RunConfig, device: torch.device) -> None:
    """UserError where `runtime.graphs` cannot hold what the run computes."""
    pipeline, settings = config.pipeline, config.optimizer
    problem: str | None = None
    if device.type != "cuda":
        problem = f"needs a CUDA device, and this run computes on {device.type}"
    elif isinstance(settings, BasisRotationConfig) and settings.as_published:
        problem = "records no steps of optimizer.as_published"
    elif pipeline.devices > 1 and not isinstance(settings, BasisRotationConfig):
        problem = (
            f"on {pipeline.devices} pipeline.devices it records steps of basis rotation alone, and "
            f"the method is {settings.method}"
        )
    elif pipeline.devices == 1:
        problem = _why_no_graph_holds_passes(config)
    if problem is not None:
        raise UserError(f"runtime.graphs: {problem}; set it to false")


def _why_no_graph_holds_passes(config: RunConfig) -> str | None:
    """Why a run on one device cannot have its passes in graphs; None if it can."""
    pipeline = config.pipeline
    if pipeline.stash != "exact":
        return f"needs pipeline.stash: exact, and it is {pipeline.stash}"
    if pipeline.recompute:
        return "records no passes with pipeline.recompute, which asks for the generator's state"
    if getattr(config.model, "moe", None) is not None:
        return "records no mixture of experts, which asks the device how many tokens each one gets"
    method = find_method(config)
    if isinstance(config.optimizer, CustomConfig) and method.corrects_gradients:
        return "records no correct_gradients of your own, which may compute on the host"
    return None


def check_method(config: RunConfig, device: torch.device) -> None:
    """Try the method before the run: make its optimizers for a small model with the same names of
    parameters. With a user's own method, also train this model for two updates.

    Args:
        config: the run's configuration.
        device: where the run will train.

    Raises:
        UserError: the device lacks a number format, a package is missing, error feedback is not
            defined for the delays, graphs cannot hold what the run computes, or a user's own method
            fails or does not suit several devices.
    """
    if device.type == "mps" and isinstance(config.optimizer, BasisRotationConfig):
        raise UserError(
            "runtime.device: basis rotation's first bases need float64, which mps lacks; use cpu"
        )
    _check_error_feedback(config)
    if config.runtime.graphs:
        _check_graphs(config, device)
    state = torch.get_rng_state()
    try:
        _try_method(config, device)
    except RunError as error:
        # Without a cause, the small model diverged. This says nothing about the run's model.
        if error.__cause__ is not None:
            raise UserError(f"{error} (in a trial on a small model)") from None
    finally:
        torch.set_rng_state(state)


def _try_method(config: RunConfig, device: torch.device) -> None:
    """Make the method's optimizers for a small model; with a user's own method, also train it."""
    is_own = isinstance(config.optimizer, CustomConfig)
    trial = _small(config, TRIED_WIDTH if is_own else 2)
    trial_device = device if is_own else torch.device("cpu")
    num_updates = TRIED_UPDATES if is_own else 0

    def micro_batch(n: int) -> MicroBatch:
        generator = torch.Generator().manual_seed(n)
        shape = (1, trial.model.sequence_length + 1)
        tokens = torch.randint(256, shape, generator=generator).to(trial_device)
        return tokens[:, :-1], tokens[:, 1:]

    delays = stage_delays(config.pipeline, config.training.seed)
    assembly = assemble(trial, micro_batch, device=trial_device)
    for step in assembly.engine.run(1, lambda: num_updates):
        # The method's rule for the learning rate has to answer for all delays of the run.
        for delay in delays:
            assembly.updater.lr_divisor(delay.tau_updates, step.iteration)
    if is_own:
        for stage in assembly.stages:
            assembly.updater.check_saved(stage)
        _check_resumes(config, trial, assembly)
        if config.pipeline.devices > 1:
            _check_independent_of_devices(config, trial, device)


def _check_resumes(config: RunConfig, trial: RunConfig, tried: Assembly) -> None:
    """Refuse a user's own method that a checkpoint does not restore: a resumed run would train
    otherwise.

    Args:
        config: the run's configuration.
        trial: the same with a small model.
        tried: what has trained the small model; it makes one more update.

    Raises:
        UserError: the next update is another one after a resume, or the method cannot be restored.
    """
    device = tried.stages[0].device
    num_stages = config.pipeline.stages
    stages = build_stages(trial, device, range(num_stages))
    for stage, original in zip(stages, tried.stages, strict=True):
        copy_tensors(list(stage.newest.values()), list(original.newest.values()))
    updater = MethodUpdater(trial, stages)
    states = {stage.index: tried.updater.stage_state(stage) for stage in tried.stages}
    with user_code(config, "load_state_dict", UserError):
        updater.load_stage_states(states, device)
    size = GRADIENT_SIZES[0]
    initial = _copies_of_newest(stages)
    random_states = generator_states(device)
    _step(tried.updater, tried.stages, TRIED_UPDATES, num_stages, size)
    set_generator_states(device, random_states)
    _step(updater, stages, TRIED_UPDATES, num_stages, size)
    if _differ(_changes_since(initial, tried.stages), _changes_since(initial, stages), ROUNDING):
        raise UserError(
            f"optimizer.method {config.optimizer.method}: a resumed run would train otherwise; its "
            f"state_dict() must hold everything that its step uses"
        )


def _check_independent_of_devices(
    config: RunConfig, trial: RunConfig, device: torch.device
) -> None:
    """Refuse a user's own method with which the trajectory would depend on the number of devices:
    each device has optimizers of its own, which see its stages only.

    Args:
        config: the run's configuration.
        trial: the same with a small model.
        device: where to try.

    Raises:
        UserError: stages change differently if they are on another number of devices.
    """
    num_stages = config.pipeline.stages
    for size in GRADIENT_SIZES:
        together, draws_numbers = _changes([range(num_stages)], trial, device, size)
        apart, _ = _changes(partition(num_stages, config.pipeline.devices), trial, device, size)
        why = "the parameters of all stages of a device together"
        tolerance = ROUNDING
        if draws_numbers:
            why = "random numbers"
            tolerance = 0.0
        if _differ(together, apart, tolerance):
            raise UserError(
                f"optimizer.method {config.optimizer.method}: computes with {why}, so that losses "
                f"would depend on the number of devices; set pipeline.devices to 1"
            )


def _differ(changes: Sequence[Tensor], others: Sequence[Tensor], tolerance: float) -> bool:
    """Whether two lists of changes, one per weight, differ by more than a share `tolerance` of a
    weight's change."""
    for one, other in zip(changes, others, strict=True):
        if (one - other).norm() > tolerance * one.norm():
            return True
    return False


def _changes(
    ranges: Sequence[range], trial: RunConfig, device: torch.device, size: float
) -> tuple[list[Tensor], bool]:
    """What the method changes in each weight of all stages in a few updates by given gradients,
    and whether it draws random numbers.

    Args:
        ranges: the stages of each device.
        size: the size of the gradients (`GRADIENT_SIZES`).
    """
    changes: list[Tensor] = []
    draws_numbers = False
    for own in ranges:
        stages = build_stages(trial, device, own)
        initial = _copies_of_newest(stages)
        torch.manual_seed(trial.training.seed)  # as on every device before a run
        before = generator_states(device)
        updater = MethodUpdater(trial, stages)
        for t in range(1, COMPARED_UPDATES + 1):
            _step(updater, stages, t, trial.pipeline.stages, size)
        after = generator_states(device)
        for name, state in before.items():
            draws_numbers |= not torch.equal(state, after[name])
        changes += _changes_since(initial, stages)
    return changes, draws_numbers


def _step(
    updater: MethodUpdater, stages: Sequence[StageVersions], t: int, num_stages: int, size: float
) -> None:
    """Make update t by given gradients."""
    for stage in stages:
        _give_gradients(stage, t, num_stages, size)
    updater.step(t)


def _copies_of_newest(stages: Sequence[StageVersions]) -> list[Tensor]:
    return [weight.detach().clone() for stage in stages for weight in stage.newest.values()]


def _changes_since(initial: Sequence[Tensor], stages: Sequence[StageVersions]) -> list[Tensor]:
    """The change of each of the newest weights."""
    now = _copies_of_newest(stages)
    return [weight - start for weight, start in zip(now, initial, strict=True)]


def _give_gradients(stage: StageVersions, t: int, num_stages: int, size: float) -> None:
    """Give random gradients for update t to the newest weights; on every device the same ones.

    A part of them is the same for all updates. The later the stage, the larger the other part: an
    optimizer that learns a step size from that learns another one on each device.
    """
    lasting = torch.Generator().manual_seed(stage.index)
    fresh = torch.Generator().manual_seed(num_stages * t + stage.index)
    for weight in stage.newest.values():
        gradient = torch.randn(weight.shape, generator=lasting)
        gradient += stage.index * torch.randn(weight.shape, generator=fresh)
        weight.grad = size * gradient.to(weight)


def _small(config: RunConfig, width: int) -> RunConfig:
    """The run with a small model and small batches, for a trial of its method."""
    # A stage with a delay keeps one, but of at most one update: larger rings would only take
    # memory.
    most = config.pipeline.accumulation
    delays = [min(delay.tau, most) for delay in stage_delays(config.pipeline)]
    changes = {
        "data": {"tokenizer": "bytes"},
        "pipeline": {"delay": delays, "devices": 1, "rings": "device", "recompute": False},
        "training": {"batch_size": 1},
        "logging": {"staleness_every": None},
        "runtime": {"compile": False, "graphs": False, "precision": "fp32"},
    }
    sections: dict[str, Any] = {"model": config.model.shrunk(width)}
    for name, update in changes.items():
        sections[name] = getattr(config, name).model_copy(update=update)
    return config.model_copy(update=sections)
