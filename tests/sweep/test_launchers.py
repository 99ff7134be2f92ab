"""How a machine is divided among cells; that they run is tested with the sweeps."""

from unittest.mock import Mock

import pytest

from brx.sweep import launchers
from brx.sweep.launchers import LocalLauncher
from brx.sweep.spec import Sweep
from tests.sweep.helpers import write_sweep


@pytest.mark.parametrize(
    ("num_gpus", "devices", "jobs", "expected"),
    [
        (4, 1, None, ["0", "1", "2", "3"]),
        (4, 2, None, ["0,1", "2,3"]),
        (3, 2, 2, ["0,1", "0,1"]),
        (1, 1, 2, ["0", "0"]),
        (0, 2, 2, [None, None]),
    ],
)
def test_cells_get_whole_groups_of_gpus_and_all_cores(tmp_path, monkeypatch, num_gpus, devices, jobs, expected):
    environments = []
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(launchers.torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(launchers.os, "cpu_count", lambda: 8)
    monkeypatch.setattr(launchers, "start_process", lambda *given: environments.append(given[-1]) or Mock())
    launcher = LocalLauncher(jobs, devices)
    for cell in Sweep.load(write_sweep(tmp_path)).cells[: launcher.num_jobs]:
        assert launcher.start(cell)
    assert launcher.is_full
    assert [environment.get("CUDA_VISIBLE_DEVICES") for environment in environments] == expected
    # The ranks of a cell divide its threads among themselves.
    assert {int(environment["OMP_NUM_THREADS"]) for environment in environments} == {8 // launcher.num_jobs}
    for job in launcher.jobs:
        job.resources.close()


def test_cells_on_the_cpu_are_not_limited_by_gpus(monkeypatch):
    monkeypatch.setattr(launchers.torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(launchers.os, "cpu_count", lambda: 8)
    assert LocalLauncher(None, 2, on_gpus=False).num_jobs == 4
