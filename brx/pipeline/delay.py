"""The meaning of delay: which version of its weights a stage uses for which micro-batch
(docs/semantics.md). Needs only Python.

`StageDelay` has all arithmetic on versions and slots. `tau` counts micro-batches and `tau_updates`
counts updates, here and everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from numbers import Integral
from typing import TYPE_CHECKING, Any

from brx.errors import UserError, counted

if TYPE_CHECKING:
    from brx.config.schema import PipelineConfig

SAMPLED = 1000  # micro-batches over which the mean of a delay function is taken


@dataclass(frozen=True)
class StageDelay:
    """The delay of one stage, and the versions of its weights that follow from it.

    Micro-batches are counted n = 1, 2, ... Update t takes M of them, (t - 1) M + 1 to t M. Version
    v is the weights after v updates. It keeps its slot of the stage's ring until version
    v + `num_slots` takes the slot.
    """

    tau: int
    """How many micro-batches old the weights of a forward pass are when its gradient is applied,
    once the pipeline is full."""
    accumulation: int = 1
    """M, the micro-batches per update."""

    def version_used(self, micro_batch: int) -> int:
        """The version that the forward pass of micro-batch n uses:
        max(0, floor((n - 1 - tau) / M))."""
        return max(0, self._version_since_filled(micro_batch))

    def update_of(self, micro_batch: int) -> int:
        """The update t that a micro-batch's gradient goes into. During its backward pass, the
        newest version is t - 1."""
        return (micro_batch - 1) // self.accumulation + 1

    def ends_update(self, micro_batch: int) -> bool:
        """Whether a micro-batch is the last one of its update."""
        return micro_batch % self.accumulation == 0

    @property
    def tau_updates(self) -> float:
        """tau / M: how many updates old the weights are, on average over an update's
        micro-batches."""
        return self.tau / self.accumulation

    @property
    def realised_tau(self) -> float:
        """The mean delay in micro-batches, once the pipeline has filled."""
        return self.tau_updates * self.accumulation

    @property
    def max_tau_updates(self) -> int:
        """ceil(tau / M): how many updates old the weights of an update's first micro-batch are.
        Those of the others are not older."""
        return math.ceil(self.tau / self.accumulation)

    @property
    def num_slots(self) -> int:
        """How many versions are in use at one time, including the newest: ceil(tau / M) + 1."""
        return self.max_tau_updates + 1

    @property
    def micro_batches_share_slots(self) -> bool:
        """Whether two micro-batches may use one slot, once the pipeline is full."""
        return self.accumulation > 1

    def slot_used(self, micro_batch: int) -> int:
        """The slot that holds `version_used(micro_batch)`.

        While the pipeline fills, the formula gives negative versions. They have slots of their own,
        and all slots hold version 0 at first. So with M = 1, no two micro-batches in flight share a
        slot."""
        return self.slot_of(self._version_since_filled(micro_batch))

    def slot_of(self, version: int) -> int:
        """The slot that takes a version after the update that made it."""
        return (version - 1) % self.num_slots

    @property
    def prediction_decay(self) -> float:
        """gamma = D^(1 / tau) with D = exp(-2) and tau > 0 in updates: the decay of PipeMare's
        average of the updates (T2, arXiv:1910.05124). 0 without delay."""
        return math.exp(-2.0 / self.tau_updates) if self.tau_updates else 0.0

    def _version_since_filled(self, micro_batch: int) -> int:
        return (micro_batch - 1 - self.tau) // self.accumulation


@dataclass(frozen=True)
class VaryingDelay(StageDelay):
    """A delay that a function gives for each micro-batch. `tau` is the largest one; the ring has
    room for it.

    Versions never run backwards. Where the function's delay grows by more than 1 from one
    micro-batch to the next, the stage stays at the newest version that one of the `tau`
    micro-batches before has used. So a delay rises by at most 1 per micro-batch: a function that
    alternates 2 and 6 gives the delays 2 and 3.
    """

    tau_at: Callable[[int], int] = field(default=lambda n: 0, compare=False)
    """The function's tau at a micro-batch."""

    @cached_property
    def tau_updates(self) -> float:
        """The mean over the first 1,000 micro-batches after the pipeline has filled, over M."""
        ages = [n - 1 - self._newest_asked_for(n) for n in self._sampled()]
        return sum(ages) / SAMPLED / self.accumulation

    @property
    def mean_asked(self) -> float:
        """The mean delay that the function asks for, over the same micro-batches as `tau_updates`
        but in micro-batches. It is larger than `realised_tau` where versions would have to run
        backwards."""
        return sum(map(self.tau_at, self._sampled())) / SAMPLED

    def _sampled(self) -> range:
        """The micro-batches over which means are taken."""
        first = self.tau + 1
        return range(first, first + SAMPLED)

    @property
    def micro_batches_share_slots(self) -> bool:
        return True

    def _newest_asked_for(self, micro_batch: int) -> int:
        """The largest n - 1 - tau_at(n) of a micro-batch and the `tau` micro-batches before it."""
        earliest = max(1, micro_batch - self.tau)
        return max(n - 1 - self.tau_at(n) for n in range(earliest, micro_batch + 1))

    def _version_since_filled(self, micro_batch: int) -> int:
        return self._newest_asked_for(micro_batch) // self.accumulation


