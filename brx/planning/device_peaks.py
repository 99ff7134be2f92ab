"""Peak arithmetic of known devices, from their makers' data sheets: dense, without sparsity, in FLOP/s."""

from __future__ import annotations

TERA = 1e12

# Name: (bf16 matrix products with fp32 accumulation, fp32 without TF32). Longer names first where one holds another.
PEAKS = {
    "B200": (2250 * TERA, 75 * TERA),
    "H200": (989 * TERA, 67 * TERA),
    "H100 PCIe": (756 * TERA, 51 * TERA),
    "H100": (989 * TERA, 67 * TERA),
    "A100": (312 * TERA, 19.5 * TERA),
    "A6000": (154.8 * TERA, 38.7 * TERA),
    "A40": (149.7 * TERA, 37.4 * TERA),
    "A10": (125 * TERA, 31.2 * TERA),
    "L40S": (362 * TERA, 91.6 * TERA),
    "L4": (121 * TERA, 30.3 * TERA),
    "RTX 4090": (165.2 * TERA, 82.6 * TERA),
    "RTX 3090": (71 * TERA, 35.6 * TERA),
    "RTX 3080": (59.5 * TERA, 29.8 * TERA),
    "MI300X": (1307 * TERA, 163.4 * TERA),
}


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
            return bf16 if precision == "bf16" else fp32
    return None
