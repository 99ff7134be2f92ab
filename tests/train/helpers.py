"""A run that takes a second, on a text file of its own, and waiting for what runs do."""

import os
import resource
import sys
import time
from contextlib import contextmanager, suppress
from unittest import mock

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
    """Make a file that is complete as soon as it exists. If several ranks do this at once, the
    first one's file stays."""
    own = path.with_name(f"{path.name}-{os.getpid()}")
    own.write_text(content)
    with suppress(FileExistsError):
        os.link(own, path)
    own.unlink()


def losses(folder):
    """The records of metrics.jsonl, without what was measured (times, rates, memory)."""
    return [
        {key: value for key, value in record.items() if key not in MEASURED}
        for record in read_metrics(folder / "metrics.jsonl")
    ]


def steps_of(folder):
    """The records of iterations, without those of validations."""
    return [record for record in losses(folder) if "train_loss" in record]


@contextmanager
def files_of_at_most(size):
    """Let no file grow beyond `size` bytes, to imitate a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Otherwise Python could write a cached module that is cut off at that size, and load it later.
    with mock.patch.object(sys, "dont_write_bytecode", True):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


def wait_for_lines(path, number, process, timeout=300):
    """Wait until a file has at least `number` lines."""
    wait_until(lambda: path.exists() and path.read_text().count("\n") >= number, process, timeout)


def wait_until(is_so, process, timeout=300):
    """Wait until a condition holds. Fails if the process ends first, or after `timeout` seconds."""
    end = time.monotonic() + timeout
    while not is_so():
        assert process.poll() is None, process.errors()
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.01)
