"""MFU and refresh times from made-up rates and times."""

import pytest
import torch

from brx.config.loading import load_config
from brx.train import efficiency
from brx.train.efficiency import RefreshTime, Utilization

CPU = torch.device("cpu")


def test_utilization_is_a_share_of_all_devices_peaks(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    one = Utilization(load_config("paper-95m"), torch.device("cuda"))
    # 6 per weight of the blocks and the head, and 12 S D of attention for each of 32 blocks.
    assert one.flops_per_token == 6 * (32 * 12 * 384**2 + 50257 * 384) + 32 * 12 * 512 * 384
    assert one.mfu(100_000) == pytest.approx(100_000 * one.flops_per_token / 312e12)
    four = Utilization(load_config("paper-95m", ["pipeline.devices=4"]), torch.device("cuda"))
    assert four.mfu(100_000) == pytest.approx(one.mfu(100_000) / 4)


def test_utilization_of_an_unknown_device_is_blank():
    assert Utilization(load_config("quick"), CPU).mfu(1000.0) is None
    assert efficiency.peak_flops("some card", "bf16") is None


def test_refresh_time_is_the_difference():
    times = RefreshTime(load_config("quick", ["optimizer={method: basis-rotation, frequency: 3}"]))
    for iteration in range(1, 3):
        times.see(iteration, 100.0)  # up to the first basis, at update 2, there is nothing to refresh
    times.see(4, 1.0)
    assert times.seconds is None
    for iteration in range(5, 20):
        times.see(iteration, 5.0 if iteration % 3 == 0 else 1.0)
    assert times.seconds == pytest.approx(4.0)


@pytest.mark.parametrize(
    "optimizer",
    [
        "{method: pipedream}",
        "{method: basis-rotation, staggered: true}",
        "{method: basis-rotation, refresh_schedule: stage-aware}",
    ],
)
def test_refresh_time_is_blank_where_there_is_none_in_common(optimizer):
    times = RefreshTime(load_config("quick", [f"optimizer={optimizer}"]))
    for iteration in range(1, 40):
        times.see(iteration, 1.0)
    assert times.seconds is None
