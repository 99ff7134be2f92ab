"""Optional trackers: what they are given, and what is said when they are not installed."""

import builtins
import sys
import types

import pytest

from brx.errors import UserError
from brx.train.loop import train
from tests.train.helpers import losses, tiny_config


class FakeRun:
    def __init__(self):
        self.logged = []
        self.finished = False

    def log(self, scalars, step):
        self.logged.append((step, scalars))

    def finish(self):
        self.finished = True


def test_weights_and_biases_gets_the_metrics_under_the_runs_name(tmp_path, monkeypatch):
    run, arguments = FakeRun(), {}

    def init(**given):
        arguments.update(given)
        return run

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    config = tiny_config(tmp_path, "logging.wandb=project", "training.iterations=6")
    train(config, tmp_path / "run")
    assert (arguments["project"], arguments["name"], arguments["resume"]) == ("project", "run", "allow")
    assert arguments["config"]["pipeline"]["stages"] == 4
    written = [record["train_loss"] for record in losses(tmp_path / "run") if "train_loss" in record]
    assert [scalars["train_loss"] for _, scalars in run.logged if "train_loss" in scalars] == written
    assert run.finished
    first = arguments["id"]
    train(config, tmp_path / "run", resume=True)
    assert arguments["id"] == first  # the same run goes on
    train(config, tmp_path / "elsewhere" / "run")
    assert arguments["id"] != first  # another folder of the same name is another run


@pytest.mark.parametrize(
    ("module", "override"),
    [("wandb", "logging.wandb=project"), ("torch.utils.tensorboard", "logging.tensorboard=true")],
)
def test_missing_tracker_says_how_to_get_it(module, override, tmp_path, monkeypatch):
    original = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name == module:
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(UserError, match=r"is not installed: pip install 'brx\[(wandb|tensorboard)\]'"):
        train(tiny_config(tmp_path, override), tmp_path / "run")
