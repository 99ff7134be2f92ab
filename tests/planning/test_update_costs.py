"""Costs of updates, relative to AdamW's."""

import re

import pytest

from brx.errors import UserError
from brx.planning.update_costs import parse_costs, read_costs, update_costs
from tests.planning.measurements import MEASURED, experiment
from tests.runs.helpers import write_run

REACHED = [90, 100, 110]
EXPERIMENTS = [
    experiment("pipedream", 1, REACHED, seconds=4.0, micro_batches=4),
    experiment("muon", 1, REACHED, seconds=4.2, micro_batches=4),
    experiment("soap", 1, REACHED, seconds=5.0, micro_batches=4),
    experiment("pipedream", 0, REACHED, seconds=1.0),
    experiment("muon", 0, REACHED, seconds=1.5),
    experiment("scion", 2, REACHED, seconds=9.0, micro_batches=8),
]


@pytest.mark.parametrize("ordered", [EXPERIMENTS, EXPERIMENTS[::-1]], ids=["in order", "reversed"])
def test_costs_compare_at_equal_micro_batches(ordered):
    expected = {"pipedream": 0.0, "muon": 0.5, "soap": 0.25, "scion": 0.0}
    assert update_costs(ordered) == expected


def test_fastest_run_of_a_method_counts():
    slower = experiment("muon", 2, REACHED, seconds=3.0)
    assert update_costs([*EXPERIMENTS[3:5], slower])["muon"] == 0.5


def test_fastest_method_stands_in_for_adamw():
    assert update_costs(MEASURED.experiments[3:]) == {"muon": 0.0}


@pytest.mark.parametrize("share", ["-1", "nan", "inf", "much", ""])
def test_share_that_is_no_number_is_refused(share):
    with pytest.raises(UserError, match=rf"^--cost muon={share}: the share of an iteration must"):
        parse_costs([f"muon={share}"], MEASURED)


def test_unmeasured_method_is_refused_with_a_guess():
    with pytest.raises(UserError, match="muon"):
        parse_costs(["muom=0.5"], MEASURED)


def test_runs_without_times_have_no_cost(tmp_path):
    run = write_run(tmp_path, "timeless")
    metrics = run.path / "metrics.jsonl"
    metrics.write_text(re.sub(r'"seconds": [\d.]+', '"seconds": 0.0', metrics.read_text()))
    with pytest.raises(UserError, match="timeless: its metrics have no times above 0"):
        read_costs([tmp_path / "runs"])
