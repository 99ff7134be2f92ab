"""Puts a run together: stages, weight versions, method and delay engine. No other code does this.

`brx.train.checks` tries the method on a small model first."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from brx.config.schema import OwnModelConfig, RunConfig
from brx.data.batches import Batches
from brx.data.prepare import PreparedData
from brx.methods.table import ring_matrix_dtype
from brx.methods.updater import MethodUpdater
from brx.model.stage import Stage, make_stages, partition
from brx.optim.graphs import CudaGraphMaker, GraphMaker
from brx.pipeline.delay import check_devices, stage_delays
from brx.pipeline.engine import Engine, MicroBatch
from brx.pipeline.forecasts import FORECAST_RULES
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
from brx.train.first_passes import FirstPasses
from brx.train.staleness import StalenessProbe


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
        make_graph = CudaGraphMaker(device)
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
        engine.watchers.append(probe)
    if isinstance(config.model, OwnModelConfig):
        where = f"model.class {config.model.name}"
        others_draw = bool(config.runtime.compile) or updater.method.corrects_gradients
        engine.watchers.append(FirstPasses(where, stages, others_draw=others_draw))
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
