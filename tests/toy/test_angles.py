"""The sweep over angles and delays: norms in closed form, and the cost of misalignment."""

import math

import numpy as np
import pytest

from brx.toy.angles import SweepConfig, draw_sweep, run_sweep
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
