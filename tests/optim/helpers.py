"""Parameters and gradients that depend on seeds alone, and a switch for the number of threads."""

import itertools
from contextlib import contextmanager

import torch

STRATEGIES = list(itertools.product(["2nd", "1st"], ["bilateral", "unilateral"]))


def random(*shape, seed=0, dtype=torch.float32):
    """Normal noise, drawn in float64 so that it is the same in every dtype, up to rounding."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def parameters(num, *shape, dtype=torch.float32):
    """Parameters of the same shape, each from a seed of its own."""
    return [torch.nn.Parameter(random(*shape, seed=k, dtype=dtype)) for k in range(num)]


def give_gradients(series, time):
    """Set the gradients of step `time`, which depend on `time` and on a parameter's place alone."""
    for k, parameter in enumerate(series):
        parameter.grad = random(*parameter.shape, seed=100 * time + k, dtype=parameter.dtype)


@contextmanager
def threads(num):
    """Compute on `num` threads, and check that nothing in the block changes that."""
    before = torch.get_num_threads()
    torch.set_num_threads(num)
    try:
        yield
        assert torch.get_num_threads() == num
    finally:
        torch.set_num_threads(before)


def train(optimizer, series, first, last):
    """Take the steps from `first` up to `last`, without the latter."""
    for time in range(first, last):
        give_gradients(series, time)
        optimizer.step()


def full_rank_gradients(num, *shape, seed=1, dtype=torch.float64):
    """Gradients for `num` steps: noise, with fixed scales that make all eigenvalues distinct."""
    rows, columns = shape[-2:]
    row_scales = torch.linspace(3, 1, rows).double()
    column_scales = torch.linspace(2, 1, columns).double()
    scales = torch.outer(row_scales, column_scales)
    return [
        (scales * random(*shape, seed=seed + k, dtype=torch.float64)).to(dtype) for k in range(num)
    ]


def take_steps(optimizer, series, gradient_lists):
    """Take a step per gradient; `gradient_lists` has a list of gradients for each parameter."""
    for gradients in zip(*gradient_lists, strict=True):
        for parameter, gradient in zip(series, gradients, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()


def assert_orthonormal(state):
    """Check that Q^T Q = I for every basis Q in a parameter's state."""
    for name, basis in state.items():
        if name.endswith("_basis"):
            identity = torch.eye(basis.shape[-1]).expand_as(basis)
            torch.testing.assert_close(basis.mT @ basis, identity, rtol=0, atol=1e-5)
