"""The figure of the claims: where each one sits, what is written beside it, and that runs decide it."""

import math

import pytest
from matplotlib.colors import to_hex

from brx.paper.claims import Claim, Outcome
from brx.paper.claims_figure import WIDEST, fill_claims, our_text, paper_text, ratio_of
from brx.paper.evidence.base import Evidence
from brx.plot.style import VERDICT_COLORS, new_figure


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


def test_a_row_has_its_verdicts_colour_and_one_seed_is_hollow():
    outcomes = [
        outcome(Evidence(2.1, 1.9, 2.4)),
        outcome(Evidence(9.0), num_seeds=1),
        outcome(None),
        outcome(Evidence(1e6)),
    ]
    with new_figure() as figure:
        fill_claims(figure, outcomes)
        axes, texts = figure.axes
        points = {line.get_ydata()[0]: line for line in axes.lines if line.get_marker() not in ("None", "", None)}
        written = [text.get_text() for text in texts.texts]
        title = axes.get_title(loc="left")
    assert {row: to_hex(line.get_color()) for row, line in points.items()} == {
        0: VERDICT_COLORS["yes"].lower(),
        1: VERDICT_COLORS["no"].lower(),
        3: VERDICT_COLORS["no"].lower(),
    }
    assert points[1].get_markerfacecolor() == "white"
    assert points[3].get_xdata()[0] == WIDEST
    assert points[3].get_marker() == ">"
    assert title == "1 yes, 2 no, 1 not tried of 4 claims"
    assert "no, one seed" in written


def test_figure_has_a_row_per_claim_and_its_caption_what_is_missing(drawn, outcomes):
    caption = (drawn / "claims.txt").read_text()
    assert "ours over the paper's number" in caption
    assert "not there: basis-rotation at P = 32: brx sweep configs/sweeps/laptop/moe.yaml" in caption
    with new_figure() as figure:
        fill_claims(figure, list(outcomes.values()))
        assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == list(outcomes)
