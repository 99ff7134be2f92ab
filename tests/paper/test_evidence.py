"""Evidence from made-up runs: which method ends lower, which slows down less, and how much
is saved."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from scipy.stats import ttest_1samp

from brx.config.loading import preset_with
from brx.errors import UserError
from brx.files import write_json
from brx.paper import evidence
from brx.paper.claims import evidence_text, verdict_text
from brx.paper.evidence import Evidence, Margin, ends_below, runs_of, shared_seeds, slows_down_less
from brx.paper.scales import (
    BLOCKS,
    COMPENSATIONS,
    DEPTHS,
    MAIN,
    VARIANTS,
    Experiments,
    depth_settings,
)
from brx.runs.comparison import BASELINES
from brx.sweep.cell import trajectory_id
from tests.paper.helpers import LAPTOP, row, write_method

NO_STASH = {"pipeline.stash": "none"}
FEW = {"optimizer.frequency": 100}
REVERSED = {"optimizer.refresh_schedule": "reversed"}


def write_finals(folder, method, finals, stages=32, settings=None):
    """Runs with a final validation loss, or with one per seed."""
    for seed, loss in (finals if isinstance(finals, dict) else {0: finals}).items():
        write_method(folder, method, stages, settings, seeds=(seed,), val_loss=loss)


def write_slowness(folder, method, by_seed):
    """Runs at P = 1 and 32; the ones at 32 are slower by a factor for each seed."""
    for seed, slowness in by_seed.items():
        write_method(folder, method, 1, seeds=(seed,), slowness=1.0)
        write_method(folder, method, 32, seeds=(seed,), slowness=slowness)


def write_pair(folder, ours, theirs, diverged="", seed=None):
    """Runs of basis rotation and of Nesterov, as `runs_of` finds them. A seed of the method
    `diverged` has diverged."""
    write_finals(folder, "basis-rotation", ours)
    write_finals(folder, "nesterov", theirs)
    if diverged:
        settings = {**depth_settings(32, 8), **VARIANTS[diverged], "training.seed": seed}
        run = folder / trajectory_id(preset_with(LAPTOP.preset, settings))
        write_json(run / "summary.json", {"status": "diverged", "data_fingerprint": "f"})
    experiments = Experiments.load(LAPTOP, folder)
    return runs_of(experiments, "basis-rotation"), runs_of(experiments, "nesterov")


@pytest.mark.parametrize(
    ("ours", "theirs", "diverged", "holds"),
    [
        ({0: 1.0}, {0: 1.1}, "", True),
        # Seed by seed, however far seeds differ.
        ({0: 1.0, 1: 1.2, 2: 1.4}, {0: 1.1, 1: 1.31, 2: 1.5}, "", True),
        # Lower in the mean, but not by more than chance.
        ({0: 1.0, 1: 1.2, 2: 1.4}, {0: 1.1, 1: 1.3, 2: 1.3}, "", False),
        # Only the seed that both have counts.
        ({0: 1.2, 1: 0.1}, {0: 1.1}, "", False),
        # A run that diverged ends above everything.
        ({0: 1.0, 1: 1.0}, {0: 1.1, 1: 1.1}, "basis-rotation", False),
        ({0: 1.0, 1: 1.0}, {0: 1.1, 1: 1.1}, "nesterov", True),
    ],
)
def test_ends_below(ours, theirs, diverged, holds, tmp_path):
    own, other = write_pair(tmp_path, ours, theirs, diverged, 1)
    assert ends_below("ours", own, {"nesterov": other}).holds == holds


@pytest.mark.parametrize("num_seeds", [2, 3])
def test_text_has_an_interval_from_three_seeds_on(num_seeds, tmp_path):
    ours = {seed: 1.0 + 0.1 * seed for seed in range(num_seeds)}
    theirs = {seed: 1.1 + 0.11 * seed for seed in range(num_seeds)}
    own, other = write_pair(tmp_path, ours, theirs)
    text = ends_below("ours", own, {"nesterov": other}).text
    assert ("difference [" in text) == (num_seeds >= 3)


def test_margin_has_students_interval():
    values = [0.1, 0.3, 0.2, 0.25]
    expected = ttest_1samp(values, 0.0).confidence_interval(0.95)
    assert Margin(pd.Series(values)).interval == pytest.approx((expected.low, expected.high))


def test_margin_of_two_seeds_has_no_interval():
    assert Margin(pd.Series([0.1, 0.3])).interval is None


@pytest.mark.parametrize(
    ("values", "holds"),
    [([np.inf, -0.5, -0.4, -0.6], False), ([np.inf, 0.5, 0.4], True), ([-np.inf, 0.5, 0.4], False)],
)
def test_margin_with_a_diverged_seed_needs_all(values, holds):
    assert Margin(pd.Series(values)).holds == holds


def test_seed_that_diverged_twice_is_left_out():
    margin = Margin(pd.Series([np.inf, 0.5, 0.4]) - pd.Series([np.inf, 0.0, 0.0]))
    assert margin.mean == pytest.approx(0.45)
    assert margin.interval is None


@pytest.fixture
def shared(tmp_path):
    """Two methods with two seeds in common; a further seed of one has diverged."""
    ours = dict.fromkeys((0, 1), 1.0)
    theirs = dict.fromkeys((0, 1, 4), 1.1)
    return shared_seeds(*write_pair(tmp_path, ours, theirs, "nesterov", 4))


def test_only_shared_seeds_are_compared(shared):
    assert [sorted(seeds["training.seed"]) for seeds in shared] == [[0, 1], [0, 1]]


def test_diverged_seed_without_partner_is_forgotten(shared):
    for seeds in shared:
        assert not any(seeds["diverged_seeds"])


def test_method_whose_runs_all_diverged_is_named(tmp_path):
    with pytest.raises(UserError, match="every run of nesterov at P = 32 diverged"):
        write_pair(tmp_path, 1.0, 1.0, "nesterov", 0)


def test_methods_without_a_common_seed_are_refused(tmp_path):
    with pytest.raises(UserError, match="no seed in common"):
        shared_seeds(*write_pair(tmp_path, {0: 1.0}, {1: 1.1}))


# Leads at every depth.


def write_main(folder, losses, stages=32):
    """Runs of the main methods with final losses, or with one per seed."""
    for method, loss in zip(MAIN, losses, strict=True):
        write_finals(folder, method, loss, stages)


@pytest.fixture
def but_the_deepest(tmp_path):
    """A lead of 1 nat at every P but the largest."""
    for stages in DEPTHS[1:-1]:
        write_main(tmp_path, (2.0, 2.0, 2.0, 1.0), stages)
    return tmp_path


@pytest.fixture
def every_depth(but_the_deepest):
    """A lead of 1.5 nats at the largest P, too."""
    write_main(but_the_deepest, (2.0, 2.0, 2.0, 0.5))
    return but_the_deepest


def test_lead_at_every_depth_needs_every_depth(but_the_deepest):
    reason = row(but_the_deepest, "main-every-depth").reason
    assert reason == "no runs of basis-rotation at P = 32 yet"


def test_lead_at_every_depth_holds(every_depth):
    assert row(every_depth, "main-every-depth").verdict == "yes"


def test_one_depth_without_a_lead_is_a_no(every_depth):
    write_finals(every_depth, "nesterov", 0.9, 4)
    assert row(every_depth, "main-every-depth").verdict == "no"


def test_larger_lead_at_the_deepest_widens(every_depth):
    assert row(every_depth, "main-gap-widens").verdict == "yes"


def test_smaller_gap_behind_the_baselines_is_no_wider_lead(tmp_path):
    for stages in DEPTHS[1:]:
        write_main(tmp_path, (2.0, 2.0, 2.0, 2.5 if stages == 32 else 3.0), stages)
    assert row(tmp_path, "main-gap-widens").verdict == "no"


def test_text_has_the_lead_at_each_depth(every_depth):
    text = row(every_depth, "main-gap-widens").evidence.text
    assert text.startswith("lead 1.000 nats at P = 2, 1.500 at P = 32; at P = 2, 4, 8, 16, 32: ")


def test_best_baseline_is_of_the_compared_seeds(every_depth):
    # On seed 0, the one that all depths have, the lead shrinks, whatever seed 1 says.
    write_main(
        every_depth, ({0: 9.0, 1: 9.0}, {0: 2.0, 1: 1.0}, {0: 1.2, 1: 3.0}, {0: 0.5, 1: 0.5})
    )
    text = row(every_depth, "main-gap-widens").evidence.text
    assert text.startswith("lead 1.000 nats at P = 2, 0.700 at P = 32")


# Claims on final losses: each case is a list of (method, losses, stages, settings).


def finals(losses, stages=32, **settings):
    """Runs of the main methods, in their order."""
    return [(method, loss, stages, settings) for method, loss in zip(MAIN, losses, strict=True)]


def by_blocks(*losses):
    """Basis rotation and Nesterov, whose final losses depend on the model's depth in the same
    way."""
    runs = []
    for method in ("basis-rotation", "nesterov"):
        for n, loss in zip(BLOCKS, losses, strict=True):
            runs.append((method, loss, n, {"model.blocks": n}))
    return runs


def compensated(best, second_seed=None):
    """PipeDream ends at 2, basis rotation at 1, delay compensation at `best` with the first
    strength and above it with the others.

    `second_seed` has the losses of seed 1: PipeDream's, basis rotation's, and the first
    strength's."""
    first, *others = COMPENSATIONS
    runs = []
    for P in (8, 16, 32):
        losses = [{0: 2.0}, {0: 1.0}, {0: best}]
        if second_seed is not None:
            for by_seed, loss in zip(losses, second_seed, strict=True):
                by_seed[1] = loss
        pipedream, ours, compensation = losses
        runs += [("pipedream", pipedream, P, {}), ("basis-rotation", ours, P, {})]
        runs.append(("delay-compensation", compensation, P, {"optimizer.compensation": first}))
        for strength in others:
            settings = {"optimizer.compensation": strength}
            runs.append(("delay-compensation", best + strength - first, P, settings))
    return runs


