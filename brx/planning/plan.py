"""Plans the memory that every rank of a run needs, from closed forms and the shapes of the model's
own tensors.

The memory of a rank peaks when the loss is computed, in a backward pass, when gradients arrive, or
when the optimizer steps. Weights, the gradients of an update, optimizer state and rings are always
present."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Literal, get_args

import torch

from brx.config import schema
from brx.config.schema import RunConfig
from brx.methods.table import ring_matrix_dtype
from brx.methods.trial import Kept, trial_of
from brx.model.sizes import (
    FP32,
    Sizes,
    block_activation_bytes,
    early_gradient_bytes,
    head_bytes,
    num_elements,
)
from brx.model.stage import partition
from brx.optim.basis_rotation import BasisRotation
from brx.optim.parameter_state import state_shapes
from brx.pipeline.delay import StageDelay, check_devices, stage_delays
from brx.planning.cuts import planned_ranges
from brx.planning.flops import stages_sizes
from brx.planning.update_memory import (
    computes_with_forecasts,
    matrices,
    rotated_sides,
    update_bytes,
)

Source = Literal["2nd", "1st"]
Geometry = Literal["bilateral", "unilateral"]
STRATEGIES: tuple[tuple[Source, Geometry], ...] = tuple(
    itertools.product(get_args(Source), get_args(Geometry))
)

STAGE_PARTS = ("weights", "gradients", "moments", "rotation", "rings", "activations")
"""The fields of `StageMemory` that are printed."""
RANK_PARTS = (*STAGE_PARTS, "logits", "update")
"""The fields of `RankMemory` that are always printed."""
OPTIONAL_PARTS = ("probe", "links", "communicators", "graphs", "checkpoint")
"""The fields of `RankMemory` that are printed only if they are not zero."""

NUM_COMMUNICATORS = 2  # one for each direction
P2P_CHANNELS = 32  # at most: NCCL_MAX_P2P_NCHANNELS
CHANNEL_BYTES = 4 * 2**20  # NCCL_BUFFSIZE


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """What one stage adds to its rank, in bytes."""

    index: int
    num_parameters: int
    weights: int
    """The newest in fp32, as gradients and moments; with a delay also the weights in use."""
    gradients: int
    moments: int
    """Everything that the method keeps, except bases."""
    rotation: int
    """Bases and covariances."""
    rings: int
    """The older weight versions, and what weight prediction keeps."""
    activations: int
    """Activations of all micro-batches in flight, with autocast's copies of weights."""
    host_rings: int
    """Rings in host memory next to a GPU (`pipeline.rings: host`)."""
    saved: int
    """The content of the stage's file in a checkpoint."""


@dataclass(frozen=True)
class Phase:
    """A part of an iteration in which a rank's memory may peak, such as an update."""

    name: str
    items: Mapping[str, int]
    """All memory that is taken then, in bytes, by name."""

    @property
    def total(self) -> int:
        return sum(self.items.values())


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """The memory of a rank, in bytes. A field is a sum over the rank's stages, unless the rank has
    such memory only once."""

    stages: Sequence[int]
    by_stage: Sequence[StageMemory]
    num_parameters: int
    weights: int
    gradients: int
    moments: int
    rotation: int
    rings: int
    activations: int
    logits: int
    """Working memory of head and loss, on the rank with the last stage."""
    update: int
    """Working memory of an update."""
    probe: int
    """Tensors of the staleness measures (`logging.staleness_every`)."""
    links: int
    """Buffers for activations and gradients that neighbours exchange."""
    communicators: int
    """NCCL's own buffers."""
    graphs: int
    """The pool of CUDA graphs (`runtime.graphs`)."""
    checkpoint: int
    """The copy from which a checkpoint is written in the background. It is in host memory, so
    on a GPU it is not part of the peak."""
    host: int
    """Memory of the machine that a rank on a GPU takes: rings and the copy for a checkpoint."""
    phases: Sequence[Phase]

    @property
    def fullest(self) -> Phase:
        """The phase in which most memory is taken."""
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def peak(self) -> int:
        return self.fullest.total


