"""Windows. A window lasts from a training forward pass to the end of its backward pass. While it is
open, parameters hold the old versions of their stages. Needs torch alone.

    newest --open--> window --backward pass ends, or a step--> newest
                     window --peek--> newest --return--> window      (an evaluation in between)
                     closed window --its backward pass begins again--> window

Version t is what the weights are when the first pass of the next update begins: that pass is the
first to know that no more writes will come. In a plain loop, hooks call these methods in turn:

    a training forward pass begins    `open`: record the version that the last step has made, if it
                                      is not recorded yet; make a `Window`, and show its contents
    it ends                           `check_forward`: it must not have written weights
    its backward pass begins          `begin_backward`: show the window's contents again, if it has
                                      been closed; under `none` and `predict`, other weights
    a gradient arrives                `see_gradient`
    the backward pass ends            `end`: count it, and show the newest weights
    the optimizer steps               `before_step`, `after_step`: a new version is pending
    an evaluation begins, and ends    `peek`, `end_peek`: only if a window is open
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.optim import Optimizer

from brx.errors import UserError, some
from brx.pipeline.history import (
    WINDOW_COUNTERS,
    History,
    contents,
    counters_of,
    different,
    is_equal,
    writable,
)
from brx.pipeline.hooks import (
    STEP,
    at_end_of_backward,
    current_task,
    has_nonzero,
    num_running,
    weakly,
)
from brx.pipeline.self_check import SelfCheck


@dataclass
class Window:
    """One micro-batch: its forward passes and its backward pass.

    What happens, and what it sets:

    the forward pass ends                  is_watched
    the backward pass begins               is_in_backward, has_begun_backward
      under `none` and `predict`           shows_backward_weights
        with create_graph                    has_graph_of_gradients
    a gradient reaches a parameter       has_reached_parameters
        though no backward pass had begun  has_gradients
      an optimizer steps                   stepped
    the backward pass ends                 not is_in_backward, has_ended
    """

    micro_batch: int
    """n, from 1. It decides which version each stage uses."""
    update: int
    """The number of updates that had been made when it opened."""
    counter: int
    """The autograd version counter that marks its contents; see `brx.pipeline.history`."""
    is_explicit: bool = False
    """Opened by `micro_batch()`, which closes it."""
    is_watched: bool = False
    """A hook on an output of its forward passes will tell when the backward pass begins."""
    is_in_backward: bool = False
    has_begun_backward: bool = False
    shows_backward_weights: bool = False
    """Under `none` and `predict`: the parameters hold the backward pass's weights, not the forward
    pass's."""
    has_graph_of_gradients: bool = False
    """A backward pass with `create_graph` has begun, which does not end the window."""
    has_gradients: bool = False
    """Gradients have arrived in a backward pass that no hook on an output announced."""
    has_reached_parameters: bool = False
    """Gradients have arrived at parameters."""
    has_ended: bool = False
    """Its backward pass has ended: the next forward pass is another micro-batch."""
    stepped: set[int] = field(default_factory=set)
    """Ids of parameters whose optimizer has stepped within the backward pass."""


