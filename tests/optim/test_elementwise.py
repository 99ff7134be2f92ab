"""The elementwise part in plain operations, for compiling: equal to torch's kernel and to the naive
algorithm."""

import shutil
from functools import partial

import pytest
import torch

from brx.optim import BasisRotation
from brx.optim.elementwise import (
    Kernels,
    above_noise,
    add_updates,
    compiled_kernels,
    rotated_update,
)
from brx.optim.reduced_precision import factor_rounding, product
from tests.optim.helpers import full_rank_gradients, parameters, random, take_steps
from tests.optim.naive_basis_rotation import above_noise as naive_above_noise
from tests.optim.naive_basis_rotation import naive_basis_rotation

double = partial(random, dtype=torch.float64)
PLAIN = Kernels(rotated_update, add_updates)


@pytest.fixture
def plain_kernels(monkeypatch):
    monkeypatch.setattr(BasisRotation, "_kernels", lambda self, batch: PLAIN)


@pytest.mark.parametrize("geometry", ["bilateral", "unilateral"])
@pytest.mark.usefixtures("plain_kernels")
def test_plain_step_equals_naive_algorithm(geometry):
    weight, gradients = double(4, 7), full_rank_gradients(25, 4, 7)
    options = {"geometry": geometry, "frequency": 3, "lr": 0.01, "weight_decay": 0.1}
    parameter = torch.nn.Parameter(weight.clone())
    optimizer = BasisRotation([parameter], **options)
    for gradient, after in zip(
        gradients, naive_basis_rotation(weight, gradients, **options), strict=True
    ):
        take_steps(optimizer, [parameter], [[gradient]])
        torch.testing.assert_close(parameter.detach(), after, rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_plain_step_equals_that_of_the_kernel(dtype, monkeypatch):
    results = []
    for kernels in (None, PLAIN):
        monkeypatch.setattr(BasisRotation, "_kernels", lambda self, batch, kernels=kernels: kernels)
        series = parameters(3, 6, 4, dtype=dtype)
        optimizer = BasisRotation(series, lr=0.01, frequency=None, first_refresh=100)
        take_steps(optimizer, series, [[random(6, 4, seed=k, dtype=dtype)] * 12 for k in range(3)])
        results.append([*series, *(state["exp_avg_sq"] for state in optimizer.state.values())])
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(*results, rtol=tolerance, atol=tolerance)


def arguments(bad=None):
    momentum, second_moment = double(2, 5, 7, seed=1), double(2, 5, 7, seed=2).square()
    steps = torch.tensor([3.0, 3.0]).view(2, 1, 1)
    return double(2, 5, 7), momentum, second_moment, steps, 0.01, bad, 0.9, 0.999, 1e-8, 0.0


def test_bad_flag_leaves_the_moments_alone():
    given = arguments(bad=torch.tensor(True))
    before = [tensor.clone() for tensor in given[1:3]]
    update = rotated_update(*given)
    assert not update.any()
    assert all(map(torch.equal, given[1:3], before))


def test_plain_update_damps_an_entry_whose_momentum_is_noise():
    _, momentum, second_moment, steps, *others = arguments()
    momentum[0, 2, 3] = 3e-13
    update = rotated_update(torch.zeros_like(momentum), momentum, second_moment, steps, *others)
    correction1, correction2 = 1 - 0.9**4, 1 - 0.999**4
    mean_square = correction2 * (momentum[0] / correction1) ** 2
    damping = naive_above_noise(second_moment[0], mean_square)
    assert 0.1 < damping[2, 3] < 0.9
    step = momentum[0] / correction1 / ((second_moment[0] / correction2).sqrt() + 1e-8)
    torch.testing.assert_close(update[0], -0.01 * step * damping, rtol=1e-6, atol=0)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_compiled_functions_equal_plain_ones():
    compiled = compiled_kernels()
    plain_given, compiled_given = arguments(), arguments()
    plain = rotated_update(*plain_given)
    torch.testing.assert_close(compiled.rotated_update(*compiled_given), plain)
    torch.testing.assert_close(compiled_given[1:3], plain_given[1:3])
    weights, others = ([double(5, 7, seed=k) for k in (3, 4)] for _ in "ab")
    decay, limit = torch.tensor(0.9).double(), torch.tensor(0.5).double()
    add_updates(weights, list(plain), decay, limit)
    compiled.add_updates(others, list(plain), decay, limit)
    torch.testing.assert_close(weights, others)


def weights_after_steps(device, **options):
    """Weights and second moments after twelve steps, of which three refresh the bases."""
    series = [torch.nn.Parameter(weight.detach().to(device)) for weight in parameters(3, 16, 12)]
    optimizer = BasisRotation(series, lr=0.01, frequency=5, weight_decay=0.1, **options)
    gradients = full_rank_gradients(12, 16, 12, dtype=torch.float32)
    take_steps(optimizer, series, [[gradient.to(device) for gradient in gradients]] * 3)
    return [*series, *(state["exp_avg_sq"] for state in optimizer.state.values())]


def test_plain_steps_with_refreshes_equal_those_of_the_kernel(monkeypatch):
    expected = weights_after_steps("cpu")
    monkeypatch.setattr(BasisRotation, "_kernels", lambda self, batch: PLAIN)
    torch.testing.assert_close(weights_after_steps("cpu"), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_compiled_steps_on_a_gpu_equal_eager_ones():
    # In TF32, the default on a GPU, a difference in the last bit can change a rounding.
    in_fp32 = {"rotation_precision": "highest", "covariance_precision": "highest"}
    expected = weights_after_steps("cuda", **in_fp32)
    found = weights_after_steps("cuda", **in_fp32, compiled=True)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


# bf16's rounding lies below float32's own floor.
@pytest.mark.parametrize(("precision", "above"), [("tf32", 50), ("bf16", 300)])
@pytest.mark.parametrize("rank", [None, 1])
def test_noise_floor_follows_the_precision(precision, above, rank):
    # An entry's noise: what the rotations' rounding leaves in it, against the same in float64.
    left, right = (torch.linalg.qr(double(96, 96, seed=seed)).Q for seed in (1, 2))
    matrix = double(96, 96) if rank is None else double(96, 1) @ double(1, 96, seed=3)
    exact = left.T @ matrix @ right
    rounded = product(matrix.float()[None], right.float()[None], precision)
    rounded = product(left.T.float()[None], rounded, precision)[0]
    noise = (rounded.double() - exact).square().mean()
    rounding = factor_rounding(precision, torch.float32)
    spread = exact.square().mean().expand(96, 96).clone()
    spread[5, 5] = noise
    assert above_noise(spread.float(), rounding)[5, 5] < 0.01
    spread[5, 5] = noise * above**2
    assert above_noise(spread.float(), rounding)[5, 5] > 0.9
