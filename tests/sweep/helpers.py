"""Sweeps of runs that take a second each, and a launcher that only pretends to run them."""

import json

import yaml

from brx.config.loading import dump_config
from brx.files import write_json
from brx.methods.trajectory_version import TRAJECTORY_VERSION
from brx.sweep.state import FAILURE, State, prepare_folder, state_of
from tests.train.helpers import tiny_config


def write_sweep(folder, **content):
    """Write a sweep of the tiny run, by default of two methods at P = 1 and 4; returns its path."""
    base = folder / "tiny.yaml"
    if not base.exists():
        base.write_text(dump_config(tiny_config(folder)))
    content = {
        "base": str(base),
        "out": str(folder / "cells"),
        "grid": {
            "pipeline.stages": [4, 1],
            "method": [{"optimizer.method": "pipedream"}, {"optimizer.method": "nesterov"}],
        },
        **content,
    }
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def write_losses(folder):
    """Give the folder of a cell that has ended metrics, without which it does not count as done."""
    (folder / "metrics.jsonl").write_text('{"iteration": 1, "train_loss": 4.0}\n')


def finish(cell, loss, status="finished", **facts):
    """Leave the folder of a cell in the state in which its run would leave it; `facts` are further
    entries of its summary."""
    prepare_folder(cell)
    write_losses(cell.folder)
    summary = {
        "status": status,
        "iteration": cell.config.training.last_iteration,
        "final_val_loss": loss,
        "trajectory_version": TRAJECTORY_VERSION,
        **facts,
    }
    write_json(cell.folder / "summary.json", summary)


class Pretending:
    """A launcher whose cells end at once.

    Args:
        loss_of: takes a cell and returns its final loss, or None for a cell that is killed.
    """

    num_jobs = 1

    def __init__(self, loss_of):
        self.loss_of = loss_of
        self.started = []
        self._ended = []

    def start(self, cell):
        if state_of(cell) is State.DONE:
            return False
        self.started.append(cell)
        loss = self.loss_of(cell)
        if loss is None:
            prepare_folder(cell)
            (cell.folder / FAILURE).write_text("killed by SIGKILL\n")
            self._ended.append((cell, State.FAILED, "killed by SIGKILL"))
        else:
            finish(cell, loss)
            self._ended.append((cell, State.DONE, ""))
        return True

    def collect(self):
        ended, self._ended = self._ended, []
        return ended

    def interrupt(self):
        pass

    def close(self):
        pass


def end(cell, seconds=10.0, val_loss=1.0):
    """As if the cell had been run; without a loss it has diverged."""
    prepare_folder(cell)
    if val_loss is None:
        (cell.folder / "summary.json").write_text('{"status": "diverged"}')
        (cell.folder / FAILURE).write_text("the loss diverged")
        return
    write_losses(cell.folder)
    iterations = cell.config.training.last_iteration
    summary = {
        "status": "finished",
        "iteration": iterations,
        "training_seconds": seconds,
        "final_val_loss": val_loss,
    }
    (cell.folder / "summary.json").write_text(
        json.dumps(summary | {"trajectory_version": TRAJECTORY_VERSION})
    )
