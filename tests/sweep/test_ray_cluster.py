"""Sweeps on a Ray cluster that is started for the test: the same result folders as without."""

import builtins
import os
import signal
from pathlib import Path

import pytest

from brx.cli.main import main
from brx.sweep.cell_state import State, state_of
from brx.sweep.spec import Sweep
from brx.train.loop import train
from tests.sweep.helpers import write_sweep
from tests.train.helpers import losses, start_brx, wait_for_lines


@pytest.fixture
def ray():
    return pytest.importorskip("ray", reason="Ray is not installed: pip install 'brx[ray]'")


def runner_of(folder):
    """The process id of the Ray task that runs the cell in a folder: the parent of its `brx train`."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(folder).encode() in path.read_bytes().split(b"\0"):
                return int(path.with_name("stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended meanwhile
            continue
    raise AssertionError(f"no process runs {folder}")


def test_the_same_folders_as_the_local_launcher_and_failures_told(ray, tmp_path, capsys):
    grid = {"pipeline.stages": [4, 1], "optimizer.lr": [0.01, 1e30]}
    path = write_sweep(tmp_path, grid=grid, choose={})
    assert main(["sweep", str(path), "--launcher", "ray", "--jobs", "2"]) == 1
    assert not ray.is_initialized()
    assert "lower optimizer.lr" in capsys.readouterr().out.replace("\n", " ")
    assert main(["sweep", str(path), "--out", str(tmp_path / "local"), "--jobs", "2"]) == 1

    on_ray, local = Sweep.load(path).cells, Sweep.load(path, tmp_path / "local").cells
    assert [state_of(cell) for cell in on_ray] == [State.DONE, State.FAILED] * 2
    for one, other in zip(on_ray, local, strict=True):
        assert one.folder.name == other.folder.name
        assert sorted(os.listdir(one.folder)) == sorted(os.listdir(other.folder))
        assert losses(one.folder) == losses(other.folder)
    choices = [(folder / "choice-sweep.csv").read_text() for folder in (tmp_path / "cells", tmp_path / "local")]
    assert choices[0] == choices[1]


@pytest.mark.slow
def test_interrupted_cells_save_and_a_lost_one_is_continued(ray, tmp_path):
    settings = {"training.iterations": 600, "training.checkpoint_every": 20}
    path = write_sweep(tmp_path, grid={"pipeline.stages": [4, 2]}, set=settings)
    cells = Sweep.load(path).cells

    process = start_brx("sweep", path, "--launcher", "ray", "--jobs", "2")
    for cell in cells:
        wait_for_lines(cell.folder / "metrics.jsonl", 40, process)
    process.send_signal(signal.SIGINT)
    assert process.wait(180) == 130
    assert [state_of(cell) for cell in cells] == [State.INTERRUPTED] * 2

    process = start_brx("sweep", path, "--launcher", "ray", "--jobs", "2")
    wait_for_lines(cells[0].folder / "metrics.jsonl", 120, process)
    os.kill(runner_of(cells[0].folder), signal.SIGKILL)
    assert process.wait(180) == 0, process.stderr.read()
    for cell in cells:
        train(cell.config, tmp_path / "by-hand" / cell.name)
        assert losses(cell.folder) == losses(tmp_path / "by-hand" / cell.name)


@pytest.mark.parametrize(
    ("address", "expected"),
    [("auto", ""), ("127.0.0.1:1", "refused"), ("ray://127.0.0.1:1", "refused"), ("head", "HOST:PORT")],
)
def test_an_address_without_a_cluster_is_one_line(ray, tmp_path, capsys, address, expected):
    path = write_sweep(tmp_path)
    assert main(["sweep", str(path), "--launcher", "ray", "--address", address]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"brx: --address {address}: no Ray cluster there that can be used: ")
    assert expected in error
    assert error.count("\n") == 1
    assert not (tmp_path / "cells").exists()


def test_a_cell_too_large_for_every_node_is_one_line(ray, tmp_path, capsys):
    path = write_sweep(tmp_path, set={"runtime.threads": 4096})
    assert main(["sweep", str(path), "--launcher", "ray"]) == 2
    assert "needs 4096 CPU cores and 0 GPUs on one node, which no node" in capsys.readouterr().err
    assert not ray.is_initialized()


def test_without_ray_one_line_names_the_extra(tmp_path, monkeypatch, capsys):
    real_import = builtins.__import__

    def without_ray(name, *rest):
        if name == "ray":
            raise ModuleNotFoundError("No module named 'ray'", name="ray")
        return real_import(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_ray)
    assert main(["sweep", str(write_sweep(tmp_path)), "--launcher", "ray"]) == 2
    assert capsys.readouterr().err == "brx: --launcher ray: Ray is not installed: pip install 'brx[ray]'\n"
