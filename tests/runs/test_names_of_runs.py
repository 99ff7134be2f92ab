"""One odd name never stops the analysis of a folder."""

import pytest

from brx.cli.main import main
from brx.config.loading import find_config
from brx.runs.folder import default_folder, find_runs
from brx.runs.frames import curves, load
from tests.runs.helpers import ITERATIONS, write_run
from tests.train.helpers import tiny_config

ODD = ["caf\udce9", "..my_method.Mine", "$a $b", "a\x1b[31m", "_x", "a\nb", "\ufeffa", "[bold]b"]


@pytest.fixture
def folder(tmp_path):
    for seed, name in enumerate(ODD):
        write_run(tmp_path, name, f"training.seed={seed}")
        write_run(tmp_path, f"{name}-1", f"training.seed={seed}", "pipeline.stages=1")
    return tmp_path / "runs"


def test_every_name_is_found(folder):
    assert {path.name for path in find_runs([folder])} >= set(ODD)


def test_frames_hold_every_name(folder):
    runs = load(folder)
    assert len(runs) == 2 * len(ODD)
    assert runs["name"].map(str.isprintable).all()
    assert len(curves(runs)) == 2 * len(ODD) * ITERATIONS


@pytest.mark.parametrize(
    "command",
    ["slowdown {runs}", "plot curves {runs} --out {out}/f", "export {runs} --to {out}/exported"],
)
def test_commands_take_every_name(command, folder, tmp_path, capfd):
    assert main([word.format(runs=folder, out=tmp_path) for word in command.split()]) == 0
    output, error = capfd.readouterr()
    assert "\x1b" not in output + error


@pytest.mark.parametrize("given", [".", "checkpoints/.."])
def test_run_in_the_working_folder_has_its_name(given, tmp_path, monkeypatch):
    write_run(tmp_path, "mine")
    (tmp_path / "runs" / "mine" / "checkpoints").mkdir()
    monkeypatch.chdir(tmp_path / "runs" / "mine")
    assert load(given)["name"].tolist() == ["mine"]


def test_export_under_way_is_no_run(folder):
    (folder / "caf\udce9").rename(folder / ".caf.17.tmp")
    assert ".caf.17.tmp" not in {path.name for path in find_runs([folder])}


def test_default_folder_of_an_odd_method_is_visible(tmp_path):
    (tmp_path / "..odd name.py").write_text("")
    config = tiny_config(tmp_path, f"optimizer.method='{tmp_path}/..odd name.py:Mine'")
    folder = default_folder(config, find_config("quick"))
    assert folder.name.startswith("quick-..odd-name.Mine-p4-s0-")


def test_default_folder_names_another_model_class(tmp_path):
    config = tiny_config(tmp_path, "model.class=llama")
    assert default_folder(config, find_config("quick")).name == "quick-llama-pipedream-p4-s0"


def test_default_folder_omits_the_presets_own_class(tmp_path):
    config = tiny_config(tmp_path, "model.class=llama")
    folder = default_folder(config, find_config("similar-llama"))
    assert folder.name == "similar-llama-pipedream-p4-s0"


def test_link_to_another_run_is_left_out(folder, capsys):
    (folder / "latest").symlink_to("_x")
    assert folder / "latest" not in find_runs([folder])
    assert "latest: left out, a link to _x in the same folder" in capsys.readouterr().err


def test_link_to_a_run_elsewhere_is_read(folder, tmp_path):
    (tmp_path / "chosen").mkdir()
    (tmp_path / "chosen" / "one").symlink_to(folder / "_x")
    assert find_runs([tmp_path / "chosen"]) == [tmp_path / "chosen" / "one"]
