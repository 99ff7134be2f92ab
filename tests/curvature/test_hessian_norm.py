"""Norms: estimates against exact ones; a stopped measurement continues to the same numbers; what
cannot be measured is refused."""

import io
import json
import math
import os
import shutil
import signal
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from brx.cli.main import main
from brx.curvature import norm_measurement
from brx.curvature.checkpoints import load_checkpoint
from brx.curvature.hessian import from_weights, mean_product, to_weights
from brx.curvature.hessian_norm import GeometricEstimate, below_resolution, cauchy_vector
from brx.curvature.norm_measurement import fit_bases, measure_runs
from brx.curvature.norm_result import Groups, NormSettings, breakdown_table, results_of
from brx.errors import RunError, UserError
from brx.runs.checkpoint import list_checkpoints
from brx.runs.measured import runs_in_place
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


@pytest.fixture(scope="module")
def random_matrix():
    """The scales of a random symmetric matrix's rows, and estimates of their sums in two
    tensors."""
    matrix, products = random_products(60, 500)
    return matrix.abs().sum(dim=1), estimate(products, [20, 40])


@pytest.mark.parametrize("power", [1, 2])
def test_sum_of_powers_is_within_its_error(random_matrix, power):
    scales, sums = random_matrix
    found, error = total(sums, power)
    assert abs(found - (scales**power).sum().item()) < 3 * error
    assert error < 0.2 * found


def test_sums_of_tensors_are_within_their_errors(random_matrix):
    scales, sums = random_matrix
    errors = np.diag(sums.covariance(1)) ** 0.5
    expected = [scales[:20].sum().item(), scales[20:].sum().item()]
    assert (abs(sums.sums[0] - expected) < 3 * errors).all()


def test_intervals_cover_as_often_as_they_say():
    matrix, products = random_products(12, 60 * 100)
    covered = 0
    for first in range(0, len(products), 60):
        found, error = total(estimate(products[first : first + 60], [4, 8]))
        covered += abs(math.log(found / matrix.abs().sum().item())) < 1.96 * error / found
    assert 90 <= covered <= 99


def test_mean_of_few_vectors_is_the_scale():
    # Independent rows of scale 2: the mean over rows is the estimator's expectation.
    like = {"rows": torch.zeros(400_000, dtype=torch.float64)}
    found = GeometricEstimate([400_000], torch.float64)
    for number in range(9):
        found.add(2 * cauchy_vector(like, 0, number)["rows"])
    sums = found.sums(["rows"]).sums[:, 0] / 400_000
    assert sums[0] == pytest.approx(2, rel=0.01)
    assert sums[1] == pytest.approx(4, rel=0.03)


@pytest.fixture(scope="module")
def with_zeros():
    """An estimate for three rows of scale 1: always zero, zero in three of four products, never
    zero."""
    like = {"rows": torch.zeros(3, dtype=torch.float64)}
    found = GeometricEstimate([3], torch.float64)
    for number in range(2000):
        product = cauchy_vector(like, 0, number)["rows"]
        product[0] = 0.0
        if number % 4:
            product[1] = 0.0
        found.add(product)
    return found


def test_row_counts_with_its_share_of_products(with_zeros):
    never, sometimes, always = with_zeros.scales(1).tolist()
    assert never == 0.0
    assert sometimes == pytest.approx(0.25, rel=0.2)
    assert always == pytest.approx(1.0, rel=0.1)


def test_zero_rows_leave_finite_deviations(with_zeros):
    assert np.isfinite(with_zeros.sums(["rows"]).deviations).all()


def sampled(norm_of_half):
    """A result whose norm from b = 4 batches is 3 + 2 / sqrt(b)."""
    return norm_result(
        "r", "m", 1, 1, "original", 1, 3 + 2 / 2, [1.0] * 4, norm_of_half=norm_of_half
    )


def test_extrapolated_norm_is_without_noise():
    result = sampled(norm_of_half=3 + 2 / math.sqrt(2))
    assert result.norms == pytest.approx([4, 3 + math.sqrt(2), 3])


