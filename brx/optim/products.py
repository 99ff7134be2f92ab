"""Products of fp32 matrices in the reduced precisions of a GPU's matrix units, with the same
rounding on any device."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

Precision = Literal["highest", "tf32", "bf16"]


def product(left: Tensor, right: Tensor, precision: Precision) -> Tensor:
    """The product (b, m, n) of (b, m, k) and (b, k, n), accumulated in fp32; float64 matrices stay
    in float64.

    On CUDA it runs on the matrix units. Elsewhere the same roundings are made by hand, which shows
    what they do. Bounds of an entry's error: A and B are the matrices of absolute values."""
    if precision == "highest" or left.dtype == torch.float64:  # k 2^-24 AB
        return left @ right
    if (
        precision == "tf32"
    ):  # 2^-10 AB: both factors are rounded to 10 bits (2^-9 on a GPU that cuts the rest off)
        if left.device.type != "cuda":
            return round_to_tf32(left) @ round_to_tf32(right)
        with fp32_products("tf32"):
            return left @ right
    # 3 x 2^-16 AB: a factor is the sum of two bf16 numbers; three of four products are taken
    # (arXiv:1904.06376).
    (left_high, left_low), (right_high, right_low) = _halves(left), _halves(right)
    small = _bf16_product(left_low, right_high) + _bf16_product(left_high, right_low)
    return small + _bf16_product(left_high, right_high)


@contextmanager
def fp32_products(precision: Literal["ieee", "tf32"]) -> Iterator[None]:
    """Take fp32 products in full, or on CUDA's TF32 units, whatever the program has chosen for its
    own products."""
    settings: list[Any] = [torch.backends.cuda.matmul, torch.backends.mkldnn.matmul]  # type: ignore[attr-defined]
    before = [setting.fp32_precision for setting in settings]
    for setting in settings:
        setting.fp32_precision = precision
    try:
        yield
    finally:
        inherited = torch.backends.fp32_precision  # type: ignore[attr-defined]
        for setting, chosen in zip(settings, before, strict=True):
            setting.fp32_precision = "none" if chosen == inherited else chosen


def round_to_tf32(matrices: Tensor) -> Tensor:
    """Round fp32 numbers to 10 bits of mantissa, ties away from zero."""
    dropped = 23 - 10  # bits of fp32's mantissa, and of TF32's
    bits = matrices.contiguous().view(torch.int32)
    return ((bits + (1 << (dropped - 1))) >> dropped << dropped).view(torch.float32)


def _halves(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Two bf16 matrices whose sum is the fp32 one to 16 bits."""
    high = matrices.to(torch.bfloat16)
    return high, (matrices - high).to(torch.bfloat16)


def _bf16_product(left: Tensor, right: Tensor) -> Tensor:
    if left.device.type == "cuda":
        return torch.bmm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()
