"""Work side by side: all of it is done, by one thread each; what goes wrong is told; the thread count comes back."""

import pytest
import torch

from brx.optim import BasisRotation
from brx.optim.side_by_side import for_each


@pytest.fixture(params=[1, 2, 3])
def num_threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_all_items_are_worked_on_without_gradients(num_threads):
    weights = [torch.ones(3, requires_grad=True) for _ in range(20)]
    with torch.no_grad():
        for_each(lambda weight: weight.mul_(2), weights)
    assert all(weight.tolist() == [2, 2, 2] for weight in weights)
    assert torch.get_num_threads() == num_threads


def test_errors_reach_the_caller(num_threads):
    def fail(item):
        raise ValueError(f"item {item}")

    with pytest.raises(ValueError, match="item"):
        for_each(fail, [1, 2])
    assert torch.get_num_threads() == num_threads


def weights_after(num_threads, shapes, **options):
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        generator = torch.Generator().manual_seed(0)
        weights = [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]
        optimizer = BasisRotation(weights, lr=0.01, frequency=3, **options)
        for _ in range(7):
            for weight in weights:
                weight.grad = torch.randn(weight.shape, generator=generator)
            optimizer.step()
        return weights
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("source", ["1st", "2nd"])
def test_two_threads_take_the_steps_of_one(source):
    shapes = [(40, 24), (24, 40), (24, 24), (16, 8)]
    for one, two in zip(weights_after(1, shapes, source=source), weights_after(2, shapes, source=source), strict=True):
        assert torch.equal(one, two)