def test_extrapolated_norm_is_not_negative():
    assert sampled(norm_of_half=9.0).norms[2] == 0


def test_interval_is_widened_on_the_logarithm():
    # The norms per parameter are 0.04 and, extrapolated, 0.03; the vectors' error is a tenth.
    result = norm_result(
        "r",
        "m",
        1,
        1,
        "original",
        100,
        4.0,
        [1.0] * 4,
        norm_of_half=3 + math.sqrt(2),
        standard_error=0.4,
    )
    widened = (0.03 / math.exp(0.196), 0.04 * math.exp(0.196))
    assert result.interval == pytest.approx(widened, rel=1e-3)


def test_breakdown_adds_up_what_a_stage_holds():
    # The errors of embedding and block 0 go together, the others are independent.
    covariance = [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 9, 0], [0, 0, 0, 16]]
    groups = Groups(
        names=["embedding", "0", "1", "head"],
        num_rows=[10, 30, 20, 40],
        sums=[[1, 3, 2, 10], [0] * 4],
        covariances=[covariance, [[0] * 4] * 4],
    )
    result = norm_result("r", "m", 2, 1, "original", 100, 16.0, [1.0] * 4)
    table = breakdown_table(result.model_copy(update={"blocks": groups}), "stage")
    assert table.to_numpy().tolist() == [
        ["stage 0", "40", "25.0%", "0.1", "0.05"],
        ["stage 1", "60", "75.0%", "0.2", "0.083"],
    ]


LIKE = {"a": torch.zeros(1000, dtype=torch.float64), "b": torch.zeros(5, 4, dtype=torch.float64)}


@pytest.mark.parametrize(
    ("seed", "number", "is_equal"), [(0, 3, True), (0, 4, False), (1, 3, False)]
)
def test_cauchy_vector_depends_on_both_numbers(seed, number, is_equal):
    one = cauchy_vector(LIKE, 0, 3)["a"]
    assert torch.equal(one, cauchy_vector(LIKE, seed, number)["a"]) == is_equal


def test_cauchy_vector_is_rounded_to_the_precision():
    one = cauchy_vector(LIKE, 0, 3)["a"]
    assert torch.equal(cauchy_vector({"a": LIKE["a"].float()}, 0, 3)["a"], one.float())


def test_cauchy_vector_is_standard():
    # The median of |X| is the scale.
    one = cauchy_vector(LIKE, 0, 3)["a"]
    assert one.abs().median().item() == pytest.approx(1, rel=0.15)


@pytest.mark.parametrize(("dtype", "share"), [(torch.float32, 0.25), (torch.float64, 0.0)])
def test_rows_below_the_resolution(dtype, share):
    product = torch.tensor([1e8, 1.0, 20.0, 0.0], dtype=dtype)
    assert below_resolution(product) == share


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
    correction = torch.cos(torch.pi / (2 * seen.clamp(min=1))) ** seen
    corrected = mean_log.exp() * correction * seen / len(products)
    return torch.where(seen > 1, corrected, 0.0).sum().item()


def sizes_of_products(checkpoint, bases, numbers):
    """|H z| (n, d) of the first five vectors, with the Hessian of these batches."""
    batches = list(checkpoint.batches(numbers))
    rows = []
    for number in range(5):
        vector = to_weights(bases, cauchy_vector(checkpoint.parameters, 0, number))
        product = mean_product(checkpoint.model, checkpoint.parameters, batches, vector, "")
        rows.append(flat(from_weights(bases, product)).double().abs())
    return torch.stack(rows)


@pytest.fixture(scope="module", params=[("original", "fp64"), ("rotated", "fp32")], ids=str)
def measurement(request, runs, tmp_path_factory):
    """A result from a sample of four batches, its checkpoint with the bases of these coordinates,
    and the folder with its file. Read only."""
    space, precision = request.param
    run = Path(shutil.copytree(runs["basis-rotation"], tmp_path_factory.mktemp("one") / "run"))
    result = measure(run, space, settings(precision=precision, batches_per_vector=4))
    checkpoint = load_checkpoint(run, dtype=norm_measurement.DTYPES[precision])
    bases = checkpoint.bases if space == "rotated" else {}
    return result, replace(checkpoint, bases=bases), run


