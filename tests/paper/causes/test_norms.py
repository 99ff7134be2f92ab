"""The table of norms, from made-up measurements."""

import pytest

from brx.errors import UserError
from brx.paper.causes.arms import BASES, DEEPEST, EIGENBASIS
from brx.paper.causes.norms import ratio_table
from brx.paper.causes.study import Study
from tests.paper.causes.runs import write_arm, write_norms


def test_ratio_is_of_the_same_weights(tmp_path):
    write_arm(tmp_path, EIGENBASIS, {DEEPEST: 0.2})
    write_norms(tmp_path, {EIGENBASIS: 20.0})
    write_norms(tmp_path, {EIGENBASIS: 50.0}, "original")
    (row,) = ratio_table(Study.load(tmp_path)).to_dict("records")
    norms = row["norm in its coordinates"], row["in the original ones"]
    assert (row["seeds"], *norms) == ("3", "2.000", "5.000")
    assert row["ratio"] == "0.400 [0.400, 0.400]"


def test_basis_that_is_measured_in_its_coordinates_alone_has_no_row(tmp_path):
    for arm in BASES[:2]:
        write_arm(tmp_path, arm, {DEEPEST: 0.2})
    write_norms(tmp_path, dict.fromkeys(BASES[:2], 20.0))
    write_norms(tmp_path, {BASES[1]: 50.0}, "original")
    assert ratio_table(Study.load(tmp_path))["basis"].tolist() == [BASES[1]]


def test_unmeasured_is_one_line(tmp_path):
    write_arm(tmp_path, EIGENBASIS, {DEEPEST: 0.2})
    with pytest.raises(UserError, match="no run of a basis has been measured in both coordinates"):
        ratio_table(Study.load(tmp_path))
