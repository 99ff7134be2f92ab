"""Which method ends lower, slowdowns in order, iterations saved and the time that they are, from
made-up runs."""

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
from brx.paper.claims import evidence_text
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
from brx.sweep.spec import identity
from tests.paper.helpers import LAPTOP, row, write_method

NO_STASH, FEW = {"pipeline.stash": "none"}, {"optimizer.frequency": 100}
REVERSED = {"optimizer.refresh_schedule": "reversed"}


def write_finals(folder, method, finals, stages=32, settings=None):
    """Runs with a final validation loss, or with one per seed."""
    for seed, loss in (finals if isinstance(finals, dict) else {0: finals}).items():
        write_method(folder, method, stages, settings, seeds=(seed,), val_loss=loss)


def write_slowness(folder, method, by_seed):
    """Runs at P = 1 and 32; those at 32 are so many times as slow, by seed."""
    for seed, slowness in by_seed.items():
        for stages, times in ((1, 1.0), (32, slowness)):
            write_method(folder, method, stages, seeds=(seed,), slowness=times)


def write_pair(folder, ours, theirs, diverged="", seed=None):
    """Basis rotation and Nesterov, a seed of one of which may have diverged; both as `runs_of`
    finds them."""
    for method, finals in (("basis-rotation", ours), ("nesterov", theirs)):
        write_finals(folder, method, finals)
    if diverged:
        settings = {**depth_settings(32, 8), **VARIANTS[diverged], "training.seed": seed}
        run = folder / identity(preset_with(LAPTOP.preset, settings))
        write_json(run / "summary.json", {"status": "diverged", "data_fingerprint": "f"})
    return [
        runs_of(Experiments.load(LAPTOP, folder), method)
        for method in ("basis-rotation", "nesterov")
    ]


@pytest.mark.parametrize(
    ("ours", "theirs", "diverged", "holds"),
    [
        ({0: 1.0}, {0: 1.1}, "", True),
        (
            {0: 1.0, 1: 1.2, 2: 1.4},
            {0: 1.1, 1: 1.31, 2: 1.5},
            "",
            True,
        ),  # seed by seed, however far seeds differ
        (
            {0: 1.0, 1: 1.2, 2: 1.4},
            {0: 1.1, 1: 1.3, 2: 1.3},
            "",
            False,
        ),  # lower in the mean, not by more than chance
        ({0: 1.2, 1: 0.1}, {0: 1.1}, "", False),  # of the seed that both have
        (
            {0: 1.0, 1: 1.0},
            {0: 1.1, 1: 1.1},
            "basis-rotation",
            False,
        ),  # what diverged ends above everything
        ({0: 1.0, 1: 1.0}, {0: 1.1, 1: 1.1}, "nesterov", True),
    ],
)
def test_ends_below(ours, theirs, diverged, holds, tmp_path):
    found = write_pair(tmp_path, ours, theirs, diverged, 1)
    judged = ends_below("ours", found[0], {"nesterov": found[1]})
    assert judged.holds == holds
    assert ("difference [" in judged.text) == (len(theirs) > 2)


def test_margin_is_by_seed_and_one_that_diverged_does_not_outvote_the_others():
    values = [0.1, 0.3, 0.2, 0.25]
    expected = ttest_1samp(values, 0.0).confidence_interval(0.95)
    assert Margin(pd.Series(values)).interval == pytest.approx((expected.low, expected.high))
    assert Margin(pd.Series(values[:2])).interval is None
    assert not Margin(pd.Series([np.inf, -0.5, -0.4, -0.6])).holds
    assert Margin(pd.Series([np.inf, 0.5, 0.4])).holds
    assert not Margin(pd.Series([-np.inf, 0.5, 0.4])).holds
    of_two = Margin(pd.Series([np.inf, 0.5, 0.4]) - pd.Series([np.inf, 0.0, 0.0]))
    assert (of_two.interval, of_two.mean) == (None, pytest.approx(0.45))


