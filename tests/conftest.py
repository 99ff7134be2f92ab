"""Settings and fixtures of all tests."""

import gc
import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

from brx.cli.main import main
from brx.config import user_code

# Hypothesis draws the same examples in every run and has no time limit, so a correct change never
# fails by chance or on a slow machine.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")

# With these variables, which CI services set, rich would write as if to a terminal.
for variable in ("FORCE_COLOR", "TTY_COMPATIBLE", "COLUMNS"):
    os.environ.pop(variable, None)


# PyPI's torchvision is built for CUDA. With torch's CPU build, neither torchvision nor transformers
# and Lightning can be imported unless its operators are declared. No test calls these operators.
_vision = find_spec("torchvision")
if (
    torch.version.cuda is None
    and _vision
    and "+cu" in Path(_vision.origin).with_name("version.py").read_text()
):
    for name in ("nms", "qnms"):
        torch.library.define(
            f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        )


# The tests in each of these folders share runs and figures that take long to make.
SHARING = ("tests/curvature", "tests/paper", "tests/report")


class ByFile(LoadFileScheduling):
    """Gives all tests of a file to one worker, and all files of a folder in `SHARING`, so that what
    these tests share is made only once."""

    def _split_scope(self, nodeid):
        path = nodeid.partition("::")[0]
        folder = path.rpartition("/")[0]
        return folder if folder in SHARING else path


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    return ByFile(config, log) if config.getvalue("dist") == "load" else None


def pytest_collection_finish():
    """Leaves what the modules of all tests have made out of later garbage collections. These would
    otherwise look at a million objects each time, and tests that measure memory ask for many."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def printed(capsys):
    """Runs a command that must succeed, and returns its output."""

    def run(*arguments):
        assert main(list(map(str, arguments))) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
def refused(capsys):
    """Runs a command that must end with exit code 2 and one line on stderr; returns that line."""

    def run(*arguments):
        assert main(list(map(str, arguments))) == 2
        error = capsys.readouterr().err
        # A command that runs a user's code names its file first, even if the command then fails.
        notes = [line for line in error.splitlines() if line.startswith("brx: note: runs code")]
        for note in notes:
            error = error.replace(f"{note}\n", "")
        assert error.count("\n") == 1
        return error

    return run


@pytest.fixture
def own_code():
    """Allows the test to import a user's code, as commands that train do."""
    with user_code.allowed():
        yield


@pytest.fixture(autouse=True)
def _one_thread():
    """Sets one thread before each test, so that rounding and times do not depend on other tests."""
    torch.set_num_threads(1)
