"""The toy problems against torch's Adam, one start at a time, against derivatives, and against what
they must show."""

import math

import numpy as np
import pytest
import torch

from brx.config.loading import PRESETS, load_yaml_as
from brx.toy import landscapes as toy


def preset(name, kind, **changes):
    return load_yaml_as(PRESETS / "toy" / f"{name}.yaml", kind).model_copy(update=changes)


QUADRATIC = preset("quadratic", toy.QuadraticConfig, other_starts=12)
SWEEP = preset("sweep", toy.SweepConfig)
# A quarter turn around one aligned angle.
SHORT = preset(
    "spiral-small-steps", toy.SpiralConfig, start_radius=1.5, end_radius=1.15, measurements=150
)


def torchs_path(loss, start, delay, updates, lr, betas):
    """torch's Adam on one point, with the gradient of the point `delay` updates ago."""
    path = [torch.tensor(start, dtype=torch.float64)]
    point = torch.nn.Parameter(path[0].clone())
    optimizer = torch.optim.Adam([point], lr=lr, betas=betas)
    for t in range(updates):
        stale = path[max(0, t - delay)].clone().requires_grad_()
        (point.grad,) = torch.autograd.grad(loss(stale), stale)
        optimizer.step()
        path.append(point.detach().clone())
    return torch.stack(path).numpy()


def test_set_ups_are_the_papers_and_small_steps_differ_where_they_say():
    assert (QUADRATIC.lr, QUADRATIC.beta1, QUADRATIC.beta2, QUADRATIC.delay, QUADRATIC.target) == (
        1,
        0,
        0.1,
        2,
        15,
    )
    assert math.hypot(*QUADRATIC.start) == pytest.approx(20, abs=1e-3)
    for name, lr in (("spiral", 0.1), ("spiral-small-steps", SHORT.lr)):
        config = preset(name, toy.SpiralConfig)
        assert (config.lr, config.beta1, config.beta2, config.delay, config.interval_degrees) == (
            lr,
            0.0,
            0.9,
            1,
            3.0,
        )
    small = preset("sweep-small-steps", toy.SweepConfig).model_dump()
    assert {key for key, value in SWEEP.model_dump().items() if value != small[key]} == {
        "lr",
        "beta2",
    }


@pytest.mark.parametrize(("beta1", "delay"), [(0.0, 0), (0.0, 3), (0.9, 3)])
def test_descent_on_the_quadratic_is_torchs_adam_with_an_older_gradient(beta1, delay):
    config = SWEEP.model_copy(update={"most_updates": 60})
    curvatures = toy.quadratic_hessians(config.eigenvalues, [0.0, 30.0])
    starts = np.array([[[14.0, 14.2], [-3.0, 19.0]], [[1.0, -20.0], [18.0, 5.0]]])
    trace = [toy.State(starts, None, None)]
    needed = toy.descend(config, curvatures, starts, beta1, delay, trace=trace)
    path = np.stack([state.point for state in trace])
    for place in np.ndindex(2, 2):
        curvature = torch.from_numpy(curvatures[place[0]])

        def loss(point, curvature=curvature):
            return 0.5 * point @ curvature @ point

        expected = torchs_path(
            loss, starts[place], delay, len(path) - 1, config.lr, (beta1, config.beta2)
        )
        np.testing.assert_allclose(path[:, *place], expected, rtol=1e-6, atol=1e-9)
        reached = [
            t for t, point in enumerate(torch.from_numpy(expected)) if loss(point) <= config.target
        ]
        assert needed[place] == (reached[0] if reached else math.inf)


def test_adasgd_by_hand():
    gradients = iter([np.array([1.0, 7.0]), np.array([2.0, -2.0])])
    adasgd = toy.DelayedAdam(
        lambda _: next(gradients), 1.0, 0.5, 0.75, [np.zeros(2)], one_size=True
    )
    # mean squares 25 and 4: v = 25/4, then 3/4 25/4 + 1/4 4; m = g/2, then g1/4 + g2/2
    first = np.array([1.0, 7.0]) / 5.0
    np.testing.assert_allclose(adasgd.update(), -first, rtol=1e-7)
    second_root = ((0.75 * 25 / 4 + 1.0) / (1 - 0.75**2)) ** 0.5
    np.testing.assert_allclose(
        adasgd.update(), -first - np.array([1.25, 0.75]) / 0.75 / second_root, rtol=1e-7
    )


