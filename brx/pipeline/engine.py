"""The delay engine of one device: runs the schedule's actions over the device's stages.

A gradient gets old in three steps: `_forward` binds every stage to the version that its delay
names; `_backward` takes the gradient there and hands it to the newest weights, which by then are
tau micro-batches ahead; `_update` applies it to them. Rank r runs R - 1 - r forward passes ahead,
so that many of the tau versions arise by themselves; the slots supply the rest, on one device all
of them. The trajectory is the same for every R (docs/semantics.md).

Shape legend: B examples, S positions, D width.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.profiler import record_function

from brx.errors import DivergedError
from brx.optim.graphs import Recorder
from brx.pipeline.gradients import Gradients
from brx.pipeline.graphs import GraphedPasses, PassResults
from brx.pipeline.schedule import asynchronous_1f1b
from brx.pipeline.versions import StageVersions
from brx.pipeline.world import Neighbours

MicroBatch = tuple[Tensor, Tensor]
"""Token ids and next tokens, each (B, S)."""


class Updater(Protocol):
    """What turns the gradients of the newest weights into newer ones."""

    def correct_gradients(
        self, stage: StageVersions, micro_batch: int
    ) -> None: ...  # before they are averaged
    def step(self, iteration: int) -> None: ...  # updates all stages of this device


class Watcher(Protocol):
    """Looks at the stages before each forward pass and just before and after each update, and
    changes nothing."""

    def before_forward(self, micro_batch: int) -> None: ...  # the stages are bound to its weights
    def before_step(self, t: int) -> None: ...  # the newest weights have the gradients of update t
    def after_step(self, t: int) -> None: ...  # they are updated; no slot has them yet


class Stopwatch:
    """Times the work that a device is given between the making of the stopwatch and `stop`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start = self._end = self._mark()

    def stop(self) -> None:
        self._end = self._mark()

    def seconds(self) -> float:
        if isinstance(self._start, float) or isinstance(self._end, float):
            return self._end - self._start  # type: ignore[operator]
        self._end.synchronize()  # on CUDA the work had only been handed over
        return float(self._start.elapsed_time(self._end)) / 1e3

    def _mark(self) -> torch.Event | float:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event


@dataclass(frozen=True)
class StepResult:
    """What one iteration left to be recorded on this device."""

    iteration: int
    # Mean cross-entropy of the delayed forward passes, in nats, over the update's micro-batches.
    # Only the last device has it.
    loss: Tensor | None
    # Per stage with a mixture of experts, likewise the mean; of one stage, as their sum on a device
    # would round differently on another number of devices. None without a mixture on this device.
    auxiliary_losses: Tensor | None
    grad_norms: Tensor  # (stages,), before clipping
    # (stages,), in iterations for which the engine was asked to measure them.
    update_norms: Tensor | None
    update_time: Stopwatch  # the method's step on all stages of this device


class _Output(NamedTuple):
    """What a micro-batch's forward pass through this device's stages gave."""

    stream: Tensor  # (B, S, D)
    loss: Tensor | None  # mean cross-entropy in nats; on the last device
    auxiliary_losses: Tensor | None  # per stage with a mixture; None if there is none


@dataclass
class _InFlight:
    """A micro-batch between its forward and its backward pass."""

    # The activation (B, S, D) from the previous device, which gets its gradient back.
    received: Tensor | None
    # where the backward pass begins: the loss (last device), or the stream that was sent on
    root: Tensor
    # One per stage with a mixture. The backward pass also starts from their sum.
    auxiliary_losses: Tensor | None


