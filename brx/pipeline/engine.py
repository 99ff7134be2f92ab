"""The delay engine of one device: runs the schedule's actions over the device's stages.

One iteration t on one device, with one micro-batch per update, next to the lines of the paper's
algorithm 1 (Adam with basis rotation). Delay changes line 3 only: it takes the gradient of stage k
at w_k(t - 1 - tau_k) instead of w_k(t - 1).

    line 1   for t = 1, 2, ..., T                                        `Engine.run`
    line 2       sample batch B_t                                        `_forward`
    line 3       compute the loss of B_t at w_k(max(0, t - 1 - tau_k))   `_forward`
                 G_t := its gradient, of each stage k                    `_backward`
                 give G_t to the newest weights, w_k(t - 1); clip it     `_collect_gradients`
    4 to 11      w_k(t) := w_k(t - 1) - the method's update by G_t       `_update`
                 keep w_k(t) as version t, for later iterations          `_update`

On R devices, rank r runs R - 1 - r forward passes ahead of its backward passes. So its newest
weights are already that many updates old when the gradient comes back, as in a real pipeline. The
slots (`brx.pipeline.slots`) hold the older versions for the rest of the delay; on one device, for
all of it. The trajectory is the same for every R (docs/semantics.md).

Shape legend: B examples, S positions, D width.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Protocol, cast

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.profiler import record_function

from brx.errors import DivergedError
from brx.optim.graphs import GraphMaker
from brx.pipeline.chain import Chain
from brx.pipeline.gradients import Gradients
from brx.pipeline.graphs import GraphedPasses, PassResults
from brx.pipeline.schedule import Action, asynchronous_1f1b
from brx.pipeline.versions import StageVersions
from brx.pipeline.world import Neighbours

MicroBatch = tuple[Tensor, Tensor]
"""Token ids and next tokens, each (B, S)."""


class Updater(Protocol):
    """A method: turns the gradients of the newest weights into an update of them."""

    def correct_gradients(self, stage: StageVersions, micro_batch: int) -> None:
        """Change the gradients of one micro-batch (from 1), before they are averaged."""

    def step(self, iteration: int) -> None:
        """Update the newest weights of all stages of this device (iteration from 1)."""


class Watcher(Protocol):
    """Looks at the stages before each forward pass, and before and after each update. It changes
    nothing."""

    def before_forward(self, micro_batch: int) -> None:
        """The stages are bound to the weights of this micro-batch's forward pass."""

    def before_step(self, t: int) -> None:
        """The newest weights have the gradients of update t."""

    def after_step(self, t: int) -> None:
        """The newest weights are version t. No slot has this version yet."""


class Stopwatch:
    """Times the work that a device is given after the stopwatch is made and before `stop`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start = self._end = self._mark()

    def stop(self) -> None:
        """Mark the end of the work."""
        self._end = self._mark()

    def seconds(self) -> float:
        """The time in seconds; on CUDA, waits until the work is done."""
        if isinstance(self._start, float) or isinstance(self._end, float):
            return self._end - self._start  # type: ignore[operator]
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end)) / 1e3

    def _mark(self) -> torch.Event | float:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event


@dataclass(frozen=True)
class StepResult:
    """The numbers of one iteration on this device, to be recorded."""

    iteration: int
    loss: Tensor | None
    """(): mean cross-entropy of the delayed forward passes, in nats, over the update's
    micro-batches. None on all devices but the last."""
    auxiliary_losses: Tensor | None
    """(stages with a mixture of experts,): each stage's mean over the update's micro-batches. None
    if this device has no such stage. They are not summed here: the sum of one device's stages would
    round differently on another number of devices."""
    grad_norms: Tensor
    """(stages,), before clipping."""
    update_norms: Tensor | None
    """(stages,), in the iterations for which `takes_update_norms` is true; else None."""
    update_time: Stopwatch
    """Time of the method's step on all stages of this device."""


@dataclass
class _InFlight:
    """A micro-batch between its forward and its backward pass."""

    # The residual stream (B, S, D) from the previous device, which gets its gradient back. None on
    # the first device.
    received: Tensor | None
    # The backward pass begins here: at the loss (), on the last device; else at the residual stream
    # (B, S, D) that was sent to the next device.
    root: Tensor
    # (stages with a mixture,). The backward pass also begins at their sum.
    auxiliary_losses: Tensor | None


