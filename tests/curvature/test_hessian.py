"""Hessian products against the whole Hessian, strategies' bases against naive ones, and the columns
next to their norms."""

import csv
import re
import shutil

import pytest
import torch
from torch.func import functional_call, grad, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

from brx.cli.main import main
from brx.curvature import hessian
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


def test_a_dense_batch_in_parts_gives_the_same_product(monkeypatch):
    model, parameters, batch = tiny_model("dense")
    vector = random_like(parameters)
    whole = hessian.hessian_vector_product(model, parameters, batch, vector)
    assert len(hessian._parts(model, batch)) == 1
    for tokens, worth, parts in (
        (5, 1, [1, 1, 1]),
        (10, 1, [2, 1]),
        (1000, 1, [2, 1]),
        (1000, 2**14, [3]),
    ):
        monkeypatch.setattr(hessian, "WORTH_A_PASS", worth)
        monkeypatch.setitem(hessian.TOKENS_PER_PASS, "cpu", tokens)
        assert [
            len(inputs) for inputs, _ in hessian._parts(model, batch)
        ] == parts  # 3 examples with 5 tokens each
        product = hessian.hessian_vector_product(model, parameters, batch, vector)
        torch.testing.assert_close(product, whole, rtol=1e-9, atol=1e-12)


def test_mean_over_batches_is_the_product_of_the_mean_loss_however_many_make_one_pass(monkeypatch):
    model, parameters, (inputs, targets) = tiny_model("dense")
    vector = random_like(parameters)
    batches = [(7, (inputs, targets)), (8, (targets, inputs)), (9, (inputs, inputs))]

    def loss(at):
        return sum(functional_call(model, at, batch).loss for _, batch in batches) / 3

    with sdpa_kernel(SDPBackend.MATH):
        _, expected = jvp(grad(loss), (parameters,), (vector,))
    for at_a_time, passes in ((1, [[7], [8], [9]]), (2, [[7, 8], [9]]), (100, [[7, 8, 9]])):
        monkeypatch.setattr(
            hessian,
            "WORTH_A_PASS",
            at_a_time * inputs.numel() * model.embedding.tokens.embedding_dim,
        )
        assert [numbers for numbers, _ in hessian._joined(model, batches)] == passes
        found = hessian.mean_product(model, parameters, batches, vector, "here")
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_a_mixtures_batches_are_neither_split_nor_joined(monkeypatch):
    model, parameters, batch = tiny_model("mixture")
    vector = random_like(parameters)
    whole = hessian.hessian_vector_product(model, parameters, batch, vector)
    assert [numbers for numbers, _ in hessian._joined(model, [(1, batch), (2, batch)])] == [
        [1],
        [2],
    ]
    monkeypatch.setitem(hessian.TOKENS_PER_PASS, "cpu", 5)
    assert len(hessian._parts(model, batch)) == 1
    torch.testing.assert_close(
        hessian.mean_product(model, parameters, [(1, batch), (2, batch)], vector, "here"), whole
    )


def test_a_product_that_is_not_finite_names_the_batch():
    model, parameters, batch = tiny_model("dense", torch.float32)
    huge = unflat(torch.full_like(flat(parameters), 1e38), parameters)
    for numbers, told in (([41], "batch 41"), ([41, 42], "batches 41 to 42")):
        with pytest.raises(RunError, match=f"runs/x/7: vector 3: .* of {told} is not finite$"):
            hessian.mean_product(
                model,
                parameters,
                [(number, batch) for number in numbers],
                huge,
                "runs/x/7: vector 3",
            )


