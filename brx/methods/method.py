"""A method: which optimizers train a stage under delay, at what learning rate, on which
gradients."""

import copy
from collections.abc import Sequence
from typing import Any, ClassVar, Self

from torch import Tensor
from torch.optim import AdamW, Optimizer

from brx.config import schema
from brx.config.schema import RunConfig
from brx.errors import UserError
from brx.methods.groups import (
    lend_gradients,
    matrix_names,
    split_stacks,
    stack_names,
    stage_groups,
    step_stages_together,
)
from brx.methods.product_costs import Products
from brx.optim.options import Group as Group  # users' methods import it from here
from brx.pipeline.forecasts import ParameterStates
from brx.pipeline.versions import StageVersions

Stages = Sequence[StageVersions]


class Method:
    """AdamW on delayed gradients. A subclass, built-in or in a user's own file, overrides the rules
    that it changes.

        from brx.methods.method import Group, Method

        class MyMethod(Method):
            summary = "Lion on the matrices, AdamW on the rest, at a rate lowered by the delay"

            def matrices(self, groups: list[Group]) -> Optimizer:
                return Lion(groups, lr=self.lr / 10)

            def lr_divisor(self, tau_updates: float, t: int, T: int) -> float:
                return max(1.0, tau_updates) ** 0.5

    A method's own settings are the arguments of its constructor, from `optimizer.arguments`.

    Attributes:
        summary, source, equation: one line each, which `brx methods` shows.
        gets: which optimizer gets which parameters, in words; `why` is the reason.
        section: the schema of the run's section `optimizer`.
        config: the run's configuration. It is not there yet in the constructor, and is set before
            any rule is asked.
        one_matrix_at_a_time: whether `matrices` gets the matrix of each expert of a mixture by
            itself, (m, n), rather than the stack of all experts, (experts, m, n). Such a matrix
            shares the memory of the stack.
        bases_in_state: the names of the entries in the optimizer's state that are bases or
            covariances. Plans list them apart from the moments.
        update_copies: how many temporary copies of a stage's weights a step makes, for plans. Fused
            optimizers make none.
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
        """A copy of the method with `config` set; the method itself may serve several runs."""
        bound = copy.copy(self)
        bound.config = config
        return bound

    @property
    def settings(self) -> Any:
        """The section `optimizer` of the run: for a built-in method its `section`."""
        return self.config.optimizer

    @property
    def lr(self) -> float:
        """The run's peak learning rate. The schedule scales the rate that each group begins
        with."""
        return self.config.optimizer.lr

    def matrices(self, groups: list[Group]) -> Optimizer:
        """The optimizer of the weight matrices in the blocks; in `gpt` and `llama` these are the
        matrices of attention and MLP.

        Args:
            groups: one parameter group per stage (`brx.methods.groups.stage_groups`). Hand on all
                keys of each. Options may be added, and a group may be divided into several.
        """
        return self.adamw(groups)

    def rest(self, groups: list[Group]) -> Optimizer:
        """The optimizer of everything else: embeddings, head, router, biases, norms. The groups are
        as in `matrices`."""
        rest_lr = getattr(self.config.optimizer, "rest_lr", None)
        if rest_lr is not None:
            groups = [{"lr": rest_lr, **group} for group in groups]
        return self.adamw(groups)

    def optimizers(self, stages: Stages) -> list[Optimizer]:
        """All optimizers of one device.

        A method overrides it if it does not divide the parameters into matrices and rest;
        `brx.methods.groups.stage_groups` makes the groups of any other division."""
        names = matrix_names(stages)
        groups = stage_groups(stages, lambda name: name in names)
        stacks = stack_names(stages) if self.one_matrix_at_a_time else ()
        members = split_stacks(groups, stacks)
        rest = stage_groups(stages, lambda name: name not in names)
        for given, what in ((groups, "matrix"), (rest, "weight that is no matrix")):
            if not given:
                raise UserError(
                    f"optimizer.method {self.settings.method}: needs matrices and other weights,"
                    f" and stages {stages[0].index} to {stages[-1].index} have no {what} (brx"
                    " models); choose a method for all weights, such as pipedream"
                )
        matrices = lend_gradients(self.matrices(groups), members)
        return [matrices, self.rest(rest)]

    def lr_divisor(self, tau_updates: float, t: int, T: int) -> float:
        """The number by which a stage's learning rate is divided in iteration t of T.

        Args:
            tau_updates: the stage's delay in updates.
        """
        return 1.0

    def correct_gradients(
        self,
        gradients: list[Tensor],
        newest: list[Tensor],
        used: list[Tensor],
        state: ParameterStates,
    ) -> None:
        """Change the gradients of a stage for one micro-batch, in place, before they are averaged
        over the update and clipped.

        It is meant for rules that depend on `newest` - `used`, and is called only for stages whose
        weights have moved on since the backward pass. With tau = 0 or `stash: none`, the backward
        pass saw the newest weights. Then it is not called, and the method trains as if it had no
        such rule.

        A rule that scales gradients by the delay belongs in an optimizer's `step`, which comes
        after clipping and reads `delay` (in updates) from its parameter groups
        (`examples/methods/delay_damped.py`). Adam ignores a factor that stays the same.

        Args:
            gradients: one per parameter of the stage.
            newest: the weights that the update will change.
            used: the weights of the backward pass, which are tau updates older, or predicted.
            state: a dict per parameter for the rule's own use, saved with the run.
        """

    @property
    def corrects_gradients(self) -> bool:
        """Whether the method overrides `correct_gradients`."""
        return type(self).correct_gradients is not Method.correct_gradients

    def forecast(
        self, newest: list[Tensor], update: list[Tensor], tau_updates: float, state: ParameterStates
    ) -> list[Tensor]:
        """Predict the weights with which a later micro-batch computes, forward and backward,
        instead of `newest`.

        Called after each update for each stage with a delay, without gradients, and only with
        `stash: exact`.

        Args:
            newest: the weights after the update, not to be changed. They are the keys of the
                optimizer's state.
            update: what the last update added to them.
            tau_updates: how many updates later the micro-batch's own gradient is applied, on
                average.
            state: as in `correct_gradients`.
        """
        return newest

    @property
    def forecasts(self) -> bool:
        """Whether the method overrides `forecast`."""
        return type(self).forecast is not Method.forecast

    def rotated_sides(
        self,
        shape: tuple[int, ...],  # (*lead, m, n)
    ) -> tuple[int, ...]:
        """The lengths of those sides of a weight matrix that the method rotates: m for U, n for V.

        Plans need it; each built-in method that rotates matrices overrides it."""
        return ()

    def products(
        self,
        shape: tuple[int, ...],  # (*lead, m, n)
    ) -> Products:
        """The matrix products that the method's update of a weight matrix needs, for plans.

        Built-in methods declare them. A user's method is measured in a trial (`brx.methods.trial`)
        instead."""
        return Products()

    def adamw(self, groups: list[Group]) -> Optimizer:
        """Fused AdamW with the run's learning rate, beta1, beta2, eps and weight decay. Where the
        method's section has no such settings, they have their defaults.

        During a step, the groups with equal options are one. So a hook on the optimizer's step sees
        `group["stage"]` and `group["delay"]` only where a group has one stage, or one delay
        (`brx.methods.groups.step_stages_together`)."""
        settings: schema.Section = self.config.optimizer
        if not isinstance(settings, schema.OptimizerSection):
            settings = schema.OptimizerSection()
        adamw = AdamW(groups, lr=self.lr, **adam_options(settings), fused=True)
        return step_stages_together(adamw)


def adam_options(settings: schema.OptimizerSection) -> dict[str, Any]:
    """The settings that AdamW and its relatives share, as arguments of torch's constructors."""
    betas = (settings.beta1, settings.beta2)
    return {"betas": betas, "eps": settings.eps, "weight_decay": settings.weight_decay}
