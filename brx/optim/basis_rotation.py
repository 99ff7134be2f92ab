"""Adam in the Hessian's Kronecker eigenbasis (the paper's algorithms 1 and 2)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain, groupby, repeat
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from brx.optim.eigenbasis import (
    covariance_product,
    exact_eigenbasis,
    exact_factor_eigenbasis,
    factor_product,
    power_iteration,
    resolution,
    select_columns,
    select_rows,
)
from brx.optim.elementwise import count_updates, fused_adamw, update_elementwise
from brx.optim.layout import Layout, check_state, make_members
from brx.optim.matrix_batch import (
    MatrixBatch,
    Member,
    Side,
    arithmetic,
    is_rotated,
    rotate_in,
    rotate_out,
    state_dtype,
    state_shapes,
)
from brx.optim.options import Group, StepOptions, check_options, step_options
from brx.optim.other_states import state_from
from brx.optim.products import Precision, fp32_products
from brx.optim.published import published_update
from brx.optim.sharded import (
    Sharding,
    Shards,
    apply_updates,
    gather_gradients,
    is_sharded,
    like_parameter,
    local,
    rotation_cost,
    shard_states,
    whole,
)
from brx.optim.side_by_side import for_each
from brx.optim.summary import Summary, summarize

Refresh = Literal["accumulate", "first", "next", "none"]
"""What an update does to the basis before it is taken."""

ASYNCHRONOUS = ("cuda",)
"""Devices on which a step waits for nothing: whether its gradients are finite is found out, and acted upon, there."""

LARGEST_STEP = 1.8
"""How far an update moves an entry at most, in steps of the largest size that AdamW could take then.

Rotated entries of which nothing has been seen take full steps together, which in one entry of the original space add up
to many. With the usual betas the limit is 1.8 learning rates at update 2, 2.9 at 50, 13 in the end.
"""

LONGEST_WAIT = 100
"""Steps after which the host looks at such a device's findings, if no refresh has made it wait before."""


NO_DEFAULTS = ("self", "__class__", "params", "rest_lr")
"""Of the constructor's names those that are no options of a group."""


class BadGradientError(ValueError):
    """A gradient has NaN, infinity, or entries whose squares overflow; no parameter was updated by it."""


