"""Sweeps with real processes: done cells are skipped, killed ones resume, none runs twice; on a Ray
cluster, too."""

import errno
import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from brx.cli.main import main
from brx.config.loading import dump_config
from brx.data.prepare import prepare
from brx.environment import brx_command, child_environment, num_cores
from brx.files import write_json
from brx.methods.trajectory_version import TRAJECTORY_VERSION
from brx.runs.lock import lock
from brx.sweep.cell import CELLS_LOCK, placed
from brx.sweep.checks import check_names
from brx.sweep.choice import choose, tried_cells
from brx.sweep.run import run_and_print
from brx.sweep.spec import Sweep
from brx.sweep.state import State, prepare_folder, state_of
from brx.train.loop import train
from tests.processes import start_brx
from tests.sweep.helpers import Pretending, finish, write_sweep
from tests.train.helpers import losses, tiny_config, wait_for_lines


def states(path):
    return [state_of(cell) for cell in Sweep.load(path).cells]


def test_dry_run_lists_cells(tmp_path, printed):
    out = printed("sweep", write_sweep(tmp_path), "--dry-run", "--jobs", "2")
    assert out.count("waiting") == 4 + 1  # a line per cell, and the count
    assert "4 cells" in out
    assert "with 2 at a time" in out


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ({"runtime.device": "cuda"}, "too large to time without a GPU"),
        ({"runtime.graphs": True}, "with 1 at a time"),
    ],
)
def test_dry_run_needs_no_gpu(setting, expected, tmp_path, printed):
    out = printed("sweep", write_sweep(tmp_path, set=setting), "--dry-run", "--jobs", "1")
    assert f"{expected}\n" in out


def test_dry_run_writes_nothing(tmp_path, printed):
    printed("sweep", write_sweep(tmp_path), "--dry-run")
    assert not (tmp_path / "cells").exists()


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """A sweep file whose four cells are done."""
    path = write_sweep(tmp_path_factory.mktemp("swept"))
    assert main(["sweep", str(path), "--jobs", "2"]) == 0
    assert states(path) == [State.DONE] * 4
    return path


def test_cell_equals_a_run_by_hand(swept, tmp_path):
    cell = Sweep.load(swept).cells[1]
    train(cell.config, tmp_path / "by-hand")
    assert losses(cell.folder) == losses(tmp_path / "by-hand")


def test_done_cells_are_skipped(swept, printed):
    files = [cell.folder / "metrics.jsonl" for cell in Sweep.load(swept).cells]
    before = [file.stat().st_mtime_ns for file in files]
    assert "all 4 cells are done" in printed("sweep", swept)
    assert [file.stat().st_mtime_ns for file in files] == before


def test_single_cell_is_no_plural(tmp_path, printed):
    path = write_sweep(tmp_path, grid={"training.seed": [0]})
    assert "/sweep.yaml: 1 cell in " in printed("sweep", path, "--dry-run", "--jobs", "1")
    assert "the only cell is done" in printed("sweep", path, "--jobs", "1")


def test_done_cell_of_another_version_is_refused(swept, monkeypatch, refused):
    monkeypatch.setattr("brx.methods.trajectory_version.TRAJECTORY_VERSION", TRAJECTORY_VERSION + 1)
    told = refused("sweep", swept, "--jobs", "1")
    assert f"trained at trajectory version {TRAJECTORY_VERSION}" in told


def test_equal_cells_of_two_sweeps_train_once(tmp_path):
    sweeps = []
    for name, grid in (
        ("by_stages", {"pipeline.stages": [4]}),
        ("by_rate", {"optimizer.lr": [0.01]}),
    ):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "tiny.yaml").write_text(dump_config(tiny_config(tmp_path)))
        sweeps.append(str(write_sweep(folder, grid=grid, out=str(tmp_path / "cells"))))
    assert main(["sweep", *sweeps, "--jobs", "1"]) == 0
    assert len(list((tmp_path / "cells").glob("*--*"))) == 1


