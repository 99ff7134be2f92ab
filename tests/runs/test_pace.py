"""Times per iteration that compare methods."""

import math

import pandas as pd
import pytest

from brx.runs.pace import fastest_pace


def paces(*rows):
    """The paces of runs, each given by its group, its `runtime.compile` and its seconds."""
    runs = pd.DataFrame(rows, columns=["group", "runtime.compile", "seconds_per_iteration"])
    return dict(fastest_pace(runs, runs["group"]))


def test_the_fastest_run_of_each_group_counts():
    assert paces(("a", False, 3.0), ("a", False, 2.0), ("b", False, 5.0)) == {"a": 2.0, "b": 5.0}


def test_only_runs_with_settings_that_all_groups_have_count():
    rows = [("a", False, 3.0), ("a", "whole", 1.0), ("b", False, 5.0), ("b", True, 4.0)]
    assert paces(*rows) == {"a": 3.0, "b": 5.0}


def test_of_several_settings_the_usual_one_counts():
    rows = [("a", False, 3.0), ("a", True, 1.0), ("a", True, 2.0), ("b", False, 5.0)]
    assert paces(*rows, ("b", True, 4.0)) == {"a": 1.0, "b": 4.0}


def test_without_a_setting_that_all_have_every_run_counts():
    assert paces(("a", False, 3.0), ("b", True, 4.0)) == {"a": 3.0, "b": 4.0}


def test_a_group_without_times_has_none():
    both = paces(("a", False, 3.0), ("a", True, 2.0), ("b", True, math.nan))
    assert both["a"] in (2.0, 3.0)
    assert math.isnan(both["b"])


@pytest.mark.parametrize("seconds", [[], [math.nan]])
def test_no_times_at_all(seconds):
    rows = [("a", False, value) for value in seconds]
    assert all(math.isnan(value) for value in paces(*rows).values())
