"""Sweeps with real processes: done cells are skipped, killed ones resume, none runs twice; on a Ray
cluster, too."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from brx.cli.main import main
from brx.config.loading import dump_config
from brx.environment import brx_command, child_environment
from brx.methods.trajectory_version import TRAJECTORY_VERSION
from brx.sweep.choice import choose, tried_cells
from brx.sweep.run import calibrate, check_names
from brx.sweep.spec import State, Sweep, state_of
from brx.train.build import assemble
from brx.train.loop import train
from tests.processes import start_brx
from tests.sweep.helpers import write_sweep
from tests.train.helpers import losses, tiny_config, wait_for_lines


def states(path):
    return [state_of(cell) for cell in Sweep.load(path).cells]


def test_cells_equal_runs_by_hand_and_are_skipped_the_second_time(tmp_path, printed):
    path = write_sweep(tmp_path)
    out = printed("sweep", path, "--dry-run", "--jobs", "2")
    assert (out.count("waiting"), "4 cells" in out, "with 2 at a time" in out) == (5, True, True)
    assert not (tmp_path / "cells").exists()
    printed("sweep", path, "--jobs", "2")
    cells = Sweep.load(path).cells
    assert states(path) == [State.DONE] * 4
    train(cells[1].config, tmp_path / "by-hand")
    assert losses(cells[1].folder) == losses(tmp_path / "by-hand")
    before = [(cell.folder / "metrics.jsonl").stat().st_mtime_ns for cell in cells]
    assert "all 4 cells are done" in printed("sweep", path)
    assert [(cell.folder / "metrics.jsonl").stat().st_mtime_ns for cell in cells] == before


def test_a_cell_told_to_stop_early_is_continued_and_done_for_its_trajectory_version(
    tmp_path, capsys, monkeypatch
):
    path = write_sweep(tmp_path, grid={"pipeline.stages": [4]})
    (cell,) = Sweep.load(path).cells
    stopped = cell.config.training.model_copy(update={"stop_after": 3})
    train(cell.config.model_copy(update={"training": stopped}), cell.folder)
    assert states(path) == [State.INTERRUPTED]
    assert main(["sweep", str(path), "--jobs", "1"]) == 0
    assert states(path) == [State.DONE]
    assert losses(cell.folder)[-1]["iteration"] == 30
    monkeypatch.setattr("brx.methods.trajectory_version.TRAJECTORY_VERSION", TRAJECTORY_VERSION + 1)
    assert main(["sweep", str(path), "--jobs", "1"]) == 2
    assert f"trained at trajectory version {TRAJECTORY_VERSION}" in capsys.readouterr().err.replace(
        "\n", " "
    )
    another = dump_config(tiny_config(tmp_path, "optimizer.lr=0.5"))
    (cell.folder / "config.yaml").write_text(another)
    for _ in range(2):  # whether or not it is done
        assert main(["sweep", str(path), "--jobs", "1"]) == 2
        assert (
            "config.yaml: differs from what the sweep asks for"
            in capsys.readouterr().err.replace("\n", " ")
        )
        assert (cell.folder / "config.yaml").read_text() == another
        (cell.folder / "summary.json").unlink(missing_ok=True)


def test_a_failed_cell_is_recorded_and_the_rest_goes_on(tmp_path, capsys):
    path = write_sweep(tmp_path, grid={"optimizer.lr": [1e30, 0.01]})
    assert main(["sweep", str(path), "--jobs", "1"]) == 1
    assert states(path) == [State.FAILED, State.DONE]
    failed = Sweep.load(path).cells[0].folder / "failed.txt"
    assert "lower optimizer.lr" in failed.read_text()
    assert "failed cell" in capsys.readouterr().out
    failed.write_text("exit code 1: left alone\n")
    assert main(["sweep", str(path)]) == 1  # not tried again unless asked to
    assert failed.read_text() == "exit code 1: left alone\n"
    assert main(["sweep", str(path), "--retry-failed"]) == 1
    assert "lower optimizer.lr" in failed.read_text()


def test_interrupted_and_killed_sweeps_continue_to_the_same_numbers(tmp_path):
    grid = {"pipeline.stages": [4, 2]}
    path = write_sweep(
        tmp_path, grid=grid, set={"training.iterations": 150, "training.checkpoint_every": 10}
    )
    cells = Sweep.load(path).cells
    process = start_brx("sweep", path, "--jobs", "1")
    wait_for_lines(cells[0].folder / "metrics.jsonl", 10, process)
    os.killpg(
        process.pid, signal.SIGINT
    )  # as a terminal does: to whatever the sweep has started, too
    assert process.wait(300) == 130
    assert states(path) == [State.INTERRUPTED, State.WAITING]
    process = start_brx("sweep", path, "--jobs", "1")
    wait_for_lines(cells[0].folder / "metrics.jsonl", 60, process)
    os.killpg(
        process.pid, signal.SIGKILL
    )  # the sweep alone: its cell is in a session of its own and goes on
    process.wait(300)
    assert state_of(cells[0]) in (State.RUNNING, State.DONE)
    assert main(["sweep", str(path), "--jobs", "1"]) == 0
    assert states(path) == [State.DONE] * 2
    for cell in cells:
        train(cell.config, tmp_path / "by-hand" / cell.name)
        assert losses(cell.folder) == losses(tmp_path / "by-hand" / cell.name)


def test_a_killed_cell_is_told_and_the_rest_goes_on_with_the_machine_s_threads(tmp_path):
    grid = {
        "case": [{"training.iterations": 300}, {"training.iterations": 4, "runtime.threads": None}]
    }
    path = write_sweep(tmp_path, grid=grid)
    killed, other = Sweep.load(path).cells
    process = start_brx("sweep", path, "--jobs", "1")
    wait_for_lines(killed.folder / "metrics.jsonl", 5, process)
    _, pid, *_ = (killed.folder / ".lock").read_text().split()
    os.kill(int(pid), signal.SIGKILL)
    assert process.wait(300) == 1
    assert states(path) == [State.FAILED, State.DONE]
    assert (killed.folder / "failed.txt").read_text().startswith("killed by SIGKILL: ")
    # The server of the processes was started with one thread; each gets its share of the machine
    # nevertheless.
    assert (
        json.loads((other.folder / "summary.json").read_text())["device"]["threads"]
        == os.cpu_count()
    )


def test_two_sweeps_at_once_run_no_cell_twice(tmp_path, capsys):
    path = write_sweep(tmp_path)
    first = Sweep.load(path).cells[0].folder
    process = start_brx("sweep", path, "--jobs", "1")
    wait_for_lines(first / "metrics.jsonl", 1, process)
    capsys.readouterr()
    # The second sweep, in this process, begins while the other one runs a cell.
    assert main(["sweep", str(path), "--jobs", "1"]) == 0
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    errors += capsys.readouterr().err
    lines = [line for line in errors.splitlines() if line.startswith("running: ")]
    assert states(path) == [State.DONE] * 4
    assert len(lines) == len({line.split()[1] for line in lines}) == 4


def test_a_choice_at_the_edge_goes_on_beyond_the_grid_until_it_is_none_and_is_repeated(
    tmp_path, capsys
):
    def write(**choice):
        grid = {"pipeline.stages": [4], "optimizer.lr": [1e-4, 1e-3]}
        return write_sweep(
            tmp_path, grid=grid, choose=choice, repeat={"set": {"training.seed": [1]}}
        )

    path = write()
    for cell in Sweep.load(path).cells:
        train(cell.config, cell.folder)
    assert main(["sweep", str(path)]) == 0
    assert "at the edge: widen the grid" in (tmp_path / "cells" / "choice-sweep.csv").read_text()
    assert "at the edge" in capsys.readouterr().out.replace("\n", " ")
    write(over="optimizer.lr", further=[1e-5, 0.01, 1e20, 1e30])
    assert main(["sweep", str(path), "--jobs", "2"]) == 1  # 1e20 diverges
    sweep = Sweep.load(path)
    tried = tried_cells(sweep)
    assert [cell.name for cell in tried[len(sweep.cells) :]] == ["p4-lr0.01-s0", "p4-lr1e+20-s0"]
    assert [state_of(cell) for cell in tried] == [State.DONE] * 3 + [State.FAILED]
    choices = choose(tried, sweep.spec.choose).set_index("optimizer.lr")
    assert choices.index[choices["is_best"]].tolist() == [0.01]
    assert not choices["at_edge"].any()
    assert choices["score"][1e20] == float("inf")
    text = (tmp_path / "cells" / "choice-sweep.csv").read_text()
    assert "p4,0.01," in text
    assert "p4,1e+20,failed,," in text
    seeds = sorted(
        folder.name.partition("--")[0] for folder in (tmp_path / "cells").glob("*-s1--*")
    )
    assert seeds == [
        "p4-lr0.001-s1",
        "p4-lr0.01-s1",
    ]  # of the first sweep's choice, and of this one's
    (tried[-1].folder / "summary.json").unlink()  # as if it had failed otherwise
    assert main(["sweep", str(path)]) == 1


@pytest.fixture
def ray():
    return pytest.importorskip("ray", reason="Ray is not installed: pip install 'ray[client]'")


def runner_of(folder):
    """The process id of the Ray task that runs the cell in a folder: the parent of its `brx
    train`."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(folder).encode() in path.read_bytes().split(b"\0"):
                return int(path.with_name("stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended meanwhile
            continue
    raise AssertionError(f"no process runs {folder}")


def test_the_same_folders_as_the_local_launcher_and_failures_told(ray, tmp_path, capsys):
    path = write_sweep(
        tmp_path, grid={"pipeline.stages": [4, 1], "optimizer.lr": [0.01, 1e30]}, choose={}
    )
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
    choices = [
        (folder / "choice-sweep.csv").read_text()
        for folder in (tmp_path / "cells", tmp_path / "local")
    ]
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
    assert process.wait(180) == 0, process.errors()
    for cell in cells:
        train(cell.config, tmp_path / "by-hand" / cell.name)
        assert losses(cell.folder) == losses(tmp_path / "by-hand" / cell.name)


@pytest.mark.parametrize(
    ("address", "settings", "expected"),
    [
        (["--address", "auto"], {}, "--address auto: no Ray cluster there that can be used: "),
        (["--address", "ray://127.0.0.1:1"], {}, "refused"),
        (["--address", "head"], {}, "HOST:PORT"),
        (
            [],
            {"runtime.threads": 4096},
            "needs 4096 CPU cores and 0 GPUs on one node, which no node",
        ),
    ],
)
def test_no_cluster_at_an_address_and_no_node_that_is_large_enough_are_one_line(
    ray, tmp_path, refused, address, settings, expected
):
    assert expected in refused(
        "sweep", write_sweep(tmp_path, set=settings), "--launcher", "ray", *address
    )
    assert not (tmp_path / "cells").exists()
    assert not ray.is_initialized()


def test_without_ray_one_line_names_the_extra(tmp_path, monkeypatch, refused):
    monkeypatch.setitem(sys.modules, "ray", None)
    path = write_sweep(tmp_path)
    assert "--address: needs --launcher ray" in refused("sweep", path, "--address", "auto")
    assert "Ray is not installed: pip install 'ray[client]'" in refused(
        "sweep", path, "--launcher", "ray"
    )


@pytest.mark.parametrize(
    "temporary",
    ["t", pytest.param("t" * 100, marks=pytest.mark.slow, id="too long for a socket")],
)
def test_cells_find_brx_beside_a_folder_of_that_name(temporary, tmp_path):
    (tmp_path / "brx").mkdir()
    (tmp_path / temporary).mkdir()
    path = write_sweep(
        tmp_path,
        grid={"pipeline.stages": [2]},
        set={"training.iterations": 3, "pipeline.devices": 2},
    )
    ended = subprocess.run(
        brx_command("sweep", str(path), "--jobs", "1"),
        cwd=tmp_path,
        env={**child_environment(), "TMPDIR": str(tmp_path / temporary)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert states(path) == [State.DONE]


@pytest.fixture
def strange_file_system(monkeypatch):
    """Lets the file system refuse names as another one would: gives the errno by name."""
    answers = {}
    mkdir = Path.mkdir

    def refusing(path, *arguments, **options):
        for part, number in answers.items():
            if part in path.name:
                raise OSError(number, os.strerror(number))
        mkdir(path, *arguments, **options)

    monkeypatch.setattr(Path, "mkdir", refusing)
    return answers


@pytest.mark.parametrize("number", [errno.ENAMETOOLONG, errno.EILSEQ, errno.EEXIST])
def test_bad_name_is_found_before_any_run(number, strange_file_system, tmp_path, refused):
    strange_file_system["nesterov"] = number
    told = refused("sweep", write_sweep(tmp_path))
    assert "this file system cannot hold the cell p4-nesterov-s0--" in told
    assert not (tmp_path / "cells").exists()


def test_names_of_repetitions_are_tried(strange_file_system, tmp_path, refused):
    strange_file_system["-s7--"] = errno.ENAMETOOLONG
    path = write_sweep(tmp_path, repeat={"set": {"training.seed": [7]}})
    assert "-s7--" in refused("sweep", path)


def test_trial_of_names_leaves_nothing(tmp_path):
    path = write_sweep(tmp_path)
    before = sorted(tmp_path.iterdir())
    check_names([Sweep.load(path)])
    assert sorted(tmp_path.iterdir()) == before


def test_calibration_ends_when_its_time_is_up(tmp_path, monkeypatch):
    asked = []

    def counted(config, micro_batches, **options):
        def noting(iteration):
            asked.append(iteration)
            return micro_batches(iteration)

        return assemble(config, noting, **options)

    monkeypatch.setattr("brx.sweep.run.assemble", counted)
    monkeypatch.setattr("brx.sweep.run.MOST_CALIBRATION_S", 0.0)
    assert calibrate(Sweep.load(write_sweep(tmp_path)).cells[0].config) > 0.0
    assert asked == [1]
