"""The mixture of experts against every expert on every token, and its losses against their
formulas."""

import math

import pytest
import torch
import torch.nn.functional as F

from brx.config.schema import MoEConfig
from brx.model.mixture import Mixture

WIDTH, HIDDEN = 6, 10


def make_mixture(experts=5, top_k=2, dtype=torch.float64, **losses):
    mixture = Mixture(WIDTH, HIDDEN, MoEConfig(experts=experts, top_k=top_k, **losses)).to(dtype)
    generator = torch.Generator().manual_seed(0)
    for parameter in mixture.parameters():
        parameter.data.normal_(0.0, 0.5, generator=generator)
    return mixture


def make_tokens(batch=3, positions=7, dtype=torch.float64, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, positions, WIDTH, generator=generator, dtype=torch.float64).to(dtype)


def dense(mixture, x):
    """All experts on all tokens, one token at a time; the parameters by name."""
    weights = dict(mixture.named_parameters())
    experts = [weights[name] for name in ("up.weight", "up.bias", "down.weight", "down.bias")]
    outputs = []
    for token in x.flatten(0, 1):
        logits = weights["router.weight"] @ token
        chosen = logits.argsort(descending=True)[: mixture.config.top_k]
        share = torch.exp(logits[chosen]) / torch.exp(logits[chosen]).sum()
        every = [
            down @ F.gelu(up @ token + up_bias) + down_bias
            for up, up_bias, down, down_bias in zip(*experts, strict=True)
        ]
        outputs.append(
            sum(part * every[expert] for part, expert in zip(share, chosen, strict=True))
        )
    return torch.stack(outputs).view_as(x)


@pytest.mark.parametrize(
    ("experts", "top_k", "shape", "popular"),
    [
        (5, 2, (3, 7), None),
        (2, 1, (1, 1), None),
        (3, 3, (3, 7), None),
        (8, 2, (1, 1), None),
        (5, 1, (3, 7), 4),
    ],
)
def test_equals_dense_computation(experts, top_k, shape, popular):
    """`popular`: the expert to which all tokens go."""
    mixture, x = make_mixture(experts, top_k), make_tokens(*shape)
    if popular is not None:
        x = x.abs()
        mixture.router.weight.data[popular] += 10.0
    found, expected = [], []
    for compute, gradients in ((lambda m, t: m(t)[0], found), (dense, expected)):
        given = x.clone().requires_grad_()
        y = compute(mixture, given)
        direction = torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view_as(y)
        gradients += [
            y.detach(),
            *torch.autograd.grad(y, [given, *mixture.parameters()], direction),
        ]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    if popular is not None:
        mixture(x)[0].sum().backward()
        assert mixture.up.weight.grad.abs().amax((1, 2)).nonzero().tolist() == [[popular]]


def test_losses_are_their_formulas():
    # Switch Transformer, equation 4, and ST-MoE, equation 5, token by token.
    mixture, x = make_mixture(load_balance_weight=0.7, router_z_weight=0.3), make_tokens()
    logits = (x.flatten(0, 1) @ mixture.router.weight.T).detach()
    num_tokens, experts = logits.shape
    assigned, probability, z = [0] * experts, [0.0] * experts, 0.0
    for row in logits:
        normalizer = sum(math.exp(value) for value in row)
        z += math.log(normalizer) ** 2
        for place in sorted(range(experts), key=lambda expert: -row[expert])[:2]:
            assigned[place] += 1
        for place in range(experts):
            probability[place] += math.exp(row[place]) / normalizer
    balance = (
        experts
        * sum(a * p for a, p in zip(assigned, probability, strict=True))
        / (2 * num_tokens**2)
    )
    _, loss = mixture(x)
    assert loss.item() == pytest.approx(0.7 * balance + 0.3 * z / num_tokens, rel=1e-12)
    gradients = torch.autograd.grad(loss, list(mixture.parameters()), allow_unused=True)
    assert [gradient is not None for gradient in gradients] == [
        True,
        False,
        False,
        False,
        False,
    ]  # the router alone


def test_autocast_routes_as_fp32_does():
    mixture, x = make_mixture(dtype=torch.float32), make_tokens(16, 16, dtype=torch.float32)
    expected, loss = mixture(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, same_loss = mixture(x)
    assert found.dtype == torch.bfloat16
    assert torch.equal(loss, same_loss)
    torch.testing.assert_close(found.float(), expected, rtol=0.05, atol=0.05)


def test_gradients_are_the_same_every_time():
    mixture, x = make_mixture(dtype=torch.float32), make_tokens(16, 16, dtype=torch.float32)
    runs = []
    for _ in range(3):
        given = x.clone().requires_grad_()
        y, loss = mixture(given)
        runs.append(torch.autograd.grad(y.square().sum() + loss, [given, *mixture.parameters()]))
    for run in runs[1:]:
        assert all(torch.equal(one, other) for one, other in zip(runs[0], run, strict=True))


def test_other_routings_do_not_compile_anew():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    mixture = make_mixture(dtype=torch.float32)
    mixture.leave_experts_uncompiled()
    compiled = torch.compile(mixture, backend="eager")
    for seed in range(6):
        x = make_tokens(dtype=torch.float32, seed=seed)
        for one, other in zip(compiled(x), mixture(x), strict=True):
            torch.testing.assert_close(one, other)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
