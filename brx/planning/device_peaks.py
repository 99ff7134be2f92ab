"""Peak arithmetic of known devices, from their makers' data sheets: dense, without sparsity, in TFLOP/s."""

from __future__ import annotations

from brx.config.parsing import parse_flops
from brx.errors import UserError

# Name: (bf16 matrix products with fp32 accumulation, fp32 without TF32). Longer names first where one holds another.
PEAKS = {
    "B200": (2250, 75),
    "H200": (989, 67),
    "H100 PCIe": (756, 51),
    "H100": (989, 67),
    "A100": (312, 19.5),
    "A6000": (154.8, 38.7),
    "A40": (149.7, 37.4),
    "A10": (125, 31.2),
    "L40S": (362, 91.6),
    "L4": (121, 30.3),
    "RTX 4090": (165.2, 82.6),
    "RTX 3090": (71, 35.6),
    "RTX 3080": (59.5, 29.8),
    "MI300X": (1307, 163.4),
}

UTILIZATION = 0.4
"""Assumed share of a data sheet's peak."""


def peak_flops(name: str, precision: str) -> float | None:
    """Peak FLOP/s of the device that calls itself `name` (for example "NVIDIA A100-SXM4-80GB"); None if unknown.

    Args:
        name: the device's name; case, and spaces for hyphens, do not count.
        precision: `bf16` or `fp32`.
    """
    words = name.lower().replace("-", " ")
    for known, (bf16, fp32) in PEAKS.items():
        # As a whole word: an L40 is no L4, an A1000 no A100.
        if f" {known.lower()} " in f" {words} ":
            return 1e12 * (bf16 if precision == "bf16" else fp32)
    return None


def parse_throughput(text: str, precision: str) -> float:
    """FLOP/s from a number, or from a device's name.

    Raises:
        UserError: it is neither.
    """
    peak = peak_flops(text, precision)
    if peak is not None:
        return UTILIZATION * peak
    if text[:1].isdigit():
        return parse_flops(text, "--throughput")
    raise UserError(f"--throughput {text}: write FLOP/s as a number, for example 120T, or one of: {', '.join(PEAKS)}")
