"""Optional trackers: what they are given, and what is said when they cannot be opened."""

import sys
import types
from unittest.mock import MagicMock

import pytest

from brx.cli.main import main
from brx.config.loading import dump_config
from brx.train.loop import train
from tests.train.helpers import losses, tiny_config


@pytest.fixture
def fake(monkeypatch):
    """Make a module with the boards' interface; gives its runs and the arguments of the newest `init`."""

    def make(module, login=lambda: True):
        runs, arguments = [], {}

        def init(**given):
            print("* what Trackio says")
            arguments.clear()
            arguments.update(given)
            runs.append(MagicMock())
            return runs[-1]

        board = types.SimpleNamespace(init=init, login=login, Error=ZeroDivisionError)
        monkeypatch.setitem(sys.modules, module, board)
        return runs, arguments

    return make


@pytest.mark.parametrize(("module", "identity"), [("wandb", "id"), ("trackio", "name")])
def test_a_board_gets_the_metrics_and_a_resumed_run_goes_on(module, identity, fake, tmp_path, capsys):
    runs, arguments = fake(module)
    config = tiny_config(tmp_path, f"logging.{module}=project", "training.iterations=6")
    train(config, tmp_path / "run")
    found = (arguments["project"], arguments["name"].partition("-")[0], arguments["resume"])
    assert found == ("project", "run", "allow")
    assert arguments["config"]["pipeline"]["stages"] == 4
    written = [record["train_loss"] for record in losses(tmp_path / "run") if "train_loss" in record]
    logged = [call.args[0] for call in runs[0].log.call_args_list]
    assert [scalars["train_loss"] for scalars in logged if "train_loss" in scalars] == written
    runs[0].finish.assert_called_once()
    assert capsys.readouterr().out == ""
    first = arguments[identity]
    train(config, tmp_path / "run", resume=True)
    assert arguments[identity] == first
    train(config, tmp_path / "elsewhere" / "run")
    assert arguments[identity] != first  # another folder of the same name is another run


@pytest.mark.parametrize(
    ("module", "override"),
    [
        ("wandb", "logging.wandb=project"),
        ("trackio", "logging.trackio=project"),
        ("torch.utils.tensorboard", "logging.tensorboard=true"),
    ],
)
def test_a_missing_tracker_is_refused_before_there_is_a_run_folder(module, override, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, module, None)
    assert refused(tmp_path, override, capsys).endswith(f"pip install 'brx[{module.rpartition('.')[2]}]'\n")


def test_weights_and_biases_without_a_key_is_refused_before_there_is_a_run_folder(fake, tmp_path, capsys):
    fake("wandb", login=lambda: 1 / 0)
    assert "logging.wandb: division by zero (or set WANDB_MODE" in refused(tmp_path, "logging.wandb=project", capsys)


def refused(folder, override, capsys):
    (folder / "tiny.yaml").write_text(dump_config(tiny_config(folder)))
    assert main(["train", str(folder / "tiny.yaml"), "--out", str(folder / "runs" / "run"), "--set", override]) == 2
    assert not (folder / "runs" / "run").exists()
    assert not (folder / "data").exists()
    return capsys.readouterr().err
