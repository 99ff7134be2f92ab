"""The cut of a user's model into stages, which may have to wait for the first forward pass. Needs
torch alone.

A mapping or a function says which parameter belongs to which stage at once. A number of stages cuts
the model in the order in which it uses its parameters, and only a pass shows that order.
"""

from collections.abc import Sequence
from itertools import chain

from torch import Tensor, nn

from brx.errors import UserError, counted
from brx.pipeline.cut import (
    Stages,
    cut,
    given_stages,
    is_known_before_use,
    name_in_lowest_stage,
    stage_map,
    tied_places,
)
from brx.pipeline.hooks import warn_user
from brx.pipeline.use_order import UseOrder


class ModelCut:
    """The names of each stage's parameters.

    Args:
        model: the model.
        trained: the names of the parameters that train.
        stages: as `delayed` takes it.
        order: what is known so far of the order of use.

    Attributes:
        decided: the names by stage; None until they are asked for and known. From then on they stay
            the same.
    """

    def __init__(
        self, model: nn.Module, trained: Sequence[str], stages: Stages, order: UseOrder
    ) -> None:
        self._model = model
        self._trained = list(trained)
        self._stages = stages
        self._order = order
        self.decided: list[list[str]] | None = None

    @property
    def is_known(self) -> bool:
        """Whether the cut is decided, or could be."""
        return self.decided is not None or self._order.is_known(self._trained)

    @property
    def by_stage(self) -> list[list[str]]:
        """The names of each stage's parameters that train; UserError while they are not known."""
        self.decide_if_known()
        if self.decided is None:
            raise UserError(
                "delayed: a number of stages cuts the model in the order of its first forward pass,"
                " which has not run yet; give example=(inputs of a forward pass,), or stages as a"
                " mapping"
            )
        return self.decided

    def see_output(self, tensors: Sequence[Tensor]) -> None:
        """Learn from a forward pass that has just ended.

        Args:
            tensors: those tensors of its output that a backward pass may begin at.
        """
        if self.decided is None:
            self._order.see_output(self._model, tensors)

    def see_gradient(self, name: str) -> None:
        """Learn from a gradient that has just arrived."""
        if self.decided is None:
            self._order.see_gradient(name)

    def decide_if_known(self) -> None:
        if self.decided is None and self.is_known:
            self.decide()

    def decide(self) -> None:
        """Decide the cut by what is known. It cannot wait any longer."""
        if not is_known_before_use(self._stages) and self._order.is_empty:
            warn_user(
                "the passes have not shown in which order the model uses its parameters, so the "
                "cut follows the order of their definition; give example=(inputs of a forward "
                "pass,), or stages as a mapping"
            )
        self.decided = cut(self._model, self._trained, self._stages, self._order.positions())

    def take_over(self, by_stage: list[list[str]], num_stages: int) -> None:
        """Have the cut of a saved state; ValueError if it is not of this model or other stages."""
        if len(by_stage) != num_stages:
            raise ValueError(f"the state is of {counted(len(by_stage), 'stage')}, not {num_stages}")
        if sorted(chain.from_iterable(by_stage)) != sorted(self._trained):
            raise ValueError("the state comes from a model with other parameters")
        if self.decided is not None and self.decided != by_stage:
            raise ValueError("the state comes from another cut into stages")
        self.decided = [list(names) for names in by_stage]

    def stage_map(self) -> dict[str, int]:
        """The stage by prefixes of parameter names, as short as they can be.

        In stages without a parameter that trains, it names the frozen and the tied ones, so that it
        has all stages."""
        by_stage = [list(names) for names in self.by_stage]
        is_trained = set(self._trained)
        given = given_stages(self._model, self._stages, self._order.positions())
        for name, stage in given.items():
            if name not in is_trained and not self.by_stage[stage]:
                by_stage[stage].append(name)
        if isinstance(self._stages, int):
            return stage_map(by_stage)
        # A tied parameter is in the lowest stage that uses it. If its first name has a later one,
        # then another of its names stands for it in the lowest.
        for name, names in tied_places(self._model).items():
            if name not in is_trained:
                continue
            lowest = name_in_lowest_stage(names, given)
            if lowest != name:
                by_stage[given[lowest]].remove(name)
                by_stage[given[lowest]].append(lowest)
                by_stage[given[name]].append(name)
        return stage_map(by_stage)
