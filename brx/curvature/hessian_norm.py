"""The (1,1)-norm sum |H_ij| of a Hessian, from its products with Cauchy vectors (arXiv:2410.08198).

For z with independent standard Cauchy entries, (H z)_i is Cauchy with scale s_i = sum_j |H_ij|,
exactly. Each row's scale is estimated from n vectors; the sum over the rows is the norm. E|X|^(1/n)
= s^(1/n) / cos(pi / 2n) for X of scale s, so the geometric mean of n values of |X|, times cos(pi /
2n)^n, has the mean s: in one pass, with memory for a few numbers per row, and in one row the
relative deviation of a median, (pi / 2) / sqrt(n). Rows share their vectors and are not
independent, so the interval of a sum is from how much each vector moves each tensor's sum (the
estimator's influence function)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from brx.curvature.hessian import Vectors

Array = NDArray[np.float64]
# Powers of s_i to sum: the norm, and the squares that weigh stages in tau'
POWERS = (
    1,
    2,
)


def cauchy_vector(like: Vectors, seed: int, number: int) -> Vectors:
    """Standard Cauchy vector `number`: a function of (seed, number) alone, on the tensors' device,
    in their dtype."""
    state = np.random.SeedSequence((seed, number)).generate_state(1, np.uint64)
    generator = torch.Generator().manual_seed(int(state[0]) >> 1)
    return {
        # In float64 also for fp32, so that the tails are not cut short and both precisions see the
        # same vector.
        name: torch.empty(tensor.shape, dtype=torch.float64).cauchy_(generator=generator).to(tensor)
        for name, tensor in like.items()
    }


def below_resolution(product: Tensor) -> float:
    """The share of rows that rounding may have drowned: not zero, but below one unit of the largest
    entry."""
    unit = product.abs().max() * torch.finfo(product.dtype).eps
    return float(((product != 0) & (product.abs() < unit)).double().mean())


def membership(group_of: Sequence[str]) -> tuple[list[str], Array]:
    """The groups in order, and which of them each entry belongs to, ones and zeros (entries,
    groups)."""
    names = list(dict.fromkeys(group_of))
    return names, np.array(
        [[group == name for name in names] for group in group_of], dtype=np.float64
    )


@dataclass(frozen=True)
class Sums:
    """Sums over rows by group (tensor, block, ...), with what their errors need."""

    names: list[str]
    num_rows: list[int]
    sums: Array  # (2, groups): of s_i and of s_i^2
    # (2, n, groups): what each vector added to the sums; n times their variance is the mean square
    deviations: Array

    def grouped(self, group_of: Callable[[str], str]) -> Sums:
        names, member = membership([group_of(name) for name in self.names])
        num_rows = (np.array(self.num_rows) @ member).astype(int).tolist()
        return Sums(names, num_rows, self.sums @ member, self.deviations @ member)

    def covariance(self, power: int) -> Array:
        """Covariance of the groups' sums of s_i^power, (groups, groups)."""
        deviations = self.deviations[POWERS.index(power)]
        covariance: Array = (
            deviations.T @ deviations / (max(1, len(deviations) - 1) * len(deviations))
        )
        return covariance


class GeometricEstimate:
    """Corrected geometric means, kept up to date product by product in memory for two numbers per
    row.

    A row that is exactly zero in some products has scale zero in those: its estimate is the others'
    times their share."""

    def __init__(self, num_rows: Sequence[int], dtype: torch.dtype) -> None:
        self.num_rows = list(num_rows)  # entries of each tensor; their sum is d
        self.mean_log = torch.zeros(sum(num_rows), dtype=dtype)
        self.num_seen = torch.zeros(sum(num_rows), dtype=torch.int32)
        self.num_vectors = 0
        self.deviations: list[
            Tensor
        ] = []  # for each vector (2, tensors), relative to the tensor's sums

    def add(self, product: Tensor) -> None:  # H z (d,)
        size = product.abs()
        seen = size > 0
        innovation = torch.where(seen, size.log() - self.mean_log, 0.0)
        relative = self._deviation(innovation, seen)
        self.num_seen += seen
        self.mean_log += innovation / self.num_seen.clamp(min=1)
        self.num_vectors += 1
        # Welford's recursion: innovations scaled so have the sum of squares that deviations from
        # the final mean have.
        self.deviations.append(((self.num_vectors - 1) / self.num_vectors) ** 0.5 * relative)

    def _deviation(self, innovation: Tensor, seen: Tensor) -> Tensor:
        """d log(sum s_i^p) by tensor (2, tensors), from d log s_i, with the weights that were known
        before."""
        if self.num_vectors == 0:
            return torch.zeros(len(POWERS), len(self.num_rows), dtype=torch.float64)
        share = (self.num_seen.to(innovation) / self.num_vectors).clamp(min=1 / self.num_vectors)
        change = innovation / share + (seen.to(share) - share) / share
        relative = []
        for power in POWERS:
            weight = self.scales(power, corrected=False)
            relative.append(
                power * self._by_tensor(weight * change) / self._by_tensor(weight).clamp(min=1e-300)
            )
        return torch.stack(relative)

    def scales(self, power: int, *, corrected: bool = True) -> Tensor:
        """Estimates of s_i^power (d,). With the correction their mean is s_i^power, except for rows
        that are sometimes zero."""
        count = self.num_seen.double()
        scales = (power * self.mean_log.double()).exp() * (
            count / max(1, self.num_vectors)
        ) ** power
        if not corrected:
            return torch.where(count > 0, scales, 0.0)
        # E|X|^(p/n) = s^(p/n) / cos(pi p / 2n), and there is no such mean for n <= p.
        cosine = torch.cos(math.pi * power / (2 * count.clamp(min=power)))
        return torch.where(count > power, scales * cosine**count, 0.0)

    def sums(self, names: Sequence[str]) -> Sums:
        sums = torch.stack([self._by_tensor(self.scales(power)) for power in POWERS]).numpy()
        relative = torch.stack(self.deviations, dim=1).numpy()  # (2, n, tensors)
        return Sums(list(names), self.num_rows, sums, relative * sums[:, None, :])

    def _by_tensor(self, values: Tensor) -> Tensor:
        return torch.stack([part.sum() for part in torch.split(values, self.num_rows)])
