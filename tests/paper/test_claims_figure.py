"""The figure of the claims: where each one sits, what is written beside it, and that runs decide it."""

import json
import math
from dataclasses import replace

import pytest

from brx.paper.claims import Claim, Outcome, in_groups, judge
from brx.paper.claims_figure import WIDEST, fill_claims, our_text, paper_text, ratio_of
from brx.paper.evidence import Evidence
from brx.plot.style import GROUP_COLORS, new_figure


def outcome(evidence, paper=2.0, unit="times", rule="number", num_seeds=3):
    claim = Claim("name", "Figure 5", "statement", lambda _: evidence, paper, unit, rule)
    return Outcome(claim, evidence, "" if evidence else "no runs", ["a"], num_seeds)


def test_ratios_are_ours_over_the_papers_and_of_shares_those_of_what_is_left():
    assert ratio_of(outcome(Evidence(3.0, 2.0, 5.0))) == (1.5, 1.0, 2.5)
    shares = ratio_of(outcome(Evidence(0.4, 0.2, 0.8), 0.6, "percent"))
    assert shares == pytest.approx((1.5, 0.5, 2.0))
    assert ratio_of(outcome(Evidence(0.071), 0.075, "percent", "closed form"))[0] == pytest.approx(0.071 / 0.075)
    assert math.isnan(ratio_of(outcome(Evidence(3.0)))[1])
    for none in (outcome(None), outcome(Evidence(holds=True), None, rule="direction"), outcome(Evidence())):
        assert ratio_of(none) is None


def test_texts_beside_a_row():
    bound = outcome(Evidence(8.0, is_bound=True))
    assert (paper_text(bound), our_text(bound)) == ("2.00x", "> 8.00x")
    interval = outcome(Evidence(0.5, 0.4, 0.6), 0.4, "percent", "at least")
    assert (paper_text(interval), our_text(interval)) == ("≥ 40.0%", "50.0% [40.0%, 60.0%]")
    direction = outcome(Evidence(holds=False), None, rule="direction")
    assert (paper_text(direction), our_text(direction)) == ("direction", "does not hold")
    table = outcome(Evidence(holds=False), None, rule="closed form")
    assert (paper_text(table), our_text(table)) == ("numbers", "not all as printed")
    assert our_text(outcome(None)) == ""


def test_rows_are_grouped_and_one_seed_is_hollow():
    longer = replace(outcome(Evidence(9.5)), longer=Evidence(2.2))
    outcomes = [outcome(None), outcome(Evidence(9.0), num_seeds=1), outcome(Evidence(1e6)), longer,
                outcome(Evidence(2.1, 1.9, 2.4))]  # fmt: skip
    outcomes = [replace(each, claim=replace(each.claim, name=str(n), statement=f"statement {n}"))
                for n, each in enumerate(outcomes)]  # fmt: skip
    assert [[each.claim.name for each in group] for group in in_groups(outcomes).values()] == [
        ["4"],
        ["3"],
        ["1", "2"],
        ["0"],
    ]
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
    assert "9.50x; longer: 2.20x" in written
    assert "not as in the paper: 2 of 5" in written


def test_figure_has_a_row_per_claim_and_its_details_what_is_missing(drawn, outcomes):
    details = json.loads((drawn / "claims.json").read_text())
    assert any(
        line.startswith("basis-rotation at P = 32: brx sweep configs/sweeps/laptop/moe")
        for line in details["not there"]
    )
    with new_figure() as figure:
        fill_claims(figure, list(outcomes.values()))
        assert len(figure.axes[0].get_yticklabels()) == len(outcomes)


def test_longer_training_counts_where_it_gives_the_papers_number():
    def claim(longer):
        return Claim("name", "Figure 5", "statement", lambda _: Evidence(3.0), 1.2, "times", "number",
                     longer=lambda _: Evidence(longer))  # fmt: skip

    class Nothing:
        used, missing, makers = {}, [], []

        def fresh(self):
            return self

    near, far = judge(Nothing(), [claim(1.5), claim(2.9)])
    assert near.verdict == far.verdict == "no"
    assert near.longer == Evidence(1.5)
    assert far.longer is None
