"""Delays from a function in a file, in the engine: the shipped examples against the naive
simulation, and refusals."""

import math
from pathlib import Path

import pytest
import torch

from brx.config.loading import load_config
from brx.errors import UserError
from brx.pipeline.delay import delays_of, shortfall, stage_delays
from brx.runs.run import Run
from brx.runs.trajectory import trajectory_of
from brx.train.loop import train
from tests.pipeline.naive import NaivePipeline
from tests.pipeline.test_engine import (
    NaiveUpdate,
    make_config,
    make_modules,
    micro_batch,
    run_engine,
)
from tests.train.helpers import steps_of, tiny_config

pytestmark = pytest.mark.usefixtures("own_code")
EXAMPLES = Path(__file__).parents[2] / "examples" / "delays" / "internet.py"


def constant(folder, tau, most):
    path = folder / "mine.py"
    path.write_text(
        f"def mine(stage, num_stages, micro_batch, seed):\n    return {tau}\n\n\nmine.most = "
        f"{most}\n"
    )
    return f"pipeline.delay={path}:mine"


@pytest.mark.parametrize(
    "profile", [-1, [-1, 0], [0.5, 0], ["a", 0], [True, 0], [1], {"like": 0}, {"like": 2.5}]
)
def test_what_is_no_delay_is_refused(profile):
    with pytest.raises(ValueError, match="must be pipeline, 2bw, a whole number from 0"):
        delays_of(profile, 2)


def alternating(stage, num_stages, micro_batch, seed):
    return 2 if micro_batch % 2 else 6


alternating.most = 6


def test_delay_rises_by_one_per_micro_batch():
    (delay,) = delays_of(alternating, 1)
    ages = [n - 1 - delay.version_used(n) for n in range(20, 28)]
    assert ages == [3, 2] * 4


def test_shortfall_has_both_means():
    note = shortfall(delays_of(alternating, 1))
    assert "asks for 4 micro-batches on average at stage 0 and gets 2.5" in note


@pytest.mark.parametrize("accumulation", [1, 3])
def test_slowly_rising_delay_has_no_shortfall(accumulation):
    def rising(stage, num_stages, micro_batch, seed):
        return micro_batch % 5

    rising.most = 4
    assert shortfall(delays_of(rising, 2, accumulation)) is None


def test_run_tells_its_shortfall(tmp_path, capsys):
    mine = constant(tmp_path, "6 * (micro_batch % 2)", 6)
    train(tiny_config(tmp_path, mine, "training.iterations=2"), tmp_path / "run")
    assert capsys.readouterr().err.count("and gets 0.5") == 1


@pytest.mark.parametrize(
    ("name", "stash"), [("jitter", "exact"), ("straggler", "none"), ("churn", "exact")]
)
def test_examples_equal_the_naive_simulation(name, stash):
    config = make_config(
        "pipedream", 3, stash, 60, f"pipeline.delay={EXAMPLES}:{name}", "pipeline.accumulation=2"
    )
    results, _ = run_engine(config, 30, torch.float64)
    delays = stage_delays(config.pipeline)
    naive = VaryingNaive(
        make_modules(config, torch.float64), stash, NaiveUpdate(config), 0.5, [0, 0, 0], 2
    )
    naive.function = [delay.tau_at for delay in delays]
    for t in range(1, 31):
        naive.step(t, [micro_batch(2 * t - 1), micro_batch(2 * t)])
    found = torch.stack([r.loss for r in results])
    torch.testing.assert_close(
        found, torch.tensor(naive.losses, dtype=torch.float64), rtol=1e-9, atol=0
    )
    plain, _ = run_engine(
        make_config("pipedream", 3, stash, 60, "pipeline.accumulation=2"), 30, torch.float64
    )
    assert [r.loss for r in plain] != [r.loss for r in results]


class VaryingNaive(NaivePipeline):
    """Each stage remembers the newest version that it has used, and never goes back behind it."""

    used = (0, 0, 0)

    def _gradients(self, n, inputs, targets):
        asked = [math.floor((n - 1 - tau_at(n)) / self.accumulation) for tau_at in self.function]
        self.used = list(map(max, self.used, asked))
        self.taus = [
            n - 1 - used * self.accumulation for used in self.used
        ]  # floor gives just this version
        return super()._gradients(n, inputs, targets)


@pytest.fixture
def resumed(tmp_path):
    """A run with a delay function that was stopped and resumed: its folder and configuration."""
    mine = constant(tmp_path, "(micro_batch + seed) % 4", 3)
    train(tiny_config(tmp_path, mine, "training.stop_after=7"), tmp_path / "run")
    config = load_config(tmp_path / "run", ["training.stop_after=null"])
    train(config, tmp_path / "run", resume=True)
    return tmp_path / "run", config


def test_resumed_run_has_the_same_losses(resumed, tmp_path):
    run, config = resumed
    train(config, tmp_path / "whole")
    # It has one validation more, where it was stopped.
    found, whole = steps_of(run), steps_of(tmp_path / "whole")
    assert found == whole


def test_name_of_a_run_has_its_function(resumed):
    assert "delay mine.py:mine" in Run.load(resumed[0]).variant


def test_folder_of_a_function_is_no_setting(resumed):
    assert trajectory_of(resumed[1])["pipeline"]["delay"]["function"] == "mine.py:mine"


def test_edited_function_is_another_run(resumed, tmp_path):
    run, config = resumed
    constant(tmp_path, "0", 3)
    with pytest.raises(UserError, match="its file has changed"):
        train(config, run, resume=True)


def test_run_is_read_without_its_function(resumed, tmp_path):
    (tmp_path / "mine.py").unlink()
    assert Run.load(resumed[0]).largest_delay > 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def mine(*_):\n    return 0\n", r"must say its largest delay, as mine\.most = 40"),
        (
            "def mine(*_):\n    return 5\n\n\nmine.most = 4\n",
            r"micro-batch \d+: must be a whole number from 0 to 4",
        ),
        (
            "def other(*_):\n    return 0\n\n\nother.most = 4\n",
            r"mine is no function .*there: other",
        ),
        ("import nothing_of_this_name\n", "cannot be imported"),
    ],
)
def test_mistakes_are_one_line(text, message, tmp_path):
    (tmp_path / "mine.py").write_text(text)
    mine = f"pipeline.delay={tmp_path / 'mine.py'}:mine"
    with pytest.raises(UserError, match=message):
        run_engine(make_config("pipedream", 3, "exact", 24, mine), 8)


def test_function_on_several_devices_is_refused(tmp_path):
    mine = constant(tmp_path, "0", 3)
    with pytest.raises(UserError, match="a function of your own needs devices: 1"):
        make_config("pipedream", 3, "exact", 24, mine, "pipeline.devices=2")
