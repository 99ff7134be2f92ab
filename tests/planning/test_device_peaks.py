"""Peaks of devices by the names that they give themselves."""

import pytest

from brx.planning.device_peaks import peak_flops


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA GeForce RTX 3090", 71e12),
        ("NVIDIA RTX A6000", 154.8e12),
        ("a100", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L40", None),
        ("NVIDIA RTX A1000", None),
        ("x86_64", None),
        ("", None),
    ],
)
def test_peak_by_name(name, expected):
    assert peak_flops(name, "bf16") == expected


def test_precisions_differ():
    assert peak_flops("A100", "fp32") == 19.5e12
