"""How long the cells of a sweep will still take."""

import json

import pytest

from brx.config.loading import preset_with
from brx.files import write_json
from brx.sweep.choice import choices_and_repetitions
from brx.sweep.remaining_time import calibrate, remaining_time
from brx.sweep.spec import Sweep
from brx.train.build import assemble
from tests.sweep.helpers import end, write_sweep


def cells_of(sweep):
    """The cells of the grid, and the repetitions that the choice asks for."""
    _, repetitions = choices_and_repetitions(sweep, sweep.cells)
    return [*sweep.cells, *repetitions]


def time_left(sweep, **options):
    """In seconds, with two cells at a time, and without a calibration."""
    return remaining_time(cells_of(sweep), 2, pytest.fail, **options).seconds


def test_time_left_includes_repetitions(half_done):
    # Two cells of the grid and two repetitions, 50 s each
    assert time_left(half_done) == pytest.approx(100.0)


def test_time_left_falls_with_a_finished_repetition(half_done):
    end(cells_of(half_done)[-1], 50.0)
    assert time_left(half_done) == pytest.approx(75.0)


@pytest.mark.parametrize(
    "damage", [{"iteration": None}, {"iteration": 0}, {"training_seconds": "long"}]
)
def test_damaged_summary_gives_no_pace(damage, half_done):
    summary = half_done.cells[0].folder / "summary.json"
    content = json.loads(summary.read_text()) | damage
    if content["iteration"] is None:
        del content["iteration"]
    write_json(summary, content)
    assert time_left(half_done) > 0.0


@pytest.mark.parametrize(("retry_failed", "expected"), [(False, 75.0), (True, 100.0)])
def test_time_left_has_failed_cells_on_request(retry_failed, expected, half_done):
    end(half_done.cells[2], val_loss=None)
    assert time_left(half_done, retry_failed=retry_failed) == pytest.approx(expected)


def test_estimate_says_that_finished_cells_are_its_basis(half_done):
    estimate = remaining_time(cells_of(half_done), 2, pytest.fail)
    assert "by the times of finished cells" in estimate.basis


@pytest.mark.parametrize(("load", "is_told"), [(0.1, False), (3.9, True)])
def test_estimate_on_a_busy_machine_says_so(load, is_told, tmp_path, monkeypatch):
    monkeypatch.setattr("brx.sweep.remaining_time.calibrate", lambda config: 0.1)
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    cells = Sweep.load(write_sweep(tmp_path)).cells
    estimate = remaining_time(cells, 1, str)
    assert "one cell alone" in estimate.basis
    assert (f"load {load}" in estimate.basis) == is_told


def test_calibration_ends_when_its_time_is_up(tmp_path, monkeypatch):
    asked = []

    def counted(config, micro_batches, **options):
        def noting(iteration):
            asked.append(iteration)
            return micro_batches(iteration)

        return assemble(config, noting, **options)

    monkeypatch.setattr("brx.sweep.remaining_time.assemble", counted)
    monkeypatch.setattr("brx.sweep.remaining_time.MOST_CALIBRATION_S", 0.0)
    assert calibrate(Sweep.load(write_sweep(tmp_path)).cells[0].config) > 0.0
    assert asked == [1]


def test_estimate_compiles_nothing(monkeypatch):
    monkeypatch.setenv("CXX", "/nonexistent")
    settings = {"runtime.compile": "whole", "model.blocks": 2, "pipeline.stages": 2}
    assert calibrate(preset_with("laptop", settings)) > 0
