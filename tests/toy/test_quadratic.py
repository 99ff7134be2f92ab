"""Descents on the quadratic against torch's Adam, one start at a time, and what they must show."""

import math

import numpy as np
import pytest
import torch

from brx.toy.descent import State
from brx.toy.quadratic import Case, descend, quadratic_hessians, run_quadratic
from tests.toy.helpers import QUADRATIC, SWEEP


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
    return torch.stack(path)


@pytest.fixture(scope="module")
def result():
    return run_quadratic(QUADRATIC)


def test_set_up_is_the_papers():
    assert (QUADRATIC.lr, QUADRATIC.beta1, QUADRATIC.beta2) == (1, 0, 0.1)
    assert (QUADRATIC.delay, QUADRATIC.target) == (2, 15)
    assert math.hypot(*QUADRATIC.start) == pytest.approx(20, abs=1e-3)


@pytest.mark.parametrize(("beta1", "delay"), [(0.0, 0), (0.0, 3), (0.9, 3)])
def test_descent_is_torchs_adam_under_delay(beta1, delay):
    config = SWEEP.model_copy(update={"most_updates": 60})
    curvatures = quadratic_hessians(config.eigenvalues, [0.0, 30.0])
    starts = np.array([[[14.0, 14.2], [-3.0, 19.0]], [[1.0, -20.0], [18.0, 5.0]]])
    trace = [State(starts, None, None)]
    needed = descend(config, curvatures, starts, beta1, delay, trace=trace)
    path = np.stack([state.point for state in trace])
    for place in np.ndindex(2, 2):
        curvature = torch.from_numpy(curvatures[place[0]])

        def loss(point, curvature=curvature):
            return 0.5 * point @ curvature @ point

        betas = (beta1, config.beta2)
        expected = torchs_path(loss, starts[place], delay, len(path) - 1, config.lr, betas)
        np.testing.assert_allclose(path[:, *place], expected, rtol=1e-6, atol=1e-9)
        reached = [t for t, point in enumerate(expected) if loss(point) <= config.target]
        assert needed[place] == (reached[0] if reached else math.inf)


def test_hessian_has_the_configured_eigenvalues():
    (curvature,) = quadratic_hessians(QUADRATIC.eigenvalues, [45.0])
    np.testing.assert_allclose(np.linalg.eigvalsh(curvature), sorted(QUADRATIC.eigenvalues))


def test_path_ends_at_the_first_arrival(result):
    for case, run in result.runs.items():
        degrees = QUADRATIC.degrees(case.aligned)
        (curvature,) = quadratic_hessians(QUADRATIC.eigenvalues, [degrees])
        losses = 0.5 * np.einsum("ti,ij,tj->t", run.path, curvature, run.path)
        assert losses[-1] <= QUADRATIC.target < losses[:-1].min()
        assert run.updates[0] == len(run.path) - 1


def test_rotation_leaves_adasgd_alone(result):
    for delay in (0, 2):
        counts = {
            result.runs[Case("AdaSGD", aligned, delay)].updates[0] for aligned in (True, False)
        }
        assert len(counts) == 1


def test_delay_costs_adam_only_when_misaligned(result):
    assert max(result.slowdowns("Adam", True)) <= 1.1
    assert min(result.slowdowns("Adam", False)) > 2


def test_run_that_never_arrives_has_no_count():
    few = QUADRATIC.model_copy(update={"most_updates": 3, "other_starts": 1})
    numbers = run_quadratic(few).numbers()
    assert [run["updates"] for run in numbers["runs"]] == [None] * 8
    assert [row["slowdown"] for row in numbers["slowdowns"]] == [None] * 4


def test_arrival_at_once_has_no_sign_changes():
    at_once = QUADRATIC.model_copy(update={"lr": 0.3, "start": [1.3, 0.0], "other_starts": 1})
    assert {run["sign_changes"] for run in run_quadratic(at_once).numbers()["runs"]} == {None}