class Engine:
    """Trains one device's stages.

    The `watchers` are shown every forward pass and every update.

    Args:
        stages: the stages of this device, in the order of the model.
        updater: the method.
        micro_batch: returns micro-batch n (from 1) on this device. The first device uses its token
            ids, and the last one its targets. Devices in between never call it.
        clip: largest gradient norm of a stage.
        autocast: makes the context in which a forward pass runs.
        rank: r, the number of this device; rank 0 has the first stages.
        num_ranks: R, the number of devices.
        neighbours: the connections to other devices; None if R is 1.
        takes_update_norms: for an iteration, whether to measure the norms of its updates. This
            needs a copy of the weights.
        make_graph: records both passes of a micro-batch as a graph, to be replayed (one device
            only). None: they run as they are.
        compiles_whole: compiles all stages as one graph (one device only).
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
        make_graph: GraphMaker | None = None,
        compiles_whole: bool = False,
    ) -> None:
        assert (neighbours is None) == (num_ranks == 1)
        assert num_ranks == 1 or (make_graph is None and not compiles_whole)
        self.stages = list(stages)
        self.rank = rank
        self.num_ranks = num_ranks
        self.is_first = rank == 0
        self.is_last = rank == num_ranks - 1
        self.watchers: list[Watcher] = []
        self._updater = updater
        self._micro_batch = micro_batch
        self._clip = clip
        self._chain = Chain([stage.module for stage in stages], stages[0].index, autocast)
        if compiles_whole:
            self._chain.compile()
        # None for a single device, which has nothing to exchange.
        self._neighbours = cast(Neighbours, neighbours)
        self._takes_update_norms = takes_update_norms
        self._gradients = Gradients(self.stages)
        self._accumulation = self.stages[0].delay.accumulation
        self._in_flight: dict[int, _InFlight] = {}  # by micro-batch
        # What the micro-batches of the next update have given so far:
        self._losses: list[Tensor] = []  # () each
        self._auxiliary_losses: list[Tensor] = []  # (stages with a mixture,) each
        self._grad_norms: Tensor | None = None  # (stages,)
        self._graphed: GraphedPasses | None = None
        if make_graph is not None:
            self._graphed = GraphedPasses(self.stages, self._both_passes, make_graph)

    def run(self, first: int, last: Callable[[], int]) -> Iterator[StepResult]:
        """Make the updates `first` to `last()`, of M micro-batches each. The pipeline is empty
        before and afterwards.

        Args:
            first: the first update, from 1.
            last: returns the last update. It is asked before each forward pass, so a run may be
                cut short.

        Yields:
            The numbers of each update, after it is made.

        Raises:
            DivergedError: a loss or gradient is not finite (on CPU; elsewhere the caller has to
                check the results).
        """
        M = self._accumulation  # update t takes the micro-batches (t - 1) M + 1 to t M
        first_micro_batch = (first - 1) * M + 1
        actions = asynchronous_1f1b(
            self.rank, self.num_ranks, first_micro_batch, lambda: last() * M, M
        )
        for action in actions:
            with record_function(str(action)):
                if action.kind == "U":
                    yield self._update(action.number)
                else:
                    # After the last micro-batch nobody sends: then no receive may be posted.
                    self._run_pass(action, more_to_come=action.number < last() * M)
        if self.num_ranks > 1:
            self._neighbours.activations.wait_for_send()
            self._neighbours.gradients.wait_for_send()

    # One iteration

    def _run_pass(self, action: Action, more_to_come: bool) -> None:
        """A forward or a backward pass; with graphs, both of them in place of the forward pass."""
        if self._graphed is not None:
            # On one device a backward pass follows its forward pass: both are one graph, and
            # nothing is left to do for "B".
            if action.kind == "F":
                self._replayed_passes(self._graphed, action.number)
        elif action.kind == "F":
            self._forward(action.number, more_to_come)
        else:
            self._backward(action.number, more_to_come)

    def _forward(self, n: int, more_to_come: bool) -> None:
        """The forward pass of micro-batch n through this device's stages, with old weights."""
        x = targets = received = None
        if self.is_first or self.is_last:  # a device in between needs no tokens
            x, targets = self._micro_batch(n)
        if not self.is_first:
            x = received = self._neighbours.activations.receive().requires_grad_()
            if more_to_come:
                self._neighbours.activations.post_receive()
        assert x is not None
        self._bind(n)
        output = self._chain(x, targets)
        root = output.stream if output.loss is None else output.loss
        self._in_flight[n] = _InFlight(received, root, output.auxiliary_losses)
        if not self.is_last:
            self._neighbours.activations.send(output.stream.detach())

    def _bind(self, n: int) -> None:
        """Let every stage compute with the weights of micro-batch n's forward pass. They will be
        tau micro-batches old when its gradient is applied."""
        for stage in self.stages:
            stage.bind(n)
        for watcher in self.watchers:
            watcher.before_forward(n)

    def _backward(self, n: int, more_to_come: bool) -> None:
        """The backward pass of micro-batch n; its gradients arrive at the newest weights."""
        micro_batch = self._in_flight.pop(n)
        for stage in self.stages:
            # Other forward passes may have bound other weights meanwhile.
            stage.bind_backward(n)
        gradient = None  # of the loss by the residual stream, (B, S, D)
        if not self.is_last:
            gradient = self._neighbours.gradients.receive()
            if more_to_come:
                self._neighbours.gradients.post_receive()
        # Gradients arrive at the weights in use, and at `received`.
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
        """Give the gradients of micro-batch n, taken at old weights, to the newest weights.

        Returns:
            The stages' gradient norms before clipping, (stages,), if the micro-batch ends an
            update; else None.
        """
        self._gradients.hand_over(n)
        for stage in self.stages:
            self._updater.correct_gradients(stage, n)
        self._gradients.accumulate(n)
        if not self.stages[0].delay.ends_update(n):
            return None
        return self._gradients.clip(self._clip)

    def _update(self, t: int) -> StepResult:
        """w_k(t) := w_k(t - 1) - the method's update, for every stage; then keep version t."""
        loss = _take_mean(self._losses)
        auxiliary_losses = _take_stage_means(self._auxiliary_losses)
        grad_norms = self._grad_norms
        assert grad_norms is not None
        # On a GPU this check would wait for the device. The caller checks later there.
        if grad_norms.device.type == "cpu":
            check_finite(t, loss, grad_norms, self.stages[0].index)
        for watcher in self.watchers:
            watcher.before_step(t)
        takes_norms = self._takes_update_norms(t)
        if takes_norms:
            for stage in self.stages:
                stage.remember()
        for stage in self.stages:
            # The copy of version t - 1 into its slot may still read the weights that now change.
            stage.slots.finish_store()
        stopwatch = Stopwatch(self.stages[0].device)
        self._updater.step(t)
        stopwatch.stop()
        for stage in self.stages:
            stage.correct_update()
        self._gradients.drop()
        update_norms = self._update_norms() if takes_norms else None
        for watcher in self.watchers:
            watcher.after_step(t)
        for stage in self.stages:
            stage.record_update(t)
        return StepResult(t, loss, auxiliary_losses, grad_norms, update_norms, stopwatch)

    def _update_norms(self) -> Tensor:
        """The norm of each stage's last update, w(t) - w(t - 1), (stages,)."""
        return torch.stack([get_total_norm(stage.last_update()) for stage in self.stages])

    # One iteration with both passes as a graph

    def _replayed_passes(self, graphed: GraphedPasses, n: int) -> None:
        """Both passes of micro-batch n by its graph: what `_forward` and `_backward` do."""
        inputs, targets = self._micro_batch(n)
        self._bind(n)
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
        """Both passes of micro-batch n, for which all stages are bound. A graph records this."""
        output = self._chain(inputs, targets)
        assert output.loss is not None  # all stages are here
        _differentiate(output.loss, None, output.auxiliary_losses)
        auxiliary_losses = output.auxiliary_losses
        if auxiliary_losses is not None:
            auxiliary_losses = auxiliary_losses.detach()
        return PassResults(output.loss.detach(), auxiliary_losses, self._collect_gradients(n))

    # The newest weights, without an update

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> float | None:
        """Mean loss of some micro-batches with the newest weights of all stages, in nats. The
        pipeline has to be empty.

        Returns:
            The mean over examples on the last device; None on the others.
        """
        assert not self._in_flight
        total = 0.0
        num_examples = 0
        for inputs, targets in micro_batches:
            for stage in self.stages:
                stage.bind_newest()
            x = inputs
            if not self.is_first:
                # Messages are all of one size; the last batch may be smaller.
                x = self._neighbours.activations.receive()[: len(inputs)]
            output = self._chain(x, targets)
            num_examples += len(inputs)
            if output.loss is None:
                self._neighbours.activations.send(output.stream)
            else:
                total += output.loss.item() * len(inputs)
        return total / num_examples if self.is_last else None

    def fresh_gradients(self, t: int) -> list[list[Tensor]]:
        """Gradients of update t's micro-batches at the newest weights, for measurements. All stages
        have to be on this device. `.grad`, the update's own gradient, stays as it is.

        Returns:
            Per stage, a gradient per weight in the order of `newest`, with its shape and data type.
        """
        assert self.num_ranks == 1
        in_use: list[Tensor] = []
        newest: list[Tensor] = []
        for stage in self.stages:
            stage.bind_newest()
            in_use += stage.in_use
            newest += stage.newest.values()
        M = self._accumulation
        total: list[Tensor] = []
        for n in range((t - 1) * M + 1, t * M + 1):
            output = self._chain(*self._micro_batch(n))
            assert output.loss is not None
            loss = output.loss
            if output.auxiliary_losses is not None:
                loss = loss + output.auxiliary_losses.sum()
            # An expert that no token was sent to gets zeros.
            taken = torch.autograd.grad(loss / M, in_use, allow_unused=True, materialize_grads=True)
            gradients = [
                gradient.to(weight.dtype) for gradient, weight in zip(taken, newest, strict=True)
            ]
            total = list(torch._foreach_add(total, gradients)) if total else gradients
        sizes = [len(stage.newest) for stage in self.stages]
        remaining = iter(total)
        return [list(islice(remaining, size)) for size in sizes]


