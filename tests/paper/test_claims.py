"""The paper's claims beside made-up runs: each is judged, a changed run changes its row, and the figure shows them."""

import json
import math
from dataclasses import replace

import pytest

from brx.cli.main import main
from brx.paper.claims import (
    CLAIMS,
    WIDEST,
    Claim,
    Outcome,
    claim_table,
    fill_claims,
    in_groups,
    judge,
    number_text,
    our_text,
    paper_text,
    ratio_of,
    why_not,
)
from brx.paper.evidence import Evidence
from brx.paper.scales import MAIN, VARIANTS
from brx.plot.style import GROUP_COLORS, new_figure
from tests.paper.helpers import LAPTOP, row, write_experiment


def outcome(evidence, paper=2.0, unit="times", rule="number", num_seeds=3):
    claim = Claim("name", "Figure 5", "statement", lambda _: evidence, paper, unit, rule)
    return Outcome(claim, evidence, "" if evidence else "no runs", ["a"], num_seeds)


def test_every_claim_is_judged_and_those_without_runs_say_why(outcomes):
    untried = {name: outcome.reason for name, outcome in outcomes.items() if outcome.verdict == "not tried"}
    assert set(untried) == {"3b", "3b-order", "mixture", "mixture-lowest"}
    assert all(untried.values())
    assert len(outcomes) == len(CLAIMS)
    table = claim_table(list(outcomes.values()), LAPTOP)
    assert (table.loc[table["reproduced"] != "not tried", "here"] != "").all()
    assert table["command"].str.match("brx |make ").all()
    slowdown = outcomes["slowdown-nesterov"]  # of the made-up curves, with an interval
    assert slowdown.evidence.value == pytest.approx(32, rel=0.05)
    assert slowdown.evidence.low < slowdown.evidence.value < slowdown.evidence.high
    assert (slowdown.verdict, len(slowdown.runs)) == ("no", 6)  # the paper has 4.24


def test_a_changed_run_changes_its_row(outcomes, tmp_path):
    assert outcomes["slowdown-order"].verdict == "no"  # all methods are as slow there
    write_experiment(tmp_path, LAPTOP.preset, {"pipeline.stages": 32})
    missing = row(tmp_path, "main-reduction")
    assert (missing.verdict, missing.reason) == ("not tried", "no runs of basis-rotation at P = 32 yet")
    for method in MAIN:
        for stages, slowness in ((1, 1), (32, 1.3 if method == "basis-rotation" else 32)):
            settings = {"pipeline.stages": stages, **VARIANTS[method]}
            write_experiment(tmp_path, LAPTOP.preset, settings, seeds=(0, 1, 2), slowness=slowness)
    slowdown = row(tmp_path, "slowdown-basis-rotation")
    assert row(tmp_path, "slowdown-order").verdict == slowdown.verdict == "yes"
    assert slowdown.evidence.value == pytest.approx(1.3, rel=0.05)
    assert row(tmp_path, "main-reduction").evidence.value > 0.9


@pytest.mark.parametrize(
    ("evidence", "paper", "num_seeds", "reasons"),
    [
        (Evidence(2.1), 2.0, 1, ""),  # reproduced
        (None, 2.0, None, ""),
        (Evidence(5.0), 2.0, 1, "one seed"),
        (Evidence(4.1, 1.9, 8.0), 2.0, 3, "within chance"),
        (Evidence(5.0, 4.0, 6.0), 2.0, 3, "not by chance"),
        (Evidence(5.0, is_bound=True), 2.0, 3, "a bound alone"),
        (Evidence(-0.1, -0.2, 0.1, holds=False), None, 3, "within chance"),
        (Evidence(-0.1, holds=False), None, 1, "the other way round, one seed"),
        (Evidence(-0.3, -0.4, -0.2, holds=False), None, 3, "the other way round, not by chance"),
    ],
)
def test_why_a_claim_is_not_reproduced(evidence, paper, num_seeds, reasons):
    assert why_not(outcome(evidence, paper, num_seeds=num_seeds)) == reasons
    if paper and reasons:
        longer = replace(outcome(evidence, paper, num_seeds=num_seeds), longer=Evidence(2.2))
        assert why_not(longer).startswith("training too short")


