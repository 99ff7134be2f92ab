"""Power iteration against eigh, and the tracked updates against the run's own checkpoints."""

import shutil
from pathlib import Path

import pytest
import torch
import yaml

from brx.cli.main import main
from brx.curvature import oscillation
from brx.curvature.checkpoints import load_checkpoint
from brx.errors import RunError, UserError
from brx.methods import trajectory_version
from tests.curvature.helpers import flat, random_like, unflat


def product_with(matrix):
    return lambda vector: {"x": matrix @ vector["x"]}


@pytest.fixture(params=[10.0, -10.0], ids=["positive", "negative"])
def problem(request):
    """A symmetric matrix, its dominant eigenvalue and eigenvector, and a start."""
    generator = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(20, 20, generator=generator, dtype=torch.float64)).Q
    values = torch.linspace(-5, 5, 20, dtype=torch.float64)
    values[7] = request.param
    matrix = basis @ torch.diag(values) @ basis.T
    start = {"x": torch.randn(20, generator=generator, dtype=torch.float64)}
    return matrix, request.param, basis[:, 7], start


def test_dominant_eigenvector_is_found(problem):
    matrix, value, vector, start = problem
    found = oscillation.dominant_eigenvector(product_with(matrix), start, 1e-6, 1000)
    assert found.value == pytest.approx(value)
    assert abs(found.vector["x"] @ vector).item() == pytest.approx(1)


def test_residual_is_the_actual_one(problem):
    matrix, _, _, start = problem
    value, vector, residual, _ = oscillation.dominant_eigenvector(
        product_with(matrix), start, 1e-6, 1000
    )
    actual = (matrix @ vector["x"] - value * vector["x"]).norm() / abs(value)
    assert residual == pytest.approx(actual.item(), abs=1e-7)


def test_power_iteration_stops_at_its_tolerance(problem):
    matrix, _, _, start = problem
    found = oscillation.dominant_eigenvector(product_with(matrix), start, 1e-6, 1000)
    assert found.residual <= 1e-6
    assert found.num_iterations < 100


def test_power_iteration_stops_at_its_limit(problem):
    matrix, _, _, start = problem
    found = oscillation.dominant_eigenvector(product_with(matrix), start, 1e-12, 5)
    assert found.num_iterations == 5


def test_hessian_of_zero_has_no_dominant_direction():
    zero = product_with(torch.zeros(3, 3))
    with pytest.raises(RunError, match="no dominant direction"):
        oscillation.dominant_eigenvector(zero, {"x": torch.ones(3)}, 1e-3, 10)


@pytest.fixture
def directions(runs):
    """Two orthogonal directions of norm 1."""
    parameters = load_checkpoint(runs["pipedream"], 14).parameters
    vector = flat(random_like(parameters, 1))
    one = unflat(vector / vector.norm(), parameters)
    return one, oscillation.orthogonal_to(one, random_like(parameters, 2))


def test_second_direction_is_orthogonal(directions):
    one, other = map(flat, directions)
    assert (one @ other).item() == pytest.approx(0, abs=1e-6)


def test_second_direction_has_norm_one(directions):
    _, other = directions
    assert flat(other).norm().item() == pytest.approx(1)


@pytest.mark.parametrize("method", ["pipedream", "basis-rotation"])
def test_tracked_updates_are_the_runs(runs, directions, method):
    before = load_checkpoint(runs[method], 14)
    after = load_checkpoint(runs[method], 21)
    moved = flat(after.parameters) - flat(before.parameters)
    tracks = oscillation.track_updates(before, list(directions), 7)
    for track, direction in zip(tracks, directions, strict=True):
        assert len(track.projections) == 7
        assert sum(track.projections) == pytest.approx((moved @ flat(direction)).item(), rel=1e-3)


