"""The quadratic: its Hessian, and what the paper says it shows, from any start."""

import math

import pytest
import torch

from brx.config.loading import PRESETS, load_yaml_as
from brx.paper.toy.quadratic import Case, QuadraticConfig, hessian, run_quadratic


@pytest.fixture(scope="module")
def result():
    config = load_yaml_as(PRESETS / "toy" / "quadratic.yaml", QuadraticConfig)
    return run_quadratic(config.model_copy(update={"other_starts": 12}))


def test_set_up_is_the_papers(result):
    config = result.config
    assert (config.lr, config.beta1, config.beta2, config.delay, config.target) == (1.0, 0.0, 0.1, 2, 15.0)


def test_hessian_has_the_eigenvectors_it_says(result):
    for aligned in (True, False):
        curvature, basis = hessian(result.config, aligned)
        torch.testing.assert_close(curvature @ basis[:, 0], result.config.eigenvalues[0] * basis[:, 0])
        torch.testing.assert_close(curvature @ basis[:, 1], result.config.eigenvalues[1] * basis[:, 1])
    assert abs(curvature[0, 1]) > 1


def test_counts_are_of_the_first_point_at_the_target(result):
    for one in result.trajectories:
        curvature, _ = hessian(result.config, one.case.aligned)
        losses = 0.5 * torch.einsum("ti,ij,tj->t", one.path, curvature, one.path)
        assert losses[-1] <= result.config.target
        assert (losses[:-1] > result.config.target).all()
        assert one.updates == len(one.path) - 1


def test_rotation_changes_adam_but_not_adasgd(result):
    updates = {one.case: one.updates for one in result.trajectories}
    for delay in (0, 2):
        assert updates[Case("AdaSGD", True, delay)] == updates[Case("AdaSGD", False, delay)]
    assert updates[Case("Adam", True, 2)] != updates[Case("Adam", False, 2)]


def test_delay_costs_adam_nothing_where_aligned_and_much_where_not(result):
    assert result.slowdown("Adam", True) <= 1.1
    assert result.median_slowdown("Adam", True) <= 1.1
    assert result.slowdown("Adam", False) > 2
    assert result.median_slowdown("Adam", False) > 2


def test_a_run_that_never_arrives_has_no_count(result):
    stuck = run_quadratic(result.config.model_copy(update={"most_updates": 3, "other_starts": 1}))
    assert [one.updates for one in stuck.trajectories] == [None] * 8
    assert stuck.slowdown("Adam", True) is None
    assert stuck.median_slowdown("Adam", True) is None


def test_other_starts_are_at_the_same_distance(result):
    assert math.hypot(*result.config.start) == pytest.approx(20, abs=1e-3)
    assert {len(counts) for counts in result.other_updates.values()} == {12}