@pytest.fixture
def pretended(monkeypatch):
    """Runs a sweep without training; gives the cells that it started."""
    monkeypatch.setattr("brx.sweep.run._prepare_data", lambda sweep, *, retry_failed: None)
    monkeypatch.setattr("brx.sweep.run.POLL_S", 0.0)

    def run(sweep, loss_of, *, retry_failed=False):
        launcher = Pretending(loss_of)
        run_and_print(sweep, launcher, retry_failed=retry_failed)
        return launcher.started

    return run


def two_names_of_a_cell(folder):
    """Sweeps that share a folder, where the only cell of the second is the last of the first."""
    first = Sweep.load(write_sweep(folder, grid={"optimizer.lr": [1e-3, 3e-3]}))
    settings = {"optimizer.lr": 3e-3}
    second = Sweep.load(write_sweep(folder, grid={"pipeline.stages": [4]}, set=settings))
    assert first.cells[1].folder != second.cells[0].folder
    return first, second


def test_cell_that_another_sweep_began_meanwhile_trains_once(tmp_path, pretended):
    first, second = two_names_of_a_cell(tmp_path)
    of_second = []

    def loss_of(cell):
        if not of_second:  # the other sweep runs while the first one's first cell trains
            of_second.extend(pretended(second, lambda other: 2.0))
        return 3.0

    of_first = pretended(first, loss_of)
    assert [cell.name for cell in of_first + of_second] == ["lr0.001-s0", "p4-s0"]
    assert len(list(first.out.glob("*--*"))) == 2


def test_folder_of_a_cell_is_made_by_one_sweep_at_a_time(tmp_path):
    """The one that comes second takes the folder of the first."""
    first, second = two_names_of_a_cell(tmp_path)
    with ThreadPoolExecutor() as other:
        with lock(first.out, name=CELLS_LOCK):
            waiting = other.submit(placed, first.cells[1])
            with pytest.raises(TimeoutError):
                waiting.result(timeout=0.2)
            second.cells[0].folder.mkdir()
        assert waiting.result().folder == second.cells[0].folder


def test_failures_of_cells_with_one_name_are_all_told(tmp_path, pretended, capsys):
    """Names of the grid are made distinct, those of repetitions are not."""
    grid = {"p": [{"pipeline.stages": 4, "training.clip": clip} for clip in (1.0, 1.0000001)]}
    sweep = Sweep.load(write_sweep(tmp_path, grid=grid, repeat={"set": {"training.seed": [1]}}))
    names = [cell.name for cell in sweep.repetitions(sweep.cells)]
    assert names[0] == names[1]
    pretended(sweep, lambda cell: None if cell.config.training.seed else 1.0)
    told = capsys.readouterr()
    assert told.out.count(f"failed cell {names[0]}: killed by SIGKILL") == 2
    assert "[2 of 4 done" in told.err


def test_search_goes_on_after_a_cell_that_is_retried(tmp_path, pretended):
    """Its result changes the best rate, and the further ones to try."""
    losses = {3e-5: 4.5, 1e-4: 4.0, 3e-4: 3.0, 1e-3: 3.5, 3e-3: 2.0, 1e-2: 1.0, 3e-2: 1.5}
    choice = {"further": [3e-5, 1e-4, 1e-2, 3e-2], "seed": 100}
    grid = {"optimizer.lr": [3e-4, 1e-3, 3e-3]}
    repeat = {"set": {"training.seed": [0]}}
    sweep = Sweep.load(write_sweep(tmp_path, grid=grid, choose=choice, repeat=repeat))
    killed = losses | {3e-3: None}
    pretended(sweep, lambda cell: killed[cell.config.optimizer.lr])
    retried = pretended(sweep, lambda cell: losses[cell.config.optimizer.lr], retry_failed=True)
    started = [(cell.config.optimizer.lr, cell.config.training.seed) for cell in retried]
    assert started == [(3e-3, 100), (1e-2, 100), (3e-2, 100), (1e-2, 0)]


