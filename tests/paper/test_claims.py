"""The paper's claims beside made-up runs: each is judged, and a changed run changes its row."""

import json
import shutil
from dataclasses import replace

import pytest

from brx.cli.main import main
from brx.config.loading import preset_with
from brx.curvature.norm_result import NormResult, result_path
from brx.curvature.oscillation import Oscillation, Track
from brx.errors import UserError
from brx.paper import evidence
from brx.paper.claims import CLAIMS, Claim, Outcome, claim_table, judge, number_text
from brx.paper.evidence import Evidence
from brx.paper.scales import CURVATURE, SCALES, VARIANTS, Experiments
from brx.sweep.spec import identity
from tests.paper.helpers import write_experiment

LAPTOP = SCALES["laptop"]


def row(folder, name):
    (claim,) = [claim for claim in CLAIMS if claim.name == name]
    return judge(Experiments.load(LAPTOP, folder), [claim])[0]


def test_every_claim_is_judged_and_those_without_runs_say_why(complete):
    outcomes = judge(Experiments.load(LAPTOP, complete), CLAIMS)
    untried = {outcome.claim.name: outcome.reason for outcome in outcomes if outcome.verdict == "not tried"}
    assert set(untried) == {"3b", "mixture", "theorem-order"}
    assert all(untried.values())
    table = claim_table(outcomes, LAPTOP)
    assert table["claim"].is_unique
    assert (table.loc[table["reproduced"] != "not tried", "here"] != "").all()
    assert table["command"].str.match("brx |make ").all()


def test_slowdown_is_that_of_the_made_up_curves_with_an_interval(complete):
    outcome = row(complete, "slowdown-nesterov")
    assert outcome.evidence.value == pytest.approx(32, rel=0.05)
    assert outcome.evidence.low < outcome.evidence.value < outcome.evidence.high
    assert outcome.verdict == "no"  # the paper has 4.24
    assert len(outcome.runs) == 6


def test_a_changed_run_changes_its_row(complete, tmp_path):
    folder = shutil.copytree(complete, tmp_path / "runs")
    assert row(folder, "slowdown-order").verdict == "no"  # all methods are as slow there
    for seed in (0, 1, 2):
        settings = {"pipeline.stages": 32, **VARIANTS["basis-rotation"]}
        write_experiment(folder, LAPTOP.preset, settings, seeds=(seed,), slowness=1.3)
    assert row(folder, "slowdown-order").verdict == "yes"
    outcome = row(folder, "slowdown-basis-rotation")
    assert outcome.evidence.value == pytest.approx(1.3, rel=0.05)
    assert outcome.verdict == "yes"
    assert row(folder, "main-reduction").evidence.value > 0.9


@pytest.mark.parametrize(("slower", "verdict"), [(1.0, "yes"), (1e3, "no")])
def test_hours_are_iterations_times_the_measured_time_of_one(slower, verdict, complete, tmp_path):
    folder = shutil.copytree(complete, tmp_path / "runs")
    for seed in (0, 1, 2):
        settings = {"pipeline.stages": 32, **VARIANTS["basis-rotation"]}
        write_experiment(folder, LAPTOP.preset, settings, seeds=(seed,), slowness=1.3)
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
    (untimed,) = judge(Experiments.load(replace(LAPTOP, times=tmp_path / "none.json"), folder), [claim])
    assert untimed.verdict == "not tried"


def test_a_claim_without_runs_is_not_tried_and_names_what_is_missing(tmp_path):
    write_experiment(tmp_path, LAPTOP.preset, {"pipeline.stages": 32})
    outcome = row(tmp_path, "main-reduction")
    assert (outcome.verdict, outcome.reason) == ("not tried", "no runs of basis-rotation at P = 32 yet")


@pytest.mark.parametrize(
    ("rule", "paper", "evidence", "verdict"),
    [
        ("number", 2.0, Evidence(3.9), "yes"),
        ("number", 2.0, Evidence(4.1), "no"),
        ("number", 2.0, Evidence(4.1, 1.9, 8.0), "no"),
        ("number", 1.5, Evidence(0.9), "no"),  # no slowdown at all
        ("number", 2.0, Evidence(2.1, is_bound=True), "no"),
        ("closed form", 1.25, Evidence(1.2501), "yes"),
        ("closed form", 1.25, Evidence(1.26), "no"),
        ("at least", 0.4, Evidence(0.41), "yes"),
        ("at least", 0.4, Evidence(0.39), "no"),
        ("direction", None, Evidence(holds=True), "yes"),
        ("direction", None, Evidence(holds=False), "no"),
    ],
)
def test_verdict_follows_the_rule(rule, paper, evidence, verdict):
    claim = Claim("name", "statement", "fig:x", lambda _: evidence, paper, "times", rule)
    assert Outcome(claim, evidence, "", []).verdict == verdict


def test_reductions_are_compared_by_what_is_left():
    claim = Claim("name", "statement", "fig:x", lambda _: Evidence(), 0.716, "percent", "number")
    verdicts = [Outcome(claim, Evidence(share), "", []).verdict for share in (0.9, 0.85, 0.5, 0.4, 0.0)]
    assert verdicts == ["no", "yes", "yes", "no", "no"]


def test_numbers_as_texts():
    assert [number_text(0.716, unit) for unit in ("times", "percent", "plain")] == ["0.72x", "71.6%", "0.716"]


