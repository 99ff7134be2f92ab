"""Methods of the study of causes (docs/protocol.md, 12): what makes an optimizer tolerate delay?

None of them is in the table of methods. A configuration names them by import path, and gives their
settings as arguments::

    optimizer: {method: "brx.methods.causes:TurnedRotation", lr: 1e-3, arguments: {theta: 0.3}}
"""

import math
from dataclasses import replace
from functools import cache
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from brx.errors import UserError
from brx.methods.method import Method
from brx.optim.basis_rotation import BasisRotation
from brx.optim.elementwise import above_noise
from brx.optim.matrix_batch import MatrixBatch, rotate
from brx.optim.options import Group
from brx.optim.parameter_state import Side
from brx.optim.reduced_precision import factor_rounding
from brx.optim.refresh import raise_second_moment, share_out_second_moment
from brx.optim.step_scalars import StepScalars

UNIFORM = "random"  # in place of an angle: an orthogonal matrix drawn uniformly


class StudyMethod(Method):
    """AdamW on everything but the matrices of attention and MLP.

    Args:
        beta1, beta2, eps, weight_decay: as in AdamW. A subclass uses those that it needs for the
            matrices too.
    """

    why = "the study compares steps on the matrices of attention and MLP, with AdamW on the rest"

    def __init__(
        self,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        _require(0 <= beta1 < 1, f"beta1 must be in [0, 1), got {beta1}")
        _require(0 <= beta2 < 1, f"beta2 must be in [0, 1), got {beta2}")
        _require(weight_decay >= 0, f"weight_decay must not be negative, got {weight_decay}")
        self.beta1 = beta1
        self.beta2 = beta2
        self.eps = eps
        self.weight_decay = weight_decay

    def adamw(self, groups: list[Group]) -> Optimizer:
        return AdamW(
            groups,
            lr=self.lr,
            betas=(self.beta1, self.beta2),
            eps=self.eps,
            weight_decay=self.weight_decay,
            fused=True,
        )

    @property
    def rotation_options(self) -> dict[str, Any]:
        """The arguments that the variants of `BasisRotation` below have in common."""
        return {"eps": self.eps, "weight_decay": self.weight_decay}


class TurnedRotation(StudyMethod):
    """Basis rotation in bases that are turned away from the eigenbasis.

    Args:
        theta: the typical angle, in radians; 0 for basis rotation itself; "random" for a rotation
            drawn uniformly.
        frequency: iterations between refreshes.
        options: as in `StudyMethod`.
    """

    summary = "basis rotation in bases turned away from the eigenbasis by a fixed rotation"
    source = "docs/protocol.md, section 12"
    equation = "as basis-rotation, with U R instead of U and V R' instead of V, R = exp(theta K)"
    gets: ClassVar = {"TurnedBasisRotation": "the matrices", "AdamW": "the rest"}

    def __init__(
        self, theta: float | Literal["random"] = 0.0, frequency: int = 10, **options: float
    ) -> None:
        super().__init__(**options)
        is_angle = isinstance(theta, int | float) and math.isfinite(theta) and theta >= 0
        _require(
            is_angle or theta == UNIFORM,
            f"theta must be an angle of at least 0, or {UNIFORM}, got {theta!r}",
        )
        self.theta = theta
        self.frequency = frequency

    def matrices(self, groups: list[Group]) -> Optimizer:
        return TurnedBasisRotation(
            groups,
            lr=self.lr,
            betas=(self.beta1, self.beta2),
            frequency=self.frequency,
            theta=self.theta,
            **self.rotation_options,
        )


class RotatedLion(StudyMethod):
    """Sign descent with Lion's momentum in the eigenbasis.

    Args:
        lion_beta1: the weight of the momentum in the direction of a step (arXiv:2302.06675).
        lion_beta2: the decay of the momentum.
        frequency: iterations between refreshes.
        options: as in `StudyMethod`; `beta2` is also the decay of the covariances.
    """

    summary = "Lion's step taken in the eigenbasis of basis rotation"
    source = "Chen et al. 2023 (arXiv:2302.06675); docs/protocol.md, section 12"
    equation = "W <- (1 - lr wd) W - lr U sign(beta1 U^T M V + (1 - beta1) U^T G V) V^T"
    gets: ClassVar = {"LionInEigenbasis": "the matrices", "AdamW": "the rest"}

    def __init__(
        self,
        lion_beta1: float = 0.9,
        lion_beta2: float = 0.99,
        frequency: int = 10,
        **options: float,
    ) -> None:
        super().__init__(**options)
        _require(0 <= lion_beta1 < 1, f"lion_beta1 must be in [0, 1), got {lion_beta1}")
        _require(0 <= lion_beta2 < 1, f"lion_beta2 must be in [0, 1), got {lion_beta2}")
        self.lion_beta1 = lion_beta1
        self.lion_beta2 = lion_beta2
        self.frequency = frequency

    def matrices(self, groups: list[Group]) -> Optimizer:
        return LionInEigenbasis(
            groups,
            lr=self.lr,
            betas=(self.lion_beta2, self.beta2),
            frequency=self.frequency,
            weight_of_momentum=self.lion_beta1,
            **self.rotation_options,
        )


class TurnedBasisRotation(BasisRotation):
    """BasisRotation whose bases are U R and V R' for fixed orthogonal R and R' (`fixed_rotation`).

    Up to the first refresh the bases are the identity, as in BasisRotation. `state` has the turned
    bases.

    It runs only on a CPU. On a GPU, a step with bad gradients is computed nevertheless and must
    leave everything as it was; the turns do not.

    Args:
        theta: as in `TurnedRotation`.
        options: as in `BasisRotation`.
    """

    def __init__(
        self, params: Any, *, theta: float | Literal["random"] = 0.0, **options: Any
    ) -> None:
        self.theta = theta
        super().__init__(params, **options)

    def _renew_bases(
        self,
        batch: MatrixBatch,
        gradient: Tensor,  # (b, m, n)
        exact: bool,
    ) -> None:
        if self.theta == 0:
            super()._renew_bases(batch, gradient, exact)
            return
        if batch.bad is not None:
            raise ValueError("turned bases run only on a CPU: set runtime.device=cpu")
        second_moment = batch.state["exp_avg_sq"].clone()
        if not exact:  # before the first refresh the basis is the identity, which is not turned
            self._turn(batch, back=True)
        super()._renew_bases(batch, gradient, exact)
        self._turn(batch)
        # The second moment of a turned column stays with it. In the first bases, there are no such
        # columns yet, and it is shared out.
        batch.state["exp_avg_sq"].copy_(second_moment)
        if exact:
            share_out_second_moment(batch)
        raise_second_moment(batch)

    def _turn(self, batch: MatrixBatch, *, back: bool = False) -> None:
        """B <- B R in all bases, or with `back` B <- B R^T. The momentum stays the same in the
        original coordinates."""
        momentum = rotate(batch, batch.matrices("exp_avg"), back=True)  # M (b, m, n)
        for side in batch.sides:
            basis = batch.matrices(f"{side}_basis")  # (b, m, m), or (b, n, n)
            turn = fixed_rotation(basis.shape[-1], side, self.theta).to(basis)
            if back:
                turn = turn.mT
            basis.copy_(basis @ turn)
        batch.matrices("exp_avg").copy_(rotate(batch, momentum))


@cache
def fixed_rotation(size: int, side: Side, theta: float | Literal["random"]) -> Tensor:
    """An orthogonal matrix (size, size) in float64, the same in every run: exp(theta K), or for
    "random" one drawn uniformly.

    K is skew-symmetric with normal entries, scaled so that the root mean square of its eigenvalues'
    magnitudes is 1. Thus theta is the typical angle, in radians, by which a plane turns."""
    seed = 2 * size  # each size and side has its own
    if side == "left":
        seed += 1
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(size, size, dtype=torch.float64, generator=generator)
    if theta == UNIFORM:
        orthogonal: Tensor
        orthogonal, upper = torch.linalg.qr(normal)
        # Uniform only if the diagonal of the other factor is positive (arXiv:math-ph/0609050).
        orthogonal *= upper.diagonal().sign()
        return orthogonal
    skew = normal - normal.mT
    # The squared magnitudes of the eigenvalues add up to the squared Frobenius norm.
    skew *= math.sqrt(size) / torch.linalg.matrix_norm(skew)
    turn: Tensor = torch.linalg.matrix_exp(theta * skew)
    return turn


class LionInEigenbasis(BasisRotation):
    """Lion's step in the bases of BasisRotation.

    The second moment serves only to recognize rounding noise, whose sign must not become a step
    (docs/methods.md).

    Args:
        weight_of_momentum: Lion's beta1, the weight of the momentum in the direction of a step.
        options: as in `BasisRotation`. `betas` are the decay of Lion's momentum and the decay of
            the covariances.
    """

    def __init__(self, params: Any, *, weight_of_momentum: float = 0.9, **options: Any) -> None:
        self.weight_of_momentum = weight_of_momentum
        super().__init__(params, **options)

    def _take_step(
        self,
        batch: MatrixBatch,
        gradient: Tensor,  # (b, m, n)
        scalars: StepScalars,
    ) -> None:
        # BasisRotation limits the entries of a rotated step. Here none is larger than lr.
        super()._take_step(batch, gradient, replace(scalars, limit=math.inf))

    def _rotated_adam(
        self,
        batch: MatrixBatch,
        rotated_gradient: Tensor,  # U^T G V (b, m, n)
        scalars: StepScalars,
    ) -> Tensor:
        momentum = batch.matrices("exp_avg")  # before this step (b, m, n)
        direction = torch.lerp(rotated_gradient, momentum, self.weight_of_momentum).sign_()
        super()._rotated_adam(batch, rotated_gradient, scalars)  # only to update the moments
        rounding = factor_rounding(batch.options["rotation_precision"], direction.dtype)
        damping = above_noise(batch.matrices("exp_avg_sq"), rounding)
        return direction.mul_(damping).mul_(-scalars.lr)


def _require(is_right: bool, rule: str) -> None:
    """UserError that states the rule, unless an argument is right."""
    if not is_right:
        raise UserError(f"optimizer.arguments: {rule}")
