"""The sweep over angles and delays: norms in closed form, and the cost of misalignment."""

import math

import numpy as np
import pytest

from brx.toy.angles import SweepConfig, SweepResult, _sweep_caption, draw_sweep, run_sweep
from tests.toy.helpers import SWEEP, preset

FEW = {"starts": 20, "angles_degrees": [1.0, 20.0, 45.0], "delays": [2, 4], "most_updates": 200}
STUCK = {
    "starts": 3,
    "angles_degrees": [0.0, 45.0],
    "delays": [16],
    "momenta": [0.0],
    "most_updates": 25,
}


@pytest.fixture(scope="module")
def result():
    return run_sweep(SWEEP.model_copy(update=FEW))


@pytest.fixture(scope="module")
def stuck():
    """No start arrives."""
    return run_sweep(SWEEP.model_copy(update=STUCK))


def test_small_steps_differ_where_they_say():
    own = SWEEP.model_dump()
    small = preset("sweep-small-steps", SweepConfig).model_dump()
    assert {key for key, value in own.items() if value != small[key]} == {"lr", "beta2"}


def test_norm_has_a_closed_form(result):
    l1, l2 = SWEEP.eigenvalues
    # |H_11| + |H_22| is the trace, and |H_12| = (l1 - l2) |sin(2 angle)| / 2 counts twice.
    sines = [abs(math.sin(2 * math.radians(angle))) for angle in FEW["angles_degrees"]]
    expected = [1 + (l1 - l2) * sine / (l1 + l2) for sine in sines]
    np.testing.assert_allclose(result.norms, expected)


def test_slowdown_grows_with_the_angle(result):
    assert result.slowdowns.shape == (2, 2, 3)
    without_momentum = result.slowdowns[0]
    assert (np.diff(without_momentum, axis=-1) > 0).all()
    assert result.correlation(0, 0) == pytest.approx(1.0)


def test_start_that_never_arrives_is_infinitely_slow(stuck):
    assert np.isinf(stuck.slowdowns).all()


def test_equal_slowdowns_have_no_correlation(stuck):
    assert stuck.correlation(0, 0) is None


def test_infinite_slowdowns_are_null_in_the_file(stuck):
    assert stuck.numbers()["sweeps"][0]["slowdowns"] == [None, None]


def test_figure_without_finite_slowdowns_is_drawn(stuck, tmp_path):
    assert draw_sweep(stuck, tmp_path / "stuck")


@pytest.fixture(scope="module")
def partly():
    """At the second of three angles, no start arrives even without delay."""
    config = SWEEP.model_copy(
        update={"angles_degrees": [0.0, 30.0, 45.0], "momenta": [0.0], "delays": [1]}
    )
    plain = [[2.0, 2.0], [np.inf, np.inf], [2.0, 2.0]]
    delayed = [[2.0, 4.0], [np.inf, np.inf], [8.0, 8.0]]
    return SweepResult(config, np.array([1.0, 1.5, 1.7]), np.array([[plain, delayed]]))


@pytest.mark.filterwarnings("error")
def test_angle_at_which_no_start_arrives_has_no_slowdown(partly):
    assert partly.numbers()["sweeps"][0]["slowdowns"] == [2.0, None, 4.0]


def test_correlation_is_of_the_other_angles(partly):
    assert partly.correlation(0, 0) == pytest.approx(1.0)
    assert "nan" not in _sweep_caption(partly)


def test_sweep_without_slowdowns_says_so(partly):
    nothing = partly._replace(updates=np.full_like(partly.updates, np.inf))
    assert "tau 1: none measured" in _sweep_caption(nothing)
