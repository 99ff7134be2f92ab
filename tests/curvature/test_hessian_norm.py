"""Norms: the estimators against exact ones; a measurement resumes to the same numbers, and refuses
what it cannot."""

import json
import math
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from brx.cli.main import main
from brx.curvature import norm_measurement
from brx.curvature.checkpoints import load_checkpoint, runs_in_place
from brx.curvature.hessian import from_weights, mean_product, to_weights
from brx.curvature.hessian_norm import GeometricEstimate, below_resolution, cauchy_vector
from brx.curvature.norm_measurement import fit_bases, measure_runs
from brx.curvature.norm_result import NormSettings, breakdown_table, results_of
from brx.errors import RunError, UserError
from brx.runs.checkpoint import list_checkpoints
from tests.curvature.helpers import flat, norm_result


def estimate(products, sizes):
    """The estimator's sums, by tensors of these sizes, from products with Cauchy vectors."""
    estimated = GeometricEstimate(sizes, torch.float64)
    for product in products:
        estimated.add(product)
    return estimated.sums([str(index) for index in range(len(sizes))])


def random_products(size, num_vectors):
    """A symmetric matrix whose rows have very different sums, and its products with Cauchy
    vectors."""
    matrix = torch.randn(
        size, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    scale = torch.logspace(-2, 1, size, dtype=torch.float64)
    matrix = scale[:, None] * (matrix + matrix.T) * scale
    vectors = [
        cauchy_vector({"x": torch.zeros(size).double()}, 0, number)["x"]
        for number in range(num_vectors)
    ]
    return matrix, [matrix @ vector for vector in vectors]


def total(sums, power=1):
    """The sum over all rows, and its standard error."""
    grouped = sums.grouped(lambda name: "all")
    return grouped.sums[power - 1, 0], grouped.covariance(power)[0, 0] ** 0.5


def test_random_symmetric_matrix():
    matrix, products = random_products(60, 500)
    scales = matrix.abs().sum(dim=1)
    sums = estimate(products, [20, 40])
    for power in (1, 2):
        found, error = total(sums, power)
        assert error < 0.2 * found
        assert abs(found - (scales**power).sum().item()) < 3 * error
    errors = np.diag(sums.covariance(1)) ** 0.5
    assert (
        abs(sums.sums[0] - [scales[:20].sum().item(), scales[20:].sum().item()]) < 3 * errors
    ).all()


def test_intervals_cover_as_often_as_they_say():
    matrix, products = random_products(12, 60 * 100)
    covered = 0
    for first in range(0, len(products), 60):
        found, error = total(estimate(products[first : first + 60], [4, 8]))
        covered += abs(math.log(found / matrix.abs().sum().item())) < 1.96 * error / found
    assert 90 <= covered <= 99


def test_the_mean_of_the_geometric_estimate_is_the_scale_in_few_vectors():
    # Independent rows of scale 2: the mean over rows is the estimator's expectation.
    like = {"rows": torch.zeros(400_000, dtype=torch.float64)}
    found = GeometricEstimate([400_000], torch.float64)
    for number in range(9):
        found.add(2 * cauchy_vector(like, 0, number)["rows"])
    sums = found.sums(["rows"]).sums[:, 0] / 400_000
    assert sums[0] == pytest.approx(2, rel=0.01)
    assert sums[1] == pytest.approx(4, rel=0.03)


def test_rows_that_are_sometimes_zero_count_with_their_share():
    like = {"rows": torch.zeros(3, dtype=torch.float64)}
    found = GeometricEstimate([3], torch.float64)
    for number in range(2000):
        product = cauchy_vector(like, 0, number)["rows"]
        product[0] = 0.0
        product[1] *= number % 4 == 0
        found.add(product)
    never, sometimes, always = found.scales(1).tolist()
    assert never == 0.0
    assert sometimes == pytest.approx(0.25, rel=0.2)
    assert always == pytest.approx(1.0, rel=0.1)
    assert np.isfinite(found.sums(["rows"]).deviations).all()


def test_the_extrapolated_norm_is_that_without_the_batches_noise():
    """Of entries whose mean size is 3 + 2 / sqrt(b) over b batches, here 4 and half of them."""
    result = norm_result(
        "r", "m", 1, 1, "original", 1, 3 + 2 / 2, [1.0] * 4, norm_of_half=3 + 2 / math.sqrt(2)
    )
    assert result.norms == pytest.approx([4, 3 + math.sqrt(2), 3])
    assert result.model_copy(update={"norm_of_half": 9.0}).norms[2] == 0


def test_cauchy_vectors_depend_on_seed_and_number_and_not_on_precision():
    like = {
        "a": torch.zeros(1000, dtype=torch.float64),
        "b": torch.zeros(5, 4, dtype=torch.float64),
    }
    one = cauchy_vector(like, 0, 3)
    assert [
        torch.equal(one["a"], cauchy_vector(like, *at)["a"]) for at in ((0, 3), (0, 4), (1, 3))
    ] == [1, 0, 0]
    assert torch.equal(cauchy_vector({"a": like["a"].float()}, 0, 3)["a"], one["a"].float())
    assert one["a"].abs().median().item() == pytest.approx(1, rel=0.15)
    product = torch.tensor([1e8, 1.0, 20.0, 0.0])
    assert (below_resolution(product), below_resolution(product.double())) == (0.25, 0.0)


SETTINGS = NormSettings(vectors=5, batches_per_vector=2)
QUICK = ["--vectors", "5", "--batches-per-vector", "2"]


def settings(**changes):
    return SETTINGS.model_copy(update=changes)


def measure(run, space, chosen=SETTINGS, **others):
    return measure_runs([run], [space], chosen, **others)[0]


def norm_of(products):
    """The sum of the rows' scales by a naive estimator, from |H z| (n, d)."""
    seen = (products > 0).sum(dim=0)
    mean_log = torch.where(products > 0, products.log(), 0.0).sum(dim=0) / seen.clamp(min=1)
    corrected = (
        mean_log.exp()
        * torch.cos(torch.pi / (2 * seen.clamp(min=1))) ** seen
        * seen
        / len(products)
    )
    return torch.where(seen > 1, corrected, 0.0).sum().item()


@pytest.mark.parametrize(("space", "precision"), [("original", "fp64"), ("rotated", "fp32")])
def test_result_is_the_estimate_over_the_products_of_one_sample_and_of_its_halves(
    run, space, precision
):
    result = measure(run, space, settings(precision=precision, batches_per_vector=4))
    checkpoint = load_checkpoint(run, dtype=norm_measurement.DTYPES[precision])
    bases = checkpoint.bases if space == "rotated" else {}

    def products(numbers):
        """With the Hessian of these batches, the same for all vectors."""
        batches, rows = list(checkpoint.batches(numbers)), []
        for number in range(5):
            vector = to_weights(bases, cauchy_vector(checkpoint.parameters, 0, number))
            product = mean_product(checkpoint.model, checkpoint.parameters, batches, vector, "")
            rows.append(flat(from_weights(bases, product)).double().abs())
        return torch.stack(rows)

    assert result.norm == pytest.approx(norm_of(products(range(1, 5))), rel=1e-4)
    halves = [norm_of(products(numbers)) for numbers in (range(1, 3), range(3, 5))]
    assert result.norm_of_half == pytest.approx(sum(halves) / 2, rel=1e-4)
    assert result.tokens == 4 * 2 * 16
    assert result.interval[0] < result.normalized < result.interval[1]
    assert sum(result.blocks.sums[0]) == pytest.approx(result.norm, rel=1e-5)
    assert sum(result.kinds.num_rows) == checkpoint.num_parameters == result.num_parameters
    assert results_of(run) == {space: result}
    assert [path.name for path in (run / "analysis").iterdir()] == [
        f"hessian-norm-{space}-00000030-4-batches.json"
    ]


def test_larger_sample_leaves_the_usual_one(run):
    usual = measure(run, "original").model_copy(update={"settings": NormSettings()})
    usual.write(run)
    larger = usual.model_copy(update={"settings": NormSettings(batches_per_vector=1600)})
    larger.write(run)
    assert results_of(run, batches=160) == {"original": usual}
    assert results_of(run, batches=1600) == {"original": larger}


def test_largest_sample_of_all_spaces_counts(run):
    measured = measure(run, "original")
    for space, batches in (("original", 160), ("original", 1600), ("rotated", 160)):
        settings = NormSettings(batches_per_vector=batches)
        measured.model_copy(update={"space": space, "settings": settings}).write(run)
    chosen = results_of(run)
    assert {one.settings.batches_per_vector for one in chosen.values()} == {160}
    assert set(chosen) == {"original", "rotated"}


@pytest.mark.parametrize(
    ("fault", "code", "told", "again"),
    [
        (signal.SIGINT, 130, "stopped after 4 of 5 vectors; the same command continues", [4]),
        (RunError("stopped here"), 1, "stopped here", [3, 4]),
    ],
)
def test_stopped_and_continued_gives_the_same_numbers(
    run, monkeypatch, capsys, fault, code, told, again
):
    expected = measure(run, "original")
    shutil.rmtree(run / "analysis")
    usual, calls = norm_measurement.vector_product, []

    def product(checkpoint, settings, number):
        calls.append(number)
        if calls == [0, 1, 2, 3]:
            if isinstance(fault, Exception):
                raise fault
            os.kill(os.getpid(), fault)
        return usual(checkpoint, settings, number)

    monkeypatch.setattr(norm_measurement, "vector_product", product)
    if isinstance(fault, Exception):  # an interrupt saves by itself
        monkeypatch.setattr(norm_measurement, "SAVE_EVERY_S", 0.0)
    arguments = ["hessian-norm", str(run), "--original", *QUICK]
    assert main(arguments) == code
    assert told in capsys.readouterr().err
    assert results_of(run) == {}
    assert main(arguments) == 0
    assert results_of(run) == {"original": expected}
    assert calls == [0, 1, 2, 3, *again]  # what was saved is not done again


@pytest.mark.slow
def test_several_processes_give_the_same_numbers(run):
    found = measure(run, "original", jobs=2)
    shutil.rmtree(run / "analysis")
    assert found == measure(run, "original")


def test_a_basis_may_be_borrowed_or_estimated(runs, tmp_path):
    run = Path(shutil.copytree(runs["pipedream"], tmp_path / "run"))
    borrowed = measure(run, "rotated", settings(basis_from=str(runs["basis-rotation"])))
    estimated = measure(run, "rotated", settings(basis_batches=4))
    assert borrowed.norm != estimated.norm
    assert (estimated.num_stages, estimated.num_own_stages) == (
        8,
        4,
    )  # P belongs to the pipeline whose delays it has
    assert list(breakdown_table(estimated, "stage")["stage"]) == [
        "stage 0",
        "stage 1",
        "stage 2",
        "stage 3",
    ]
    checkpoint, lender = load_checkpoint(run), load_checkpoint(runs["basis-rotation"], 14)
    assert checkpoint.bases == {}
    assert lender.path == list_checkpoints(runs["basis-rotation"])[1]
    for bases in (fit_bases(checkpoint, 4), lender.bases):
        assert len(bases) == 6 * 4
        for name, basis in bases.items():
            assert (len(basis.left), len(basis.right)) == checkpoint.parameters[name].shape
            for side in (basis.left, basis.right):
                torch.testing.assert_close(side.T @ side, torch.eye(len(side)), atol=1e-5, rtol=0)


def test_without_a_choice_both_coordinates_are_measured_where_a_run_has_a_basis(
    run, runs, tmp_path, capsys
):
    other = shutil.copytree(runs["pipedream"], tmp_path / "other")
    assert (
        main(["hessian-norm", str(run), str(other), *QUICK, "--format", "markdown", "--by", "kind"])
        == 0
    )
    text = capsys.readouterr().out
    assert [
        text.count(what) for what in ("| original |", "| rotated, own basis |", "attention.query")
    ] == [2, 1, 3]


def test_an_unfinished_runs_checkpoints_are_named_and_must_be_there(run):
    summary = json.loads((run / "summary.json").read_text())
    told = {
        "diverged": r"diverged \(iteration 30 of 30\); ",
        "interrupted": r"not finished .*finish it with .* or ",
    }
    for status, expected in told.items():
        (run / "summary.json").write_text(json.dumps(summary | {"status": status}))
        with pytest.raises(
            UserError, match=f"{expected}name a checkpoint with --checkpoint: 7, 14"
        ):
            measure(run, "original")
    assert measure(run, "original", iteration=14).iteration == 14
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(UserError, match="has no checkpoint"):
        measure(run, "original")


def test_checkpoint_of_another_model_or_without_a_basis(run, runs):
    for without, of_run in (
        (runs["pipedream"], settings()),
        (run, settings(basis_from=str(runs["pipedream"]))),
    ):
        with pytest.raises(UserError, match=r"has no basis .* give --basis-from"):
            measure(without, "rotated", of_run)
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("width: 8", "width: 16"))
    with pytest.raises(
        UserError, match=r"model: blocks.0.attention.key.weight is \(8, 8\) in it and \(16, 16\)"
    ):
        measure(run, "original")
    with pytest.raises(UserError, match="another model"):
        measure(runs["pipedream"], "rotated", settings(basis_from=str(run)))


def test_a_folder_of_runs_stands_for_the_runs_in_it(runs, tmp_path):
    one, other = runs["basis-rotation"], runs["pipedream"]
    checkpoint = next((one / "checkpoints").iterdir())
    assert runs_in_place([one.parent, checkpoint, other]) == [one, other, checkpoint, other]
    with pytest.raises(UserError, match="no run with losses"):
        runs_in_place([tmp_path])
