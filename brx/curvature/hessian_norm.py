"""Estimates the (1,1)-norm of a Hessian, sum |H_ij|, from its products with Cauchy vectors
(arXiv:2410.08198).

For z with independent standard Cauchy entries, (H z)_i is Cauchy with scale s_i = sum_j |H_ij|,
exactly. Each row's scale is estimated from n vectors; the sum over the rows is the norm.

For X of scale s,

    E|X|^(1/n) = s^(1/n) / cos(pi / 2n)

so the geometric mean of n values of |X|, times cos(pi / 2n)^n, has the mean s. It needs one pass
over the vectors and memory for a few numbers per row. In one row, its relative standard deviation
is the same as for a median, (pi / 2) / sqrt(n).

All rows see the same vectors, so they are not independent. The standard error of a sum over rows is
therefore computed from the change that each vector makes in the sum (the estimator's influence
function)."""

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
# Powers of s_i that are summed: s_i for the norm, s_i^2 for the weights of the stages in tau'.
POWERS = (1, 2)


def cauchy_vector(like: Vectors, seed: int, number: int) -> Vectors:
    """A standard Cauchy vector in the shapes, dtypes and devices of `like`.

    Its entries depend on `seed` and `number` alone, apart from rounding to the dtype."""
    state = np.random.SeedSequence((seed, number)).generate_state(1, np.uint64)
    generator = torch.Generator().manual_seed(int(state[0]) >> 1)
    return {
        # In float64 also for fp32, so that the tails are not cut short and both precisions see the
        # same vector.
        name: torch.empty(tensor.shape, dtype=torch.float64).cauchy_(generator=generator).to(tensor)
        for name, tensor in like.items()
    }


def below_resolution(product: Tensor) -> float:
    """The share of rows that may be rounding error only.

    These are rows that are not zero, but smaller than one unit in the last place of the largest
    entry.

    Args:
        product: H z (d,).
    """
    size = product.abs()
    unit = size.max() * torch.finfo(product.dtype).eps
    is_below = (size > 0) & (size < unit)
    return float(is_below.double().mean())


def membership(group_of: Sequence[str]) -> tuple[list[str], Array]:
    """The distinct groups in order of appearance, and a matrix (entries, groups) of ones and zeros:
    which entry belongs to which group."""
    names = list(dict.fromkeys(group_of))
    member = np.zeros((len(group_of), len(names)))
    for entry, group in enumerate(group_of):
        member[entry, names.index(group)] = 1.0
    return names, member


@dataclass(frozen=True)
class Sums:
    """Sums of s_i and s_i^2 over rows, by group (tensor, block, ...), and the deviations from which
    their errors are computed."""

    names: list[str]  # of the groups
    num_rows: list[int]  # in each group
    sums: Array  # (2, groups): of s_i and of s_i^2
    # What each of n vectors changes in the sums (2, n, groups). The variance of a sum is the mean
    # square of its deviations, divided by n - 1.
    deviations: Array

    def grouped(self, group_of: Callable[[str], str]) -> Sums:
        """The sums over larger groups; `group_of` names the larger group of a group."""
        names, member = membership([group_of(name) for name in self.names])
        num_rows = (np.array(self.num_rows) @ member).astype(int).tolist()
        return Sums(names, num_rows, self.sums @ member, self.deviations @ member)

    def covariance(self, power: int) -> Array:
        """The covariance (groups, groups) of the groups' sums of s_i^power."""
        deviations = self.deviations[POWERS.index(power)]  # (n, groups)
        n = len(deviations)
        covariance: Array = deviations.T @ deviations / (max(1, n - 1) * n)
        return covariance


class GeometricEstimate:
    """Corrected geometric means of |H z| per row, updated with each product.

    It keeps two numbers per row. A row may be exactly zero in some products. Its estimate is the
    estimate from the other products, times their share of all products.

    Args:
        num_rows: the number of entries of each parameter; their sum is d.
        dtype: dtype of the means.
    """

    def __init__(self, num_rows: Sequence[int], dtype: torch.dtype) -> None:
        self.num_rows = list(num_rows)
        self.mean_log = torch.zeros(sum(num_rows), dtype=dtype)  # of |H z|, where it is not zero
        self.num_seen = torch.zeros(sum(num_rows), dtype=torch.int32)  # products that are not zero
        self.num_vectors = 0
        # For each vector, its change in the sums of s_i and s_i^2, relative to them: (2, tensors).
        self.deviations: list[Tensor] = []

    def add(self, product: Tensor) -> None:
        """Take the next vector's product H z (d,) into account."""
        size = product.abs()
        seen = size > 0
        innovation = torch.where(seen, size.log() - self.mean_log, 0.0)
        relative = self._deviation(innovation, seen)
        self.num_seen += seen
        self.mean_log += innovation / self.num_seen.clamp(min=1)
        self.num_vectors += 1
        # Welford's recursion: with this factor, the squares of the innovations add up to the
        # squares of the deviations from the final mean.
        self.deviations.append(((self.num_vectors - 1) / self.num_vectors) ** 0.5 * relative)

    def _deviation(
        self,
        innovation: Tensor,  # of log |H z| (d,)
        seen: Tensor,  # where the product is not zero (d,)
    ) -> Tensor:
        """The change that the next vector makes in the logarithm of each tensor's sums,
        (2, tensors).

        d log(sum s_i^p) = p sum(s_i^p d log s_i) / sum(s_i^p), with the s_i known so far."""
        if self.num_vectors == 0:
            return torch.zeros(len(POWERS), len(self.num_rows), dtype=torch.float64)
        share = (self.num_seen.to(innovation) / self.num_vectors).clamp(min=1 / self.num_vectors)
        # s_i = share exp(mean_log); both factors change.
        change = innovation / share + (seen.to(share) - share) / share
        relative = []
        for power in POWERS:
            weight = self.scales(power, corrected=False)
            sums = self._by_tensor(weight).clamp(min=1e-300)
            relative.append(power * self._by_tensor(weight * change) / sums)
        return torch.stack(relative)

    def scales(self, power: int, *, corrected: bool = True) -> Tensor:
        """Estimates of s_i^power (d,), in float64.

        With the correction, their mean is s_i^power, except for rows that are sometimes zero."""
        count = self.num_seen.double()
        share = count / max(1, self.num_vectors)
        scales = (power * self.mean_log.double()).exp() * share**power
        if not corrected:
            return torch.where(count > 0, scales, 0.0)
        # E|X|^(p/n) = s^(p/n) / cos(pi p / 2n); for n <= p the mean is infinite.
        cosine = torch.cos(math.pi * power / (2 * count.clamp(min=power)))
        return torch.where(count > power, scales * cosine**count, 0.0)

    def sums(self, names: Sequence[str]) -> Sums:
        """The sums over the rows of each tensor; `names` are the tensors' names."""
        sums = torch.stack([self._by_tensor(self.scales(power)) for power in POWERS]).numpy()
        relative = torch.stack(self.deviations, dim=1).numpy()  # (2, n, tensors)
        return Sums(list(names), self.num_rows, sums, relative * sums[:, None, :])

    def _by_tensor(self, values: Tensor) -> Tensor:
        """Sums of the rows' values (d,) over each tensor, (tensors,)."""
        return torch.stack([part.sum() for part in torch.split(values, self.num_rows)])
