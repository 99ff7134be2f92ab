"""Peaks by the names that devices call themselves."""

import re
from pathlib import Path

import pytest

from brx.accelerators import H100, peak_flops

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H200 NVL", 835),
    ],
)
def test_peak_of_a_known_device(name, tera):
    assert peak_flops(name, "bf16") == tera * 1e12


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA RTX A1000",
        "L40",
        "some card",
        "",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
    ],
)
def test_peak_of_an_unknown_device(name):
    assert peak_flops(name, "bf16") is None


def test_fp32_has_its_own_peak():
    assert peak_flops("H100", "fp32") == 67e12


@pytest.mark.parametrize("precision", ["bf16", "tf32", "fp32"])
def test_measured_rates_are_the_committed_ones(precision):
    table = (ROOT / "results" / "gpu" / "ceilings.md").read_text()
    found = re.search(rf"product, {precision} \| ([\d.]+) TFLOP/s", table)
    assert getattr(H100, precision) == float(found[1])
