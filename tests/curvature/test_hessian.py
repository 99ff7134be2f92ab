"""Hessian products against the whole Hessian, strategies' bases against naive ones, and the tables
of their norms."""

import csv
import re
import shutil
from pathlib import Path

import pytest
import torch
from torch.func import functional_call, grad, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

from brx.cli.main import main
from brx.curvature import hessian, norm_measurement
from brx.curvature.effective_delay import (
    VARIANT_OF_SPACE,
    complete_measurements,
    strategy_slowdowns,
    strategy_table,
)
from brx.curvature.hessian_norm import cauchy_vector
from brx.curvature.norm_result import STRATEGY_SPACES, results_of, strategy_of
from brx.errors import RunError, UserError
from brx.paper.scales import VARIANTS
from brx.runs.frames import load
from brx.runs.tables import slowdown_text
from tests.curvature.helpers import (
    KINDS,
    flat,
    full_hessian,
    norm_result,
    random_like,
    tiny_model,
    unflat,
)
from tests.paper.helpers import write_experiment


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_is_the_slope_of_the_loss(kind):
    model, parameters, batch = tiny_model(kind)
    direction = random_like(parameters)
    step = 1e-5

    def loss(distance):
        moved = {name: w + distance * direction[name] for name, w in parameters.items()}
        return hessian.training_loss(model, moved, batch)

    slope = (loss(step) - loss(-step)) / (2 * step)
    gradient = hessian.gradient(model, parameters, batch)
    torch.testing.assert_close(flat(gradient) @ flat(direction), slope, rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_product_is_the_whole_hessian_times_the_vector(kind):
    model, parameters, batch = tiny_model(kind)
    matrix = full_hessian(model, parameters, batch)
    vector = random_like(parameters)
    product = flat(hessian.hessian_vector_product(model, parameters, batch, vector))
    expected = matrix @ flat(vector)
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(product, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("tokens", "worth", "parts"),
    [(5, 1, [1, 1, 1]), (10, 1, [2, 1]), (1000, 1, [2, 1]), (1000, 2**14, [3])],
)
def test_parts_of_a_dense_batch_add_up(monkeypatch, tokens, worth, parts):
    model, parameters, batch = tiny_model("dense")  # 3 examples with 5 tokens each
    vector = random_like(parameters)
    whole = hessian.hessian_vector_product(model, parameters, batch, vector)
    monkeypatch.setattr(hessian, "WORTH_A_PASS", worth)
    monkeypatch.setitem(hessian.TOKENS_PER_PASS, "cpu", tokens)
    assert [len(inputs) for inputs, _ in hessian._parts(model, batch)] == parts
    product = hessian.hessian_vector_product(model, parameters, batch, vector)
    torch.testing.assert_close(product, whole, rtol=1e-9, atol=1e-12)


def test_small_batch_is_one_part():
    model, _, batch = tiny_model("dense")
    assert len(hessian._parts(model, batch)) == 1


@pytest.mark.parametrize(
    ("at_a_time", "passes"), [(1, [[7], [8], [9]]), (2, [[7, 8], [9]]), (100, [[7, 8, 9]])]
)
def test_mean_product_is_of_the_mean_loss(monkeypatch, at_a_time, passes):
    model, parameters, (inputs, targets) = tiny_model("dense")
    vector = random_like(parameters)
    batches = [(7, (inputs, targets)), (8, (targets, inputs)), (9, (inputs, inputs))]

    def loss(at):
        return sum(functional_call(model, at, batch).loss for _, batch in batches) / 3

    with sdpa_kernel(SDPBackend.MATH):
        _, expected = jvp(grad(loss), (parameters,), (vector,))
    elements = inputs.numel() * model.embedding.tokens.embedding_dim  # of one batch
    monkeypatch.setattr(hessian, "WORTH_A_PASS", at_a_time * elements)
    assert [numbers for numbers, _ in hessian._joined(model, batches)] == passes
    found = hessian.mean_product(model, parameters, batches, vector, "here")
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.fixture
def mixture():
    """A mixture's model, its parameters, and two equal batches with numbers."""
    model, parameters, batch = tiny_model("mixture")
    return model, parameters, [(1, batch), (2, batch)]


def test_batches_of_a_mixture_are_not_joined(mixture):
    model, _, batches = mixture
    assert [numbers for numbers, _ in hessian._joined(model, batches)] == [[1], [2]]


def test_batch_of_a_mixture_is_not_split(mixture, monkeypatch):
    model, _, [(_, batch), _] = mixture
    monkeypatch.setitem(hessian.TOKENS_PER_PASS, "cpu", 5)
    assert len(hessian._parts(model, batch)) == 1


def test_mean_product_of_equal_batches(mixture):
    model, parameters, batches = mixture
    vector = random_like(parameters)
    one = hessian.hessian_vector_product(model, parameters, batches[0][1], vector)
    mean = hessian.mean_product(model, parameters, batches, vector, "here")
    torch.testing.assert_close(mean, one)


@pytest.mark.parametrize(("numbers", "told"), [([41], "batch 41"), ([41, 42], "batches 41 to 42")])
def test_infinite_product_names_the_batches(numbers, told):
    model, parameters, batch = tiny_model("dense", torch.float32)
    huge = unflat(torch.full_like(flat(parameters), 1e38), parameters)
    batches = [(number, batch) for number in numbers]
    with pytest.raises(RunError, match=f"runs/x/7: vector 3: .* of {told} is not finite$"):
        hessian.mean_product(model, parameters, batches, huge, "runs/x/7: vector 3")


@pytest.mark.parametrize(
    ("kind", "space"), [("dense", "1st-unilateral"), ("mixture", "2nd-bilateral")]
)
def test_rotated_product_is_the_whole_hessians(kind, space):
    model, parameters, batch = tiny_model(kind)
    inputs, targets = batch
    gradients = [hessian.gradient(model, parameters, (inputs[[i]], targets[[i]])) for i in range(3)]
    gradients += [random_like(parameters, seed) for seed in range(20, 30)]
    source, geometry = strategy_of(space)
    bases = hessian.estimate_bases(model.matrices, parameters, gradients, source, geometry)
    rotation = rotation_of(model, parameters, gradients, bases, source, geometry)
    matrix = rotation.T @ full_hessian(model, parameters, batch) @ rotation
    vector = cauchy_vector(parameters, 4, 0)
    in_weights = hessian.to_weights(bases, vector)
    product = hessian.hessian_vector_product(model, parameters, batch, in_weights)
    product = hessian.from_weights(bases, product)
    torch.testing.assert_close(flat(product), matrix @ flat(vector))


def rotation_of(model, parameters, gradients, bases, source, geometry):
    """Q (d, d), after a check that the bases are the eigenvectors of naive covariances."""
    blocks = []
    for name, parameter in parameters.items():
        if name not in model.matrices:
            blocks.append(torch.eye(parameter.numel(), dtype=torch.float64))
            continue
        for index in range(len(matrices(parameter))):
            stack = torch.stack([matrices(one[name])[index] for one in gradients])  # (N, m, n)
            if source == "1st":
                stack = stack.mean(0, keepdim=True)
            rows = (stack @ stack.mT).mean(0)
            columns = (stack.mT @ stack).mean(0)
            is_wide = len(rows) < len(columns)
            is_bilateral = geometry == "bilateral"
            left = bases[name].left
            right = bases[name].right
            U = eigenbasis_of(rows, left, index, is_rotated=is_bilateral or is_wide)
            V = eigenbasis_of(columns, right, index, is_rotated=is_bilateral or not is_wide)
            blocks.append(torch.kron(U, V))  # in row-major order, vec(U A V^T) = kron(U, V) vec(A)
    return torch.block_diag(*blocks)


def matrices(values):
    """The matrix of a parameter, or the matrices of a mixture's parameter, one per expert."""
    return values.reshape(-1, *values.shape[-2:])


def eigenbasis_of(covariance, sides, index, *, is_rotated):
    """A basis, after a check that it is orthogonal and makes the covariance diagonal, with the
    largest eigenvalue first."""
    identity = torch.eye(len(covariance), dtype=covariance.dtype)
    if not is_rotated:
        assert sides is None
        return identity
    side = matrices(sides)[index]
    torch.testing.assert_close(side.T @ side, identity, atol=1e-10, rtol=0)
    turned = side.T @ covariance @ side
    torch.testing.assert_close(turned, turned.diagonal().diag(), atol=1e-8, rtol=0)
    assert (turned.diagonal().diff() < 1e-8).all()
    return side.contiguous()


# The command, and the slowdowns next to the norms.

SAMPLE = ["--vectors", "5", "--batches-per-vector", "2", "--basis-batches", "4"]
STRATEGIES_AS_CSV = ["--strategies", "--format", "csv"]


def rows_of(capsys):
    """The rows of the printed csv table."""
    return list(csv.DictReader(capsys.readouterr().out.splitlines()))


@pytest.fixture(scope="module")
def measured(runs, tmp_path_factory):
    """A run whose norms were measured in all coordinates at one checkpoint. Read only."""
    run = shutil.copytree(runs["basis-rotation"], tmp_path_factory.mktemp("measured") / "run")
    arguments = ["hessian-norm", str(run), *STRATEGIES_AS_CSV, *SAMPLE, "--checkpoint", "14"]
    assert main(arguments) == 0
    return Path(run)


@pytest.fixture
def table(measured, capsys):
    assert main(["hessian-norm", str(measured), *STRATEGIES_AS_CSV, "--measured"]) == 0
    return rows_of(capsys)


def numbers_of(cell):
    """`1.2 (3.4, 0.5)`: from the sample, from half of it, and extrapolated."""
    return [float(text) for text in re.findall(r"[^ (),]+", cell)]


def test_table_has_all_coordinates(table):
    rotated = [f"{'/'.join(strategy_of(space))}, 4 batches" for space in STRATEGY_SPACES[1:]]
    assert [row["coordinates"] for row in table] == ["original", *rotated]


def test_table_names_the_checkpoint(table):
    assert {row["at"] for row in table} == {"14"}


def test_table_names_the_sample(table):
    assert {row["sample"] for row in table} == {"5 x 64 tokens"}


def test_coordinates_have_different_norms(table):
    assert len({row["norm"] for row in table}) == 5


def test_interval_contains_all_norms(table):
    for row in table:
        norms = numbers_of(row["norm"])
        assert float(row["95 % low"]) < min(norms) <= norms[0] < float(row["95 % high"])


def test_shares_are_of_the_original_norms(table):
    originals = numbers_of(table[0]["norm"])
    for row in table:
        pairs = zip(numbers_of(row["norm"]), originals, strict=True)
        expected = [norm / original for norm, original in pairs]
        assert numbers_of(row["of original"]) == pytest.approx(expected, abs=2e-3)


@pytest.mark.parametrize("options", [SAMPLE, ["--measured"]])
def test_measured_norms_are_read_again(measured, table, monkeypatch, capsys, options):
    monkeypatch.setattr(norm_measurement, "vector_product", lambda *_: pytest.fail("measured"))
    checkpoint = str(measured / "checkpoints" / "00000014")
    assert main(["hessian-norm", checkpoint, *STRATEGIES_AS_CSV, *options]) == 0
    assert rows_of(capsys) == table


def test_measured_norms_need_no_checkpoint(measured, table, tmp_path, capsys):
    run = Path(shutil.copytree(measured, tmp_path / "run"))
    shutil.rmtree(run / "checkpoints")
    assert main(["hessian-norm", str(run), *STRATEGIES_AS_CSV, "--measured"]) == 0
    assert rows_of(capsys) == table


def test_figure_has_the_norms_in_its_details(measured, tmp_path):
    figure = str(tmp_path / "figure")
    assert main(["hessian-norm", str(measured), "--strategies", "--measured", "--out", figure]) == 0
    assert "2nd/bilateral, 4 batches" in (tmp_path / "figure.json").read_text()


def made_up(run, space, iteration):
    """A measurement in one of the coordinates."""
    norm = 10.0 + STRATEGY_SPACES.index(space)
    return norm_result(run, "pipedream", 4, iteration, space, 100, norm, [1.0] * 6)


@pytest.fixture(scope="module")
def slowdown_runs(tmp_path_factory):
    """Runs of some strategies at three numbers of stages. Read only."""
    folder = tmp_path_factory.mktemp("runs")
    slowness_at_depth = {
        "pipedream-lr": 9,
        "nesterov": 5,
        "basis-rotation": 2,
        "basis-rotation 1st/unilateral": 5,
    }
    for method, slowness in slowness_at_depth.items():
        for stages in (1, 4, 32):
            settings = {"pipeline.stages": stages, "optimizer.beta2": 0.997, **VARIANTS[method]}
            own = 1 if stages == 1 else slowness
            write_experiment(folder, "laptop", settings, slowness=own, seeds=(0, 1))
    return folder


@pytest.fixture(scope="module")
def slowdowns(slowdown_runs):
    return strategy_slowdowns(load([slowdown_runs]))


def test_slowdowns_are_at_the_largest_depth(slowdowns):
    assert {row["stages"] for row in slowdowns.values()} == {32}


def test_slowdowns_of_the_strategies_with_runs(slowdowns):
    ratios = {space: row["ratio"] for space, row in slowdowns.items()}
    expected = {"original": 9, "1st-unilateral": 5, "2nd-bilateral": 2}
    assert ratios == pytest.approx(expected, rel=0.05)


def test_every_strategy_is_a_variant():
    assert set(VARIANT_OF_SPACE.values()) <= VARIANTS.keys()


def test_table_has_a_column_of_slowdowns(slowdowns):
    results = [made_up("run", space, 14) for space in STRATEGY_SPACES]
    column = strategy_table(results, slowdowns)["slowdown at P = 32"]
    assert column[0] == f"{slowdown_text(slowdowns['original'])} (pipedream-lr)"
    assert column[2] == "not run (basis-rotation 1st/bilateral)"


def test_command_adds_slowdowns_of_other_runs(slowdown_runs, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").touch()
    for space in STRATEGY_SPACES:
        made_up(run, space, 14).write(run)
    arguments = ["hessian-norm", str(run), "--strategies", "--measured"]
    figure = str(tmp_path / "both")
    assert main([*arguments, "--runs", str(slowdown_runs), "--out", figure]) == 0
    assert "slowdown at P = 32" in (tmp_path / "both.json").read_text()


def test_slowdowns_need_runs_without_delay(slowdown_runs):
    runs = load([slowdown_runs])
    with pytest.raises(UserError, match="no strategy has runs there at P = 1 and at another P"):
        strategy_slowdowns(runs[runs["pipeline.stages"] > 1])


# Which measurements are compared.


@pytest.fixture
def results():
    """A measurement in each of the coordinates at one checkpoint."""
    return [made_up("run", space, 14) for space in STRATEGY_SPACES]


def test_complete_measurements_are_in_order(results):
    assert complete_measurements(results[::-1]) == [results]


def test_incomplete_run_is_left_out(results):
    assert complete_measurements(results[1:]) == []


def test_run_with_two_checkpoints_is_left_out(results):
    assert complete_measurements([made_up("run", "original", 30), *results[1:]]) == []


def test_runs_of_one_name_stay_apart(results):
    others = [made_up("other/run", space, 14) for space in STRATEGY_SPACES]
    assert complete_measurements([*results, *others]) == [results, others]


def test_checkpoint_with_the_most_spaces_counts(results, tmp_path):
    for result in (*results, made_up("run", "original", 30)):
        result.write(tmp_path)
    assert list(results_of(tmp_path, STRATEGY_SPACES).values()) == results


def test_named_checkpoint_counts(results, tmp_path):
    for result in (*results, made_up("run", "original", 30)):
        result.write(tmp_path)
    assert [one.iteration for one in results_of(tmp_path, iteration=30).values()] == [30]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--strategies", "--rotated"], "--original, --rotated, --strategies: give one of them"),
        (
            ["--strategies", "--basis-from", "x"],
            "--basis-from and --strategies: give one of the two",
        ),
        (["--original", "--basis-batches", "2"], "--original: takes no basis"),
        (["--measured", "--checkpoint", "999"], "has no measured hessian-norm at iteration 999"),
        (["--measured", "--vectors", "7"], "--vectors and --measured: give one of the two"),
        (["--measured", "--rotated"], "run `brx hessian-norm --rotated "),
        (
            ["--by", "kind", "--format", "csv"],
            "--by kind: prints several tables, and csv holds one",
        ),
        (["--basis-from", "nowhere"], "nowhere: "),
        (["--runs", "x"], "--runs: only with --strategies"),
        (["--strategies"], "--basis-batches 200: "),  # more than the run's iterations
        (["--batches-per-vector", "3"], "--batches-per-vector 3: must be even"),
        (["--vectors", "2"], "at least 3"),
        (["--checkpoint", "8"], "no such checkpoint; there are: 7, 14, 21, 28, 30"),
    ],
)
def test_mistake_is_refused(run, arguments, expected, capsys):
    assert main(["hessian-norm", str(run), *arguments]) == 2
    assert expected in capsys.readouterr().err
    assert not (run / "analysis").exists()
