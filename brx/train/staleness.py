"""Measures, while a run trains, how much gradients, updates and bases change within the delay.

The paper argues that, in the rotated space, updates stay similar over tau iterations (its appendix
on delayed updates). `logging.staleness_every: N` measures every N iterations whether they do.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from brx.methods.groups import matrix_names
from brx.optim.basis_rotation import BasisRotation
from brx.pipeline.versions import StageVersions

Measures = dict[str, list[float | None]]
"""By name of the measure, a number per stage; None where a stage has none (yet)."""


class StalenessProbe:
    """Measures at updates whose number is a multiple of N. All stages have to be on this device.

    Each measurement takes one more forward and backward pass of the update's micro-batches. The
    trajectory stays the same. The engine shows the probe its passes and updates (`Watcher`).

    Args:
        stages: all stages.
        optimizers: all optimizers; some of them may have bases.
        every: N.
        fresh_gradients: the gradients of update t at the newest weights, by stage, in the order of
            `newest` (`Engine.fresh_gradients`).

    `take(t)` returns, per stage:

    - `stage_gradient_cosine`: cosine of the gradient that is applied (as stash mode and gradient
      rule make it) and the fresh gradient, which is the mean over the same micro-batches at the
      newest weights of all stages.
    - `stage_update_cosine`: cosine of the updates t and t - ceil(tau / M). The latter is the oldest
      update that the gradient of update t does not contain. None where tau = 0.
    - `stage_weight_distance`: |newest weights - weights of the forward pass| / |newest weights|,
      the mean over the update's micro-batches.
    - `stage_sign_changes`: the share of the entries of attention and MLP matrices whose update has
      another sign in iteration t than in t - 1. `stage_rotated_sign_changes`: the same in the
      coordinates of the basis, for matrices that have one.
    - `stage_basis_angle`: mean angle in degrees by which the refresh of iteration t turned the
      basis vectors. None if there was no refresh; so N is best a multiple of `optimizer.frequency`.
    """

    def __init__(
        self,
        stages: Sequence[StageVersions],
        optimizers: Sequence[Optimizer],
        every: int,
        fresh_gradients: Callable[[int], list[list[Tensor]]],
    ) -> None:
        self.every = every
        self._stages = list(stages)
        # The optimizer of each parameter that may have bases.
        self._rotating: dict[Tensor, BasisRotation] = {}
        for optimizer in optimizers:
            if isinstance(optimizer, BasisRotation):
                for group in optimizer.param_groups:
                    self._rotating |= dict.fromkeys(group["params"], optimizer)
        self._fresh_gradients = fresh_gradients
        # By stage and iteration, while needed: the update of each weight.
        self._updates: list[dict[int, list[Tensor]]] = [{} for _ in stages]
        self._measures: dict[int, Measures] = {}
        # The distances of the current update so far: by micro-batch, and by stage.
        self._distances: list[list[float]] = []
        self._bases: list[list[dict[str, Tensor]]] = []  # before the update, by stage and weight

    def before_forward(self, micro_batch: int) -> None:
        """Measure the distance of the weights in use, for an update that is measured."""
        if self._stages[0].delay.update_of(micro_batch) % self.every == 0:
            self._distances.append([_weight_distance(stage) for stage in self._stages])

    def before_step(self, t: int) -> None:
        """Compare the update's gradients with fresh ones, and keep the bases."""
        for stage in self._stages:
            if self._is_needed(stage, t):
                stage.remember()
        if t % self.every:
            return
        gradient_cosines: list[float | None] = []
        for stage, fresh in zip(self._stages, self._fresh_gradients(t), strict=True):
            delayed = [weight.grad for weight in stage.newest.values()]
            gradient_cosines.append(_cosine(delayed, fresh))
        mean_distances: list[float | None] = []
        for distances in zip(*self._distances, strict=True):
            mean_distances.append(sum(distances) / len(distances))
        self._measures[t] = {
            "stage_gradient_cosine": gradient_cosines,
            "stage_weight_distance": mean_distances,
        }
        self._distances = []
        self._bases = [
            [self._bases_of(weight) for weight in stage.newest.values()] for stage in self._stages
        ]

    def after_step(self, t: int) -> None:
        """Compare the update with earlier ones, and the bases with those before it."""
        for stage, updates in zip(self._stages, self._updates, strict=True):
            if self._is_needed(stage, t):
                updates[t] = stage.last_update()
        if t % self.every == 0:
            for name, numbers in self._measures_of_update(t).items():
                if any(number is not None for number in numbers):
                    self._measures[t][name] = numbers
            self._bases = []
        for stage, updates in zip(self._stages, self._updates, strict=True):
            for past in list(updates):
                if not self._is_needed(stage, past, after=t):
                    del updates[past]

    def _measures_of_update(self, t: int) -> Measures:
        """The measures that compare update t with earlier updates and bases."""

        def as_it_is(weight: Tensor, update: Tensor) -> Tensor:
            return update

        stages = range(len(self._stages))
        return {
            "stage_update_cosine": [self._update_cosine(k, t) for k in stages],
            "stage_sign_changes": [self._sign_changes(k, t, as_it_is) for k in stages],
            "stage_rotated_sign_changes": [self._sign_changes(k, t, self._rotate) for k in stages],
            "stage_basis_angle": [self._basis_angle(k) for k in stages],
        }

    def take(self, t: int) -> Measures:
        """The measures of update t, once; empty if it was not measured."""
        return self._measures.pop(t, {})

    def stage_state(self, stage: StageVersions) -> dict[str, Any]:
        """The kept updates, so that a resumed run measures what an uninterrupted one does."""
        updates = self._updates[self._stages.index(stage)]
        return {str(t): update for t, update in updates.items()}

    def load_stage_state(self, stage: StageVersions, state: dict[str, Any]) -> None:
        """Continue from what `stage_state` gave for a stage."""
        updates: dict[int, list[Tensor]] = {}
        for t, update in state.items():
            updates[int(t)] = [tensor.to(stage.device) for tensor in update]
        self._updates[self._stages.index(stage)] = updates

    def _is_needed(self, stage: StageVersions, t: int, after: int = 0) -> bool:
        """Whether an update is compared after iteration `after`: because it is measured itself, is
        the one before a measured update, or is a delay older than one."""
        for later in (0, 1, stage.delay.max_tau_updates):
            measured = t + later
            if measured % self.every == 0 and measured > after:
                return True
        return False

    def _update_cosine(self, index: int, t: int) -> float | None:
        updates = self._updates[index]
        lag = self._stages[index].delay.max_tau_updates
        if lag == 0 or t - lag not in updates:
            return None
        return _cosine(updates[t], updates[t - lag])

    def _sign_changes(
        self, index: int, t: int, in_basis: Callable[[Tensor, Tensor], Tensor | None]
    ) -> float | None:
        """The share of the matrices' entries whose sign differs between the updates t - 1 and t.

        Args:
            in_basis: from a weight and its update, the update in the coordinates to look at; None
                for a matrix that does not count.
        """
        stage, updates = self._stages[index], self._updates[index]
        if t - 1 not in updates:
            return None
        # Embeddings do not count, as their rows hardly move. The matrices are the same for all
        # methods, although not all methods rotate the same ones.
        matrices = matrix_names([stage])
        num_changed = num_entries = 0
        columns = zip(stage.newest.items(), updates[t - 1], updates[t], strict=True)
        for (name, weight), before, now in columns:
            if name not in matrices:
                continue
            earlier, later = in_basis(weight, before), in_basis(weight, now)
            if earlier is not None and later is not None:
                num_changed += int((earlier.sign() != later.sign()).sum())
                num_entries += earlier.numel()
        return num_changed / num_entries if num_entries else None

    def _rotate(
        self,
        weight: Tensor,  # (m, n)
        update: Tensor,  # (m, n)
    ) -> Tensor | None:
        """U^T update V in the newest bases; None for a weight without any."""
        bases = self._bases_of(weight)
        if not bases:
            return None
        if "left" in bases:
            update = bases["left"].mT.to(update.dtype) @ update
        if "right" in bases:
            update = update @ bases["right"].to(update.dtype)
        return update

    def _bases_of(self, weight: Tensor) -> dict[str, Tensor]:
        """Copies of a weight's bases by side: `left` is U, (m, m), and `right` is V, (n, n)."""
        if weight not in self._rotating:
            return {}
        state = self._rotating[weight].state.get(weight, {})
        bases = {}
        for side in ("left", "right"):
            if f"{side}_basis" in state:
                bases[side] = state[f"{side}_basis"].clone()
        return bases

    def _basis_angle(self, index: int) -> float | None:
        """Mean angle in degrees between a stage's bases before and after the update, over those
        that a refresh has changed."""
        angles = []
        newest = self._stages[index].newest.values()
        for weight, before in zip(newest, self._bases[index], strict=True):
            for side, new in self._bases_of(weight).items():
                if side in before and not torch.equal(before[side], new):
                    angles.append(mean_angle_degrees(before[side], new))
        return sum(angles) / len(angles) if angles else None