@pytest.mark.parametrize(
    ("unit", "rule", "paper", "evidence", "verdict"),
    [
        ("times", "number", 2.0, Evidence(3.9), "yes"),
        ("times", "number", 2.0, Evidence(4.1), "no"),
        ("times", "number", 2.0, Evidence(4.1, 1.9, 8.0), "no"),
        ("times", "number", 1.5, Evidence(0.9), "no"),  # no slowdown at all
        ("times", "number", 2.0, Evidence(1.5, 0.9, 2.5), "no"),  # perhaps none
        ("times", "number", 2.0, Evidence(2.1, is_bound=True), "no"),
        ("times", "closed form", 1.25, Evidence(1.2501), "yes"),
        ("times", "closed form", 1.25, Evidence(1.26), "no"),
        ("times", "at least", 0.4, Evidence(0.41), "yes"),
        ("times", "at least", 0.4, Evidence(0.39), "no"),
        ("times", "closed form", None, Evidence(holds=True), "yes"),
        ("times", "direction", None, Evidence(holds=True), "yes"),
        ("times", "direction", None, Evidence(holds=False), "no"),
        # Shares saved are compared by what is left.
        ("percent", "number", 0.716, Evidence(0.9), "no"),
        ("percent", "number", 0.716, Evidence(0.85), "yes"),
        ("percent", "number", 0.716, Evidence(0.5), "yes"),
        ("percent", "number", 0.716, Evidence(0.4), "no"),
        ("percent", "number", 0.4, Evidence(0.0), "no"),
        # The bound of a share is an upper one, and not at least anything.
        ("percent", "at least", 0.4, Evidence(0.55), "yes"),
        ("percent", "at least", 0.4, Evidence(0.55, is_bound=True), "no"),
    ],
)
def test_verdict_follows_the_rule(unit, rule, paper, evidence, verdict):
    assert outcome(evidence, paper, unit, rule, None).verdict == verdict


def test_command(complete, capsys, monkeypatch):
    few = [claim for claim in CLAIMS if claim.name in ("memory-share", "parameters")]
    monkeypatch.setattr("brx.paper.claims.CLAIMS", few)
    assert main(["claims", "--runs", str(complete), "--format", "csv"]) == 0
    assert capsys.readouterr().out.startswith("claim,statement,where,paper,here,reproduced,rule,runs,command")
    assert main(["claims", "memory-share", "--runs", str(complete)]) == 0
    out = capsys.readouterr().out
    assert "7.1% (of 4mn as the paper counts, 6.25% with its m = 4n; 14.3% of Adam's two moments)" in out
    assert main(["claims", "memory", "--runs", str(complete)]) == 2
    assert "unknown claim 'memory'" in capsys.readouterr().err


def test_at_the_laptops_scale_deep_pipelines_are_their_delays_on_fewer_stages(tmp_path):
    for method in MAIN:
        settings = {**VARIANTS[method], "pipeline.stages": 8, "pipeline.delay.like": 32, "pipeline.stash": "none"}
        write_experiment(tmp_path, "laptop", settings, slowness=1 if method == "basis-rotation" else 2)
    (text,) = claim_table([row(tmp_path, "no-stashing")], LAPTOP).to_dict("records")
    assert text["reproduced"] == "yes, one seed"
    assert text["command"] == "brx sweep configs/sweeps/laptop/stashing.yaml"
    robust = row(tmp_path, "no-stashing-robust")
    assert robust.reason == "no runs of basis-rotation at P = 32 yet"
    assert "laptop/main.yaml" in robust.command


def test_the_command_makes_all_that_a_claim_rests_on(outcomes):
    commands = {name: outcomes[name].command for name in ("main-every-depth", "depth-nesterov", "gpu-hours", "3b")}
    files = {name: {word.rpartition("/")[2] for word in command.split()[2:]} for name, command in commands.items()}
    assert files["main-every-depth"] == {"main.yaml", "depths.yaml"}
    assert files["depth-nesterov"] == {"block-scaling.yaml", "depths.yaml"}
    assert commands["gpu-hours"] == "brx sweep configs/sweeps/laptop/main.yaml; make bench"
    assert commands["3b"] == "brx sweep configs/sweeps/paper/3b.yaml"


