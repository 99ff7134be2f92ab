"""What holds for all tests."""

import os

import pytest
import torch
from hypothesis import settings

# Examples are not drawn by chance, and have no time limit: a change that breaks nothing must not fail on a slow day.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")

# Where output goes to a pipe, it is not for a terminal, whatever a CI service says.
for variable in ("FORCE_COLOR", "TTY_COMPATIBLE", "COLUMNS"):
    os.environ.pop(variable, None)


@pytest.fixture(autouse=True)
def _one_thread():
    """Rounding and times do not depend on what another test has set."""
    torch.set_num_threads(1)
