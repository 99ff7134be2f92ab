"""What holds for all tests."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from brx.cli.main import main
from brx.config import user_code

# Examples are not drawn by chance, and have no time limit: a change that breaks nothing must not
#     fail on a slow day.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")

# Where output goes to a pipe, it is not for a terminal, whatever a CI service says.
for variable in ("FORCE_COLOR", "TTY_COMPATIBLE", "COLUMNS"):
    os.environ.pop(variable, None)


# PyPI's torchvision is built for CUDA. Where one lies beside torch's CPU build, neither it nor
# transformers and Lightning can be imported, unless its operators are declared; no test calls one.
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


@pytest.fixture
def printed(capsys):
    """Runs a command that succeeds, and gives what it prints."""

    def run(*arguments):
        assert main(list(map(str, arguments))) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
def refused(capsys):
    """Runs a command that ends as wrong usage does, with exit code 2 and one line, which it
    gives."""

    def run(*arguments):
        assert main(list(map(str, arguments))) == 2
        error = capsys.readouterr().err
        # What runs a user's code names it before it does, whatever becomes of it.
        notes = [line for line in error.splitlines() if line.startswith("brx: note: runs code")]
        for note in notes:
            error = error.replace(f"{note}\n", "")
        assert error.count("\n") == 1
        return error

    return run


@pytest.fixture
def own_code():
    """A user's own code may be imported, as where a run trains."""
    with user_code.allowed():
        yield


@pytest.fixture(autouse=True)
def _one_thread():
    """Rounding and times do not depend on what another test has set."""
    torch.set_num_threads(1)