def test_seeds_without_a_partner_are_forgotten(
    tmp_path,
):
    found = write_pair(
        tmp_path / "some",
        dict.fromkeys(range(2), 1.0),
        dict.fromkeys((0, 1, 4), 1.1),
        "nesterov",
        4,
    )
    pair = shared_seeds(*found)
    assert [sorted(seeds["training.seed"]) for seeds in pair] == [[0, 1], [0, 1]]
    assert not any(lost for seeds in pair for lost in seeds["diverged_seeds"])
    with pytest.raises(UserError, match="every run of nesterov at P = 32 diverged"):
        write_pair(tmp_path / "diverged", 1.0, 1.0, "nesterov", 0)
    with pytest.raises(UserError, match="no seed in common"):
        shared_seeds(*write_pair(tmp_path / "apart", {0: 1.0}, {1: 1.1}))


def test_a_lead_at_every_depth_needs_every_depth(tmp_path):
    for stages in DEPTHS[1:-1]:
        for method, loss in zip(MAIN, (2.0, 2.0, 2.0, 1.0), strict=True):
            write_finals(tmp_path, method, loss, stages)
    assert row(tmp_path, "main-every-depth").reason == "no runs of basis-rotation at P = 32 yet"
    for method, loss in zip(MAIN, (2.0, 2.0, 2.0, 0.5), strict=True):
        write_finals(tmp_path, method, loss)
    assert row(tmp_path, "main-every-depth").verdict == "yes"
    assert row(tmp_path, "main-gap-widens").verdict == "yes"
    text = row(tmp_path, "main-gap-widens").evidence.text
    assert text.startswith("lead 1.000 nats at P = 2, 1.500 at P = 32; at P = 2, 4, 8, 16, 32: ")
    # The best baseline of the seeds that are compared: on seed 0 the lead shrinks, whoever is
    #     lowest on further ones.
    for method, by_seed in zip(MAIN, ((9.0, 9.0), (2.0, 1.0), (1.2, 3.0), (0.5, 0.5)), strict=True):
        write_finals(tmp_path, method, dict(enumerate(by_seed)))
    text = row(tmp_path, "main-gap-widens").evidence.text
    assert text.startswith("lead 1.000 nats at P = 2, 0.700 at P = 32")
    write_finals(tmp_path, "nesterov", 0.9, 4)
    assert row(tmp_path, "main-every-depth").verdict == "no"


def finals(losses, stages=32, **settings):
    """Runs of the main methods, in their order."""
    return [(method, loss, stages, settings) for method, loss in zip(MAIN, losses, strict=True)]


def by_blocks(*losses):
    """Basis rotation and Nesterov, whose final loss depends on the depth of the model alike."""
    pairs = list(zip(BLOCKS, losses, strict=True))
    return [
        (name, loss, n, {"model.blocks": n})
        for name in ("basis-rotation", "nesterov")
        for n, loss in pairs
    ]


def compensated(best, further=()):
    """PipeDream ends at 2, ours at 1, delay compensation at `best` and above; `further`: of seed 1
    at the best."""
    runs = []
    for P in (8, 16, 32):
        for n, name in enumerate(("pipedream", "basis-rotation")):
            runs.append((name, dict(enumerate((2.0 - n, *further[n : n + 1]))), P, {}))
        for s in COMPENSATIONS:
            by_seed = (best + s - COMPENSATIONS[0], *further[2:] * (s == COMPENSATIONS[0]))
            runs.append(
                ("delay-compensation", dict(enumerate(by_seed)), P, {"optimizer.compensation": s})
            )
    return runs


ROTATED = [("basis-rotation", 1.0, 32, {})]
REFRESHES = finals((2.0, 2.0, 2.0, {0: 1.0, 1: 5.0}))  # seed 1 has no partner
STASHED = [*finals((2.0, 2.0, 2.0, 1.0)), *finals((2.5, 2.4, 2.3, 1.1), **NO_STASH)]


