"""The sweep over angle and delay against torch's Adam, one start at a time, and against what it must show."""

import math

import numpy as np
import pytest
import torch

from brx.config.loading import PRESETS, load_yaml_as
from brx.paper.toy.delayed import DelayedDescent
from brx.paper.toy.sweep import SweepConfig, rotated_hessians, run_sweep, updates_to_target
from brx.paper.toy.sweep_figure import draw_sweep


def preset(name="sweep", **changes):
    return load_yaml_as(PRESETS / "toy" / f"{name}.yaml", SweepConfig).model_copy(update=changes)


SMALL = preset(starts=20, angles_degrees=[1.0, 20.0, 45.0], delays=[2, 4], momenta=[0.0, 0.9], most_updates=200)


@pytest.fixture(scope="module")
def result():
    return run_sweep(SMALL)


@pytest.mark.parametrize("beta1", [0.0, 0.9])
@pytest.mark.parametrize("delay", [0, 3])
def test_updates_are_those_of_torchs_adam(beta1, delay):
    config = preset(angles_degrees=[0.0, 30.0], most_updates=60)
    hessians = rotated_hessians(config.eigenvalues, config.angles_degrees)
    starts = np.array([[[14.0, 14.2], [-3.0, 19.0]], [[1.0, -20.0], [18.0, 5.0]]])
    counts = updates_to_target(config, hessians, starts, beta1, delay)
    for angle in range(2):
        curvature = torch.from_numpy(hessians[angle])
        for place in range(2):
            descent = DelayedDescent(
                lambda point, curvature=curvature: 0.5 * point @ curvature @ point,
                torch.from_numpy(starts[angle, place]),
                lambda points: torch.optim.Adam(points, lr=config.lr, betas=(beta1, config.beta2)),
                delay,
            )
            expected = descent.until(lambda point, d=descent: d.loss(point).item() <= config.target, 60)
            assert counts[angle, place] == (math.inf if expected is None else expected)


def test_norm_is_the_closed_form(result):
    # |H_11| + |H_22| = the trace; |H_12| = (l1 - l2) sin(2 angle) / 2.
    l1, l2 = SMALL.eigenvalues
    expected = [1 + (l1 - l2) * abs(math.sin(2 * math.radians(angle))) / (l1 + l2) for angle in SMALL.angles_degrees]
    np.testing.assert_allclose(result.norms, expected)


def test_misalignment_makes_delay_dear(result):
    slowdowns = result.slowdowns
    assert slowdowns.shape == (2, 2, 3)
    assert (np.diff(slowdowns[0], axis=-1) > 0).all()  # without momentum, with the angle
    assert result.correlation(0, 0) == pytest.approx(1.0)


def test_starts_that_never_arrive_are_infinitely_slow():
    stuck = run_sweep(preset(starts=3, angles_degrees=[0.0, 45.0], delays=[16], momenta=[0.0], most_updates=25))
    assert np.isinf(stuck.slowdowns).all()
    assert stuck.numbers()["sweeps"][0]["slowdowns"] == [None, None]
    assert stuck.correlation(0, 0) is None


def test_small_steps_differ_in_step_and_second_moment_only():
    usual, small = preset().model_dump(), preset("sweep-small-steps").model_dump()
    assert {key for key in usual if usual[key] != small[key]} == {"lr", "beta2"}


def test_figure(result, tmp_path):
    files = draw_sweep(result, tmp_path / "sweep")
    assert all(file.stat().st_size > 0 for file in files)
    assert "Spearman" in (tmp_path / "sweep.txt").read_text()
