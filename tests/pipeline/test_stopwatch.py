"""The stopwatch against the clock."""

import time

import pytest
import torch

from brx.pipeline.engine import Stopwatch


def test_on_a_cpu_it_is_the_clock():
    before = time.perf_counter()
    stopwatch = Stopwatch(torch.device("cpu"))
    time.sleep(0.02)
    stopwatch.stop()
    assert 0.02 <= stopwatch.seconds() <= time.perf_counter() - before
    assert stopwatch.seconds() == stopwatch.seconds()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA: times work on its stream")
def test_on_cuda_it_times_the_work_not_its_launch():
    device = torch.device("cuda")
    matrix = torch.randn(4096, 4096, device=device)
    stopwatch = Stopwatch(device)
    started = time.perf_counter()
    for _ in range(20):
        matrix @ matrix
    launched = time.perf_counter() - started
    stopwatch.stop()
    assert stopwatch.seconds() > launched
