"""The one place that puts a run together (stages, weight versions, method, delay engine), and tries
the method."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from brx.config.schema import BasisRotationConfig, CustomConfig, OwnModelConfig, RunConfig
from brx.data.batches import Batches
from brx.data.prepare import PreparedData
from brx.errors import RunError, UserError
from brx.methods.table import find_method, ring_matrix_dtype
from brx.methods.updater import MethodUpdater
from brx.model.head import CHUNK_LOGITS
from brx.model.stage import Stage, make_stages, partition
from brx.optim.graphs import CudaRecorder, Recorder
from brx.pipeline.delay import check_devices, stage_delays
from brx.pipeline.engine import Engine, MicroBatch
from brx.pipeline.forecasts import FORECAST_RULES
from brx.pipeline.versions import StageVersions
from brx.pipeline.world import World
from brx.runs.checkpoint import read_stage
from brx.train.device import autocast
from brx.train.staleness import StalenessProbe

TRIED_WIDTH = (
    64  # at most, of the model that a user's own method trains on trial; the others fit any width
)
UPDATES = (
    2  # updates of the trial: one at version 0 everywhere, and one after the weights have moved on
)


@dataclass(frozen=True)
class Assembly:
    """One device's share of a run, ready to train."""

    stages: list[StageVersions]
    updater: MethodUpdater
    engine: Engine
    probe: StalenessProbe | None = None

    def stage_state(self, stage: StageVersions) -> dict[str, Any]:
        """What decides the trajectory of a stage: the content of its file in a checkpoint."""
        state = {
            "versions": stage.state_dict(),
            "rng": torch.get_rng_state(),
            **self.updater.stage_state(stage),
        }
        return state if self.probe is None else state | {"staleness": self.probe.stage_state(stage)}

    def restore(self, checkpoint: Path) -> None:
        """Continue from a checkpoint whose files have been checked (`check_stage`)."""
        states = {}
        for stage in self.stages:
            # By way of the CPU: a second copy of everything might not fit on the device.
            states[stage.index] = state = read_stage(
                checkpoint, stage.index, torch.device("cpu"), is_checked=True
            )
            versions = state.pop("versions")
            if versions["ring"] is None:
                versions = _without_older(stage, versions)
            stage.load_state_dict(versions)
            if self.probe is not None:
                self.probe.load_stage_state(stage, state.get("staleness", {}))
            torch.set_rng_state(state["rng"])
        self.updater.load_stage_states(states, self.stages[0].device)


def assemble(
    config: RunConfig,
    micro_batch: Callable[[int], MicroBatch],
    *,
    device: torch.device | None = None,
    world: World | None = None,
    own: range | None = None,
    dtype: torch.dtype = torch.float32,
    record: Recorder | None = None,
) -> Assembly:
    """Put together what one device of a run trains with: the stages `own`, by default its part of
    an even cut.

    `micro_batch` gives micro-batch n (from 1). `record` makes the graphs of `runtime.graphs`, by
    default CUDA graphs. UserError where the device cannot compute in the
    configured precision, the devices cannot run the configured delays, or the method's library is
    missing."""
    device, world = device or torch.device("cpu"), world or World()
    if own is None:
        ranges = partition(config.pipeline.stages, world.num_ranks)
        check_devices(stage_delays(config.pipeline), ranges)
        own = ranges[world.rank]
    stages = build_stages(
        config, device, own, num_in_flight=world.num_ranks - world.rank, dtype=dtype
    )
    # Finds the method, makes its optimizers for these stages and drives them: learning rates,
    #     gradient rule, forecast.
    if config.runtime.graphs and record is None:
        record = CudaRecorder()
    updater = MethodUpdater(config, stages, record)
    # Neighbours exchange the residual stream, which autocast makes bf16, and its gradient.
    shape = (config.training.batch_size, config.model.sequence_length, config.model.width)
    exchanged = torch.bfloat16 if config.runtime.precision == "bf16" else dtype
    engine = Engine(
        stages,
        updater,
        micro_batch,
        clip=config.training.clip,
        autocast=autocast(config.runtime, device),
        rank=world.rank,
        num_ranks=world.num_ranks,
        neighbours=world.connect(shape, exchanged, device),
        takes_update_norms=lambda t: (
            config.logging.update_norms and t % config.training.log_every == 0
        ),
        # With several devices, passes wait for messages, which no graph can hold.
        record=record if world.num_ranks == 1 else None,
    )
    probe = None
    if config.logging.staleness_every is not None:
        probe = StalenessProbe(
            stages, updater.optimizers, config.logging.staleness_every, engine.fresh_gradients
        )
        engine.watcher = probe
    return Assembly(stages, updater, engine, probe)


