"""A run small enough for a second, on a text file of its own."""

import os
import random
import socket
import subprocess
import sys
import time
from contextlib import suppress

from brx.config.loading import apply_overrides
from brx.runs.metrics import MEASURED, read_metrics


def tiny_config(folder, *overrides):
    """A run of 30 iterations of a model of 4 blocks, on data in `folder`."""
    text = folder / "text.txt"
    if not text.exists():
        lines = [
            f"{number}: the quick brown fox jumps over the lazy dog {number * number}"
            for number in range(6000)
        ]
        write_once(text, "\n".join(lines))
    content = {
        "model": {"blocks": 4, "width": 8, "heads": 2, "sequence_length": 16},
        "data": {
            "source": str(text),
            "directory": str(folder / "data"),
            "validation_fraction": 0.3,
        },
        "pipeline": {"stages": 4},
        "optimizer": {"method": "pipedream", "lr": 0.01},
        "training": {
            "iterations": 30,
            "batch_size": 2,
            "validation_every": 12,
            "validation_examples": 5,
            "checkpoint_every": 7,
            "log_every": 5,
        },
        "runtime": {"device": "cpu", "threads": 1},
    }
    return apply_overrides(content, overrides, "tiny")


def write_once(path, content):
    """Make a file that is whole from the start and the first writer's, although several ranks do
    this at once."""
    own = path.with_name(f"{path.name}-{os.getpid()}")
    own.write_text(content)
    with suppress(FileExistsError):
        os.link(own, path)
    own.unlink()


def losses(folder):
    """All that metrics.jsonl says but what was measured (times, rates, memory)."""
    return [
        {key: value for key, value in record.items() if key not in MEASURED}
        for record in read_metrics(folder / "metrics.jsonl")
    ]


def steps_of(folder):
    return [record for record in losses(folder) if "train_loss" in record]


def start_brx(*arguments, **kwargs):
    """The real command in a process (and session) of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "brx", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        **kwargs,
    )


def wait_for_lines(path, number, process, timeout=300):
    """Wait until a file has at least `number` lines."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        if path.exists() and path.read_text().count("\n") >= number:
            return
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    raise AssertionError(f"{path} did not reach {number} lines")


def free_port() -> int:
    """A port below those that systems hand out by themselves: nobody is given it before rank 0
    binds it."""
    for port in random.SystemRandom().sample(range(20_000, 32_768), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no free port between 20000 and 32767")
