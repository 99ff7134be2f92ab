import threading
import time
from contextlib import closing
from types import SimpleNamespace

import pytest
import torch

from brx.data import batches
from brx.data.batches import Prefetcher

CPU = torch.device("cpu")


def make(iteration):
    return torch.full((2, 3), iteration), torch.full((2, 3), iteration + 1)


def threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("brx-batches")]


@pytest.fixture
def threaded(monkeypatch):
    """Makes a Prefetcher that works as on CUDA, with memory that cannot be pinned here."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, device, non_blocking: tensor)
    return lambda make: Prefetcher(make, torch.device("cuda"))


def test_on_a_cpu_there_is_no_thread(capsys):
    with closing(Prefetcher(make, CPU)) as prefetcher:
        inputs, targets = prefetcher.batch(5)
        assert (inputs[0, 0], targets[0, 0]) == (5, 6)
        assert threads() == []
    assert prefetcher.seconds_waited > 0


def test_iterations_are_made_ahead_and_each_once(threaded):
    made = []

    def counted(iteration):
        made.append((iteration, threading.current_thread() is threading.main_thread()))
        return make(iteration)

    with closing(threaded(counted)) as prefetcher:
        assert prefetcher.batch(1)[0][0, 0] == 1
        deadline = time.monotonic() + 60
        while len(made) < 1 + batches.AHEAD and time.monotonic() < deadline:
            time.sleep(0.001)
        assert made == [(iteration, False) for iteration in range(1, 2 + batches.AHEAD)]
        for iteration in range(2, 40):
            inputs, targets = prefetcher.batch(iteration)
            assert (inputs[0, 0], targets[0, 0]) == (iteration, iteration + 1)
    assert [iteration for iteration, _ in made] == list(range(1, 1 + len(made)))


def test_any_order_gives_the_right_ones(threaded):
    with closing(threaded(make)) as prefetcher:
        for iteration in (7, 8, 3, 3, 100, 101, 99, 8):
            assert prefetcher.batch(iteration)[0][0, 0] == iteration


def test_an_exception_reaches_the_caller_at_its_iteration(threaded):
    def failing(iteration):
        if iteration == 3:
            raise OSError("the file system went away")
        return make(iteration)

    with closing(threaded(failing)) as prefetcher:
        assert prefetcher.batch(1)[0][0, 0] == 1
        assert prefetcher.batch(2)[0][0, 0] == 2
        with pytest.raises(OSError, match="the file system went away"):
            prefetcher.batch(3)


def test_no_thread_is_left_after_an_exception(threaded):
    def interrupted():
        with closing(threaded(make)) as prefetcher:
            prefetcher.batch(1)
            assert len(threads()) == 1
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert threads() == []


def test_waiting_is_counted_and_being_made_ahead_is_not(threaded, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(batches, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    first_is_used, all_are_made = threading.Event(), threading.Event()

    def slow(iteration):
        """One second each for the first one and the `AHEAD` after it."""
        if iteration > 1:
            assert first_is_used.wait(60)
        now[0] += iteration <= 1 + batches.AHEAD
        if iteration == 1 + batches.AHEAD:
            all_are_made.set()
        return make(iteration)

    with closing(threaded(slow)) as prefetcher:
        prefetcher.batch(1)
        assert prefetcher.seconds_waited == 1
        first_is_used.set()
        assert all_are_made.wait(60)
        prefetcher.batch(2)
        assert prefetcher.seconds_waited == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda():
    device = torch.device("cuda")
    with closing(Prefetcher(make, device)) as prefetcher:
        for iteration in (1, 2, 3, 50, 51, 2):
            inputs, targets = prefetcher.batch(iteration)
            assert inputs.device.type == targets.device.type == "cuda"
            assert torch.equal(inputs.cpu(), make(iteration)[0])
            assert torch.equal(targets.cpu(), make(iteration)[1])
    assert threads() == []