@pytest.mark.parametrize(
    ("kind", "space"), [("dense", "1st-unilateral"), ("mixture", "2nd-bilateral")]
)
def test_products_in_a_strategys_coordinates_are_those_of_the_whole_hessian(kind, space):
    model, parameters, batch = tiny_model(kind)
    inputs, targets = batch
    gradients = [hessian.gradient(model, parameters, (inputs[[i]], targets[[i]])) for i in range(3)]
    gradients += [random_like(parameters, seed) for seed in range(20, 30)]
    source, geometry = strategy_of(space)
    bases = hessian.estimate_bases(model.matrices, parameters, gradients, source, geometry)
    blocks = []
    for name, parameter in parameters.items():
        if name not in model.matrices:
            blocks.append(torch.eye(parameter.numel(), dtype=torch.float64))
            continue
        for index in range(len(matrices(parameter))):
            stack = torch.stack([matrices(one[name])[index] for one in gradients])  # (N, m, n)
            stack = stack.mean(0, keepdim=True) if source == "1st" else stack
            rows, columns = (stack @ stack.mT).mean(0), (stack.mT @ stack).mean(0)
            is_wide, is_bilateral = len(rows) < len(columns), geometry == "bilateral"
            U = eigenbasis_of(rows, bases[name].left, index, is_rotated=is_bilateral or is_wide)
            V = eigenbasis_of(
                columns, bases[name].right, index, is_rotated=is_bilateral or not is_wide
            )
            blocks.append(torch.kron(U, V))  # in row-major order, vec(U A V^T) = kron(U, V) vec(A)
    rotation = torch.block_diag(*blocks)
    matrix = rotation.T @ full_hessian(model, parameters, batch) @ rotation
    vector = cauchy_vector(parameters, 4, 0)
    product = hessian.from_weights(
        bases,
        hessian.hessian_vector_product(model, parameters, batch, hessian.to_weights(bases, vector)),
    )
    torch.testing.assert_close(flat(product), matrix @ flat(vector))


def matrices(values):
    """Of a parameter: one, or a mixture's one per expert."""
    return values.reshape(-1, *values.shape[-2:])


def eigenbasis_of(covariance, sides, index, *, is_rotated):
    """A basis, after a check that it is orthogonal and makes the covariance diagonal, the largest
    eigenvalue first."""
    if not is_rotated:
        assert sides is None
        return torch.eye(len(covariance), dtype=covariance.dtype)
    side = matrices(sides)[index]
    torch.testing.assert_close(
        side.T @ side, torch.eye(len(side), dtype=side.dtype), atol=1e-10, rtol=0
    )
    turned = side.T @ covariance @ side
    torch.testing.assert_close(turned, turned.diagonal().diag(), atol=1e-8, rtol=0)
    assert (turned.diagonal().diff() < 1e-8).all()
    return side.contiguous()


def numbers_of(cell):
    """`1.2 (3.4, 0.5)`: from the sample, from half of it, and extrapolated."""
    return [float(text) for text in re.findall(r"[^ (),]+", cell)]


def test_command_measures_all_coordinates_at_one_checkpoint(run, tmp_path, capsys):
    arguments = [
        "hessian-norm",
        str(run),
        "--strategies",
        "--format",
        "csv",
        "--out",
        str(tmp_path / "figure"),
    ]
    sample = ["--vectors", "5", "--batches-per-vector", "2", "--basis-batches", "4"]
    assert main([*arguments, *sample, "--checkpoint", "14"]) == 0
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    names = [
        "original",
        *(f"{'/'.join(strategy_of(space))}, 4 batches" for space in STRATEGY_SPACES[1:]),
    ]
    assert [row["coordinates"] for row in rows] == names
    assert {row["at"] for row in rows} == {"14"}
    for row in rows:
        norms = numbers_of(row["norm"])
        assert float(row["95 % low"]) < min(norms) <= norms[0] < float(row["95 % high"])
        expected = [
            own / other for own, other in zip(norms, numbers_of(rows[0]["norm"]), strict=True)
        ]
        assert numbers_of(row["of original"]) == pytest.approx(expected, abs=2e-3)
        assert row["sample"] == "5 x 64 tokens"
    assert "2nd/bilateral, 4 batches" in (tmp_path / "figure.json").read_text()
    assert len({row["norm"] for row in rows}) == 5
    named = ["hessian-norm", str(run / "checkpoints" / "00000014"), *arguments[2:]]
    for again in ([*named, *sample], [*named, "--measured"], [*arguments, "--measured"]):
        assert main(again) == 0  # read again, not measured again
        assert list(csv.DictReader(capsys.readouterr().out.splitlines())) == rows
        shutil.rmtree(run / "checkpoints", ignore_errors=True)