class BasisRotation(Optimizer):
    """Adam that takes its steps in an estimate of the Hessian's eigenbasis (algorithm 1).

    For a weight matrix W (m, n) with gradient G, and orthogonal bases U (m, m) and V (n, n)::

        M <- beta1 M + (1 - beta1) G
        if due: U, V <- eigenbasis estimation (algorithm 2)
        v <- beta2 v + (1 - beta2) (U^T G V)^2
        W <- (1 - lr weight_decay) W - lr U [ m^ / (sqrt(v^) + eps) ] V^T

    with m^ = U^T M V / (1 - beta1^t) and v^ = v / (1 - beta2^t). A parameter of more than two dimensions is a batch of
    matrices in its last two, each with its own bases (the experts of a mixture). The arithmetic is float64 for float64
    parameters and float32 for all others.

    Bases are the identity until update `first_refresh`, which gives exact ones (`eigh`) and shares out v's energy in
    them. From then on a matrix is due at each update t that is, or has passed since the last one, a multiple of the
    frequency (for an integer: t mod frequency = 0), and takes one power iteration and QR. What a gradient's rounding
    noise would decide is not decided: directions below the noise floor of a covariance stay where they were, entries
    below that of a rotated gradient do not move; and v^ is at least m^2 after a refresh (docs/methods.md). Where a
    decomposition fails, the old basis stays and `num_failed_refreshes` grows.

    One optimizer serves a whole model: parameters in groups with `rotate=False` (embeddings, head, vectors) get AdamW;
    `brx.optim.param_groups(model)` makes the groups. From other groups, what is no matrix goes into one without
    rotation, with one warning. `summary()` shows what became of each parameter.

    Args:
        params: tensors, named tensors or parameter groups.
        lr, weight_decay, maximize: as AdamW's; the decay is decoupled.
        betas: decay of the momentum; decay of the second moment and the covariances.
        eps: added to the root of the second moment; below 1e-19 (float64: 1e-154), where squares of gradients are zero,
            it counts as that.
        source: "2nd": eigenvectors of the averages of G G^T and G^T G; "1st": of M M^T and M^T M (no extra moments).
        geometry: "bilateral" rotates both sides, "unilateral" only the smaller one (m < n: U, else V).
        frequency: updates between two refreshes; 9.5 for 9 and 10 in turn; None for never again after the first.
        first_refresh: the update at which a matrix gets its first basis, whatever the frequency; at least 2, since a
            single gradient is diagonal in its own eigenbasis, and off the diagonal there is only rounding.
        covariance: whether G G^T enters its average at every "step" (the authors' code); at every "refresh" (algorithm
            2 as printed); or there for the whole "interval", as beta2^n L + (1 - beta2^n) G G^T after n updates. Equal
            at frequency 1, and without meaning for source "1st".
        staggered: spreads the refreshes of a group's parameters over the interval, for even step times.
        rotation_precision: of the two rotations of a step ("highest", "tf32" or "bf16" in two parts; see
            `brx.optim.products`); refreshes and states keep the precision of the arithmetic.
        rotate: False for AdamW.
        max_dim: a side longer than this is not rotated (its basis would have max_dim^2 entries, twice with source
            "2nd"); None for no limit.
        max_aspect: nor is one longer than this times the other side, whose state would be that many times the weights.
        flatten: take a parameter of more than two dimensions as one matrix of its first dimension and all others
            together, as a convolution kernel (out, in, h, w) is; otherwise it is a stack of matrices.
        split: (parts, dim): take a fused projection as so many matrices along its rows (-2) or columns (-1).
        rest_lr: learning rate of groups that are not rotated and have none of their own; None: `lr`.
        as_published: compute what the authors' implementation computes, where it is not this (docs/methods.md).

    Options may differ by group, and may change between steps (but for `brx.optim.options.FORM` once there is state).
    The state of a parameter, made at its first gradient: `step`; `exp_avg` and `exp_avg_sq`, both in the rotated space;
    `left_basis` and `right_basis` (U, V), `left_covariance` and `right_covariance`, as far as the options ask for them;
    `num_failed_refreshes`. It may be replaced, cleared and written into; tensors of it share memory with those of other
    parameters of the same shape.

    Raises:
        ValueError: an option is out of range, or a parameter does not fit its group.
    """

    _layout: Layout
    _sharding: Sharding
    _options: list[StepOptions]
    _num_bad: dict[torch.device, Tensor]
    _num_unseen: int
    _rest_lr: float | None
    _num_rest: int | None

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        source: Literal["2nd", "1st"] = "2nd",
        geometry: Literal["bilateral", "unilateral"] = "bilateral",
        frequency: float | None = 10,
        first_refresh: int = 2,
        covariance: Literal["step", "refresh", "interval"] = "step",
        staggered: bool = False,
        rotation_precision: Precision = "highest",
        maximize: bool = False,
        rotate: bool = True,
        max_dim: int | None = 16_384,
        max_aspect: float | None = 10,
        flatten: bool = False,
        split: tuple[int, int] | None = None,
        rest_lr: float | None = None,
        as_published: bool = False,
    ) -> None:
        defaults = {name: value for name, value in locals().items() if name not in NO_DEFAULTS}
        self._forget()
        self._rest_lr, self._num_rest = rest_lr, 0
        super().__init__(params, defaults)
        num_rest, self._num_rest = self._num_rest, None
        self._count_rest(num_rest or 0)

    @property
    def num_failed_refreshes(self) -> int:
        """How often a matrix kept its old basis because its decomposition failed."""
        counts = [
            state["num_failed_refreshes"].sum() for state in self.state.values() if "num_failed_refreshes" in state
        ]
        return int(torch.stack(counts).sum()) if counts else 0

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @_disable_dynamo  # torch.compiler.disable without its import: a compiled train step leaves this one out
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient.

        Args:
            closure: computes the loss anew and returns it.

        Raises:
            BadGradientError: a gradient is not finite, or too large to be squared; it has changed nothing.
            ValueError: a gradient is sparse; nothing has been changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        members = self._members_with_gradients()
        try:
            with _full_precision(members):
                self._update_all(members, self._check_gradients(members))
        finally:
            for member in members:
                member.gradient = member.update = None
        return loss

    def _update_all(self, members: list[Member], bad: dict[torch.device, Tensor]) -> None:
        """Rotated parameters batch by batch, those on the CPU side by side; then the others."""
        sharded = [member for member in members if member.shards is not None]
        gather_gradients(sharded)
        batches = sorted(
            self._batches_with_gradients(bad), key=lambda b: rotation_cost(b.state["exp_avg"]), reverse=True
        )
        for is_cpu, alike in groupby(batches, lambda batch: batch.device.type == "cpu"):
            if is_cpu:
                for_each(self._update, alike)
            else:
                for batch in alike:
                    self._update(batch)
        apply_updates(sharded, [_decay(member, bad) for member in sharded])
        count_updates([member for member in sharded if not member.is_stacked], bad)  # other ranks have updated them
        update_elementwise([member for member in members if not member.is_rotated], bad)
        for batch in self._layout.batches:
            batch.seen_version = batch.state["step"]._version

    def _members_with_gradients(self) -> list[Member]:
        """The parameters with a gradient, which is handed to them; in a new layout if the present one does not fit."""
        before = chain(self._options, repeat(None))
        options = [step_options(group, of_group) for group, of_group in zip(self.param_groups, before, strict=False)]
        self._options = options
        with_gradient = [
            (parameter, group, of_group)
            for group, of_group in zip(self.param_groups, options, strict=True)
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        layout = self._layout
        if not all(layout.fits(p, group, of.layout, self.state.get(p)) for p, group, of in with_gradient):
            self._make_layout(options)
        for batch in self._layout.batches:
            batch.take_counts()
        members = []
        for parameter, _, of_group in with_gradient:
            member = self._layout.members[parameter]
            member.options, member.gradient = of_group, like_parameter(parameter.grad, parameter)
            members.append(member)
        return members

    def _make_layout(self, options: list[StepOptions]) -> None:
        self._sharding.add(self._sharded_matrices())
        members = make_members(self.param_groups, options, self.state, self._sharding.of, self._describe)
        self._layout.release({member.parameter for member in members}, self.state)
        self._layout = Layout([], {})  # so that the old batches go as the new ones come
        self._layout = Layout(members, self.state)

    def _sharded_matrices(self) -> list[Tensor]:
        return [p for _, p, group in self._named() if is_sharded(p) and is_rotated(p, group)]

    def _forget(self) -> None:
        """Drop what is known about state and groups beside themselves."""
        self._layout = Layout([], {})
        self._sharding = self.__dict__.get("_sharding") or Sharding()  # who updates which matrix stays
        self._options = []
        self._num_bad = {}
        self._num_unseen = 0  # steps since the host has last looked at the device's findings

    def _update(self, batch: MatrixBatch) -> None:
        """Algorithm 1 on one batch."""
        gradient = batch.gradients()
        if batch.options["as_published"]:
            self._update_as_published(batch, gradient)
            return
        for (refresh, interval), run in batch.runs(_refresh_and_interval):
            part, part_gradient = batch[run], gradient.view_as(batch.state["exp_avg"])[run].flatten(0, -3)
            if interval:
                self._accumulate_covariances(part, part_gradient, interval)
            if refresh in ("first", "next"):
                self._estimate_eigenbasis(part, part_gradient, exact=refresh == "first")
        precision = batch.options["rotation_precision"]
        rotated_update = self._rotated_adam(batch, rotate_in(batch, gradient, precision))
        update = rotate_out(batch, rotated_update, precision)
        for (lr, num_updates), run in batch.runs(_rate_and_updates):
            limit = lr * LARGEST_STEP * largest_adam_step(num_updates + 1, batch.options["betas"])
            update.view_as(batch.state["exp_avg"])[run].clamp_(-limit, limit)
        batch.update_weights(update)
        for member in batch.members:
            member.num_updates += 1

    def _update_as_published(self, batch: MatrixBatch, gradient: Tensor) -> None:
        updates = []
        for (_, num_updates, frequency), run in batch.runs(
            lambda m: (m.options.lr, m.num_updates + m.phase, m.group["frequency"])
        ):
            is_due = frequency is not None and _is_due(num_updates + 1, frequency)
            part = gradient.view_as(batch.state["exp_avg"])[run].flatten(0, -3)
            updates.append(published_update(batch[run], part, is_due))
        batch.update_weights(torch.cat(updates))
        for member in batch.members:
            member.num_updates += 1

    def _accumulate_covariances(self, batch: MatrixBatch, gradient: Tensor, interval: int) -> None:
        """L <- beta2^n L + (1 - beta2^n) G G^T and R likewise, for source "2nd" and a gradient that stands for n."""
        beta2 = batch.options["betas"][1] ** interval
        if batch.options["source"] == "2nd":
            for side in batch.sides:
                factor, covariance = _seen_from(side, gradient), batch.matrices(f"{side}_covariance")
                decay = beta2
                if batch.bad is not None:
                    covariance.mul_(batch.unless_bad(beta2, 1.0))
                    decay = 1.0
                covariance.baddbmm_(factor, factor.mT, beta=decay, alpha=1 - beta2)

    def _estimate_eigenbasis(self, batch: MatrixBatch, gradient: Tensor, exact: bool) -> None:
        """Algorithm 2, for matrices that are all due; carries the moments over to the new bases.

        Args:
            batch: the matrices.
            gradient: theirs (b, m, n).
            exact: from a full decomposition instead of a power iteration.
        """
        beta1, _ = batch.options["betas"]
        momentum = rotate_out(batch, batch.matrices("exp_avg"))
        second_moment = batch.matrices("exp_avg_sq")
        for side in batch.sides:
            basis = batch.matrices(f"{side}_basis")
            if batch.options["source"] == "2nd":
                covariance = batch.matrices(f"{side}_covariance")
                if exact:
                    refreshed = exact_eigenbasis(covariance)
                else:
                    refreshed = power_iteration(covariance_product(covariance, basis), basis)
            else:
                factor = _seen_from(side, momentum.lerp(gradient, 1 - beta1))  # M_t, one ahead of `momentum`
                if exact:
                    refreshed = exact_factor_eigenbasis(factor)
                else:
                    refreshed = power_iteration(factor_product(factor, basis), basis)
            basis.copy_(refreshed.basis)
            if not exact:
                second_moment.copy_((select_rows if side == "left" else select_columns)(second_moment, refreshed.order))
            batch.state["num_failed_refreshes"] += (~refreshed.valid).view_as(batch.state["num_failed_refreshes"])
        if exact:
            self._share_out_second_moment(batch)
        batch.matrices("exp_avg").copy_(rotate_in(batch, momentum))
        self._raise_second_moment(batch)

    def _share_out_second_moment(self, batch: MatrixBatch) -> None:
        """v_ij <- (share of row i) (share of column j) sum(v) in the first basis, of which v has seen nothing.

        A rotated side's shares are what v's would be if entries were uncorrelated; where a covariance tells more than
        rounding its eigenvalues, which are the second moment's own sums over the other side.
        """
        second_moment = batch.matrices("exp_avg_sq")
        shares = []
        for side, of in (("left", -1), ("right", -2)):
            energies = second_moment.sum(dim=of)  # (b, m) or (b, n)
            if side in batch.sides:
                basis = batch.matrices(f"{side}_basis")
                energies = (energies[:, None, :] @ basis.square())[:, 0]
                if batch.options["source"] == "2nd":
                    known = (basis * covariance_product(batch.matrices(f"{side}_covariance"), basis)).sum(dim=-2)
                    floor = resolution(known.dtype) * known.amax(dim=-1, keepdim=True)
                    energies = energies.where(known <= floor, known)
            total = energies.sum(dim=-1, keepdim=True)
            shares.append(energies / total.clamp(min=torch.finfo(total.dtype).tiny))
        total = second_moment.sum(dim=(-2, -1), keepdim=True)
        torch.mul(shares[0][:, :, None] * total, shares[1][:, None, :], out=second_moment)

    def _raise_second_moment(self, batch: MatrixBatch) -> None:
        """v^ <- max(v^, m^2) in new bases.

        A mean square is never below the square of the mean (Jensen). The momentum has been rotated, the second moment
        only permuted: where it has seen nothing of what now enters its entry, the quotient would be a step of any size.
        """
        beta1, beta2 = batch.options["betas"]
        shape = (-1,) + (1,) * (batch.state["exp_avg"].ndim - 1)
        steps = batch.state["step"].view(shape).to(batch.state["exp_avg"].dtype)
        ratio = (1 - beta2**steps) / (1 - beta1**steps).square()
        mean_square = batch.state["exp_avg"].square().mul_(ratio)
        torch.maximum(batch.state["exp_avg_sq"], mean_square, out=batch.state["exp_avg_sq"])

    def _rotated_adam(self, batch: MatrixBatch, rotated_gradient: Tensor) -> Tensor:
        """The moments' recursions in the rotated space, and the update -lr m^ / (sqrt(v^) + eps) there (b, m, n).

        Between refreshes U^T M V obeys M's own recursion, so that M needs no rotation in an ordinary step. The kernel
        is torch's fused AdamW, on weights of zero.
        """
        rotated_gradient = rotated_gradient.view_as(batch.state["exp_avg"])
        update = torch.zeros_like(rotated_gradient)
        for (lr, _), run in batch.runs(_rate_and_updates):
            steps = batch.state["step"][run]
            momentum, second_moment = batch.state["exp_avg"][run], batch.state["exp_avg_sq"][run]
            options = {**batch.options, "lr": lr, "weight_decay": 0.0, "maximize": False}
            fused_adamw(
                [update[run]], [rotated_gradient[run]], [momentum], [second_moment], [steps[0]], options, batch.bad
            )
            steps[1:] += 1 if batch.bad is None else ~batch.bad  # the kernel counts one step for the whole run
        if batch.sides:
            update.mul_(above_noise(batch.state["exp_avg_sq"]))
        return update.flatten(0, -3)

    def _check_gradients(self, members: list[Member]) -> dict[torch.device, Tensor]:
        """One look at all gradients together; a second one, for the name, only when something is wrong.

        The norm also finds entries whose squares overflow, which would poison the covariances just as well. On a GPU
        the host does not wait for the answer in an ordinary step: see `step`.

        Returns:
            By device, a flag () that makes the step change nothing; empty where the gradients are known to be finite.
        """
        for member in members:
            if member.gradient is not None and member.gradient.layout is not torch.strided:
                raise ValueError(
                    f"{self._describe(member.parameter)}: its gradient is sparse; give a dense one (sparse=False)"
                )
        norms: dict[torch.device, list[Tensor]] = {}
        for (device, dtype), alike in groupby(members, lambda m: (m.parameter.device, arithmetic(m.parameter))):
            gradients = [local(member.gradient) for member in alike if member.gradient is not None]
            norms.setdefault(device, []).extend(torch._foreach_norm(gradients, dtype=dtype))
        bad = {device: ~torch.stack(of_device).isfinite().all() for device, of_device in norms.items()}
        self._sharding.agree([member.parameter for member in members if is_sharded(member.parameter)], bad)
        can_wait = len(bad) == 1 and next(iter(bad)).type in ASYNCHRONOUS and self._num_unseen < LONGEST_WAIT
        if can_wait and not any(member.is_rotated and _refresh(member) in ("first", "next") for member in members):
            for device, flag in bad.items():
                self._num_bad[device] = self._num_bad.get(device, 0) + flag
            self._num_unseen += 1
            return bad
        num_bad = self._take_num_bad()
        if any(flag.item() for flag in bad.values()):
            raise BadGradientError(
                f"{self._first_bad(members)}: its gradient has NaN, infinity, or entries too large to be squared; "
                f"no parameter was updated{f', as in {num_bad} steps before' if num_bad else ''}"
            )
        if num_bad:
            raise BadGradientError(
                f"{num_bad} of the last updates met gradients with NaN, infinity, or entries too large to be squared; "
                f"no parameter was updated in them"
            )
        return {}

    def _take_num_bad(self) -> int:
        """How many steps have changed nothing since the host looked last; it looks now, and waits for the device."""
        num_bad = int(sum(count.item() for count in self._num_bad.values()))
        self._num_bad.clear()
        self._num_unseen = 0
        if num_bad:
            for member in self._layout.members.values():
                member.num_updates = int(member.state["step"])
        return num_bad

    def _first_bad(self, members: list[Member]) -> str:
        for member in members:
            if member.gradient is not None:
                norm = torch.linalg.vector_norm(local(member.gradient), dtype=arithmetic(member.parameter))
                if not norm.isfinite():
                    return self._describe(member.parameter)
        return "a parameter whose shard lies on another rank"

    def _describe(self, parameter: Tensor) -> str:
        name = next(name for name, candidate, _ in self._named() if candidate is parameter)
        return f"parameter {name} of shape {tuple(parameter.shape)}"

    def _batches_with_gradients(self, bad: dict[torch.device, Tensor]) -> Iterator[MatrixBatch]:
        """Batches, and parts of them, whose members go through this step together."""
        for batch in self._layout.batches:
            batch.bad = bad.get(batch.device)
            for shared, run in batch.runs(lambda m: None if m.gradient is None else m.options.shared):
                if shared is not None:
                    yield batch[run]

    def add_param_group(self, param_group: Group) -> None:
        """Add parameters; see `torch.optim.Optimizer.add_param_group`.

        Raises:
            ValueError: an option is out of range, or a parameter does not fit the group.
        """
        num_before = len(self.param_groups)
        try:
            for group in self._divided(param_group):
                super().add_param_group(group)
                check_options(self.param_groups[-1])
                for parameter in self.param_groups[-1]["params"]:
                    if problem := _problem(parameter, self.param_groups[-1]):
                        raise ValueError(f"{self._describe(parameter)}, {parameter.dtype}: {problem}")
        except ValueError:
            del self.param_groups[num_before:]
            raise

    def _divided(self, group: Group) -> list[Group]:
        """A group; or, of one to be rotated, the matrices and the rest, which is not."""
        rest_lr, options = self.__dict__.get("_rest_lr"), {**self.defaults, **group}
        of_rest = {} if "lr" in group or rest_lr is None else {"lr": rest_lr}
        if not options["rotate"]:
            return [{**of_rest, **group}]
        check_options(options)
        params = [group["params"]] if isinstance(group["params"], Tensor) else group["params"]
        params = params if isinstance(params, set) else list(params)
        tensors = [entry[1] if isinstance(entry, tuple) else entry for entry in params]
        if isinstance(params, set) or not params or not all(isinstance(tensor, Tensor) for tensor in tensors):
            return [{**group, "params": params}]  # torch says what it thinks of it
        parts: tuple[list[Any], list[Any]] = [], []
        for entry, tensor in zip(params, tensors, strict=True):
            parts[not is_rotated(tensor, options)].append(entry)
        self._count_rest(len(parts[1]))
        rest = {**group, **of_rest, "params": parts[1], "rotate": False, "why": "no matrix to rotate"}
        return [part for part in ({**group, "params": parts[0]}, rest) if part["params"]]

    def _count_rest(self, num: int) -> None:
        """Warn of parameters that were to be rotated and cannot be; once, for all groups of the constructor."""
        if (so_far := self.__dict__.get("_num_rest")) is not None:
            self._num_rest = so_far + num
        elif num:
            warnings.warn(
                f"{num} parameters have no side to rotate and get AdamW (optimizer.summary() names them); which "
                "matrices are embeddings or a head, only brx.optim.param_groups(model) tells",
                stacklevel=4,
            )

    def _named(self) -> Iterator[tuple[str, Tensor, Group]]:
        """All parameters, in order, with their names and groups."""
        for number, group in enumerate(self.param_groups):
            names = group.get("param_names") or [f"{index} of group {number}" for index in range(len(group["params"]))]
            yield from zip(names, group["params"], repeat(group))

    def summary(self) -> Summary:
        """What becomes of each parameter: which sides are rotated, how much state it has, and why; print it."""
        return Summary(summarize(parameter, group, name) for name, parameter, group in self._named())

    def take_over(self, other: Optimizer) -> None:
        """Continue from AdamW, or pytorch-optimizer's SOAP, over the same parameters: moments and counts of updates.

        From SOAP the bases are SOAP's. From AdamW they begin as the identity, so that the next step is AdamW's, and the
        first exact one comes `first_refresh` updates later: the group's `first_refresh` becomes that update.

        Raises:
            ValueError: it has no state of these parameters, or one that does not fit; nothing has changed then.
        """
        states = {
            parameter: (state_from(other, parameter, group, self._describe(parameter)), group)
            for _, parameter, group in self._named()
            if other.state.get(parameter)
        }
        if not states:
            raise ValueError(f"{type(other).__name__} has no state of any of these parameters")
        for parameter, (state, group) in states.items():
            check_state(state, state_shapes(parameter, group), group, self._describe(parameter))
        self._sharding.add(self._sharded_matrices())
        for parameter, (state, group) in states.items():
            if not other.state[parameter].get("Q") and (step := int(state["step"])) >= group["first_refresh"]:
                group["first_refresh"] += step
            self.state[parameter] = self._as_kept(state, parameter, group)
        self._forget()

    def state_dict(self) -> dict[str, Any]:
        """As torch's: nothing is copied but the bases, which lie column by column here and row by row in a file.

        Tensors of parameters of one shape share memory, so that a part of them alone takes the space of all. The state
        of sharded matrices becomes DTensors that are sharded by rows, for which all ranks have to ask together.
        """
        first_hook = self.register_state_dict_post_hook(
            lambda _, packed: {**packed, "state": _by_rows(self._with_sharded_states(packed["state"]))}, prepend=True
        )
        try:
            return super().state_dict()
        finally:
            first_hook.remove()

    def _with_sharded_states(self, packed: dict[Any, Any]) -> dict[Any, Any]:
        members = list(self._named())
        # In an order that is the same on all ranks: who reads it may communicate entry by entry.
        states = {number: packed[number] for number in range(len(members)) if number in packed} | packed
        entries: dict[Any, list[tuple[int, str, tuple[Shards, tuple[int, ...], Tensor | None]]]] = {}
        for number, (_, parameter, group) in enumerate(members):
            if is_sharded(parameter) and is_rotated(parameter, group) and packed.get(number):
                states[number] = {"step": packed[number]["step"]}
                mesh = parameter.device_mesh  # type: ignore[attr-defined]
                for name, shape in state_shapes(parameter, group).items():
                    if name != "step":
                        shards = self._sharding.of(parameter)
                        wanted = shards, shape, packed[number][name] if shards.is_owner else None
                        kind = mesh, state_dtype(name, parameter), local(parameter).device
                        entries.setdefault(kind, []).append((number, name, wanted))
        for (mesh, dtype, device), alike in entries.items():
            like = torch.empty(0, dtype=dtype, device=device)
            tensors = shard_states([wanted for _, _, wanted in alike], mesh, like)
            for (number, name, _), tensor in zip(alike, tensors, strict=True):
                states[number][name] = tensor
        return states

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where the saved optimizer stood, to the last bit; its options replace this one's.

        Options that it lacks, as it is older than they are, take their defaults. Sharded parameters take sharded state
        of any number of ranks, or whole one; all ranks load together.

        Raises:
            ValueError: the groups differ from this optimizer's, an option is out of range, or a state does not fit its
                parameter and options. Nothing has changed then.
        """
        loaded: dict[Tensor, dict[str, Any]] = {}

        def prepare(_: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            prepared = self._with_all_options(given)
            loaded.update(self._fitting_state(prepared))
            return prepared

        self._loaded = loaded
        last_hook = self.register_load_state_dict_pre_hook(prepare)
        try:
            super().load_state_dict(state_dict)
        finally:
            last_hook.remove()
            del self._loaded

    def _with_all_options(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The state dict with options of all groups."""
        groups = [{**self.defaults, **group} for group in state_dict["param_groups"]]
        if [len(group["params"]) for group in groups] != [len(group["params"]) for group in self.param_groups]:
            raise ValueError(
                f"the saved groups have {[len(group['params']) for group in groups]} parameters, this optimizer's "
                f"{[len(group['params']) for group in self.param_groups]}"
            )
        for number, group in enumerate(groups):
            try:
                check_options(group)
            except ValueError as error:
                raise ValueError(f"group {number} of the saved state: {error}") from None
        return {**state_dict, "param_groups": groups}

    def _fitting_state(self, state_dict: dict[str, Any]) -> dict[Tensor, dict[str, Any]]:
        """The saved state by parameter, in the precision of the arithmetic.

        torch's own loading casts it to the parameter's precision, which loses half of it for bfloat16.
        """
        states: dict[Tensor, tuple[dict[str, Any], Group]] = {}
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for parameter, number in zip(group["params"], saved["params"], strict=True):
                state = state_dict["state"].get(number)
                if state:
                    check_state(state, state_shapes(parameter, saved), saved, self._describe(parameter))
                    states[parameter] = state, saved
        self._sharding.add(self._sharded_matrices())
        return {parameter: self._as_kept(state, parameter, saved) for parameter, (state, saved) in states.items()}

    def _as_kept(self, state: dict[str, Any], parameter: Tensor, group: Group) -> dict[str, Any]:
        """A copy of a saved state, in the dtypes and on the device that it has here."""
        shapes = state_shapes(parameter, group)
        kept = {name: value for name, value in state.items() if name not in shapes}
        is_shared = is_sharded(parameter) and is_rotated(parameter, group)
        for name, shape in shapes.items():  # in an order that is the same on all ranks
            value = state[name]
            if is_shared:
                value = whole(value)
                if name != "step" and not self._sharding.of(parameter).is_owner:
                    value = torch.empty(0)
            elif shape:
                value = like_parameter(value, parameter)
            kept[name] = torch.as_tensor(value).detach().to(parameter.device, state_dtype(name, parameter), copy=True)
        return kept

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_loaded" in self.__dict__:  # in `load_state_dict`, before its hooks see the state
            for parameter, loaded in self._loaded.items():
                self.state[parameter] = loaded
        self._forget()


@contextmanager
def _full_precision(members: list[Member]) -> Iterator[None]:
    """The optimizer's own arithmetic, whatever autocast and TF32 the program uses for its model."""
    with ExitStack() as stack:
        for device_type in {member.parameter.device.type for member in members}:
            stack.enter_context(torch.autocast(device_type, enabled=False))
        stack.enter_context(fp32_products("ieee"))
        yield


def _refresh(member: Member) -> Refresh:
    """What the next update does to the basis before it is taken (algorithm 1, line 5; the start is ours)."""
    update, frequency = member.num_updates + 1, member.group["frequency"]
    if member.group["as_published"]:
        return "next"  # of its own kind, which looks at every gradient
    if update < member.group["first_refresh"]:
        return "accumulate"
    if update == member.group["first_refresh"]:
        return "first"
    return "next" if frequency is not None and _is_due(update + member.phase, frequency) else "none"


def _is_due(update: int, frequency: float) -> bool:
    """Whether the update is, or has passed since the last one, a multiple of the frequency."""
    return update // frequency > (update - 1) // frequency


def _refresh_and_interval(member: Member) -> tuple[Refresh, int]:
    """What the next update does to the basis, and for how many updates its gradient enters the covariance; 0: for none.

    "step" takes every gradient. "refresh" takes those of refreshes as one each (algorithm 2 as printed), so that the
    average remembers frequency / (1 - beta2) updates; "interval" takes them for all updates since the last one, so that
    it remembers 1 / (1 - beta2), as with "step". Until the first basis every gradient counts.
    """
    refresh, covariance = _refresh(member), member.group["covariance"]
    if covariance == "step" or refresh in ("accumulate", "first"):
        return refresh, 1
    if refresh == "none":
        return refresh, 0
    return refresh, _updates_since_refresh(member) if covariance == "interval" else 1


def _updates_since_refresh(member: Member) -> int:
    """How many updates the last interval had, at a refresh after the first one."""
    update, frequency = member.num_updates + 1, member.group["frequency"]
    first = member.group["first_refresh"]
    last = next((u for u in range(update - 1, first, -1) if _is_due(u + member.phase, frequency)), first)
    return update - last


def above_noise(second_moment: Tensor) -> Tensor:
    """A factor (*, m, n) from 0, for entries of rotated gradients that are rounding noise, to 1.

    Adam would scale noise to full steps. Rounding of the basis leaves up to 4 eps of the matrix in a whole row or
    column that should be zero; their floor is 16 eps. What is 4 times below a floor moves by 1.5e-5 of its step.
    """
    m, n = second_moment.shape[-2:]
    number = torch.finfo(second_moment.dtype)
    of_row, of_column = (second_moment.mean(dim=dim, keepdim=True) for dim in (-1, -2))
    tilt = of_row.mean(dim=-2, keepdim=True) * (16 * number.eps) ** 2 + number.tiny
    noise = (noise_floor(second_moment) / second_moment).pow(4)
    return 1 / (1 + noise + (m * tilt / of_row).pow(4) + (n * tilt / of_column).pow(4))


def noise_floor(second_moment: Tensor) -> Tensor:
    """The square of what counts as rounding noise in each entry of a rotated gradient (*, m, n).

    Rounding leaves in an entry of U^T G V, measured against float64 (`benchmarks/first_steps`), 0.2 to 0.4 of
    eps (m + n)^(1/4) times the root of the mean squares of its row, of its column and of the matrix together; this is
    7 of these.
    """
    m, n = second_moment.shape[-2:]
    number = torch.finfo(second_moment.dtype)
    of_row, of_column = (second_moment.mean(dim=dim, keepdim=True) for dim in (-1, -2))
    mean_squares = of_row + of_column + of_row.mean(dim=-2, keepdim=True)
    return mean_squares * (math.sqrt(m + n) * (7 * number.eps) ** 2) + number.tiny


def largest_adam_step(update: int, betas: tuple[float, float]) -> float:
    """The largest |m^| / sqrt(v^) of any gradients up to that update, by Cauchy-Schwarz; inf where beta1^2 >= beta2."""
    beta1, beta2 = betas
    if beta1**2 >= beta2:
        return math.inf
    ratio = beta1**2 / beta2
    of_sums = (1 - beta2**update) / (1 - beta2) * ((1 - beta1) / (1 - beta1**update)) ** 2
    return math.sqrt(of_sums * (1 - ratio**update) / (1 - ratio))


def _rate_and_updates(member: Member) -> tuple[float, int]:
    return member.options.lr, member.num_updates


def _seen_from(side: Side, matrices: Tensor) -> Tensor:
    """The matrices with the given side's dimension first."""
    return matrices if side == "left" else matrices.mT


def _decay(member: Member, bad: dict[torch.device, Tensor]) -> Tensor:
    """The factor 1 - lr weight_decay; 1 in a step that is to change nothing."""
    decay = torch.tensor(member.options.decay, dtype=arithmetic(member.parameter))
    flag = bad.get(member.parameter.device)
    return decay if flag is None else torch.where(flag, 1.0, decay)


def _problem(parameter: Tensor, group: Group) -> str | None:
    """Why the group cannot take the parameter; None if it can."""
    if getattr(parameter, "_is_flat_param", False) or getattr(parameter, "_fsdp_flattened", False):
        return (
            "FSDP1 has flattened the parameters of a module (with use_orig_params, too), so that no matrix is left to "
            "rotate; shard the model with FSDP2 (torch.distributed.fsdp.fully_shard)"
        )
    if not parameter.is_floating_point():
        return "BasisRotation takes real floating-point parameters"
    if group["rotate"] and group["split"] and parameter.shape[group["split"][1]] % group["split"][0]:
        return f"split={group['split']} does not divide it into equal matrices"
    return None


def _by_rows(states: dict[Any, Any]) -> dict[Any, Any]:
    return {
        number: {name: value.contiguous() if name.endswith("_basis") else value for name, value in state.items()}
        for number, state in states.items()
    }
