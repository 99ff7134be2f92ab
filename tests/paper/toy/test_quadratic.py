"""The quadratic and the sweep against torch's Adam, one start at a time, and against what they must show."""

import math

import numpy as np
import pytest
import torch

from brx.config.loading import PRESETS, load_yaml_as
from brx.paper.toy.descent import DelayedAdam
from brx.paper.toy.quadratic import Case, QuadraticConfig, SweepConfig, descend, hessians, run_quadratic, run_sweep


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


def sweep(**changes):
    return load_yaml_as(PRESETS / "toy" / "sweep.yaml", SweepConfig).model_copy(update=changes)


@pytest.mark.parametrize(("beta1", "delay"), [(0.0, 0), (0.0, 3), (0.9, 3)])
def test_descent_is_torchs_adam_with_an_older_gradient(beta1, delay):
    config = sweep(most_updates=60)
    curvatures = hessians(config.eigenvalues, [0.0, 30.0])
    starts = np.array([[[14.0, 14.2], [-3.0, 19.0]], [[1.0, -20.0], [18.0, 5.0]]])
    needed, path = descend(config, curvatures, starts, beta1, delay)
    for place in np.ndindex(2, 2):
        curvature = torch.from_numpy(curvatures[place[0]])

        def loss(point, curvature=curvature):
            return 0.5 * point @ curvature @ point

        expected = torchs_path(loss, starts[place], delay, len(path) - 1, config.lr, (beta1, config.beta2))
        np.testing.assert_allclose(path[:, *place], expected, rtol=1e-6, atol=1e-9)
        reached = [t for t, point in enumerate(torch.from_numpy(expected)) if loss(point) <= config.target]
        assert needed[place] == (reached[0] if reached else math.inf)


def test_adasgd_by_hand():
    gradients = iter([np.array([1.0, 7.0]), np.array([2.0, -2.0])])
    adasgd = DelayedAdam(lambda _: next(gradients), 1.0, 0.5, 0.75, [np.zeros(2)], one_size=True)
    # mean squares 25 and 4: v = 25/4, then 3/4 25/4 + 1/4 4; m = g/2, then g1/4 + g2/2
    first = np.array([1.0, 7.0]) / 5.0
    np.testing.assert_allclose(adasgd.update(), -first, rtol=1e-7)
    second_root = ((0.75 * 25 / 4 + 1.0) / (1 - 0.75**2)) ** 0.5
    np.testing.assert_allclose(adasgd.update(), -first - np.array([1.25, 0.75]) / 0.75 / second_root, rtol=1e-7)


@pytest.fixture(scope="module")
def result():
    config = load_yaml_as(PRESETS / "toy" / "quadratic.yaml", QuadraticConfig)
    return run_quadratic(config.model_copy(update={"other_starts": 12}))


def test_set_up_is_the_papers(result):
    config = result.config
    assert (config.lr, config.beta1, config.beta2, config.delay, config.target) == (1.0, 0.0, 0.1, 2, 15.0)
    assert math.hypot(*config.start) == pytest.approx(20, abs=1e-3)


def test_counts_are_of_the_first_point_at_the_target(result):
    for case, run in result.runs.items():
        (curvature,) = hessians(result.config.eigenvalues, [0.0 if case.aligned else 45.0])
        np.testing.assert_allclose(np.linalg.eigvalsh(curvature), sorted(result.config.eigenvalues))
        assert (abs(curvature[0, 1]) > 1) != case.aligned
        losses = 0.5 * np.einsum("ti,ij,tj->t", run.path, curvature, run.path)
        assert losses[-1] <= result.config.target < losses[:-1].min()
        assert run.updates[0] == len(run.path) - 1
        assert len(run.updates) == 13


def test_rotation_and_delay_together_cost_adam_but_not_adasgd(result):
    updates = {case: run.updates[0] for case, run in result.runs.items()}
    for delay in (0, 2):
        assert updates[Case("AdaSGD", True, delay)] == updates[Case("AdaSGD", False, delay)]
    assert max(result.slowdowns("Adam", True)) <= 1.1
    assert min(result.slowdowns("Adam", False)) > 2


def test_a_run_that_never_arrives_has_no_count(result):
    stuck = run_quadratic(result.config.model_copy(update={"most_updates": 3, "other_starts": 1}))
    numbers = stuck.numbers()
    assert [run["updates"] for run in numbers["runs"]] == [None] * 8
    assert [row["median_slowdown_from_other_starts"] for row in numbers["slowdowns"]] == [None] * 4
    assert numbers["slowdowns"][1]["slowdown"] is None


def test_misalignment_makes_delay_dear():
    config = sweep(starts=20, angles_degrees=[1.0, 20.0, 45.0], delays=[2, 4], momenta=[0.0, 0.9], most_updates=200)
    result = run_sweep(config)
    # |H_11| + |H_22| = the trace; |H_12| = (l1 - l2) sin(2 angle) / 2.
    l1, l2 = config.eigenvalues
    expected = [1 + (l1 - l2) * abs(math.sin(2 * math.radians(angle))) / (l1 + l2) for angle in config.angles_degrees]
    np.testing.assert_allclose(result.norms, expected)
    assert result.slowdowns.shape == (2, 2, 3)
    assert (np.diff(result.slowdowns[0], axis=-1) > 0).all()  # without momentum, with the angle
    assert result.correlation(0, 0) == pytest.approx(1.0)


def test_starts_that_never_arrive_are_infinitely_slow():
    stuck = run_sweep(sweep(starts=3, angles_degrees=[0.0, 45.0], delays=[16], momenta=[0.0], most_updates=25))
    assert np.isinf(stuck.slowdowns).all()
    assert stuck.numbers()["sweeps"][0]["slowdowns"] == [None, None]
    assert stuck.correlation(0, 0) is None


def test_small_steps_differ_in_step_and_second_moment_only():
    small = load_yaml_as(PRESETS / "toy" / "sweep-small-steps.yaml", SweepConfig).model_dump()
    assert {key for key, value in sweep().model_dump().items() if value != small[key]} == {"lr", "beta2"}
