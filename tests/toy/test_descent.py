"""Adam and AdaSGD by hand; Adam against torch's is in test_quadratic.py."""

import numpy as np
import pytest

from brx.toy.descent import DelayedAdam


def test_adasgd_by_hand():
    gradients = iter([np.array([1.0, 7.0]), np.array([2.0, -2.0])])
    adasgd = DelayedAdam(lambda _: next(gradients), 1.0, 0.5, 0.75, [np.zeros(2)], one_size=True)
    # The mean squares are 25 and 4, so v is 25/4, then 3/4 25/4 + 1/4 4.
    # m is g/2, then g1/4 + g2/2.
    first = np.array([1.0, 7.0]) / 5.0
    np.testing.assert_allclose(adasgd.update(), -first, rtol=1e-7)
    second_root = ((0.75 * 25 / 4 + 1.0) / (1 - 0.75**2)) ** 0.5
    second = np.array([1.25, 0.75]) / 0.75 / second_root
    np.testing.assert_allclose(adasgd.update(), -first - second, rtol=1e-7)


def test_gradient_is_of_the_delayed_point():
    asked = []

    def gradient(point):
        asked.append(float(point[0]))
        return np.ones(1)

    adam = DelayedAdam(gradient, 1.0, 0.0, 0.0, [np.zeros(1)] * 3)
    for _ in range(5):
        adam.update()
    # Every step is 1 to the left; with a delay of 2 the first three gradients are of the start.
    assert asked == pytest.approx([0, 0, 0, -1, -2])