def test_ratios_are_ours_over_the_papers_and_of_shares_those_of_what_is_left():
    assert ratio_of(outcome(Evidence(3.0, 2.0, 5.0))) == (1.5, 1.0, 2.5)
    shares = ratio_of(outcome(Evidence(0.4, 0.2, 0.8), 0.6, "percent"))
    assert shares == pytest.approx((1.5, 0.5, 2.0))
    assert ratio_of(outcome(Evidence(0.071), 0.075, "percent", "closed form"))[0] == pytest.approx(0.071 / 0.075)
    assert math.isnan(ratio_of(outcome(Evidence(3.0)))[1])
    for none in (outcome(None), outcome(Evidence(holds=True), None, rule="direction"), outcome(Evidence())):
        assert ratio_of(none) is None


@pytest.mark.parametrize(
    ("shown", "paper", "ours"),
    [
        (outcome(Evidence(8.0, is_bound=True)), "2.00x", "> 8.00x"),
        (outcome(Evidence(0.5, 0.4, 0.6), 0.4, "percent", "at least"), "≥ 40.0%", "50.0% [40.0%, 60.0%]"),
        (outcome(Evidence(holds=False), None, rule="direction"), "direction", "does not hold"),
        (outcome(Evidence(holds=False), None, rule="closed form"), "numbers", "not all as printed"),
        (outcome(None), "2.00x", ""),
    ],
)
def test_texts_beside_a_row(shown, paper, ours):
    assert (paper_text(shown), our_text(shown)) == (paper, ours)
    assert number_text(0.716, "plain") == "0.716"


def test_rows_are_grouped_and_one_seed_is_hollow():
    longer = replace(outcome(Evidence(9.5)), longer=Evidence(2.2))
    outcomes = [outcome(None), outcome(Evidence(9.0), num_seeds=1), outcome(Evidence(1e6)), longer,
                outcome(Evidence(2.1, 1.9, 2.4))]  # fmt: skip
    outcomes = [replace(each, claim=replace(each.claim, name=str(n), statement=f"statement {n}"))
                for n, each in enumerate(outcomes)]  # fmt: skip
    groups = [[each.claim.name for each in group] for group in in_groups(outcomes).values()]
    assert groups == [["4"], ["3"], ["1", "2"], ["0"]]
    with new_figure() as figure:
        fill_claims(figure, outcomes)
        axes, texts = figure.axes
        points = [line for line in axes.lines if line.get_marker() not in ("None", "", None)]
        written = [text.get_text() for text in texts.texts]
        labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == [f"statement {n}" for n in (4, 3, 1, 2, 0)]
    blue, green, red, _ = GROUP_COLORS
    assert [line.get_color() for line in points] == [blue, green, red, red]
    assert [line.get_markerfacecolor() == "white" for line in points] == [False, False, True, False]
    assert (points[-1].get_xdata()[0], points[-1].get_marker()) == (WIDEST, ">")
    assert {"9.50x; longer: 2.20x", "not as in the paper: 2 of 5"} <= set(written)


def test_figure_has_a_row_per_claim_and_its_details_what_is_missing(drawn, outcomes):
    missing = json.loads((drawn / "claims.json").read_text())["not there"]
    assert any(line.startswith("basis-rotation at P = 32: brx sweep configs/sweeps/laptop/moe") for line in missing)
    with new_figure() as figure:
        fill_claims(figure, list(outcomes.values()))
        assert len(figure.axes[0].get_yticklabels()) == len(outcomes)


def test_longer_training_counts_where_it_gives_the_papers_number(experiments):
    claim = Claim("name", "Figure 5", "statement", lambda _: Evidence(3.0), 1.2, "times", "number")
    longer = [replace(claim, longer=lambda _, value=value: Evidence(value)) for value in (1.5, 2.9)]
    near, far = judge(experiments.fresh(), longer)
    assert near.verdict == far.verdict == "no"
    assert (near.longer, far.longer) == (Evidence(1.5), None)
