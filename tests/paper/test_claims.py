"""The paper's claims, compared with made-up runs: each is judged, a changed run changes its row,
and the figure shows them."""

import math
import re
from pathlib import Path

import pandas as pd
import pytest

from brx.cli.main import main
from brx.paper import claims
from brx.paper.evidence import Evidence
from brx.paper.scales import MAIN, SCALES, Experiments
from brx.plot.style import CLAIM_COLORS, new_figure
from brx.runs import load
from tests.paper.helpers import LAPTOP, row, write_method

ROOT = Path(__file__).parents[2]
TABLES = ROOT / "results" / "tables"


def outcome(evidence, paper=2.0, unit="times", rule="number", num_seeds=3):
    claim = claims.Claim("name", "Figure 5", "statement", lambda _: evidence, paper, unit, rule)
    return claims.Outcome(claim, evidence, "" if evidence else "no runs", ["a"], num_seeds)


def test_every_claim_is_judged(outcomes):
    assert list(outcomes) == [claim.name for claim in claims.CLAIMS]


def test_claims_without_runs_are_not_tried(outcomes):
    untried = {name for name, outcome in outcomes.items() if outcome.verdict == "not tried"}
    assert untried == {"3b", "3b-order", "mixture", "mixture-lowest"}


def test_untried_claims_say_why(outcomes):
    untried = [outcome for outcome in outcomes.values() if outcome.verdict == "not tried"]
    assert all(outcome.reason for outcome in untried)


@pytest.mark.parametrize("file", sorted(TABLES.glob("*/claims.csv")), ids=str)
def test_committed_tables_have_every_claim(file):
    assert pd.read_csv(file)["claim"].tolist() == [claim.name for claim in claims.CLAIMS]


def test_page_has_every_claim_that_the_fairer_search_can_judge_again(monkeypatch):
    """A claim that holds with rates alone, and that the runs of `tuned` can judge, too, is on
    docs/results.md with the strict verdict from these: none is shown by its better one alone."""
    monkeypatch.chdir(ROOT)
    rates_alone = pd.read_csv(TABLES / "similar" / "claims.csv", index_col="claim")
    holding = [claim for claim in claims.CLAIMS if rates_alone.loc[claim.name, "strict"] == "yes"]
    scale = SCALES["tuned"]
    experiments = Experiments(scale, load(scale.runs), scale.runs)
    judged = {
        outcome.claim.name: outcome.strict_verdict
        for outcome in claims.judge(experiments, holding)
        if outcome.runs and outcome.evidence is not None
    }
    page = (ROOT / "docs" / "results.md").read_text()
    _, _, after = page.partition("## The same claims with the fairer search\n")
    section, _, _ = after.partition("\n## ")
    shown = dict(re.findall(r"^\| `([\w-]+)` \|.*\| (\w+) \|$", section, flags=re.M))
    assert shown == judged


@pytest.fixture
def table(outcomes):
    return claims.claim_table(list(outcomes.values()), LAPTOP)


def test_every_tried_row_says_what_is_here(table):
    assert (table.loc[table["first"] != "not tried", "here"] != "").all()


def test_every_row_has_a_command(table):
    without = table.loc[~table["command"].str.match("brx |make "), "claim"]
    assert without.tolist() == []


def test_slowdown_is_that_of_the_curves(outcomes):
    assert outcomes["slowdown-nesterov"].evidence.value == pytest.approx(32, rel=0.05)


def test_slowdown_lies_in_its_interval(outcomes):
    evidence = outcomes["slowdown-nesterov"].evidence
    assert evidence.low < evidence.value < evidence.high


def test_slowdown_far_from_the_papers_is_a_no(outcomes):
    assert outcomes["slowdown-nesterov"].verdict == "no"  # the paper has 4.24


def test_slowdown_names_its_runs(outcomes):
    assert len(outcomes["slowdown-nesterov"].runs) == 6  # three seeds at either end


