"""Hessian-vector products against the whole Hessian, torch.func and finite differences."""

import pytest
import torch
from torch.func import functional_call, grad, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

from brx.curvature import hessian
from brx.curvature.hessian import gradient, hessian_vector_product, mean_product, training_loss
from brx.errors import RunError
from tests.curvature.helpers import KINDS, flat, full_hessian, random_like, tiny_model, unflat


@pytest.mark.parametrize("kind", KINDS)
def test_product_is_the_whole_hessian_times_the_vector(kind):
    model, parameters, batch = tiny_model(kind)
    matrix = full_hessian(model, parameters, batch)
    vector = random_like(parameters)
    product = flat(hessian_vector_product(model, parameters, batch, vector))
    expected = matrix @ flat(vector)
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(product, expected, rtol=1e-9, atol=1e-12)


def test_gradient_and_product_are_finite_differences():
    model, parameters, batch = tiny_model("mixture")
    vector = random_like(parameters)
    step = 1e-6
    at = [{name: value + sign * step * vector[name] for name, value in parameters.items()} for sign in (1, -1)]
    slope = (training_loss(model, at[0], batch) - training_loss(model, at[1], batch)) / (2 * step)
    assert (flat(gradient(model, parameters, batch)) @ flat(vector)).item() == pytest.approx(slope.item(), rel=1e-6)
    after, before = (flat(gradient(model, one, batch)) for one in at)
    found = flat(hessian_vector_product(model, parameters, batch, vector))
    torch.testing.assert_close(found, (after - before) / (2 * step), rtol=1e-6, atol=1e-7)


def test_a_dense_batch_in_parts_gives_the_same_product(monkeypatch):
    model, parameters, batch = tiny_model("dense")
    vector = random_like(parameters)
    whole = hessian_vector_product(model, parameters, batch, vector)
    assert len(hessian._parts(model, batch)) == 1
    for tokens, worth, parts in ((5, 1, [1, 1, 1]), (10, 1, [2, 1]), (1000, 1, [2, 1]), (1000, 2**14, [3])):
        monkeypatch.setattr(hessian, "WORTH_A_PASS", worth)
        monkeypatch.setitem(hessian.TOKENS_PER_PASS, "cpu", tokens)
        assert [len(inputs) for inputs, _ in hessian._parts(model, batch)] == parts  # of 3 examples of 5 tokens
        product = hessian_vector_product(model, parameters, batch, vector)
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
        monkeypatch.setattr(hessian, "WORTH_A_PASS", at_a_time * inputs.numel() * model.embedding.tokens.embedding_dim)
        assert [numbers for numbers, _ in hessian._joined(model, batches)] == passes
        found = mean_product(model, parameters, batches, vector, "here")
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_a_mixtures_batches_are_neither_split_nor_joined(monkeypatch):
    model, parameters, batch = tiny_model("mixture")
    vector = random_like(parameters)
    whole = hessian_vector_product(model, parameters, batch, vector)
    assert [numbers for numbers, _ in hessian._joined(model, [(1, batch), (2, batch)])] == [[1], [2]]
    monkeypatch.setitem(hessian.TOKENS_PER_PASS, "cpu", 5)
    assert len(hessian._parts(model, batch)) == 1
    torch.testing.assert_close(mean_product(model, parameters, [(1, batch), (2, batch)], vector, "here"), whole)


def test_a_product_that_is_not_finite_names_the_batch():
    model, parameters, batch = tiny_model("dense", torch.float32)
    huge = unflat(torch.full_like(flat(parameters), 1e38), parameters)
    for numbers, told in (([41], "batch 41"), ([41, 42], "batches 41 to 42")):
        with pytest.raises(RunError, match=f"runs/x/7: vector 3: .* of {told} is not finite; try --precision fp64"):
            mean_product(model, parameters, [(number, batch) for number in numbers], huge, "runs/x/7: vector 3")