@dataclass(frozen=True)
class DelayFromFacts(VaryingDelay):
    """A stage's delay function in an analysis, which runs no user's code: the largest and the mean
    delay that the training run has written into its config.yaml (`brx.config.schema.DelayFacts`).
    Which version a micro-batch uses is not known, so asking for it is a UserError."""

    mean_tau: float = 0.0
    """In micro-batches, once the pipeline has filled."""
    name: str = ""
    """The function's, for messages."""

    @cached_property
    def tau_updates(self) -> float:
        return self.mean_tau / self.accumulation

    @property
    def mean_asked(self) -> float:
        raise self._unknown()

    def _version_since_filled(self, micro_batch: int) -> int:
        raise self._unknown()

    def _unknown(self) -> UserError:
        return UserError(
            f"pipeline.delay {self.name}: only its mean delays are known, because reading a run "
            f"does not execute its code; brx --run-code COMMAND ... does"
        )


def delays_of(
    profile: Any, num_stages: int, accumulation: int = 1, *, seed: int = 0, name: str = "delay"
) -> list[StageDelay]:
    """The delay of each stage, from the first to the last.

    Args:
        profile: `pipeline`, `2bw`, a number of micro-batches, a list of one per stage,
            {"like": P'} or an object with such an attribute, or a function. A function gives tau
            for (stage, number of stages, micro-batch from 1, seed). It does not get M. Its
            attribute `most` is the largest tau, a number or a function of (stage, number of
            stages).
        accumulation: M, the micro-batches per update.
        seed: passed to a function.
        name: the name of the setting, for messages.

    Raises:
        UserError: a function does not say its largest delay, or says none that is a whole number
            from 0.
        ValueError: the profile is none of these.
    """
    if callable(profile):
        return [
            _varying(profile, stage, num_stages, accumulation, seed, name)
            for stage in range(num_stages)
        ]
    taus = _constant_taus(profile, num_stages, accumulation)
    if taus is None:
        raise ValueError(
            f"{name} must be pipeline, 2bw, a whole number from 0, a list of {num_stages}, "
            f"{{'like': P}} or a function, got {profile!r}"
        )
    return [StageDelay(tau, accumulation) for tau in taus]


def _constant_taus(profile: Any, num_stages: int, accumulation: int) -> list[int] | None:
    """tau of each stage under a profile that is not a function; None if it is not a profile.

    A new constant rule is a case of this function. A rule that varies in time is a function with an
    attribute `most` (`delays_of`)."""
    if profile == "pipeline":
        # tau_k = P - 1 - k
        return [num_stages - 1 - stage for stage in range(num_stages)]
    if profile == "2bw":
        # tau_k = M: the version before the newest throughout (PipeDream-2BW)
        return [accumulation] * num_stages
    if _is_delay(profile):
        return [int(profile)] * num_stages
    if isinstance(profile, list | tuple):
        is_one_per_stage = len(profile) == num_stages and all(map(_is_delay, profile))
        return [int(tau) for tau in profile] if is_one_per_stage else None
    like: Any = getattr(profile, "like", None)
    if isinstance(profile, dict):
        like = profile.get("like")
    if _is_delay(like) and like > 0:
        return _taus_like(int(like), num_stages)
    return None


def _is_delay(value: Any) -> bool:
    """Whether a value is a whole number from 0 (numpy's integers, too)."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0


def _taus_like(num_stages_there: int, num_stages: int) -> list[int] | None:
    """tau of each stage: the delay at the same relative depth of a pipeline of P' stages. None for
    a single stage, which has no relative depth, unless P' is 1."""
    last_there = num_stages_there - 1
    last = num_stages - 1
    if last == 0:
        return [0] if last_there == 0 else None
    return [round(last_there * (last - stage) / last) for stage in range(num_stages)]


def _varying(
    function: Any, stage: int, num_stages: int, accumulation: int, seed: int, name: str
) -> VaryingDelay:
    """One stage under a delay function, whose every answer is checked."""
    most = getattr(function, "most", None)
    most = most(stage, num_stages) if callable(most) else most
    if not isinstance(most, Integral) or int(most) < 0:
        raise UserError(
            f"{name}: must say its largest delay, as "
            f"{getattr(function, '__name__', 'function')}.most = 40 or a function of (stage, "
            f"num_stages), got {most!r}"
        )
    most = int(most)

    # `_newest_asked_for` asks again for the last `most` micro-batches.
    @lru_cache(most + SAMPLED)
    def tau_at(micro_batch: int) -> int:
        tau = function(stage, num_stages, micro_batch, seed)
        if not isinstance(tau, Integral) or not 0 <= int(tau) <= most:
            raise UserError(
                f"{name}: stage {stage}, micro-batch {micro_batch}: must be a whole number from 0 "
                f"to {most} (its `most`), got {tau!r}"
            )
        return int(tau)

    return VaryingDelay(most, accumulation, tau_at)