def mean_angle_degrees(
    old: Tensor,  # (..., m, m)
    new: Tensor,  # (..., m, m)
) -> float:
    """Mean angle, 0 to 90 degrees, between each column of an orthogonal basis `old` and the column
    of `new` that is nearest to it. A column and its negative are the same."""
    cosines = old.mT.double() @ new.double()  # row: column of `old`, column: column of `new`
    nearest = cosines.abs().amax(-1).clamp(max=1.0)
    return float(torch.rad2deg(torch.arccos(nearest)).mean())


def _weight_distance(stage: StageVersions) -> float:
    """|newest weights - weights in use| / |newest weights|."""
    if stage.delay.tau == 0:
        return 0.0
    newest = [weight.detach() for weight in stage.newest.values()]
    used = [weight.detach().to(now.dtype) for weight, now in zip(stage.in_use, newest, strict=True)]
    return _norm(torch._foreach_sub(newest, used)) / max(_norm(newest), 1e-30)


def _norm(tensors: Sequence[Tensor]) -> float:
    """The norm of all tensors as one vector; 0 without tensors."""
    if not tensors:
        return 0.0
    norms = torch.stack(torch._foreach_norm(list(tensors)))
    return float(torch.linalg.vector_norm(norms.double()))


def _cosine(first: Sequence[Tensor | None], second: Sequence[Tensor | None]) -> float | None:
    """The cosine of two lists of tensors, each taken as one vector; None if one of them is zero or
    not finite. A pair with a None is left out."""
    products: list[float] = []
    first_counted: list[Tensor] = []
    second_counted: list[Tensor] = []
    for one, other in zip(first, second, strict=True):
        if one is not None and other is not None:
            products.append(float((one.detach().double() * other.detach().double()).sum()))
            first_counted.append(one.detach())
            second_counted.append(other.detach())
    norms = _norm(first_counted) * _norm(second_counted)
    return sum(products) / norms if norms > 0 and math.isfinite(norms) else None
