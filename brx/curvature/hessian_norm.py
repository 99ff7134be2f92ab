"""The (1,1)-norm sum |H_ij| of a Hessian, from its products with Cauchy vectors (arXiv:2410.08198).

For z with independent standard Cauchy entries, (H z)_i is Cauchy with scale s_i = sum_j |H_ij|, exactly. So a robust
estimate of scale for each row, from n vectors, summed over the rows, estimates the norm. Two of them:

- `geometric`: E|X|^(1/n) = s^(1/n) / cos(pi / 2n) for X of scale s, so the geometric mean of n values of |X|, times
  cos(pi / 2n)^n, is unbiased. One pass, memory for a few numbers per row.
- `median`: the median of |X| is s (its bias is about 1.2 / n of it). It needs all n values of every row.

Both have the same relative deviation, (pi / 2) / sqrt(n), in one row. The rows share their vectors and are far from
independent, so the interval of a sum is taken from deviations of whole sums: for each vector, how much it moves each
tensor's sum (the estimator's influence function).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from brx.curvature.hessian import Vectors

Array = NDArray[np.float64]
POWERS = (1, 2)
"""The powers of s_i that are summed: the norm, and the squares that the effective delay weighs stages by."""
MEDIAN_CHUNK_BYTES = 2**26


def cauchy_vector(like: Vectors, seed: int, number: int) -> Vectors:
    """Standard Cauchy vector `number`: a function of (seed, number) alone, on the tensors' device, in their dtype."""
    generator = torch.Generator().manual_seed(
        int(np.random.SeedSequence((seed, number)).generate_state(1, np.uint64)[0]) >> 1
    )
    return {
        # In float64 also for fp32, so that the tails are not cut short and both precisions see the same vector.
        name: torch.empty(tensor.shape, dtype=torch.float64).cauchy_(generator=generator).to(tensor)
        for name, tensor in like.items()
    }


def below_resolution(product: Vectors) -> float:
    """The share of rows that rounding may have drowned: not zero, but below one unit of the largest entry."""
    largest = max(float(part.abs().max()) for part in product.values())
    unit = largest * torch.finfo(next(iter(product.values())).dtype).eps
    lost = sum(int(((part != 0) & (part.abs() < unit)).sum()) for part in product.values())
    return lost / sum(part.numel() for part in product.values())


@dataclass(frozen=True)
class Sums:
    """Sums over rows by group (tensor, block, ...), with what their errors need.

    Attributes:
        names: of the groups.
        num_rows: of each group.
        sums: (2, groups): of s_i and of s_i^2.
        deviations: (2, n, groups): what each vector added to the sums; their mean square is n times their variance.
        freedom: n less the number of means that the deviations are taken from.
    """

    names: list[str]
    num_rows: list[int]
    sums: Array
    deviations: Array
    freedom: int

    def grouped(self, group_of: Callable[[str], str]) -> Sums:
        """The sums of larger groups."""
        of = [group_of(name) for name in self.names]
        names = list(dict.fromkeys(of))
        member = np.array([[old == name for name in names] for old in of], dtype=np.float64)  # (groups, new groups)
        num_rows = [sum(rows for rows, old in zip(self.num_rows, of, strict=True) if old == name) for name in names]
        return Sums(names, num_rows, self.sums @ member, self.deviations @ member, self.freedom)

    def covariance(self, power: int) -> Array:
        """Covariance of the groups' sums of s_i^power, (groups, groups)."""
        deviations = self.deviations[POWERS.index(power)]
        covariance: Array = deviations.T @ deviations / (max(1, self.freedom) * len(deviations))
        return covariance