def test_slowdowns_stand_beside_the_norms_as_far_as_there_are_runs(run, tmp_path, capsys):
    results = [made_up(run, space, 14) for space in STRATEGY_SPACES]
    for result in results:
        result.write(run)
    runs = tmp_path / "runs"
    present = ("pipedream-lr", "nesterov", "basis-rotation", "basis-rotation 1st/unilateral")
    for method in present:
        for stages in (1, 4, 32):
            slowness = 1 if stages == 1 else {"basis-rotation": 2, "pipedream-lr": 9}.get(method, 5)
            settings = {"pipeline.stages": stages, "optimizer.beta2": 0.997, **VARIANTS[method]}
            write_experiment(runs, "laptop", settings, slowness=slowness, seeds=(0, 1))
    delays = strategy_slowdowns(load([runs]))
    assert {row["stages"] for row in delays.values()} == {32}
    ratios = {space: row["ratio"] for space, row in delays.items()}
    assert ratios == pytest.approx(
        {"original": 9, "1st-unilateral": 5, "2nd-bilateral": 2}, rel=0.05
    )
    assert set(VARIANT_OF_SPACE.values()) <= VARIANTS.keys()
    column = strategy_table(results, delays)["slowdown at P = 32"]
    assert column[0] == f"{slowdown_text(delays['original'])} (pipedream-lr)"
    assert column[2] == "not run (basis-rotation 1st/bilateral)"
    arguments = ["hessian-norm", str(run), "--strategies", "--measured", "--runs", str(runs)]
    assert main([*arguments, "--out", str(tmp_path / "both")]) == 0
    assert "slowdown at P = 32" in (tmp_path / "both.json").read_text()
    deep = load([runs])
    with pytest.raises(UserError, match="no strategy has runs there at P = 1 and at another P"):
        strategy_slowdowns(deep[deep["pipeline.stages"] > 1])


def made_up(run, space, iteration):
    return norm_result(
        run, "pipedream", 4, iteration, space, 100, 10.0 + STRATEGY_SPACES.index(space), [1.0] * 6
    )


def test_only_complete_measurements_of_one_checkpoint_are_compared(tmp_path):
    results = [made_up("run", space, 14) for space in STRATEGY_SPACES]
    [complete] = complete_measurements(results[::-1])
    assert [one.space for one in complete] == list(STRATEGY_SPACES)
    assert complete_measurements(results[1:]) == []
    assert complete_measurements([made_up("run", "original", 30), *results[1:]]) == []
    others = [made_up("other/run", space, 14) for space in STRATEGY_SPACES]
    assert complete_measurements([*results, *others]) == [
        results,
        others,
    ]  # seeds of one name in two folders
    for result in (*results, made_up("run", "original", 30)):
        result.write(tmp_path)
    assert list(results_of(tmp_path, STRATEGY_SPACES).values()) == results
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
        (["--measured", "--rotated"], "run `brx hessian-norm --rotated "),
        (["--by", "kind", "--format", "csv"], "--by kind: several tables are no csv"),
        (["--basis-from", "nowhere"], "nowhere: "),
        (["--runs", "x"], "--runs: only with --strategies"),
        (["--strategies"], "--basis-batches 200: "),  # more than the run's iterations
        (["--batches-per-vector", "3"], "--batches-per-vector 3: must be even"),
        (["--vectors", "2"], "at least 3"),
        (["--checkpoint", "8"], "no such checkpoint; there are: 7, 14, 21, 28, 30"),
    ],
)
def test_mistakes(run, arguments, expected, capsys):
    assert main(["hessian-norm", str(run), *arguments]) == 2
    assert expected in capsys.readouterr().err
    assert not (run / "analysis").exists()
