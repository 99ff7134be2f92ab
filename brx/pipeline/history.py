"""The versions of a user's weights, and which of them the parameters hold. Needs only torch.

Contents move, tensors do not: a parameter is the same object at the same address all the time. In a
window it holds the version that its stage would compute with, otherwise the newest.

Every tensor has a version counter, which in-place operations raise. By it, autograd notices when a
backward pass meets other contents than its forward pass left. Here the counter says which contents
a parameter holds. The newest weights have the counter that optimizers raise. The contents of a
window have a counter of their own, far above; it is set again whenever they come back. So the
backward pass of a forward pass that ran outside of the window fails with autograd's own error, and
is never silently wrong.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from brx.errors import UserError
from brx.pipeline.delay import StageDelay
from brx.pipeline.forecasts import Extrapolation, ForecastRule, StashMode
from brx.pipeline.slots import FlatLayout, FlatTensors, Slots, copy_tensors

WINDOW_COUNTERS = 2**31  # where the counters of windows begin


def contents(parameter: Tensor) -> Tensor:
    """A plain tensor that shares the memory of a parameter, or of its shard on this rank. Writing
    to it does not raise the parameter's version counter."""
    data = parameter.data
    if type(data) is Tensor:  # asking a tensor for an attribute that it lacks takes a microsecond
        return data
    if hasattr(data, "_local_tensor"):  # a DTensor's shard (FSDP2, tensor parallel)
        return data._local_tensor  # type: ignore[no-any-return]
    return data


def counters_of(parameters: Iterable[Tensor]) -> tuple[int, ...]:
    """Autograd's version counters."""
    return tuple([parameter._version for parameter in parameters])


def set_counters(parameters: Sequence[Tensor], counters: Sequence[int]) -> None:
    """Set autograd's version counters, one per parameter."""
    torch._C._autograd._unsafe_set_version_counter(tuple(parameters), tuple(counters))


def is_equal(left: Tensor, right: Tensor) -> bool:
    """Whether two weights are the same. NaN equals NaN, so that the weights of a diverged run do
    not count as written."""
    if left.shape != right.shape:
        return False
    if torch.equal(left, right):
        return True
    both_nan = left.isnan() & right.isnan()
    # Where no NaN meets a NaN, they differ for certain.
    return bool(both_nan.any()) and bool(((left == right) | both_nan).all())


