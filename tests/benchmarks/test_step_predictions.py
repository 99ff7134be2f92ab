"""What packet D predicts for a variant of the step, against counts by hand, and what it keeps."""

import argparse
import json

import pytest

from benchmarks.gpu.step import (
    CEILINGS,
    Ceilings,
    Measured,
    predicted_seconds,
    read_ceilings,
    write,
)

ONE = Ceilings(copy=1.0, fp32=1.0, tf32=8.0, bf16=16.0)
"""One byte, and one fp32 operation, per second."""
m, n = 4, 6
ELEMENTWISE = 60 * 4 * m * n
COMPILED = 13 * 4 * m * n
ROTATIONS = 4 * m * n * (m + n)  # of the gradient and of the update
COVARIANCES = 2 * m * n * (m + n)
REFRESH = (ROTATIONS + 17 * (m**3 + n**3)) / 10


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, ELEMENTWISE + ROTATIONS + COVARIANCES + REFRESH),
        ({"compiled": True}, COMPILED + ROTATIONS + COVARIANCES + REFRESH),
        ({"rotation_precision": "tf32"}, ELEMENTWISE + ROTATIONS / 8 + COVARIANCES + REFRESH),
        ({"covariance_precision": "tf32"}, ELEMENTWISE + ROTATIONS + COVARIANCES / 8 + REFRESH),
        ({"covariance": "interval"}, ELEMENTWISE + ROTATIONS + COVARIANCES / 10 + REFRESH),
        (
            {"rotation_precision": "bf16"},
            ELEMENTWISE
            + ROTATIONS * 3 / 16
            + 2 * 18 * (2 * m * n + m**2 + n**2)
            + COVARIANCES
            + REFRESH,
        ),
        (
            {"geometry": "unilateral"},
            ELEMENTWISE + 6 * m**2 * n + (4 * m**2 * n + 17 * m**3) / 10,
        ),
    ],
)
def test_prediction_is_that_by_hand(arguments, expected):
    assert predicted_seconds(arguments, [(m, n)], ONE) == pytest.approx(expected)


def test_committed_ceilings_are_read():
    ceilings = read_ceilings(CEILINGS)
    assert 1e12 < ceilings.copy < ceilings.fp32 < ceilings.tf32 < ceilings.bf16


def test_seven_tenths_of_the_prediction_are_kept(tmp_path):
    measured = {
        "base": Measured(10.0, 10.0, predicted=8.0, error=0.0),
        "good": Measured(7.2, 7.2, predicted=4.0, error=0.0),
        "poor": Measured(7.3, 7.3, predicted=4.0, error=0.0),
        "dearer": Measured(7.3, 7.3, predicted=9.0, error=0.0),
    }
    write(measured, 1, argparse.Namespace(steps=10, out=tmp_path))
    content = json.loads((tmp_path / "step.json").read_text())
    kept = {row[0]: row[content["columns"].index("keep")] for row in content["rows"]}
    assert kept == {"base": "", "good": "yes", "poor": "no", "dearer": ""}