def test_norm_is_the_naive_estimate(measurement):
    result, checkpoint, _ = measurement
    expected = norm_of(sizes_of_products(checkpoint, checkpoint.bases, range(1, 5)))
    assert result.norm == pytest.approx(expected, rel=1e-4)


def test_norm_of_half_is_the_mean_of_both(measurement):
    result, checkpoint, _ = measurement
    halves = [
        norm_of(sizes_of_products(checkpoint, checkpoint.bases, numbers))
        for numbers in (range(1, 3), range(3, 5))
    ]
    assert result.norm_of_half == pytest.approx(sum(halves) / 2, rel=1e-4)


def test_result_counts_the_tokens_of_the_sample(measurement):
    result, _, _ = measurement
    assert result.tokens == 4 * 2 * 16


def test_interval_contains_the_norm(measurement):
    result, _, _ = measurement
    assert result.interval[0] < result.normalized < result.interval[1]


def test_blocks_add_up_to_the_norm(measurement):
    result, _, _ = measurement
    assert sum(result.blocks.sums[0]) == pytest.approx(result.norm, rel=1e-5)


def test_kinds_add_up_to_all_parameters(measurement):
    result, checkpoint, _ = measurement
    assert sum(result.kinds.num_rows) == checkpoint.num_parameters == result.num_parameters


def test_unusual_sample_has_its_own_file(measurement):
    result, _, run = measurement
    (file,) = (run / "analysis").iterdir()
    assert file.name.startswith(f"hessian-norm-{result.space}-00000030-4-batches-5-vectors")


def test_result_is_read_from_its_file(measurement):
    result, _, run = measurement
    assert results_of(run) == {result.space: result}


def test_larger_sample_leaves_the_usual_one(run):
    usual = measure(run, "original").model_copy(update={"settings": NormSettings()})
    usual.write(run)
    larger = usual.model_copy(update={"settings": NormSettings(batches_per_vector=1600)})
    larger.write(run)
    assert results_of(run, batches=160) == {"original": usual}
    assert results_of(run, batches=1600) == {"original": larger}


@pytest.mark.parametrize(
    "changes",
    [{"vectors": 3}, {"precision": "fp64"}, {"seed": 1}, {"basis_from": "a"}, {"basis_batches": 3}],
    ids=lambda changes: next(iter(changes)),
)
def test_other_settings_leave_the_usual_measurement(changes, run):
    usual = measure(run, "original").model_copy(update={"settings": NormSettings()})
    for one in (usual, usual.model_copy(update={"settings": NormSettings(**changes)})):
        one.write(run)
    assert results_of(run, batches=160) == {"original": usual}


def test_usual_file_of_a_strategy_has_its_usual_basis(run):
    result = measure(run, "original").model_copy(
        update={"settings": NormSettings(basis_batches=200), "space": "2nd-bilateral"}
    )
    assert result.path_in(run).name == "hessian-norm-2nd-bilateral-00000030.json"


def test_largest_sample_of_all_spaces_counts(run):
    measured = measure(run, "original")
    for space, batches in (("original", 160), ("original", 1600), ("rotated", 160)):
        settings = NormSettings(batches_per_vector=batches)
        measured.model_copy(update={"space": space, "settings": settings}).write(run)
    chosen = results_of(run)
    assert {one.settings.batches_per_vector for one in chosen.values()} == {160}
    assert set(chosen) == {"original", "rotated"}


INTERRUPT = (signal.SIGINT, 130)
FAILURE = (RunError("stopped here"), 1)


