"""Which weights a stage uses when: the meaning of delay (docs/semantics.md).

Every engine asks `StageDelay`; no other place does arithmetic on versions or slots.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from brx.config.schema import DelayLike, PipelineConfig
from brx.errors import UserError


@dataclass(frozen=True)
class StageDelay:
    """The delay of one stage, and which versions of its weights follow from it.

    Micro-batches are counted n = 1, 2, ...; update t takes M of them, (t - 1) M + 1 to t M. Version v of the weights
    is what v updates have made of them. A version has a slot of the stage's ring until the version that is `num_slots`
    updates newer takes its place.

    Attributes:
        tau: how many micro-batches old the weights are from which a gradient was computed, once the pipeline has
            filled.
        accumulation: M, the micro-batches per update.
    """

    tau: int
    accumulation: int = 1

    def version_used(self, micro_batch: int) -> int:
        """The version with which the forward pass of a micro-batch runs: max(0, floor((n - 1 - tau) / M))."""
        return max(0, self._version_since_filled(micro_batch))

    def update_of(self, micro_batch: int) -> int:
        """The update that a micro-batch's gradient goes into; its backward pass finds version t - 1 the newest."""
        return (micro_batch - 1) // self.accumulation + 1

    def ends_update(self, micro_batch: int) -> bool:
        """Whether a micro-batch is the last one of its update."""
        return micro_batch % self.accumulation == 0

    @property
    def in_updates(self) -> float:
        """tau / M: how many updates old the weights are, on average over an update's micro-batches."""
        return self.tau / self.accumulation

    @property
    def most_in_updates(self) -> int:
        """ceil(tau / M): how many updates old the weights of an update's first micro-batch are, the oldest of its M."""
        return math.ceil(self.tau / self.accumulation)

    @property
    def num_slots(self) -> int:
        """Versions that are in use at one time, the newest among them."""
        return self.most_in_updates + 1

    def slot_used(self, micro_batch: int) -> int:
        """The slot that holds `version_used(micro_batch)`.

        While the pipeline fills, that is version 0, which all slots hold at first: the formula's negative versions have
        slots of their own. So with M = 1 no two micro-batches in flight share a slot.
        """
        return self.slot_of(self._version_since_filled(micro_batch))

    def slot_of(self, version: int) -> int:
        """The slot that takes a version after the update that made it."""
        return (version - 1) % self.num_slots

    @property
    def prediction_decay(self) -> float:
        """gamma = D^(1/tau) with D = exp(-2) and tau in updates: decay of PipeMare's average step (T2,
        arXiv:1910.05124); tau > 0."""
        return math.exp(-2.0 / self.in_updates)

    def _version_since_filled(self, micro_batch: int) -> int:
        return (micro_batch - 1 - self.tau) // self.accumulation


def stage_delays(pipeline: PipelineConfig) -> list[StageDelay]:
    """The delay of each stage of a run, from the first to the last."""
    last, profile = pipeline.stages - 1, pipeline.delay
    if profile == "pipeline":
        taus = list(range(last, -1, -1))
    elif isinstance(profile, DelayLike):
        taus = [round((profile.like - 1) * (last - stage) / max(1, last)) for stage in range(pipeline.stages)]
    elif isinstance(profile, list):
        taus = profile
    else:
        taus = [pipeline.accumulation if profile == "2bw" else int(profile)] * pipeline.stages
    return [StageDelay(tau, pipeline.accumulation) for tau in taus]


def depth(pipeline: PipelineConfig) -> int:
    """P as the paper counts it: the number of stages of the pipeline whose delays a run has, its own unless `like`."""
    return pipeline.delay.like if isinstance(pipeline.delay, DelayLike) else pipeline.stages


def pipeline_delays(num_stages: int) -> list[StageDelay]:
    """The delays of an asynchronous pipeline of P stages with one micro-batch per update: tau_k = P - 1 - k."""
    return stage_delays(PipelineConfig(stages=num_stages))


def cannot_run(delays: Sequence[StageDelay], ranges: Sequence[range]) -> str | None:
    """Why R devices cannot run these delays, if they cannot.

    Rank r lets R - 1 - r forward passes run ahead (1F1B), so the weights that a forward pass names have to be that old.

    Args:
        delays: of the stages.
        ranges: the stages of each rank.
    """
    for rank, own in enumerate(ranges):
        ahead = len(ranges) - 1 - rank
        short = next((stage for stage in own if delays[stage].tau < ahead), None)
        if short is not None:
            return (
                f"rank {rank} of {len(ranges)} runs {ahead} forward passes ahead, which needs a delay of at least"
                f" {ahead} at stage {short}, got {delays[short].tau}"
            )
    return None


def check_devices(delays: Sequence[StageDelay], ranges: Sequence[range]) -> None:
    """Refuse delays that the devices cannot run.

    Raises:
        UserError: names the first stage whose delay is too small.
    """
    problem = cannot_run(delays, ranges)
    if problem is not None:
        raise UserError(f"pipeline.delay: {problem}; use fewer pipeline.devices (one runs any delays)")