def test_one_run_alone_decides_nothing(tmp_path):
    write_method(tmp_path, "pipedream")
    missing = row(tmp_path, "main-reduction")
    reason = "no runs of basis-rotation at P = 32 yet"
    assert (missing.verdict, missing.reason) == ("not tried", reason)


@pytest.fixture
def faster_rotation(tmp_path):
    """A folder of runs in which basis rotation is slowed down by 1.3, the others by 32."""
    for method in MAIN:
        for stages, slowness in ((1, 1), (32, 1.3 if method == "basis-rotation" else 32)):
            write_method(tmp_path, method, stages, seeds=(0, 1, 2), slowness=slowness)
    return tmp_path


def test_equal_slowdowns_are_no_order(outcomes):
    assert outcomes["slowdown-order"].verdict == "no"  # all methods are as slow there


def test_slower_baselines_make_the_order(faster_rotation):
    assert row(faster_rotation, "slowdown-order").verdict == "yes"


def test_slowdown_follows_the_runs(faster_rotation):
    slowdown = row(faster_rotation, "slowdown-basis-rotation")
    assert slowdown.evidence.value == pytest.approx(1.3, rel=0.05)


def test_saving_follows_the_runs(faster_rotation):
    assert row(faster_rotation, "main-reduction").evidence.value > 0.9


@pytest.mark.parametrize(
    ("evidence", "paper", "num_seeds", "reasons"),
    [
        (Evidence(2.1), 2.0, 1, ""),  # reproduced
        (None, 2.0, None, ""),
        (Evidence(5.0), 2.0, 1, "one seed"),
        (Evidence(4.1, 1.9, 8.0), 2.0, 3, "within chance"),
        (Evidence(5.0, 4.0, 6.0), 2.0, 3, "apart by more than chance"),
        (Evidence(5.0, is_bound=True), 2.0, 3, "a bound alone"),
        (Evidence(-0.1, -0.2, 0.1, holds=False), None, 3, "within chance"),
        (Evidence(-0.1, holds=False), None, 2, "the other way round, two seeds"),
        (
            Evidence(-0.3, -0.4, -0.2, holds=False),
            None,
            3,
            "the other way round, apart by more than chance",
        ),
    ],
)
def test_why_a_claim_is_not_reproduced(evidence, paper, num_seeds, reasons):
    assert claims.why_not(outcome(evidence, paper, num_seeds=num_seeds)) == reasons


VERDICTS = {
    ("times", "number", 2.0, "yes"): [Evidence(3.9)],
    ("times", "number", 2.0, "no"): [
        Evidence(4.1),
        Evidence(4.1, 1.9, 8.0),
        Evidence(2.1, is_bound=True),
    ],
    ("times", "number", 1.5, "no"): [
        Evidence(0.9),
        Evidence(1.2, 0.9, 2.5),
    ],  # no slowdown at all, or perhaps none
    ("times", "closed form", 1.25, "yes"): [Evidence(1.2501)],
    ("times", "closed form", 1.25, "no"): [Evidence(1.26)],
    ("times", "at least", 0.4, "yes"): [Evidence(0.41)],
    ("times", "at least", 0.4, "no"): [Evidence(0.39)],
    ("times", "closed form", None, "yes"): [Evidence(holds=True)],
    ("times", "direction", None, "yes"): [Evidence(holds=True)],
    ("times", "direction", None, "no"): [Evidence(holds=False)],
    # Shares saved are compared by what is left.
    ("percent", "number", 0.716, "yes"): [Evidence(0.85), Evidence(0.5)],
    ("percent", "number", 0.716, "no"): [Evidence(0.9), Evidence(0.4)],
    ("percent", "number", 0.4, "no"): [Evidence(0.0)],
    # The bound of a share is an upper one, and not at least anything.
    ("percent", "at least", 0.4, "yes"): [Evidence(0.55)],
    ("percent", "at least", 0.4, "no"): [Evidence(0.55, is_bound=True)],
}


