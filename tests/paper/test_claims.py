"""The paper's claims beside made-up runs: each is judged, and a changed run changes its row."""

import pytest

from brx.cli.main import main
from brx.paper.claim_list import CLAIMS
from brx.paper.claims import Claim, Outcome, claim_table, judge, number_text
from brx.paper.evidence import Evidence
from brx.paper.scales import MAIN, SCALES, VARIANTS, Experiments
from tests.paper.helpers import LAPTOP, row, write_experiment


def test_every_claim_is_judged_and_those_without_runs_say_why(outcomes):
    untried = {name: outcome.reason for name, outcome in outcomes.items() if outcome.verdict == "not tried"}
    assert set(untried) == {"3b", "3b-order", "mixture", "mixture-lowest"}
    assert all(untried.values())
    assert len(outcomes) == len(CLAIMS)
    table = claim_table(list(outcomes.values()), LAPTOP)
    assert (table.loc[table["reproduced"] != "not tried", "here"] != "").all()
    assert table["command"].str.match("brx |make ").all()


def test_slowdown_is_that_of_the_made_up_curves_with_an_interval(outcomes):
    outcome = outcomes["slowdown-nesterov"]
    assert outcome.evidence.value == pytest.approx(32, rel=0.05)
    assert outcome.evidence.low < outcome.evidence.value < outcome.evidence.high
    assert outcome.verdict == "no"  # the paper has 4.24
    assert len(outcome.runs) == 6


def test_a_changed_run_changes_its_row(outcomes, tmp_path):
    assert outcomes["slowdown-order"].verdict == "no"  # all methods are as slow there
    for method in MAIN:
        for stages, slowness in ((1, 1), (32, 1.3 if method == "basis-rotation" else 32)):
            settings = {"pipeline.stages": stages, **VARIANTS[method]}
            write_experiment(tmp_path, LAPTOP.preset, settings, seeds=(0, 1, 2), slowness=slowness)
    names = ("slowdown-order", "slowdown-basis-rotation", "main-reduction")
    experiments = Experiments.load(LAPTOP, tmp_path)
    order, slowdown, saved = judge(experiments, [next(c for c in CLAIMS if c.name == name) for name in names])
    assert order.verdict == slowdown.verdict == "yes"
    assert slowdown.evidence.value == pytest.approx(1.3, rel=0.05)
    assert saved.evidence.value > 0.9


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
        ("number", 2.0, Evidence(1.5, 0.9, 2.5), "no"),  # perhaps none
        ("number", 2.0, Evidence(2.1, is_bound=True), "no"),
        ("closed form", 1.25, Evidence(1.2501), "yes"),
        ("closed form", 1.25, Evidence(1.26), "no"),
        ("at least", 0.4, Evidence(0.41), "yes"),
        ("at least", 0.4, Evidence(0.39), "no"),
        ("closed form", None, Evidence(holds=True), "yes"),
        ("direction", None, Evidence(holds=True), "yes"),
        ("direction", None, Evidence(holds=False), "no"),
    ],
)
def test_verdict_follows_the_rule(rule, paper, evidence, verdict):
    claim = Claim("name", "Figure 5", "statement", lambda _: evidence, paper, "times", rule)
    assert Outcome(claim, evidence, "", []).verdict == verdict


def test_reductions_are_compared_by_what_is_left():
    claim = Claim("name", "Figure 5", "statement", lambda _: Evidence(), 0.716, "percent", "number")
    verdicts = [Outcome(claim, Evidence(share), "", []).verdict for share in (0.9, 0.85, 0.5, 0.4, 0.0)]
    assert verdicts == ["no", "yes", "yes", "no", "no"]


def test_an_upper_bound_of_a_share_is_not_at_least_anything():
    claim = Claim("name", "Figure 5", "statement", lambda _: Evidence(), 0.4, "percent", "at least")
    verdicts = [Outcome(claim, Evidence(0.55, is_bound=bound), "", []).verdict for bound in (False, True)]
    assert verdicts == ["yes", "no"]


def test_numbers_as_texts():
    assert [number_text(0.716, unit) for unit in ("times", "percent", "plain")] == ["0.72x", "71.6%", "0.716"]


def test_command(complete, capsys, monkeypatch):
    few = [claim for claim in CLAIMS if claim.name in ("memory-share", "parameters")]
    monkeypatch.setattr("brx.paper.claim_list.CLAIMS", few)
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
    assert robust.reason == "no runs of basis-rotation at P = 32 yet"
    assert "laptop/main.yaml" in claim_table([robust], scale)["command"].item()


def test_the_command_makes_all_that_a_claim_rests_on(outcomes):
    commands = {name: outcomes[name].command for name in ("main-every-depth", "depth-nesterov", "gpu-hours", "3b")}
    files = {name: [word.rpartition("/")[2] for word in command.split()[2:]] for name, command in commands.items()}
    assert set(files["main-every-depth"]) == {"main.yaml", "depths.yaml"}
    assert set(files["depth-nesterov"]) == {"block-scaling.yaml", "depths.yaml"}
    assert commands["gpu-hours"] == "brx sweep configs/sweeps/laptop/main.yaml; make bench"
    assert commands["3b"] == "brx sweep configs/sweeps/paper/3b.yaml"
