"""The table of differences by seed, from made-up final losses."""

import pytest

from brx.errors import UserError
from brx.paper.causes.arms import ADAMW, ADAN, DEEPEST, EIGENBASIS, LION, SCION
from brx.paper.causes.differences import difference_table
from brx.paper.causes.study import Study
from tests.paper.causes.runs import write_arm


def test_differences_are_by_seed(tmp_path):
    write_arm(tmp_path, SCION, {DEEPEST: 0.1}, noise=(0.0, 0.0, 0.0), without=1.4)
    write_arm(tmp_path, EIGENBASIS, {DEEPEST: 0.2}, noise=(0.0, 0.0, 0.0), without=1.3)
    (row,) = difference_table(Study.load(tmp_path)).to_dict("records")
    assert (row["arm"], row["compared with"], row["seeds"]) == (SCION, EIGENBASIS, "3")
    assert row["cost"] == "-0.100 [-0.100, -0.100]"
    assert row["loss with delay"] == "+0.000 [+0.000, +0.000]"
    assert row["loss without"] == "+0.100 [+0.100, +0.100]"


def test_seeds_that_one_arm_lacks_do_not_count(tmp_path):
    write_arm(tmp_path, ADAN, {DEEPEST: 0.1}, noise=(0.0, 0.0))
    write_arm(tmp_path, ADAMW, {DEEPEST: 0.2}, noise=(0.0, 0.0, 5.0))
    (row,) = difference_table(Study.load(tmp_path)).to_dict("records")
    assert (row["seeds"], row["cost"]) == ("2", "-0.100")


def test_nothing_to_compare_is_one_line(tmp_path):
    write_arm(tmp_path, LION, {DEEPEST: 0.1})
    with pytest.raises(UserError, match="no runs of two arms that are compared"):
        difference_table(Study.load(tmp_path))
