"""Adam in the Hessian's Kronecker eigenbasis (the paper's algorithms 1 and 2)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import chain, groupby
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw
from torch.optim.optimizer import ParamsT

from brx.optim.eigenbasis import (
    covariance_product,
    eigenvectors,
    factor_product,
    left_singular_vectors,
    power_iteration,
    select_columns,
    select_rows,
)
from brx.optim.matrix_batch import Group, MatrixBatch, Member, stack_states
from brx.optim.products import Precision, product
from brx.optim.side_by_side import for_each

Side = Literal["left", "right"]

BATCH_BYTES = {"cpu": 2**20, "cuda": 2**28}
"""Size of weights at which a batch is full: a core's cache on the CPU, enough to fill the device elsewhere."""

CHOICES = {
    "source": ("2nd", "1st"),
    "geometry": ("bilateral", "unilateral"),
    "covariance": ("refresh", "step"),
    "rotation_precision": ("highest", "tf32", "bf16"),
}

SHARED_OPTIONS = ("betas", "eps", *CHOICES)
"""What the members of a batch have in common, beside shape, precision and device."""


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

    A matrix is due at its first update and at every update t that is, or has passed since the last one, a multiple of
    the frequency (for an integer: t mod frequency = 0). The first time, its basis is
    exact (`eigh`; singular vectors for source "1st"; the identity for a zero gradient), later it takes one power
    iteration and QR. Where a decomposition fails, in float64 too, the old basis stays and `num_failed_refreshes` grows.

    Args:
        params: tensors, named tensors or parameter groups; every tensor has at least two dimensions.
        lr: learning rate.
        betas: decay of the momentum; decay of the second moment and the covariances.
        eps: added to the root of the second moment.
        weight_decay: decoupled, as in AdamW.
        source: "2nd": eigenvectors of the averages of G G^T and G^T G; "1st": of M M^T and M^T M (no extra moments).
        geometry: "bilateral" rotates both sides, "unilateral" only the smaller one (m < n: U, else V).
        frequency: updates between two refreshes; 9.5 for 9 and 10 in turn; None for never again after the first.
        covariance: whether G G^T enters its average at a "refresh" only (algorithm 2) or at every "step".
        staggered: spreads the refreshes of a group's parameters over the interval, for even step times.
        rotation_precision: of the two rotations of a step ("highest", "tf32" or "bf16" in two parts; see
            `brx.optim.products`); refreshes and states keep the precision of the arithmetic.

    Options may differ by group. The state of a parameter: `step`; `exp_avg` and `exp_avg_sq`, both in the rotated
    space; `left_basis` and `right_basis` (U, V), `left_covariance` and `right_covariance`, as far as the options ask
    for them; `num_failed_refreshes`. Nothing in it is shared between parameters.

    Raises:
        ValueError: an option is out of range, or a parameter is not a matrix or a batch of matrices.
    """

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
        covariance: Literal["refresh", "step"] = "refresh",
        staggered: bool = False,
        rotation_precision: Precision = "highest",
    ) -> None:
        self._batches: list[MatrixBatch] | None = None
        options = {"source": source, "geometry": geometry, "frequency": frequency, "covariance": covariance}
        common = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        execution = {"staggered": staggered, "rotation_precision": rotation_precision}
        super().__init__(params, {**common, **options, **execution})

    @property
    def num_failed_refreshes(self) -> int:
        """How often a matrix kept its old basis because its decomposition failed."""
        stacks = self.state.values() if self._batches is None else [batch.state for batch in self._batches]
        counts = [state["num_failed_refreshes"].sum() for state in stacks if state]
        return int(torch.stack(counts).sum()) if counts else 0

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient.

        Args:
            closure: computes the loss anew and returns it.

        Raises:
            ValueError: a gradient is sparse, or not finite, or too large to be squared; nothing has been changed then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_gradients()
        batches = sorted(self._batches_with_gradients(), key=MatrixBatch.cost, reverse=True)
        for is_cpu, alike in groupby(batches, lambda batch: batch.device.type == "cpu"):
            if is_cpu:
                for_each(self._update, alike)
            else:
                for batch in alike:
                    self._update(batch)
        return loss

    def _update(self, batch: MatrixBatch) -> None:
        """Algorithm 1 on one batch."""
        gradient = batch.gradients()
        for (first, due), run in batch.runs(_first_and_due):
            part, part_gradient = batch[run], gradient.view_as(batch.state["exp_avg"])[run].flatten(0, -3)
            if due or part.options["covariance"] == "step":
                self._accumulate_covariances(part, part_gradient)
            if due:
                self._estimate_eigenbasis(part, part_gradient, first)
        precision = batch.options["rotation_precision"]
        rotated_update = self._rotated_adam(batch, rotate_in(batch, gradient, precision))
        batch.update_weights(rotate_out(batch, rotated_update, precision))
        for member in batch.members:
            member.num_updates += 1

    def _accumulate_covariances(self, batch: MatrixBatch, gradient: Tensor) -> None:
        """L <- beta2 L + (1 - beta2) G G^T and R likewise, for source "2nd"."""
        _, beta2 = batch.options["betas"]
        if batch.options["source"] == "2nd":
            for side in _sides(batch.options["geometry"], gradient.shape):
                factor = _seen_from(side, gradient)
                batch.matrices(f"{side}_covariance").baddbmm_(factor, factor.mT, beta=beta2, alpha=1 - beta2)

    def _estimate_eigenbasis(self, batch: MatrixBatch, gradient: Tensor, first: bool) -> None:
        """Algorithm 2, for matrices that are all due; carries the moments over to the new bases.

        Args:
            batch: the matrices.
            gradient: theirs (b, m, n).
            first: whether this is the first update.
        """
        beta1, _ = batch.options["betas"]
        momentum = rotate_out(batch, batch.matrices("exp_avg"))
        second_moment = batch.matrices("exp_avg_sq")
        for side in _sides(batch.options["geometry"], gradient.shape):
            basis = batch.matrices(f"{side}_basis")
            if batch.options["source"] == "2nd":
                covariance = batch.matrices(f"{side}_covariance")
                renewal = (
                    eigenvectors(covariance) if first else power_iteration(covariance_product(covariance, basis), basis)
                )
            else:
                factor = _seen_from(side, momentum.lerp(gradient, 1 - beta1))  # M_t, one ahead of `momentum`
                renewal = (
                    left_singular_vectors(factor) if first else power_iteration(factor_product(factor, basis), basis)
                )
            basis.copy_(renewal.basis)
            second_moment.copy_((select_rows if side == "left" else select_columns)(second_moment, renewal.order))
            batch.state["num_failed_refreshes"] += (~renewal.valid).view_as(batch.state["num_failed_refreshes"])
        batch.matrices("exp_avg").copy_(rotate_in(batch, momentum))

    def _rotated_adam(self, batch: MatrixBatch, rotated_gradient: Tensor) -> Tensor:
        """The moments' recursions in the rotated space, and the update -lr m^ / (sqrt(v^) + eps) there (b, m, n).

        Between refreshes U^T M V obeys M's own recursion, so that M needs no rotation in an ordinary step. The kernel
        is torch's fused AdamW, on weights of zero.
        """
        rotated_gradient = rotated_gradient.view_as(batch.state["exp_avg"])
        update = torch.zeros_like(rotated_gradient)
        beta1, beta2 = batch.options["betas"]
        for (lr, _), run in batch.runs(lambda member: (float(member.group["lr"]), member.num_updates)):
            steps = batch.state["step"][run]
            adamw(
                params=[update[run]],
                grads=[rotated_gradient[run]],
                exp_avgs=[batch.state["exp_avg"][run]],
                exp_avg_sqs=[batch.state["exp_avg_sq"][run]],
                max_exp_avg_sqs=[],
                state_steps=[steps[0]],
                fused=True,
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=lr,
                weight_decay=0.0,
                eps=batch.options["eps"],
                maximize=False,
            )
            steps[1:] += 1  # the kernel counts one step for the whole run
        return update.flatten(0, -3)

    def _check_gradients(self) -> None:
        """One look at all gradients together; a second one, for the name, only when something is wrong.

        The norm also finds entries whose squares overflow, which would poison the covariances just as well.
        """
        with_gradient = [(p, p.grad) for group in self.param_groups for p in group["params"] if p.grad is not None]
        for parameter, gradient in with_gradient:
            if gradient.layout is not torch.strided:
                raise ValueError(
                    f"{self._describe(parameter)}: its gradient is sparse; give a dense one (sparse=False)"
                )
        norms: list[Tensor] = []
        for dtype, alike in groupby(with_gradient, lambda pair: _precision(pair[0])):
            norms += torch._foreach_norm([gradient for _, gradient in alike], dtype=dtype)
        if norms and not (is_finite := torch.stack(norms).isfinite()).all():
            wrong = with_gradient[is_finite.tolist().index(False)][0]
            raise ValueError(
                f"{self._describe(wrong)}: its gradient has NaN, infinity, or entries too large to be squared; "
                f"no parameter was updated"
            )

    def _describe(self, parameter: Tensor) -> str:
        for number, group in enumerate(self.param_groups):
            for place, candidate in enumerate(group["params"]):
                if candidate is parameter:
                    name = group["param_names"][place] if "param_names" in group else f"{place} of group {number}"
                    return f"parameter {name} of shape {tuple(parameter.shape)}"
        raise AssertionError("not a parameter of this optimizer")

    def _batches_with_gradients(self) -> Iterator[MatrixBatch]:
        if self._batches is None:
            self._batches = list(self._make_batches())
        for batch in self._batches:
            for has_gradient, run in batch.runs(lambda member: member.parameter.grad is not None):
                if has_gradient:
                    yield batch[run]

    def _make_batches(self) -> Iterator[MatrixBatch]:
        """Put parameters that can go through the algorithm together into batches, and their state into stacks."""
        alike: dict[Any, list[Member]] = {}
        for group in self.param_groups:
            shared = tuple(group[option] for option in SHARED_OPTIONS)
            for place, parameter in enumerate(group["params"]):
                # Within the group, so that every pipeline stage has refreshes as even as all stages together.
                phase = int(place * (group["frequency"] or 0) / len(group["params"])) if group["staggered"] else 0
                num_updates = int(self.state[parameter].get("step", 0))
                key = (parameter.shape, parameter.dtype, parameter.device, shared)
                alike.setdefault(key, []).append(Member(parameter, group, phase, num_updates))
        for members in alike.values():
            parameter = members[0].parameter
            capacity = max(1, BATCH_BYTES.get(parameter.device.type, 2**28) // parameter.nbytes)
            blank = _blank_state(parameter, members[0].group)
            for start in range(0, len(members), capacity):
                batch = members[start : start + capacity]
                yield MatrixBatch(batch, stack_states([self.state[member.parameter] for member in batch], blank))

    def add_param_group(self, param_group: Group) -> None:
        """Add parameters; see `torch.optim.Optimizer.add_param_group`.

        Raises:
            ValueError: an option is out of range, or a parameter is not a matrix or a batch of matrices.
        """
        super().add_param_group(param_group)
        try:
            _check_options(self.param_groups[-1])
            for parameter in self.param_groups[-1]["params"]:
                if parameter.ndim < 2 or parameter.numel() == 0 or not parameter.is_floating_point():
                    raise ValueError(
                        f"{self._describe(parameter)}, {parameter.dtype}: BasisRotation takes real matrices or batches "
                        f"of them (*, m, n); give this one to torch.optim.AdamW"
                    )
        except ValueError:
            self.param_groups.pop()
            raise
        self._batches = None

    def state_dict(self) -> dict[str, Any]:
        """As torch's; every tensor of the state is a copy, so that saving one parameter's does not save its batch."""
        packed = super().state_dict()
        for number, state in packed["state"].items():
            packed["state"][number] = {name: tensor.clone() for name, tensor in state.items()}
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where the saved optimizer stood, to the last bit; its options replace this one's.

        Raises:
            ValueError: the groups differ from this optimizer's, or a state does not fit its parameter and options.
        """
        super().load_state_dict(state_dict)
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        for number, (group, parameter) in zip(saved, self._parameters(), strict=True):
            blank = _blank_state(parameter, group)
            state = state_dict["state"].get(number, blank)
            if _shapes(state) != _shapes(blank):
                raise ValueError(
                    f"{self._describe(parameter)}: the saved state has {_shapes(state)}, but"
                    f" source={group['source']!r} and geometry={group['geometry']!r} need {_shapes(blank)}"
                )
            # torch has cast the state to the parameter's own precision, which loses half of it for bfloat16.
            self.state[parameter] = {name: state[name].detach().to(like, copy=True) for name, like in blank.items()}
        self._batches = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._batches = None

    def _parameters(self) -> Iterator[tuple[Group, Tensor]]:
        for group in self.param_groups:
            for parameter in group["params"]:
                yield group, parameter


