"""Sweeps on a Ray cluster that is started for the test: the same result folders as without."""

import os
import signal
import sys
from pathlib import Path

import pytest

from brx.cli.main import main
from brx.sweep.spec import State, Sweep, state_of
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
    ("address", "settings", "expected"),
    [
        (["--address", "auto"], {}, "--address auto: no Ray cluster there that can be used: "),
        (["--address", "ray://127.0.0.1:1"], {}, "refused"),
        (["--address", "head"], {}, "HOST:PORT"),
        ([], {"runtime.threads": 4096}, "needs 4096 CPU cores and 0 GPUs on one node, which no node"),
    ],
)
def test_no_cluster_at_an_address_and_no_node_that_is_large_enough_are_one_line(
    ray, tmp_path, capsys, address, settings, expected
):
    path = write_sweep(tmp_path, set=settings)
    assert main(["sweep", str(path), "--launcher", "ray", *address]) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert error.count("\n") == 1
    assert not (tmp_path / "cells").exists()
    assert not ray.is_initialized()


def test_without_ray_one_line_names_the_extra(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["sweep", str(write_sweep(tmp_path)), "--address", "auto"]) == 2
    assert "--address: only --launcher ray has one" in capsys.readouterr().err
    assert main(["sweep", str(write_sweep(tmp_path)), "--launcher", "ray"]) == 2
    assert capsys.readouterr().err == "brx: --launcher ray: Ray is not installed: pip install 'brx[ray]'\n"
