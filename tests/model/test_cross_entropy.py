"""The chunked loss against torch's own on all logits: values, gradients, second derivatives,
memory."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from brx.model import head
from brx.model.head import head_loss, loss_of

TOKENS, WIDTH, VOCABULARY = 37, 12, 101


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Chunks of 5 tokens, the last one of 2."""
    monkeypatch.setattr(head, "CHUNK_LOGITS", 5 * VOCABULARY)


def inputs(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = [(TOKENS, WIDTH), (VOCABULARY, WIDTH), (VOCABULARY,)]
    tensors = [
        torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes
    ]
    return tensors, torch.randint(VOCABULARY, (TOKENS,), generator=generator)


def reference(tensors, targets):
    logits = F.linear(*tensors)
    return F.cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), targets)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_loss_is_torchs(dtype):
    tensors, targets = inputs(dtype)
    torch.testing.assert_close(head_loss(*tensors, targets), reference(tensors, targets))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_are_those_of_torch(dtype):
    tensors, targets = inputs(dtype)
    found, expected = head_loss(*tensors, targets), reference(tensors, targets)
    # Upstream of 3: the gradients that were made in the forward pass have to be scaled.
    torch.testing.assert_close(
        torch.autograd.grad(3 * found, tensors), torch.autograd.grad(3 * expected, tensors)
    )


def test_bf16_autocast_rounds_no_more_than_torch_does():
    tensors, targets = inputs()
    exact = torch.autograd.grad(reference([t.double() for t in tensors], targets), tensors)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = head_loss(*tensors, targets), reference(tensors, targets)
    # One logit at a time they are equal; only the order of the sums differs.
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    ours, theirs = torch.autograd.grad(found, tensors), torch.autograd.grad(expected, tensors)
    for one, other, true in zip(ours, theirs, exact, strict=True):
        assert one.dtype == torch.float32
        assert (one - true).norm() <= 1.1 * (other - true).norm()


def test_second_derivatives_are_those_of_torch():
    tensors, targets = inputs(torch.float64)
    vectors = [torch.randn_like(tensor) for tensor in tensors]

    def product(loss):
        return torch.autograd.grad(
            torch.autograd.grad(loss, tensors, create_graph=True), tensors, vectors
        )

    torch.testing.assert_close(
        product(head_loss(*tensors, targets)), product(reference(tensors, targets))
    )


def test_second_backward_pass_gives_the_same():
    tensors, targets = inputs(torch.float64)
    loss = head_loss(*tensors, targets)
    first = [gradient.clone() for gradient in torch.autograd.grad(loss, tensors, retain_graph=True)]
    torch.testing.assert_close(
        torch.autograd.grad(2 * loss, tensors), tuple(2 * gradient for gradient in first)
    )


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation makes."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, torch.Tensor)}
        for tensor in out if isinstance(out, (list, tuple)) else [out]:
            if (
                isinstance(tensor, torch.Tensor)
                and tensor.untyped_storage().data_ptr() not in given
            ):
                self.numel = max(self.numel, tensor.numel())
        return out


@pytest.mark.parametrize(
    ("chunk", "trains", "expected"),
    [
        (5 * VOCABULARY, True, VOCABULARY * WIDTH),  # the weight's gradient
        (5 * VOCABULARY, False, 5 * VOCABULARY),  # a validation makes none
        (10**6, True, TOKENS * VOCABULARY),
    ],
)
def test_no_tensor_holds_all_logits(chunk, trains, expected, monkeypatch):
    monkeypatch.setattr(head, "CHUNK_LOGITS", chunk)
    tensors, targets = inputs()
    with Largest() as seen, torch.set_grad_enabled(trains):
        found = head_loss(*tensors, targets)
        if trains:
            found.backward()
    assert seen.numel == expected
    torch.testing.assert_close(found, reference(tensors, targets))


class Silent(head.Head):
    def forward(self, x):
        return 0 * super().forward(x)


class SilentLinear(nn.Linear):
    def forward(self, x):
        return 0 * super().forward(x)


def silent_by_hook():
    silent = head.Head(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY))
    silent.linear.register_forward_hook(lambda module, given, logits: 0 * logits)
    return silent


@pytest.mark.parametrize(
    "make",
    [
        lambda: Silent(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)),
        lambda: head.Head(nn.LayerNorm(WIDTH), SilentLinear(WIDTH, VOCABULARY)),
        lambda: head.Head(nn.LayerNorm(WIDTH), nn.Sequential(SilentLinear(WIDTH, VOCABULARY))),
        silent_by_hook,
    ],
    ids=["head", "linear", "other module", "hook"],
)
@pytest.mark.parametrize("chunk", [10, 10**9])
def test_loss_is_the_one_of_a_changed_heads_logits(make, chunk, monkeypatch):
    monkeypatch.setattr(head, "CHUNK_LOGITS", chunk)
    loss = loss_of(make(), torch.randn(2, 3, WIDTH), torch.zeros(2, 3, dtype=torch.int64), 101)
    torch.testing.assert_close(loss, torch.tensor(VOCABULARY).log())


def test_loss_in_chunks_of_a_head_without_weights():
    x = torch.randn(2, 3, VOCABULARY, requires_grad=True)
    targets = torch.zeros(2, 3, dtype=torch.int64)
    loss = loss_of(nn.Identity(), x, targets, VOCABULARY)
    torch.testing.assert_close(loss, F.cross_entropy(x.flatten(0, 1), targets.flatten()))
