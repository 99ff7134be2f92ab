"""Optional trackers: what they are given, and what is said when they cannot be opened."""

import sys
import types
from unittest.mock import MagicMock

import pytest

from brx.cli.main import main
from brx.config.loading import dump_config
from brx.train.loop import train
from tests.train.helpers import losses, tiny_config


def fake_board(monkeypatch, module, login=lambda: True):
    """Make a module with the boards' interface; gives its runs, and the arguments of each
    `init`."""
    runs, arguments = [], []

    def init(**given):
        print("* what Trackio says")
        arguments.append(given)
        runs.append(MagicMock())
        return runs[-1]

    monkeypatch.setitem(
        sys.modules, module, types.SimpleNamespace(init=init, login=login, Error=ZeroDivisionError)
    )
    return runs, arguments


@pytest.mark.parametrize(("module", "identity"), [("wandb", "id"), ("trackio", "name")])
def test_a_board_gets_the_metrics_and_a_resumed_run_goes_on(
    module, identity, monkeypatch, tmp_path, capsys
):
    runs, arguments = fake_board(monkeypatch, module)
    config = tiny_config(tmp_path, f"logging.{module}=project", "training.iterations=6")
    train(config, tmp_path / "run")
    written = [
        record["train_loss"] for record in losses(tmp_path / "run") if "train_loss" in record
    ]
    logged = [call.args[0] for call in runs[0].log.call_args_list]
    assert [scalars["train_loss"] for scalars in logged if "train_loss" in scalars] == written
    runs[0].finish.assert_called_once()
    assert capsys.readouterr().out == ""
    train(config, tmp_path / "run", resume=True)
    train(config, tmp_path / "elsewhere" / "run")
    first, resumed, other = arguments
    assert (first["project"], first["name"].partition("-")[0], first["resume"]) == (
        "project",
        "run",
        "allow",
    )
    assert first["config"]["pipeline"]["stages"] == 4
    assert (
        first[identity] == resumed[identity] != other[identity]
    )  # another folder of the same name is another run


@pytest.mark.parametrize(
    ("module", "override", "expected"),
    [
        ("wandb", "logging.wandb=project", "pip install wandb\n"),
        ("trackio", "logging.trackio=project", "pip install trackio\n"),
        ("torch.utils.tensorboard", "logging.tensorboard=true", "pip install tensorboard\n"),
        (
            "without a key",
            "logging.wandb=project",
            "logging.wandb: division by zero (or set WANDB_MODE=offline)\n",
        ),
    ],
)
def test_a_tracker_that_cannot_be_opened_is_refused_first(
    module, override, expected, tmp_path, monkeypatch, capsys
):
    if module == "without a key":
        fake_board(monkeypatch, "wandb", login=lambda: 1 / 0)
    else:
        monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / "tiny.yaml").write_text(dump_config(tiny_config(tmp_path)))
    assert (
        main(
            [
                "train",
                str(tmp_path / "tiny.yaml"),
                "--out",
                str(tmp_path / "runs" / "run"),
                "--set",
                override,
            ]
        )
        == 2
    )
    assert not (tmp_path / "runs" / "run").exists()
    assert not (tmp_path / "data").exists()
    assert capsys.readouterr().err.endswith(expected)