def test_cell_stopped_early_is_continued(tmp_path):
    path = write_sweep(tmp_path, grid={"pipeline.stages": [4]})
    (cell,) = Sweep.load(path).cells
    stopped = cell.config.training.model_copy(update={"stop_after": 3})
    train(cell.config.model_copy(update={"training": stopped}), cell.folder)
    assert states(path) == [State.INTERRUPTED]
    assert main(["sweep", str(path), "--jobs", "1"]) == 0
    assert states(path) == [State.DONE]
    assert losses(cell.folder)[-1]["iteration"] == 30


def test_cell_that_went_further_is_refused(tmp_path, refused):
    path = write_sweep(tmp_path, grid={"pipeline.stages": [4]})
    finish(Sweep.load(path).cells[0], loss=1.0)
    path = write_sweep(tmp_path, grid={"pipeline.stages": [4]}, set={"training.stop_after": 20})
    assert "has made 30 already; give as many" in refused("sweep", path, "--jobs", "1")


@pytest.mark.parametrize("status", ["finished", "running"])
def test_folder_with_another_run_is_refused(status, tmp_path, refused):
    path = write_sweep(tmp_path, grid={"pipeline.stages": [4]})
    (cell,) = Sweep.load(path).cells
    prepare_folder(cell)
    another = dump_config(tiny_config(tmp_path, "optimizer.lr=0.5"))
    (cell.folder / "config.yaml").write_text(another)
    write_json(cell.folder / "summary.json", {"status": status, "iteration": 30})
    told = refused("sweep", path, "--jobs", "1")
    assert "config.yaml: optimizer.lr was 0.5 and is now 0.01 in the sweep" in told
    assert (cell.folder / "config.yaml").read_text() == another


def test_failed_cell_is_recorded(tmp_path, capsys):
    """And the rest goes on."""
    path = write_sweep(tmp_path, grid={"optimizer.lr": [1e30, 0.01]})
    assert main(["sweep", str(path), "--jobs", "1"]) == 1
    assert states(path) == [State.FAILED, State.DONE]
    failed = Sweep.load(path).cells[0].folder / "failed.txt"
    assert "lower optimizer.lr" in failed.read_text()
    assert "failed cell" in capsys.readouterr().out


def test_data_that_cannot_be_had_are_refused_once(tmp_path, refused):
    path = write_sweep(tmp_path, set={"data.source": str(tmp_path / "nothing.txt")})
    assert "data.source: " in refused("sweep", path, "--jobs", "1")
    assert not list(tmp_path.glob("cells/*--*"))


def test_data_that_do_not_suffice_are_refused_once(tmp_path, refused):
    path = write_sweep(tmp_path, set={"data.max_epochs": 0.001})
    prepare(Sweep.load(path).cells[0].config.data, quiet=True)
    assert "allow it with data.max_epochs" in refused("sweep", path, "--jobs", "1")
    assert not list(tmp_path.glob("cells/*--*"))


def test_cells_on_changed_data_are_refused(tmp_path, refused):
    # Their losses would be compared with those of the cells that are done.
    path = write_sweep(tmp_path, grid={"optimizer.lr": [1e-3, 3e-3]})
    done, waiting = Sweep.load(path).cells
    finish(done, 1.0, data_fingerprint=prepare(done.config.data, quiet=True).fingerprint)
    with (tmp_path / "text.txt").open("a") as file:
        file.write("one more line\n" * 100)
    prepare(done.config.data, quiet=True)
    message = refused("sweep", path, "--jobs", "1")
    assert f"has changed since cell {done.name} was trained" in message
    assert not waiting.folder.exists()


def test_cells_with_other_data_settings_may_differ(tmp_path, pretended, capsys):
    path = write_sweep(tmp_path, grid={"data.split_seed": [0, 1]})
    for cell, fingerprint in zip(Sweep.load(path).cells, "ab", strict=True):
        finish(cell, 1.0, data_fingerprint=fingerprint)
    pretended(Sweep.load(path), None)
    assert "has changed" not in capsys.readouterr().err