class Engine:
    """Runs one device's stages; `watcher`, if there is one, is shown every forward pass and update.

    Args:
        micro_batch: gives micro-batch n on this device (its tokens count on the first, its targets
            on the last).
        takes_update_norms: in which iterations to take the norms of the updates, which needs a copy
            of the weights.
        record: records both passes of a micro-batch as a graph, to be replayed (one device only).
            None: they run as they are.
    """

    def __init__(
        self,
        stages: Sequence[StageVersions],
        updater: Updater,
        micro_batch: Callable[[int], MicroBatch],
        *,
        clip: float,
        autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
        rank: int = 0,
        num_ranks: int = 1,
        neighbours: Neighbours | None = None,
        takes_update_norms: Callable[[int], bool] = lambda iteration: False,
        record: Recorder | None = None,
    ) -> None:
        assert (neighbours is None) == (num_ranks == 1)
        assert record is None or num_ranks == 1
        self.stages, self.rank, self.num_ranks = list(stages), rank, num_ranks
        self.is_first, self.is_last = rank == 0, rank == num_ranks - 1
        self._updater, self._micro_batch, self._clip, self._autocast = (
            updater,
            micro_batch,
            clip,
            autocast,
        )
        # None for a single device, which has nothing to exchange.
        self._neighbours = cast(Neighbours, neighbours)
        self.watcher: Watcher | None = None
        self._takes_update_norms = takes_update_norms
        self._gradients = Gradients(self.stages)
        self._accumulation = self.stages[0].delay.accumulation
        self._in_flight: dict[int, _InFlight] = {}
        self._losses: list[
            Tensor
        ] = []  # losses of the update's micro-batches so far, with auxiliary losses
        self._auxiliary_losses: list[Tensor] = []
        self._grad_norms: Tensor | None = None  # (stages,), of the update that comes next
        self._graphed = None
        if record is not None:
            self._graphed = GraphedPasses(self.stages, self._both_passes, record)

    def run(self, first: int, last: Callable[[], int]) -> Iterator[StepResult]:
        """Make the updates `first` to `last()`, M micro-batches each; yields after each of them.

        `last` is asked anew before each forward pass, so that a run may be cut short; when this
        ends, the pipeline is empty. DivergedError where a loss or gradient is not finite (on CPU;
        elsewhere the caller checks the results)."""
        M = self._accumulation  # update t takes the micro-batches (t - 1) M + 1 to t M
        for action in asynchronous_1f1b(
            self.rank, self.num_ranks, (first - 1) * M + 1, lambda: last() * M, M
        ):
            more_to_come = action.number < last() * M  # otherwise nobody will send: post no receive
            with record_function(str(action)):
                if action.kind == "U":
                    yield self._update(action.number)
                elif self._graphed is not None:
                    # On one device a backward pass follows its forward pass: both are one graph.
                    if action.kind == "F":
                        self._replayed_passes(self._graphed, action.number)
                elif action.kind == "F":
                    self._forward(action.number, more_to_come)
                else:
                    self._backward(action.number, more_to_come)
        if self.num_ranks > 1:
            self._neighbours.activations.wait_for_send()
            self._neighbours.gradients.wait_for_send()

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> float | None:
        """Mean loss in nats of all stages' newest weights (last device; None elsewhere), with an
        empty pipeline."""
        assert not self._in_flight
        total = 0.0
        for inputs, targets in micro_batches:
            for stage in self.stages:
                stage.bind_newest()
            # Messages are all of one size; the last batch may be smaller.
            x = inputs if self.is_first else self._neighbours.activations.receive()[: len(inputs)]
            output = self._through_stages(x, targets)
            if output.loss is not None:
                total += output.loss.item() * len(inputs)
            else:
                self._neighbours.activations.send(output.stream)
        return total / sum(len(inputs) for inputs, _ in micro_batches) if self.is_last else None

    def fresh_gradients(self, t: int) -> list[list[Tensor]]:
        """Gradients of update t's micro-batches at the newest weights, by stage, in the order of
        `newest`."""
        assert self.num_ranks == 1  # all stages are here
        for stage in self.stages:
            stage.bind_newest()
        in_use = [weight for stage in self.stages for weight in stage.in_use]
        newest = [weight for stage in self.stages for weight in stage.newest.values()]
        total: list[Tensor] = []
        for n in range((t - 1) * self._accumulation + 1, t * self._accumulation + 1):
            output = self._through_stages(*self._micro_batch(n))
            assert output.loss is not None
            loss = output.loss
            if output.auxiliary_losses is not None:
                loss = loss + output.auxiliary_losses.sum()
            loss = loss / self._accumulation
            # Leaves `.grad`, the update's gradient, alone. Zeros for an expert that no token was
            # sent to.
            found = torch.autograd.grad(loss, in_use, allow_unused=True, materialize_grads=True)
            gradients = [
                gradient.to(weight.dtype) for gradient, weight in zip(found, newest, strict=True)
            ]
            total = list(torch._foreach_add(total, gradients)) if total else gradients
        remaining = iter(total)
        return [[next(remaining) for _ in stage.newest] for stage in self.stages]

    def _forward(self, n: int, more_to_come: bool) -> None:
        inputs, targets = self._micro_batch(n)
        received = (
            None if self.is_first else self._neighbours.activations.receive().requires_grad_()
        )
        if more_to_come and not self.is_first:
            self._neighbours.activations.post_receive()
        for stage in self.stages:
            # To weights that will be tau micro-batches old when the gradient is applied.
            stage.bind(n)
        if self.watcher is not None:
            self.watcher.before_forward(n)
        output = self._through_stages(inputs if received is None else received, targets)
        # The backward pass of a last stage starts from the loss (a scalar), of others from the
        # residual stream (B, S, D).
        root = output.stream if output.loss is None else output.loss
        self._in_flight[n] = _InFlight(received, root, output.auxiliary_losses)
        if not self.is_last:
            self._neighbours.activations.send(output.stream.detach())

    def _backward(self, n: int, more_to_come: bool) -> None:
        micro_batch = self._in_flight.pop(n)
        for stage in self.stages:
            stage.bind_backward(n)  # other forward passes may have come between
        gradient = None if self.is_last else self._neighbours.gradients.receive()
        if more_to_come and not self.is_last:
            self._neighbours.gradients.post_receive()
        # To the bound weights, and to `received`.
        _differentiate(micro_batch.root, gradient, micro_batch.auxiliary_losses)
        if micro_batch.received is not None:
            assert micro_batch.received.grad is not None
            self._neighbours.gradients.send(micro_batch.received.grad)
        self._grad_norms = self._collect_gradients(n)
        if self.is_last:
            self._losses.append(micro_batch.root.detach())
        if micro_batch.auxiliary_losses is not None:
            self._auxiliary_losses.append(micro_batch.auxiliary_losses.detach())

    def _collect_gradients(self, n: int) -> Tensor | None:
        """After a backward pass: its gradients of old weights become the newest ones'. Gives the
        stages' gradient norms before clipping if the micro-batch ends an update."""
        self._gradients.hand_over(n)
        for stage in self.stages:
            self._updater.correct_gradients(stage, n)
        self._gradients.accumulate(n)
        ends_update = self.stages[0].delay.ends_update(n)
        return self._gradients.clip(self._clip) if ends_update else None

    def _replayed_passes(self, graphed: GraphedPasses, n: int) -> None:
        """Both passes of a micro-batch by way of its graph."""
        inputs, targets = self._micro_batch(n)
        for stage in self.stages:
            stage.bind(n)
        if self.watcher is not None:
            self.watcher.before_forward(n)
        results = graphed.run(n, inputs, targets)
        self._losses.append(results.loss)
        if results.auxiliary_losses is not None:
            self._auxiliary_losses.append(results.auxiliary_losses)
        self._grad_norms = results.grad_norms

    def _both_passes(
        self,
        n: int,
        inputs: Tensor,  # (B, S)
        targets: Tensor,  # (B, S)
    ) -> PassResults:
        """What a graph holds of a micro-batch, to whose weights all stages are bound."""
        output = self._through_stages(inputs, targets)
        assert output.loss is not None  # all stages are here
        _differentiate(output.loss, None, output.auxiliary_losses)
        auxiliary_losses = output.auxiliary_losses
        if auxiliary_losses is not None:
            auxiliary_losses = auxiliary_losses.detach()
        return PassResults(output.loss.detach(), auxiliary_losses, self._collect_gradients(n))

    def _update(self, t: int) -> StepResult:
        grad_norms = self._grad_norms
        assert grad_norms is not None
        loss, auxiliary_losses = _take_mean(self._losses), _take_stage_means(self._auxiliary_losses)
        # On a GPU this check would wait for the device. The caller checks later there.
        if grad_norms.device.type == "cpu":
            check_finite(t, loss, grad_norms, self.stages[0].index)
        if self.watcher is not None:
            self.watcher.before_step(t)
        takes_norms = self._takes_update_norms(t)
        if takes_norms:
            for stage in self.stages:
                stage.remember()
        for stage in self.stages:
            stage.slots.finish_store()  # which reads the weights that are about to change
        stopwatch = Stopwatch(self.stages[0].device)
        self._updater.step(t)
        stopwatch.stop()
        self._gradients.drop()
        update_norms = (
            torch.stack([get_total_norm(stage.last_update()) for stage in self.stages])
            if takes_norms
            else None
        )
        if self.watcher is not None:
            self.watcher.after_step(t)
        for stage in self.stages:
            stage.record_update(t)
        return StepResult(t, loss, auxiliary_losses, grad_norms, update_norms, stopwatch)

    def _through_stages(self, x: Tensor, targets: Tensor) -> _Output:
        auxiliary_losses = []
        loss = None
        with self._autocast():
            for stage in self.stages:
                with record_function(f"stage {stage.index}"):
                    x, loss, auxiliary_loss = stage.module(x, targets)
                if auxiliary_loss is not None:
                    auxiliary_losses.append(auxiliary_loss)
        return _Output(x, loss, torch.stack(auxiliary_losses) if auxiliary_losses else None)


