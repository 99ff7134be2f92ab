"""What the files of the toy problems say."""

import json

import pytest

from brx.errors import UserError
from brx.paper import measured_evidence as toys
from brx.paper.evidence import NotTriedError


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.setattr(toys, "TOYS", tmp_path)
    return lambda name, **content: (tmp_path / f"{name}.json").write_text(json.dumps(content))


def test_quadratic(write):
    with pytest.raises(NotTriedError, match=r"quadratic\.json is not there yet"):
        toys.delay_hurts_where_misaligned(None)
    rows = [
        {"optimizer": optimizer, "aligned": aligned, "slowdown": 1.0}
        for optimizer in ("Adam", "AdaSGD")
        for aligned in (True, False)
    ]
    write("quadratic", slowdowns=rows)
    assert not toys.delay_hurts_where_misaligned(None).holds
    rows[1]["slowdown"] = 3.0
    write("quadratic", slowdowns=rows)
    assert toys.delay_hurts_where_misaligned(None).holds
    rows[0]["slowdown"] = 2.0  # aligned
    write("quadratic", slowdowns=rows)
    assert not toys.delay_hurts_where_misaligned(None).holds


@pytest.mark.parametrize(
    ("arrived", "spearman", "p_value", "holds"),
    [(True, 0.5, 1e-9, True), (False, 0.9, 0.0, False), (True, -0.5, 1e-9, False), (True, 0.1, 0.3, False)],
)
def test_spiral(arrived, spearman, p_value, holds, write):
    write("spiral", arrived=arrived, spearman=spearman, p_value=p_value)
    write("spiral-small-steps", arrived=True, spearman=0.5, p_value=0.0)
    judged = toys.misalignment_slows_on_the_spiral(None)
    assert judged.holds == holds
    assert ("stops on the way" in judged.text) != arrived


def test_what_never_arrives_is_infinitely_slow(write, tmp_path):
    rows = [
        {"optimizer": "Adam", "aligned": aligned, "slowdown": 1.0 if aligned else None} for aligned in (True, False)
    ]
    write("quadratic", slowdowns=rows)
    judged = toys.delay_hurts_where_misaligned(None)
    assert judged.holds
    assert judged.text.endswith("misaligned inf")
    for name in ("spiral", "spiral-small-steps"):
        write(name, arrived=True, spearman=None, p_value=None)
    assert not toys.misalignment_slows_on_the_spiral(None).holds
    (tmp_path / "spiral.json").write_text("[]")
    with pytest.raises(UserError, match=r"spiral\.json"):
        toys.misalignment_slows_on_the_spiral(None)
    (tmp_path / "spiral.json").write_text("{")
    with pytest.raises(UserError, match=r"spiral\.json: not readable"):
        toys.misalignment_slows_on_the_spiral(None)
