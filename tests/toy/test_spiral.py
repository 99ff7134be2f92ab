"""The spiral: derivatives against autograd, closed forms, and what a delay on it must show."""

import math

import numpy as np
import pytest
import torch

from brx.toy.spiral import (
    SpiralConfig,
    adam_at,
    distance_from_floor,
    floor_points,
    misalignment,
    run_spiral,
    spiral,
    spiral_gradient,
    spiral_hessians,
    spiral_trajectory,
    updates_for_interval,
)
from tests.toy.helpers import SHORT_SPIRAL, preset


@pytest.fixture(scope="module")
def result():
    return run_spiral(SHORT_SPIRAL)


@pytest.fixture(scope="module")
def states():
    """The trajectory without delay."""
    return spiral_trajectory(SHORT_SPIRAL.model_copy(update={"most_updates": 2000}))


@pytest.fixture(scope="module")
def printed():
    """With the step that the paper prints."""
    return run_spiral(preset("spiral", SpiralConfig, measurements=4, most_measured=50))


@pytest.mark.parametrize(("name", "lr"), [("spiral", 0.1), ("spiral-small-steps", SHORT_SPIRAL.lr)])
def test_set_up_is_the_papers(name, lr):
    config = preset(name, SpiralConfig)
    assert (config.lr, config.beta1, config.beta2) == (lr, 0.0, 0.9)
    assert (config.delay, config.interval_degrees) == (1, 3.0)


def test_value_by_hand():
    # At (0, 2): r = 2, theta = pi / 2.
    value = spiral(torch.tensor([0.0, 2.0], dtype=torch.float64)).item()
    assert value == pytest.approx(4 + (20 * math.sin(8 - math.pi / 2) + 1) ** 2)


def test_gradient_is_autograds():
    points = np.random.default_rng(0).uniform(-5, 5, (20, 2))
    leaves = torch.from_numpy(points).requires_grad_()
    (expected,) = torch.autograd.grad(sum(spiral(point) for point in leaves), leaves)
    np.testing.assert_allclose(spiral_gradient(points), expected.numpy(), rtol=1e-10)


def test_hessian_is_the_gradients_difference():
    point = np.array([[1.3, -2.1]])
    step = 1e-6
    ahead = np.stack([spiral_gradient(point + step * axis)[0] for axis in np.eye(2)])
    behind = np.stack([spiral_gradient(point - step * axis)[0] for axis in np.eye(2)])
    expected = (ahead - behind).T / (2 * step)
    np.testing.assert_allclose(spiral_hessians(point)[0].numpy(), expected, rtol=1e-5)


def test_misalignment_in_closed_form():
    diagonal = [[5.0, 0.0], [0.0, 0.0]]
    at_45_degrees = [[2.5, 2.5], [2.5, 2.5]]
    indefinite = [[3.0, 0.0], [0.0, -1.0]]
    matrices = torch.tensor([diagonal, at_45_degrees, indefinite])
    np.testing.assert_allclose(misalignment(matrices), [1, 2, 1], rtol=1e-6)


def test_second_term_vanishes_on_the_floor():
    points = torch.from_numpy(floor_points(np.array([1.0, 2.5])))
    np.testing.assert_allclose([spiral(point).item() for point in points], [1.0, 6.25])


def test_distance_from_the_floor_is_first_order():
    radii = np.array([1.0, 2.5])
    points = floor_points(radii)
    np.testing.assert_allclose(distance_from_floor(points), 0, atol=1e-12)
    outwards = points * (1 + 1e-6 / radii[:, None])
    # Across a valley with slope dr / (r dtheta) = 1 / (4 r).
    expected = [1e-6 * 4 / math.sqrt(16 + 1 / radius**2) for radius in radii]
    np.testing.assert_allclose(distance_from_floor(outwards), expected, rtol=1e-4)


def test_going_on_without_delay_retraces_the_trajectory(states):
    adam = adam_at(SHORT_SPIRAL, states, np.array([20, 35]), delay=0)
    for _ in range(25):
        ends = adam.update()
    np.testing.assert_array_equal(ends, states.point[[45, 60]])


def test_interval_is_counted_from_the_delay(states):
    adam = adam_at(SHORT_SPIRAL, states, np.array([100]), delay=0)
    (count,) = updates_for_interval(SHORT_SPIRAL, adam)
    angles = np.degrees(np.unwrap(np.arctan2(*states.point.T[::-1])))
    turned = angles[100] - angles
    assert turned[100 + int(count)] >= 3 > turned[100 + int(count) - 1]


def test_special_angles_are_of_the_hessian(result):
    assert len(result.special_angles[0]) == 1
    start = math.degrees(math.atan2(*result.path[0][::-1]))
    off_axes = (lambda h: h[0, 1], lambda h: h[0, 0] - h[1, 1])
    for angles, zero in zip(result.special_angles, off_axes, strict=True):
        for angle in angles:
            radius = SHORT_SPIRAL.start_radius + math.radians(angle - start) / 4
            curvature = spiral_hessians(floor_points(np.array([radius])))[0]
            assert abs(zero(curvature) / curvature.trace()) < 0.01


def test_slowdown_is_least_where_aligned(result):
    assert result.median_slowdown(1.0, 1.1) < 1.3
    assert result.median_slowdown(1.5, 2.0) > 1.9


def test_misalignment_correlates_with_slowdown(result):
    correlation, p_value = result.correlation()
    assert correlation > 0.3
    assert p_value < 0.001


def test_small_steps_arrive(result):
    assert result.arrived


def test_printed_step_stops_at_the_aligned_angle(printed):
    assert not printed.arrived
    end = np.degrees(np.arctan2(*printed.path[-1][::-1]))
    assert end == pytest.approx(printed.special_angles[0][0], abs=1)


def test_unfinished_measurements_are_counted(printed):
    not_travelled = printed.numbers()["not_travelled_without_delay"]
    assert not_travelled == int(np.isinf(printed.plain).sum()) > 0
    assert np.isnan(printed.slowdowns).sum() >= not_travelled
