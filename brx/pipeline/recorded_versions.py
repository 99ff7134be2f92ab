"""The versions of a user's weights that have been recorded, and whether the weights have been
written since. Needs torch alone.

The versions are kept in one of two forms:

- from the first pass on: `initial`, a copy of all weights. It is version 0, and the only version.
- once the first update is noticed: `history`, with the older versions of each stage that has a
  delay. It cannot be made earlier, because the first passes show how the model is cut into stages.

No hook tells that weights are written outside of an optimizer's step. Two things show it: a version
counter that has moved (each in-place operation moves it, even if it leaves the contents as they
were), or other contents. A step by hand, `weight.data -= ...`, moves no counter. But to compare
contents, the host must wait for the device; so callers ask for that only where it is needed.
"""

from collections.abc import Callable, Mapping

from torch import Tensor

from brx.pipeline.history import History, contents, counters_of, different, is_equal


class RecordedVersions:
    """Records versions of the weights, and compares the weights with them.

    Args:
        parameters: those that train, by name.
        make_history: makes the stages' versions; takes version 0 of all parameters, by name.
        delayed_among: those of the given names whose parameters are in a stage with a delay.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        make_history: Callable[[dict[str, Tensor]], History],
        delayed_among: Callable[[list[str]], list[str]],
    ) -> None:
        self._names = list(parameters)
        self._parameters = list(parameters.values())
        self._make_history = make_history
        self._delayed_among = delayed_among
        self.initial: dict[str, Tensor] | None = None  # by name
        self.history: History | None = None
        self.num_updates = 0  # recorded so far; the newest version has this number
        self.has_stepped = False  # whether an optimizer has made a step since the newest version
        # The parameters' version counters when they last held the newest version.
        self._counters: tuple[int, ...] = ()

    @property
    def has_begun(self) -> bool:
        """Whether the first pass has been made, so that there is a version 0."""
        return self.initial is not None or self.history is not None

    def begin(self) -> None:
        """Keep what the parameters hold now as version 0."""
        self.initial = {}
        for name, parameter in zip(self._names, self._parameters, strict=True):
            self.initial[name] = contents(parameter).clone()
        self.note_counters()

    def make_history(self) -> History:
        """Give the versions their second form, unless they have it already."""
        if self.history is None:
            assert self.initial is not None
            self.history = self._make_history(self.initial)
            self.initial = None
        return self.history

    def record(self) -> None:
        """Record what the parameters hold now as a new version."""
        self.make_history().record()
        self.num_updates += 1
        self.has_stepped = False
        self.note_counters()

    def amend(self) -> None:
        """Store what the parameters hold as the newest version again: they may have been written
        in a way that no counter sees."""
        if self.history is not None:
            self.history.amend()
            return
        assert self.initial is not None
        for kept, parameter in zip(self.initial.values(), self._parameters, strict=True):
            kept.copy_(contents(parameter))

    def restart(
        self, num_updates: int, history: History | None, initial: dict[str, Tensor] | None
    ) -> None:
        """Continue with the versions of a saved state."""
        if history is not None:
            history.newest_version = num_updates
        self.history = history
        self.initial = initial
        self.num_updates = num_updates
        self.has_stepped = False
        self.note_counters()

    # Outside of windows: do the parameters still hold the newest version?

    def note_counters(self) -> None:
        """Note the version counters: the parameters hold the newest version now."""
        self._counters = counters_of(self._parameters)

    @property
    def is_touched(self) -> bool:
        """Whether a version counter has moved since `note_counters`."""
        return self._counters != counters_of(self._parameters)

    def is_written(self, *, by_contents: bool) -> bool:
        """Whether the parameters have changed since the newest version.

        Args:
            by_contents: compare contents even if no version counter has moved.
        """
        counters = counters_of(self._parameters)
        is_touched = counters != self._counters
        if not is_touched and not by_contents:
            return False
        if self.history is None:
            is_written = self.differs_from_initial()
        elif self.history.stages:
            is_written = self.history.differs_from_newest()
        else:
            is_written = is_touched  # no stage has a delay, so there are no contents to compare
        if not is_written:
            self._counters = counters
        return is_written

    def differs_from_initial(self) -> bool:
        """Whether the parameters hold other contents than version 0, in the first update."""
        assert self.initial is not None
        for kept, parameter in zip(self.initial.values(), self._parameters, strict=True):
            if not is_equal(kept, contents(parameter)):
                return True
        return False

    # In a window: do the parameters still hold what the window gave them?

    def written_in_window(
        self, micro_batch: int, counter: int, *, by_contents: bool, is_rounded: bool
    ) -> list[str]:
        """The names of parameters in stages with a delay that hold something else by now.

        Args:
            micro_batch: the window's.
            counter: the version counter that marks the window's contents.
            by_contents: compare contents even if no version counter has moved.
            is_rounded: contents that differ by rounding alone count as the same.
        """
        if self.history is not None:
            return self.history.written(
                micro_batch, counter, by_contents=by_contents, is_rounded=is_rounded
            )
        # In the first update, all windows have version 0, which the parameters hold anyway.
        if not by_contents and not self.is_touched:
            return []
        assert self.initial is not None
        shown = self.initial.values()
        written = different(self._names, self._parameters, shown, is_rounded=is_rounded)
        return self._delayed_among(written)
