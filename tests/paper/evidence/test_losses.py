"""Which method ends lower, from made-up runs."""

import numpy as np
import pandas as pd
import pytest
from scipy.stats import ttest_1samp

from brx.config.loading import preset_with
from brx.files import write_json
from brx.paper.evidence import Margin, NotTriedError, ends_below, runs_of, shared_seeds
from brx.paper.scales import COMPENSATIONS, MAIN, VARIANTS, Experiments, delays_of
from brx.runs.comparison import BASELINES
from brx.sweep.spec import identity
from tests.paper.helpers import LAPTOP, row, write_experiment


def write_finals(folder, method, finals, stages=32, **settings):
    """Runs whose final validation losses are given by seed."""
    for seed, loss in finals.items():
        write_experiment(
            folder,
            LAPTOP.preset,
            {"pipeline.stages": stages, **VARIANTS[method], **settings},
            seeds=(seed,),
            val_loss=loss,
        )


def diverge(folder, method, seed):
    settings = {**delays_of(32, 8), **VARIANTS[method], "training.seed": seed}
    run = folder / identity(preset_with(LAPTOP.preset, settings))
    write_json(run / "summary.json", {"status": "diverged", "data_fingerprint": "f"})


def found(folder, method):
    return Experiments.load(LAPTOP, folder).find(method)


@pytest.mark.parametrize(
    ("ours", "theirs", "holds"),
    [
        ({0: 1.0}, {0: 1.1}, True),
        ({0: 1.0, 1: 1.2, 2: 1.4}, {0: 1.1, 1: 1.31, 2: 1.5}, True),  # seed by seed 0.1 lower, however far seeds differ
        ({0: 1.0, 1: 1.2, 2: 1.4}, {0: 1.1, 1: 1.3, 2: 1.3}, False),  # lower in the mean, not by more than chance
        ({0: 1.2, 1: 0.1}, {0: 1.1}, False),  # of the seed that both have
    ],
)
def test_ends_below(ours, theirs, holds, tmp_path):
    write_finals(tmp_path, "basis-rotation", ours)
    write_finals(tmp_path, "nesterov", theirs)
    judged = ends_below("ours", found(tmp_path, "basis-rotation"), {"nesterov": found(tmp_path, "nesterov")})
    assert judged.holds == holds
    assert ("difference [" in judged.text) == (len(theirs) > 2)


@pytest.mark.parametrize(("diverged", "holds"), [("basis-rotation", False), ("nesterov", True)])
def test_a_seed_that_diverged_ends_above_everything(diverged, holds, tmp_path):
    write_finals(tmp_path, "basis-rotation", dict.fromkeys(range(3), 1.0))
    write_finals(tmp_path, "nesterov", dict.fromkeys(range(3), 1.1))
    diverge(tmp_path, diverged, 1)
    experiments = Experiments.load(LAPTOP, tmp_path)
    ours, theirs = (runs_of(experiments, method) for method in ("basis-rotation", "nesterov"))
    assert ends_below("ours", ours, {"nesterov": theirs}).holds == holds


def test_a_seed_that_diverged_does_not_outvote_the_others():
    assert not Margin(pd.Series({0: np.inf, 1: -0.5, 2: -0.4, 3: -0.6})).holds
    assert Margin(pd.Series({0: np.inf, 1: 0.5, 2: 0.4})).holds
    assert not Margin(pd.Series({0: -np.inf, 1: 0.5, 2: 0.4})).holds
    of_two = Margin(pd.Series({0: np.inf, 1: 0.5, 2: 0.4}) - pd.Series({0: np.inf, 1: 0.0, 2: 0.0}))
    assert of_two.interval is None
    assert of_two.mean == pytest.approx(0.45)


def test_seeds_that_one_side_lacks_are_forgotten_although_they_diverged(tmp_path):
    write_finals(tmp_path, "basis-rotation", dict.fromkeys(range(2), 1.0))
    write_finals(tmp_path, "nesterov", dict.fromkeys((0, 1, 4), 1.1))
    diverge(tmp_path, "nesterov", 4)
    experiments = Experiments.load(LAPTOP, tmp_path)
    pair = shared_seeds(*(runs_of(experiments, method) for method in ("basis-rotation", "nesterov")))
    assert [sorted(seeds["training.seed"]) for seeds in pair] == [[0, 1], [0, 1]]
    assert not any(lost for seeds in pair for lost in seeds["diverged_seeds"])


def test_an_experiment_of_which_every_run_diverged_was_tried(tmp_path):
    write_finals(tmp_path, "basis-rotation", {0: 1.0})
    write_finals(tmp_path, "nesterov", {0: 1.0})
    diverge(tmp_path, "nesterov", 0)
    with pytest.raises(NotTriedError, match="every run of nesterov at P = 32 diverged"):
        runs_of(Experiments.load(LAPTOP, tmp_path), "nesterov")


def test_no_seed_in_common_is_not_tried(tmp_path):
    write_finals(tmp_path, "basis-rotation", {0: 1.0})
    write_finals(tmp_path, "nesterov", {1: 1.1})
    with pytest.raises(NotTriedError, match="no seed in common"):
        ends_below("ours", found(tmp_path, "basis-rotation"), {"nesterov": found(tmp_path, "nesterov")})


def test_interval_of_a_margin_is_students(tmp_path):
    values = [0.1, 0.3, 0.2, 0.25]
    expected = ttest_1samp(values, 0.0).confidence_interval(0.95)
    assert Margin(pd.Series(values)).interval == pytest.approx((expected.low, expected.high))
    assert Margin(pd.Series(values[:2])).interval is None