def _without_older(stage: StageVersions, versions: dict[str, Any]) -> dict[str, Any]:
    """The state of a stage's versions that was saved without its ring: all older versions are the
    newest weights, as before the first update."""
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
    """The stages `own` with their initial weights and their rings; on rank r with R - r
    micro-batches in flight."""
    parts = partition(config.model.blocks, config.pipeline.stages)
    delays = stage_delays(config.pipeline, config.training.seed)
    matrix_dtype = ring_matrix_dtype(config) if dtype == torch.float32 else dtype
    forecast = (
        None if config.pipeline.forecast is None else FORECAST_RULES[config.pipeline.forecast]
    )
    modules = make_stages(
        config.model,
        config.data.vocabulary_size,
        [parts[index] for index in own],
        config.training.seed,
        recompute=config.pipeline.recompute,
    )

    def ring_dtype(module: Stage) -> Callable[[str, Tensor], torch.dtype]:
        return lambda name, weight: matrix_dtype if name in module.cast else weight.dtype

    stages = []
    for index, stage in zip(own, modules, strict=True):
        if config.runtime.compile:
            for block in stage.blocks.values():
                block.compile()
        stages.append(
            StageVersions(
                stage.to(device, dtype),
                index,
                delays[index],
                config.pipeline.stash,
                ring_dtype(stage),
                num_in_flight=num_in_flight,
                on_host=config.pipeline.rings == "host",
                forecast=forecast,
            )
        )
    return stages


def training_batches(config: RunConfig, data: PreparedData) -> Batches:
    training, length = config.training, config.model.sequence_length
    return Batches(
        data.train, sequence_length=length, batch_size=training.batch_size, seed=training.seed
    )


def check_head(config: RunConfig) -> None:
    """Refuse a head whose backward pass would not see that its weights have been overwritten
    (docs/semantics.md)."""
    pipeline, training = config.pipeline, config.training
    is_own = isinstance(config.model, OwnModelConfig)
    has_delay = any(one.tau for one in stage_delays(pipeline))
    if is_own and has_delay and pipeline.stash != "exact" and config.runtime.precision == "bf16":
        raise UserError(
            f"pipeline.stash: {pipeline.stash} with a model of your own needs runtime.precision:"
            " fp32: under autocast it may compute with copies, which are not overwritten"
        )
    delay = stage_delays(pipeline)[-1].tau
    if pipeline.stash == "exact" or delay == 0:  # 0 in a pipeline
        return
    # Under autocast, and with a loss in chunks, it computes with what the forward pass has saved
    # elsewhere.
    if config.runtime.precision == "bf16":
        needs = "runtime.precision: fp32"
    elif (
        training.batch_size * config.model.sequence_length * config.data.vocabulary_size
        > CHUNK_LOGITS
    ):
        needs = (
            f"at most {CHUNK_LOGITS:,} logits per micro-batch (training.batch_size, data.tokenizer)"
        )
    else:
        return
    raise UserError(
        f"pipeline.stash: {pipeline.stash} with a delay of {delay} at the last stage needs "
        f"{needs}: its head would"
        " not see the overwritten weights; or use exact"
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
    """Make the method's optimizers for a small model with the same parameters by name; train a
    user's own two updates. UserError where the device lacks a number format, a package is missing,
    or a user's own method fails."""
    if device.type == "mps" and isinstance(config.optimizer, BasisRotationConfig):
        raise UserError(
            "runtime.device: basis rotation's first bases need float64, which mps lacks; use cpu"
        )
    if config.runtime.graphs:
        _check_graphs(config, device)
    is_own = isinstance(config.optimizer, CustomConfig)
    trial = _small(config, TRIED_WIDTH if is_own else 2)
    trial_device = device if is_own else torch.device("cpu")

    def micro_batch(n: int) -> MicroBatch:
        generator = torch.Generator().manual_seed(n)
        tokens = torch.randint(256, (1, trial.model.sequence_length + 1), generator=generator).to(
            trial_device
        )
        return tokens[:, :-1], tokens[:, 1:]

    state = torch.get_rng_state()
    try:
        assembly = assemble(trial, micro_batch, device=trial_device)
        for step in assembly.engine.run(1, lambda: UPDATES if is_own else 0):
            for delay in stage_delays(config.pipeline, config.training.seed):
                assembly.updater.lr_divisor(delay.tau_updates, step.iteration)
    except RunError as error:
        # Without a cause, the small model diverged. This says nothing about the run's model.
        if error.__cause__ is not None:
            raise UserError(f"{error} (in a trial on a small model)") from None
    finally:
        torch.set_rng_state(state)


def _small(config: RunConfig, width: int) -> RunConfig:
    # One update old where the run's are older: no more memory for the rings of a trial.
    delays = [
        min(delay.tau, config.pipeline.accumulation) for delay in stage_delays(config.pipeline)
    ]
    changes = {
        "data": {"tokenizer": "bytes"},
        "pipeline": {"delay": delays, "devices": 1, "rings": "device", "recompute": False},
        "training": {"batch_size": 1},
        "logging": {"staleness_every": None},
        "runtime": {"compile": False, "graphs": False, "precision": "fp32"},
    }
    sections = {
        name: getattr(config, name).model_copy(update=update) for name, update in changes.items()
    }
    return config.model_copy(update={"model": config.model.shrunk(width), **sections})