def rotate_in(batch: MatrixBatch, matrices: Tensor, precision: Precision = "highest") -> Tensor:
    """U^T A V for A (b, m, n)."""
    if "right_basis" in batch.state:
        matrices = product(matrices, batch.matrices("right_basis"), precision)
    if "left_basis" in batch.state:
        matrices = product(batch.matrices("left_basis").mT, matrices, precision)
    return matrices


def rotate_out(batch: MatrixBatch, matrices: Tensor, precision: Precision = "highest") -> Tensor:
    """U A V^T for A (b, m, n)."""
    if "right_basis" in batch.state:
        matrices = product(matrices, batch.matrices("right_basis").mT, precision)
    if "left_basis" in batch.state:
        matrices = product(batch.matrices("left_basis"), matrices, precision)
    return matrices


def _first_and_due(member: Member) -> tuple[bool, bool]:
    """Whether the next update is the first one, and whether the basis is renewed before it (algorithm 1, line 5)."""
    first, frequency = member.num_updates == 0, member.group["frequency"]
    if first or frequency is None:
        return first, first
    update = member.num_updates + 1 + member.phase
    return False, update // frequency > (update - 1) // frequency


def _sides(geometry: str, shape: torch.Size) -> tuple[Side, ...]:
    if geometry == "bilateral":
        return "left", "right"
    rows, columns = shape[-2:]
    return ("left",) if rows < columns else ("right",)