@pytest.fixture
def stopped(run, request, monkeypatch, capsys):
    """A measurement that was stopped at its fourth product: the command, the printed error, the
    numbers of all products computed (a list that goes on growing), and the result it should
    have."""
    fault, code = request.param
    expected = measure(run, "original")
    shutil.rmtree(run / "analysis")
    usual = norm_measurement.vector_product
    calls = []

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
    command = ["hessian-norm", str(run), "--original", *QUICK]
    assert main(command) == code
    return command, capsys.readouterr().err, calls, expected


@pytest.mark.parametrize(
    ("stopped", "told"),
    [
        (INTERRUPT, "stopped after 4 of 5 vectors; the same command continues"),
        (FAILURE, "stopped here"),
    ],
    indirect=["stopped"],
)
def test_stopped_measurement_says_so(stopped, told):
    _, printed, _, _ = stopped
    assert told in printed


@pytest.mark.parametrize("stopped", [INTERRUPT, FAILURE], indirect=True)
def test_stopped_measurement_has_no_result(stopped, run):
    assert results_of(run) == {}


@pytest.mark.parametrize("stopped", [INTERRUPT, FAILURE], indirect=True)
def test_continued_measurement_has_the_same_numbers(stopped, run):
    command, _, _, expected = stopped
    assert main(command) == 0
    assert results_of(run) == {"original": expected}


@pytest.mark.parametrize(
    ("stopped", "again"), [(INTERRUPT, [4]), (FAILURE, [3, 4])], indirect=["stopped"]
)
def test_saved_products_are_not_computed_again(stopped, again):
    command, _, calls, _ = stopped
    assert main(command) == 0
    assert calls == [0, 1, 2, 3, *again]


@pytest.mark.slow
def test_several_processes_give_the_same_numbers(run):
    found = measure(run, "original", jobs=2)
    shutil.rmtree(run / "analysis")
    assert found == measure(run, "original")


# Bases that are not the checkpoint's own.


@pytest.fixture(scope="module")
def without_basis(runs, tmp_path_factory):
    """A copy of the pipedream run, which has no basis, to write results into."""
    return Path(shutil.copytree(runs["pipedream"], tmp_path_factory.mktemp("other") / "run"))


@pytest.fixture(scope="module")
def estimated(without_basis):
    """Its norm with an estimated basis."""
    return measure(without_basis, "rotated", settings(basis_batches=4))


def test_borrowed_basis_gives_another_norm(without_basis, estimated, runs):
    borrowed = measure(without_basis, "rotated", settings(basis_from=str(runs["basis-rotation"])))
    assert borrowed.norm != estimated.norm


def test_depth_is_of_the_delays(estimated):
    # Four stages with the delays of eight.
    assert (estimated.num_stages, estimated.num_own_stages) == (8, 4)


def test_breakdown_is_by_own_stages(estimated):
    assert list(breakdown_table(estimated, "stage")["stage"]) == [f"stage {k}" for k in range(4)]


def test_adamw_has_no_basis(runs):
    assert load_checkpoint(runs["pipedream"]).bases == {}


def test_checkpoint_is_chosen_by_its_iteration(runs):
    run = runs["basis-rotation"]
    assert load_checkpoint(run, 14).path == list_checkpoints(run)[1]


@pytest.mark.parametrize("source", ["estimated", "kept"])
def test_bases_are_orthogonal(runs, source):
    checkpoint = load_checkpoint(runs["pipedream"])
    bases = fit_bases(checkpoint, 4)
    if source == "kept":
        bases = load_checkpoint(runs["basis-rotation"], 14).bases
    assert len(bases) == 6 * 4
    for name, basis in bases.items():
        assert (len(basis.left), len(basis.right)) == checkpoint.parameters[name].shape
        for side in (basis.left, basis.right):
            torch.testing.assert_close(side.T @ side, torch.eye(len(side)), atol=1e-5, rtol=0)


