"""The effective delay in closed form, its error by simulation, and the command."""

import json
import math
import shutil

import numpy as np
import pytest

from brx.cli.main import main
from brx.curvature.effective_delay import effective_delay, slowdown_points, uniform_effective_delay
from brx.curvature.norm_measurement import measure_runs
from brx.curvature.norm_result import NormSettings
from brx.errors import UserError
from brx.pipeline.delay import StageDelay
from brx.runs.frames import load
from brx.runs.metrics import read_metrics
from tests.curvature.helpers import finished_run, norm_result


def result_with(squares, covariance=None):
    """A measurement of a model of four blocks with these sums of squared row norms."""
    return norm_result("run", "pipedream", 4, 10, "original", 6, 6.0, squares, covariance)


@pytest.mark.parametrize(
    ("squares", "stages", "expected"),
    [
        # One stage of four with all of the curvature: tau' is its delay.
        ([0, 5, 0, 0, 0, 0], 4, 3),
        ([7, 0, 0, 0, 0, 0], 4, 3),
        ([0, 0, 5, 0, 0, 0], 4, 2),
        ([0, 0, 0, 0, 2, 3], 4, 0),
        # sqrt((9 (1 + 2) + 4 3 + 1 4 + 0) / 21)
        ([1, 2, 3, 4, 5, 6], 4, math.sqrt(43 / 21)),
        # Two stages: blocks 0 and 1 with the embedding, blocks 2 and 3 with the head.
        ([1, 2, 3, 4, 5, 6], 2, math.sqrt(6 / 21)),
        ([1, 2, 3, 4, 5, 6], 1, 0),
        # Three stages of one, one and two blocks.
        ([1, 2, 3, 4, 5, 6], 3, math.sqrt((4 * 3 + 3) / 21)),
    ],
)
def test_closed_form(squares, stages, expected):
    assert effective_delay(result_with(squares), stages).delay == pytest.approx(expected)


def test_profiles_and_accumulation_count_in_updates():
    delays = [StageDelay(tau, 2) for tau in (0, 6, 0, 2)]  # 0, 3, 0 and 1 updates
    # sqrt((9 3 + 1 (5 + 6)) / 21)
    assert effective_delay(result_with([1, 2, 3, 4, 5, 6]), 4, delays).delay == pytest.approx(math.sqrt(38 / 21))


def test_equal_stages_give_the_uniform_delay():
    assert effective_delay(result_with([0, 1, 1, 1, 1, 0]), 4).delay == pytest.approx(uniform_effective_delay(4))
    assert uniform_effective_delay(4) == pytest.approx(math.sqrt((9 + 4 + 1) / 4))


def test_standard_error_is_that_of_noisy_sums():
    generator = np.random.default_rng(0)
    squares = np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    factor = 0.02 * generator.standard_normal((6, 6))
    noisy = [
        effective_delay(result_with(squares + factor @ generator.standard_normal(6)), 4).delay for _ in range(2000)
    ]
    found = effective_delay(result_with(squares, (factor @ factor.T).tolist()), 4)
    assert found.standard_error == pytest.approx(np.std(noisy), rel=0.1)
    assert found.interval[0] < found.delay < found.interval[1]


def test_more_stages_than_blocks():
    with pytest.raises(UserError, match="--stages 5: must be from 1 to the model's 4 blocks"):
        effective_delay(result_with([1] * 6), 5)


@pytest.fixture(scope="module")
def delayed_and_not(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slowdown")
    runs = [finished_run(folder, f"p{stages}", f"pipeline.stages={stages}") for stages in (1, 4)]
    measure_runs([runs[1]], ["original"], NormSettings(vectors=5, batches_per_vector=2))
    return runs


def test_slowdown_is_against_the_run_without_delay(delayed_and_not, tmp_path):
    steady = np.linspace(5.0, 2.0, 30)
    copies = []
    for path, losses in zip(delayed_and_not, (np.concatenate([steady[::2], [1.9] * 15]), steady), strict=True):
        copies.append(shutil.copytree(path, tmp_path / path.name))
        records = [record for record in read_metrics(path / "metrics.jsonl") if "train_loss" in record]
        lines = [json.dumps({**record, "train_loss": loss}) for record, loss in zip(records, losses, strict=True)]
        (copies[-1] / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    points = slowdown_points(load(copies[::-1]))
    assert [point.label for point in points] == ["P = 1", "P = 4"]
    assert points[0].slowdown == 1.0
    assert points[1].slowdown == pytest.approx(2.0, rel=0.1)
    assert points[0].delay.delay == 0.0
    assert 0 < points[1].delay.delay < 3
    assert slowdown_points(load(copies[1:])) == []  # no run without delay


def test_command(delayed_and_not, tmp_path, capsys):
    paths = [str(path) for path in delayed_and_not]
    assert main(["effective-delay", *paths, "--out", str(tmp_path / "figure")]) == 0
    shown = capsys.readouterr().out
    assert "P = 4" in shown
    assert "slowdown" in shown
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"figure.{form}" for form in ("pdf", "png", "svg", "txt")
    ]
    assert "tau'" in (tmp_path / "figure.txt").read_text()


def test_run_without_a_measurement(runs, tmp_path, capsys):
    copy = shutil.copytree(runs["pipedream"], tmp_path / "run", ignore=shutil.ignore_patterns("analysis"))
    assert main(["effective-delay", str(copy)]) == 2
    assert f"run `brx hessian-norm {copy}` first" in capsys.readouterr().err
    assert main(["effective-delay", str(tmp_path / "nowhere")]) == 2
    assert "nowhere: no such folder" in capsys.readouterr().err


def test_runs_under_way_have_no_slowdown(delayed_and_not, tmp_path):
    copies = [shutil.copytree(path, tmp_path / path.name) for path in delayed_and_not]
    summary = json.loads((copies[0] / "summary.json").read_text())
    (copies[0] / "summary.json").write_text(json.dumps({**summary, "status": "interrupted"}))
    assert slowdown_points(load(copies)) == []  # the one without delay is not finished
    (copies[0] / "summary.json").write_text(json.dumps(summary))
    (copies[1] / "summary.json").write_text(json.dumps({**summary, "status": "diverged"}))
    assert [point.slowdown for point in slowdown_points(load(copies))] == [1.0, None]
