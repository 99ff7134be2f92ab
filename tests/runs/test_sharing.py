"""What is shared holds nothing else; one damaged run does not stop the others."""

import os
from contextlib import suppress
from contextvars import copy_context

import pytest

from brx.cli.main import main
from brx.errors import DamagedRunError, UserError
from brx.runs.export import export_runs
from brx.runs.folder import stop_at_damage
from brx.runs.frames import load
from tests.runs.helpers import write_run

SHARING = ("slowdown {runs}", "export {runs} --to {out}")
READING = (
    "plot curves {runs} --out {out}/curves",
    "plot main --runs {runs} --out {out}",
    "claims --runs {runs}",
    "tables all --runs {runs}",
    "report --runs {runs} --out {out}/page.html",
    "effective-delay {runs}",
)


@pytest.fixture
def runs(tmp_path):
    """Two runs that are in order, and one whose metrics are garbled."""
    for stages in (1, 2):
        write_run(tmp_path, f"p{stages}", f"pipeline.stages={stages}")
    write_run(tmp_path, "damaged", "training.seed=1")
    (tmp_path / "runs" / "damaged" / "metrics.jsonl").write_text("?" * 99)
    return tmp_path / "runs"


@pytest.mark.parametrize("command", SHARING)
def test_damaged_run_is_left_out_by_name(command, runs, tmp_path, capsys):
    words = [word.format(runs=runs, out=tmp_path / "out") for word in command.split()]
    assert main(words) == 0
    assert f"left out (--strict stops): {runs}/damaged/metrics.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize("command", [*SHARING, *READING])
def test_strict_stops_at_a_damaged_run(command, runs, tmp_path, refused):
    words = [word.format(runs=runs, out=tmp_path / "out") for word in command.split()]
    assert "damaged/metrics.jsonl: holds no training loss" in refused(*words, "--strict")


def test_strict_damage_is_caught_by_no_figure(runs):
    def read_strictly():
        stop_at_damage(True)
        with suppress(UserError):
            load(runs)

    with pytest.raises(DamagedRunError, match="holds no training loss"):
        copy_context().run(read_strictly)


def test_note_names_no_option_that_is_missing(runs, capsys):
    load(runs)
    assert "left out: " in capsys.readouterr().err


def test_damaged_run_alone_is_refused(runs):
    with pytest.raises(UserError, match="holds no training loss"):
        load(runs / "damaged")


@pytest.mark.parametrize(
    "line", ['"train_loss": 1e400', '"train_loss": ' + "9" * 400, '"train_loss": "\\u001b[31m"']
)
def test_impossible_loss_is_left_out(line, runs):
    path = runs / "p2" / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    lines[2] = f'{{"iteration": 3, {line}, "seconds": 1.5}}\n'
    path.write_text("".join(lines))
    assert len(load(runs / "p2")) == 1


@pytest.mark.parametrize("name", ["summary.json", "failed.txt", "config.yaml", "analysis/x.json"])
def test_link_in_a_run_is_refused(name, runs, tmp_path):
    secret = tmp_path / "secret"
    place = runs / "p2" / name
    place.parent.mkdir(exist_ok=True)
    secret.write_text(place.read_text() if place.is_file() else "secret")
    place.unlink(missing_ok=True)
    place.symlink_to(secret)
    with pytest.raises(UserError, match=f"{name}: is a link"):
        export_runs([runs / "p2"], tmp_path / "out")
    assert not (tmp_path / "out" / "p2").exists()


def test_folder_that_is_no_export_is_kept(runs, tmp_path):
    mine = tmp_path / "out" / "p2" / "notes.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    with pytest.raises(UserError, match=r"holds notes.txt, which belongs to no export"):
        export_runs([runs / "p2"], tmp_path / "out")
    assert mine.read_text() == "mine"


def test_export_is_replaced_by_a_newer_one(runs, tmp_path):
    for _ in range(2):
        assert export_runs([runs / "p2"], tmp_path / "out") == (1, 0)


@pytest.mark.parametrize("name", ["summary.json", "metrics.jsonl", "config.yaml"])
def test_pipe_in_a_run_is_not_waited_for(name, runs):
    path = runs / "p2" / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    assert "p1" in set(load(runs)["name"])


def test_run_of_the_longest_name_is_exported(runs, tmp_path):
    name = "x" * 255
    (runs / "p2").rename(runs / name)
    assert export_runs([runs / name], tmp_path / "out") == (1, 0)
    assert (tmp_path / "out" / name / "curves.npz").is_file()
