"""`brx train`: what the command passes on to the training."""

import itertools
from types import SimpleNamespace

import pytest

from brx.cli.main import main
from brx.config.loading import dump_config
from tests.train.helpers import tiny_config


@pytest.fixture
def slow_start(tmp_path, monkeypatch):
    """The configuration file of a run that starts 40 s after the command."""
    seconds = itertools.count(step=40)
    monkeypatch.setattr("brx.cli.train.time", SimpleNamespace(monotonic=lambda: next(seconds)))
    path = tmp_path / "tiny.yaml"
    path.write_text(dump_config(tiny_config(tmp_path)))
    return str(path)


TIMES = [["--stop-after", "2m"], ["--set", "training.stop_after=2m"]]


@pytest.mark.parametrize("given", TIMES, ids=["option", "setting"])
def test_time_of_a_session_counts_from_the_start_of_the_command(
    given, slow_start, tmp_path, monkeypatch
):
    times = []

    def train(*arguments, seconds, **others):
        times.append(seconds)
        return "finished"

    monkeypatch.setattr("brx.train.loop.train", train)
    assert main(["train", slow_start, "--out", str(tmp_path / "run"), *given]) == 0
    assert times == [80]


@pytest.mark.parametrize("given", TIMES, ids=["option", "setting"])
def test_ranks_get_the_time_that_is_left(given, slow_start, tmp_path, monkeypatch):
    passed_on = []

    def start_ranks(config, folder, arguments, *, resume):
        passed_on.extend(arguments)
        return 0

    monkeypatch.setattr("brx.cli.train._start_ranks", start_ranks)
    arguments = ["--devices", "2", "--out", str(tmp_path / "run"), *given]
    assert main(["train", slow_start, *arguments]) == 0
    assert passed_on[passed_on.index("--stop-after") + 1] == "80s"
