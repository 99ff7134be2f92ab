"""Puts a run together: stages, weight versions, method and delay engine. No other code does this.
It also tries the method on a small model before the run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from brx.config.schema import BasisRotationConfig, CustomConfig, OwnModelConfig, RunConfig
from brx.data.batches import Batches
from brx.data.prepare import PreparedData
from brx.errors import RunError, UserError
from brx.methods.custom import user_code
from brx.methods.table import find_method, ring_matrix_dtype
from brx.methods.updater import MethodUpdater
from brx.model.head import CHUNK_LOGITS
from brx.model.stage import Stage, make_stages, partition
from brx.optim.graphs import CudaGraphMaker, GraphMaker
from brx.pipeline.delay import VaryingDelay, check_devices, stage_delays
from brx.pipeline.engine import Engine, MicroBatch
from brx.pipeline.forecasts import FORECAST_RULES
from brx.pipeline.slots import copy_tensors
from brx.pipeline.versions import StageVersions
from brx.pipeline.world import World
from brx.runs.checkpoint import read_stage
from brx.train.device import (
    autocast,
    check_compiler,
    generator_states,
    make_room_for_graphs,
    set_generator_states,
)
from brx.train.staleness import StalenessProbe

# The largest width of the model on which a user's own method is tried. Other methods fit any width.
TRIED_WIDTH = 64
# The number of updates in that trial. The first update begins at version 0 everywhere, the second
# one after the weights have changed.
TRIED_UPDATES = 2
# The number of updates after which stages that share a device are compared with stages that do not.
# An optimizer that learns its step size from all its parameters may need five before it changes it.
COMPARED_UPDATES = 6
# The typical entries of the gradients in this comparison, one after another. Small ones show what
# is divided by the size of all gradients, such as a weight decay. Large ones show what is compared
# with a number, such as a limit for the norm of all.
GRADIENT_ENTRIES = (0.01, 1.0)
# The largest difference between the two, relative to what the updates have changed, that counts as
# rounding: a batch of matrix products may round differently if the batch has another size.
ROUNDING = 1e-3


@dataclass(frozen=True)
class Assembly:
    """One device's share of a run, ready to train."""

    SHARED: ClassVar[tuple[str, ...]] = ("versions", "staleness")
    """The entries of `stage_state` that share memory with the tensors that train."""

    stages: list[StageVersions]
    updater: MethodUpdater
    engine: Engine
    probe: StalenessProbe | None = None
    """Set if `logging.staleness_every` is."""

    def stage_state(self, stage: StageVersions) -> dict[str, Any]:
        """Everything that decides the trajectory of a stage: the content of its file in a
        checkpoint. The entries in `SHARED` are not copies; the others are copies on the CPU."""
        state = {
            "versions": stage.state_dict(),
            **generator_states(stage.device),
            **self.updater.stage_state(stage),
        }
        if self.probe is not None:
            state["staleness"] = self.probe.stage_state(stage)
        return state

    def restore(self, checkpoint: Path) -> None:
        """Continue from a checkpoint.

        Args:
            checkpoint: its folder, whose files have been checked (`check_stage_files`).
        """
        # By way of the CPU: a second copy of everything might not fit on the device.
        cpu = torch.device("cpu")
        states = {}
        for stage in self.stages:
            state = read_stage(checkpoint, stage.index, cpu, is_checked=True)
            states[stage.index] = state
            versions = state.pop("versions")
            if versions["ring"] is None:
                versions = _without_older(stage, versions)
            stage.load_state_dict(versions)
            if self.probe is not None:
                self.probe.load_stage_state(stage, state.get("staleness", {}))
            set_generator_states(stage.device, state)
        self.updater.load_stage_states(states, self.stages[0].device)


