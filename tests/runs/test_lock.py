"""The lock of a run's folder, between real processes."""

import errno
import os
import subprocess
import sys
import threading

import pytest

from brx.config.loading import dump_config
from brx.errors import RunError, UserError
from brx.runs.lock import hand_down, hold, is_locked, lock
from brx.train.loop import train
from tests.processes import start_brx
from tests.train.helpers import losses, tiny_config, wait_for_lines

HOLDER = (
    "import pathlib, sys, time; from brx.runs.lock import hold\nwith "
    "hold(pathlib.Path(sys.argv[1])):\n"
)
HOLDER += "    print('held', flush=True); time.sleep(600)"


def start_holder(folder, **kwargs):
    """A process that holds the folder until it is killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE, **kwargs
    )
    assert process.stdout.readline() == b"held\n"
    return process


@pytest.fixture
def holder(tmp_path):
    """A process that holds the folder `run`."""
    process = start_holder(tmp_path / "run")
    yield process
    process.kill()
    process.wait()


def test_holder_of_a_folder_is_told(holder, tmp_path):
    told = rf"run: process {holder.pid} on \S+ trains in this folder"
    with pytest.raises(UserError, match=told), hold(tmp_path / "run"):
        pass


def test_held_folder_has_no_second_lock(holder, tmp_path):
    assert is_locked(tmp_path / "run")
    with lock(tmp_path / "run") as descriptor:
        assert descriptor is None


def test_folder_of_a_killed_process_is_free(holder, tmp_path):
    holder.kill()
    holder.wait()
    assert not is_locked(tmp_path / "run")  # nothing has to be cleaned up
    with hold(tmp_path / "run"):
        assert is_locked(tmp_path / "run")


def test_lock_handed_down_is_for_its_folder(tmp_path, monkeypatch):
    with lock(tmp_path / "run") as descriptor:
        holder = start_holder(
            tmp_path / "run", pass_fds=(descriptor,), env=os.environ | hand_down(descriptor)
        )
    assert is_locked(tmp_path / "run")
    with lock(tmp_path / "other") as descriptor:
        monkeypatch.setenv("BRX_RUN_LOCK", str(descriptor))
        with pytest.raises(UserError, match="trains in this folder"), hold(tmp_path / "run"):
            pass
    monkeypatch.setenv("BRX_RUN_LOCK", "nonsense")
    holder.kill()
    holder.wait()
    assert not is_locked(tmp_path / "run")
    with hold(tmp_path / "run"):
        assert is_locked(tmp_path / "run")


def test_run_waits_for_a_look_at_its_lock(tmp_path, monkeypatch):
    monkeypatch.setattr("brx.runs.lock.PATIENCE_S", 60.0)  # a busy machine is slow
    holder = start_holder(tmp_path)
    threading.Timer(0.1, holder.kill).start()
    with hold(tmp_path):
        assert is_locked(tmp_path)
    holder.wait()


def test_refused_run_leaves_no_folder(tmp_path):
    with pytest.raises(UserError), hold(tmp_path / "runs" / "run"):
        raise UserError("refused")
    assert not (tmp_path / "runs" / "run").exists()


def test_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot be written"), hold(tmp_path / "file" / "run"):
        pass


def test_a_file_system_without_locks_is_told(tmp_path, monkeypatch, capsys):
    def without_locks(descriptor, *, blocking):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("brx.runs.lock.lock_descriptor", without_locks)
    with hold(tmp_path / "run"), hold(tmp_path / "run"):
        pass
    assert capsys.readouterr().err.count("this file system has no locks") == 1


WAITS_IN_UPDATE_12 = """
import time
from pathlib import Path
from brx.methods.method import Method

class Waits(Method):
    def lr_divisor(self, tau, t, T):
        if t == 12:
            Path(__file__).with_name("waits").write_text("here\\n")
            while not Path(__file__).with_name("go").exists():
                time.sleep(0.01)
        return 1.0
"""


@pytest.fixture(params=[1, pytest.param(2, marks=pytest.mark.slow)])
def under_way(request, tmp_path):
    """A run by number of devices that waits in its update 12 for a file `go`: its configuration,
    process, and command line."""
    (tmp_path / "waits.py").write_text(WAITS_IN_UPDATE_12)
    config = tiny_config(tmp_path, f"optimizer={{method: '{tmp_path}/waits.py:Waits', lr: 0.01}}")
    path = tmp_path / "tiny.yaml"
    path.write_text(dump_config(config))
    command = ["train", path, "--out", tmp_path / "run", "--devices", request.param]
    process = start_brx(*command)
    wait_for_lines(tmp_path / "waits", 1, process)
    yield config, process, command
    process.kill()


@pytest.mark.parametrize("options", [(), ("--resume",)], ids=str)
def test_second_training_of_a_folder_is_refused(options, under_way, refused):
    *_, command = under_way
    assert "trains in this folder; wait until it has ended" in refused(*command, *options)


def test_refused_training_leaves_the_first_alone(under_way, tmp_path, refused):
    config, process, command = under_way
    refused(*command, "--resume")
    (tmp_path / "go").write_text("")
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    train(config, tmp_path / "alone")
    assert losses(tmp_path / "run") == losses(tmp_path / "alone")