def test_a_lead_at_every_depth_needs_every_depth(tmp_path):
    for stages in LAPTOP.depths[1:-1]:
        for method, loss in zip(MAIN, (2.0, 2.0, 2.0, 1.0), strict=True):
            write_finals(tmp_path, method, {0: loss}, stages)
    assert row(tmp_path, "main-every-depth").reason == "no runs of basis-rotation at P = 32 yet"
    for method, loss in zip(MAIN, (2.0, 2.0, 2.0, 0.5), strict=True):
        write_finals(tmp_path, method, {0: loss})
    assert row(tmp_path, "main-every-depth").verdict == "yes"
    assert row(tmp_path, "main-gap-widens").verdict == "yes"
    assert row(tmp_path, "main-gap-widens").evidence.text == "lead 1.000 nats at P = 2, 1.500 at P = 32"
    write_finals(tmp_path, "nesterov", {0: 0.9}, 4)
    assert row(tmp_path, "main-every-depth").verdict == "no"


@pytest.mark.parametrize(("losses", "verdict"), [((2.0, 1.9, 1.8, 1.7), "yes"), ((1.7, 1.8, 1.9, 2.0), "no")])
def test_deeper_models_end_lower_or_higher(losses, verdict, tmp_path):
    opposite = {"yes": "no", "no": "yes"}
    for method in ("basis-rotation", "nesterov"):
        for blocks, loss in zip(LAPTOP.blocks, losses, strict=True):
            write_finals(tmp_path, method, {0: loss}, blocks, **{"model.blocks": blocks})
    assert row(tmp_path, "depth-basis-rotation").verdict == verdict
    assert row(tmp_path, "depth-nesterov").verdict == opposite[verdict]


def test_reversed_intervals_end_higher(tmp_path):
    write_finals(tmp_path, "basis-rotation", {0: 1.0})
    write_finals(tmp_path, "basis-rotation", {0: 1.1}, **{"optimizer.refresh_schedule": "reversed"})
    assert row(tmp_path, "reversed").verdict == "yes"
    write_finals(tmp_path, "basis-rotation", {0: 1.2})
    assert row(tmp_path, "reversed").verdict == "no"


@pytest.mark.parametrize(("few", "verdict"), [(1.05, "yes"), (1.2, "no")])
def test_few_refreshes_may_cost_a_tenth_of_the_lead(few, verdict, tmp_path):
    write_finals(tmp_path, "basis-rotation", {0: 1.0, 1: 5.0})  # seed 1 has no partner
    for baseline in BASELINES:
        write_finals(tmp_path, baseline, {0: 2.0})
    write_finals(tmp_path, "basis-rotation", {0: few}, **{"optimizer.frequency": 100})
    assert row(tmp_path, "frequency-100-little").verdict == verdict
    assert row(tmp_path, "frequency-100").verdict == "yes"


def test_rises_without_stashing_are_compared_with_every_baseline(tmp_path):
    for method, (with_it, without) in zip(MAIN, ((2.0, 2.5), (2.0, 2.4), (2.0, 2.3), (1.0, 1.1)), strict=True):
        write_finals(tmp_path, method, {0: with_it})
        write_finals(tmp_path, method, {0: without}, **{"pipeline.stash": "none"})
    assert row(tmp_path, "no-stashing-robust").verdict == "yes"
    write_finals(tmp_path, "nesterov", {0: 2.05}, **{"pipeline.stash": "none"})
    assert row(tmp_path, "no-stashing-robust").verdict == "no"


@pytest.mark.parametrize(("compensated", "verdict"), [(1.9, "yes"), (1.3, "no"), (2.2, "yes")])
def test_delay_compensation_is_like_what_it_is_nearer_to(compensated, verdict, tmp_path):
    for stages in (8, 16, 32):
        write_finals(tmp_path, "pipedream", {0: 2.0}, stages)
        write_finals(tmp_path, "basis-rotation", {0: 1.0}, stages)
        for strength in COMPENSATIONS[1:]:
            write_finals(
                tmp_path,
                "delay-compensation",
                {0: compensated + strength},
                stages,
                **{"optimizer.compensation": strength},
            )
    assert row(tmp_path, "delay-compensation").verdict == "not tried"  # a strength is missing
    for stages in (8, 16, 32):
        write_finals(
            tmp_path, "delay-compensation", {0: compensated}, stages, **{"optimizer.compensation": COMPENSATIONS[0]}
        )
    assert row(tmp_path, "delay-compensation").verdict == "yes"
    assert row(tmp_path, "delay-compensation-like-pipedream").verdict == verdict


def test_validation_follows_training_where_the_order_is_the_same(tmp_path):
    for method, final in zip(MAIN, (2.0, 1.9, 1.8, 1.0), strict=True):
        settings = {"pipeline.stages": 32, **VARIANTS[method]}
        write_experiment(tmp_path, LAPTOP.preset, settings, slowness=final, val_loss=final)
    assert row(tmp_path, "validation").verdict == "yes"
    write_finals(tmp_path, "nesterov", {0: 1.95})
    assert row(tmp_path, "validation").verdict == "no"


def test_validation_is_not_asked_about_pairs_that_training_leaves_open(tmp_path):
    slownesses = {"pipedream": (2.0, 2.2, 2.1), "pipedream-lr": (2.2, 2.0, 2.1), "nesterov": (1.8,) * 3}
    for method, by_seed in {**slownesses, "basis-rotation": (1.0,) * 3}.items():
        settings = {"pipeline.stages": 32, **VARIANTS[method]}
        for seed, slowness in enumerate(by_seed):
            final = 5.0 if method == "pipedream-lr" else slowness
            write_experiment(tmp_path, LAPTOP.preset, settings, seeds=(seed,), slowness=slowness, val_loss=final)
    judged = row(tmp_path, "validation")
    assert judged.verdict == "yes"
    assert "5 of 5 sure pairs" in judged.evidence.text
