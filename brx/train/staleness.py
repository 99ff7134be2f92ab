"""Why delay costs what it costs, while a run trains: gradients, updates and bases compared over the
delay.

The paper's argument is that updates stay alike over tau iterations in the rotated space (its
appendix on delayed updates); `logging.staleness_every: N` measures every N iterations whether they
do."""

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
"""By name, a number per stage; None where there is none (yet)."""


class StalenessProbe:
    """Measures around the updates that are multiples of N; on one device, which holds all stages.

    Each takes one more forward and backward pass of its micro-batches. Nothing of it changes the
    trajectory. `fresh_gradients` gives those of update t at the newest weights, by stage, in the
    order of `newest`.

    `take(t)` gives, per stage:

    - `stage_gradient_cosine`: of the gradient that is applied (as the stash mode and the method's
      gradient rule make it) and of the fresh one, the mean over the same micro-batches at the
      newest weights of all stages.
    - `stage_update_cosine`: of the updates t and t - ceil(tau / M), the oldest update that a
      gradient of update t knows nothing of. None where tau = 0.
    - `stage_weight_distance`: norm of (newest - the forward pass's weights) over that of the
      newest, the mean over the update's micro-batches.
    - `stage_sign_changes`: of the entries of the attention and MLP matrices, the share whose update
      changes its sign from t - 1 to t; `stage_rotated_sign_changes` in the coordinates of the
      basis, of the matrices that have one.
    - `stage_basis_angle`: mean angle in degrees that the basis vectors turned in the refresh of
      this iteration; None if it had none, so N is best a multiple of `optimizer.frequency`.
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
        self._rotating = {
            parameter: optimizer
            for optimizer in optimizers
            if isinstance(optimizer, BasisRotation)
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        self._fresh_gradients = fresh_gradients
        # By stage and iteration, while needed
        self._updates: list[dict[int, list[Tensor]]] = [{} for _ in stages]
        self._measures: dict[int, Measures] = {}
        # For each micro-batch of the update so far: the distance of each stage.
        self._distances: list[list[float]] = []
        self._bases: list[list[dict[str, Tensor]]] = []  # before the update, by stage and weight

    def before_forward(self, micro_batch: int) -> None:
        if self._stages[0].delay.update_of(micro_batch) % self.every == 0:
            self._distances.append([_weight_distance(stage) for stage in self._stages])

    def before_step(self, t: int) -> None:
        for stage in self._stages:
            if self._is_needed(stage, t):
                stage.remember()
        if t % self.every:
            return
        delayed = [[weight.grad for weight in stage.newest.values()] for stage in self._stages]
        self._measures[t] = {
            "stage_gradient_cosine": [
                _cosine(used, fresh)
                for used, fresh in zip(delayed, self._fresh_gradients(t), strict=True)
            ],
            "stage_weight_distance": [
                sum(stage) / len(stage) for stage in zip(*self._distances, strict=True)
            ],
        }
        self._distances = []
        self._bases = [
            [self._bases_of(weight) for weight in stage.newest.values()] for stage in self._stages
        ]

    def after_step(self, t: int) -> None:
        for stage, updates in zip(self._stages, self._updates, strict=True):
            if self._is_needed(stage, t):
                updates[t] = stage.last_update()
        if t % self.every == 0:
            stages = range(len(self._stages))
            measures: Measures = {
                "stage_update_cosine": [self._update_cosine(index, t) for index in stages],
                "stage_sign_changes": [
                    self._sign_changes(index, t, lambda weight, update: update) for index in stages
                ],
                "stage_rotated_sign_changes": [
                    self._sign_changes(index, t, self._rotate) for index in stages
                ],
                "stage_basis_angle": [self._basis_angle(index) for index in stages],
            }
            self._measures[t] |= {
                name: found for name, found in measures.items() if any(n is not None for n in found)
            }
            self._bases = []
        for stage, updates in zip(self._stages, self._updates, strict=True):
            for past in [past for past in updates if not self._is_needed(stage, past, after=t)]:
                del updates[past]

    def take(self, t: int) -> Measures:
        return self._measures.pop(t, {})

    def stage_state(self, stage: StageVersions) -> dict[str, Any]:
        """The kept updates, so that a resumed run measures what an uninterrupted one does."""
        return {str(t): update for t, update in self._updates[self._stages.index(stage)].items()}

    def load_stage_state(self, stage: StageVersions, state: dict[str, Any]) -> None:
        self._updates[self._stages.index(stage)] = {
            int(t): [tensor.to(stage.device) for tensor in update] for t, update in state.items()
        }

    def _is_needed(self, stage: StageVersions, t: int, after: int = 0) -> bool:
        """Whether update t is one to measure after an iteration, the one before it, or the one a
        lag before it."""
        measured = (t + later for later in (0, 1, stage.delay.most_tau_updates))
        return any(at % self.every == 0 and at > after for at in measured)

    def _update_cosine(self, index: int, t: int) -> float | None:
        updates, lag = self._updates[index], self._stages[index].delay.most_tau_updates
        return _cosine(updates[t], updates[t - lag]) if lag and t - lag in updates else None

    def _sign_changes(
        self, index: int, t: int, in_basis: Callable[[Tensor, Tensor], Tensor | None]
    ) -> float | None:
        """The share of the matrices' entries whose sign differs between the updates t - 1 and
        t."""
        updates, newest = self._updates[index], self._stages[index].newest
        matrices = matrix_names([self._stages[index]])
        if t - 1 not in updates:
            return None
        changed = total = 0
        for (name, weight), before, now in zip(
            newest.items(), updates[t - 1], updates[t], strict=True
        ):
            if name not in matrices:
                # Embedding rows hardly move, and not all methods rotate the same matrices.
                continue
            earlier, later = in_basis(weight, before), in_basis(weight, now)
            if earlier is not None and later is not None:
                changed += int((earlier.sign() != later.sign()).sum())
                total += earlier.numel()
        return changed / total if total else None

    def _rotate(self, weight: Tensor, update: Tensor) -> Tensor | None:
        """U^T update V in the newest bases."""
        bases = self._bases_of(weight)
        if "left" in bases:
            update = bases["left"].mT.to(update.dtype) @ update
        if "right" in bases:
            update = update @ bases["right"].to(update.dtype)
        return update if bases else None

    def _bases_of(self, weight: Tensor) -> dict[str, Tensor]:
        state = self._rotating[weight].state.get(weight, {}) if weight in self._rotating else {}
        return {
            side: state[f"{side}_basis"].clone()
            for side in ("left", "right")
            if f"{side}_basis" in state
        }

    def _basis_angle(self, index: int) -> float | None:
        angles = []
        for weight, before in zip(
            self._stages[index].newest.values(), self._bases[index], strict=True
        ):
            for side, new in self._bases_of(weight).items():
                if side in before and not torch.equal(before[side], new):
                    angles.append(mean_angle_degrees(before[side], new))
        return sum(angles) / len(angles) if angles else None


def mean_angle_degrees(old: Tensor, new: Tensor) -> float:
    """Between each column of one orthogonal basis (..., m, m) and the nearest, up to sign, of
    another: 0 to 90."""
    cosines = (old.mT.double() @ new.double()).abs().amax(-1).clamp(max=1.0)
    return float(torch.rad2deg(torch.arccos(cosines)).mean())


def _weight_distance(stage: StageVersions) -> float:
    """Norm of (newest weights - those in use), over the norm of the newest."""
    if stage.delay.tau == 0:
        return 0.0
    newest = [weight.detach() for weight in stage.newest.values()]
    used = [weight.detach().to(now.dtype) for weight, now in zip(stage.in_use, newest, strict=True)]
    return _norm(torch._foreach_sub(newest, used)) / max(_norm(newest), 1e-30)


def _norm(tensors: Sequence[Tensor]) -> float:
    return float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(tensors))).double()))


def _cosine(first: Sequence[Tensor | None], second: Sequence[Tensor | None]) -> float | None:
    """The cosine of two lists of tensors as vectors; None where one of them is zero."""
    pairs = [
        (a.detach(), b.detach())
        for a, b in zip(first, second, strict=True)
        if a is not None and b is not None
    ]
    product = sum(float((a.double() * b.double()).sum()) for a, b in pairs)
    norms = _norm([a for a, _ in pairs]) * _norm([b for _, b in pairs])
    return product / norms if norms > 0 and math.isfinite(norms) else None