ROTATED = [("basis-rotation", 1.0, 32, {})]
REFRESHES = finals((2.0, 2.0, 2.0, {0: 1.0, 1: 5.0}))  # seed 1 has no partner
STASHED = [*finals((2.0, 2.0, 2.0, 1.0)), *finals((2.5, 2.4, 2.3, 1.1), **NO_STASH)]


@pytest.mark.parametrize(
    ("runs", "verdicts"),
    [
        ([*ROTATED, ("basis-rotation", 1.1, 32, REVERSED)], {"reversed": "yes"}),
        ([*ROTATED, ("basis-rotation", 0.9, 32, REVERSED)], {"reversed": "no"}),
        # A tenth of the lead may be lost.
        ([*REFRESHES, ("basis-rotation", 1.05, 32, FEW)], {"frequency-100-little": "yes"}),
        (
            [*REFRESHES, ("basis-rotation", 1.2, 32, FEW)],
            {"frequency-100-little": "no", "frequency-100": "yes"},
        ),
        (STASHED, {"no-stashing-robust": "yes"}),
        # One baseline that loses less is enough for a no.
        ([*STASHED, ("nesterov", 2.05, 32, NO_STASH)], {"no-stashing-robust": "no"}),
        (by_blocks(2.0, 1.9, 1.8, 1.7), {"depth-basis-rotation": "yes", "depth-nesterov": "no"}),
        (by_blocks(1.7, 1.8, 1.9, 2.0), {"depth-basis-rotation": "no", "depth-nesterov": "yes"}),
        (compensated(1.9)[:-1], {"delay-compensation": "not tried"}),  # a strength is missing
        (
            compensated(1.9),
            {"delay-compensation": "yes", "delay-compensation-like-pipedream": "yes"},
        ),
        (
            compensated(1.3),
            {"delay-compensation": "yes", "delay-compensation-like-pipedream": "no"},
        ),
        (
            compensated(2.2),
            {"delay-compensation": "yes", "delay-compensation-like-pipedream": "yes"},
        ),
        (
            compensated(1.9, (3.0, 2.0, 2.9)),
            {"delay-compensation": "yes", "delay-compensation-like-pipedream": "yes"},
        ),
        (
            compensated(1.9, (3.0, 4.0, 2.9)),
            {"delay-compensation": "no", "delay-compensation-like-pipedream": "no"},
        ),
    ],
)
def test_claims_on_final_losses(runs, verdicts, tmp_path):
    for method, loss, stages, settings in runs:
        write_finals(tmp_path, method, loss, stages, settings)
    assert {name: row(tmp_path, name).verdict for name in verdicts} == verdicts


