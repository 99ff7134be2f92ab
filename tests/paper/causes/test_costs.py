"""The table of costs, from made-up final losses."""

from brx.paper.causes.arms import ADAMW, DEEPEST, LION, ONE_UPDATE
from brx.paper.causes.costs import cost_table
from brx.paper.causes.study import Study
from tests.paper.causes.runs import write_arm

EQUAL = (0.0, 0.0, 0.0)  # the same cost on every seed


def test_cheapest_arm_comes_first(tmp_path):
    write_arm(tmp_path, ADAMW, {DEEPEST: 0.3})
    write_arm(tmp_path, LION, {DEEPEST: 0.2})
    assert cost_table(Study.load(tmp_path))["arm"].tolist() == [LION, ADAMW]


def test_row_has_losses_and_cost(tmp_path):
    write_arm(tmp_path, LION, {DEEPEST: 0.2}, noise=EQUAL)
    (row,) = cost_table(Study.load(tmp_path)).to_dict("records")
    assert (row["seeds"], row["without delay"], row["with it"]) == ("3", "1.310", "1.510")
    assert row["cost"] == "0.200 [0.200, 0.200]"


def test_shorter_delays_come_first(tmp_path):
    write_arm(tmp_path, LION, {DEEPEST: 0.2, ONE_UPDATE: 0.1})
    assert cost_table(Study.load(tmp_path))["delay"].tolist() == [ONE_UPDATE, DEEPEST]


def test_arm_without_runs_without_delay_is_left_out(tmp_path):
    write_arm(tmp_path, LION, {DEEPEST: 0.2})
    for run in tmp_path.iterdir():
        if "stages: 1\n" in (run / "config.yaml").read_text():
            (run / "config.yaml").unlink()
    write_arm(tmp_path, ADAMW, {DEEPEST: 0.3})
    assert cost_table(Study.load(tmp_path))["arm"].tolist() == [ADAMW]
