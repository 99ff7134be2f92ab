"""Windows. A window is one micro-batch: it lasts from a training forward pass to the end of its
backward pass. While it is open, the parameters hold the old versions of their stages; at all other
times they hold the newest weights. Needs torch alone.

Two stages with tau 1 and 0, one micro-batch per update (M = 1). The last columns have the version
that the parameters of each stage hold after the line:

    the loop             what happens                               stage 0   stage 1
    model(batch)         window 1 opens                             0         0
    loss.backward()      its end closes window 1                    0         0
    optimizer.step()     version 1 is pending                       1         1
    model(batch)         version 1 is recorded; window 2 opens      0         1
    loss.backward()      its end closes window 2                    1         1
    optimizer.step()     version 2 is pending                       2         2
    model(batch)         version 2 is recorded; window 3 opens      1         2

A version is recorded only when the next window opens. Until then it is *pending*: what the loop
writes after `optimizer.step()` (it may clip weights, or average them) belongs to the version, too.

In a plain loop, hooks call the methods of `Windows` in this order:

    a training forward pass begins    `open`: record the pending update, make a `Window`, and show
                                      its contents
    it ends                           `check_forward`: it must not have written weights
    its backward pass begins          `begin_backward`: show the window's contents again, if it has
                                      been closed; under `none` and `predict`, other weights
    a gradient arrives                `see_gradient`
    the backward pass ends            `end`: count it, and `close`: show the newest weights
    the optimizer steps               `before_step`, `after_step`: an update is pending

Not every loop is plain. These are the other moves:

    an evaluation within a window     `peek` shows the newest weights, `end_peek` the window's again
    a second backward pass            `begin_backward` opens the closed window again (`reopen`)
    activation checkpointing          repeats a forward pass in the backward pass: `recompute`
    `with pipeline.micro_batch():`    an explicit window: the block closes it, not a backward pass
    a step with a closure             windows open within the step: see `_put_aside`
    a step in a gradient hook         one optimizer's parameters get the newest weights early: see
                                      `_before_step_within_backward`

Three parts have a file of their own: the versions (`recorded_versions`), the count of micro-batches
in an update (`update_under_way`), and steps that nest (`running_steps`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.optim import Optimizer

from brx.errors import UserError, some
from brx.pipeline.history import WINDOW_COUNTERS, History, contents, writable
from brx.pipeline.hooks import at_end_of_backward, current_task, has_nonzero, weakly
from brx.pipeline.recorded_versions import RecordedVersions
from brx.pipeline.running_steps import RunningSteps
from brx.pipeline.self_check import SelfCheck
from brx.pipeline.update_under_way import UpdateUnderWay


@dataclass
class Window:
    """One micro-batch: its forward passes and its backward pass.

    A hook on the outputs of a forward pass *announces* its backward pass. If the outputs hold no
    tensor that takes a hook, only the gradients at the parameters tell of the backward pass.
    """

    micro_batch: int
    """n, from 1. It decides which version each stage uses."""
    update: int
    """The number of updates that had been recorded when it opened."""
    counter: int
    """The autograd version counter that marks its contents; see `brx.pipeline.history`."""
    num_loads: int = 0
    """How many saved states had been loaded when it opened."""
    is_explicit: bool = False
    """Opened by `micro_batch()`, which closes it."""

    # Set when the forward pass ends:
    announces_backward: bool = False
    """Whether a hook on an output will announce the backward pass."""

    # Set when an announced backward pass begins:
    backward_task: int | None = None
    """Autograd's number of that pass while it runs, otherwise None."""
    has_begun_backward: bool = False
    shows_backward_weights: bool = False
    """Under `none` and `predict`: the parameters hold the backward pass's weights, not the forward
    pass's."""
    has_graph_of_gradients: bool = False
    """It is a pass with `create_graph`, which does not end the window: another backward pass goes
    through this one."""

    # Set when a gradient reaches a parameter:
    has_gradients: bool = False
    has_unannounced_backward: bool = False
    """The gradient came from a backward pass that was not announced."""

    # Set when an optimizer steps in a gradient hook:
    stepped: set[int] = field(default_factory=set)
    """The ids of its parameters. They hold the newest weights already."""

    # Set when the backward pass ends:
    has_ended: bool = False
    """The next forward pass is another micro-batch."""

    @property
    def is_in_backward(self) -> bool:
        """Whether an announced backward pass is running."""
        return self.backward_task is not None

    @property
    def has_backward(self) -> bool:
        """Whether a backward pass has begun, announced or not."""
        return self.has_begun_backward or self.has_unannounced_backward


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
        self._by_name = dict(parameters)
        self._parameters = list(parameters.values())
        self._accumulation = accumulation
        self._check = check

        self.versions = RecordedVersions(parameters, make_history, delayed_among)
        self._update = UpdateUnderWay(self._parameters, accumulation)
        self._steps = RunningSteps()

        self.current: Window | None = None  # the open one
        self._latest: Window | None = None  # the one that closed last
        self._num_opened = 0  # windows so far, over all updates
        self._num_loads = 0  # saved states so far; a window does not outlive one
        # Ids of the optimizers that have made a step since the newest window opened.
        self._have_stepped: set[int] = set()

        # Whether the newest weights are shown in the middle of the open window.
        self.is_peeking = False
        self._peeking_task: int | None = None  # autograd's backward pass, if it is that which peeks

        # What the parameters held when a window opened in the middle of an optimizer's step.
        self._aside: list[Tensor] | None = None
        # A problem that was found where no error can be raised; `raise_problem` reports it.
        self._problem: str | None = None

    @property
    def updates(self) -> int:
        """How many updates have been made, including a pending one."""
        recorded = self.versions.num_updates
        return recorded + 1 if self.is_pending else recorded

    @property
    def is_pending(self) -> bool:
        """Whether an update has been made that is not recorded as a version yet."""
        if not self.versions.has_begun:
            return False
        if self.versions.has_stepped:
            return True
        # A step by hand is noticed by what it has written.
        return not self.is_in_step and self.current is None and self._is_written()

    @property
    def is_in_step(self) -> bool:
        """Whether an optimizer's step is running now (it may be calling a closure)."""
        return self._steps.has_any

    @property
    def is_explicit_open(self) -> bool:
        """Whether a window of `micro_batch()` is open."""
        return self.current is not None and self.current.is_explicit

    # A forward pass

    def open(self, *, is_explicit: bool = False) -> Window:
        """Give a training pass that begins its window: the one that is open, or a new one."""
        self._end_any_peek()
        self._steps.forget_failed()
        self._refuse_after_step_within()
        self._end_unannounced()
        window = self.current
        if window is not None and not window.has_ended:
            # One more forward pass of the same micro-batch. But a loop that steps by hand in the
            # middle of a window would never close it; what it has written shows that.
            if self._check.is_on and not window.is_explicit:
                self._refuse_writes(window, by_contents=True)
        else:
            self.close()
            self.raise_problem()
            self._check.refuse_stray_gradients()
            self._store_newest()
            window = self._next_window()
            self._show(window)
        window.is_explicit |= is_explicit
        return window

    def _store_newest(self) -> None:
        """Before a window opens: store the newest weights, which are about to be overwritten."""
        if not self.versions.has_begun:
            self.versions.begin()
        elif self.is_pending:
            self._record_update()
        elif self.is_in_step:  # a closure that is called several times, as by LBFGS
            self._put_aside()
        elif not self._update.has_all_backward:
            # No counter sees a write to `weight.data`. Where a step may have ended the update,
            # `is_pending` has just compared the contents. Before, they are stored as they are.
            self.versions.amend()

    def _record_update(self) -> None:
        self.versions.make_history()
        self._check.see_update(
            self._update.num_backward,
            is_by_step=self.versions.has_stepped,
            num_cleared=self._update.num_cleared,
        )
        self.versions.record()
        self._update = UpdateUnderWay(self._parameters, self._accumulation)

    def _next_window(self) -> Window:
        update = self.versions.num_updates  # t - 1
        within_update = self._update.begin_window()  # j
        micro_batch = update * self._accumulation + within_update  # n = (t - 1) M + j
        self._num_opened += 1
        self._have_stepped.clear()
        counter = WINDOW_COUNTERS + self._num_opened % WINDOW_COUNTERS
        previous = self._latest
        if previous and (previous.update, previous.micro_batch) == (update, micro_batch):
            counter = previous.counter  # the contents are the same, so autograd may mix the two
        return Window(micro_batch, update, counter, self._num_loads)

    def _show(self, window: Window) -> None:
        """Parameters := what a window computes with."""
        self.current = window
        history = self.versions.history
        if history is None:  # the first update: all versions are version 0, which they hold
            return
        history.show(window.micro_batch, window.counter)
        if window.shows_backward_weights:
            history.show_for_backward()

    def check_forward(self) -> None:
        """UserError where a forward pass that ends has written weights."""
        window = self.current
        if window is None or self.is_peeking:
            return
        if window.is_explicit:  # looked at when it closes
            return
        self._refuse_writes(window, by_contents=False)

    # A backward pass

    def begin_backward(self, window: Window) -> None:
        """Prepare a window for its backward pass, which has reached the model's output."""
        if window.is_in_backward:  # it has reached another output before
            return
        task = current_task()
        if self._peeking_task == task:
            raise _mixed_backward()
        self._check.refuse_stray_gradients()
        self.reopen(window)
        if not window.has_ended:
            self._update.restart_if_cleared()
        history = self.versions.history
        if history is not None and history.stash != "exact":
            # The last moment to see what was written since the forward pass began.
            self._note_writes(window, by_contents=self._check.is_on)
            self.raise_problem()
            history.show_for_backward()
            window.shows_backward_weights = True
        if torch.is_grad_enabled():  # create_graph
            window.has_graph_of_gradients = True
            return
        window.backward_task = task
        window.has_begun_backward = True
        at_end_of_backward(partial(self._end_backward, window))

    def reopen(self, window: Window) -> None:
        """Show the contents of a window again that has been closed.

        Raises:
            UserError: its update is over, or weights were written or a state was loaded since.
        """
        self._end_any_peek()
        if window is self.current:
            return
        if window.num_loads != self._num_loads:
            raise UserError(
                "delayed: a state was loaded between a forward pass and its backward pass; load it "
                "before the forward pass"
            )
        if window.update != self.versions.num_updates or self.versions.has_stepped:
            raise UserError(
                "delayed: a backward pass came after the optimizer's step that it belongs to; run "
                "it before that step"
            )
        self.close()
        if self.is_in_step:
            self._put_aside()
        elif self._is_written():
            raise UserError(
                "delayed: weights were written between a forward pass and its backward pass; write "
                "them after the optimizer's step"
            )
        else:
            self.versions.amend()
        window.shows_backward_weights = False
        self._show(window)

    def recompute(self) -> None:
        """Handle a forward pass within a backward pass: activation checkpointing repeats it."""
        self._refuse_after_step_within()
        if self.current is None and self._latest is not None:
            self.reopen(self._latest)

    def see_gradient(self) -> None:
        """Note that a parameter's gradient has arrived."""
        window = self.current
        if window is None:
            return
        window.has_gradients = True
        is_with_graph = torch.is_grad_enabled()  # create_graph: another backward pass will follow
        if not window.is_in_backward and not is_with_graph:
            window.has_unannounced_backward = True

    def _end_backward(self, window: Window) -> None:
        window.backward_task = None
        if not window.is_explicit:
            self.end(window)

    # The end of a window

    def end(self, window: Window) -> None:
        """Note that a window's micro-batch is over, and close the window if it is open."""
        if not window.has_ended:
            window.has_ended = True
            self._update.end_backward(has_gradients=window.has_gradients)
        if self.current is window:
            self.close()

    def _end_unannounced(self) -> None:
        """When the next pass or step begins: end the open window, if gradients have arrived from a
        backward pass that was not announced. That pass is over by now."""
        window = self.current
        if window is None or window.is_explicit:
            return
        if window.has_unannounced_backward:
            self.end(window)
            # The loop may have cleared them since they have arrived.
            self._update.gradients_left = None

    def break_off(self, window: Window) -> None:
        """Close the window of `micro_batch()`, whose block has failed. Without a backward pass, it
        was no micro-batch: the loop may repeat it, or go on with another."""
        if self.current is window and not window.has_backward:
            self._update.num_windows -= 1
            self.close()
        else:
            self.end(window)

    def close(self) -> None:
        """Close the open window, if there is one: parameters hold the newest weights again."""
        window = self.current
        if window is None:
            return
        holds_newest = self.is_peeking
        self.is_peeking = False
        self._peeking_task = None
        self.current = None
        self._latest = window
        if not holds_newest:
            # No counter sees a write to `weight.data`, and comparing contents makes the host wait
            # for the device. So after the first updates, contents are compared only if a window
            # closes in an unusual way: without a backward pass.
            self._note_writes(window, by_contents=self._check.is_on or not window.has_ended)
            self._show_newest(window)
        self._aside = None
        self.versions.note_counters()

    def _show_newest(self, window: Window) -> None:
        """Parameters := the newest weights, which the given window has replaced."""
        history = self.versions.history
        if history is None:
            return
        if window.stepped:
            history.show_newest_but_of(window.stepped)
        else:
            history.show_newest()
        if self._aside is not None:
            with writable():
                for parameter, kept in zip(self._parameters, self._aside, strict=True):
                    contents(parameter).copy_(kept)

    # The newest weights in the middle of a window

    def peek(self) -> None:
        """Show the newest weights, if a window is open."""
        if self.current is None or self.is_peeking:
            return
        self._refuse_after_step_within()
        self._note_writes(self.current, by_contents=self._check.is_on)
        self.raise_problem()
        self.is_peeking = True
        self._show_newest(self.current)

    def end_peek(self) -> None:
        """Show the window's contents again, after `peek`. If a backward pass peeks, its end does
        that."""
        if self._peeking_task is None:
            self._end_any_peek()

    def peek_in_backward(self) -> None:
        """Show the newest weights until the backward pass that is running ends. It has reached the
        output of an evaluation, whose graph is of the newest weights.

        Raises:
            UserError: it goes through the window's passes, too.
        """
        if self.current is None or self.is_peeking:
            return
        task = current_task()
        if self.current.backward_task == task:
            raise _mixed_backward()
        self.peek()
        self._peeking_task = task
        at_end_of_backward(partial(self._end_peek_in_backward, task))

    def _end_peek_in_backward(self, task: int) -> None:
        if self._peeking_task == task:
            self._end_any_peek()

    def _end_any_peek(self) -> None:
        if not self.is_peeking:
            return
        self.is_peeking = False
        self._peeking_task = None
        assert self.current is not None
        self._show(self.current)

    def _refuse_after_step_within(self) -> None:
        """UserError for a pass in a window in whose backward pass an optimizer has stepped: some
        parameters hold the newest weights already, others the old ones."""
        if self.current is not None and self.current.stepped:
            raise UserError(
                "delayed: an optimizer has stepped within a backward pass, and another pass begins "
                "before that one's window has closed; evaluate after the backward pass, and give "
                "each backward pass a micro_batch() of its own"
            )

    # Writes to the weights

    def _is_written(self) -> bool:
        """Whether the newest weights were written, other than by an optimizer's step."""
        # At its end the loop may step by hand, which no counter sees.
        return self.versions.is_written(by_contents=self._update.may_be_over)

    def _written(self, window: Window, *, by_contents: bool) -> list[str]:
        """The names of parameters in stages with a delay that no longer hold what the window gave
        them.

        Args:
            window: the one that is open.
            by_contents: compare contents even if no version counter has moved.
        """
        if window.shows_backward_weights or window.stepped:  # then they hold other contents anyway
            return []
        return self.versions.written_in_window(
            window.micro_batch,
            window.counter,
            by_contents=by_contents,
            is_rounded=window.is_explicit,  # SAM moves weights and back again, up to rounding
        )

    def _refuse_writes(self, window: Window, *, by_contents: bool) -> None:
        """UserError if parameters were written in the open window, which is closed then."""
        if self._written(window, by_contents=by_contents):
            self.close()
            self.raise_problem()

    def _note_writes(self, window: Window, *, by_contents: bool) -> None:
        """Note, for `raise_problem`, parameters that were written in the window. Their new contents
        are about to be lost."""
        written = self._written(window, by_contents=by_contents)
        if not written:
            return
        instead = "write the newest weights, after the optimizer's step"
        if not any(self._by_name[name].requires_grad for name in written):
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

    def raise_problem(self) -> None:
        """UserError for a problem that was noted where no error could be raised."""
        if self._problem is not None:
            problem = self._problem
            self._problem = None
            raise UserError(problem)

    # Steps

    def before_step(self, optimizer: Optimizer, *, takes_closure: bool) -> None:
        """An optimizer is about to write the newest weights."""
        self._steps.forget_failed(starting=optimizer)
        is_within_a_step = self.is_in_step
        self._steps.begin(optimizer)
        window = self.current
        if window is not None and window.is_in_backward:
            self._before_step_within_backward(optimizer, window)
            return
        if window is not None:
            self._reopen_for_graph_of_gradients(window)
            if window.is_explicit and window.has_backward:
                # The block goes on after the step, where its end would count for the next update.
                self.end(window)
        self._end_unannounced()
        self.close()
        self.raise_problem()
        if takes_closure:  # which will make the passes
            return
        if is_within_a_step:  # the passes were made before the outer one
            return
        self._check.refuse_stray_gradients()
        if self._check.is_on:
            self._check.see_gradients()
        self._refuse_step_without_gradients()
        if not self._has_new_window(optimizer):
            self._refuse_gradients_without_window()

    def _before_step_within_backward(self, optimizer: Optimizer, window: Window) -> None:
        """An optimizer in a gradient hook is about to step. The backward pass still needs the old
        versions of the other parameters, so only this optimizer's own get the newest weights."""
        own: list[Tensor] = []
        for group in optimizer.param_groups:
            own += [weight for weight in group["params"] if id(weight) not in window.stepped]
        if self.versions.history is not None:
            self.versions.history.show_newest_of(own)
        window.stepped |= {id(parameter) for parameter in own}

    def _reopen_for_graph_of_gradients(self, window: Window) -> None:
        """After `backward(create_graph=True)`, the step may differentiate the gradients (a product
        with the Hessian): such a pass needs the window's contents from its first node on."""
        begin_backward = weakly(self.begin_backward)
        for parameter in self._parameters:
            gradient = parameter.grad
            if gradient is not None and gradient.grad_fn is not None:
                gradient.register_hook(lambda _: begin_backward(window))  # type: ignore[no-untyped-call]

    def _put_aside(self) -> None:
        """A window opens within an optimizer's step, which may have moved the weights: keep what
        they hold, until it closes."""
        versions = self.versions
        if versions.history is None:
            is_moved = versions.is_touched or versions.differs_from_initial()
            if not is_moved:
                return
            versions.make_history()
        self._aside = [contents(parameter).clone() for parameter in self._parameters]

    def after_step(self, optimizer: Optimizer) -> None:
        """An optimizer has written the newest weights, unless it has skipped its step."""
        self._steps.end(optimizer)
        if self._steps.is_running(optimizer):  # it was a step within its own step, which goes on
            return
        # A closure has made its passes after `before_step`.
        self._check.refuse_stray_gradients()
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is not None and bool(found_inf):  # a fused optimizer skips a step by itself
            return
        if not self._has_new_window(optimizer):
            self._refuse_gradients_without_window()
            return
        self._have_stepped.add(id(optimizer))
        self.versions.has_stepped = True

    def _has_new_window(self, optimizer: Optimizer) -> bool:
        """Whether a window has opened since an optimizer's last step."""
        return self._num_opened > 0 and id(optimizer) not in self._have_stepped

    def _refuse_step_without_gradients(self) -> None:
        if all(parameter.grad is None for parameter in self._parameters):
            raise UserError(
                "delayed: optimizer.step() without a backward pass through the delayed model: none "
                "of its weights has a gradient"
            )

    def _refuse_gradients_without_window(self) -> None:
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if any(has_nonzero(gradient) for gradient in gradients):
            raise UserError(
                "delayed: optimizer.step() without a training forward pass of the delayed model as "
                "a whole; put passes of its parts, or passes in eval mode, into `with "
                "pipeline.micro_batch():`"
            )

    # Saved states

    def passes_to_save(self) -> tuple[int, int]:
        """How many windows and how many backward passes of the update under way count in a state
        that is saved now."""
        num_windows = self._update.num_windows
        num_backward = self._update.num_backward
        window = self.current
        if window is not None and not window.has_ended:
            if window.has_unannounced_backward:
                num_backward += 1  # it is over, and the next pass will show it
            else:
                num_windows -= 1  # no graph is saved, so its forward pass has to run again
        return num_windows, num_backward

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
        self._latest = None
        self._num_loads += 1
        self._have_stepped.clear()
        self.versions.restart(updates, history, initial)
        self._update = UpdateUnderWay(
            self._parameters, self._accumulation, num_windows, num_backward
        )
        if num_windows and not is_pending:
            if not self.versions.has_begun:  # the weights are still version 0
                self.versions.begin()
            self._num_opened += 1  # the step that follows has a window before it
        self.versions.has_stepped = is_pending


def _mixed_backward() -> UserError:
    return UserError(
        "delayed: a backward pass goes through a training forward pass and through an evaluation "
        "(a pass in eval mode), which use different versions of the weights; call backward() for "
        "each of the two losses, or put all passes into `with pipeline.micro_batch():`"
    )
