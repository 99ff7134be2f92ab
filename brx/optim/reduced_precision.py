"""Products of fp32 matrices in the reduced precisions of a GPU's matrix units, with the same
rounding on any device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from threading import Lock
from typing import Any, Literal

import torch
from torch import Tensor

Precision = Literal["highest", "tf32", "bf16"]
LEAST_CAPABILITY = (8, 0)  # of a GPU of NVIDIA's with TF32: Ampere


def precision_on(device: torch.device, asked: str) -> str:
    """The precision of products on a device. "auto" is TF32 where the device has it, else fp32
    ("highest"); any other is what was asked for."""
    if asked != "auto":
        return asked
    return "tf32" if _has_tf32(device) else "highest"


@cache
def _has_tf32(device: torch.device) -> bool:
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    return is_nvidia and torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY


def product(
    left: Tensor,  # (b, m, k)
    right: Tensor,  # (b, k, n)
    precision: Precision,
) -> Tensor:
    """The product (b, m, n), accumulated in fp32; float64 matrices stay in float64.

    On CUDA it runs on the matrix units. Elsewhere the same roundings are imitated, so that studies
    on a CPU show their effect. Bounds of an entry's error, with A and B the matrices of absolute
    values: k 2^-24 AB for "highest", 2^-10 AB for "tf32", 3 x 2^-16 AB for "bf16".
    """
    if precision == "highest" or left.dtype == torch.float64:
        return left @ right
    if precision == "tf32":
        # Both factors are rounded to 10 bits; a GPU that cuts the rest off has twice the error.
        if left.device.type != "cuda":
            return round_to_tf32(left) @ round_to_tf32(right)
        with fp32_products("tf32"):
            return left @ right
    return _split_product(left, right)


def add_product(
    total: Tensor,  # (b, m, n), changed in place
    left: Tensor,  # (b, m, k)
    right: Tensor,  # (b, k, n)
    *,
    decay: float,
    weight: float,
    precision: Literal["highest", "tf32"],
) -> None:
    """total <- decay total + weight left right.

    Only the product has the given `precision`, with the roundings and errors of `product`.
    """
    if precision == "highest" or left.dtype == torch.float64:
        total.baddbmm_(left, right, beta=decay, alpha=weight)
    elif left.device.type == "cuda":
        with fp32_products("tf32"):
            total.baddbmm_(left, right, beta=decay, alpha=weight)
    else:
        total.baddbmm_(round_to_tf32(left), round_to_tf32(right), beta=decay, alpha=weight)


def _split_product(left: Tensor, right: Tensor) -> Tensor:
    """The product of factors that are each a sum of two bf16 matrices, high + low.

    Three of the four partial products are computed (arXiv:1904.06376), all but low times low. One
    product with three times the inner dimension adds them up.
    """
    # The small products first: added to a large sum, they would be rounded away.
    lefts = _split(left, -1, ("low", "high", "high"))  # (b, m, 3 k)
    rights = _split(right, -2, ("high", "low", "high"))  # (b, 3 k, n)
    if lefts.device.type == "cuda":
        return torch.bmm(lefts, rights, out_dtype=torch.float32)
    return lefts.float() @ rights.float()


def factor_rounding(precision: Precision, dtype: torch.dtype) -> float:
    """The relative spacing of the numbers to which a product's factors are rounded; 0 if they are
    not rounded."""
    if precision == "highest" or dtype == torch.float64:
        return 0.0
    return 2**-10 if precision == "tf32" else 2**-15


class _Fp32Settings:
    """torch's settings of the precision of fp32 products. All threads share them.

    So a context that ends must not bring back what it found when it began: that may have been the
    choice of another thread's context. The first one to begin keeps the program's choice, and the
    last one to end brings it back.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._num_open = 0  # contexts of `fp32_products`, in all threads
        self._programs: list[str] = []  # what the program has chosen, while any is open

    def begin(self, precision: str) -> None:
        with self._lock:
            if self._num_open == 0:
                self._programs = [setting.fp32_precision for setting in self._settings()]
            self._num_open += 1
            self._choose(precision)

    def end(self) -> None:
        with self._lock:
            self._num_open -= 1
            if self._num_open:
                # Those that are left are steps, whose own precision is this one.
                self._choose("ieee")
                return
            inherited = torch.backends.fp32_precision  # type: ignore[attr-defined]
            for setting, chosen in zip(self._settings(), self._programs, strict=True):
                setting.fp32_precision = "none" if chosen == inherited else chosen

    def _choose(self, precision: str) -> None:
        for setting in self._settings():
            setting.fp32_precision = precision

    def _settings(self) -> list[Any]:
        return [torch.backends.cuda.matmul, torch.backends.mkldnn.matmul]  # type: ignore[attr-defined]


_FP32_SETTINGS = _Fp32Settings()


@contextmanager
def fp32_products(precision: Literal["ieee", "tf32"]) -> Iterator[None]:
    """Compute fp32 products in full precision ("ieee") or in TF32, whatever the program has chosen
    for its own. A step is in full precision; products in TF32 are within it."""
    _FP32_SETTINGS.begin(precision)
    try:
        yield
    finally:
        _FP32_SETTINGS.end()


def round_to_tf32(matrices: Tensor) -> Tensor:
    """Round fp32 numbers to 10 bits of mantissa, ties away from zero."""
    dropped = 23 - 10  # bits of fp32's mantissa, and of TF32's
    bits = matrices.contiguous().view(torch.int32)
    return ((bits + (1 << (dropped - 1))) >> dropped << dropped).view(torch.float32)


def _split(
    matrices: Tensor,  # (b, r, c) in fp32
    dim: int,  # -1 or -2
    parts: Sequence[Literal["high", "low"]],
) -> Tensor:
    """Bf16 matrices side by side along a dimension. The sum high + low is the fp32 matrix to 16
    bits.

    On a GPU the time of a split is that of the memory it moves, so each part is written where it
    belongs: by count 18 bytes per entry, where parts that are joined afterwards would take 34.
    """
    is_by_columns = matrices.stride(-1) != 1 and matrices.stride(-2) == 1
    if is_by_columns:  # as bases are; then so is the result
        return _split(matrices.mT, -3 - dim, parts).mT
    shape = list(matrices.shape)
    shape[dim] *= len(parts)
    joined = matrices.new_empty(shape, dtype=torch.bfloat16)
    places = joined.chunk(len(parts), dim)
    high = places[parts.index("high")].copy_(matrices)
    for part, place in zip(parts, places, strict=True):
        if part == "low":
            torch.sub(matrices, high, out=place)  # in fp32, and rounded as it is written
        elif place is not high:
            place.copy_(high)
    return joined