def test_verdict_follows_the_rule():
    for (unit, rule, paper, verdict), examples in VERDICTS.items():
        for evidence in examples:
            assert outcome(evidence, paper, unit, rule, None).verdict == verdict, (
                unit,
                rule,
                paper,
                evidence,
            )


@pytest.mark.parametrize(("num_seeds", "verdict"), [(2, "yes"), (3, "no")])
def test_interval_decides_from_three_seeds_on(num_seeds, verdict):
    perhaps_no_slowdown = Evidence(1.2, 0.9, 2.5)
    assert outcome(perhaps_no_slowdown, 1.5, num_seeds=num_seeds).verdict == verdict


def test_command(complete, capsys, monkeypatch):
    few = [claim for claim in claims.CLAIMS if claim.name in ("memory-share", "parameters")]
    monkeypatch.setattr("brx.paper.claims.CLAIMS", few)
    assert main(["claims", "--scale", "laptop", "--runs", str(complete), "--format", "csv"]) == 0
    assert capsys.readouterr().out.startswith(
        "claim,statement,where,paper,here,strict,first,rule,runs,command"
    )
    assert main(["claims", "memory-share", "--scale", "laptop", "--runs", str(complete)]) == 0
    out = capsys.readouterr().out
    assert (
        "7.1% (of 4mn as the paper counts, 6.25% with its m = 4n; 14.3% of Adam's two moments)"
        in out
    )
    assert main(["claims", "memory", "--scale", "laptop", "--runs", str(complete)]) == 2
    assert "unknown claim 'memory'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("main-every-depth", {"main.yaml", "depths.yaml"}),
        ("depth-nesterov", {"block-scaling.yaml", "depths.yaml"}),
    ],
)
def test_command_makes_all_runs_of_a_claim(outcomes, name, files):
    _, _, *paths = outcomes[name].command.split()
    assert {path.rpartition("/")[2] for path in paths} == files


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("cpu-time", "brx sweep configs/sweeps/laptop/main.yaml; make bench"),
        ("3b", "brx sweep configs/sweeps/paper/3b.yaml"),
    ],
)
def test_command_makes_what_no_sweep_makes(outcomes, name, command):
    assert outcomes[name].command == command


@pytest.mark.parametrize(
    ("shown", "paper", "ours", "ratio"),
    [
        (outcome(Evidence(3.0, 2.0, 5.0)), "2.00x", "3.00x [2.00x, 5.00x]", (1.5, 1.0, 2.5)),
        (outcome(Evidence(8.0, is_bound=True)), "2.00x", "> 8.00x", (4.0, math.nan, math.nan)),
        # For shares saved, the remaining shares are compared.
        (
            outcome(Evidence(0.4, 0.2, 0.8), 0.6, "percent", "at least"),
            "≥ 60.0%",
            "40.0% [20.0%, 80.0%]",
            (1.5, 0.5, 2),
        ),
        (
            outcome(Evidence(0.06), 0.08, "percent", "closed form"),
            "8.0%",
            "6.0%",
            (0.75, math.nan, math.nan),
        ),
        (
            outcome(Evidence(holds=False), None, rule="direction"),
            "direction",
            "does not hold",
            None,
        ),
        (
            outcome(Evidence(holds=False), None, rule="closed form"),
            "numbers",
            "not all as printed",
            None,
        ),
        (outcome(None), "2.00x", "", None),
    ],
)
def test_row_has_both_numbers(shown, paper, ours, ratio):
    assert (claims.paper_text(shown), claims.our_text(shown)) == (paper, ours)
    assert claims.ratio_of(shown) == (ratio and pytest.approx(ratio, nan_ok=True))


