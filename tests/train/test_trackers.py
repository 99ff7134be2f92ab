"""Optional trackers: what they are given, and what is said when they cannot be opened."""

import sys
import types
from unittest.mock import MagicMock, Mock

import pytest

from brx.config.loading import dump_config
from brx.config.schema import LoggingConfig
from brx.errors import RunError
from brx.train.loop import train
from brx.train.trackers import MODULES
from tests.train.helpers import steps_of, tiny_config


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


@pytest.fixture(params=["wandb", "trackio"])
def board(request, monkeypatch):
    """The name of a board, its runs, and the arguments of each `init`."""
    return request.param, *fake_board(monkeypatch, request.param)


def on_board(module, folder):
    return tiny_config(folder, f"logging.{module}=project", "training.iterations=3")


def test_board_gets_the_metrics(board, tmp_path):
    module, runs, _ = board
    train(on_board(module, tmp_path), tmp_path / "run")
    written = [record["train_loss"] for record in steps_of(tmp_path / "run")]
    logged = [call.args[0] for call in runs[0].log.call_args_list]
    assert [scalars["train_loss"] for scalars in logged if "train_loss" in scalars] == written


def test_run_on_a_board_is_finished(board, tmp_path):
    module, runs, _ = board
    train(on_board(module, tmp_path), tmp_path / "run")
    runs[0].finish.assert_called_once()


def test_board_prints_nothing_on_stdout(board, tmp_path, capsys):
    train(on_board(board[0], tmp_path), tmp_path / "run")
    assert capsys.readouterr().out == ""


def test_board_is_told_project_name_settings(board, tmp_path):
    module, _, arguments = board
    train(on_board(module, tmp_path), tmp_path / "run")
    (told,) = arguments
    name = told["name"].partition("-")[0]
    assert (told["project"], name, told["resume"]) == ("project", "run", "allow")
    assert told["config"]["pipeline"]["stages"] == 4


IDENTITY = {"wandb": "id", "trackio": "name"}
"""By board: the argument that identifies a run there."""


def test_resumed_run_is_the_same_on_a_board(board, tmp_path):
    module, _, arguments = board
    for resume in (False, True):
        train(on_board(module, tmp_path), tmp_path / "run", resume=resume)
    first, resumed = (told[IDENTITY[module]] for told in arguments)
    assert first == resumed


def test_folder_of_the_same_name_is_another_run(board, tmp_path):
    module, _, arguments = board
    for folder in ("here", "there"):
        train(on_board(module, tmp_path), tmp_path / folder / "run")
    here, there = (told[IDENTITY[module]] for told in arguments)
    assert here != there


def test_failing_board_does_not_end_the_run(board, tmp_path, capsys):
    module, _, _ = board
    failing = MagicMock()
    failing.log.side_effect = failing.finish.side_effect = ZeroDivisionError("gone")
    sys.modules[module].init = lambda **given: failing
    assert train(on_board(module, tmp_path), tmp_path / "run") == "finished"
    note = f"brx: note: logging.{module}: failed at iteration 1: gone; metrics.jsonl has all"
    assert capsys.readouterr().err.count(note) == 1
    failing.log.assert_called_once()


def test_board_that_cannot_be_opened_is_one_line(board, tmp_path):
    module, _, _ = board
    sys.modules[module].init = Mock(side_effect=ZeroDivisionError("no such\n project"))
    with pytest.raises(RunError, match=f"^logging.{module}: cannot be opened: no such project$"):
        train(on_board(module, tmp_path), tmp_path / "run")


UNUSABLE = {
    "wandb": ("logging.wandb=project", "pip install wandb\n"),
    "trackio": ("logging.trackio=project", "pip install trackio\n"),
    "torch.utils.tensorboard": ("logging.tensorboard=true", "pip install tensorboard\n"),
    "without a key": (
        "logging.wandb=project",
        "logging.wandb: division by zero (or set WANDB_MODE=offline)\n",
    ),
}
"""By what is missing: the setting that needs it, and the end of the message."""


def test_every_tracker_has_a_setting():
    others = {"staleness_every", "update_norms"}
    assert LoggingConfig.model_fields.keys() - others == MODULES.keys()


def test_every_tracker_is_tried_without_its_package():
    assert UNUSABLE.keys() - {"without a key"} == set(MODULES.values())


@pytest.fixture
def refused_tracker(request, tmp_path, monkeypatch, refused):
    """What a training says whose tracker cannot be opened."""
    module = request.param
    if module == "without a key":
        fake_board(monkeypatch, "wandb", login=lambda: 1 / 0)
    else:
        monkeypatch.setitem(sys.modules, module, None)
    path = tmp_path / "tiny.yaml"
    path.write_text(dump_config(tiny_config(tmp_path)))
    override, _ = UNUSABLE[module]
    return refused("train", path, "--out", tmp_path / "runs" / "run", "--set", override)


@pytest.mark.parametrize(
    ("refused_tracker", "module"), [(name, name) for name in UNUSABLE], indirect=["refused_tracker"]
)
def test_tracker_that_cannot_be_opened_is_refused(refused_tracker, module):
    assert refused_tracker.endswith(UNUSABLE[module][1])


@pytest.mark.usefixtures("refused_tracker")
@pytest.mark.parametrize("refused_tracker", UNUSABLE, indirect=True)
def test_refused_tracker_leaves_nothing(tmp_path):
    assert not (tmp_path / "runs" / "run").exists()
    assert not (tmp_path / "data").exists()