def test_data_that_change_meanwhile_are_told(tmp_path, pretended, capsys):
    path = write_sweep(tmp_path, grid={"optimizer.lr": [1e-3, 3e-3, 1e-2]})
    for cell, fingerprint in zip(Sweep.load(path).cells, "aab", strict=True):
        finish(cell, 1.0, data_fingerprint=fingerprint)
    pretended(Sweep.load(path), None)
    note = capsys.readouterr().err
    assert "lr0.001-s0 trained on other data (fingerprint a) than lr0.01-s0 (b)" in note


def test_interrupted_cell_goes_on_without_the_text(tmp_path):
    path = write_sweep(tmp_path, grid={"pipeline.stages": [4]})
    (cell,) = Sweep.load(path).cells
    stopped = cell.config.training.model_copy(update={"stop_after": 10})
    train(cell.config.model_copy(update={"training": stopped}), cell.folder)
    (tmp_path / "text.txt").unlink()
    assert main(["sweep", str(path), "--jobs", "1"]) == 0
    assert states(path) == [State.DONE]


@pytest.fixture
def failed_before(tmp_path):
    """A sweep file whose only cell has failed."""
    path = write_sweep(tmp_path, grid={"optimizer.lr": [1e30]})
    (cell,) = Sweep.load(path).cells
    prepare_folder(cell)
    (cell.folder / "failed.txt").write_text("exit code 1: left alone\n")
    return path, cell.folder / "failed.txt"


def test_failed_cell_is_not_tried_again(failed_before):
    path, failed = failed_before
    assert main(["sweep", str(path)]) == 1
    assert failed.read_text() == "exit code 1: left alone\n"


def test_failed_cell_is_tried_again_on_request(failed_before):
    path, failed = failed_before
    assert main(["sweep", str(path), "--retry-failed"]) == 1
    assert "lower optimizer.lr" in failed.read_text()


def test_interrupted_sweep_continues_to_the_same_numbers(tmp_path):
    grid = {"pipeline.stages": [4, 2]}
    path = write_sweep(
        tmp_path, grid=grid, set={"training.iterations": 150, "training.checkpoint_every": 10}
    )
    cells = Sweep.load(path).cells
    process = start_brx("sweep", path, "--jobs", "1")
    wait_for_lines(cells[0].folder / "metrics.jsonl", 10, process)
    # As a terminal does: to whatever the sweep has started, too.
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(300) == 130
    assert states(path) == [State.INTERRUPTED, State.WAITING]
    process = start_brx("sweep", path, "--jobs", "1")
    wait_for_lines(cells[0].folder / "metrics.jsonl", 60, process)
    # The sweep alone: its cell is in a session of its own and goes on.
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(300)
    assert state_of(cells[0]) in (State.RUNNING, State.DONE)
    assert main(["sweep", str(path), "--jobs", "1"]) == 0
    assert states(path) == [State.DONE] * 2
    for cell in cells:
        train(cell.config, tmp_path / "by-hand" / cell.name)
        assert losses(cell.folder) == losses(tmp_path / "by-hand" / cell.name)


@pytest.fixture(scope="module")
def cell_killed(tmp_path_factory):
    """A sweep file of two cells, whose first was killed; and the exit code of the sweep."""
    cases = [{"training.iterations": 300}, {"training.iterations": 4, "runtime.threads": None}]
    path = write_sweep(tmp_path_factory.mktemp("killed"), grid={"case": cases})
    folder = Sweep.load(path).cells[0].folder
    process = start_brx("sweep", path, "--jobs", "1")
    wait_for_lines(folder / "metrics.jsonl", 5, process)
    _, pid, *_ = (folder / ".lock").read_text().split()
    os.kill(int(pid), signal.SIGKILL)
    return path, process.wait(300)


def test_killed_cell_is_told(cell_killed):
    path, code = cell_killed
    assert code == 1
    folder = Sweep.load(path).cells[0].folder
    assert (folder / "failed.txt").read_text().startswith("killed by SIGKILL: ")


def test_rest_goes_on_after_a_killed_cell(cell_killed):
    path, _ = cell_killed
    assert states(path) == [State.FAILED, State.DONE]


def test_cell_gets_its_share_of_the_threads(cell_killed):
    """Although the server of the processes was started with one thread."""
    path, _ = cell_killed
    summary = json.loads((Sweep.load(path).cells[1].folder / "summary.json").read_text())
    assert summary["device"]["threads"] == num_cores()


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