def stage_delays(pipeline: PipelineConfig, seed: int = 0) -> list[StageDelay]:
    """The delay of each stage of a run; see `delays_of`.

    A delay function is imported only where user code may run, as in training. Elsewhere, the facts
    in the run's configuration take its place (`DelayFromFacts`).

    Raises:
        UserError: a delay function cannot be loaded. Or it must not be (`brx.config.user_code`),
            and the configuration has no facts of it.
    """
    profile: Any = pipeline.delay
    name = getattr(profile, "function", None)
    if name is not None:
        # Imported here because only runs need it: `delayed` does without.
        from brx.config.user_code import check_unchanged, in_one_line, is_allowed, load_attribute

        if profile.facts is not None and not is_allowed():
            return delays_from_facts(pipeline)
        check_unchanged(name, profile.code_sha256, f"pipeline.delay {name}")
        function = load_attribute(name, f"pipeline.delay {name}", "function", callable)
        profile = in_one_line(function, name)
        most = getattr(profile, "most", None)
        if callable(most):
            profile.most = in_one_line(most, name)
    return delays_of(
        profile,
        pipeline.stages,
        pipeline.accumulation,
        seed=seed,
        name=f"pipeline.delay {name or ''}",
    )


def delays_from_facts(pipeline: PipelineConfig) -> list[StageDelay]:
    """The delay of each stage under a delay function with recorded `facts`."""
    profile: Any = pipeline.delay
    delays: list[StageDelay] = []
    for largest, mean in zip(profile.facts.largest, profile.facts.mean, strict=True):
        delay = DelayFromFacts(largest, pipeline.accumulation, mean_tau=mean, name=profile.function)
        delays.append(delay)
    return delays


def shortfall(delays: Sequence[StageDelay]) -> str | None:
    """A line about the stage that falls furthest short of the mean delay that its function asks
    for; None if every stage gets the delays that its function asks for.

    Args:
        delays: the delay of each stage, from `stage_delays` where the function may run.
    """
    missing = 0.0
    line = None
    for stage, delay in enumerate(delays):
        if not isinstance(delay, VaryingDelay):
            continue
        asked, realised = delay.mean_asked, delay.realised_tau
        if asked - realised > missing + 1e-9:  # more than rounding
            missing = asked - realised
            line = (
                f"pipeline.delay: asks for {asked:.8g} micro-batches on average at stage {stage} "
                f"and gets {realised:.8g}: versions never run backwards, so a delay rises by at "
                f"most 1 per micro-batch"
            )
    return line


def depth(pipeline: PipelineConfig) -> int:
    """P as the paper counts it: the number of stages of the pipeline that a run imitates. With
    `like`, that is the other pipeline's number of stages, else the run's own."""
    return getattr(pipeline.delay, "like", pipeline.stages)


def pipeline_delays(num_stages: int) -> list[StageDelay]:
    """The delays of a pipeline with one micro-batch per update: tau_k = P - 1 - k."""
    return delays_of("pipeline", num_stages)


def cannot_run(delays: Sequence[StageDelay], ranges: Sequence[Sequence[int]]) -> str | None:
    """Why devices cannot run some delays; None if they can.

    Args:
        delays: the delay of each stage.
        ranges: the stages of each device, in order of rank.
    """
    if len(ranges) > 1 and any(isinstance(delay, VaryingDelay) for delay in delays):
        # Its `tau` is only the largest: a smaller one may be less than 1F1B needs (below).
        return "a delay function runs on one device"
    for rank, own in enumerate(ranges):
        # 1F1B runs this many forward passes ahead. Their gradients are at least that old when they
        # are applied.
        ahead = len(ranges) - 1 - rank
        short = next((stage for stage in own if delays[stage].tau < ahead), None)
        if short is not None:
            return (
                f"rank {rank} of {len(ranges)} runs {counted(ahead, 'forward pass')} ahead, which "
                f"needs a delay of at least {ahead} at stage {short}, got {delays[short].tau}"
            )
    return None


def check_devices(delays: Sequence[StageDelay], ranges: Sequence[Sequence[int]]) -> None:
    """UserError if devices cannot run some delays; see `cannot_run`."""
    problem = cannot_run(delays, ranges)
    if problem is not None:
        raise UserError(
            f"pipeline.delay: {problem}; use fewer pipeline.devices (one runs any delays)"
        )