@pytest.fixture
def one_seed(tmp_path):
    """The main methods in one order by training and validation loss."""
    for method, final in zip(MAIN, (2.0, 1.9, 1.8, 1.0), strict=True):
        write_method(tmp_path, method, slowness=final, val_loss=final)
    return tmp_path


def test_same_order_by_validation_is_a_yes(one_seed):
    assert row(one_seed, "validation").verdict == "yes"


def test_other_order_by_validation_is_a_no(one_seed):
    write_finals(one_seed, "nesterov", 1.95)
    assert row(one_seed, "validation").verdict == "no"


def write_losses(folder, by_method, **val_losses):
    """Runs with training losses by seed; validation losses are the same, unless they are given by
    method (with `_` for `-`)."""
    for method, losses in by_method.items():
        for seed, loss in enumerate(losses):
            final = val_losses.get(method.replace("-", "_"), loss)
            write_method(folder, method, seeds=(seed,), slowness=loss, val_loss=final)


def test_pair_that_training_leaves_open_does_not_count(tmp_path):
    losses = dict(
        zip(MAIN, ((2.0, 2.2, 2.1), (2.2, 2.0, 2.1), (1.8,) * 3, (1.0,) * 3), strict=True)
    )
    # By validation PipeDream-LR is surely worse than PipeDream, by training it is level.
    write_losses(tmp_path, losses, pipedream_lr=5.0)
    judged = row(tmp_path, "validation")
    assert judged.verdict == "yes"
    assert "5 of 5 sure pairs" in judged.evidence.text


