"""Checkpoints on disk: complete or absent, also while one is written anew, whatever fails on the way."""

import signal
from pathlib import Path

import pytest
import torch

from brx.errors import RunError
from brx.pipeline.world import SingleDevice
from brx.runs import checkpoint
from brx.runs.folder import RunFolder
from brx.train.loop import Trainer
from tests.train.helpers import tiny_config

CPU = torch.device("cpu")


def write(run, iteration, value, keep=1):
    """A checkpoint of one stage that holds `value`."""
    checkpoint.begin(run, iteration)
    entry = checkpoint.write_stage(run, iteration, 0, {"value": value})
    content = {"fingerprint": "f", "trajectory_version": 1, "settings": {}, "num_stages": 1, "training_seconds": 1.0}
    checkpoint.finish(run, iteration, content, [entry], keep)


def values(run):
    """What the checkpoints hold, by the names of their folders."""
    return {path.name: checkpoint.read_stage(path, 0, CPU)["value"] for path in checkpoint.list_checkpoints(run)}


def leftovers(run):
    return list((run / "checkpoints").glob(".*"))


def failing_rename(monkeypatch, error, *, number):
    """Let rename number `number` of a folder of stages fail."""
    original, count = Path.rename, iter(range(1, 100))

    def rename(path, target):
        if path.is_dir() and next(count) == number:
            raise error
        return original(path, target)

    monkeypatch.setattr(Path, "rename", rename)


def test_written_anew_replaces(tmp_path):
    write(tmp_path, 7, "old")
    write(tmp_path, 7, "new")
    assert values(tmp_path) == {"00000007": "new"}
    assert not leftovers(tmp_path)


@pytest.mark.parametrize("number", [1, 2])
def test_failed_replacement_leaves_what_was_there(number, tmp_path, monkeypatch):
    write(tmp_path, 7, "old")
    failing_rename(monkeypatch, OSError(28, "No space left on device"), number=number)
    with pytest.raises(RunError, match="No space left on device; what was there before is unchanged"):
        write(tmp_path, 7, "new")
    assert values(tmp_path) == {"00000007": "old"}
    assert (tmp_path / "checkpoints" / "00000007").is_dir()


@pytest.mark.parametrize("number", [1, 2])
def test_crash_while_replacing_leaves_a_checkpoint_for_all(number, tmp_path, monkeypatch):
    write(tmp_path, 7, "old")
    failing_rename(monkeypatch, KeyboardInterrupt(), number=number)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, 7, "new")
    assert values(tmp_path) == {"00000007": "old"}  # before anybody has tidied up
    checkpoint.recover(tmp_path)
    assert values(tmp_path) == {"00000007": "old"}
    assert (tmp_path / "checkpoints" / "00000007").is_dir()
    assert not leftovers(tmp_path)


def test_crash_after_replacing_leaves_the_new_one(tmp_path, monkeypatch):
    write(tmp_path, 7, "old")
    with monkeypatch.context() as patch:
        patch.setattr("brx.runs.checkpoint.shutil.rmtree", lambda path, ignore_errors: None)
        write(tmp_path, 7, "new")
    assert values(tmp_path) == {"00000007": "new"}
    checkpoint.recover(tmp_path)
    assert values(tmp_path) == {"00000007": "new"}
    assert not leftovers(tmp_path)


@pytest.mark.parametrize(("stop", "expected"), [(7, [7]), (9, [7, 9])])
def test_stopped_at_a_checkpoint_is_saved_once(stop, expected, tmp_path, monkeypatch):
    trainer = Trainer(tiny_config(tmp_path), RunFolder(tmp_path / "run"), SingleDevice())
    trainer._after_iteration = lambda: trainer.iteration == stop and signal.raise_signal(signal.SIGINT)
    saved = []
    original = checkpoint.finish
    monkeypatch.setattr(checkpoint, "finish", lambda run, t, *rest: (saved.append(t), original(run, t, *rest)))
    assert trainer.run(resume=False) == "interrupted"
    assert saved == expected
