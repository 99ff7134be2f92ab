"""Products of bf16 matrices in fp32 against float64, and against torch's own."""

import pytest
import torch
from torch.overrides import _get_current_function_mode_stack

from brx.methods import bf16_products
from brx.methods.bf16_products import (
    Fp32Products,
    fast_bf16_products,
    step_without_hooks,
    with_fast_bf16_products,
)


def bf16(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).bfloat16()


A, B, C = bf16(5, 7), bf16(7, 3, seed=1), bf16(5, 3, seed=2)
STACKS = bf16(4, 5, 7), bf16(4, 7, 3, seed=1), bf16(4, 5, 3, seed=2)


def by_hand(x, y, addend, beta, alpha):
    """In float64, rounded once."""
    return (beta * addend.double() + alpha * (x.double() @ y.double())).bfloat16()


@pytest.mark.numerics
@pytest.mark.parametrize(("x", "y", "addend"), [(A, B, C), STACKS], ids=["matrices", "stacks"])
def test_products_are_rounded_once(x, y, addend):
    add_product = torch.addmm if x.ndim == 2 else torch.baddbmm
    with Fp32Products():
        product = x @ y
        weighted = add_product(addend, x, y, beta=-4.775, alpha=2.0315)
    assert product.dtype == weighted.dtype == torch.bfloat16
    assert torch.equal(product, by_hand(x, y, addend, 0.0, 1.0))
    assert torch.equal(weighted, by_hand(x, y, addend, -4.775, 2.0315))


@pytest.mark.numerics
def test_torchs_own_are_the_same_to_a_rounding():
    x = bf16(64, 256)
    with Fp32Products():
        product = x @ x.mT
    torch.testing.assert_close(product, x @ x.mT, rtol=2**-7, atol=0)


def test_result_is_written_into_out():
    out = torch.empty_like(C)
    with Fp32Products():
        returned = torch.mm(A, B, out=out)
    assert returned is out
    assert torch.equal(out, by_hand(A, B, C, 0.0, 1.0))


@pytest.mark.numerics
def test_every_spelling_is_known():
    expected = by_hand(A, B, C, 0.0, 1.0)
    with Fp32Products():
        for product in (A @ B, torch.mm(A, B), A.mm(B), torch.matmul(A, B), A.matmul(B)):
            assert torch.equal(product, expected)
        assert torch.equal(C.addmm(A, B), by_hand(A, B, C, 1.0, 1.0))
        stacked = by_hand(*STACKS, 0.0, 1.0)
        assert torch.equal(torch.bmm(*STACKS[:2]), stacked)
        assert torch.equal(STACKS[0].bmm(STACKS[1]), stacked)
        assert torch.equal(STACKS[2].baddbmm(*STACKS[:2]), by_hand(*STACKS, 1.0, 1.0))


def test_other_products_stay():
    x, y = A.float(), B.float()
    with Fp32Products():
        assert torch.equal(x @ y, torch.mm(x, y))
        assert (A.half() @ B.half()).dtype == torch.half
        with pytest.raises(RuntimeError, match="dtype"):
            A @ y


@pytest.mark.parametrize(
    ("device", "has_instructions", "is_needed"),
    [("cpu", True, False), ("cpu", False, True), ("meta", False, False)],
)
def test_context_is_for_cpus_without_instructions(device, has_instructions, is_needed, monkeypatch):
    monkeypatch.setattr(bf16_products, "cpu_multiplies_bf16", lambda: has_instructions)
    context = fast_bf16_products([torch.ones(2, device=device)])
    assert isinstance(context, Fp32Products) == is_needed


class Orthogonalizing(torch.optim.SGD):
    """Remembers how its products were made."""

    @torch.no_grad()
    def step(self, closure=None):
        self.modes = _get_current_function_mode_stack()
        return super().step(closure)


def make_step(has_instructions, monkeypatch):
    monkeypatch.setattr(bf16_products, "cpu_multiplies_bf16", lambda: has_instructions)
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = with_fast_bf16_products(Orthogonalizing)([weight], lr=0.5)
    weight.grad = torch.ones(3)
    optimizer.step()
    assert torch.equal(weight, torch.full((3,), 0.5))
    return optimizer


def test_steps_of_a_class_run_in_the_context(monkeypatch):
    (mode,) = make_step(False, monkeypatch).modes
    assert isinstance(mode, Fp32Products)
    assert make_step(True, monkeypatch).modes == []
    assert _get_current_function_mode_stack() == []


def test_class_keeps_its_name():
    assert with_fast_bf16_products(Orthogonalizing).__name__ == "Orthogonalizing"


def test_hooks_are_not_called_by_the_inner_step():
    torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])  # torch wraps its step now
    assert torch.optim.SGD.step.hooked
    assert not getattr(step_without_hooks(torch.optim.SGD), "hooked", False)
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = with_fast_bf16_products(torch.optim.SGD)([weight])
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    optimizer.step()
    assert calls == [1]
