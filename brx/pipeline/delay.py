"""Which weights a stage uses when: the meaning of delay (docs/semantics.md).

Every engine asks `StageDelay`; no other place does arithmetic on versions or slots.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from brx.config.schema import PipelineConfig


@dataclass(frozen=True)
class StageDelay:
    """The delay of one stage, and which versions of its weights follow from it.

    Version v of the weights is what v updates have made of them; micro-batch t leads to update t. A version has a slot
    of the stage's ring until the version that is `num_slots` updates newer takes its place.

    Attributes:
        tau: how many updates old the weights are from which a gradient was computed, once the pipeline has filled.
    """

    tau: int

    def version_used(self, micro_batch: int) -> int:
        """The version with which the forward pass of a micro-batch (from 1) runs: max(0, t - 1 - tau)."""
        return max(0, micro_batch - 1 - self.tau)

    @property
    def num_slots(self) -> int:
        """Versions that are in use at one time, the newest among them: tau + 1."""
        return self.tau + 1

    def slot_used(self, micro_batch: int) -> int:
        """The slot that holds `version_used(micro_batch)`.

        At the start all slots hold version 0, so that micro-batches which share it need not share a slot.
        """
        return self.slot_of(micro_batch - 1 - self.tau)

    def slot_of(self, version: int) -> int:
        """The slot that takes a version after the update that made it."""
        return (version - 1) % self.num_slots

    @property
    def prediction_decay(self) -> float:
        """gamma = D^(1/tau) with D = exp(-2): decay of PipeMare's average step (T2, arXiv:1910.05124); tau >= 1."""
        return math.exp(-2.0 / self.tau)


def stage_delays(pipeline: PipelineConfig) -> list[StageDelay]:
    """The delay of each stage of a run, from the first to the last."""
    return pipeline_delays(pipeline.stages)


def pipeline_delays(num_stages: int) -> list[StageDelay]:
    """The delays of an asynchronous pipeline of P stages: tau_k = P - 1 - k."""
    return [StageDelay(num_stages - 1 - stage) for stage in range(num_stages)]
