"""Worlds without effect: what is drawn, and that brx judges it."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks import claims_null
from benchmarks.claims_null import World, is_yes_at_last, spreads_of, template_of
from brx.paper.claims import CLAIMS, judge
from brx.paper.scales import MAIN, Experiments
from brx.runs.trajectory import SEED
from tests.paper.helpers import LAPTOP, write_method

NUM_SEEDS = 3


@pytest.fixture(scope="module")
def experiments(tmp_path_factory):
    """The main methods at both ends, on three seeds, each end as much lower as the delay is."""
    folder = tmp_path_factory.mktemp("runs")
    for method in MAIN:
        for P in (1, 32):
            for seed in range(NUM_SEEDS):
                write_method(folder, method, P, seeds=(seed,), val_loss=1.0 + 0.01 * seed + P)
    return Experiments.load(LAPTOP, folder)


@pytest.fixture
def world(experiments, monkeypatch):
    monkeypatch.setattr(claims_null, "SCALE", replace(LAPTOP))
    rng = np.random.default_rng(0)
    return World.draw(template_of(experiments), spreads_of(experiments), NUM_SEEDS, rng)


def test_every_experiment_has_every_seed(world):
    counts = world.runs.groupby("experiment")[SEED].nunique()
    assert (len(counts), set(counts)) == (8, {NUM_SEEDS})


def test_delay_does_nothing(world):
    by_depth = world.runs.groupby("depth")["val_loss"].mean()
    assert abs(by_depth[1] - by_depth[32]) < 0.05  # the committed ones differ by 31 nats


def test_spreads_are_those_between_seeds(experiments):
    assert spreads_of(experiments) == pytest.approx(0.01)


def test_claims_are_judged_by_the_drawn_curves(world):
    (claim,) = [claim for claim in CLAIMS if claim.name == "main-reduction"]
    with world.read(NUM_SEEDS) as drawn:
        (outcome,) = judge(drawn, [claim])
    assert outcome.evidence is not None
    assert (len(outcome.runs), outcome.verdict) == (4 * NUM_SEEDS, "no")


def test_first_seeds_are_judged_alone(world):
    (claim,) = [claim for claim in CLAIMS if claim.name == "main-reduction"]
    with world.read(2) as drawn:
        (outcome,) = judge(drawn, [claim])
    assert len(outcome.runs) == 4 * 2


@pytest.mark.parametrize(
    ("first_look", "second_look", "expected"),
    [("yes", "no", True), ("open", "yes", True), ("open", "open", False), ("no", "yes", False)],
)
def test_second_look_is_for_open_claims(first_look, second_look, expected):
    assert is_yes_at_last(first_look, second_look) is expected