def plan_memory(
    config: RunConfig,
    device_type: str,
    ranges: Sequence[Sequence[int]] | None = None,
    *,
    in_flight: Sequence[float] | None = None,
) -> list[RankMemory]:
    """The memory of every rank.

    Args:
        config: the run's configuration.
        device_type: `cpu`, `cuda` or `mps`.
        ranges: the stages of each rank; by default `planned_ranges`.
        in_flight: by rank, the most micro-batches whose activations it keeps at one time; by
            default the R - r of asynchronous 1F1B.

    Raises:
        UserError: this number of devices cannot run the configured delays.
    """
    if ranges is None:
        ranges = planned_ranges(config)
    if in_flight is None:
        check_devices(stage_delays(config.pipeline), ranges)
        in_flight = range(len(ranges), 0, -1)
    ranks = []
    for stages, most in zip(ranges, in_flight, strict=True):
        ranks.append(_Rank(config, device_type, stages, len(ranges), most).memory())
    return ranks


def planned_device_type(config: RunConfig) -> str:
    """The type of device that a plan is for: CUDA if the configuration leaves it open."""
    return "cuda" if config.runtime.device == "auto" else config.runtime.device


class _Rank:
    """The plan of one rank."""

    def __init__(
        self,
        config: RunConfig,
        device_type: str,
        stages: Sequence[int],
        num_ranks: int,
        in_flight: float,
    ) -> None:
        self.config = config
        self.device_type = device_type
        self.stages = stages
        self.num_ranks = num_ranks
        self.in_flight = in_flight
        self.has_first = 0 in stages
        self.has_last = config.pipeline.stages - 1 in stages
        self.blocks = partition(config.model.blocks, config.pipeline.stages)
        self.delays = stage_delays(config.pipeline)
        self.sizes = stages_sizes(config, stages)
        self.by_stage = [self._stage(index) for index in stages]

    def memory(self) -> RankMemory:
        config = self.config
        update = update_bytes(config, self.sizes, self.device_type)
        links = self._link_bytes()
        communicators = self._communicator_bytes()
        is_probed = config.logging.staleness_every is not None
        probe = _Probe.of(config, self.sizes) if is_probed else None
        checkpoint = self._checkpoint_bytes(probe)
        logits, early_gradients = self._head_bytes()
        passes = self._passes(logits, early_gradients)
        graphs = self._graph_bytes(passes, update)

        always = {part: self._sum(part) for part in STAGE_PARTS if part != "activations"}
        always |= {"links": links, "communicators": communicators}
        if self.device_type != "cuda":
            always["checkpoint"] = checkpoint
        phases = self._phases(passes, update, logits, graphs, probe)
        host_rings = sum(stage.host_rings for stage in self.by_stage)
        return RankMemory(
            stages=self.stages,
            by_stage=self.by_stage,
            num_parameters=self._sum("num_parameters"),
            **{part: self._sum(part) for part in STAGE_PARTS},
            logits=logits,
            update=update,
            probe=0 if probe is None else probe.kept,
            links=links,
            communicators=communicators,
            graphs=graphs,
            checkpoint=checkpoint,
            host=host_rings + checkpoint if self.device_type == "cuda" else 0,
            phases=[_with(phase, always) for phase in phases],
        )

    def _head_bytes(self) -> tuple[int, int]:
        """What the head needs for the loss, and the gradients that it computes along with it."""
        if not self.has_last:
            return 0, 0
        config = self.config
        model, batch = config.model, config.training.batch_size
        vocabulary_size = config.data.vocabulary_size
        bf16 = config.runtime.precision == "bf16"
        logits = head_bytes(model, vocabulary_size, batch, bf16=bf16)
        return logits, early_gradient_bytes(model, vocabulary_size, batch)

    def _passes(self, logits: int, early_gradients: int) -> list[Phase]:
        """The phases of a micro-batch's passes, with what they need at most."""
        in_passes = {"activations": self._sum("activations"), "early gradients": early_gradients}
        return [
            Phase("the loss", {**in_passes, "logits": logits}),
            Phase("a backward pass", {**in_passes, "gradients in a block": self._in_a_block()}),
        ]

    def _phases(
        self,
        passes: Sequence[Phase],
        update: int,
        logits: int,
        graphs: int,
        probe: _Probe | None,
    ) -> list[Phase]:
        """All phases in which the rank may need the most, without what it always has."""
        others = {"activations in flight": self._activations_across_an_update()}
        phases = [
            Phase("the arrival of gradients", {**others, "arriving": self._arriving_bytes()}),
            Phase("an update", {**others, "update": update}),
        ]
        if graphs:
            # The first updates and refreshes run outside of graphs, and so does every validation.
            phases += [
                Phase("an update outside of graphs", phases[-1].items),
                Phase("a validation", {"logits": logits}),
            ]
        if probe is not None:
            phases += probe.phases(passes, self._fresh_sum(), self._sum("gradients"), update)
            passes = [_with(phase, {"older updates": probe.older}) for phase in passes]
        phases = [*passes, *phases]
        return self._beside_the_pool(phases, graphs) if graphs else phases

    def _sum(self, part: str) -> int:
        return sum(getattr(stage, part) for stage in self.by_stage)

    def _stage(self, index: int) -> StageMemory:
        config = self.config
        delay = self.delays[index]
        sizes = self.sizes[index]
        num_parameters = num_elements(sizes)
        kept = optimizer_bytes(config, sizes)
        in_use = _in_use_bytes(config, delay, sizes) if delay.tau else 0
        rings = _Rings.of(config, delay, sizes, self.device_type, math.ceil(self.in_flight))
        saved = FP32 * num_parameters + rings.corrections_saved + kept.moments + kept.bases
        if config.checkpoint.rings:
            saved += rings.slots
        return StageMemory(
            index=index,
            num_parameters=num_parameters,
            weights=FP32 * num_parameters + in_use,
            gradients=FP32 * num_parameters,
            moments=kept.moments,
            rotation=kept.bases,
            rings=rings.on_device,
            activations=self._activation_bytes(index, sizes, delay),
            host_rings=rings.on_host,
            saved=saved,
        )

    def _activation_bytes(self, index: int, sizes: Sizes, delay: StageDelay) -> int:
        config = self.config
        casts = 0
        is_ring_cast = ring_matrix_dtype(config) == torch.bfloat16 and delay.tau > 0
        if config.runtime.precision == "bf16" and not is_ring_cast:
            # Autocast's copies of fp32 matrices; matrices of a bf16 ring need none.
            casts = 2 * _num_cast_elements(sizes)
        blocks = self.blocks[index]
        if config.pipeline.recompute:
            kept = len(blocks) * boundary_bytes(config)
        else:
            kept = sum(self._block_bytes(block) for block in blocks)
        # Without delay, all micro-batches in flight see the same weights, and one copy of them.
        num_casts = self.in_flight if delay.tau else 1
        return int(self.in_flight * kept + num_casts * casts)

    def _block_bytes(self, block: int) -> int:
        """The activations of one micro-batch in one block."""
        return block_activation_bytes(
            self.config.model,
            block,
            self.config.training.batch_size,
            bf16=self.config.runtime.precision == "bf16",
            device_type=self.device_type,
        )

    def _in_a_block(self) -> int:
        """The gradients of activations within a block, and its recomputed activations."""
        gradients = 6 * boundary_bytes(self.config)
        if not self.config.pipeline.recompute:
            return gradients
        own_blocks = [block for index in self.stages for block in self.blocks[index]]
        return gradients + max(map(self._block_bytes, own_blocks))

    def _activations_across_an_update(self) -> int:
        """The activations that are kept during an update: those of the micro-batches in flight
        except the one whose backward pass has just ended. Without delay there are none."""
        delayed = sum(stage.activations for stage in self.by_stage if self._is_delayed(stage.index))
        return int(delayed / self.in_flight * (self.in_flight - 1))

    def _is_delayed(self, index: int) -> bool:
        return self.delays[index].tau > 0

    def _arriving_bytes(self) -> int:
        """The gradients that autograd leaves at the weights in use, until they have been added to
        the update's gradients."""
        config = self.config
        arriving = sum(
            _in_use_bytes(config, self.delays[index], self.sizes[index]) for index in self.stages
        )
        if config.pipeline.accumulation > 1 and ring_matrix_dtype(config) == torch.bfloat16:
            # From the second micro-batch on, bf16 gradients are cast before they are added.
            for index in self.stages:
                if self._is_delayed(index):
                    arriving += FP32 * _num_cast_elements(self.sizes[index])
        return arriving

    def _fresh_sum(self) -> int:
        """The probe's sum of fresh gradients, from its second micro-batch on."""
        return self._sum("gradients") if self.config.pipeline.accumulation > 1 else 0

    def _graph_bytes(self, passes: Sequence[Phase], update: int) -> int:
        """The memory pool that all CUDA graphs use in turn: as large as the working memory of the
        largest graph."""
        if not self.config.runtime.graphs or self.device_type != "cuda":
            return 0
        sizes = [update] if self._is_rotation else []
        # With several devices, passes wait for messages, which no graph can hold.
        if self.num_ranks == 1:
            sizes += [phase.total for phase in passes]
        return max(sizes, default=0)

    def _beside_the_pool(self, phases: Sequence[Phase], graphs: int) -> list[Phase]:
        """The same phases. Those outside of graphs have the graphs' pool in addition, because
        nothing else can use its memory."""
        held: set[str] = set()
        if self._is_rotation:
            held.add("an update")
        if self.num_ranks == 1:
            held |= {"the loss", "a backward pass", "the arrival of gradients"}
        pool = {"graphs": graphs}
        return [phase if phase.name in held else _with(phase, pool) for phase in phases]

    @property
    def _is_rotation(self) -> bool:
        return isinstance(self.config.optimizer, schema.BasisRotationConfig)

    def _link_bytes(self) -> int:
        """The buffers for activations and gradients that are received or being sent."""
        num_buffers = self._num_neighbours  # at most one message being sent to each
        # The buffers of received messages, as `DistributedWorld.connect` makes them.
        if not self.has_first:
            num_buffers += math.ceil(self.in_flight) + 1
        if not self.has_last:
            num_buffers += 2
        return num_buffers * boundary_bytes(self.config)

    def _communicator_bytes(self) -> int:
        is_nccl = self.device_type == "cuda" and not self.config.runtime.share_gpus
        if not is_nccl:
            return 0
        return NUM_COMMUNICATORS * self._num_neighbours * P2P_CHANNELS * CHANNEL_BYTES

    @property
    def _num_neighbours(self) -> int:
        return 2 - int(self.has_first) - int(self.has_last)

    def _checkpoint_bytes(self, probe: _Probe | None) -> int:
        if not self.config.checkpoint.background:
            return 0
        older = 0 if probe is None else probe.older
        return sum(stage.saved for stage in self.by_stage) + older


