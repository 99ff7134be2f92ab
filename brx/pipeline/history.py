"""The versions of a user's weights, and which of them the parameters hold. Needs only torch.

Contents move, tensors do not: a parameter is the same object at the same address all the time. In a
window it holds the version that its stage would compute with, otherwise the newest.

Autograd notices when a backward pass finds other contents than its forward pass left: every tensor
has a version counter, which operations in place raise. Here a counter says which contents a
parameter holds. The newest have the counter that optimizers raise; those of a window get one of
their own, far above, and the same again when they come back. So the backward pass of a forward pass
that ran outside of the window fails with autograd's own error, and is never silently wrong.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from brx.errors import UserError
from brx.pipeline.delay import StageDelay
from brx.pipeline.forecasts import Extrapolation, ForecastRule, StashMode
from brx.pipeline.slots import FlatTensors, Layout, Slots, copy_tensors

WINDOW_COUNTERS = 2**31  # where the counters of windows begin


def contents(parameter: Tensor) -> Tensor:
    """What a parameter holds on this rank, as a tensor with the same memory; autograd's version
    counter does not see what is written there."""
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
    """Whether two weights are the same. NaN equals NaN: a diverged loop has not written anything
    because of it."""
    if torch.equal(left, right):
        return True
    both_nan = left.isnan() & right.isnan()
    # Where no NaN meets a NaN, they differ for certain.
    return bool(both_nan.any()) and bool(((left == right) | both_nan).all())


class StageHistory:
    """The versions of one stage with a delay.

    Args:
        names: of the parameters.
        parameters: in the same order.
        delay: of the stage.
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
        self._kind = (initial[0].dtype, initial[0].device)
        layout = Layout(initial)
        self.slots = Slots(layout, delay, initial, on_host=on_host)
        self.extrapolation = Extrapolation(layout, initial, delay, stash, forecast)

    @property
    def newest(self) -> FlatTensors | None:
        """The newest contents, where slots hold forecasts or updates are looked at."""
        return self.extrapolation.newest

    @property
    def contents(self) -> list[Tensor]:
        """What the parameters hold now; see the function `contents`."""
        return [contents(parameter) for parameter in self.parameters]

    def record(self, version: int) -> None:
        """The parameters hold a new version."""
        now = self.contents
        self.slots.store(version, self.extrapolation.record(now, now))
        self.slots.finish_store()

    def amend(self, version: int) -> None:
        """The parameters hold the newest version, which somebody may have written to by ways that
        no counter sees (`weight.data`): keep what they hold."""
        if self.newest is not None:
            copy_tensors(self.newest, self.contents)
            return
        self.slots.store(version, self.contents)
        self.slots.finish_store()
        self.slots.forget()

    def load(self, micro_batch: int) -> None:
        """Parameters := the version of a micro-batch."""
        self.slots.load(micro_batch, self.contents)
        self.slots.prefetch(micro_batch + 1)

    def load_newest(self, version: int) -> None:
        """Parameters := the newest version."""
        if self.newest is not None:
            copy_tensors(self.contents, self.newest)
        else:
            self.slots.load_version(version, self.contents)

    def load_for_backward(self, version: int) -> None:
        """Parameters := what a backward pass sees under `none` and `predict`."""
        self.load_newest(version)
        if self.newest is not None:
            now = self.contents
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

    def check(self) -> None:
        """UserError where the parameters were converted or moved."""
        now = contents(self.parameters[0])
        for before, after in zip(self._kind, (now.dtype, now.device), strict=True):
            if before != after:
                raise UserError(
                    f"delayed: the model went from {before} to {after}; convert or move it before "
                    "the call"
                )


class History:
    """The versions of all stages with a delay, and what their parameters hold just now.

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
        """The parameters hold a new version."""
        self.newest_version += 1
        for stage in self.stages:
            stage.check()
            stage.record(self.newest_version)

    def amend(self) -> None:
        """The parameters may hold other contents than the newest version had: keep them."""
        for stage in self.stages:
            stage.check()
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
            for parameter, kept in zip(
                stage.parameters, stage.newest_views(self.newest_version), strict=True
            ):
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
            is_rounded: contents that differ by rounding alone are the same.
        """
        found: list[str] = []
        for stage in self.stages:
            is_touched = any(parameter._version != counter for parameter in stage.parameters)
            if is_touched or by_contents:
                shown = stage.version_views(micro_batch)
                found += _different(stage.names, stage.parameters, shown, is_rounded=is_rounded)
        return found

    def differs_from_newest(self) -> bool:
        """Whether a parameter holds other contents than the newest version."""
        for stage in self.stages:
            newest = stage.newest_views(self.newest_version)
            if _different(stage.names, stage.parameters, newest):
                return True
        return False


def _different(
    names: Iterable[str],
    parameters: Iterable[Tensor],
    kept: Iterable[Tensor],
    *,
    is_rounded: bool = False,
) -> list[str]:
    """The names of parameters that hold other contents than those kept."""
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
    """For writes of contents: evaluation may run under `torch.inference_mode`, and autocast keeps
    casts of weights."""
    torch.clear_autocast_cache()
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False):
        yield