def test_rotation_and_delay_together_cost_adam_but_not_adasgd():
    quadratic = toy.run_quadratic(QUADRATIC)
    for case, run in quadratic.runs.items():  # counts are of the first point at the target
        (curvature,) = toy.quadratic_hessians(
            QUADRATIC.eigenvalues, [0.0 if case.aligned else 45.0]
        )
        np.testing.assert_allclose(np.linalg.eigvalsh(curvature), sorted(QUADRATIC.eigenvalues))
        assert (abs(curvature[0, 1]) > 1) != case.aligned
        losses = 0.5 * np.einsum("ti,ij,tj->t", run.path, curvature, run.path)
        assert losses[-1] <= QUADRATIC.target < losses[:-1].min()
        assert (run.updates[0], len(run.updates)) == (len(run.path) - 1, 13)
    updates = {case: run.updates[0] for case, run in quadratic.runs.items()}
    for delay in (0, 2):
        assert updates[toy.Case("AdaSGD", True, delay)] == updates[toy.Case("AdaSGD", False, delay)]
    assert (
        max(quadratic.slowdowns("Adam", True)) <= 1.1 < 2 < min(quadratic.slowdowns("Adam", False))
    )


def test_a_run_that_never_arrives_has_no_count_and_is_infinitely_slow(tmp_path):
    numbers = toy.run_quadratic(
        QUADRATIC.model_copy(update={"most_updates": 3, "other_starts": 1})
    ).numbers()
    assert [run["updates"] for run in numbers["runs"]] == [None] * 8
    assert [row["median_slowdown_from_other_starts"] for row in numbers["slowdowns"]] == [None] * 4
    assert numbers["slowdowns"][1]["slowdown"] is None
    few = {
        "starts": 3,
        "angles_degrees": [0.0, 45.0],
        "delays": [16],
        "momenta": [0.0],
        "most_updates": 25,
    }
    stuck = toy.run_sweep(SWEEP.model_copy(update=few))
    assert np.isinf(stuck.slowdowns).all()
    assert stuck.numbers()["sweeps"][0]["slowdowns"] == [None, None]
    assert stuck.correlation(0, 0) is None
    assert toy.draw_sweep(stuck, tmp_path / "stuck")  # nothing for a logarithmic axis
    at_once = QUADRATIC.model_copy(update={"lr": 0.3, "start": [1.3, 0.0], "other_starts": 1})
    assert {run["sign_changes"] for run in toy.run_quadratic(at_once).numbers()["runs"]} == {None}


def test_misalignment_makes_delay_dear():
    few = {"starts": 20, "angles_degrees": [1.0, 20.0, 45.0], "delays": [2, 4], "most_updates": 200}
    config = SWEEP.model_copy(update=few)
    result = toy.run_sweep(config)
    l1, l2 = config.eigenvalues  # |H_11| + |H_22| = the trace; |H_12| = (l1 - l2) sin(2 angle) / 2
    expected = [
        1 + (l1 - l2) * abs(math.sin(2 * math.radians(angle))) / (l1 + l2)
        for angle in config.angles_degrees
    ]
    np.testing.assert_allclose(result.norms, expected)
    assert result.slowdowns.shape == (2, 2, 3)
    assert (np.diff(result.slowdowns[0], axis=-1) > 0).all()  # without momentum, with the angle
    assert result.correlation(0, 0) == pytest.approx(1.0)


