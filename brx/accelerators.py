"""Peak rates of accelerators, from data sheets, and rates that we measured."""

from typing import Literal, NamedTuple


class Rates(NamedTuple):
    """Rates of dense matrix products, in TFLOP/s."""

    bf16: float
    """With accumulation in fp32."""
    fp32: float
    """Without TF32."""


PEAKS = {
    "B200": Rates(2250, 75),
    "H200 NVL": Rates(835, 60),
    "H200": Rates(989, 67),
    "H100 PCIe": Rates(756, 51),
    "H100 NVL": Rates(835, 60),
    "H100": Rates(989, 67),
    "A100": Rates(312, 19.5),
    "A6000": Rates(154.8, 38.7),
    "A40": Rates(149.7, 37.4),
    "A10": Rates(125, 31.2),
    "L40S": Rates(362, 91.6),
    "L4": Rates(121, 30.3),
    "RTX 4090": Rates(165.2, 82.6),
    "RTX 3090": Rates(71, 35.6),
    "RTX 3080": Rates(59.5, 29.8),
    "MI300X": Rates(1307, 163.4),
}
"""Peaks by name, from data sheets. If one name contains another, the longer one comes first,
because `peak_flops` takes the first match."""

OTHER_CHIPS = {"ti", "super", "d", "laptop", "mobile", "max"}
"""After a name in `PEAKS`, these words make it the name of another chip: an RTX 4090 Laptop GPU has
half the rate of an RTX 4090."""


def peak_flops(name: str, precision: Literal["fp32", "bf16"]) -> float | None:
    """The peak rate of a device in FLOP/s, by its data sheet; None if it is not known.

    Args:
        name: the name that the device reports, for example "NVIDIA A100-SXM4-80GB".
        precision: the precision of the matrix products.
    """
    words = f" {name.lower().replace('-', ' ')} "
    if " mig " in words:  # a slice of a GPU, with a share of its rate
        return None
    for known, peak in PEAKS.items():
        # Match whole words: an L40 is not an L4, and an A1000 is not an A100.
        _, match, rest = words.partition(f" {known.lower()} ")
        if match:
            if OTHER_CHIPS.intersection(rest.split()[:1]):
                return None
            return 1e12 * (peak.bf16 if precision == "bf16" else peak.fp32)
    return None


class MeasuredRates(NamedTuple):
    """Rates of products of large matrices, in TFLOP/s."""

    device: str
    bf16: float
    tf32: float
    fp32: float


H100 = MeasuredRates("H100", bf16=790.2, tf32=412.5, fp32=51.2)
"""Measured with 8192 x 8192 matrices: results/gpu/ceilings.md."""
