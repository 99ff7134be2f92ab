"""Finished runs that all tests of curvature share."""

import shutil
from pathlib import Path

import pytest

from tests.curvature.helpers import finished_run


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """Two finished runs in four stages: pipedream with the delays of eight stages, and
    basis-rotation. Read only."""
    folder = tmp_path_factory.mktemp("runs")
    rotation = ("optimizer.method=basis-rotation", "optimizer.frequency=3")
    return {
        "pipedream": finished_run(folder, "pipedream", "pipeline.delay={like: 8}"),
        "basis-rotation": finished_run(folder, "basis-rotation", *rotation),
    }


@pytest.fixture
def run(runs, tmp_path):
    """A copy of the basis-rotation run, to write results into."""
    return Path(shutil.copytree(runs["basis-rotation"], tmp_path / "run"))