def test_pair_sure_by_chance_is_strictly_open(tmp_path):
    # By training Nesterov surely ends below PipeDream as one pair alone, not as one of six.
    losses = {
        "pipedream": (2.0, 2.0, 2.0),
        "pipedream-lr": (2.1, 1.9, 2.0),
        "nesterov": (1.99, 1.985, 1.98),
        "basis-rotation": (2.2, 1.8, 2.0),
    }
    write_losses(tmp_path, losses)
    judged = row(tmp_path, "validation")
    assert (judged.verdict, judged.strict_verdict) == ("yes", "open")


# Slowdowns in order.


def judge_slowdowns(folder, ours, theirs):
    """Whether basis rotation slows down less than PipeDream, from slownesses by seed."""
    write_slowness(folder, "basis-rotation", ours)
    write_slowness(folder, "pipedream", theirs)
    write_slowness(folder, "nesterov", dict.fromkeys(ours, 9))  # sets the target
    return slows_down_less(Experiments.load(LAPTOP, folder), [("basis-rotation", "pipedream")])


NEVER = 1e9
THREE = {0: 1.5, 1: 2.0, 2: 2.5}


@pytest.mark.parametrize(
    ("ours", "theirs", "holds"),
    [
        ({0: 3.0}, {0: 1.5}, False),
        # Twice as slow on each seed.
        (THREE, {0: 3.0, 1: 4.1, 2: 5.2}, True),
        # By chance, as far as three seeds can say.
        ({0: 1.5, 1: 2.0, 2: 9.0}, {0: 3.0, 1: 4.1, 2: 5.2}, False),
        # Only the seed that both have counts.
        ({0: 1.5, 1: 9.0}, {0: 3.0}, True),
        # One never reaches the target: every seed has to agree.
        (THREE, {0: 3.0, 1: NEVER, 2: 5.2}, True),
        (THREE, {0: 1.2, 1: NEVER, 2: 5.2}, False),
    ],
)
def test_slowdowns_are_compared_seed_by_seed(ours, theirs, holds, tmp_path):
    assert judge_slowdowns(tmp_path, ours, theirs).holds == holds


def test_text_has_the_interval_of_the_ratio(tmp_path):
    text = judge_slowdowns(tmp_path, THREE, {0: 3.0, 1: 4.1, 2: 5.2}).text
    assert "pipedream over basis-rotation [" in text


@pytest.mark.parametrize(("first", "told"), [(3.0, "in"), (1.2, "not in")])
def test_text_with_a_bound_tells_every_seed(first, told, tmp_path):
    text = judge_slowdowns(tmp_path, THREE, {0: first, 1: NEVER, 2: 5.2}).text
    assert f"pipedream over basis-rotation {told} every seed" in text


@pytest.fixture
def with_low_bound(tmp_path):
    """PipeDream is slow even without delay and never reaches the target with it, so that its bound
    is low, below Nesterov's slowdown."""
    write_slowness(tmp_path, "basis-rotation", {0: 1.0})
    write_slowness(tmp_path, "nesterov", {0: 40.0})
    write_method(tmp_path, "pipedream", 1, slowness=3.0)
    write_method(tmp_path, "pipedream", 32, slowness=NEVER)
    return Experiments.load(LAPTOP, tmp_path)