class StageHistory:
    """The versions of one stage with a delay.

    Args:
        names: the names of the parameters.
        parameters: the parameters, in the same order.
        delay: the stage's delay.
        initial: version 0: the contents of the parameters when the first pass began.
        stash: the stash mode.
        forecast: the rule of a forecast, if there is one.
        on_host: keep the slots in host memory.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[Tensor],
        delay: StageDelay,
        initial: Sequence[Tensor],
        stash: StashMode,
        forecast: ForecastRule | None,
        *,
        on_host: bool,
    ) -> None:
        self.names = list(names)
        self.parameters = list(parameters)
        self.delay = delay
        self._kinds = [_kind(weight) for weight in initial]
        layout = FlatLayout(initial)
        self.slots = Slots(layout, delay, initial, on_host=on_host)
        self.extrapolation = Extrapolation(layout, initial, delay, stash, forecast)

    @property
    def newest(self) -> FlatTensors | None:
        """A copy of the newest contents, kept if slots hold forecasts or if every update is looked
        at; else None."""
        return self.extrapolation.newest

    @property
    def held(self) -> list[Tensor]:
        """What the parameters hold now: the `contents` of each."""
        return [contents(parameter) for parameter in self.parameters]

    def record(self, version: int) -> None:
        """Store what the parameters hold as a new version."""
        now = self.held
        self._check(now)
        self.slots.store(version, self.extrapolation.record(now, now))
        self.slots.finish_store()

    def amend(self, version: int) -> None:
        """Store what the parameters hold as the newest version again, because somebody may have
        written to them in a way that no counter sees (`weight.data`)."""
        now = self.held
        self._check(now)
        if self.newest is not None:
            copy_tensors(self.newest, now)
            return
        self.slots.store(version, now)
        self.slots.finish_store()
        self.slots.forget()

    def load(self, micro_batch: int) -> None:
        """Parameters := the version of a micro-batch."""
        self.slots.load(micro_batch, self.held)
        self.slots.prefetch(micro_batch + 1)

    def load_newest(self, version: int) -> None:
        """Parameters := the newest version."""
        if self.newest is not None:
            copy_tensors(self.held, self.newest)
        else:
            self.slots.load_version(version, self.held)

    def load_for_backward(self, version: int) -> None:
        """Parameters := what a backward pass sees under `none` and `predict`."""
        self.load_newest(version)
        if self.newest is not None:
            now = self.held
            copy_tensors(now, self.extrapolation.seen_by_backward(now))

    def newest_views(self, version: int) -> list[Tensor]:
        """The newest version, tensor by tensor; in host memory where the slots are."""
        if self.newest is not None:
            return self.newest.views
        self.slots.wait()
        return self.slots.slots[self.delay.slot_of(version)].views

    def version_views(self, micro_batch: int) -> list[Tensor]:
        """The version of a micro-batch, tensor by tensor."""
        self.slots.wait()
        return self.slots.slots[self.delay.slot_used(micro_batch)].views

    def _check(self, now: Sequence[Tensor]) -> None:
        """UserError where the parameters were converted, moved or resized.

        Args:
            now: what the parameters hold.
        """
        for name, weight, kind in zip(self.names, now, self._kinds, strict=True):
            if _kind(weight) == kind:
                continue
            for before, after in zip(kind, _kind(weight), strict=True):
                if before != after:
                    raise UserError(
                        f"delayed: {name} went from {before} to {after}; convert, move or resize "
                        "the model before the call"
                    )


def _kind(weight: Tensor) -> tuple[torch.dtype, torch.device, tuple[int, ...]]:
    """What the versions of a weight have in common."""
    return weight.dtype, weight.device, tuple(weight.shape)


class History:
    """The versions of all stages with a delay, and what their parameters hold at the moment.

    Args:
        stages: those with a delay.
        stash: with `none` and `predict`, backward passes see other contents than their forward
            passes.
        before_move: called before parameters get other contents.
    """

    def __init__(
        self,
        stages: Sequence[StageHistory],
        stash: StashMode,
        *,
        before_move: Callable[[], None],
    ) -> None:
        self._before_move = before_move
        self.stages = list(stages)
        self.stash = stash
        self.newest_version = 0
        self._parameters: list[Tensor] = []
        for stage in self.stages:
            self._parameters += stage.parameters
        self._indices = {id(p): index for index, p in enumerate(self._parameters)}
        self._newest_counters: list[int] = []  # while parameters hold older contents

    def record(self) -> None:
        """Store what the parameters hold as a new version."""
        self.newest_version += 1
        for stage in self.stages:
            stage.record(self.newest_version)

    def amend(self) -> None:
        """Store what the parameters hold as the newest version again: it may have been written."""
        for stage in self.stages:
            stage.amend(self.newest_version)

    def show(self, micro_batch: int, counter: int) -> None:
        """Parameters := what a micro-batch computes with."""
        if not self._newest_counters:
            self._newest_counters = list(counters_of(self._parameters))
        self._before_move()
        with writable():
            for stage in self.stages:
                stage.load(micro_batch)
            set_counters(self._parameters, [counter] * len(self._parameters))

    def show_for_backward(self) -> None:
        """Parameters := what the backward pass sees under `none` and `predict`, which autograd must
        not notice."""
        for stage in self.stages:
            stage.load_for_backward(self.newest_version)

    def show_newest(self) -> None:
        """Parameters := the newest version, after `show`."""
        self._before_move()
        with writable():
            for stage in self.stages:
                stage.load_newest(self.newest_version)
            set_counters(self._parameters, self._newest_counters)
        self._newest_counters = []

    def show_newest_of(self, parameters: Sequence[Tensor]) -> None:
        """These parameters := the newest version, in the middle of a backward pass."""
        chosen = {id(parameter) for parameter in parameters}
        for stage in self.stages:
            newest = stage.newest_views(self.newest_version)
            for parameter, kept in zip(stage.parameters, newest, strict=True):
                if id(parameter) in chosen:
                    contents(parameter).copy_(kept)
                    counter = self._newest_counters[self._indices[id(parameter)]]
                    set_counters([parameter], [counter])

    def show_newest_but_of(self, stepped: set[int]) -> None:
        """All parameters but those with the given ids := the newest version."""
        rest = [p for p in self._parameters if id(p) not in stepped]
        self.show_newest_of(rest)
        self._newest_counters = []

    def written(
        self, micro_batch: int, counter: int, *, by_contents: bool, is_rounded: bool = False
    ) -> list[str]:
        """The names of parameters that no longer hold what `show` gave them.

        Args:
            micro_batch: the one that `show` was called with.
            counter: the version counter that `show` was called with.
            by_contents: compare contents even if no version counter has moved.
            is_rounded: contents that differ by rounding alone count as the same.
        """
        names: list[str] = []
        for stage in self.stages:
            is_touched = any(parameter._version != counter for parameter in stage.parameters)
            if is_touched or by_contents:
                shown = stage.version_views(micro_batch)
                names += different(stage.names, stage.parameters, shown, is_rounded=is_rounded)
        return names

    def differs_from_newest(self) -> bool:
        """Whether a parameter holds other contents than the newest version."""
        for stage in self.stages:
            newest = stage.newest_views(self.newest_version)
            if different(stage.names, stage.parameters, newest):
                return True
        return False


def different(
    names: Iterable[str],
    parameters: Iterable[Tensor],
    kept: Iterable[Tensor],
    *,
    is_rounded: bool = False,
) -> list[str]:
    """The names of parameters whose contents differ from those kept."""
    found = []
    for name, parameter, expected in zip(names, parameters, kept, strict=True):
        now = contents(parameter).to(expected.device)
        is_same = is_equal(now, expected)
        if is_rounded and not is_same:
            is_same = torch.allclose(now, expected, rtol=1e-3, atol=1e-6, equal_nan=True)
        if not is_same:
            found.append(name)
    return found


@contextmanager
def writable() -> Iterator[None]:
    """A context in which to write parameters' contents. It leaves `torch.inference_mode`, under
    which an evaluation may run, and clears the casts of weights that autocast keeps."""
    torch.clear_autocast_cache()
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False):
        yield
