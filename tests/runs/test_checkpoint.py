"""Checkpoints on disk: complete or absent, whatever fails on the way."""

import signal
from pathlib import Path

import pytest
import torch

from brx.errors import RunError
from brx.pipeline.world import World
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


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_what_fails_on_the_way_leaves_what_was_there(error, tmp_path, monkeypatch):
    write(tmp_path, 7, "old")

    def rename(path, target):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", rename)
        with pytest.raises((RunError, KeyboardInterrupt)) as raised:
            write(tmp_path, 14, "new")
    assert isinstance(raised.value, KeyboardInterrupt) or "No space left on device; what was" in str(raised.value)
    assert values(tmp_path) == {"00000007": "old"}
    checkpoint.recover(tmp_path)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["00000007"]


def test_later_checkpoints_are_removed_and_half_removed_ones_written_anew(tmp_path):
    for iteration in (7, 14, 21):
        write(tmp_path, iteration, "old", keep=3)
    (tmp_path / "checkpoints" / "00000021" / "manifest.json").unlink()  # a crash while it was removed
    checkpoint.remove_after(tmp_path, 7)
    assert values(tmp_path) == {"00000007": "old"}
    write(tmp_path, 21, "new", keep=3)
    assert values(tmp_path) == {"00000007": "old", "00000021": "new"}


@pytest.mark.parametrize(("stop", "expected"), [(7, [7]), (9, [7, 9])])
def test_stopped_at_a_checkpoint_is_saved_once(stop, expected, tmp_path, monkeypatch):
    trainer = Trainer(tiny_config(tmp_path), RunFolder(tmp_path / "run"), World())
    trainer._after_iteration = lambda: trainer.iteration == stop and signal.raise_signal(signal.SIGINT)
    saved = []
    original = checkpoint.finish
    monkeypatch.setattr(checkpoint, "finish", lambda run, t, *rest: (saved.append(t), original(run, t, *rest)))
    assert trainer.run(resume=False) == "interrupted"
    assert saved == expected