def test_derivatives_of_the_spiral_are_those_of_its_value():
    value = toy.spiral(
        torch.tensor([0.0, 2.0], dtype=torch.float64)
    ).item()  # r = 2, theta = pi / 2
    assert value == pytest.approx(4 + (20 * math.sin(8 - math.pi / 2) + 1) ** 2)
    points = np.random.default_rng(0).uniform(-5, 5, (20, 2))
    leaves = torch.from_numpy(points).requires_grad_()
    (expected,) = torch.autograd.grad(sum(toy.spiral(point) for point in leaves), leaves)
    np.testing.assert_allclose(toy.spiral_gradient(points), expected.numpy(), rtol=1e-10)
    point, step = np.array([[1.3, -2.1]]), 1e-6
    ahead, behind = (
        np.stack([toy.spiral_gradient(point + sign * step * e)[0] for e in np.eye(2)])
        for sign in (1, -1)
    )
    np.testing.assert_allclose(
        toy.spiral_hessians(point)[0].numpy(), (ahead - behind).T / (2 * step), rtol=1e-5
    )


def test_misalignment_and_the_floor_in_closed_form():
    matrices = torch.tensor(
        [[[5.0, 0.0], [0.0, 0.0]], [[2.5, 2.5], [2.5, 2.5]], [[3.0, 0.0], [0.0, -1.0]]]
    )
    np.testing.assert_allclose(
        toy.misalignment(matrices), [1, 2, 1], rtol=1e-6
    )  # the second is at 45 degrees
    points = toy.floor_points(np.array([1.0, 2.5]))
    np.testing.assert_allclose(
        [toy.spiral(torch.from_numpy(point)).item() for point in points], [1.0, 6.25]
    )
    np.testing.assert_allclose(toy.distance_from_floor(points), 0, atol=1e-12)
    outwards = points * (1 + 1e-6 / np.array([[1.0], [2.5]]))
    # Across a valley with slope dr / (r dtheta) = 1 / (4 r).
    expected = [1e-6 * 4 / math.sqrt(16 + 1 / radius**2) for radius in (1.0, 2.5)]
    np.testing.assert_allclose(toy.distance_from_floor(outwards), expected, rtol=1e-4)


def test_going_on_from_an_iteration_without_delay_retraces_the_trajectory():
    states = toy.spiral_trajectory(SHORT.model_copy(update={"most_updates": 2000}))
    adam = toy.adam_at(SHORT, states, np.array([20, 35]), delay=0)
    for _ in range(25):
        ends = adam.update()
    np.testing.assert_array_equal(ends, states.point[[45, 60]])
    # The interval is counted from where the delay began.
    (count,) = toy.updates_for_interval(SHORT, toy.adam_at(SHORT, states, np.array([100]), 0))
    angles = np.degrees(np.unwrap(np.arctan2(*states.point.T[::-1])))
    turned = angles[100] - angles
    assert turned[100 + int(count)] >= 3 > turned[100 + int(count) - 1]


def test_slowdown_on_the_spiral_is_least_where_the_hessian_is_diagonal():
    result = toy.run_spiral(SHORT)
    assert len(result.special_angles[0]) == 1
    off_axes = (lambda h: h[0, 1], lambda h: h[0, 0] - h[1, 1])
    for angles, zero in zip(result.special_angles, off_axes, strict=True):
        for angle in angles:
            radius = (
                SHORT.start_radius
                + math.radians(angle - math.degrees(math.atan2(*result.path[0][::-1]))) / 4
            )
            curvature = toy.spiral_hessians(toy.floor_points(np.array([radius])))[0]
            assert abs(zero(curvature) / curvature.trace()) < 0.01
    assert result.arrived
    assert np.isfinite(result.slowdowns).all()
    assert result.median_slowdown(1.0, 1.1) < 1.3 < 1.9 < result.median_slowdown(1.5, 2.0)
    correlation, p_value = result.correlation()
    assert p_value < 0.001 < 0.3 < correlation


def test_with_the_printed_step_adam_stops_where_the_valley_is_aligned():
    result = toy.run_spiral(preset("spiral", toy.SpiralConfig, measurements=4, most_measured=50))
    assert not result.arrived
    assert np.degrees(np.arctan2(*result.path[-1][::-1])) == pytest.approx(
        result.special_angles[0][0], abs=1
    )
    not_travelled = result.numbers()["not_travelled_without_delay"]
    assert not_travelled == int(np.isinf(result.plain).sum()) > 0
    assert np.isnan(result.slowdowns).sum() >= not_travelled