def _seen_from(side: Side, matrices: Tensor) -> Tensor:
    """The matrices with the given side's dimension first."""
    return matrices if side == "left" else matrices.mT


def _precision(parameter: Tensor) -> torch.dtype:
    return torch.float64 if parameter.dtype == torch.float64 else torch.float32


def _blank_state(parameter: Tensor, group: Group) -> dict[str, Tensor]:
    """The state before the first update."""
    *lead, rows, columns = parameter.shape
    zero = torch.zeros((), dtype=_precision(parameter), device=parameter.device)
    state = {
        "step": zero.to(torch.float32),
        "exp_avg": zero.expand(parameter.shape),
        "exp_avg_sq": zero.expand(parameter.shape),
        "num_failed_refreshes": zero.to(torch.int64).expand(lead),
    }
    for side in _sides(group["geometry"], parameter.shape):
        size = rows if side == "left" else columns
        state[f"{side}_basis"] = torch.eye(size, dtype=zero.dtype, device=zero.device).expand(*lead, size, size)
        if group["source"] == "2nd":
            state[f"{side}_covariance"] = zero.expand(*lead, size, size)
    return state


def _shapes(state: dict[str, Tensor]) -> str:
    return ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in sorted(state.items()))


def _check_options(group: Group) -> None:
    """Raise ValueError for the first option that is out of range."""
    for option, lowest in {"lr": 0.0, "eps": 0.0, "weight_decay": 0.0}.items():
        if not group[option] >= lowest:
            raise ValueError(f"Invalid {option}={group[option]}: must be >= {lowest:g}")
    for beta in group["betas"]:
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"Invalid betas={group['betas']}: both must be in [0, 1)")
    for option, choices in CHOICES.items():
        if group[option] not in choices:
            raise ValueError(f"Invalid {option}={group[option]!r}: must be one of {', '.join(map(repr, choices))}")
    frequency = group["frequency"]
    if frequency is not None and not (isinstance(frequency, (int, float)) and 1 <= frequency < math.inf):
        raise ValueError(f"Invalid frequency={frequency!r}: must be a number >= 1, or None for never again")
    if group["covariance"] == "step" and group["source"] == "1st":
        raise ValueError('Invalid covariance="step" with source="1st", which has no covariance: leave it at "refresh"')
