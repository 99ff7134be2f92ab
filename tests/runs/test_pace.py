"""Times per iteration that compare methods."""

import math

import pandas as pd

from brx.runs.pace import fastest_paces, have_common_speed


def groups(*rows):
    """Runs by group; each is given by its group, its `runtime.compile` and its seconds."""
    runs = pd.DataFrame(rows, columns=["group", "runtime.compile", "seconds_per_iteration"])
    return dict(list(runs.groupby("group")))


def paces(*rows):
    by_group = groups(*rows)
    return dict(zip(by_group, fastest_paces(list(by_group.values())), strict=True))


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


def test_whether_there_is_a_common_setting():
    rows = [("a", False, 3.0), ("a", "whole", 1.0), ("b", True, math.nan), ("c", False, 2.0)]
    for more, is_common in (([], True), ([("b", True, 4.0)], False)):
        assert have_common_speed(list(groups(*rows, *more).values())) == is_common


def test_no_times_at_all():
    assert math.isnan(paces(("a", False, math.nan))["a"])
    assert have_common_speed(list(groups(("a", False, math.nan)).values()))