class GeometricEstimate:
    """Corrected geometric means, kept up to date product by product in memory for two numbers per row.

    A row that is exactly zero in some products (an embedding whose token is not in that vector's batches) has that
    scale, zero, in those: its estimate is the others' times their share.
    """

    def __init__(self, like: Vectors) -> None:
        self.mean_log = {name: torch.zeros(tensor.numel(), dtype=tensor.dtype) for name, tensor in like.items()}
        self.num_seen = {name: torch.zeros(tensor.numel(), dtype=torch.int32) for name, tensor in like.items()}
        self.num_vectors = 0
        self.num_parts = 1
        self.deviations: list[Tensor] = []  # for each vector (2, tensors), relative to the tensor's sums

    def add(self, product: Vectors) -> None:
        """Take in one more |H z|."""
        relative = []
        for name, part in product.items():
            size = part.flatten().abs().cpu()
            seen = size > 0
            mean, count = self.mean_log[name], self.num_seen[name]
            innovation = torch.where(seen, size.log() - mean, 0.0)
            relative.append(self._deviation(name, innovation, seen))
            count += seen
            mean += innovation / count.clamp(min=1)
        self.num_vectors += 1
        # Welford's recursion: innovations scaled so have the sum of squares that deviations from the final mean have.
        scale = ((self.num_vectors - 1) / self.num_vectors) ** 0.5
        self.deviations.append(scale * torch.stack(relative, dim=1))

    def _deviation(self, name: str, innovation: Tensor, seen: Tensor) -> Tensor:
        """d log(sum s_i^p) for p = 1, 2, from d log s_i, weighting the rows by their scales as known before."""
        if self.num_vectors == 0:
            return torch.zeros(len(POWERS), dtype=torch.float64)
        share = (self.num_seen[name].to(innovation) / self.num_vectors).clamp(min=1 / self.num_vectors)
        change = innovation / share + (seen.to(share) - share) / share
        relative = []
        for power in POWERS:
            weight = self._scales(name, power, corrected=False)
            relative.append(power * (weight * change).sum() / weight.sum().clamp(min=1e-300))
        return torch.stack(relative)

    def _scales(self, name: str, power: int, *, corrected: bool = True) -> Tensor:
        """Estimates of s_i^power, unbiased if corrected."""
        count = self.num_seen[name].double()
        scales = (power * self.mean_log[name].double()).exp() * (count / max(1, self.num_vectors)) ** power
        if not corrected:
            return torch.where(count > 0, scales, 0.0)
        # E|X|^(p/n) = s^(p/n) / cos(pi p / 2n), and there is no such mean for n <= p.
        cosine = torch.cos(math.pi * power / (2 * count.clamp(min=power)))
        return torch.where(count > power, scales * cosine**count, 0.0)

    def norm(self) -> float:
        """The estimate so far."""
        return float(sum(self._scales(name, 1).sum() for name in self.mean_log))

    def sums(self) -> Sums:
        """The sums by tensor."""
        sums = np.array([[float(self._scales(name, power).sum()) for name in self.mean_log] for power in POWERS])
        relative = torch.stack(self.deviations, dim=1).numpy()  # (2, n, tensors)
        num_rows = [len(mean) for mean in self.mean_log.values()]
        return Sums(list(self.mean_log), num_rows, sums, relative * sums[:, None, :], self.num_vectors - self.num_parts)

    def merge(self, other: GeometricEstimate) -> None:
        """Take in the products of another estimate, made from other vectors."""
        for name, mean in self.mean_log.items():
            count, others = self.num_seen[name], other.num_seen[name]
            count += others
            mean += (other.mean_log[name] - mean) * others.to(mean) / count.clamp(min=1)
        self.num_vectors += other.num_vectors
        self.num_parts += other.num_parts
        self.deviations += other.deviations

    def state_dict(self) -> dict[str, Any]:
        """All of it, for a file."""
        return dict(vars(self))

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        """What `state_dict` gave."""
        estimate = cls(state["mean_log"])
        for name, value in state.items():
            setattr(estimate, name, value)
        return estimate


def median_sums(samples: NDArray[Any], names: Sequence[str], num_rows: Sequence[int]) -> Sums:
    """Sums of medians, by tensor.

    Args:
        samples: |H z| (n, d), one row for each vector; may be on disk, it is read in chunks of columns.
        names: of the tensors.
        num_rows: of each tensor; together d.
    """
    num_vectors = len(samples)
    sums = np.zeros((len(POWERS), len(names)))
    deviations = np.zeros((len(POWERS), num_vectors, len(names)))
    columns = max(1, MEDIAN_CHUNK_BYTES // (num_vectors * samples.itemsize))
    start = 0
    for tensor, rows in enumerate(num_rows):
        for first in range(start, start + rows, columns):
            chunk = np.asarray(samples[:, first : min(first + columns, start + rows)])
            medians = np.median(chunk, axis=0).astype(np.float64)
            # Influence of a sample on the median of |Cauchy(s)|: the density there is 1 / (pi s).
            influence = 0.5 * math.pi * np.sign(chunk - medians)
            for row, power in enumerate(POWERS):
                sums[row, tensor] += (medians**power).sum()
                deviations[row, :, tensor] += power * (influence * medians**power).sum(axis=1)
        start += rows
    return Sums(list(names), list(num_rows), sums, deviations, num_vectors - 1)