def assemble(
    config: RunConfig,
    micro_batch: Callable[[int], MicroBatch],
    *,
    device: torch.device | None = None,
    world: World | None = None,
    own: range | None = None,
    dtype: torch.dtype = torch.float32,
    make_graph: GraphMaker | None = None,
) -> Assembly:
    """Put together what one device of a run trains with.

    Args:
        config: the run's configuration.
        micro_batch: returns micro-batch n (from 1).
        device: where to compute; by default the CPU.
        world: the processes of the run; by default this one alone.
        own: the stages of this device; by default its part of an even division.
        dtype: the data type of the weights.
        make_graph: makes the graphs of `runtime.graphs`. By default CUDA graphs on CUDA, and none
            elsewhere: a measurement may repeat a GPU's run on the CPU.

    Raises:
        UserError: the device cannot compute in the configured precision, the devices cannot run the
            configured delays, or the method's library or a compiler is missing.
    """
    device = device or torch.device("cpu")
    check_compiler(config.runtime, device)
    make_room_for_graphs(config.runtime)
    world = world or World()
    if own is None:
        ranges = partition(config.pipeline.stages, world.num_ranks)
        check_devices(stage_delays(config.pipeline), ranges)
        own = ranges[world.rank]
    stages = build_stages(
        config, device, own, num_in_flight=world.num_ranks - world.rank, dtype=dtype
    )
    if config.runtime.graphs and make_graph is None and device.type == "cuda":
        make_graph = CudaGraphMaker()
    # Finds the method, makes its optimizers for these stages, and drives them: learning rates,
    # gradient rule, forecast.
    updater = MethodUpdater(config, stages, make_graph)
    # Neighbours exchange the residual stream, which autocast makes bf16, and its gradient.
    shape = (config.training.batch_size, config.model.sequence_length, config.model.width)
    exchanged = torch.bfloat16 if config.runtime.precision == "bf16" else dtype

    def takes_update_norms(t: int) -> bool:
        return config.logging.update_norms and t % config.training.log_every == 0

    engine = Engine(
        stages,
        updater,
        micro_batch,
        clip=config.training.clip,
        autocast=autocast(config.runtime, device),
        rank=world.rank,
        num_ranks=world.num_ranks,
        neighbours=world.connect(shape, exchanged, device),
        takes_update_norms=takes_update_norms,
        # With several devices, passes wait for messages, which no graph can hold.
        make_graph=make_graph if world.num_ranks == 1 else None,
        compiles_whole=config.runtime.compile == "whole",
    )
    probe = None
    if config.logging.staleness_every is not None:
        probe = StalenessProbe(
            stages, updater.optimizers, config.logging.staleness_every, engine.fresh_gradients
        )
        engine.watcher = probe
    return Assembly(stages, updater, engine, probe)


def _without_older(stage: StageVersions, versions: dict[str, Any]) -> dict[str, Any]:
    """Complete a state that was saved without a ring: in the new ring, all older versions are the
    newest weights, as before the first update.

    Args:
        versions: a `StageVersions.state_dict` with `ring` None.
    """
    ring = {}
    if stage.delay.tau:
        for name, weight in versions["weights"].items():
            ring[name] = weight.expand(stage.delay.num_slots, *weight.shape)
    return versions | {"ring": ring}


def build_stages(
    config: RunConfig,
    device: torch.device,
    own: range,
    *,
    num_in_flight: int = 1,
    dtype: torch.dtype = torch.float32,
) -> list[StageVersions]:
    """Some stages of a run with their initial weights and their rings.

    Args:
        config: the run's configuration.
        device: where the weights are made.
        own: the indices of the stages.
        num_in_flight: the largest number of micro-batches between forward and backward pass on this
            device: R - r on rank r of R.
        dtype: the data type of the weights.
    """
    block_ranges = partition(config.model.blocks, config.pipeline.stages)
    delays = stage_delays(config.pipeline, config.training.seed)
    matrix_dtype = ring_matrix_dtype(config) if dtype == torch.float32 else dtype
    forecast = None
    if config.pipeline.forecast is not None:
        forecast = FORECAST_RULES[config.pipeline.forecast]
    modules = make_stages(
        config.model,
        config.data.vocabulary_size,
        [block_ranges[index] for index in own],
        config.training.seed,
        recompute=config.pipeline.recompute,
    )

    def slot_dtype_for(module: Stage) -> Callable[[str, Tensor], torch.dtype]:
        return lambda name, weight: matrix_dtype if name in module.cast else weight.dtype

    stages = []
    for index, module in zip(own, modules, strict=True):
        if config.runtime.compile is True:
            for block in module.blocks.values():
                # A graph per shape, so that a resumed run computes with the same ones.
                block.compile(dynamic=False)
        stage = StageVersions(
            _in_precision(module.to(device), dtype),
            index,
            delays[index],
            config.pipeline.stash,
            slot_dtype_for(module),
            num_in_flight=num_in_flight,
            on_host=config.pipeline.rings == "host",
            forecast=forecast,
            error_feedback=config.pipeline.error_feedback,
        )
        stages.append(stage)
    return stages


