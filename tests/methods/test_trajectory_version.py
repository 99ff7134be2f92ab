"""Which versions of brx compute the same numbers for a method."""

from pathlib import Path

import pytest

from brx.errors import UserError
from brx.methods.trajectory_version import (
    TRAJECTORY_VERSION,
    check_trajectory_version,
    newest_alike,
    oldest_alike,
)


def test_version_5_left_adamw_alone():
    assert newest_alike(4, "pipedream") == newest_alike(5, "pipedream") == TRAJECTORY_VERSION
    assert oldest_alike(5, "pipedream") == 4


def test_version_5_changed_basis_rotation():
    assert newest_alike(4, "basis-rotation") == 4
    assert oldest_alike(5, "basis-rotation") == 5


def test_version_6_changed_basis_rotation():
    assert newest_alike(5, "basis-rotation") == 5
    assert oldest_alike(6, "basis-rotation") == 6


def test_version_6_left_adamw_alone():
    assert newest_alike(5, "pipedream") == TRAJECTORY_VERSION


def test_version_4_changed_every_method():
    assert newest_alike(3, "pipedream") == 3
    assert oldest_alike(4, "pipedream") == 4


@pytest.mark.parametrize(
    ("method", "newest"),
    [
        ("mine.py:Mine", 4),
        ("torch.optim:SGD", TRAJECTORY_VERSION),
        ("brx.methods.causes:TurnedRotation", 4),
        ("brx.methods.causes:LionInEigenbasis", 4),
        ("lion", TRAJECTORY_VERSION),
    ],
)
def test_own_class_may_build_on_what_changed(method, newest):
    assert newest_alike(4, method) == newest


def test_run_of_an_unchanged_method_goes_on():
    check_trajectory_version({"trajectory_version": 4}, Path("run"), "nesterov")


def test_run_of_a_changed_method_is_refused():
    with pytest.raises(
        UserError, match=r"^run: trained at trajectory version 4, this brx computes"
    ):
        check_trajectory_version({"trajectory_version": 4}, Path("run"), "basis-rotation")
