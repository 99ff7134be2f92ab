"""The panels of the study, from made-up final losses."""

import numpy as np
import pytest

from brx.paper.causes.arms import (
    DEEPEST,
    LION,
    MOMENTA,
    ONE_UPDATE,
    ROTATED_LION,
    SCION,
    with_momentum,
)
from brx.paper.causes.figure import PANELS, draw_causes
from brx.paper.causes.study import Study
from brx.plot.style import new_figure
from tests.paper.causes.runs import NOISE, write_arm, write_bases


def test_panels_without_runs_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr("brx.plot.style.DPI", 30)
    write_bases(tmp_path, (0.05, 0.1, 0.15, 0.2, 0.25))
    written = draw_causes(tmp_path, tmp_path / "figure")
    caption = written[3].read_text()
    assert (
        "Left out, for want of runs: geometry, momentum at one update, error feedback, momentum "
        "under 32 stages, corrections."
    ) in caption


@pytest.fixture
def axes():
    with new_figure() as figure:
        yield figure.subplots()


def test_points_are_the_mean_costs(tmp_path, axes):
    write_bases(tmp_path, (0.05, 0.1, 0.15, 0.2, 0.25))
    PANELS[0].draw(Study.load(tmp_path), axes)
    of_bases, _of_adamw = axes.containers
    shift = np.mean(NOISE)
    assert of_bases.lines[0].get_ydata() == pytest.approx(
        [cost + shift for cost in (0.05, 0.1, 0.15, 0.2, 0.25)]
    )


def test_momentum_title_has_the_change(tmp_path, axes):
    for value, cost in zip(MOMENTA, (0.3, 0.2, 0.1), strict=True):
        write_arm(tmp_path, with_momentum("muon", value), {ONE_UPDATE: cost})
    PANELS[2].draw(Study.load(tmp_path), axes)
    assert axes.get_title().endswith("Muon -0.20")


def test_momentum_panel_needs_runs_under_its_delay(tmp_path):
    write_arm(tmp_path, with_momentum("muon", 0.9), {ONE_UPDATE: 0.1})
    study = Study.load(tmp_path)
    assert PANELS[2].has_runs(study)
    assert not PANELS[4].has_runs(study)


def test_title_has_the_least_and_the_largest_cost(tmp_path, axes):
    write_arm(tmp_path, LION, {DEEPEST: 0.3})
    write_arm(tmp_path, ROTATED_LION, {DEEPEST: 0.1})
    write_arm(tmp_path, SCION, {DEEPEST: 0.2})
    PANELS[1].draw(Study.load(tmp_path), axes)
    assert axes.get_title().endswith("0.10 (Lion in the eigenbasis) to\n0.30 nats (Lion)")
