"""Muon in batches against torch's, which takes one matrix after another."""

import copy

import pytest
import torch

from brx.methods import muon
from brx.methods.bf16_products import fast_bf16_products
from brx.methods.muon import BatchedMuon, newton_schulz

COEFFICIENTS = (3.4445, -4.775, 2.0315)  # torch's


def two_models(shapes, seed=0):
    """The same matrices twice, as parameters."""
    generator = torch.Generator().manual_seed(seed)
    matrices = [torch.randn(shape, generator=generator) for shape in shapes]
    return [[torch.nn.Parameter(matrix.clone()) for matrix in matrices] for _ in range(2)]


def give_gradients(models, step):
    generator = torch.Generator().manual_seed(step)
    for alike in zip(*models, strict=True):
        gradient = torch.randn(alike[0].shape, generator=generator)
        for parameter in alike:
            parameter.grad = gradient.clone()


SHAPES = [(32, 32), (64, 32), (32, 64), (32, 32), (64, 32), (8, 24), (8, 24)]


@pytest.mark.numerics
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.3},
        {"nesterov": False, "momentum": 0.5},
        {"ns_steps": 3, "ns_coefficients": (2.0, -1.5, 0.5)},
    ],
)
def test_steps_are_torchs(options):
    ours, theirs = two_models(SHAPES)
    optimizers = BatchedMuon(ours, lr=0.1, **options), torch.optim.Muon(theirs, lr=0.1, **options)
    for step in range(4):
        give_gradients([ours, theirs], step)
        with fast_bf16_products(theirs):  # rounded like ours
            for optimizer in optimizers:
                optimizer.step()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.numerics
@pytest.mark.parametrize("num_matrices", [1, 2, 3, 8, 33])
@pytest.mark.parametrize("shape", [(17, 17), (17, 50), (50, 17), (64, 64), (64, 200)])
def test_batch_does_not_change_a_matrix(num_matrices, shape):
    # So a trajectory does not depend on the stages that a device has.
    if not muon.makes_batches(torch.device("cpu")):
        pytest.skip("no batches on this processor")
    generator = torch.Generator().manual_seed(0)
    matrices = torch.randn(num_matrices, *shape, generator=generator)
    with fast_bf16_products([matrices]):  # as in a step
        together = newton_schulz(matrices, COEFFICIENTS, 5, 1e-7)
        alone = [newton_schulz(matrix, COEFFICIENTS, 5, 1e-7) for matrix in matrices]
    torch.testing.assert_close(together, torch.stack(alone), rtol=0, atol=0)


@pytest.mark.parametrize("largest", [1, 1024, 5000])
def test_small_batches_give_the_same(largest, monkeypatch):
    models = two_models(SHAPES)
    optimizers = [BatchedMuon(model, lr=0.1) for model in models]
    give_gradients(models, 0)
    optimizers[0].step()
    monkeypatch.setattr(muon, "LARGEST_BATCH", largest)
    optimizers[1].step()
    torch.testing.assert_close(models[0], models[1], rtol=0, atol=0)


def test_groups_have_their_own_rates():
    ours, theirs = two_models([(32, 32)] * 3)
    optimizers = []
    for kind, model in ((BatchedMuon, ours), (torch.optim.Muon, theirs)):
        groups = [{"params": model[:1], "lr": 0.5}, {"params": model[1:], "weight_decay": 0.0}]
        optimizers.append(kind(groups, lr=0.1))
    give_gradients([ours, theirs], 0)
    with fast_bf16_products(theirs):
        for optimizer in optimizers:
            optimizer.step()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_matrix_without_a_gradient_stays():
    (model, _) = two_models([(8, 8)] * 2)
    optimizer = BatchedMuon(model, lr=0.1)
    model[1].grad = torch.ones(8, 8)
    before = copy.deepcopy(model[0])
    optimizer.step()
    assert torch.equal(model[0], before)
    assert model[0] not in optimizer.state


def test_state_is_torchs():
    ours, theirs = two_models(SHAPES)
    optimizer, torchs = BatchedMuon(ours, lr=0.1), torch.optim.Muon(theirs, lr=0.1)
    give_gradients([ours, theirs], 0)
    optimizer.step()
    torchs.load_state_dict(optimizer.state_dict())
    assert torchs.state_dict()["state"].keys() == optimizer.state_dict()["state"].keys()


def test_closure_gives_the_loss():
    (model, _) = two_models([(8, 8)])
    optimizer = BatchedMuon(model, lr=0.1)

    def closure():
        loss = model[0].square().sum()
        loss.backward()
        return loss

    expected = model[0].square().sum().item()
    assert optimizer.step(closure).item() == pytest.approx(expected)


def test_several_threads_make_no_batches(monkeypatch):
    # They round large products otherwise in a batch.
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert not muon.makes_batches(torch.device("cpu"))


def test_hooks_of_a_step_run_once(monkeypatch):
    monkeypatch.setattr(muon, "makes_batches", lambda device: False)
    weight = torch.nn.Parameter(torch.ones(20, 20))
    torch.optim.Muon([weight])  # torch wraps its step now
    optimizer = BatchedMuon([weight])
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    weight.grad = torch.ones(20, 20)
    optimizer.step()
    assert calls == [1]