def _differentiate(root: Tensor, gradient: Tensor | None, auxiliary_losses: Tensor | None) -> None:
    """A backward pass from a loss, or from a stream (B, S, D) whose gradient is given.

    It also begins at the sum of this device's auxiliary losses, which the last rank does not see.
    """
    roots, gradients = [root], [gradient]
    if auxiliary_losses is not None:
        roots.append(auxiliary_losses.sum())
        gradients.append(None)
    torch.autograd.backward(roots, gradients)


def _take_mean(losses: list[Tensor]) -> Tensor | None:
    if not losses:
        return None
    mean = losses[0] if len(losses) == 1 else torch.stack(losses).mean()
    losses.clear()
    return mean


def _take_stage_means(
    losses: list[Tensor],  # per micro-batch (stages,)
) -> Tensor | None:
    """Their mean over micro-batches (stages,), which rounds a stage's number in the same way
    whatever stages lie here."""
    if not losses:
        return None
    total = losses[0]
    for of_micro_batch in losses[1:]:
        total = total + of_micro_batch
    num_micro_batches = len(losses)
    losses.clear()
    return total / num_micro_batches


def check_finite(
    iteration: int, loss: Tensor | float | None, grad_norms: Tensor, first_stage: int
) -> None:
    """DivergedError where a number is no longer finite; names the iteration, and the stage whose
    gradient it is."""
    if loss is not None and not math.isfinite(float(loss)):
        raise DivergedError(
            f"iteration {iteration}: the loss is {float(loss)} (last stage); try a lower "
            f"optimizer.lr"
        )
    for stage, grad_norm in enumerate(grad_norms.tolist(), start=first_stage):
        if not math.isfinite(grad_norm):
            raise DivergedError(
                f"iteration {iteration}: the gradient norm of stage {stage} is {grad_norm}; try a "
                f"lower optimizer.lr"
            )
