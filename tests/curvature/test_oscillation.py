"""Power iteration against eigh, and the tracked updates against the run's own checkpoints."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from brx.cli.main import main
from brx.curvature.checkpoints import load_checkpoint
from brx.curvature.oscillation import (
    Track,
    dominant_eigenvector,
    measure_oscillation,
    measured_oscillations,
    orthogonal_to,
    representative,
    track_updates,
)
from brx.errors import RunError, UserError
from tests.curvature.helpers import flat, random_like, unflat


def product_with(matrix):
    return lambda vector: {"x": matrix @ vector["x"]}


@pytest.mark.parametrize("largest", [10.0, -10.0])
def test_dominant_eigenvector_is_that_of_eigh(largest):
    generator = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(20, 20, generator=generator, dtype=torch.float64)).Q
    values = torch.linspace(-5, 5, 20, dtype=torch.float64)
    values[7] = largest
    matrix = basis @ torch.diag(values) @ basis.T
    start = {"x": torch.randn(20, generator=generator, dtype=torch.float64)}
    pair = dominant_eigenvector(product_with(matrix), start, 1e-6, 1000)
    assert pair.value == pytest.approx(largest)
    assert abs(pair.vector["x"] @ basis[:, 7]).item() == pytest.approx(1)
    assert pair.residual <= 1e-6
    actual = (matrix @ pair.vector["x"] - pair.value * pair.vector["x"]).norm() / abs(pair.value)
    assert pair.residual == pytest.approx(actual.item(), abs=1e-7)
    assert pair.num_iterations < 100


def test_power_iteration_stops_at_its_limit_and_refuses_a_zero_hessian():
    matrix = torch.diag(torch.tensor([1.0, 0.999], dtype=torch.float64))
    pair = dominant_eigenvector(product_with(matrix), {"x": torch.ones(2, dtype=torch.float64)}, 1e-12, 5)
    assert pair.num_iterations == 5
    assert pair.residual > 1e-12
    with pytest.raises(RunError, match="no dominant direction"):
        dominant_eigenvector(product_with(torch.zeros(3, 3)), {"x": torch.ones(3)}, 1e-3, 10)


def test_orthogonal_to():
    one = {"a": torch.tensor([0.6, 0.8]), "b": torch.zeros(1)}
    other = orthogonal_to(one, {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0])})
    assert (flat(one) @ flat(other)).item() == pytest.approx(0, abs=1e-6)
    assert flat(other).norm().item() == pytest.approx(1)


@pytest.mark.parametrize("method", ["pipedream", "basis-rotation"])
def test_tracked_updates_are_those_of_the_run(runs, method):
    before, after = (load_checkpoint(runs[method], iteration) for iteration in (14, 21))
    directions = [random_like(before.parameters, seed) for seed in (1, 2)]
    tracks = track_updates(before, directions, 7)
    for track, direction in zip(tracks, directions, strict=True):
        moved = flat(after.parameters) - flat(before.parameters)
        assert len(track.projections) == 7
        assert sum(track.projections) == pytest.approx((moved @ flat(direction)).item(), rel=1e-3)


def test_share_of_the_motion_along_its_own_direction_is_all_of_it(runs):
    before, after = (load_checkpoint(runs["pipedream"], iteration) for iteration in (28, 30))
    moved = flat(after.parameters) - flat(before.parameters)
    along = unflat(moved / moved.norm(), before.parameters)
    track = track_updates(before, [along], 2)[0]
    assert 0.9 < track.share <= 1 + 1e-6  # two updates that are nearly parallel: momentum


def test_numbers_of_a_track():
    track = Track(projections=[1.0, -1.0, -2.0, 2.0], share=0.5)
    assert track.sign_changes == pytest.approx(2 / 3)
    assert track.variance == pytest.approx(2.5)


@pytest.fixture
def run(runs, tmp_path):
    return Path(shutil.copytree(runs["pipedream"], tmp_path / "run"))


def test_what_was_measured_is_drawn_without_checkpoints(run, tmp_path, capsys):
    assert main(["oscillation", str(run), "--measured"]) == 2
    assert f"has no measured oscillation; run `brx oscillation {run}` first" in capsys.readouterr().err
    found = measure_oscillation(run, num_iterations=9, num_batches=1, max_power_iterations=3)
    shutil.rmtree(run / "checkpoints")
    (run.parent / "notes.md").write_text("beside the runs\n")
    assert main(["oscillation", str(run.parent), "--measured"]) == 0  # the folder of runs
    shutil.move(run / "analysis", tmp_path / "analysis")
    assert main(["oscillation", str(run.parent), "--measured"]) == 2
    assert f"{run.parent}: of no run in it has oscillation been measured" in capsys.readouterr().err
    shutil.move(tmp_path / "analysis", run / "analysis")
    assert measured_oscillations(run) == [found]
    assert found.iteration == 14  # the checkpoint nearest to the middle
    assert len(found.dominant.projections) == 9
    assert main(["oscillation", str(run), "--measured", "--out", str(tmp_path / "figure")]) == 0
    assert (tmp_path / "figure.png").stat().st_size > 0
    (run / "analysis" / "oscillation-00000014.json").write_text("{}")
    with pytest.raises(UserError, match=r"not a result of oscillation \(run: field required\)"):
        measured_oscillations(run)


def test_several_checkpoints_are_measured_and_drawn_together(run, tmp_path, capsys):
    paths = [str(run / "checkpoints" / name) for name in ("00000007", "00000014")]
    quick = ["--iterations", "9", "--batches", "1", "--power-iterations", "3"]
    assert main(["oscillation", *paths, *quick, "--out", str(tmp_path / "figure")]) == 0
    assert "after 3 power iterations" in " ".join(capsys.readouterr().err.split())
    results = measured_oscillations(run)
    content = json.loads((run / "analysis" / "oscillation-00000014.json").read_text())
    assert content["dominant"]["variance"] == results[1].dominant.variance > 0
    assert [result.iteration for result in results] == [7, 14]
    assert measured_oscillations(run, 7) == results[:1]
    assert representative(results) == results[1]
    caption = (tmp_path / "figure.txt").read_text()
    for result in results:
        assert f"iteration {result.iteration}: eigenvalue {result.eigenvalue:.4g}" in caption
        assert f"variance {result.dominant.variance:.3g}" in caption
    shutil.rmtree(run / "checkpoints")
    capsys.readouterr()
    assert main(["oscillation", str(run), "--measured"]) == 0
    assert capsys.readouterr().out.count("dominant") == 2
    assert main(["oscillation", paths[0], "--measured"]) == 0
    assert capsys.readouterr().out.count("dominant") == 1
    assert main(["oscillation", str(run / "checkpoints" / "00000021"), "--measured"]) == 2
    assert "00000021: has no measured oscillation" in capsys.readouterr().err
    assert main(["oscillation", paths[0], "--checkpoint", "14"]) == 2
    assert "is a checkpoint already" in capsys.readouterr().err
    assert main(["oscillation", str(run), "--iterations", "1"]) == 2


def test_checkpoints_too_late_or_not_midway(run):
    with pytest.raises(UserError, match="100 iterations from here pass the run's last one, 30"):
        measure_oscillation(run)
    for path in (run / "checkpoints").iterdir():
        if int(path.name) < 28:
            shutil.rmtree(path)
    with pytest.raises(UserError, match=r"no checkpoint near the middle of its 30 iterations.*28, 30"):
        measure_oscillation(run)