def test_command(complete, capsys):
    assert main(["claims", "--runs", str(complete), "--format", "csv"]) == 0
    assert capsys.readouterr().out.startswith("claim,statement,where,paper,here,reproduced,rule,runs,command")
    assert main(["claims", "memory-share", "--runs", str(complete)]) == 0
    out = capsys.readouterr().out
    assert "7.1% (of 4mn as the paper counts, 6.25% with its m = 4n; 14.3% of Adam's two moments)" in out
    assert main(["claims", "memory", "--runs", str(complete)]) == 2
    assert "unknown claim 'memory'" in capsys.readouterr().err


def test_at_the_laptops_scale_deep_pipelines_are_their_delays_on_fewer_stages(tmp_path):
    scale = SCALES["laptop"]
    deep = {"pipeline.stages": 8, "pipeline.delay.like": 32}
    for method in ("pipedream", "pipedream-lr", "nesterov", "basis-rotation"):
        settings = {**VARIANTS[method], **deep, "pipeline.stash": "none"}
        slowness = 1 if method == "basis-rotation" else 2
        write_experiment(tmp_path, "laptop", settings, slowness=slowness)
    (claim,) = [claim for claim in CLAIMS if claim.name == "no-stashing"]
    (outcome,) = judge(Experiments.load(scale, tmp_path), [claim])
    assert outcome.verdict == "yes"
    (text,) = claim_table([outcome], scale).to_dict("records")
    assert text["reproduced"] == "yes, one seed"
    assert text["command"] == "brx sweep configs/sweeps/laptop/stashing.yaml"
    (robust,) = judge(Experiments.load(scale, tmp_path), [c for c in CLAIMS if c.name == "no-stashing-robust"])
    assert robust.reason == "no runs of pipedream at P = 32 yet"
    assert "laptop/main.yaml" in claim_table([robust], scale)["command"].item()


def write_oscillation(folder, method, seed, iteration, variance, eigenvalue=5.0):
    """A run of the preset `quick` at P = 8 with projections of this variance along the dominant eigenvector."""
    settings = {"pipeline.stages": 8, **VARIANTS[method]}
    write_experiment(folder, "quick", settings, seeds=(seed,))
    run = folder / identity(preset_with("quick", {**settings, "training.seed": seed}))
    tracks = [Track([size, -size, size, -size], 0.1) for size in (variance**0.5, 1e-3)]
    measured = Oscillation(str(run), method, 8, iteration, eigenvalue, 0.01, 20, *tracks)
    (run / "analysis").mkdir(exist_ok=True)
    measured.write(run / "analysis" / f"oscillation-{iteration:08d}.json")


@pytest.fixture
def measured(complete, tmp_path):
    """The complete runs, with runs in tmp_path as those whose curvature was measured."""
    return Experiments.load(replace(LAPTOP, curvature=tmp_path), complete)


def test_oscillation_is_judged_over_seeds_and_checkpoints(tmp_path, measured):
    with pytest.raises(UserError, match="no run with losses"):
        evidence.oscillates_less(measured)
    for seed in (0, 1, 2):
        for iteration in (500, 1000):
            write_oscillation(tmp_path, "pipedream", seed, iteration, 4e-4 * (1 + seed), -3.0 if seed == 0 else 5.0)
            write_oscillation(tmp_path, "basis-rotation", seed, iteration, 1e-4)
    write_oscillation(tmp_path, "pipedream", 0, 750, 1e-9)  # without a partner
    judged = evidence.oscillates_less(measured)
    assert judged.holds
    assert "(3 seeds, 6 checkpoints); PipeDream's dominant eigenvalue is negative at 2" in judged.text
    for seed in (1, 2):  # one seed far on the other side: the interval holds 1
        for iteration in (500, 1000):
            write_oscillation(tmp_path, "basis-rotation", seed, iteration, 1e-4 if seed == 1 else 1e-2)
    assert not evidence.oscillates_less(measured).holds


def test_the_theorems_order_holds_where_no_intervals_overlap(tmp_path, measured):
    write_experiment(tmp_path, "quick", {"pipeline.stages": 8})
    (run,) = tmp_path.iterdir()
    with pytest.raises(evidence.NotTriedError, match="norms by strategy have not been measured"):
        evidence.theorem_order(measured)
    source = NormResult.read(CURVATURE / "pipedream-p8" / "analysis" / "hessian-norm-original-00001500.json")
    norms = {"original": 10.0, "1st-unilateral": 9.0, "1st-bilateral": 8.0, "2nd-unilateral": 5.0, "2nd-bilateral": 2.0}
    for space, norm in norms.items():
        result = replace(source, run=str(run), space=space, norm=norm, standard_error=0.1 * norm)
        result.write(result_path(run, space, 1500))
    judged = evidence.theorem_order(measured)
    assert judged.holds
    assert judged.text.endswith(
        ", ".join(
            f"{norms[space] / source.num_parameters:.3g}" for space in ("original", "2nd-unilateral", "2nd-bilateral")
        )
    )
    wide = replace(result, standard_error=0.4 * result.norm)  # 95 % from 0.9 to 4.4
    wide.write(result_path(run, "2nd-bilateral", 1500))
    assert not evidence.theorem_order(measured).holds