def test_low_bound_does_not_make_a_method_faster(with_low_bound):
    judged = slows_down_less(with_low_bound, [("pipedream", "nesterov")])
    texts = judged.text.partition(";")[0].split(", ")
    pipedream, nesterov = (float(text.split()[-1]) for text in texts)
    assert pipedream < nesterov
    assert not judged.holds


def test_bound_is_told_as_such(with_low_bound):
    judged = slows_down_less(with_low_bound, [("basis-rotation", "pipedream")])
    assert judged.holds
    assert "pipedream > " in judged.text


def test_text_ends_with_the_target(with_low_bound):
    judged = slows_down_less(with_low_bound, [("pipedream", "nesterov")])
    target = with_low_bound.slowdown_target()
    assert judged.text.endswith(f"; to {target:.3f} nats, seeds: 1")


def test_method_without_runs_is_named(with_low_bound):
    with pytest.raises(UserError, match="no runs of muon"):
        slows_down_less(with_low_bound, [("basis-rotation", "muon")])


def write_slow_start(folder, method):
    """Three seeds of a method that is slow even without delay and never reaches the target with it,
    so that its bound is low."""
    write_method(folder, method, 1, seeds=(0, 1, 2), slowness=3.0)
    write_method(folder, method, 32, seeds=(0, 1, 2), slowness=NEVER)


def test_low_bounds_alone_are_no_order(tmp_path):
    """PipeDream's bounds lie below Nesterov's slowdowns, but its slowdowns may lie above them."""
    write_slowness(tmp_path, "nesterov", {0: 40.0, 1: 41.0, 2: 42.0})
    write_slow_start(tmp_path, "pipedream")
    judged = slows_down_less(Experiments.load(LAPTOP, tmp_path), [("nesterov", "pipedream")])
    assert (judged.holds, judged.strict) == (False, "open")
    assert "pipedream over nesterov [" not in judged.text
    assert "whether pipedream is over nesterov, the bounds do not tell" in judged.text


def test_bounds_above_the_slower_method_refute_the_order(tmp_path):
    """SOAP's bounds already lie above PipeDream's slowdowns."""
    write_slowness(tmp_path, "nesterov", {0: 9.0, 1: 9.0, 2: 9.0})  # sets the target
    write_slowness(tmp_path, "pipedream", {0: 1.5, 1: 1.6, 2: 1.7})
    write_method(tmp_path, "soap", 1, seeds=(0, 1, 2), slowness=1.0)
    write_method(tmp_path, "soap", 32, seeds=(0, 1, 2), slowness=NEVER)
    judged = slows_down_less(Experiments.load(LAPTOP, tmp_path), [("soap", "pipedream")])
    assert (judged.holds, judged.strict) == (False, "no")


@pytest.mark.parametrize(
    ("delayed_seeds", "verdicts"),
    [
        ((0, 1, 2), ("yes", "yes")),
        # The third seed of either side has no partner.
        ((1, 2, 3), ("yes, two seeds", "open")),
        ((3, 4, 5), ("not tried", "not tried")),
    ],
)
def test_slowdown_counts_the_seeds_of_both_ends(delayed_seeds, verdicts, tmp_path):
    for seed in (0, 1, 2):
        write_method(tmp_path, "basis-rotation", 1, seeds=(seed,), slowness=1.0)
    for seed in delayed_seeds:
        slowness = 1.27 + 0.001 * seed
        write_method(tmp_path, "basis-rotation", 32, seeds=(seed,), slowness=slowness)
    judged = row(tmp_path, "slowdown-basis-rotation")
    assert (verdict_text(judged), judged.strict_verdict) == verdicts


def test_target_on_a_plateau_is_refused(with_low_bound, monkeypatch):
    monkeypatch.setattr("brx.runs.slowdown.PLATEAU", -1.0)
    with pytest.raises(UserError, match="is on a plateau for basis-rotation"):
        slows_down_less(with_low_bound, [("basis-rotation", "nesterov")])


