"""Rings in host memory: the same trajectory, fetched ahead of time, few buffers on the device."""

import pytest
import torch

from brx.pipeline.delay import StageDelay
from brx.pipeline.rebinding import Ring
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
    for one, other in zip(*rings, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def version(number):
    return [torch.full((3,), float(number))]


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize(("delay", "ahead"), [(1, 0), (5, 0), (5, 2), (3, 3)])
def test_every_micro_batch_sees_its_version(delay, ahead, on_host):
    """`ahead` forward passes run before the first update, as on rank R - 1 - ahead of R."""
    ring = Ring(version(0), StageDelay(delay), ahead + 2 if on_host else ahead + 1, on_host=on_host)
    loads = []
    load = ring._load
    ring._load = lambda micro_batch: (loads.append(micro_batch), load(micro_batch))
    for t in range(1, 20 + ahead):
        on_time = len(loads)
        weights = ring.weights(t)
        assert (len(loads) == on_time) == (
            on_host and t > 1 and (delay > ahead or t - 1 <= delay)
        ), t  # fetched ahead?
        assert weights[0][0].item() == max(0, t - 1 - delay)
        ring.prefetch(t + 1)
        update = t - ahead
        if update >= 1:
            assert ring.weights(update)[0][0].item() == max(
                0, update - 1 - delay
            )  # still there for the backward pass
            ring.prefetch(update + 1)
            ring.store(update, version(update))
    assert len(loads) == len(set(loads))  # each fetched once


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs CUDA: pinned memory and a stream of its own"
)
def test_on_cuda_copies_neither_overtake_nor_are_overtaken():
    weight = torch.zeros(2**22, device="cuda")
    ring = Ring([weight], StageDelay(2), 2, on_host=True)
    assert ring.slots[0][0].is_pinned()
    for t in range(1, 30):
        assert (ring.weights(t)[0] == max(0, t - 3)).all()
        ring.prefetch(t + 1)
        ring.finish_store()
        weight.add_(1)
        ring.store(t, [weight])