WITHIN = outcome(Evidence(2.1, 1.9, 2.4))
ONE_SEED = outcome(Evidence(9.0), num_seeds=1)
BEYOND = outcome(Evidence(1e6, 9e5, 2e6))
UNTRIED = outcome(None)
SHOWN = [UNTRIED, ONE_SEED, BEYOND, WITHIN]


def test_claims_are_grouped_by_verdict():
    assert list(claims.in_groups(SHOWN).values()) == [[WITHIN], [ONE_SEED, BEYOND], [UNTRIED]]


@pytest.fixture
def drawn():
    """The two panels of the figure: counts, and rows of numbers."""
    with new_figure() as figure:
        claims.fill_claims(figure, SHOWN)
        yield figure.axes


@pytest.fixture
def points(drawn):
    _, rows = drawn
    return [line for line in rows.lines if line.get_marker() not in ("None", "", None)]


def test_bars_count_the_strict_verdicts(drawn):
    counts, _ = drawn
    assert [text.get_text() for text in counts.texts] == ["1", "1", "1", "1"]


def test_numbers_are_rows_by_strict_verdict(points):
    blue, red, grey = CLAIM_COLORS
    assert [line.get_color() for line in points] == [blue, red, grey]


def test_one_seed_is_hollow(points):
    assert [line.get_markerfacecolor() == "white" for line in points] == [False, False, True]


def test_numbers_beyond_the_axis_are_arrows(points):
    assert (points[1].get_xdata()[0], points[1].get_marker()) == (claims.WIDEST, ">")


def test_figures_title_counts_strictly(drawn):
    title = drawn[0].figure.get_suptitle()
    assert title == "By the strict rules 1 of 4 claims hold, 1 do not, 1 are open"


@pytest.mark.parametrize(
    ("evidence", "paper", "unit", "rule", "num_seeds", "verdict"),
    [
        (Evidence(2.1, 1.8, 2.4), 2.0, "times", "number", 3, "yes"),
        (Evidence(2.1, 1.8, 2.4), 2.0, "times", "number", 2, "open"),
        (Evidence(2.1, 2.05, 2.2), 2.0, "times", "number", 3, "no"),
        (Evidence(2.1, is_bound=True), 2.0, "times", "number", 3, "open"),
        (Evidence(1.2, 0.9, 1.5), 1.3, "times", "number", 3, "open"),  # perhaps no slowdown
        (Evidence(0.2, -0.1, 0.4), 0.3, "percent", "number", 3, "open"),  # perhaps nothing saved
        (Evidence(0.5, 0.45, 0.55), 0.4, "percent", "at least", 3, "yes"),
        (Evidence(0.3, 0.25, 0.35), 0.4, "percent", "at least", 3, "no"),
        (Evidence(0.3, is_bound=True), 0.4, "percent", "at least", 3, "open"),
        (Evidence(holds=True, strict="open"), None, "plain", "direction", 3, "open"),
        (Evidence(holds=True), None, "plain", "closed form", None, "yes"),
        (Evidence(holds=False), None, "plain", "direction", None, "no"),  # a toy: no seeds
    ],
)
def test_strict_verdict_follows_the_rule(evidence, paper, unit, rule, num_seeds, verdict):
    assert outcome(evidence, paper, unit, rule, num_seeds).strict_verdict == verdict


def test_counts_have_the_strict_ones_first():
    outcomes = [outcome(Evidence(2.1, 2.05, 2.2)), outcome(Evidence(2.1, 1.8, 2.4)), outcome(None)]
    assert claims.verdict_counts(outcomes) == [
        "3 claims, strict verdicts: 1 yes, 1 no, 0 open, 1 not tried",
        "first verdicts: 2 yes, 0 no, 1 not tried",
    ]


def test_claim_is_judged_once_for_the_same_runs(experiments):
    asked = []
    claim = claims.Claim("mine", "", "", lambda runs: asked.append(1) or Evidence(holds=True))
    for _ in range(2):
        claims.judge(experiments.fresh(), [claim])
    assert len(asked) == 1
