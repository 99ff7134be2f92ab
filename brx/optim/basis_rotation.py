"""Adam with basis rotation: Adam in the Kronecker eigenbasis of the Hessian (the paper's algorithms 1 and 2).

Matrices of one shape form a stack and are updated together. Shape legend: N matrices in a stack, m rows, n columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from brx.optim.eigenbasis import exact_basis, exact_left_basis, followed_basis

SOURCES = ("2nd", "1st")
GEOMETRIES = ("bilateral", "unilateral")
COVARIANCES = ("refresh", "step")


class BasisRotation(Optimizer):
    """Adam whose second moment lives in the eigenbasis of the gradient's covariance, for weight matrices.

        M <- beta1 M + (1 - beta1) G
        U, V <- Eigenbasis-Estimation(G, M, U, V)                    at the first step and every `frequency` steps
        v <- beta2 v + (1 - beta2) (U^T G V)^2
        W <- W - lr weight_decay W - lr U [ (U^T M V) / (sqrt(v) + eps) ] V^T      with Adam's bias corrections

    Between refreshes U^T M V obeys the same recursion as M, so it is what the state holds: two rotations a step
    instead of three. A refresh turns it back with the old basis and forth with the new one.

    Use it for matrices (attention, MLP) and AdamW for the rest (embeddings, head, biases, norms).

    State of each parameter (the leading dimensions of the parameter, then):

    - `step`: updates made;
    - `exp_avg`: U^T M V, (m, n); `exp_avg_sq`: v, (m, n);
    - `basis_left`: U (m, m); `basis_right`: V (n, n); a side that is not rotated has none;
    - `covariance_left`: L (m, m); `covariance_right`: R (n, n); for source `2nd` only.

    Arithmetic and state are fp32 for fp32, bf16 and fp16 parameters, and float64 for float64 ones.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        source: str = "2nd",
        geometry: str = "bilateral",
        frequency: int | None = 10,
        covariance: str = "refresh",
    ) -> None:
        """
        Args:
            params: tensors of at least two dimensions, or groups of them; leading dimensions are a batch of matrices.
            lr: learning rate.
            betas: decay of the first and second moment; the second one is the covariances' too.
            eps: added to the root of the second moment.
            weight_decay: decoupled, as in AdamW.
            source: `2nd`: covariances L = E[G G^T], R = E[G^T G]; `1st`: M M^T and M^T M, with no state of their own.
            geometry: `bilateral`: both sides; `unilateral`: the smaller side (rows if m < n, else columns).
            frequency: steps between refreshes; None: never after the first. May be set per group.
            covariance: accumulate L and R at each `refresh` (the paper) or at each `step` (the authors' code).

        Raises:
            ValueError: a value is out of range, or a parameter is no matrix.
        """
        if not lr >= 0.0:
            raise ValueError(f"Invalid {lr=}. Must be >= 0")
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(f"Invalid {betas=}. Must be in [0, 1)")
        if not eps >= 0.0:
            raise ValueError(f"Invalid {eps=}. Must be >= 0")
        if not weight_decay >= 0.0:
            raise ValueError(f"Invalid {weight_decay=}. Must be >= 0")
        if source not in SOURCES:
            raise ValueError(f"Invalid {source=}. Must be one of {SOURCES}")
        if geometry not in GEOMETRIES:
            raise ValueError(f"Invalid {geometry=}. Must be one of {GEOMETRIES}")
        if covariance not in COVARIANCES:
            raise ValueError(f"Invalid {covariance=}. Must be one of {COVARIANCES}")
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "source": source,
            "geometry": geometry,
            "frequency": frequency,
            "covariance": covariance,
        }
        self.num_failed_refreshes = 0
        self._stacks: dict[tuple[int, ...], list[_Stack]] = {}
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; refuses what is no matrix."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        frequency = group["frequency"]
        if frequency is not None and frequency < 1:
            raise ValueError(f"Invalid {frequency=}. Must be >= 1, or None for one refresh at the first step only")
        for name, parameter in _named(group):
            if parameter.ndim < 2:
                raise ValueError(
                    f"BasisRotation rotates matrices; {name} has shape {tuple(parameter.shape)}:"
                    " give it to torch.optim.AdamW"
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Make one update of all parameters that have a gradient.

        Args:
            closure: recomputes the loss and the gradients.

        Raises:
            ValueError: a gradient is sparse, or not finite; nothing has been changed then. (On a GPU, finiteness is
                looked at in steps with a refresh only, so that ordinary steps need not wait for the device.)
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        stacks = self._stacks_with_gradients()
        gradients = [stack.gradient() for stack in stacks]
        for stack, gradient in zip(stacks, gradients, strict=True):
            if gradient.device.type == "cpu" or stack.due():
                stack.check_finite(gradient)
        for stack, gradient in zip(stacks, gradients, strict=True):
            self.num_failed_refreshes += stack.update(gradient)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """As any torch optimizer's; the tensors are copies, free of the stacks."""
        packed = super().state_dict()
        packed["state"] = {number: _copied(state) for number, state in packed["state"].items()}
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As any torch optimizer's."""
        super().load_state_dict(state_dict)
        # The base class casts state to the parameter's dtype, which would round the basis of a bf16 parameter.
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            if number in state_dict["state"]:
                self.state[parameter] = {
                    key: value.to(parameter.device, copy=True) if isinstance(value, Tensor) else value
                    for key, value in state_dict["state"][number].items()
                }
        self._stacks = {}

    def _stacks_with_gradients(self) -> list[_Stack]:
        """The parameters that have a gradient, in stacks; made anew when that set changes."""
        present = tuple(
            index
            for index, parameter in enumerate(parameter for group in self.param_groups for parameter in group["params"])
            if parameter.grad is not None
        )
        if present not in self._stacks:
            self._stacks = {present: self._make_stacks()}
        return self._stacks[present]

    def _make_stacks(self) -> list[_Stack]:
        members: dict[tuple[Any, ...], list[_Member]] = {}
        for group in self.param_groups:
            for name, parameter in _named(group):
                if parameter.grad is None:
                    continue
                if parameter.grad.is_sparse:
                    raise ValueError(f"BasisRotation takes dense gradients only; that of {name} is sparse")
                settings = (*group["betas"], group["eps"], group["source"], group["geometry"], group["covariance"])
                key = (*parameter.shape[-2:], parameter.dtype, parameter.device, *settings)
                members.setdefault(key, []).append(_Member(name, parameter, group))
        return [_Stack(same, self.state) for same in members.values()]


@dataclass
class _Member:
    """A parameter and the group it is in."""

    name: str
    parameter: Tensor
    group: dict[str, Any]

    @property
    def num_matrices(self) -> int:
        return math.prod(self.parameter.shape[:-2])


class _Stack:
    """Matrices of one shape, with their state in common tensors of which each parameter's state is a view."""

    def __init__(self, members: list[_Member], state: dict[Tensor, dict[str, Any]]) -> None:
        self.members = members
        self._state = state
        group, parameter = members[0].group, members[0].parameter
        self.beta1, self.beta2 = group["betas"]
        self.eps = group["eps"]
        self.source = group["source"]
        self.per_step_covariance = group["source"] == "2nd" and group["covariance"] == "step"
        self.dtype = torch.float64 if parameter.dtype == torch.float64 else torch.float32
        self.device = parameter.device
        rows, columns = parameter.shape[-2:]
        self.rotates_left = group["geometry"] == "bilateral" or rows < columns
        self.rotates_right = group["geometry"] == "bilateral" or rows >= columns
        self._sizes = [member.num_matrices for member in members]
        self._gather_state(rows, columns)

    def gradient(self) -> Tensor:
        """The gradients as one (N, m, n)."""
        return self._concatenate(member.parameter.grad for member in self.members if member.parameter.grad is not None)

    def check_finite(self, gradient: Tensor) -> None:
        """Raise if a gradient is not finite, naming the parameter."""
        if torch.isfinite(gradient).all():
            return
        for member, part in zip(self.members, torch.split(gradient, self._sizes), strict=True):
            if not torch.isfinite(part).all():
                raise ValueError(
                    f"the gradient of {member.name} {tuple(member.parameter.shape)} is not finite; nothing was updated"
                )

    def due(self) -> list[int]:
        """The matrices whose basis is renewed in the coming step."""
        found: list[int] = []
        first = 0
        for member, size in zip(self.members, self._sizes, strict=True):
            step, frequency = self._state[member.parameter]["step"] + 1, member.group["frequency"]
            if step == 1 or (frequency is not None and step % frequency == 0):
                found += range(first, first + size)
            first += size
        return found

    def update(self, gradient: Tensor) -> int:
        """One step of algorithm 1 for all matrices of the stack; returns how many refreshes failed."""
        due = self.due()
        for member in self.members:
            self._state[member.parameter]["step"] += 1
        if self.per_step_covariance:
            self._accumulate_covariances(gradient, slice(None))
        num_failed = self._refresh(gradient, due) if due else 0
        rotated = self._rotate(gradient)
        self.exp_avg.lerp_(rotated, 1.0 - self.beta1)
        self.exp_avg_sq.mul_(self.beta2).addcmul_(rotated, rotated, value=1.0 - self.beta2)
        steps = [self._state[member.parameter]["step"] for member in self.members]
        correction1 = self._per_matrix([1.0 - self.beta1**step for step in steps])
        correction2 = self._per_matrix([math.sqrt(1.0 - self.beta2**step) for step in steps])
        direction = self.exp_avg / correction1 / (self.exp_avg_sq.sqrt().div_(correction2).add_(self.eps))
        self._apply(self._rotate_back(direction))
        return num_failed

    def _refresh(self, gradient: Tensor, due: list[int]) -> int:
        """Eigenbasis-Estimation (algorithm 2) for the matrices `due`."""
        index: Any = slice(None) if len(due) == len(gradient) else torch.tensor(due, device=self.device)
        fresh = [place for place, step in enumerate(self._steps_of_matrices()) if step == 1]
        momentum = self._rotate_back(self.exp_avg)  # M_{t-1}, out of the old basis
        source = gradient if self.source == "2nd" else torch.lerp(momentum, gradient, 1.0 - self.beta1)
        if self.source == "2nd" and not self.per_step_covariance:
            self._accumulate_covariances(gradient, index)
        num_failed = 0
        if self.left is not None:
            num_failed += self._renew(self.left, self.covariance_left, source, index, fresh, dim=-2)
        if self.right is not None:
            num_failed += self._renew(self.right, self.covariance_right, source.mT, index, fresh, dim=-1)
        self.exp_avg.copy_(self._rotate(momentum))  # M_{t-1}, in the new one
        return num_failed

    def _renew(
        self, basis: Tensor, covariance: Tensor | None, source: Tensor, index: Any, fresh: list[int], dim: int
    ) -> int:
        """Renew one side's basis and carry the second moment along; `source` has that side as its rows."""
        current = covariance[index] if covariance is not None else source[index] @ source[index].mT
        new, order = followed_basis(current, basis[index])
        basis[index] = new
        shape = (-1, order.shape[-1], 1) if dim == -2 else (-1, 1, order.shape[-1])
        self.exp_avg_sq[index] = self.exp_avg_sq[index].take_along_dim(order.view(shape), dim=dim)
        if not fresh:
            return 0
        if covariance is not None:
            basis[fresh], num_failed = exact_basis(covariance[fresh])
        else:
            basis[fresh], num_failed = exact_left_basis(source[fresh])
        return num_failed

    def _accumulate_covariances(self, gradient: Tensor, index: Any) -> None:
        for covariance, matrix in ((self.covariance_left, gradient), (self.covariance_right, gradient.mT)):
            if covariance is not None:
                outer = matrix[index] @ matrix[index].mT
                covariance[index] = covariance[index].lerp_(outer, 1.0 - self.beta2)

    def _rotate(self, matrix: Tensor) -> Tensor:
        """U^T A V."""
        if self.left is not None:
            matrix = self.left.mT @ matrix
        return matrix @ self.right if self.right is not None else matrix

    def _rotate_back(self, matrix: Tensor) -> Tensor:
        """U A V^T."""
        if self.left is not None:
            matrix = self.left @ matrix
        return matrix @ self.right.mT if self.right is not None else matrix

    def _apply(self, direction: Tensor) -> None:
        """W <- (1 - lr weight_decay) W - lr direction."""
        for member, part in zip(self.members, torch.split(direction, self._sizes), strict=True):
            lr, weight_decay = float(member.group["lr"]), member.group["weight_decay"]
            weight = member.parameter if member.parameter.dtype == self.dtype else member.parameter.to(self.dtype)
            weight.mul_(1.0 - lr * weight_decay).add_(part.view_as(weight), alpha=-lr)
            if weight is not member.parameter:
                member.parameter.copy_(weight)

    def _gather_state(self, rows: int, columns: int) -> None:
        """Bring the members' state together; make it for those that have none."""
        second = self.source == "2nd"
        self.exp_avg = self._common("exp_avg", rows, columns)
        self.exp_avg_sq = self._common("exp_avg_sq", rows, columns)
        self.left = self._common("basis_left", rows, rows, identity=True) if self.rotates_left else None
        self.right = self._common("basis_right", columns, columns, identity=True) if self.rotates_right else None
        self.covariance_left = self._common("covariance_left", rows, rows) if self.rotates_left and second else None
        self.covariance_right = (
            self._common("covariance_right", columns, columns) if self.rotates_right and second else None
        )
        for member in self.members:
            self._state[member.parameter].setdefault("step", 0)

    def _common(self, key: str, rows: int, columns: int, *, identity: bool = False) -> Tensor:
        """One tensor (N, rows, columns) for the state `key` of all members, of which theirs become views."""
        parts = []
        for member in self.members:
            shape = (*member.parameter.shape[:-2], rows, columns)
            held = self._state[member.parameter].get(key)
            if held is None:
                held = torch.zeros(shape, dtype=self.dtype, device=self.device)
                if identity:
                    held.copy_(torch.eye(rows, dtype=self.dtype, device=self.device))
            parts.append(held)
        common = self._concatenate(parts)
        for member, part in zip(self.members, torch.split(common, self._sizes), strict=True):
            self._state[member.parameter][key] = part.view(*member.parameter.shape[:-2], rows, columns)
        return common

    def _concatenate(self, tensors: Iterable[Tensor]) -> Tensor:
        return torch.cat([tensor.reshape(-1, *tensor.shape[-2:]).to(self.dtype) for tensor in tensors])

    def _steps_of_matrices(self) -> Iterator[int]:
        for member, size in zip(self.members, self._sizes, strict=True):
            yield from [self._state[member.parameter]["step"]] * size

    def _per_matrix(self, values: list[float]) -> Tensor | float:
        """A number for each member, to be broadcast over its matrices."""
        if len(set(values)) == 1:
            return values[0]
        repeated = [value for value, size in zip(values, self._sizes, strict=True) for _ in range(size)]
        return torch.tensor(repeated, dtype=self.dtype, device=self.device).view(-1, 1, 1)


def _named(group: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    names = group.get("param_names") or [f"parameter {place}" for place in range(len(group["params"]))]
    return zip(names, group["params"], strict=True)


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}
