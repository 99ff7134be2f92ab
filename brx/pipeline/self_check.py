"""What `delayed` tells users about their loop after its first updates, each thing once. Needs torch
alone."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from brx.errors import UserError, counted, counted_choices, some
from brx.pipeline.hooks import has_nonzero, warn_user

CHECKED = 3  # updates


class SelfCheck:
    """Checks the first `CHECKED` updates of a loop. In all updates, it looks for gradients that
    arrived outside of a window.

    Args:
        parameters: those that train, by name.
        accumulation: M, as the user has stated it.
        others: the model's other parameters, by name. They have no versions.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], accumulation: int, others: Mapping[str, Tensor]
    ) -> None:
        self._parameters = dict(parameters)
        self._others = dict(others)
        self._counters_of_others: dict[str, int] = {}  # autograd's, at the last update
        self._accumulation = accumulation
        self._told: set[str] = set()
        self._num_updates = 0
        self._with_gradient: set[str] = set()
        # Gradients that arrived outside of a window: by name, the parameter's version counter.
        self._stray: dict[str, int] = {}
        self.passes_met: set[int] = set()  # the numbers of backward passes that updates took

    @property
    def is_on(self) -> bool:
        """Whether the first `CHECKED` updates are still to be made or under way."""
        return self._num_updates < CHECKED

    def see_gradient(self, name: str) -> None:
        """Note that a parameter's gradient has arrived."""
        self._with_gradient.add(name)

    def see_stray_gradient(self, name: str) -> None:
        """Note that a parameter's gradient has arrived outside of a window.

        Raises:
            UserError: the one before has led to a step by hand, which no hook sees.
        """
        counter = self._parameters[name]._version
        if self._stray.get(name, counter) != counter:
            raise _stray_gradient(name)
        self._stray[name] = counter

    def see_gradients(self) -> None:
        """Before a step: note which parameters have gradients, however these came about."""
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                self._with_gradient.add(name)

    def refuse_stray_gradients(self) -> None:
        """UserError if gradients that arrived outside of a window have not been cleared since."""
        if not self._stray:
            return
        stray = sorted(self._stray)
        self._stray.clear()
        for name in stray:
            gradient = self._parameters[name].grad
            if gradient is not None and has_nonzero(gradient):
                raise _stray_gradient(name)

    def see_update(self, num_passes: int, *, is_by_step: bool, num_cleared: int) -> None:
        """Check a complete update.

        Args:
            num_passes: how many backward passes it took.
            is_by_step: whether an optimizer's step made it.
            num_cleared: how many more it took, whose gradients were cleared before the step.
        """
        self.passes_met.add(num_passes)
        self._num_updates += 1
        if not is_by_step:
            self._tell(
                "weights",
                "weights changed without a step of the optimizer, between two passes; this counts "
                "as a new version",
            )
        if num_passes > self._accumulation:
            self._tell_passes(num_passes)
        if is_by_step and 0 < num_passes < self._accumulation <= num_passes + num_cleared:
            self._tell(
                "cleared",
                "gradients were cleared between the micro-batches of an update, which counts as a "
                "skipped step: the micro-batches that follow use the versions of the first ones; "
                "let the gradients add up in parameter.grad until the step",
            )
        if not num_passes and is_by_step and self._accumulation > 1:
            self._tell(
                "no passes",
                "no backward pass of an update was seen to end, so all its passes used the version "
                "of its first micro-batch; put the forward and the backward pass of each "
                "micro-batch into `with pipeline.micro_batch():`",
            )
        if self._num_updates <= CHECKED:
            self._look_at_others()
        if self._num_updates == CHECKED:
            self._tell_first_updates()

    def _tell_passes(self, num_passes: int) -> None:
        used = "t - 1 - tau, tau in updates"
        if self._accumulation > 1:
            used = f"of micro-batch {self._accumulation}"
        self._tell(
            "passes",
            f"an update took {num_passes} backward passes, but accumulation is "
            f"{self._accumulation}; further passes use the version {used}. If all are "
            f"micro-batches of one batch, set accumulation={num_passes}",
        )

    def _look_at_others(self) -> None:
        """Tell of parameters that train without delay: an optimizer that the pipeline does not know
        has written them since the last update."""
        before = self._counters_of_others
        now = {}
        for name, other in self._others.items():
            # Frozen ones may be written by the loop itself, as a momentum encoder is.
            if other.requires_grad and not other.is_inference():
                now[name] = other._version
        written = [name for name in now if name in before and now[name] != before[name]]
        self._counters_of_others = now
        if written:
            self._tell(
                "others",
                f"{some(written)} trained by an optimizer that delayed was not given, so without "
                "delay; give it all optimizers of the model: delayed(model, (first, second), ...)",
            )

    def _tell_first_updates(self) -> None:
        most = max(self.passes_met)
        if 0 < most < self._accumulation and "cleared" not in self._told:
            passes = counted(most, "backward pass")
            self._tell(
                "fewer passes",
                f"the first {CHECKED} updates took at most {passes} each, but accumulation is "
                f"{self._accumulation}; tau counts micro-batches, so the delays in updates are "
                f"tau / {self._accumulation}",
            )
        unused = [name for name in self._parameters if name not in self._with_gradient]
        # Where no gradient was seen at all, `torch.autograd.grad` returns them to the loop.
        if unused and self._with_gradient:
            self._tell(
                "unused",
                f"{some(unused)} given to the optimizer but had no gradient in the first {CHECKED} "
                "updates",
            )

    def _tell(self, kind: str, message: str) -> None:
        if kind not in self._told:
            self._told.add(kind)
            warn_user(message)

    def summary(self, delays_in_updates: Sequence[float]) -> str:
        """One line on the passes per update so far, and the largest delay."""
        passes = counted_choices(sorted(self.passes_met), "backward pass")
        longest = counted(max(delays_in_updates), "update", ".4g")
        return f"met: {passes} per update; tau is up to {longest}"


def _stray_gradient(name: str) -> UserError:
    return UserError(
        f"delayed: a gradient reached {name} by a pass outside of the model's training forward "
        "pass, computed with the newest weights; call the model as a whole and in training mode, "
        "or put the passes into `with pipeline.micro_batch():` (inside the closure, if they are in "
        "one)"
    )