def _in_precision(module: Stage, dtype: torch.dtype) -> Stage:
    """A stage whose numbers have the precision of a data type. In fp32, as the weights are made,
    buffers stay what the model made them: a table in float64, or one of complex numbers, of which
    `Module.to` would keep the real part."""
    if dtype == torch.float32:
        return module

    def convert(tensor: Tensor) -> Tensor:
        if tensor.is_complex():
            return tensor.to(dtype.to_complex())
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    module._apply(convert)  # type: ignore[no-untyped-call]
    return module


def training_batches(config: RunConfig, data: PreparedData) -> Batches:
    """The micro-batches of a run, in an order that depends on the seed alone."""
    return Batches(
        data.train,
        sequence_length=config.model.sequence_length,
        batch_size=config.training.batch_size,
        seed=config.training.seed,
    )


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
    """Refuse a user's own method with which a resumed run would train otherwise: what a checkpoint
    has of it does not restore it.

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
    entry = GRADIENT_ENTRIES[0]
    initial = _copies_of_newest(stages)
    draws = generator_states(device)
    _step(tried.updater, tried.stages, TRIED_UPDATES, num_stages, entry)
    set_generator_states(device, draws)
    _step(updater, stages, TRIED_UPDATES, num_stages, entry)
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
    for entry in GRADIENT_ENTRIES:
        together, draws = _changes([range(num_stages)], trial, device, entry)
        apart, _ = _changes(partition(num_stages, config.pipeline.devices), trial, device, entry)
        if _differ(together, apart, 0.0 if draws else ROUNDING):
            why = "random numbers" if draws else "the parameters of all stages of a device together"
            raise UserError(
                f"optimizer.method {config.optimizer.method}: computes with {why}, so that losses "
                f"would depend on the number of devices; set pipeline.devices to 1"
            )


def _differ(changes: Sequence[Tensor], others: Sequence[Tensor], tolerance: float) -> bool:
    """Whether a weight has changed otherwise in the second case, by more than a part `tolerance` of
    its change."""
    for one, other in zip(changes, others, strict=True):
        if (one - other).norm() > tolerance * one.norm():
            return True
    return False


def _changes(
    ranges: Sequence[range], trial: RunConfig, device: torch.device, entry: float
) -> tuple[list[Tensor], bool]:
    """What the method changes in each weight of all stages in a few updates by given gradients,
    and whether it draws random numbers.

    Args:
        ranges: the stages of each device.
        entry: the typical entry of the gradients.
    """
    changes: list[Tensor] = []
    draws = False
    for own in ranges:
        stages = build_stages(trial, device, own)
        initial = _copies_of_newest(stages)
        torch.manual_seed(trial.training.seed)  # as on every device before a run
        before = generator_states(device)
        updater = MethodUpdater(trial, stages)
        for t in range(1, COMPARED_UPDATES + 1):
            _step(updater, stages, t, trial.pipeline.stages, entry)
        after = generator_states(device)
        draws |= any(not torch.equal(state, after[name]) for name, state in before.items())
        changes += _changes_since(initial, stages)
    return changes, draws


def _step(
    updater: MethodUpdater, stages: Sequence[StageVersions], t: int, num_stages: int, entry: float
) -> None:
    """Make update t by given gradients."""
    for stage in stages:
        _give_gradients(stage, t, num_stages, entry)
    updater.step(t)


def _copies_of_newest(stages: Sequence[StageVersions]) -> list[Tensor]:
    return [weight.detach().clone() for stage in stages for weight in stage.newest.values()]


def _changes_since(initial: Sequence[Tensor], stages: Sequence[StageVersions]) -> list[Tensor]:
    """By how much the newest weights differ from what they were."""
    now = _copies_of_newest(stages)
    return [weight - start for weight, start in zip(now, initial, strict=True)]


def _give_gradients(stage: StageVersions, t: int, num_stages: int, entry: float) -> None:
    """Give random gradients for update t to the newest weights; on every device the same ones.

    A part of them is the same for all updates. The later the stage, the larger the other part: an
    optimizer that learns a step size from that learns another one on each device.
    """
    lasting = torch.Generator().manual_seed(stage.index)
    fresh = torch.Generator().manual_seed(num_stages * t + stage.index)
    for weight in stage.newest.values():
        gradient = torch.randn(weight.shape, generator=lasting)
        gradient += stage.index * torch.randn(weight.shape, generator=fresh)
        weight.grad = entry * gradient.to(weight)


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