@pytest.mark.parametrize(
    ("soap", "muon", "fresh", "verdict"),
    [
        (2.2, 6, 1, "yes"),
        (6, 2.2, 1, "no"),
        (NEVER, 6, 1, "no"),
        # Muon never reaches the target: its bound is far, or low, so that it may be nearer.
        (2.2, NEVER, 1, "yes"),
        (2.2, NEVER, 19, "no"),
        # Its bound lies above basis rotation's slowdown, but nearer to it than SOAP's.
        (8, NEVER, 8, "no"),
    ],
)
def test_soap_is_close_if_the_nearest(soap, muon, fresh, verdict, tmp_path):
    slowness = {"nesterov": 20.0, "basis-rotation": 2.0, "soap": soap, "scion": 9.0}
    for method, times in slowness.items():
        write_slowness(tmp_path, method, {0: times})
    write_method(tmp_path, "muon", 1, slowness=fresh)
    write_method(tmp_path, "muon", 32, slowness=muon)
    assert row(tmp_path, "soap-close").verdict == verdict


# Iterations and time saved.


@pytest.fixture
def never_reached(tmp_path):
    """Basis rotation never reaches the baselines' final loss."""
    write_slowness(tmp_path, "basis-rotation", {0: NEVER})
    for baseline in BASELINES:
        write_slowness(tmp_path, baseline, {0: 2.0})
    return row(tmp_path, "main-reduction")


def test_target_never_reached_saves_nothing(never_reached):
    assert never_reached.evidence.value < 0
    assert never_reached.verdict == "no"


def test_target_never_reached_is_a_bound(never_reached):
    assert evidence_text(never_reached).startswith("< ")


def test_iterations_are_saved_over_the_baseline_that_trains_lowest(tmp_path):
    # By validation, Nesterov would be the best baseline.
    slowness = {"basis-rotation": 2.0, "pipedream": 4.0, "pipedream-lr": 6.0, "nesterov": 8.0}
    for method, times in slowness.items():
        val_loss = 0.1 if method == "nesterov" else None
        write_method(tmp_path, method, slowness=times, val_loss=val_loss)
    saved = row(tmp_path, "main-reduction").evidence
    assert saved.text == "over pipedream"
    assert saved.value == pytest.approx(1 - 2.0 / 4.0, abs=0.01)


@pytest.mark.parametrize(
    ("larger", "smaller", "holds"),
    [
        (Evidence(-0.5), Evidence(-0.6), True),
        (Evidence(-0.6), Evidence(-0.5), False),
        (Evidence(-0.4, is_bound=True), Evidence(-0.5), False),  # an upper bound
    ],
)
def test_larger_model_saves_more(larger, smaller, holds, monkeypatch):
    shares = {"larger": larger, "smaller": smaller}
    monkeypatch.setattr(evidence, "saved_over_baselines", lambda _, model: shares[model])
    monkeypatch.setattr(evidence, "_log_left", lambda *_: [])
    assert evidence.saves_more(None, larger="larger", smaller="smaller").holds == holds


def test_stage_aware_is_compared_with_the_same_seed(tmp_path):
    write_slowness(tmp_path, "basis-rotation", {0: 2.0, 1: 9.0, 2: 9.0})
    write_method(
        tmp_path,
        "basis-rotation",
        settings={"optimizer.refresh_schedule": "stage-aware"},
        slowness=1.5,
    )
    assert row(tmp_path, "stage-aware").evidence.value == pytest.approx(0.25, abs=0.01)


@pytest.fixture
def three_seeds(tmp_path):
    """Runs in which basis rotation slows down by 1.3, the baselines by 32."""
    for method in MAIN:
        slowness = 1.3 if method == "basis-rotation" else 32
        write_slowness(tmp_path / "runs", method, dict.fromkeys(range(3), slowness))
    return tmp_path / "runs"


def scale_with_times(folder, ratio):
    """A scale whose benchmark has this time of an iteration of basis rotation over a baseline's."""
    rows = [["32", "8", "8", method, "2.0"] for method in BASELINES]
    rows.append(["32", "8", "8", "basis-rotation", str(2.0 * ratio)])
    rows.append(["64", "8", "8", "basis-rotation", "1"])  # another model
    columns = ["width", "blocks", "stages", "method", "ratio to AdamW"]
    table = folder / "times.json"
    table.write_text(json.dumps({"columns": columns, "rows": rows}))
    return replace(LAPTOP, times=table)


