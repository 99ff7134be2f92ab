"""Adam in the Hessian's Kronecker eigenbasis (the paper's algorithms 1 and 2)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw
from torch.optim.optimizer import ParamsT

from brx.optim.eigenbasis import (
    covariance_product,
    eigenvectors,
    left_singular_vectors,
    renew_eigenbasis,
    select_columns,
    select_rows,
)
from brx.optim.matrix_batch import Group, MatrixBatch, stack_state

Side = Literal["left", "right"]

BATCH_BYTES = {"cpu": 2**20, "cuda": 2**28}
"""Size at which a batch of matrices is full: a processor's cache on the CPU, enough to fill the device elsewhere."""


class BasisRotation(Optimizer):
    """Adam that takes its steps in an estimate of the Hessian's eigenbasis (algorithm 1).

    For a weight matrix W (m, n) with gradient G and orthogonal bases U (m, m), V (n, n)::

        M <- beta1 M + (1 - beta1) G
        if due: U, V <- eigenbasis estimation (algorithm 2), before the update is taken
        v <- beta2 v + (1 - beta2) (U^T G V)^2
        W <- (1 - lr weight_decay) W - lr U [ m / (sqrt(v^) + eps) ] V^T,   m = U^T M V / (1 - beta1^t)

    with v^ = v / (1 - beta2^t). A parameter of more than two dimensions is a batch of matrices in its last two, each with
    its own bases (the experts of a mixture). The arithmetic is float64 for float64 parameters and float32 for all others.

    A matrix is due at its first update and at every update t with t mod frequency = 0. The first time, its basis is exact
    (`eigh`; singular vectors for source "1st"; the identity for a zero gradient); later it takes one power iteration and
    QR. A decomposition that fails, in float64 too, leaves the basis as it was and counts in `num_failed_refreshes`.

    Args:
        params: tensors, named tensors or parameter groups, of at least two dimensions each.
        lr: learning rate.
        betas: decay of the momentum, and of the second moment and the covariances.
        eps: added to the root of the second moment.
        weight_decay: decoupled, as in AdamW.
        source: "2nd" takes eigenvectors of the averages of G G^T and G^T G, "1st" of M M^T and M^T M (no extra moments).
        geometry: "bilateral" rotates both sides, "unilateral" only the smaller one (m < n: U, else V).
        frequency: updates between two refreshes; None for never again after the first.
        covariance: "refresh" lets G G^T into its average at refreshes only (algorithm 2), "step" at every step.
        staggered: spreads the refreshes of a group's matrices evenly over the interval, for even step times.

    Every option may differ by group. The state of a parameter: `step`; `exp_avg` and `exp_avg_sq`, both in the rotated
    space; `left_basis` and `right_basis` (U, V), `left_covariance` and `right_covariance`, as far as the
    options ask for them; `num_failed_refreshes`.

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
        frequency: int | None = 10,
        covariance: Literal["refresh", "step"] = "refresh",
        staggered: bool = False,
    ) -> None:
        self._batches: list[MatrixBatch] | None = None
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "source": source,
                "geometry": geometry,
                "frequency": frequency,
                "covariance": covariance,
                "staggered": staggered,
            },
        )

    @property
    def num_failed_refreshes(self) -> int:
        """How often a matrix kept its old basis because its decomposition failed."""
        return sum(int(state["num_failed_refreshes"]) for state in self.state.values())

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update of every parameter that has a gradient.

        Args:
            closure: computes the loss anew and returns it.

        Raises:
            ValueError: a gradient is sparse, or is not finite or too large to be squared; nothing has been changed then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_gradients()
        for batch in self._with_gradients():
            gradient = batch.gradients()
            self._refresh_due(batch, gradient)
            update = self._rotated_adam(batch, rotate_in(batch, gradient))
            decays = [1 - group["lr"] * group["weight_decay"] for group in batch.groups]
            batch.add_to_weights(rotate_out(batch, update), decays)
        return loss

    def _rotated_adam(self, batch: MatrixBatch, rotated_gradient: Tensor) -> Tensor:
        """The moments' recursions in the rotated space, and the update -lr m^ / (sqrt(v^) + eps) there (b, m, n).

        Between refreshes U^T M V obeys the recursion of M itself, so M needs no rotation of its own. It is torch's
        fused kernel that does it, on a weight of zero.
        """
        update = torch.zeros_like(batch.state["exp_avg"])
        gradients = rotated_gradient.view_as(update)
        beta1, beta2 = batch.options["betas"]
        for lr, part in batch.parts(lambda place: batch.groups[place]["lr"]):
            adamw(
                list(update[part].unbind()),
                list(gradients[part].unbind()),
                *(list(batch.state[name][part].unbind()) for name in ("exp_avg", "exp_avg_sq")),
                [],
                list(batch.state["step"][part].unbind()),
                fused=True,
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=lr,
                weight_decay=0.0,
                eps=batch.options["eps"],
                maximize=False,
            )
        return update.flatten(0, -3)

    def _refresh_due(self, batch: MatrixBatch, gradient: Tensor) -> None:
        """Renew the bases of the matrices that are due at this update (algorithm 1, lines 5 to 7)."""
        gradients = gradient.view_as(batch.state["exp_avg"])
        for (first, due), part in batch.parts(lambda place: _first_and_due(batch, place)):
            matrices, part_gradient = batch[part], gradients[part].flatten(0, -3)
            if due or matrices.options["covariance"] == "step":
                _accumulate_covariances(matrices, part_gradient)
            if due:
                self._estimate_eigenbasis(matrices, part_gradient, first)

    def _estimate_eigenbasis(self, batch: MatrixBatch, gradient: Tensor, first: bool) -> None:
        """Algorithm 2; the moments are carried over to the new bases.

        Args:
            batch: matrices that are all due.
            gradient: theirs (b, m, n).
            first: whether they have no basis yet.
        """
        momentum = rotate_out(batch, batch.matrices("exp_avg"))  # M_{t-1}
        second_moment = batch.matrices("exp_avg_sq")
        beta1, _ = batch.options["betas"]
        for side in sides(batch.options["geometry"], gradient.shape):
            basis = batch.matrices(f"{side}_basis")
            if batch.options["source"] == "2nd":
                covariance = batch.matrices(f"{side}_covariance")
                exact, product = lambda c=covariance: eigenvectors(c), lambda c=covariance, b=basis: c @ b
            else:
                factor = seen_from(side, torch.lerp(momentum, gradient, 1 - beta1))  # M_t
                exact = lambda f=factor: left_singular_vectors(f)
                product = lambda f=factor, b=basis: covariance_product(f, b)
            if first:
                renewed, valid = exact()
            else:
                renewed, order, valid = renew_eigenbasis(product(), basis)
                select = select_rows if side == "left" else select_columns
                second_moment.copy_(select(second_moment, order))
            basis.copy_(renewed)
            failures = (~valid).view(len(batch), -1).sum(dim=1)
            batch.state["num_failed_refreshes"].add_(failures)
        batch.matrices("exp_avg").copy_(rotate_in(batch, momentum))
