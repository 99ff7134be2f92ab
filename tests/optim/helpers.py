"""Parameters and gradients from seeds alone; numbers of threads."""

import itertools
from contextlib import contextmanager

import torch

STRATEGIES = list(itertools.product(["2nd", "1st"], ["bilateral", "unilateral"]))


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def parameters(num, *shape, dtype=torch.float32):
    return [torch.nn.Parameter(random(*shape, seed=k, dtype=dtype)) for k in range(num)]


def give_gradients(series, time):
    for k, parameter in enumerate(series):
        parameter.grad = random(*parameter.shape, seed=100 * time + k, dtype=parameter.dtype)


@contextmanager
def threads(num):
    before = torch.get_num_threads()
    torch.set_num_threads(num)
    try:
        yield
        assert torch.get_num_threads() == num
    finally:
        torch.set_num_threads(before)


def train(optimizer, series, first, last):
    for time in range(first, last):
        give_gradients(series, time)
        optimizer.step()


def full_rank_gradients(num, *shape, seed=1, dtype=torch.float64):
    rows, columns = shape[
        -2:
    ]  # a fixed part makes all eigenvalues distinct; noise keeps every step different
    scales = torch.outer(
        torch.linspace(3, 1, rows).double(), torch.linspace(2, 1, columns).double()
    )
    return [
        (scales * random(*shape, seed=seed + k, dtype=torch.float64)).to(dtype) for k in range(num)
    ]


def take_steps(optimizer, series, gradient_lists):
    for gradients in zip(*gradient_lists, strict=True):
        for parameter, gradient in zip(series, gradients, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()


def assert_orthonormal(state):
    for basis in (value for name, value in state.items() if name.endswith("_basis")):
        torch.testing.assert_close(
            basis.mT @ basis, torch.eye(basis.shape[-1]).expand_as(basis), rtol=0, atol=1e-5
        )