def _with(phase: Phase, more: Mapping[str, int]) -> Phase:
    return Phase(phase.name, {**more, **phase.items})


def boundary_bytes(config: RunConfig) -> int:
    """The residual stream of one micro-batch, as it goes from one block to the next."""
    element = 2 if config.runtime.precision == "bf16" else FP32
    return element * config.training.batch_size * config.model.sequence_length * config.model.width


@dataclass(frozen=True)
class _Rings:
    """The older weight versions of a stage, in bytes."""

    slots: int
    corrections_saved: int
    """What a checkpoint holds for weight prediction and error feedback: an average of the updates,
    and the last update."""
    on_device: int
    """Slots and staging buffers on the device, with everything that weight prediction and error
    feedback keep (the weights before an update, too)."""
    on_host: int = 0

    @classmethod
    def of(
        cls, config: RunConfig, delay: StageDelay, sizes: Sizes, device_type: str, in_flight: int
    ) -> _Rings:
        if delay.tau == 0:
            return cls(0, 0, 0)
        pipeline = config.pipeline
        slot = _in_use_bytes(config, delay, sizes)
        slots = delay.num_slots * slot
        weights = FP32 * num_elements(sizes)
        averages_updates = pipeline.stash == "predict" or pipeline.forecast == "average-update"
        saved = 0
        before = 0  # the weights before an update
        if averages_updates:
            saved += weights
        if averages_updates or computes_with_forecasts(config):
            before += weights
        if pipeline.error_feedback:
            saved += weights
            before += weights
        kept = saved + before
        if pipeline.rings == "device":
            return cls(slots, saved, slots + kept)
        # The device has staging buffers: one for the version that is fetched next, and with several
        # micro-batches in flight one for each of them.
        buffers = slot if in_flight == 1 else slot * (in_flight + 1)
        if device_type == "cpu":
            return cls(slots, saved, slots + buffers + kept)
        return cls(slots, saved, buffers + kept, on_host=slots)