def rate_sweep(folder, **choice):
    """A sweep file that chooses between two rates, and repeats the better one."""
    grid = {"pipeline.stages": [4], "optimizer.lr": [1e-4, 1e-3]}
    repeat = {"set": {"training.seed": [1]}}
    return write_sweep(folder, grid=grid, choose=choice, repeat=repeat)


@dataclass
class Search:
    """A search for a rate: first within the grid, then with further rates."""

    sweep: Sweep
    first_table: str
    code: int  # exit code of the second part

    @property
    def tried(self):
        return tried_cells(self.sweep)

    @property
    def choices(self):
        return choose(self.tried, self.sweep.spec.choose).set_index("optimizer.lr")

    @property
    def table(self):
        return (self.sweep.out / "choice-sweep.csv").read_text()


@pytest.fixture(scope="module")
def search(tmp_path_factory):
    folder = tmp_path_factory.mktemp("search")
    path = rate_sweep(folder)
    for cell in Sweep.load(path).cells:
        train(cell.config, cell.folder)
    assert main(["sweep", str(path)]) == 0
    first_table = (folder / "cells" / "choice-sweep.csv").read_text()
    rate_sweep(folder, over="optimizer.lr", further=[1e-5, 0.01, 1e20, 1e30])
    code = main(["sweep", str(path), "--jobs", "2"])
    return Search(Sweep.load(path), first_table, code)


def test_choice_at_the_edge_is_told(search):
    assert "at the edge: widen the grid" in search.first_table


def test_search_goes_on_beyond_the_grid(search):
    beyond = search.tried[len(search.sweep.cells) :]
    assert [cell.name for cell in beyond] == ["p4-lr0.01-s0", "p4-lr1e+20-s0"]


def test_search_ends_at_a_rate_that_diverges(search):
    assert search.code == 1
    assert [state_of(cell) for cell in search.tried] == [State.DONE] * 3 + [State.FAILED]


def test_best_rate_is_no_longer_at_the_edge(search):
    choices = search.choices
    assert choices.index[choices["is_best"]].tolist() == [0.01]
    assert not choices["at_edge"].any()


def test_table_has_rates_beyond_the_grid(search):
    assert "p4,0.01," in search.table
    assert "p4,1e+20,failed,," in search.table


def test_each_choice_is_repeated(search):
    repeated = {folder.name.partition("--")[0] for folder in search.sweep.out.glob("*-s1--*")}
    assert repeated == {"p4-lr0.001-s1", "p4-lr0.01-s1"}  # the first choice, and the second


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


def test_ray_leaves_the_same_folders(ray, tmp_path, capsys):
    path = write_sweep(
        tmp_path, grid={"pipeline.stages": [4, 1], "optimizer.lr": [0.01, 1e30]}, choose={}
    )
    assert main(["sweep", str(path), "--launcher", "ray", "--jobs", "2"]) == 1
    assert not ray.is_initialized()
    assert "lower optimizer.lr" in capsys.readouterr().out.replace("\n", " ")
    assert main(["sweep", str(path), "--out", str(tmp_path / "local"), "--jobs", "2"]) == 1
    on_ray = Sweep.load(path).cells
    local = Sweep.load(path, tmp_path / "local").cells
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
def test_ray_continues_interrupted_or_lost_cells(ray, tmp_path):
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
def test_cluster_that_cannot_be_used_is_refused(
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
    ("temporary", "num_devices"),
    [
        ("t", 1),
        # Ranks, too, which load torch once more.
        pytest.param("t" * 100, 2, marks=pytest.mark.slow, id="too long for a socket"),
    ],
)
def test_cells_find_brx_despite_a_folder_brx(temporary, num_devices, tmp_path):
    (tmp_path / "brx").mkdir()
    (tmp_path / temporary).mkdir()
    path = write_sweep(
        tmp_path,
        grid={"pipeline.stages": [2]},
        set={"training.iterations": 3, "pipeline.devices": num_devices},
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
