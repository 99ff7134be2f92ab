"""Rings in host memory: the same trajectory, fetched ahead of time, few buffers on the device."""

import pytest
import torch

from brx.runs import checkpoint
from brx.train.loop import train
from tests.train.helpers import steps_of, tiny_config


@pytest.mark.parametrize(
    ("stash", "precision", "accumulation"),
    [("exact", "bf16", 2), ("none", "fp32", 1), ("predict", "bf16", 3)],
)
def test_trajectory_is_that_of_rings_on_the_device(stash, precision, accumulation, tmp_path):
    # The last stage without a delay: its head would not see overwritten weights under bf16, and is
    #     refused.
    common = [
        f"pipeline.stash={stash}",
        f"runtime.precision={precision}",
        "optimizer.method=basis-rotation",
    ]
    common += [f"pipeline.accumulation={accumulation}", "pipeline.delay=[3, 3, 3, 0]"]
    common += ["training.iterations=18", "training.checkpoint_every=18"]
    train(tiny_config(tmp_path, *common), tmp_path / "device")
    # Stopped on the way: a resumed ring knows nothing of what had been fetched.
    train(
        tiny_config(tmp_path, *common, "training.stop_after=11", "pipeline.rings=host"),
        tmp_path / "host",
    )
    train(tiny_config(tmp_path, *common, "pipeline.rings=host"), tmp_path / "host", resume=True)
    assert steps_of(tmp_path / "host") == steps_of(tmp_path / "device")
    device, host = (
        checkpoint.list_checkpoints(tmp_path / place)[-1] / "stage-000.pt"
        for place in ("device", "host")
    )
    rings = [torch.load(path, weights_only=True)["versions"]["ring"] for path in (device, host)]
    device, host = rings
    assert list(device) == list(host)
    assert all(torch.equal(device[name], host[name]) for name in device)
