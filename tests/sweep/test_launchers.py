"""Which part of the machine a cell gets."""

import os
import signal
import threading
import time
from unittest.mock import Mock

import pytest

from brx.sweep import launchers
from brx.sweep.launchers import LocalLauncher
from brx.sweep.spec import Sweep
from tests.sweep.helpers import write_sweep


@pytest.mark.parametrize(
    ("num_gpus", "devices", "jobs", "expected"),
    [
        (4, 2, None, ["0,1", "2,3"]),
        (3, 2, 2, ["0,1", "0,1"]),
        (1, 1, 2, ["0", "0"]),
        (0, 2, 2, [None, None]),
    ],
)
def test_cells_get_whole_groups_of_gpus(num_gpus, devices, jobs, expected, started):
    environments = started(num_gpus, jobs, devices)
    assert [environment.get("CUDA_VISIBLE_DEVICES") for environment in environments] == expected


@pytest.fixture
def started(tmp_path, monkeypatch):
    """Fills a launcher on a machine of 8 cores with cells, and gives their environments."""
    environments = []

    def start(folder, lock_descriptor, environment):
        environments.append(environment)
        return Mock()

    def fill(num_gpus, *arguments):
        monkeypatch.setattr(launchers.torch.cuda, "device_count", lambda: num_gpus)
        launcher = LocalLauncher(*arguments)
        for cell in Sweep.load(write_sweep(tmp_path)).cells[: launcher.num_jobs]:
            assert launcher.start(cell)
        for job in launcher.jobs:
            job.resources.close()
        return environments

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(launchers, "num_cores", lambda: 8)
    monkeypatch.setattr(launchers, "start_process", start)
    return fill


@pytest.mark.parametrize("jobs", [1, 2, 4])
def test_cells_share_all_cores(jobs, started):
    """Whatever devices a cell has: its ranks divide its threads among themselves."""
    threads = [environment["OMP_NUM_THREADS"] for environment in started(0, jobs, 2)]
    assert threads == [str(8 // jobs)] * jobs


def test_rank_of_the_sweep_reaches_no_cell(started, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    assert not any("RANK" in environment for environment in started(0, 2, 1))


def test_gpus_are_no_limit_on_the_cpu(monkeypatch):
    monkeypatch.setattr(launchers.torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(launchers, "num_cores", lambda: 8)
    assert LocalLauncher(None, 2, on_gpus=False).num_jobs == 4


@pytest.fixture(params=[False, True])
def other_thread(request):
    """Maybe a thread that does not block the signals, as that of a progress display."""
    is_over = threading.Event()
    thread = threading.Thread(target=is_over.wait)
    if request.param:
        thread.start()
    yield
    is_over.set()
    if request.param:
        thread.join()


@pytest.mark.usefixtures("other_thread")
def test_interrupt_during_a_start_reaches_the_cell(tmp_path, monkeypatch):
    """`interrupt` asks only the cells to stop that are among the jobs."""

    def start(folder, lock_descriptor, environment):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)  # here a handler that does not wait would be called
        return Mock()

    monkeypatch.setattr(launchers, "start_process", start)
    launcher = LocalLauncher(1, 1)
    with pytest.raises(KeyboardInterrupt):
        launcher.start(Sweep.load(write_sweep(tmp_path)).cells[0])
    (job,) = launcher.jobs
    job.resources.close()
