"""Power iteration against eigh, and the tracked updates against the run's own checkpoints."""

import shutil

import pytest
import torch

from brx.cli.main import main
from brx.curvature import oscillation
from brx.curvature.checkpoints import load_checkpoint
from brx.errors import RunError, UserError
from brx.methods import trajectory_version
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
    value, vector, residual, num_iterations = oscillation.dominant_eigenvector(
        product_with(matrix), start, 1e-6, 1000
    )
    assert value == pytest.approx(largest)
    assert abs(vector["x"] @ basis[:, 7]).item() == pytest.approx(1)
    actual = (matrix @ vector["x"] - value * vector["x"]).norm() / abs(value)
    assert residual <= 1e-6
    assert residual == pytest.approx(actual.item(), abs=1e-7)
    assert num_iterations < 100
    # It stops at its limit, and refuses a Hessian of zero.
    assert oscillation.dominant_eigenvector(product_with(matrix), start, 1e-12, 5)[3] == 5
    with pytest.raises(RunError, match="no dominant direction"):
        oscillation.dominant_eigenvector(
            product_with(torch.zeros(3, 3)), {"x": torch.ones(3)}, 1e-3, 10
        )


@pytest.mark.parametrize("method", ["pipedream", "basis-rotation"])
def test_tracked_updates_are_those_of_the_run(runs, method):
    before, after = (load_checkpoint(runs[method], iteration) for iteration in (14, 21))
    one = unflat(flat(random_like(before.parameters, 1)), before.parameters)
    one = {name: value / flat(one).norm() for name, value in one.items()}
    other = oscillation.orthogonal_to(one, random_like(before.parameters, 2))
    assert (flat(one) @ flat(other)).item() == pytest.approx(0, abs=1e-6)
    assert flat(other).norm().item() == pytest.approx(1)
    tracks = oscillation.track_updates(before, [one, other], 7)
    moved = flat(after.parameters) - flat(before.parameters)
    for track, direction in zip(tracks, (one, other), strict=True):
        assert len(track.projections) == 7
        assert sum(track.projections) == pytest.approx((moved @ flat(direction)).item(), rel=1e-3)
    (track,) = oscillation.track_updates(
        before, [unflat(moved / moved.norm(), before.parameters)], 7
    )
    assert 0.5 < track.share <= 1 + 1e-6  # of the motion, along its own direction


def test_numbers_of_a_track():
    track = oscillation.Track.of([1.0, -1.0, -2.0, 2.0], 20.0)
    assert (track.share, track.sign_changes, track.variance) == pytest.approx((0.5, 2 / 3, 2.5))


def test_measured_and_drawn_and_shown_again_without_checkpoints(runs, tmp_path, capsys):
    run = shutil.copytree(runs["pipedream"], tmp_path / "run")

    def shown(*arguments, expected=0):
        assert main(["oscillation", *map(str, arguments)]) == expected
        streams = capsys.readouterr()
        return " ".join((streams.err if expected else streams.out).split())

    assert "has no measured oscillation; run `brx oscillation" in shown(
        run, "--measured", expected=2
    )
    paths = [run / "checkpoints" / name for name in ("00000007", "00000014", "00000021")]
    quick = ["--iterations", "9", "--batches", "1", "--power-iterations", "3"]
    assert shown(*paths[:2], *quick, "--out", tmp_path / "figure").count("dominant") == 2
    results = oscillation.Oscillation.all_of(run)
    assert [result.iteration for result in results] == [7, 14]
    assert oscillation.representative(results) == results[1]
    assert (results[1].num_stages, len(results[1].dominant.projections)) == (8, 9)
    assert all(
        f"variance {one.dominant.variance:.3g}" in (tmp_path / "figure.json").read_text()
        for one in results
    )
    shutil.rmtree(run / "checkpoints")
    for place, count in ((run, 2), (run.parent, 2), (paths[0], 1)):
        assert shown(place, "--measured").count("dominant") == count
    assert "00000021: has no measured oscillation" in shown(paths[2], "--measured", expected=2)
    assert "is a checkpoint already" in shown(paths[0], "--checkpoint", "14", expected=2)
    shown(run, "--iterations", "1", expected=2)
    (run / "analysis" / "oscillation-00000014.json").write_text("{}")
    with pytest.raises(UserError, match=r"not a result of oscillation \(run: field required\)"):
        oscillation.Oscillation.all_of(run)


def test_checkpoints_too_late_or_not_midway_or_of_other_numerics(run, monkeypatch):
    trained = trajectory_version.TRAJECTORY_VERSION
    monkeypatch.setattr(trajectory_version, "TRAJECTORY_VERSION", 99)
    refusal = f"14: trained at trajectory version {trained}, this brx computes version 99"
    with pytest.raises(UserError, match=refusal):
        oscillation.measure_oscillation(run, num_iterations=5)
    monkeypatch.undo()
    with pytest.raises(UserError, match="14: 100 iterations from here pass the run's last one, 30"):
        oscillation.measure_oscillation(run)  # at the checkpoint nearest to the middle
    for path in (run / "checkpoints").iterdir():
        if int(path.name) < 28:
            shutil.rmtree(path)
    with pytest.raises(
        UserError, match=r"no checkpoint near the middle of its 30 iterations.*28, 30"
    ):
        oscillation.measure_oscillation(run)