@pytest.mark.parametrize(
    ("runs", "verdicts"),
    [
        ([*ROTATED, ("basis-rotation", 1.1, 32, REVERSED)], {"reversed": "yes"}),
        ([*ROTATED, ("basis-rotation", 0.9, 32, REVERSED)], {"reversed": "no"}),
        (
            [*REFRESHES, ("basis-rotation", 1.05, 32, FEW)],
            {"frequency-100-little": "yes"},
        ),  # a tenth may be lost
        (
            [*REFRESHES, ("basis-rotation", 1.2, 32, FEW)],
            {"frequency-100-little": "no", "frequency-100": "yes"},
        ),
        (STASHED, {"no-stashing-robust": "yes"}),
        (
            [*STASHED, ("nesterov", 2.05, 32, NO_STASH)],
            {"no-stashing-robust": "no"},
        ),  # one baseline suffices
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


def test_validation_follows_training_in_pairs_that_training_does_not_leave_open(tmp_path):
    for method, final in zip(MAIN, (2.0, 1.9, 1.8, 1.0), strict=True):
        write_method(tmp_path / "one seed", method, slowness=final, val_loss=final)
    assert row(tmp_path / "one seed", "validation").verdict == "yes"
    write_finals(tmp_path / "one seed", "nesterov", 1.95)
    assert row(tmp_path / "one seed", "validation").verdict == "no"
    by_method = zip(MAIN, ((2.0, 2.2, 2.1), (2.2, 2.0, 2.1), (1.8,) * 3, (1.0,) * 3), strict=True)
    for method, by_seed in by_method:
        for seed, slowness in enumerate(by_seed):
            final = 5.0 if method == "pipedream-lr" else slowness
            write_method(tmp_path / "3", method, seeds=(seed,), slowness=slowness, val_loss=final)
    judged = row(tmp_path / "3", "validation")
    assert judged.verdict == "yes"
    assert "5 of 5 sure pairs" in judged.evidence.text


def test_pairs_that_are_sure_by_chance_leave_validation_open(tmp_path):
    # By training Nesterov surely ends below PipeDream as one pair alone, not as one of six.
    by_method = {
        "pipedream": (2.0, 2.0, 2.0),
        "pipedream-lr": (2.1, 1.9, 2.0),
        "nesterov": (1.99, 1.985, 1.98),
        "basis-rotation": (2.2, 1.8, 2.0),
    }
    for method, losses in by_method.items():
        for seed, loss in enumerate(losses):
            write_method(tmp_path, method, seeds=(seed,), slowness=loss, val_loss=loss)
    judged = row(tmp_path, "validation")
    assert (judged.verdict, judged.strict_verdict) == ("yes", "open")


@pytest.mark.parametrize(
    ("ours", "theirs", "holds"),
    [
        ({0: 3.0}, {0: 1.5}, False),
        ({0: 1.5, 1: 2.0, 2: 2.5}, {0: 3.0, 1: 4.1, 2: 5.2}, True),  # twice as slow, seed by seed
        (
            {0: 1.5, 1: 2.0, 2: 9.0},
            {0: 3.0, 1: 4.1, 2: 5.2},
            False,
        ),  # by chance, as far as three seeds can say
        ({0: 1.5, 1: 9.0}, {0: 3.0}, True),  # of the seed that both have
        (
            {0: 1.5, 1: 2.0, 2: 2.5},
            {0: 3.0, 1: 1e9, 2: 5.2},
            True,
        ),  # one never gets there: every seed has to agree
        ({0: 1.5, 1: 2.0, 2: 2.5}, {0: 1.2, 1: 1e9, 2: 5.2}, False),
    ],
)
def test_order_of_slowdowns_is_judged_seed_by_seed(ours, theirs, holds, tmp_path):
    for method, slowness in {
        "basis-rotation": ours,
        "pipedream": theirs,
        "nesterov": dict.fromkeys(ours, 9),
    }.items():
        write_slowness(tmp_path, method, slowness)
    judged = slows_down_less(Experiments.load(LAPTOP, tmp_path), [("basis-rotation", "pipedream")])
    assert judged.holds == holds
    is_bound = 1e9 in theirs.values()
    assert ("pipedream over basis-rotation [" in judged.text) == (len(theirs) > 2 and not is_bound)
    assert (
        f"pipedream over basis-rotation {'in' if holds else 'not in'} every seed" in judged.text
    ) == is_bound


def test_a_method_that_never_gets_there_is_not_the_faster_one(tmp_path, monkeypatch):
    write_slowness(tmp_path, "basis-rotation", {0: 1.0})
    write_slowness(tmp_path, "nesterov", {0: 40.0})
    for stages, slowness in (
        (1, 3.0),
        (32, 1e9),
    ):  # slow without delay, too, so that its bound is low; sets no target
        write_method(tmp_path, "pipedream", stages, slowness=slowness)
    experiments = Experiments.load(LAPTOP, tmp_path)
    judged = slows_down_less(experiments, [("pipedream", "nesterov")])
    bounds = [float(part.split()[-1]) for part in judged.text.partition(";")[0].split(", ")]
    assert judged.text.endswith(f"; to {experiments.slowdown_target():.3f} nats, seeds: 1")
    assert bounds[0] < bounds[1]
    assert not judged.holds
    judged = slows_down_less(experiments, [("basis-rotation", "pipedream")])
    assert judged.holds
    assert "pipedream > " in judged.text
    with pytest.raises(UserError, match="no runs of muon"):
        slows_down_less(experiments, [("basis-rotation", "muon")])
    monkeypatch.setattr("brx.runs.slowdown.PLATEAU", -1.0)
    with pytest.raises(UserError, match="is on a plateau for basis-rotation"):
        slows_down_less(experiments, [("basis-rotation", "nesterov")])


# In the last two Muon never gets there: its bound is far, or low, so that it may be nearer.
SOAPS = [
    (2.2, 6, 1, "yes"),
    (6, 2.2, 1, "no"),
    (1e9, 6, 1, "no"),
    (2.2, 1e9, 1, "yes"),
    (2.2, 1e9, 19, "no"),
]


@pytest.mark.parametrize(("soap", "muon", "fresh", "verdict"), SOAPS)
def test_soap_is_close_if_it_is_nearer_than_the_others(soap, muon, fresh, verdict, tmp_path):
    slowness = {"nesterov": 20.0, "basis-rotation": 2.0, "soap": soap, "scion": 9.0}
    for method, times in slowness.items():
        write_slowness(tmp_path, method, {0: times})
    for stages, times in ((1, fresh), (32, muon)):
        write_method(tmp_path, "muon", stages, slowness=times)
    assert row(tmp_path, "soap-close").verdict == verdict


def test_what_never_gets_there_saves_less_than_nothing(tmp_path, monkeypatch):
    write_slowness(tmp_path, "basis-rotation", {0: 1e9})
    for baseline in BASELINES:
        write_slowness(tmp_path, baseline, {0: 2.0})
    outcome = row(tmp_path, "main-reduction")
    assert outcome.evidence.value < 0
    assert (outcome.verdict, evidence_text(outcome)[:2]) == ("no", "< ")
    shares = {"never": outcome.evidence, "half": Evidence(-0.5), "less": Evidence(-0.6)}
    monkeypatch.setattr(evidence, "saved_over_baselines", lambda _, model: shares[model])
    monkeypatch.setattr(evidence, "_log_left", lambda *_: [])
    assert not evidence.saves_more(None, larger="never", smaller="half").holds
    assert evidence.saves_more(None, larger="half", smaller="less").holds


def test_stage_aware_is_compared_with_the_same_seed(tmp_path):
    write_slowness(tmp_path, "basis-rotation", {0: 2.0, 1: 9.0, 2: 9.0})
    write_method(
        tmp_path,
        "basis-rotation",
        settings={"optimizer.refresh_schedule": "stage-aware"},
        slowness=1.5,
    )
    assert row(tmp_path, "stage-aware").evidence.value == pytest.approx(0.25, abs=0.01)


@pytest.mark.parametrize(("slower", "verdict"), [(1.0, "yes"), (1e3, "no")])
def test_hours_are_iterations_times_the_measured_time_of_one(slower, verdict, tmp_path):
    folder, table = tmp_path / "runs", tmp_path / "times.json"
    for method in MAIN:
        write_slowness(
            folder, method, dict.fromkeys(range(3), 1.3 if method == "basis-rotation" else 32)
        )
    saved = row(folder, "main-reduction").evidence.value
    rows = [["32", "8", "8", method, "2.0"] for method in BASELINES]
    rows += [
        ["32", "8", "8", "basis-rotation", str(2.0 * slower)],
        ["64", "8", "8", "basis-rotation", "1"],
    ]
    table.write_text(
        json.dumps(
            {"columns": ["width", "blocks", "stages", "method", "ratio to AdamW"], "rows": rows}
        )
    )
    outcome = row(folder, "cpu-time", replace(LAPTOP, times=table))
    assert outcome.evidence.value == pytest.approx(1 - (1 - saved) * slower)
    assert outcome.verdict == verdict
    assert (
        row(folder, "cpu-time", replace(LAPTOP, times=tmp_path / "none.json")).verdict
        == "not tried"
    )
    write_method(folder, "basis-rotation", seeds=(0, 1, 2), slowness=500)  # it never gets there
    never = row(folder, "cpu-time", replace(LAPTOP, times=table))
    assert never.evidence.text.startswith("< ")
    assert never.verdict == "no"


def write_leads(folder, leads, seeds=(0, 1, 2)):
    """Basis rotation ends so many nats below every baseline, by P; noise of a milli-nat."""
    for P, lead in leads.items():
        for seed in seeds:
            noise = 0.001 * ((7 * seed + P) % 5)
            write_finals(folder, "basis-rotation", {seed: 2.0 + 0.1 * seed - noise}, P)
            for method in BASELINES:
                write_finals(folder, method, {seed: 2.0 + 0.1 * seed + lead}, P)


def test_lead_that_rises_at_every_depth_strictly_widens(tmp_path):
    write_leads(tmp_path, {2: 0.1, 4: 0.2, 8: 0.3, 16: 0.4, 32: 0.5})
    assert row(tmp_path, "main-gap-widens").strict_verdict == "yes"


def test_lead_that_rises_at_the_end_alone_is_strictly_open(tmp_path):
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


@pytest.mark.parametrize(("larger", "verdict"), [(1.1, "yes"), (1.9, "no")])
def test_larger_model_strictly_saves_more_by_welch(tmp_path, larger, verdict):
    for width, slowness in (({}, 1.5), ({"model.width": 64}, larger)):
        for seed in range(3):
            for method in MAIN:
                is_ours = method == "basis-rotation"
                slower = slowness + 0.02 * seed if is_ours else 4.0
                write_method(tmp_path, method, 24, width, seeds=(seed,), slowness=slower)
    assert row(tmp_path, "width-order").strict_verdict == verdict


def test_time_of_a_cpu_is_strictly_open(tmp_path):
    for method in MAIN:
        slowness = 1.3 if method == "basis-rotation" else 32
        write_slowness(tmp_path, method, dict.fromkeys(range(3), slowness))
    rows = [["32", "8", "8", method, "2.0"] for method in MAIN]
    columns = ["width", "blocks", "stages", "method", "ratio to AdamW"]
    table = tmp_path / "times.json"
    table.write_text(json.dumps({"columns": columns, "rows": rows}))
    outcome = row(tmp_path, "cpu-time", replace(LAPTOP, times=table))
    assert (outcome.verdict, outcome.strict_verdict) == ("yes", "open")