@pytest.mark.parametrize(("ratio", "verdict"), [(1.0, "yes"), (1e3, "no")])
def test_time_is_iterations_times_their_time(ratio, verdict, three_seeds, tmp_path):
    saved = row(three_seeds, "main-reduction").evidence.value
    outcome = row(three_seeds, "cpu-time", scale_with_times(tmp_path, ratio))
    assert outcome.evidence.value == pytest.approx(1 - (1 - saved) * ratio)
    assert outcome.verdict == verdict


def test_time_without_a_benchmark_is_not_tried(three_seeds, tmp_path):
    scale = replace(LAPTOP, times=tmp_path / "none.json")
    assert row(three_seeds, "cpu-time", scale).verdict == "not tried"


def test_time_to_a_target_never_reached_is_bounded(three_seeds, tmp_path):
    write_method(three_seeds, "basis-rotation", seeds=(0, 1, 2), slowness=500)
    outcome = row(three_seeds, "cpu-time", scale_with_times(tmp_path, 1.0))
    assert outcome.evidence.text.startswith("< ")
    assert outcome.verdict == "no"


def test_time_of_a_cpu_is_strictly_open(three_seeds, tmp_path):
    outcome = row(three_seeds, "cpu-time", scale_with_times(tmp_path, 1.0))
    assert (outcome.verdict, outcome.strict_verdict) == ("yes", "open")


# Strict verdicts.


def write_leads(folder, leads, seeds=(0, 1, 2)):
    """Basis rotation ends so many nats below every baseline, by P; noise of a milli-nat."""
    for P, lead in leads.items():
        for seed in seeds:
            noise = 0.001 * ((7 * seed + P) % 5)
            write_finals(folder, "basis-rotation", {seed: 2.0 + 0.1 * seed - noise}, P)
            for method in BASELINES:
                write_finals(folder, method, {seed: 2.0 + 0.1 * seed + lead}, P)


def test_lead_that_always_rises_strictly_widens(tmp_path):
    write_leads(tmp_path, {2: 0.1, 4: 0.2, 8: 0.3, 16: 0.4, 32: 0.5})
    assert row(tmp_path, "main-gap-widens").strict_verdict == "yes"


def test_lead_that_rises_only_last_is_open(tmp_path):
    write_leads(tmp_path, {2: 0.4, 4: 0.3, 8: 0.2, 16: 0.1, 32: 0.9})
    outcome = row(tmp_path, "main-gap-widens")
    assert (outcome.verdict, outcome.strict_verdict) == ("yes", "open")


def test_two_seeds_are_strictly_open(tmp_path):
    write_leads(tmp_path, {2: 0.1, 4: 0.2, 8: 0.3, 16: 0.4, 32: 0.5}, seeds=(0, 1))
    outcome = row(tmp_path, "main-every-depth")
    assert (outcome.verdict, outcome.strict_verdict) == ("yes", "open")


@pytest.mark.parametrize(
    ("name", "losses", "verdict"),
    [
        ("depth-basis-rotation", (1.4, 1.3, 1.2, 1.1), "yes"),
        ("depth-basis-rotation", (1.1, 1.2, 1.3, 1.4), "no"),
        ("depth-nesterov", (1.1, 1.2, 1.3, 1.4), "yes"),
        ("depth-nesterov", (1.3, 1.2, 1.1, 1.4), "open"),
    ],
)
def test_depth_is_strictly_a_trend_over_all_blocks(tmp_path, name, losses, verdict):
    for blocks, loss in zip(BLOCKS, losses, strict=True):
        finals = {seed: loss + 0.01 * seed for seed in range(3)}
        method = name.removeprefix("depth-")
        write_finals(tmp_path, method, finals, blocks, {"model.blocks": blocks})
    assert row(tmp_path, name).strict_verdict == verdict


@pytest.mark.parametrize(("larger", "verdict"), [(1.1, "yes"), (1.9, "no"), (NEVER, "open")])
def test_larger_model_strictly_saves_more_by_welch(tmp_path, larger, verdict):
    for width, slowness in (({}, 1.5), ({"model.width": 64}, larger)):
        for seed in range(3):
            for method in MAIN:
                is_ours = method == "basis-rotation"
                slower = slowness + 0.02 * seed if is_ours else 4.0
                write_method(tmp_path, method, 24, width, seeds=(seed,), slowness=slower)
    assert row(tmp_path, "width-order").strict_verdict == verdict
