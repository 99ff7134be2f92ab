"""The spiral: derivatives, Adam on many points against torch's, aligned angles, and the slowdown."""

import math

import numpy as np
import pytest
import torch

from brx.config.loading import PRESETS, load_yaml_as
from brx.paper.toy.spiral import (
    SpiralConfig,
    adam,
    descend,
    distance_from_floor,
    floor_points,
    gradient,
    hessians,
    misalignment,
    run_spiral,
    spiral,
    updates_for_interval,
)
from tests.paper.toy.test_quadratic import torchs_path


def preset(name, **changes):
    return load_yaml_as(PRESETS / "toy" / f"{name}.yaml", SpiralConfig).model_copy(update=changes)


# A quarter turn around one aligned angle.
SHORT = preset("spiral-small-steps", start_radius=1.5, end_radius=1.15, measurements=150)


@pytest.fixture(scope="module")
def short_result():
    return run_spiral(SHORT)


def test_set_up_is_the_papers_and_small_steps_keep_what_it_states():
    for name, lr in (("spiral", 0.1), ("spiral-small-steps", SHORT.lr)):
        config = preset(name)
        stated = (config.lr, config.beta1, config.beta2, config.delay, config.interval_degrees)
        assert stated == (lr, 0.0, 0.9, 1, 3.0)


def test_value_at_a_point():
    # r = 2, theta = pi / 2
    assert spiral(torch.tensor([0.0, 2.0], dtype=torch.float64)).item() == pytest.approx(
        4 + (20 * math.sin(8 - math.pi / 2) + 1) ** 2
    )


def test_gradient_is_that_of_autograd():
    points = np.random.default_rng(0).uniform(-5, 5, (20, 2))
    leaves = torch.from_numpy(points).requires_grad_()
    (expected,) = torch.autograd.grad(sum(spiral(point) for point in leaves), leaves)
    np.testing.assert_allclose(gradient(points), expected.numpy(), rtol=1e-10)


def test_hessian_is_the_gradients_slope():
    point, step = np.array([[1.3, -2.1]]), 1e-6
    columns = [(gradient(point + step * e) - gradient(point - step * e))[0] / (2 * step) for e in np.eye(2)]
    np.testing.assert_allclose(hessians(point)[0].numpy(), np.stack(columns, axis=1), rtol=1e-5)


def test_misalignment_is_one_on_the_axes_and_two_at_45_degrees():
    rank_one = torch.tensor([[[5.0, 0.0], [0.0, 0.0]], [[2.5, 2.5], [2.5, 2.5]], [[3.0, 0.0], [0.0, -1.0]]])
    np.testing.assert_allclose(misalignment(rank_one), [1, 2, 1], rtol=1e-6)


def test_floor():
    points = floor_points(np.array([1.0, 2.5]))
    np.testing.assert_allclose([spiral(torch.from_numpy(point)).item() for point in points], [1.0, 6.25])
    np.testing.assert_allclose(distance_from_floor(points), 0, atol=1e-12)
    outwards = points * (1 + 1e-6 / np.array([[1.0], [2.5]]))
    # Across a valley with slope dr / (r dtheta) = 1 / (4 r).
    expected = [1e-6 * 4 / math.sqrt(16 + 1 / radius**2) for radius in (1.0, 2.5)]
    np.testing.assert_allclose(distance_from_floor(outwards), expected, rtol=1e-4)


@pytest.mark.parametrize("delay", [0, 2])
def test_adam_on_many_points_is_torchs(delay):
    config = SHORT.model_copy(update={"lr": 0.05, "beta1": 0.6})
    starts = floor_points(np.array([2.0, 3.0, 4.0]))
    zeros = np.zeros_like(starts)
    points = adam(config, [starts] * (delay + 1), zeros, zeros, np.zeros((3, 1)))
    for _ in range(30):
        found = points.update()
    for start, end in zip(starts, found, strict=True):
        np.testing.assert_allclose(torchs_path(spiral, start, delay, 30, 0.05, (0.6, 0.9))[-1], end, rtol=1e-6)


def test_going_on_from_an_iteration_without_delay_retraces_the_trajectory():
    history = descend(SHORT.model_copy(update={"most_updates": 60}))
    points = history.at(np.array([20, 35]), delay=0)
    for _ in range(25):
        ends = points.update()
    np.testing.assert_array_equal(ends, history.path[[45, 60]])


def test_interval_is_counted_from_where_the_delay_began():
    history = descend(SHORT.model_copy(update={"most_updates": 2000}))
    (count,) = updates_for_interval(SHORT, history.at(np.array([100]), 0))
    angles = np.degrees(np.unwrap(np.arctan2(*history.path.T[::-1])))
    turned = angles[100] - angles
    assert turned[100 + int(count)] >= 3 > turned[100 + int(count) - 1]


def test_aligned_angles_are_where_the_hessian_is_diagonal(short_result):
    assert len(short_result.aligned_angles) == 1
    for angles, zero in (
        (short_result.aligned_angles, lambda h: h[0, 1]),
        (short_result.misaligned_angles, lambda h: h[0, 0] - h[1, 1]),
    ):
        for angle in angles:
            start = math.degrees(math.atan2(*short_result.path[0][::-1]))
            radius = SHORT.start_radius + math.radians(angle - start) / 4
            curvature = hessians(floor_points(np.array([radius])))[0]
            assert abs(zero(curvature) / curvature.trace()) < 0.01


def test_slowdown_is_least_where_the_eigenbasis_is_aligned(short_result):
    assert short_result.arrived
    assert np.isfinite(short_result.slowdowns).all()
    assert short_result.median_slowdown(1.0, 1.1) < 1.3
    assert short_result.median_slowdown(1.5, 2.0) > 1.9
    correlation, p_value = short_result.correlation()
    assert correlation > 0.3
    assert p_value < 0.001


def test_with_the_printed_step_adam_stops_where_the_valley_is_aligned():
    config = preset("spiral", measurements=4, most_measured=50)
    result = run_spiral(config)
    assert not result.arrived
    assert np.degrees(np.arctan2(*result.path[-1][::-1])) == pytest.approx(result.aligned_angles[0], abs=1)
    assert result.numbers()["not_travelled_without_delay"] == int(np.isnan(result.plain).sum()) > 0