def test_motion_is_mostly_along_its_own_direction(runs):
    before = load_checkpoint(runs["pipedream"], 14)
    after = load_checkpoint(runs["pipedream"], 21)
    moved = flat(after.parameters) - flat(before.parameters)
    own = unflat(moved / moved.norm(), before.parameters)
    (track,) = oscillation.track_updates(before, [own], 7)
    assert 0.5 < track.share <= 1 + 1e-6


def test_numbers_of_a_track():
    track = oscillation.Track.of([1.0, -1.0, -2.0, 2.0], 20.0)
    assert (track.share, track.sign_changes, track.variance) == pytest.approx((0.5, 2 / 3, 2.5))


# The command.


def printed(capsys, *arguments):
    """The output of a command that ends well."""
    assert main(["oscillation", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def refusal(capsys, *arguments):
    """The message of a command that is refused, in one line."""
    assert main(["oscillation", *map(str, arguments)]) == 2
    return " ".join(capsys.readouterr().err.split())


QUICK = ["--iterations", "9", "--batches", "1", "--power-iterations", "3"]
QUICK_NAME = "-iterations-9-batches-1-power-iterations-3"


@pytest.fixture(scope="module")
def measured(runs, tmp_path_factory):
    """A run that was measured at iterations 7 and 14, and drawn. Read only."""
    folder = tmp_path_factory.mktemp("oscillation")
    run = Path(shutil.copytree(runs["pipedream"], folder / "run"))
    paths = [str(run / "checkpoints" / name) for name in ("00000007", "00000014")]
    assert main(["oscillation", *paths, *QUICK, "--out", str(folder / "figure")]) == 0
    return run


@pytest.fixture(scope="module")
def results(measured):
    return oscillation.Oscillation.all_of(measured)


def test_every_named_checkpoint_is_measured(results):
    assert [result.iteration for result in results] == [7, 14]


def test_middle_checkpoint_is_the_representative(results):
    assert oscillation.representative(results) == results[1]


def test_result_has_the_depth_of_the_delays(results):
    assert results[1].num_stages == 8


def test_result_has_a_projection_per_iteration(results):
    assert len(results[1].dominant.projections) == 9


def test_figure_has_the_variances_in_its_details(measured, results):
    details = (measured.parent / "figure.json").read_text()
    for result in results:
        assert f"variance {result.dominant.variance:.3g}" in details


@pytest.mark.parametrize(("place", "count"), [("", 2), ("..", 2), ("checkpoints/00000007", 1)])
def test_measurements_are_shown_again(measured, capsys, place, count):
    assert printed(capsys, measured / place, "--measured").count("dominant") == count


def test_measurements_are_shown_without_checkpoints(measured, tmp_path, capsys):
    run = Path(shutil.copytree(measured, tmp_path / "run"))
    shutil.rmtree(run / "checkpoints")
    assert printed(capsys, run, "--measured").count("dominant") == 2


@pytest.fixture
def measured_twice(measured, tmp_path):
    """A copy of the measured run, with a second measurement at iteration 7, of another seed."""
    run = Path(shutil.copytree(measured, tmp_path / "run"))
    checkpoint = str(run / "checkpoints" / "00000007")
    assert main(["oscillation", checkpoint, *QUICK, "--seed", "4"]) == 0
    return run


def test_other_settings_leave_the_first_measurement(measured_twice, measured, results):
    kept = oscillation.Oscillation.all_of(measured_twice, 7)
    assert results[0] in kept
    assert sorted(result.settings.seed for result in kept) == [0, 4]


def test_table_tells_settings_apart(measured_twice):
    results = oscillation.oscillations_in([measured_twice], 7)
    settings = oscillation.oscillation_table(results)["settings"]
    assert settings.str.contains("seed-4").sum() == 2  # one row per direction


def test_figure_of_two_settings_is_refused(measured_twice, tmp_path, capsys):
    told = refusal(capsys, measured_twice, "--measured", "--out", tmp_path / "figure")
    assert "a figure cannot compare them" in told


def test_figure_of_two_rates_is_refused(measured, tmp_path, capsys):
    for name, rate in (("a", 1e-3), ("b", 3e-3)):
        run = Path(shutil.copytree(measured, tmp_path / "runs" / name))
        settings = yaml.safe_load((run / "config.yaml").read_text())
        settings["optimizer"]["lr"] = rate
        (run / "config.yaml").write_text(yaml.safe_dump(settings))
    runs = tmp_path / "runs"
    assert refusal(capsys, runs, "--measured", "--out", tmp_path / "figure") == (
        f"brx: {runs}/b: has optimizer.lr 0.003, and {runs}/a has 0.001; a figure cannot average "
        "pipedream at P = 8 over both, so name runs of one rate"
    )
    printed(capsys, runs / "a", "--measured", "--out", tmp_path / "figure")


def test_usual_settings_have_no_place_in_the_name(results):
    usual = results[0].model_copy(update={"settings": oscillation.OscillationSettings()})
    assert usual.path_in(Path("run")).name == "oscillation-00000007.json"


def test_paper_takes_the_usual_settings_alone(results):
    usual = results[0].model_copy(update={"settings": oscillation.OscillationSettings()})
    assert oscillation.usual_only([results[0], usual]) == [usual]


def test_unmeasured_run_names_the_command(runs, capsys):
    told = refusal(capsys, runs["pipedream"], "--measured")
    assert "has no measured oscillation; run `brx oscillation" in told


def test_unmeasured_checkpoint_is_named(measured, capsys):
    checkpoint = measured / "checkpoints" / "00000021"
    told = refusal(capsys, checkpoint, "--measured")
    assert "00000021: has no measured oscillation" in told


def test_two_checkpoints_are_refused(measured, capsys):
    checkpoint = measured / "checkpoints" / "00000007"
    assert "is a checkpoint already" in refusal(capsys, checkpoint, "--checkpoint", "14")


def test_settings_of_earlier_measurements_are_refused(measured, capsys):
    told = refusal(capsys, measured, "--measured", "--seed", "4")
    assert "--seed and --measured: give one of the two" in told


def test_one_iteration_is_refused(measured, capsys):
    assert "--iterations" in refusal(capsys, measured, "--iterations", "1")


def test_damaged_result_is_named(measured, tmp_path):
    run = Path(shutil.copytree(measured, tmp_path / "run"))
    (run / "analysis" / f"oscillation-00000014{QUICK_NAME}.json").write_text("{}")
    with pytest.raises(UserError, match=r"not a result of oscillation \(run: field required\)"):
        oscillation.Oscillation.all_of(run)


# Checkpoints from which training cannot go on.


def test_other_numerics_are_refused(run, monkeypatch):
    trained = trajectory_version.TRAJECTORY_VERSION
    monkeypatch.setattr(trajectory_version, "TRAJECTORY_VERSION", 99)
    told = f"14: trained at trajectory version {trained}, this brx computes version 99"
    with pytest.raises(UserError, match=told):
        oscillation.measure_oscillation(run, settings=oscillation.OscillationSettings(iterations=5))


def test_too_many_iterations_are_refused(run):
    # The checkpoint nearest to the middle.
    told = "14: 100 iterations from here would pass the run's last one, 30"
    with pytest.raises(UserError, match=told):
        oscillation.measure_oscillation(run)


def test_run_needs_a_checkpoint_midway(run):
    for path in (run / "checkpoints").iterdir():
        if int(path.name) < 28:
            shutil.rmtree(path)
    with pytest.raises(
        UserError, match=r"no checkpoint near the middle of its 30 iterations.*28, 30"
    ):
        oscillation.measure_oscillation(run)


def test_long_seeds_have_files_of_their_own(results):
    # They differ in the last of 16 digits.
    names = set()
    for seed in (1234567890123456, 1234567890123457):
        settings = oscillation.OscillationSettings(seed=seed)
        names.add(results[0].model_copy(update={"settings": settings}).path_in(Path("run")))
    assert len(names) == 2
