"""Conditions on the settings of runs."""

import pytest

from brx.sweep.conditions import matches
from tests.train.helpers import tiny_config


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ({"pipeline.stages": [1, 4], "optimizer.method": "pipedream"}, True),
        ({"pipeline.stages": [1, 2]}, False),
        ({"optimizer.frequency": 10}, False),  # no setting of this method
    ],
    ids=["both", "another value", "no such key"],
)
def test_condition_needs_one_of_each_values(condition, expected, tmp_path):
    assert matches(tiny_config(tmp_path), condition) == expected
