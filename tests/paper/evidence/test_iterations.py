"""Slowdowns in order, iterations saved and the time that they are, from made-up runs."""

import json
from dataclasses import replace

import pytest

from brx.paper import evidence as iterations
from brx.paper.claim_list import CLAIMS
from brx.paper.claims import evidence_text, judge
from brx.paper.evidence import Evidence, NotTriedError, slows_down_less
from brx.paper.scales import MAIN, VARIANTS, Experiments
from brx.runs.comparison import BASELINES
from tests.paper.helpers import LAPTOP, row, write_experiment


def write_slowness(folder, method, by_seed):
    """Runs at P = 1 and 32; those at 32 are so many times as slow, by seed."""
    for seed, slowness in by_seed.items():
        for stages, times in ((1, 1.0), (32, slowness)):
            settings = {"pipeline.stages": stages, **VARIANTS[method]}
            write_experiment(folder, LAPTOP.preset, settings, seeds=(seed,), slowness=times)


@pytest.mark.parametrize(
    ("ours", "theirs", "holds"),
    [
        ({0: 1.5}, {0: 3.0}, True),
        ({0: 3.0}, {0: 1.5}, False),
        ({0: 1.5, 1: 2.0, 2: 2.5}, {0: 3.0, 1: 4.1, 2: 5.2}, True),  # twice as slow, seed by seed
        ({0: 1.5, 1: 2.0, 2: 9.0}, {0: 3.0, 1: 4.1, 2: 5.2}, False),  # by chance, as far as three seeds can say
        ({0: 1.5, 1: 9.0}, {0: 3.0}, True),  # of the seed that both have
    ],
)
def test_order_of_slowdowns_is_judged_seed_by_seed(ours, theirs, holds, tmp_path):
    write_slowness(tmp_path, "basis-rotation", ours)
    write_slowness(tmp_path, "nesterov", theirs)
    judged = slows_down_less(Experiments.load(LAPTOP, tmp_path), [("basis-rotation", "nesterov")])
    assert judged.holds == holds
    assert ("nesterov over basis-rotation [" in judged.text) == (len(theirs) > 2)


def test_a_method_that_never_gets_there_is_not_the_faster_one(tmp_path):
    write_slowness(tmp_path, "basis-rotation", {0: 1.0})
    write_slowness(tmp_path, "nesterov", {0: 40.0})
    for stages, slowness in ((1, 3.0), (32, 1e9)):  # slow without delay, too, so that its bound is low; sets no target
        settings = {"pipeline.stages": stages, **VARIANTS["pipedream"]}
        write_experiment(tmp_path, LAPTOP.preset, settings, slowness=slowness)
    experiments = Experiments.load(LAPTOP, tmp_path)
    judged = slows_down_less(experiments, [("pipedream", "nesterov")])
    bounds = [float(part.split()[-1]) for part in judged.text.split(", ")]
    assert bounds[0] < bounds[1]
    assert not judged.holds
    judged = slows_down_less(experiments, [("basis-rotation", "pipedream")])
    assert judged.holds
    assert "pipedream > " in judged.text
    with pytest.raises(NotTriedError, match="no runs of muon"):
        slows_down_less(experiments, [("basis-rotation", "muon")])


@pytest.mark.parametrize(
    ("ours", "soap", "muon", "verdict"), [(2.0, 2.2, 3.0, "yes"), (2.0, 3.0, 2.2, "no"), (2.0, 1e9, 3.0, "no")]
)
def test_soap_is_close_if_it_is_nearer_than_the_others(ours, soap, muon, verdict, tmp_path):
    slowness = {"nesterov": 20.0, "basis-rotation": ours, "soap": soap, "muon": muon, "scion": 9.0}
    for method, times in slowness.items():
        write_slowness(tmp_path, method, {0: times})
    assert row(tmp_path, "soap-close").verdict == verdict


def test_what_never_gets_there_saves_less_than_nothing(tmp_path, monkeypatch):
    write_slowness(tmp_path, "basis-rotation", {0: 1e9})
    for baseline in BASELINES:
        write_slowness(tmp_path, baseline, {0: 2.0})
    outcome = row(tmp_path, "main-reduction")
    assert outcome.evidence.value < 0
    assert (outcome.verdict, evidence_text(outcome)[:2]) == ("no", "< ")
    shares = {"never": outcome.evidence, "half": Evidence(-0.5), "less": Evidence(-0.6)}
    monkeypatch.setattr(iterations, "saved_over_baselines", lambda _, model: shares[model])
    assert not iterations.saves_more(None, larger="never", smaller="half").holds
    assert iterations.saves_more(None, larger="half", smaller="less").holds


def test_further_seeds_are_in_the_command(tmp_path):
    write_slowness(tmp_path, "nesterov", {0: 2.0})
    assert "seeds.yaml" not in row(tmp_path, "slowdown-nesterov").command
    write_slowness(tmp_path, "nesterov", {3: 2.0})
    assert row(tmp_path, "slowdown-nesterov").command.endswith("laptop/main.yaml configs/sweeps/laptop/seeds.yaml")


def test_stage_aware_is_compared_with_the_same_seed(tmp_path):
    write_slowness(tmp_path, "basis-rotation", {0: 2.0, 1: 9.0, 2: 9.0})
    settings = {**VARIANTS["basis-rotation"], "optimizer.refresh_schedule": "stage-aware", "pipeline.stages": 32}
    write_experiment(tmp_path, LAPTOP.preset, settings, slowness=1.5)
    assert row(tmp_path, "stage-aware").evidence.value == pytest.approx(0.25, abs=0.01)


@pytest.mark.parametrize(("slower", "verdict"), [(1.0, "yes"), (1e3, "no")])
def test_hours_are_iterations_times_the_measured_time_of_one(slower, verdict, tmp_path):
    folder = tmp_path / "runs"
    for method in MAIN:
        write_slowness(folder, method, dict.fromkeys(range(3), 1.3 if method == "basis-rotation" else 32))
    saved = row(folder, "main-reduction").evidence.value
    rows = [["8", "8", method, "2.0"] for method in ("pipedream", "pipedream-lr", "nesterov")]
    rows += [["8", "8", "basis-rotation", str(2.0 * slower)], ["8", "1", "basis-rotation", "1"]]
    columns = ["blocks", "stages", "method", "ratio to AdamW"]
    table = tmp_path / "times.json"
    table.write_text(json.dumps({"columns": columns, "rows": rows}))
    (claim,) = [claim for claim in CLAIMS if claim.name == "gpu-hours"]
    (outcome,) = judge(Experiments.load(replace(LAPTOP, times=table), folder), [claim])
    assert outcome.evidence.value == pytest.approx(1 - (1 - saved) * slower)
    assert outcome.verdict == verdict
    for seed in (0, 1, 2):  # basis rotation never gets there
        settings = {"pipeline.stages": 32, **VARIANTS["basis-rotation"]}
        write_experiment(folder, LAPTOP.preset, settings, seeds=(seed,), slowness=500)
    (never,) = judge(Experiments.load(replace(LAPTOP, times=table), folder), [claim])
    assert never.evidence.text.startswith("< ")
    assert never.verdict == "no"
    (untimed,) = judge(Experiments.load(replace(LAPTOP, times=tmp_path / "none.json"), folder), [claim])
    assert untimed.verdict == "not tried"
