"""Adam in the Hessian's Kronecker eigenbasis (the paper's algorithms 1 and 2).

`BasisRotation.step` plans a step on the host (`planned_step`) and then runs it on the device
(`run`), which calls `_update` for each batch of matrices. There the algorithms' lines are:

    algorithm 1
        line 4    M <- beta1 M + (1 - beta1) G   `_rotated_adam`, which keeps U^T M V, not M
        line 5    whether a refresh is due       `StepMember.next_due` (step_member.py)
        line 6    new U and V                    `_renew_bases`, by refresh.py
        line 8    U^T G V                        `_take_step`
        line 9    U^T M V                        `_rotated_adam`; in new bases, refresh.py
        line 10   v <- beta2 v + ...             `_rotated_adam`
        line 11   W <- W - lr U [...] V^T        `_take_step`
    algorithm 2 (`estimate_eigenbasis` in refresh.py)
        lines 2, 5            L and R            `accumulate_covariances` (refresh.py)
        lines 3, 6, 13, 15    Power              `power_iteration` (eigenbasis.py)
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from .dtensor import FSDP1, is_flat, is_sharded, like_parameter, whole
from .elementwise import (
    Kernels,
    above_noise,
    compiled_kernels,
    fused_adamw,
    update_elementwise,
)
from .exchange import apply_updates, gather_gradients
from .gradient_guard import BadGradientError as BadGradientError
from .gradient_guard import GradientGuard
from .matrix_batch import (
    BatchLayout,
    MatrixBatch,
    for_each,
    rotate,
    squared_mean,
    unless_bad,
)
from .older_files import todays_groups
from .options import Group, check_options, step_options
from .parameter_state import (
    arithmetic,
    check_state,
    is_rotated,
    problem,
    state_dtype,
    state_shapes,
)
from .published import published_update
from .reduced_precision import factor_rounding, fp32_products
from .refresh import accumulate_covariances, estimate_eigenbasis
from .roles import Role, has_roles, looks_like_a_table, roles
from .saved_order import check_entries, in_own_order
from .shards import Sharding, as_rows
from .step_member import Position, StepMember
from .step_plan import FirstBases, Plan, StepOptions, Work, cost, plan_step
from .step_scalars import StepScalars, StepScalarsPool
from .summary import Summary
from .take_over import has_bases, state_from

# Arguments of the constructor that are not options of a group.
OF_ALL_GROUPS = ("model", "rest_lr", "compiled")
NO_OPTIONS = ("self", "__class__", "params", *OF_ALL_GROUPS)


@dataclass
class Named:
    """A parameter of a group.

    Attributes:
        options: the group's, unless the parameter's role in the model says otherwise.
    """

    name: str
    parameter: Tensor
    group: Group
    options: Group


def _described(name: str, parameter: Tensor) -> str:
    return f"parameter {name} of shape {tuple(parameter.shape)}"


def _once(parameters: Sequence[Tensor]) -> Iterable[Tensor]:
    """Each parameter once, in order. torch lets a group have one twice (tied weights), with a
    warning."""
    return dict.fromkeys(parameters)


class BasisRotation(Optimizer):
    """Adam that takes its steps in an estimate of the Hessian's eigenbasis (algorithm 1).

    For a weight matrix W (m, n) with gradient G, and orthogonal bases U (m, m) and V (n, n)::

        M <- beta1 M + (1 - beta1) G
        if due: U, V <- eigenbasis estimation (algorithm 2)
        v <- beta2 v + (1 - beta2) (U^T G V)^2
        W <- (1 - lr weight_decay) W - lr U [ m^ / (sqrt(v^) + eps) ] V^T

    with m^ = U^T M V / (1 - beta1^t) and v^ = v / (1 - beta2^t). A parameter of more than two
    dimensions is a batch of matrices in its last two, each with its own bases (the experts of a
    mixture); a convolution kernel is one matrix. Vectors get AdamW. The arithmetic is float64 for
    float64 parameters, else float32. README.md in this folder says which parameters are rotated,
    what it costs, and how to come from AdamW.

    Args:
        params: a module; or tensors, named tensors, groups of either; or
            `param_groups(module)`. With a module, embeddings, its head and vectors get AdamW,
            fused projections are split, kernels are flattened. Groups stay as they are given.
        model: the module that the parameters of other groups are from, for the same decisions.
        lr, weight_decay, maximize: as AdamW's; the decay is decoupled.
        betas: decay of the momentum; decay of the second moment and the covariances.
        eps: added to the root of the second moment; at least 1e-19 (float64: 1e-154), where squares
            become zero.
        source: "2nd": eigenvectors of the averages of G G^T and G^T G; "1st": of M M^T and M^T M
            (no extra moments).
        geometry: "bilateral" rotates both sides, "unilateral" only the smaller one (m < n: U, else
            V).
        frequency: the bases are refreshed at its multiples. 9.5 gives intervals of 9 and 10 updates
            in turn; None: never after the first basis.
        first_refresh: the update at which a matrix gets its first basis, by an exact decomposition.
            Until then it takes AdamW's steps, except for entries below the noise floor. At least 2:
            in its own eigenbasis a single gradient is diagonal, and the other entries are rounding.
        covariance: when G G^T enters its average: at every "step"; at every "refresh" (algorithm 2
            as printed); or at every refresh with the weight of the whole "interval" of n updates,
            as beta2^n L + (1 - beta2^n) G G^T.
        staggered: spreads the refreshes of a group's parameters over the interval.
        rotation_precision: the precision of the two rotations of a step, not of refreshes or of the
            state (reduced_precision.py): "highest" is fp32, "auto" TF32 on a GPU that has it and
            fp32 elsewhere.
        covariance_precision: the precision of the products G G^T, not of their averages. "tf32"
            only with source "2nd".
        rotate: False for AdamW.
        max_dim, max_aspect: a side longer than this, or than this times the other side, is not
            rotated; None: no limit.
        flatten: take a convolution kernel (out, in, h, w) as one matrix (out, in h w), not as a
            stack of (h, w). None: with four or more dimensions whose last two are at most 16 long.
        max_kernel_state: the most numbers of state per weight that a flattened kernel may have.
            Sides go unrotated, the longest first, until it holds; None: no limit.
        split: (parts, dim): split a fused projection into this many matrices, along its rows (-2)
            or its columns (-1).
        rest_lr: learning rate of the parameters that are not rotated; `lr` is then the rate of
            those that are. Kept as the factor `rest_factor` = rest_lr / lr of each group, so that
            schedules scale both. A group with `rotate=False` and no `lr` of its own has it as its
            `lr`.
        as_published: compute as the authors' implementation does, wherever it differs from this.
        compiled: on a GPU, let `torch.compile` turn the elementwise part into two passes; the first
            step takes seconds longer. Without it, and on the CPU, torch's fused kernel does most of
            it.

    Options may differ by group. `state` and `param_groups` are the truth: whatever a program
    replaces, clears or writes there takes effect at the next step (except for the options in
    `options.FORM` once there is state). A state has `step`, `exp_avg` and `exp_avg_sq` (both in the
    rotated space), and what `parameter_state.state_shapes` adds for its options.

    Raises ValueError for an option out of range or a parameter that does not fit.
    """

    on_first_bases: Callable[[int, int], None] | None = None
    """Called during the update that computes the first bases, because large ones take seconds each.
    Its arguments are how many bases are done, and how many there are. Not saved with the
    optimizer."""

    _rest_lr: float | None = None
    _compiled: bool = False
    _num_known: int = -1  # parameters that had a shape when roles were last found
    # Not kept alive, and not copied or saved with the optimizer.
    _model: weakref.ref[nn.Module] | None = None

    def __init__(
        self,
        params: ParamsT | nn.Module,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        model: nn.Module | None = None,
        source: Literal["2nd", "1st"] = "2nd",
        geometry: Literal["bilateral", "unilateral"] = "bilateral",
        frequency: float | None = 10,
        first_refresh: int = 2,
        covariance: Literal["step", "refresh", "interval"] = "step",
        staggered: bool = False,
        rotation_precision: Literal["auto", "highest", "tf32", "bf16"] = "auto",
        covariance_precision: Literal["auto", "highest", "tf32"] = "auto",
        maximize: bool = False,
        rotate: bool = True,
        max_dim: int | None = 16_384,
        max_aspect: float | None = 10,
        flatten: bool | None = None,
        max_kernel_state: float | None = 4,
        split: tuple[int, int] | None = None,
        rest_lr: float | None = None,
        as_published: bool = False,
        compiled: bool = False,
    ) -> None:
        # At this point the locals are the arguments.
        defaults = {name: value for name, value in locals().items() if name not in NO_OPTIONS}
        defaults["rest_factor"] = 1.0
        if rest_lr is not None:
            if not float(lr) > 0:
                raise ValueError(f"Invalid rest_lr={rest_lr!r}: needs an lr above 0, got {lr!r}")
            defaults["rest_factor"] = rest_lr / float(lr)
        self._rest_lr = rest_lr
        self._compiled = compiled
        if isinstance(params, nn.Module):
            model = model or params
            params = list(params.named_parameters())
        self._roles: dict[Tensor, Role] = {}
        self._lazy_model: nn.Module | None = None
        if model is not None:
            if not isinstance(model, nn.Module):
                raise ValueError(f"Invalid model={model!r}: must be a torch.nn.Module")
            self._model = weakref.ref(model)
            self._find_roles(model)
        super().__init__(params, defaults)
        self._forget()
        self._warn_without_model(0)

    def _find_roles(self, model: nn.Module) -> None:
        """Decide what each parameter of a model is.

        Parameters of lazy modules have no shape yet. As long as there are some, the model is kept,
        and its roles are found again.
        """
        named = dict(model.named_parameters())
        known = {name: p for name, p in named.items() if not is_lazy(p)}
        is_complete = len(known) == len(named)
        self._lazy_model = None if is_complete else model
        if len(known) == self._num_known:
            return  # no further shape has become known since the last time
        self._num_known = len(known)
        role_by_name = roles(model)
        self._roles = {parameter: role_by_name[name] for name, parameter in known.items()}

    def _find_new_roles(self) -> None:
        """Decide what the parameters are that have joined the groups since the last time.

        A model may have got further layers. FSDP2 gives it other parameters, and accelerate then
        puts these into the groups.
        """
        if self._lazy_model is not None:
            self._find_roles(self._lazy_model)
        model = self._model() if self._model is not None else None
        if model is None or all(self._is_known(named) for named in self._named()):
            return
        role_by_name = roles(model)
        present = {named.parameter for named in self._named()}
        for name, parameter in model.named_parameters():
            present.add(parameter)
            if not is_lazy(parameter):
                self._roles.setdefault(parameter, role_by_name[name])
        # What was replaced must not stay in memory: it is the whole model.
        for replaced in self._roles.keys() - present:
            del self._roles[replaced]

    def _is_known(self, named: Named) -> bool:
        parameter = named.parameter
        return has_roles(named.group) or parameter in self._roles or is_lazy(parameter)

    def _forget(self) -> None:
        """Drop everything that was derived from `state` and `param_groups`."""
        self._layout = BatchLayout([], {})
        # Who updates which matrix stays.
        self._sharding = self.__dict__.get("_sharding") or Sharding()
        self._guard = GradientGuard(self._sharding, self._describe)
        self._scalars = StepScalarsPool()
        self._first_bases = FirstBases(0, None)

    @property
    def num_failed_refreshes(self) -> int:
        """How often a matrix kept its old basis because its decomposition failed; waits for a
        GPU."""
        name = "num_failed_refreshes"
        states = [state for state in self.state.values() if isinstance(state, dict)]
        return int(sum(state[name].sum() for state in states if name in state))

    # The same as `torch.compiler.disable`, without its import: a compiled training step does not
    # trace into this function.
    @_disable_dynamo
    @torch.inference_mode(False)  # state made in inference mode could not be written in later steps
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient.

        Args:
            closure: computes the loss and the gradients again; its loss is returned.

        Raises BadGradientError for a gradient that is not finite or too large to be squared,
        ValueError for a sparse one, with nothing changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self.planned_step() as plan:
            self.run(plan)
        return loss

    @contextmanager
    def planned_step(self) -> Iterator[Plan]:
        """Plan a step on the host, for `run` inside the context; the host counts the step at its
        end.

        `step` does both. GraphedSteps replays a graph in place of `run`.
        """
        members = self._members_with_gradients()
        try:
            with ExitStack() as stack:
                # Our own arithmetic, whatever autocast and TF32 the program uses for its model.
                for device_type in {member.parameter.device.type for member in members}:
                    stack.enter_context(torch.autocast(device_type, enabled=False))
                stack.enter_context(fp32_products("ieee"))
                plan = plan_step(members, self._layout, self._scalars)
                yield plan
                self._count(plan)
        finally:
            for member in members:
                member.gradient = member.update = None

    def run(self, plan: Plan, *, without_waiting: bool = False) -> None:
        """The device's part of a step.

        Args:
            without_waiting: never wait for the device. A bad gradient changes nothing, and
                `check_flags` raises for it later.
        """
        waits_anyway = plan.is_refresh and not without_waiting
        with self._recount_on_error():
            bad = self._guard.check(plan.members, waits_anyway, must_not_wait=without_waiting)
        self._update_all(plan, bad)

    def check_flags(self) -> None:
        """Raise BadGradientError if one of the last steps met a bad gradient.

        Only every `gradient_guard.LONGEST_WAIT` steps, since it waits for the device.
        """
        with self._recount_on_error():
            self._guard.check_unread()

    def count_unread_flag(self) -> None:
        """Count a step that a graph has replayed, so that `check_flags` reads its flag."""
        self._guard.count_unread()

    @contextmanager
    def _recount_on_error(self) -> Iterator[None]:
        """A context that, if a BadGradientError is raised in it, reads the host's counts of updates
        from the device again."""
        try:
            yield
        except BadGradientError:
            # Steps that have changed nothing were counted on the host alone.
            for member in self._layout.members.values():
                member.num_updates = int(member.state["step"])
            raise

    def _members_with_gradients(self) -> list[StepMember]:
        """The parameters that have a gradient, each with its gradient and options of this step.

        Makes a new layout if parameters, groups or states are not those of the present one.
        """
        if self._lazy_model is not None:
            self._find_roles(self._lazy_model)
        with_gradient: list[tuple[Tensor, StepOptions]] = []
        fits = True
        for group in self.param_groups:
            group_options = StepOptions(step_options(group), self._roles)
            for parameter in _once(group["params"]):
                if parameter.grad is None:
                    continue
                with_gradient.append((parameter, group_options))
                form = group_options.form(parameter)
                fits = fits and self._layout.fits(parameter, group, form, self.state.get(parameter))
        if not fits:
            self._make_layout()
        for batch in self._layout.batches:
            batch.take_counts()
        members = []
        for parameter, group_options in with_gradient:
            member = self._layout.members[parameter]
            member.options = group_options.of_member(member)
            member.gradient = like_parameter(parameter.grad, parameter)
            members.append(member)
        return members

    def _make_layout(self) -> None:
        """Make a new layout of all parameters with a state or a gradient.

        Raises ValueError where a state does not fit.
        """
        self._find_new_roles()
        self._assign_owners()
        members = []
        for group in self.param_groups:
            group_options = StepOptions(step_options(group), self._roles)
            positions = self._positions(group)
            for parameter in _once(group["params"]):
                if parameter.grad is None and not self.state.get(parameter):
                    continue
                member = self._new_member(parameter, group, group_options)
                member.position = positions.get(parameter, member.position)
                members.append(member)
        self._detach_state(self._layout.members.keys() - {member.parameter for member in members})
        self._layout = BatchLayout([], {})  # frees old batches while new ones are made
        self._layout = BatchLayout(members, self.state)

    def _new_member(
        self, parameter: Tensor, group: Group, group_options: StepOptions
    ) -> StepMember:
        """A parameter with its options, its shards, and the state that it has."""
        options = group_options.of(parameter)
        self._check_parameter(parameter, options)
        if parameter.device.type == "meta":
            who = self._describe(parameter)
            raise ValueError(f"{who} is on the meta device: a step needs numbers")
        member = StepMember(parameter, group, options, group_options.form(parameter))
        if member.is_rotated and is_sharded(parameter):
            member.shards = self._sharding.of[parameter]
        own = self.state.get(parameter)
        if own:
            self._give_state(member, own)
        return member

    def _positions(self, group: Group) -> dict[Tensor, Position]:
        """The position of each rotated parameter of a group among those that are rotated."""
        rotated = []
        for parameter in _once(group["params"]):
            if is_rotated(parameter, self._options(parameter, group)):
                rotated.append(parameter)
        return {p: Position(index, len(rotated)) for index, p in enumerate(rotated)}

    def _give_state(self, member: StepMember, own: dict[str, Any]) -> None:
        """Give a member the state that `state` has for its parameter, after checking it."""
        parameter = member.parameter
        if member.is_stacked or not member.is_rotated:
            check_state(own, parameter, member.options, self._describe)
        self._check_momentum(member)
        for name in member.state_shapes:
            if name in own:
                member.state[name] = torch.as_tensor(own[name], device=parameter.device)
        member.num_updates = int(own["step"])

    def _check_momentum(self, member: StepMember) -> None:
        """Raise ValueError where `as_published` has changed. It keeps the momentum in the original
        space, which the shapes of a state do not show."""
        before = self._layout.members.get(member.parameter)
        if before is None or not member.is_rotated:
            return
        if before.options["as_published"] != member.options["as_published"]:
            who = self._describe(member.parameter)
            raise ValueError(f"{who}: as_published cannot change once there is state")

    def _detach_state(self, parameters: set[Tensor]) -> None:
        """Copy the state of parameters that leave the layout.

        Their states are views, which would keep the whole batch in memory.
        """
        for parameter in parameters:
            own = self.state.get(parameter, {})
            for name, value in own.items():
                if isinstance(value, Tensor):
                    own[name] = value.clone()

    def _assign_owners(self) -> None:
        """Decide which rank updates each sharded matrix that has no owner yet."""
        sharded = []
        for named in self._named():
            if is_sharded(named.parameter) and is_rotated(named.parameter, named.options):
                sharded.append(named.parameter)
        self._sharding.assign_owners(sharded)

    def _update_all(self, plan: Plan, bad: Tensor | None) -> None:
        """The device's part of a step: rotated parameters batch by batch (on the CPU, several
        batches in parallel), then the others."""
        exchanged = [member for member in plan.members if member.shards is not None]
        gather_gradients(exchanged)
        # The most expensive batch first: no thread should start it when the others are done.
        work = sorted(plan.work, key=cost, reverse=True)
        for batch_work in work:
            batch_work.batch.bad = bad
        self._first_bases = FirstBases(plan.num_first_bases, self.on_first_bases)
        for_each(self._update, work)
        apply_updates(exchanged, lambda m: unless_bad(m.decay, arithmetic(m.parameter), bad))
        for together, scalars in plan.rest:
            update_elementwise(together, scalars.lr, bad)
        for member in plan.members:
            if not member.is_updated_here:
                member.state["step"] += 1 if bad is None else ~bad

    def _count(self, plan: Plan) -> None:
        """Count the step on the host."""
        for member in plan.members:
            member.num_updates += 1
        for batch in self._layout.batches:
            batch.seen_version = batch.state["step"]._version

    def _update(self, work: Work) -> None:
        """One step of one batch."""
        batch = work.batch
        gradient = batch.gradients()  # (b, m, n)
        if batch.options["as_published"]:
            parts = []
            for is_due, run in batch.runs(StepMember.is_refresh_due):
                parts.append(published_update(batch[run], batch.part(gradient, run), is_due))
            batch.update_weights(torch.cat(parts), work.scalars.decay)
            return
        for due, run in work.due:
            part, part_gradient = batch[run], batch.part(gradient, run)
            if due.num_gradients and batch.options["source"] == "2nd":
                accumulate_covariances(part, part_gradient, due.num_gradients)
            if due.refresh is not None:
                self._renew_bases(part, part_gradient, exact=due.refresh == "exact")
        self._take_step(batch, gradient, work.scalars)

    def _renew_bases(
        self,
        batch: MatrixBatch,
        gradient: Tensor,  # (b, m, n)
        exact: bool,
    ) -> None:
        """Algorithm 2. Studies of other bases override it."""
        estimate_eigenbasis(batch, gradient, exact, self._first_bases.count)

    def _take_step(
        self,
        batch: MatrixBatch,
        gradient: Tensor,  # (b, m, n)
        scalars: StepScalars,
    ) -> None:
        """Algorithm 1 after the refresh: moments, the step in the rotated space, and back."""
        precision = batch.options["rotation_precision"]
        rotated = rotate(batch, gradient, precision)  # U^T G V
        rotated_step = self._rotated_adam(batch, rotated, scalars)
        update = rotate(batch, rotated_step, precision, back=True)
        kernels = self._kernels(batch)
        add_updates = kernels.add_updates if kernels is not None else None
        batch.update_weights(update, scalars.decay, scalars.limit, add_updates)

    def _kernels(self, batch: MatrixBatch) -> Kernels | None:
        """The compiled functions of a step; None where torch's fused kernel is used."""
        is_on_gpu = batch.state["step"].device.type == "cuda"
        return compiled_kernels() if self._compiled and is_on_gpu else None

    def _rotated_adam(
        self,
        batch: MatrixBatch,
        rotated_gradient: Tensor,  # U^T G V (b, m, n)
        scalars: StepScalars,
    ) -> Tensor:
        """The moments' recursions in the rotated space, and the update -lr m^ / (sqrt(v^) + eps)
        there (b, m, n).

        Between refreshes U^T M V follows M's own recursion, so M is not rotated in a step.

        The arithmetic stands in two places. On a GPU with `compiled` it is `rotated_update`
        (elementwise.py); everywhere else it is torch's fused AdamW, below. A change to one belongs
        in the other.
        """
        momentum, second_moment = batch.state["exp_avg"], batch.state["exp_avg_sq"]
        gradient = rotated_gradient.view_as(momentum)
        steps = batch.state["step"]
        rounding = factor_rounding(batch.options["rotation_precision"], momentum.dtype)
        kernels = self._kernels(batch)
        if kernels is not None:
            beta1, beta2 = batch.options["betas"]
            update = kernels.rotated_update(
                gradient,
                momentum,
                second_moment,
                batch.counts(),
                scalars.lr,
                batch.bad,
                beta1,
                beta2,
                batch.options["eps"],
                rounding,
            )
            steps += 1 if batch.bad is None else ~batch.bad
            return update.flatten(0, -3)
        # AdamW's kernel on weights of zero leaves the update in them.
        update = torch.zeros_like(momentum)
        options = {**batch.options, "weight_decay": 0.0, "maximize": False}
        state = {**batch.state, "step": steps[0]}
        fused_adamw([update], [gradient], [state], scalars.lr, options, batch.bad)
        if len(steps) > 1:  # the kernel counts one step for the whole batch
            steps[1:] += 1 if batch.bad is None else ~batch.bad
        damping = above_noise(second_moment, rounding, squared_mean(batch))
        return update.mul_(damping).flatten(0, -3)

    def _describe(self, parameter: Tensor) -> str:
        # It looks through all parameters: for messages alone.
        name = next(named.name for named in self._named() if named.parameter is parameter)
        return _described(name, parameter)

    def _options(self, parameter: Tensor, group: Group) -> Group:
        """A parameter's options: its group's, unless its role in the model says otherwise."""
        role = self._roles.get(parameter)
        # A group of `param_groups` has its parameters' roles already.
        return role.over(group) if role is not None and not has_roles(group) else group

    def add_param_group(self, param_group: Group) -> None:
        """Add a group of parameters with its options, which stays one group.

        Raises ValueError where an option is out of range, or a parameter does not fit; nothing has
        changed then.
        """
        num_before = len(self.param_groups)
        for name in OF_ALL_GROUPS:
            if name in param_group:
                hint = "; a group has rest_factor = rest_lr / lr" if name == "rest_lr" else ""
                raise ValueError(
                    f"Invalid {name} in a group: it is an argument for all groups{hint}"
                )
        group = {**param_group, "params": self._with_names(param_group["params"])}
        is_rest = not group.get("rotate", self.defaults["rotate"])
        if is_rest and self._rest_lr is not None:
            group.setdefault("lr", self._rest_lr)
        try:
            super().add_param_group(group)
            added = self.param_groups[-1]
            self._find_new_roles()
            check_options(added)
            for parameter in added["params"]:
                self._check_parameter(parameter, self._options(parameter, added))
        except ValueError:
            del self.param_groups[num_before:]
            raise
        if "_layout" in self.__dict__:  # the constructor, which adds all groups, warns once
            self._warn_without_model(num_before)

    def _with_names(self, params: Any) -> Any:
        """The parameters of a new group, with names if the model gave names to earlier groups.

        torch wants names for all or for none, and a program that has given its model has not asked
        for any. Parameters that are not in the model are called by their place.
        """
        has_names = any("param_names" in group for group in self.param_groups)
        if self._model is None or not has_names or isinstance(params, set):  # torch refuses sets
            return params
        params = [params] if isinstance(params, Tensor) else list(params)
        if not all(isinstance(parameter, Tensor) for parameter in params):
            return params
        model = self._model()
        known = {} if model is None else {p: name for name, p in model.named_parameters()}
        number = len(self.param_groups)
        named = []
        for index, parameter in enumerate(params):
            named.append((known.get(parameter, f"{index} of group {number}"), parameter))
        return named

    def _check_parameter(self, parameter: Tensor, options: Group) -> None:
        wrong = FSDP1 if is_flat(parameter) else problem(parameter, options)
        if wrong:
            raise ValueError(f"{self._describe(parameter)}, {parameter.dtype}: {wrong}")

    def _warn_without_model(self, first_group: int) -> None:
        """Warn where groups seem to hold a whole model, but the model was not given.

        Without the model, embeddings and an untied head look like other matrices.
        """
        if self._model is not None:
            self._warn_of_others(first_group)
            return
        num_vectors = 0
        tables = []
        for named in self._named(first_group):
            parameter = named.parameter
            if self._is_known(named):
                continue
            if is_rotated(parameter, named.options):
                if looks_like_a_table(named.name):
                    tables.append(named.name)
            elif named.options["rotate"]:
                num_vectors += 1
        if not num_vectors and not tables:
            return
        facts = []
        if num_vectors == 1:
            facts.append("1 parameter has no side to rotate and gets AdamW.")
        elif num_vectors:
            facts.append(f"{num_vectors} parameters have no side to rotate and get AdamW.")
        if tables:
            facts.append(f"Rotated, although named like embeddings or heads: {', '.join(tables)}.")
        warnings.warn(
            f"{' '.join(facts)} Pass the model (BasisRotation(model), or model=model with your "
            "groups), and embeddings and the head get AdamW, too; optimizer.summary() shows how "
            "each parameter is updated",
            stacklevel=3,
        )

    def _warn_of_others(self, first_group: int) -> None:
        """Warn of matrices that are rotated, but are not in the model that was given."""
        others = []
        for named in self._named(first_group):
            if not self._is_known(named) and is_rotated(named.parameter, named.options):
                others.append(_described(named.name, named.parameter))
        if others:
            warnings.warn(
                f"Rotated by their shape alone, as they are not in the model that was given: "
                f"{', '.join(others)}. Embeddings and heads among them should get AdamW: give one "
                "module that has all parameters (nn.ModuleList), or a group with rotate=False",
                stacklevel=4,
            )

    def _named(self, first_group: int = 0) -> Iterator[Named]:
        """All parameters, in order."""
        for number, group in enumerate(self.param_groups):
            if number < first_group:
                continue
            names = group.get("param_names", [])
            # A program may have changed the parameters, and left the names as they were.
            are_its_names = len(names) == len(group["params"])
            for index, parameter in enumerate(group["params"]):
                name = names[index] if are_its_names else f"{index} of group {number}"
                yield Named(name, parameter, group, self._options(parameter, group))

    def summary(self) -> Summary:
        """What becomes of each parameter: which sides are rotated, how much state it has, and why;
        print it."""
        self._find_new_roles()
        return Summary.of((each.name, each.parameter, each.options) for each in self._named())

    def take_over(self, other: Optimizer) -> None:
        """Continue from another optimizer over the same parameters: torch's AdamW, Adam, NAdam or
        RAdam, or pytorch-optimizer's SOAP (with its bases) or StableAdamW.

        Matrices without bases begin with the identity, and get their first exact basis
        `first_refresh` updates later. For this, the number of updates that they have made is added
        to the group's `first_refresh` (the largest number, with a warning, if they differ).

        Raises ValueError where the optimizer is none of these, or a state is missing or does not
        fit; nothing has changed then.
        """
        if not isinstance(other, Optimizer):
            raise ValueError(
                f"Invalid other of type {type(other).__name__}: must be an optimizer, into which a "
                "saved state has been loaded"
            )
        states: dict[Tensor, tuple[dict[str, Any], Group]] = {}
        self._find_new_roles()
        for named in self._named():
            parameter, options = named.parameter, named.options
            if other.state.get(parameter):
                state = state_from(other, parameter, options, _described(named.name, parameter))
                check_state(state, parameter, options, self._describe)
                states[parameter] = state, options
        if not states:
            raise ValueError(f"{type(other).__name__} has no state of any of these parameters")
        for group in self.param_groups:
            self._put_off_first_refresh(group, other, states)
        self._assign_owners()
        for parameter, (state, options) in states.items():
            self.state[parameter] = self._as_kept(state, parameter, options)
        self._forget()

    def _put_off_first_refresh(
        self, group: Group, other: Optimizer, states: dict[Tensor, tuple[dict[str, Any], Group]]
    ) -> None:
        """Add the updates that a group's matrices without bases have made to its
        `first_refresh`."""
        counts = set()
        for parameter in group["params"]:
            is_trained = parameter.requires_grad and is_rotated(
                parameter, self._options(parameter, group)
            )
            if is_trained and not has_bases(other, parameter):
                state, _ = states.get(parameter, ({"step": 0}, group))
                counts.add(int(state["step"]))
        most = max(counts, default=0)
        if most < group["first_refresh"]:
            return
        if len(counts) > 1:
            text = ", ".join(map(str, sorted(counts)))
            warnings.warn(
                f"matrices with {text} updates in one group: those with fewer updates get their "
                f"first basis later by the difference",
                stacklevel=3,
            )
        group["first_refresh"] += most

    def state_dict(self) -> dict[str, Any]:
        """State and options, in torch's form; only the bases, which lie column by column here, are
        copied, row by row.

        The state of sharded matrices becomes DTensors, sharded by rows, for which all ranks have to
        ask together.
        """

        def convert(_: Optimizer, packed: dict[str, Any]) -> dict[str, Any]:
            return {**packed, "state": self._as_saved(packed["state"])}

        with self.register_state_dict_post_hook(convert, prepend=True):  # before the caller's
            return super().state_dict()

    def _as_saved(self, packed: dict[Any, Any]) -> dict[Any, Any]:
        states = {}
        # All ranks need the same order, in the state dict, too: its readers may communicate for
        # each entry.
        for number, named in enumerate(self._named()):
            own = packed.get(number)
            if not own:
                continue
            if is_sharded(named.parameter) and is_rotated(named.parameter, named.options):
                own = self._rows_of(named, own)
            saved = dict(own)
            for name in own:
                if name.endswith("_basis"):
                    saved[name] = own[name].contiguous()
            states[number] = saved
        return states | {key: own for key, own in packed.items() if key not in states}

    def _rows_of(self, named: Named, own: dict[str, Any]) -> dict[str, Any]:
        """The state of a sharded matrix, which its owner holds whole, sharded by rows."""
        parameter = named.parameter
        shards = self._sharding.of[parameter]
        rows = dict(own)  # with entries of the program's own
        for name, shape in state_shapes(parameter, named.options).items():
            if name != "step":
                dtype = state_dtype(name, parameter)
                rows[name] = as_rows(parameter, shards, own[name], shape, dtype)
        return rows

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue exactly where the saved optimizer stood, with its options; options that the file
        lacks get this optimizer's defaults.

        State of sharded parameters may come from any number of ranks, or be whole. All ranks must
        load together.

        Raises ValueError where groups, an option or a state do not fit; nothing has changed then.
        """
        loaded: dict[Tensor, dict[str, Any]] = {}

        def prepare(_: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            prepared, states = self._fitting(given)
            loaded.update(states)
            return prepared

        def put(_: Optimizer) -> None:
            self.state.update(loaded)

        # The caller's hooks run before the first of these and after the second.
        first = self.register_load_state_dict_pre_hook(prepare)
        second = self.register_load_state_dict_post_hook(put, prepend=True)
        with first, second:
            super().load_state_dict(state_dict)

    def _fitting(
        self, given: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[Tensor, dict[str, Any]]]:
        """A given state dict with all of today's options, and its states by parameter in the form
        that this optimizer keeps. ValueError where something does not fit."""
        # torch's own loading would cast states to the parameter's precision: bfloat16 loses half.
        groups = todays_groups(given["param_groups"], self.param_groups, self.defaults)
        saved_counts = [len(group["params"]) for group in groups]
        own_counts = [len(group["params"]) for group in self.param_groups]
        if saved_counts != own_counts:
            raise ValueError(
                f"the saved groups have {saved_counts} parameters, this optimizer's {own_counts}"
            )
        for group in groups:
            check_options(group)
        self._find_new_roles()
        groups = in_own_order(groups, self.param_groups)
        numbered = [(number, group) for group in groups for number in group["params"]]
        numbers = {number for number, _ in numbered}
        check_entries(given["state"], numbers)
        states = {}
        for named, (number, group) in zip(self._named(), numbered, strict=True):
            parameter = named.parameter
            state = given["state"].get(number)
            if state:
                options = self._options(parameter, group)
                check_state(state, parameter, options, self._describe)
                states[parameter] = state, options
        self._assign_owners()
        kept = {}
        for parameter, (state, options) in states.items():
            kept[parameter] = self._as_kept(state, parameter, options)
        # torch gets only what is not in `kept`: it would make a second copy of all state on the
        # device, which may have no room for it.
        rest = {}
        for key, state in given["state"].items():
            if key not in numbers or not state:
                rest[key] = state
        return {**given, "param_groups": groups, "state": rest}, kept

    def _as_kept(self, state: dict[str, Any], parameter: Tensor, options: Group) -> dict[str, Any]:
        """A copy of a saved state with this optimizer's dtypes and device."""
        shapes = state_shapes(parameter, options)
        kept = {name: value for name, value in state.items() if name not in shapes}
        has_owner = is_sharded(parameter) and is_rotated(parameter, options)
        for name, shape in shapes.items():  # in the same order on all ranks
            value = state[name]
            if has_owner:
                value = whole(value)
                if name != "step" and not self._sharding.of[parameter].is_owner:
                    value = torch.empty(0, device=parameter.device)
            else:
                value = like_parameter(value, parameter) if shape else whole(value)
            dtype = state_dtype(name, parameter)
            if not isinstance(value, Tensor):  # as counts in files of older optimizers
                value = torch.tensor(value, device="cpu")
            kept[name] = value.detach().to(parameter.device, dtype, copy=True)
        return kept

    def __getstate__(self) -> dict[str, Any]:
        own = ("_rest_lr", "_compiled", "_roles", "_lazy_model")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in own}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("_roles", {})  # older pickles have none
        self.__dict__.setdefault("_lazy_model", None)
        self._forget()