def test_estimated_bases_are_of_the_last_batches_of_the_training(runs):
    # Those of the measurement itself are batches that come after the training.
    checkpoint = load_checkpoint(runs["pipedream"], dtype=torch.float64)
    name = "blocks.1.mlp.up.weight"
    covariance = 0.0
    for iteration in (27, 28, 29, 30):
        weights = {key: value.clone() for key, value in checkpoint.parameters.items()}
        weights[name].requires_grad_()
        batch = checkpoint.micro_batch(iteration)
        loss = torch.func.functional_call(checkpoint.model, weights, batch).loss
        (gradient,) = torch.autograd.grad(loss, weights[name])
        covariance += gradient @ gradient.T
    basis = fit_bases(checkpoint, 4)[name].left
    rotated = basis.T @ covariance @ basis
    torch.testing.assert_close(rotated, rotated.diag().diag(), rtol=0, atol=1e-6 * rotated.max())


@pytest.fixture(scope="module")
def printed(runs, tmp_path_factory):
    """What the command prints about both runs by kind of parameter, without a choice of
    coordinates."""
    folder = tmp_path_factory.mktemp("both")
    copies = [shutil.copytree(run, folder / name) for name, run in runs.items()]
    output = io.StringIO()
    with redirect_stdout(output):
        arguments = ["hessian-norm", *map(str, copies), *QUICK, "--format", "markdown"]
        assert main([*arguments, "--by", "kind"]) == 0
    return output.getvalue()


def test_every_run_has_original_coordinates(printed):
    assert printed.count("| original |") == 2


def test_run_with_a_basis_has_rotated_coordinates(printed):
    assert printed.count("| rotated, own basis |") == 1


def test_every_measurement_is_broken_down(printed):
    assert printed.count("attention.query") == 3


# Checkpoints that cannot be measured.


def set_status(run, status):
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(summary | {"status": status}))


@pytest.mark.parametrize(
    ("status", "told"),
    [
        ("diverged", r"diverged \(iteration 30 of 30\); "),
        ("interrupted", r"not finished .*finish it with .* or "),
    ],
)
def test_unfinished_run_needs_a_named_checkpoint(run, status, told):
    set_status(run, status)
    with pytest.raises(UserError, match=f"{told}name a checkpoint with --checkpoint: 7, 14"):
        measure(run, "original")


def test_unfinished_run_is_measured_where_named(run):
    set_status(run, "interrupted")
    assert measure(run, "original", iteration=14).iteration == 14


def test_run_without_checkpoints_is_refused(run):
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(UserError, match="has no checkpoint"):
        measure(run, "original")


def test_rotated_norm_needs_a_basis(runs):
    with pytest.raises(UserError, match=r"has no basis .* give --basis-from"):
        measure(runs["pipedream"], "rotated")


def test_lender_needs_a_basis(runs):
    lender = settings(basis_from=str(runs["pipedream"]))
    with pytest.raises(UserError, match=r"has no basis .* give --basis-from"):
        measure(runs["basis-rotation"], "rotated", lender)


@pytest.fixture
def wider(run):
    """A run whose configuration has a wider model than its checkpoints."""
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("width: 8", "width: 16"))
    return run


def test_checkpoint_of_another_model_is_refused(wider):
    refusal = r"model: blocks.0.attention.key.weight is \(8, 8\) in it and \(16, 16\)"
    with pytest.raises(UserError, match=refusal):
        measure(wider, "original")


def test_lender_of_another_model_is_refused(wider, runs):
    with pytest.raises(UserError, match="another model"):
        measure(runs["pipedream"], "rotated", settings(basis_from=str(wider)))


# Runs in folders.


def test_folder_stands_for_its_runs(runs):
    one = runs["basis-rotation"]
    other = runs["pipedream"]
    assert runs_in_place([one.parent]) == [one, other]


def test_checkpoints_stay_in_place(runs):
    run = runs["basis-rotation"]
    checkpoint = next((run / "checkpoints").iterdir())
    assert runs_in_place([checkpoint, run]) == [checkpoint, run]


def test_folder_without_runs_is_refused(tmp_path):
    with pytest.raises(UserError, match="no run with losses"):
        runs_in_place([tmp_path])
