"""How long an update takes on P devices, and what they hold: asynchronous, by each synchronous schedule, as replicas.

Without a model, stages are equal and memory is not known (`EqualStages`); with one (`PlannedRun` of planned_run.py),
stages are those of its real cut, updates take the method's own products, and memory is what `brx plan` says. The unit
of time is an update's passes, shared evenly among the devices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from brx.planning.idle import SYNCHRONOUS, synchronous_pace

ASYNCHRONOUS, REPLICAS = "asynchronous", "replicas"


@dataclass(frozen=True)
class Cut:
    """One way to run a method on the devices.

    Attributes:
        schedule: a key of `SYNCHRONOUS`, `ASYNCHRONOUS` or `REPLICAS`.
        num_micro_batches: that an update's examples are split up into.
        time: from one update to the next, in units of an update's passes.
        idle: the share of the time between updates in which devices wait, without the time of the updates.
        memory: bytes of the busiest device; None where no model is given.
    """

    schedule: str
    num_micro_batches: int
    time: float
    idle: float
    memory: float | None = None


@dataclass(frozen=True)
class LocalSteps:
    """Data-parallel replicas, each with the whole model, that average their weights every few steps.

    Local SGD (arXiv:1805.09767), DiLoCo (arXiv:2311.08105).

    Attributes:
        steps: between two averagings.
        averaging: time of one, in units of an update's passes.
        slowdown: iterations over those of synchronous training, as the user expects them.
    """

    steps: int
    averaging: float
    slowdown: float = 1.0


@dataclass(frozen=True)
class EqualStages:
    """P equal stages, a device each, of a model that is not known; updates take the cost that is given.

    Methods are asked about by their settings (`Experiment.settings`) and by the cost of their update as a share of
    an update's passes (None: what their products take, if that is known).

    Attributes:
        num_stages: P.
        num_micro_batches: M of the asynchronous pipeline.
        examples: of an update; the synchronous side may split them up otherwise.
    """

    num_stages: int
    num_micro_batches: int
    examples: int
    memory: float | None = None

    def asynchronous(self, settings: Mapping[str, Any], cost: float | None) -> Cut:
        """Of asynchronous 1F1B with M micro-batches per update."""
        return Cut(ASYNCHRONOUS, self.num_micro_batches, 1.0 + (cost or 0.0), 0.0)

    def synchronous(self, settings: Mapping[str, Any], cost: float | None) -> Iterator[Cut]:
        """Of every schedule with every number of micro-batches that exists, fastest first."""
        cuts = []
        for name, schedule in SYNCHRONOUS.items():
            forward = (1.0 / schedule.num_chunks,) * self.num_stages * schedule.num_chunks
            for count in {*divisors(self.examples), self.num_micro_batches}:
                pace = synchronous_pace(name, forward, count)
                if pace is not None:
                    time = pace.elapsed / (3 * count)
                    cuts.append(Cut(name, count, time + (cost or 0.0), 1.0 - 1.0 / time))
        return iter(sorted(cuts, key=preference))

    def replicas(self, settings: Mapping[str, Any], cost: float | None, local: LocalSteps) -> Cut | None:
        """Of replicas; None if an update has fewer examples than there are devices."""
        # Every replica updates the whole model.
        time = 1.0 + self.num_stages * (cost or 0.0) + local.averaging / local.steps
        return Cut(REPLICAS, 1, time, 0.0)


def first_that_fits(cuts: Iterator[Cut], memory: float | None) -> Cut | None:
    """The fastest whose busiest device has room for it."""
    return next((cut for cut in cuts if memory is None or (cut.memory or 0.0) <= memory), None)


def divisors(number: int) -> list[int]:
    """In increasing order."""
    small = [one for one in range(1, math.isqrt(number) + 1) if number % one == 0]
    return sorted({*small, *(number // one for one in small)})


def preference(cut: Cut) -> tuple[float, int, int]:
    """Fastest first; of equally fast ones the larger micro-batches, and the better known schedule."""
    return round(cut.time, 9), cut.num_micro_batches, list(SYNCHRONOUS).index(cut.schedule)