def _in_use_bytes(config: RunConfig, delay: StageDelay, sizes: Sizes) -> int:
    """Bytes of the weights with which a stage computes; with a delay, these have the dtypes of its
    slots."""
    num_in_matrices = _num_cast_elements(sizes)
    matrix_element = ring_matrix_dtype(config).itemsize if delay.tau else FP32
    return matrix_element * num_in_matrices + FP32 * (num_elements(sizes) - num_in_matrices)


def _num_cast_elements(sizes: Sizes) -> int:
    """The weights that autocast casts wherever they are used; rings may keep them in bf16."""
    return sum(size.numel for size in sizes.values() if size.is_cast)


@dataclass(frozen=True)
class _Probe:
    """The measures of staleness of a rank, in bytes."""

    older: int
    """Older updates that are kept."""
    before: int
    """The weights before a measured update."""
    bases: int
    """A copy of the bases before it."""
    products: int
    """Two gradients of the largest parameter and their product in float64, for a cosine."""

    @classmethod
    def of(cls, config: RunConfig, by_stage: Mapping[int, Sizes]) -> _Probe:
        every = config.logging.staleness_every
        assert every is not None
        delays = stage_delays(config.pipeline)
        older = before = bases = 0
        for index, sizes in by_stage.items():
            size = FP32 * num_elements(sizes)
            # Just before a measured update t, the updates t - 1 and t - lag are kept, and those a
            # lag before later measured ones.
            num_kept = len({1, *range(delays[index].max_tau_updates, 0, -every)})
            older += num_kept * size
            before += size
            if isinstance(config.optimizer, schema.BasisRotationConfig):
                bases += FP32 * _num_basis_elements(config, sizes)
        largest = max(size.numel for sizes in by_stage.values() for size in sizes.values())
        return cls(older, before, bases, products=3 * 8 * largest)

    @property
    def kept(self) -> int:
        return self.older + self.before + self.bases

    def phases(
        self, passes: Sequence[Phase], fresh_sum: int, gradients: int, update: int
    ) -> list[Phase]:
        """The phases of a measured update; its second pass is another micro-batch's `passes`."""
        always = {"older updates": self.older, "weights before": self.before}
        second = [
            _with(Phase(f"{phase.name} of the probe", phase.items), {"fresh sum": fresh_sum})
            for phase in passes
        ]
        comparison = {"fresh gradients": gradients, "products": self.products}
        measured = {"bases before": self.bases, "update": max(update, self.before)}
        phases = [
            *second,
            Phase("the comparison of gradients", comparison),
            Phase("a measured update", measured),
        ]
        return [_with(phase, always) for phase in phases]


def _num_basis_elements(config: RunConfig, sizes: Sizes) -> int:
    """The elements of all bases of basis rotation."""
    total = 0
    for shape in matrices(sizes):
        num_matrices = math.prod(shape[:-2])
        total += num_matrices * sum(side**2 for side in rotated_sides(config, shape))
    return total


def optimizer_bytes(config: RunConfig, sizes: Sizes) -> Kept:
    """What the run's method keeps for these parameters, found in a trial of its optimizers."""
    return trial_of(config).kept_for(sizes)


def overhead_elements(shape: tuple[int, ...], source: Source, geometry: Geometry) -> int:
    """Elements that BasisRotation keeps beyond Adam's two moments, however long the sides
    (appendix "Memory Overhead Analysis")."""
    options = {name: option.default for name, option in signature(BasisRotation).parameters.items()}
    options |= {"source": source, "geometry": geometry, "max_dim": None}
    shapes = state_shapes(torch.empty(shape, device="meta"), options)
    return sum(
        math.prod(kept) for name, kept in shapes.items() if name.endswith(("_basis", "_covariance"))
    )