class Windows:
    """Opens and closes windows, and notices updates.

    Args:
        parameters: those that train, by name.
        accumulation: M, the micro-batches per update.
        make_history: makes the stages' versions when the first update is noticed; takes version 0
            of all parameters, by name.
        check: looks at the first updates.
        delayed_among: those of the given names whose parameters are in a stage with a delay.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        accumulation: int,
        make_history: Callable[[dict[str, Tensor]], History],
        check: SelfCheck,
        delayed_among: Callable[[list[str]], list[str]],
    ) -> None:
        self._names = list(parameters)
        self._parameters = list(parameters.values())
        self._accumulation = accumulation
        self._make_history = make_history
        self._check = check
        self._delayed_among = delayed_among
        self.history: History | None = None  # made with the first update
        self.current: Window | None = None
        self._latest: Window | None = None  # the one that closed last
        self._is_peeking = False
        self._peeking_task: int | None = None  # autograd's, if a backward pass peeks
        self._window_task: int | None = None  # autograd's, of the open window's backward pass
        self._recorded = 0  # number of updates that have been recorded as versions
        self._initial: dict[str, Tensor] | None = None  # version 0, until there is a history
        self._has_stepped = False  # since the newest version was recorded
        self._seen: tuple[int, ...] = ()  # version counters of the newest contents
        self._aside: list[Tensor] | None = None  # contents in the middle of an optimizer's step
        self._num_windows = 0  # windows of the current update
        self._num_backward = 0  # windows of it whose backward pass has ended
        self._num_cleared = 0  # windows of it whose gradients the loop has cleared
        # What `_marks_of` gave when the last backward pass ended; None if that is not known.
        self._gradients_left: list[tuple[int, int]] | None = None
        # Whether the gradients of that backward pass are not at the parameters. FSDP2 keeps them
        # elsewhere until a micro-batch with gradient synchronization.
        self._are_elsewhere = False
        self._serial = 0  # windows so far, over all updates; the number of the newest one
        # By optimizer whose step is running: how deep its steps nest (`super().step()`).
        self._stepping: dict[Optimizer, int] = {}
        self._stepped_at: dict[int, int] = {}  # by id of an optimizer: `_serial` at its last step
        self._problem: str | None = None  # found where an error cannot be raised

    @property
    def updates(self) -> int:
        """How many updates have been made, including one that is not recorded as a version yet."""
        return self._recorded + 1 if self.is_pending else self._recorded

    @property
    def is_pending(self) -> bool:
        """Whether an update has been made that is not recorded as a version yet."""
        return self.has_begun and self._is_update_pending()

    @property
    def has_begun(self) -> bool:
        """Whether the first pass has been made."""
        return self._initial is not None or self.history is not None

    @property
    def is_in_step(self) -> bool:
        """Whether an optimizer's step is running now (it may be calling a closure)."""
        return bool(self._stepping)

    @property
    def is_explicit_open(self) -> bool:
        """Whether a window of `micro_batch()` is open."""
        return self.current is not None and self.current.is_explicit

    @property
    def initial(self) -> dict[str, Tensor] | None:
        """Version 0 by name, from the first pass on until there is a history."""
        return self._initial

    @property
    def num_complete_windows(self) -> int:
        """How many windows the update under way has had. One whose backward pass is still to come
        does not count: a saved state has no graph, so its forward pass has to run again."""
        window = self.current
        if window is not None and not (window.has_ended or window.has_gradients):
            return self._num_windows - 1
        return self._num_windows

    @property
    def num_backward(self) -> int:
        """How many windows of the update under way have ended their backward pass."""
        window = self.current
        if window is not None and window.has_gradients and not window.has_ended:
            return self._num_backward + 1
        return self._num_backward

    @property
    def is_peeking(self) -> bool:
        """Whether the newest weights are shown in the middle of a window."""
        return self._is_peeking

    # Opening and closing

    def open(self, *, is_explicit: bool = False) -> Window:
        """Give a training pass that begins its window: the one that is open, or a new one."""
        self._end_any_peek()
        self._forget_failed_steps()
        self._refuse_after_step_within()
        self._end_unannounced()
        window = self.current
        if window is None or window.has_ended:
            self.close()
            self.raise_problem()
            self._check.refuse_stray_gradients()
            self._notice_update()
            window = self._next_window()
            self._show(window)
        elif not window.is_explicit and self._is_written_since_last_pass(window):
            self.close()
            self.raise_problem()
        window.is_explicit |= is_explicit
        return window

    def reopen(self, window: Window) -> None:
        """Show the contents of a window again that has been closed.

        Raises:
            UserError: its update is over, or weights were written since.
        """
        self._end_any_peek()
        if window is self.current:
            return
        if window.update != self._recorded or self._has_stepped:
            raise UserError(
                "delayed: a backward pass came after the optimizer's step that it belongs to; run "
                "it before that step"
            )
        self.close()
        if self._stepping:
            self._put_aside()
        elif self._is_written():
            raise UserError(
                "delayed: weights were written between a forward pass and its backward pass; write "
                "them after the optimizer's step"
            )
        else:
            self._amend()
        self._show(window)

    def recompute(self) -> None:
        """Handle a forward pass within a backward pass: activation checkpointing repeats it."""
        self._refuse_after_step_within()
        if self.current is None and self._latest is not None:
            self.reopen(self._latest)

    def close(self) -> None:
        """Close the open window, if there is one: parameters hold the newest weights again."""
        window = self.current
        if window is None:
            return
        was_peeking = self._is_peeking
        self._peeking_task = None
        self.current = None
        self._latest = window
        self._is_peeking = False
        if not was_peeking:
            self._look_for_writes(window)
        if self.history is not None and not was_peeking:
            if window.stepped:
                self.history.show_newest_but_of(window.stepped)
            else:
                self.history.show_newest()
            self._show_aside()
        self._aside = None
        self._seen = counters_of(self._parameters)

    def end(self, window: Window) -> None:
        """Note that a window's micro-batch is over, and close the window if it is open."""
        if not window.has_ended:
            window.has_ended = True
            self._num_backward += 1
            if self._accumulation > 1:
                self._gradients_left = _marks_of(self._parameters)
                has_none_here = not self._gradients_left and not window.has_reached_parameters
                self._are_elsewhere = has_none_here
        if self.current is window:
            self.close()

    def break_off(self, window: Window) -> None:
        """Close the window of `micro_batch()`, whose block has failed. Without a backward pass, it
        was no micro-batch: the loop may repeat it, or go on with another."""
        has_backward = window.has_begun_backward or window.has_gradients
        if self.current is window and not has_backward:
            self._num_windows -= 1
            self.close()
        else:
            self.end(window)

    def _end_unannounced(self) -> None:
        """End a window whose backward pass no hook has announced. If gradients have arrived, that
        pass is over by the time the next pass or step begins."""
        window = self.current
        if window is not None and window.has_gradients and not window.is_explicit:
            self.end(window)
            self._gradients_left = None  # the loop may have cleared them since they have arrived

    def peek(self) -> None:
        """Show the newest weights in the middle of a window."""
        if self.current is None or self._is_peeking:
            return
        self._refuse_after_step_within()
        self._look_for_writes(self.current)
        self.raise_problem()
        self._is_peeking = True
        if self.history is not None:
            self.history.show_newest()
            self._show_aside()

    def peek_in_backward(self) -> None:
        """Show the newest weights until the backward pass that is running ends. It has reached the
        output of an evaluation, whose graph is of the newest weights.

        Raises:
            UserError: it goes through the window's passes, too.
        """
        if self.current is None or self._is_peeking:
            return
        task = current_task()
        if self.current.is_in_backward and self._window_task == task:
            raise _mixed_backward()
        self.peek()
        self._peeking_task = task
        at_end_of_backward(partial(self._end_peek_in_backward, task))

    def _end_peek_in_backward(self, task: int) -> None:
        if self._peeking_task == task:
            self._end_any_peek()

    def end_peek(self) -> None:
        """Show the window's contents again, after `peek`. If a backward pass peeks, its end does
        that."""
        if self._peeking_task is None:
            self._end_any_peek()

    def _end_any_peek(self) -> None:
        if not self._is_peeking:
            return
        self._is_peeking = False
        self._peeking_task = None
        window = self.current
        if window is None:
            return
        # `_show` begins with the forward pass's contents.
        showed_backward_weights = window.shows_backward_weights
        self._show(window)
        if showed_backward_weights:
            self._show_for_backward(window)

    def _refuse_after_step_within(self) -> None:
        """UserError for a pass in a window in whose backward pass an optimizer has stepped: some
        parameters hold the newest weights already, others the old ones."""
        if self.current is not None and self.current.stepped:
            raise UserError(
                "delayed: an optimizer has stepped within a backward pass, and another pass begins "
                "before that one's window has closed; evaluate after the backward pass, and give "
                "each backward pass a micro_batch() of its own"
            )

    def check_forward(self) -> None:
        """UserError where a forward pass has written weights."""
        window = self.current
        if window is None or self._is_peeking:
            return
        if window.is_explicit:  # looked at when it closes
            return
        if self._written(window, by_contents=False):
            self.close()
            self.raise_problem()

    def _next_window(self) -> Window:
        if self._num_backward and self._are_gradients_gone():
            # A step was skipped: count from 0 again.
            self._num_cleared += self._num_backward
            self._num_windows = self._num_backward = 0
        self._num_windows += 1
        within_update = min(self._num_windows, self._accumulation)  # j
        micro_batch = self._recorded * self._accumulation + within_update  # (t - 1) M + j
        previous = self._latest
        self._serial += 1
        counter = WINDOW_COUNTERS + self._serial % WINDOW_COUNTERS
        if previous and (previous.update, previous.micro_batch) == (self._recorded, micro_batch):
            counter = previous.counter  # the contents are the same, so autograd may mix the two
        return Window(micro_batch, self._recorded, counter)

    def _are_gradients_gone(self) -> bool:
        """Whether the gradients of the update under way have been cleared, to None or to zero."""
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if self._num_backward < self._accumulation:
            if self._are_elsewhere:
                return False
            # The search for nonzeros below makes the host wait for the device. So first check
            # whether anything has written to the gradients at all.
            is_touched = self._gradients_left != _marks_of(self._parameters)
            if gradients and not is_touched:
                return False
        return not any(has_nonzero(gradient) for gradient in gradients)

    def _show(self, window: Window) -> None:
        self.current = window
        window.shows_backward_weights = False
        if self.history is not None:
            self.history.show(window.micro_batch, window.counter)

    def _show_for_backward(self, window: Window) -> None:
        assert self.history is not None
        self.history.show_for_backward()
        window.shows_backward_weights = True

    def _look_for_writes(self, window: Window) -> None:
        """Note parameters that were written in the window, whose new contents will be lost;
        `raise_problem` reports them."""
        # No counter sees a write to `weight.data`, and comparing contents makes the host wait for
        # the device. So after the first updates, contents are compared only if a window closes in
        # an unusual way: without a backward pass.
        is_closing = self.current is None
        by_contents = self._check.is_on or (is_closing and not window.has_ended)
        written = self._written(window, by_contents=by_contents)
        if not written:
            return
        instead = "write the newest weights, after the optimizer's step"
        is_trained = {
            name: p.requires_grad for name, p in zip(self._names, self._parameters, strict=True)
        }
        if not any(is_trained[name] for name in written):
            instead += ", or leave frozen parameters that the model writes out of the optimizer"
        if window.has_graph_of_gradients:
            instead += (
                "; if the loop steps by hand after create_graph=True, put the passes into `with "
                "pipeline.micro_batch():`, and step after it"
            )
        elif not window.has_begun_backward:
            instead += "; run passes that have no backward pass under torch.no_grad()"
        self._problem = (
            f"delayed: {some(written)} written during a training forward pass (an embedding with "
            "max_norm, for example), or before its backward pass has ended, where older weights "
            f"are in use; {instead}"
        )

    def _written(self, window: Window, *, by_contents: bool) -> list[str]:
        """The names of parameters in stages with a delay that no longer hold what the window gave
        them.

        Args:
            window: the one that is open.
            by_contents: compare contents even if no version counter has moved.
        """
        if window.shows_backward_weights or window.stepped:
            return []
        is_rounded = window.is_explicit  # SAM moves weights and back again, up to rounding
        if self.history is not None:
            return self.history.written(
                window.micro_batch,
                window.counter,
                by_contents=by_contents,
                is_rounded=is_rounded,
            )
        # In the first update, all versions are version 0.
        if self._initial is None or not (by_contents or self._is_touched()):
            return []
        shown = list(self._initial.values())
        written = different(self._names, self._parameters, shown, is_rounded=is_rounded)
        return self._delayed_among(written) if written else []

    def _is_written_since_last_pass(self, window: Window) -> bool:
        """Whether the loop has written weights in a window to which it now adds a pass. Without
        this, the window of a loop that steps by hand in it would never close."""
        return self._check.is_on and bool(self._written(window, by_contents=True))

    def _is_touched(self) -> bool:
        """Whether a version counter has moved since the newest weights were looked at."""
        return self._seen != counters_of(self._parameters)

    def raise_problem(self) -> None:
        """UserError for a problem that was noted where no error could be raised."""
        if self._problem is not None:
            problem = self._problem
            self._problem = None
            raise UserError(problem)

    # Backward passes

    def begin_backward(self, window: Window) -> None:
        """Prepare a window for its backward pass, which has reached the model's output."""
        if window.is_in_backward:
            return
        task = current_task()
        if self._is_peeking and self._peeking_task == task:
            raise _mixed_backward()
        self._check.refuse_stray_gradients()
        self.reopen(window)
        self._window_task = task
        if not window.has_ended:
            self._restart_count_if_cleared()
        if self.history is not None and self.history.stash != "exact":
            self._look_for_writes(window)
            self.raise_problem()
            self._show_for_backward(window)
        if torch.is_grad_enabled():
            window.has_graph_of_gradients = True
            return  # create_graph: another backward pass goes through this one
        window.is_in_backward = window.has_begun_backward = True
        at_end_of_backward(partial(self._end_backward, window))

    def see_gradient(self) -> None:
        """Note that a parameter's gradient has arrived."""
        window = self.current
        if window is None:
            return
        window.has_reached_parameters = True
        if window.is_in_backward:
            return
        if torch.is_grad_enabled():
            return  # create_graph: another backward pass goes through this one
        window.has_gradients = True

    def _restart_count_if_cleared(self) -> None:
        """Notice that the loop, which has skipped a step, cleared its gradients between the forward
        and the backward pass of a micro-batch.

        That micro-batch is then the first of its update. With M = 1, its forward pass has used the
        right version even so. With a larger M it has not: UserError."""
        if not self._num_backward or not self._are_gradients_gone():
            return
        self._num_backward = 0
        if self._accumulation > 1:
            raise UserError(
                "delayed: gradients of a skipped step were cleared between a forward pass and its "
                f"backward pass, with accumulation={self._accumulation}; call zero_grad() before "
                "the forward pass"
            )

    def _end_backward(self, window: Window) -> None:
        window.is_in_backward = False
        if not window.is_explicit:
            self.end(window)

    # Updates

    def begin(self) -> None:
        """Keep what the weights are now as version 0, unless there is one already."""
        if not self.has_begun:
            self._initial = {}
            for name, parameter in zip(self._names, self._parameters, strict=True):
                self._initial[name] = contents(parameter).clone()
            self._has_stepped = False
            self._seen = counters_of(self._parameters)

    def _notice_update(self) -> None:
        if not self.has_begun:
            self.begin()
        elif self._is_update_pending():
            self._record()
        elif self._stepping:  # a closure that is called several times, as by LBFGS
            self._put_aside()
        elif self._num_backward < self._accumulation:
            # No counter sees a write to `weight.data`. From the update's M-th backward pass on,
            # `_is_written` has just compared the contents. Before, they are stored as they are.
            self._amend()

    def _amend(self) -> None:
        """Store what the weights are as the newest version again: they may have been written."""
        if self.history is not None:
            self.history.amend()
            return
        assert self._initial is not None
        for kept, parameter in zip(self._initial.values(), self._parameters, strict=True):
            kept.copy_(contents(parameter))

    def _is_update_pending(self) -> bool:
        if self._has_stepped:
            return True
        return not self._stepping and self.current is None and self._is_written()

    def _is_written(self) -> bool:
        """Whether the newest weights have changed other than by an optimizer's step.

        No counter sees `weight.data -= ...`, a step by hand. So once the update's M backward passes
        have been made, the contents themselves are compared.
        """
        now = counters_of(self._parameters)
        is_touched = now != self._seen
        if not is_touched and self._num_backward < self._accumulation:
            return False
        is_written = is_touched
        if self.history is None:
            is_written = self._differs_from_initial()
        elif self.history.stages:  # otherwise no stage has a delay, and nothing to compare with
            is_written = self.history.differs_from_newest()
        if not is_written:
            self._seen = now
        return is_written

    def _differs_from_initial(self) -> bool:
        assert self._initial is not None
        for kept, parameter in zip(self._initial.values(), self._parameters, strict=True):
            if not is_equal(kept, contents(parameter)):
                return True
        return False

    def _record(self) -> None:
        """Record what the weights are now as the newest version."""
        history = self._ensure_history()
        self._check.see_update(
            self._num_backward, is_by_step=self._has_stepped, num_cleared=self._num_cleared
        )
        history.record()
        self._recorded += 1
        self._start_update()

    def _ensure_history(self) -> History:
        if self.history is None:
            assert self._initial is not None
            self.history = self._make_history(self._initial)
            self._initial = None
        return self.history

    def _start_update(self) -> None:
        self._has_stepped = False
        self._num_windows = self._num_backward = self._num_cleared = 0
        self._seen = counters_of(self._parameters)

    def _put_aside(self) -> None:
        """A window opens within an optimizer's step, which may have moved the weights: keep what
        they hold, until it closes."""
        if self.history is None:
            is_moved = self._is_touched() or self._differs_from_initial()
            if not is_moved:
                return
            self._ensure_history()
        self._aside = [contents(parameter).clone() for parameter in self._parameters]

    def _show_aside(self) -> None:
        """Parameters := what they held when a window opened within an optimizer's step."""
        if self._aside is None:
            return
        with writable():
            for parameter, kept in zip(self._parameters, self._aside, strict=True):
                contents(parameter).copy_(kept)

    def restart(
        self,
        updates: int,
        history: History | None,
        *,
        is_pending: bool,
        initial: dict[str, Tensor] | None = None,
        num_windows: int = 0,
        num_backward: int = 0,
    ) -> None:
        """Continue from a saved state.

        Args:
            updates: how many updates have been recorded as versions.
            history: these versions; None if there was no update yet.
            is_pending: whether one more update has been made, which is not recorded yet.
            initial: version 0, if that update is the first one.
            num_windows: how many windows the update under way has had.
            num_backward: how many of them have ended their backward pass.
        """
        self.close()
        self.history = history
        if history is not None:
            history.newest_version = updates
        self._initial = initial
        self._latest = None
        self._recorded = updates
        self._stepped_at.clear()
        self._start_update()
        self._num_windows = num_windows
        self._num_backward = num_backward
        self._gradients_left = None
        if num_windows and not is_pending:
            self.begin()  # in the middle of the first update: the weights are still version 0
            self._serial += 1  # the step that follows has a window before it
        self._has_stepped = is_pending

    # Steps

    def before_step(self, optimizer: Optimizer, *, takes_closure: bool) -> None:
        """An optimizer is about to write the newest weights."""
        self._forget_failed_steps(starting=optimizer)
        is_outermost = not self._stepping
        self._stepping[optimizer] = self._stepping.get(optimizer, 0) + 1
        window = self.current
        if window is not None and window.is_in_backward:
            self._before_step_within_backward(optimizer, window)
            return
        if window is not None:
            self._watch_graph_of_gradients(window)
            if window.is_explicit and (window.has_begun_backward or window.has_gradients):
                # The block goes on after the step, where its end would count for the next update.
                self.end(window)
        self._end_unannounced()
        self.close()
        self.raise_problem()
        if takes_closure or not is_outermost:
            return  # a closure will make the passes; an inner step belongs to the outer one
        self._check.refuse_stray_gradients()
        if self._check.is_on:
            self._check.see_gradients()
        self._refuse_step_without_window(optimizer)

    def _forget_failed_steps(self, starting: Optimizer | None = None) -> None:
        """Forget steps that an exception has broken off, which no hook sees.

        Args:
            starting: the optimizer whose step begins now, so that it is on the stack already.
        """
        for optimizer in list(self._stepping):
            num_own = 1 if optimizer is starting else 0
            if num_running(STEP, optimizer) <= num_own:
                del self._stepping[optimizer]

    def _before_step_within_backward(self, optimizer: Optimizer, window: Window) -> None:
        """An optimizer in a gradient hook is about to step. The backward pass still needs the old
        versions of the other parameters, so only this optimizer's own get the newest weights."""
        own: list[Tensor] = []
        for group in optimizer.param_groups:
            own += [weight for weight in group["params"] if id(weight) not in window.stepped]
        if self.history is not None:
            self.history.show_newest_of(own)
        window.stepped |= {id(parameter) for parameter in own}

    def _watch_graph_of_gradients(self, window: Window) -> None:
        """After `backward(create_graph=True)`, the step may differentiate the gradients (a product
        with the Hessian): such a pass needs the window's contents from its first node on."""
        begin_backward = weakly(self.begin_backward)
        for parameter in self._parameters:
            gradient = parameter.grad
            if gradient is not None and gradient.grad_fn is not None:
                gradient.register_hook(lambda _: begin_backward(window))  # type: ignore[no-untyped-call]

    def _refuse_step_without_window(self, optimizer: Optimizer) -> None:
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if not gradients:
            raise UserError(
                "delayed: optimizer.step() without a backward pass through the delayed model: none "
                "of its weights has a gradient"
            )
        if not self._has_new_window(optimizer):
            self._refuse_gradients_without_window()

    def _has_new_window(self, optimizer: Optimizer) -> bool:
        """Whether a window has opened since an optimizer's last step."""
        return self._stepped_at.get(id(optimizer), 0) != self._serial

    def _refuse_gradients_without_window(self) -> None:
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if any(has_nonzero(gradient) for gradient in gradients):
            raise UserError(
                "delayed: optimizer.step() without a training forward pass of the delayed model as "
                "a whole; put passes of its parts, or passes in eval mode, into `with "
                "pipeline.micro_batch():`"
            )

    def after_step(self, optimizer: Optimizer) -> None:
        """An optimizer has written the newest weights, unless it has skipped its step."""
        num_around = self._stepping.pop(optimizer, 1) - 1
        if num_around:  # a step within the optimizer's own step, which goes on
            self._stepping[optimizer] = num_around
            return
        # A closure has made its passes after `before_step`.
        self._check.refuse_stray_gradients()
        found = getattr(optimizer, "found_inf", None)  # a fused optimizer skips a step by itself
        if found is not None and bool(found):
            return
        if not self._has_new_window(optimizer):
            self._refuse_gradients_without_window()
            return
        self._stepped_at[id(optimizer)] = self._serial
        self._has_stepped = True


def _mixed_backward() -> UserError:
    return UserError(
        "delayed: a backward pass goes through a training forward pass and through an evaluation "
        "(a pass in eval mode), which use different versions of the weights; call backward() for "
        "each of the two losses, or put all passes into `with pipeline.micro_batch():`"
    )


def _marks_of(parameters: Sequence[Tensor]) -> list[tuple[int, int]]:
    """The id and the version counter of each parameter's gradient, in order. They change when a
    gradient is replaced or written."""
    marks = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None:
            # Tensors that were made in inference mode do not count their versions.
            counter = 0 if gradient.is_inference() else gradient._version
            marks.append((id(gradient), counter))
    return marks
