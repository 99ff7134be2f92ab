"""A method: which optimizers train a stage under delay, at what learning rate, on which
gradients."""

import copy
from collections.abc import Sequence
from typing import Any, ClassVar, Self

from torch import Tensor
from torch.optim import AdamW, Optimizer

from brx.config import schema
from brx.config.schema import RunConfig
from brx.methods.groups import (
    lend_gradients,
    matrix_names,
    split_stacks,
    stack_names,
    stage_groups,
    step_stages_together,
)
from brx.methods.products import Products
from brx.optim.options import Group as Group  # which the methods of users import from here
from brx.pipeline.forecasts import ParameterStates
from brx.pipeline.versions import StageVersions

Stages = Sequence[StageVersions]


class Method:
    """AdamW on delayed gradients; a subclass, built-in or in a user's own file, overrides what it
    does otherwise.

        from brx.methods.method import Group, Method

        class MyMethod(Method):
            summary = "Lion on the matrices, AdamW on the rest, at a rate lowered by the delay"

            def matrices(self, groups: list[Group]) -> Optimizer:
                return Lion(groups, lr=self.lr / 10)

            def lr_divisor(self, tau_updates: float, t: int, T: int) -> float:
                return max(1.0, tau_updates) ** 0.5

    A method's own settings are the arguments of its constructor, from `optimizer.arguments`.

    Attributes: config: the run's configuration; set before any rule is asked, not yet in the
        constructor. one_matrix_at_a_time: whether `matrices` wants each expert's matrix of a
        mixture by itself (m, n), rather than
            the stack of all experts' (experts, m, n). They share the memory of the stack.
        bases_in_state: the entries of an optimizer's state that are bases or covariances, by name;
            plans list them apart from moments. update_copies: temporary copies of a stage's
            weights during a step, for plans; fused optimizers make none.
    """

    summary: str = "a method of the user's own"
    source: str = "the file that it is in"
    equation: str = "its own"
    gets: ClassVar[dict[str, str]] = {}
    why: str = "its author says so"
    section: type[schema.Section] = schema.CustomConfig
    one_matrix_at_a_time: bool = False
    bases_in_state: ClassVar[frozenset[str]] = frozenset()
    update_copies: ClassVar[int] = 0
    config: RunConfig

    def bound_to(self, config: RunConfig) -> Self:
        bound = copy.copy(self)
        bound.config = config
        return bound

    @property
    def settings(self) -> Any:
        """The section `optimizer` of the run: for a built-in method its `section`."""
        return self.config.optimizer

    @property
    def lr(self) -> float:
        """The run's peak learning rate; the schedule scales what each group begins with."""
        return self.config.optimizer.lr

    def matrices(self, groups: list[Group]) -> Optimizer:
        """The optimizer of the weight matrices in the blocks, in `gpt` and `llama` those of
        attention and MLP. There is a group per stage;
        hand all its keys on, with further options, or divided among several groups."""
        return self.adamw(groups)

    def rest(self, groups: list[Group]) -> Optimizer:
        """The optimizer of everything else: embeddings, head, router, biases, norms."""
        rest_lr = getattr(self.config.optimizer, "rest_lr", None)
        return self.adamw(
            groups if rest_lr is None else [{"lr": rest_lr, **group} for group in groups]
        )

    def optimizers(self, stages: Stages) -> list[Optimizer]:
        """All optimizers of one device; `brx.methods.groups.stage_groups` divides otherwise than
        matrices and rest."""
        names = matrix_names(stages)
        groups = stage_groups(stages, lambda name: name in names)
        stacks = stack_names(stages) if self.one_matrix_at_a_time else ()
        members = split_stacks(groups, stacks)
        matrices = lend_gradients(self.matrices(groups), members)
        return [matrices, self.rest(stage_groups(stages, lambda name: name not in names))]

    def lr_divisor(self, tau_updates: float, t: int, T: int) -> float:
        """What a stage's learning rate is divided by in iteration t of T; `tau_updates` is its
        delay in updates."""
        return 1.0

    def correct_gradients(
        self,
        gradients: list[Tensor],
        newest: list[Tensor],
        used: list[Tensor],
        state: ParameterStates,
    ) -> None:
        """Change a micro-batch's gradients of a stage in place, before they are averaged over the
        update and clipped.

        Called for stages whose weights have moved on: not where tau is 0, nor with `stash: none`,
        where the backward pass saw the newest weights. `newest` are the weights that the update
        will change, `used` those of the backward pass, tau updates older (or as predicted); `state`
        has the rule's own dict per parameter, saved with the run."""

    @property
    def corrects_gradients(self) -> bool:
        return type(self).correct_gradients is not Method.correct_gradients

    def forecast(
        self, newest: list[Tensor], update: list[Tensor], tau_updates: float, state: ParameterStates
    ) -> list[Tensor]:
        """A prediction: the weights with which a later micro-batch computes, forward and backward,
        instead of `newest`.

        Called after each update for each stage with a delay, without gradients; with `stash: exact`
        only. `newest` are not to be changed; the optimizer has its moments by them. `update` is
        what the last update added to them, `tau_updates` in how many the micro-batch's own gradient
        comes, on average; `state` as in `correct_gradients`."""
        return newest

    @property
    def forecasts(self) -> bool:
        return type(self).forecast is not Method.forecast

    def rotated_sides(
        self,
        shape: tuple[int, ...],  # (*lead, m, n)
    ) -> tuple[int, ...]:
        """The lengths of the sides of a weight matrix that the method rotates: m for U, n for V.

        A built-in method that rotates matrices says it, for plans."""
        return ()

    def products(
        self,
        shape: tuple[int, ...],  # (*lead, m, n)
    ) -> Products:
        """The matrix products that the method's update needs for a weight matrix, for plans.
        Built-in methods declare them; a user's method is measured in a trial
        (`brx.methods.trial`)."""
        return Products()

    def adamw(self, groups: list[Group]) -> Optimizer:
        """Fused AdamW with the run's beta1, beta2, eps and weight decay (the defaults where a
        method has none)."""
        settings = self.config.optimizer
        common = (
            settings if isinstance(settings, schema.OptimizerSection) else schema.OptimizerSection()
        )
        adamw = AdamW(groups, lr=self.lr, **adam_options(common), fused=True)
        return step_stages_together(adamw)


def adam_options(settings: schema.OptimizerSection) -> dict[str, Any]:
    betas = (settings.beta1, settings.beta2)
    return {"betas": betas, "eps": settings.eps, "weight_decay": settings.weight_decay}