def _differentiate(
    root: Tensor,  # the loss (), or the residual stream (B, S, D)
    gradient: Tensor | None,  # of the stream, (B, S, D); None for the loss
    auxiliary_losses: Tensor | None,  # (stages with a mixture,)
) -> None:
    """Run a backward pass from the loss or from the residual stream.

    It also begins at the sum of this device's auxiliary losses, which are not part of the loss on
    the last rank.
    """
    roots, gradients = [root], [gradient]
    # A constant has no gradient: a block of a user's own may return zero.
    if auxiliary_losses is not None and auxiliary_losses.requires_grad:
        roots.append(auxiliary_losses.sum())
        gradients.append(None)
    torch.autograd.backward(roots, gradients)


def _take_mean(
    losses: list[Tensor],  # per micro-batch ()
) -> Tensor | None:
    """Their mean (); None if there are none. The list is empty afterwards."""
    if not losses:
        return None
    mean = losses[0] if len(losses) == 1 else torch.stack(losses).mean()
    losses.clear()
    return mean


def _take_stage_means(
    losses: list[Tensor],  # per micro-batch (stages,)
) -> Tensor | None:
    """Their mean over micro-batches (stages,); None if there are none. The list is empty
    afterwards.

    The sum is taken in order, so that the mean of a stage rounds in the same way whatever other
    stages this device has.
    """
    if not losses:
        return None
    total = losses[0]
    for stage_losses in losses[1:]:
        total = total + stage_losses
    num_micro_batches = len(losses)
    losses.clear()
    return total / num_micro_batches


def check_finite(
    iteration: int,
    loss: Tensor | float | None,  # (), if this device has it
    grad_norms: Tensor,  # (stages,)
    first_stage: int,
) -> None:
    """Check the numbers of one iteration on one device.

    Args:
        first_stage: the index of the device's first stage.

    Raises:
        DivergedError: the loss or a gradient norm is not finite. The message names the iteration,
            and the stage that the gradient belongs to.
    """
    advice = "try a lower optimizer.lr"
    if iteration == 1:  # before any update
        advice = "look at the model and its initial weights, which nothing has changed yet"
    if loss is not None and not math.isfinite(float(loss)):
        raise DivergedError(
            f"iteration {iteration}: the loss is {float(loss)} (last stage); {advice}"
        )
    for stage, grad_norm in enumerate(grad_norms.tolist(), start=first_stage):
        if not math.isfinite(grad_norm):
            raise DivergedError(
                f"iteration {iteration}: the gradient norm of stage {stage} is {grad_norm}; "
                f"{advice}"
            )
