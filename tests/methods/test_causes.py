"""The methods of the study of causes, against transcriptions of their equations in float64."""

import importlib
import math

import pytest
import torch

from brx.errors import UserError
from brx.methods import causes
from brx.methods.causes import LionInEigenbasis, TurnedBasisRotation, fixed_rotation
from brx.optim.basis_rotation import BasisRotation
from brx.train.checks import check_method
from tests.optim.helpers import random
from tests.train.helpers import tiny_config

m, n = 5, 3
LR, DECAY, EPS = 1e-2, 0.1, 1e-8
FIRST_REFRESH, FREQUENCY = 2, 3
NUM_STEPS = 10
BETAS = (0.9, 0.99)
OPTIONS = {
    "lr": LR,
    "betas": BETAS,
    "eps": EPS,
    "weight_decay": DECAY,
    "frequency": FREQUENCY,
    "first_refresh": FIRST_REFRESH,
}


def gradient_of(step):
    return random(m, n, seed=step, dtype=torch.float64)


def weight():
    return torch.nn.Parameter(random(m, n, seed=1000, dtype=torch.float64))


def trained(optimizer_class, **options):
    """The weight and the state's copy after each of ten steps with given gradients."""
    parameter = weight()
    optimizer = optimizer_class([parameter], **{**OPTIONS, **options})
    weights, states = [], []
    for step in range(1, NUM_STEPS + 1):
        parameter.grad = gradient_of(step)
        optimizer.step()
        weights.append(parameter.detach().clone())
        state = optimizer.state[parameter]
        states.append({name: torch.as_tensor(value).clone() for name, value in state.items()})
    return weights, states


def is_refresh(step):
    return step == FIRST_REFRESH or (step > FIRST_REFRESH and step % FREQUENCY == 0)


def bases_of(states, step, theta):
    """U and V at a step as a plain BasisRotation has them, turned; the identity before the first.

    They hang on the gradients alone, which are given, and not on the weights."""
    if step < FIRST_REFRESH:
        return torch.eye(m, dtype=torch.float64), torch.eye(n, dtype=torch.float64)
    left, right = (states[step - 1][f"{side}_basis"] for side in ("left", "right"))
    return left @ fixed_rotation(m, "left", theta), right @ fixed_rotation(n, "right", theta)


def shares(basis, covariance):
    """How v is shared among the columns of a first basis: Rayleigh quotients over their sum."""
    quotients = torch.einsum("ik,ij,jk->k", basis, covariance, basis)
    return quotients / quotients.sum()


def naive_turned(theta):
    """Algorithm 1 in turned bases, from the momentum in the original space."""
    _, plain = trained(BasisRotation)
    beta1, beta2 = BETAS
    W = weight().detach().clone()
    M, v = torch.zeros(m, n, dtype=W.dtype), torch.zeros(m, n, dtype=W.dtype)
    L, R = torch.zeros(m, m, dtype=W.dtype), torch.zeros(n, n, dtype=W.dtype)
    weights = []
    for step in range(1, NUM_STEPS + 1):
        G = gradient_of(step)
        L = beta2 * L + (1 - beta2) * G @ G.T
        R = beta2 * R + (1 - beta2) * G.T @ G
        U, V = bases_of(plain, step, theta)
        if is_refresh(step):
            if step == FIRST_REFRESH:
                v = torch.outer(shares(U, L), shares(V, R)) * v.sum()
            before = step - 1  # the moments' own number of updates
            ratio = (1 - beta2**before) / (1 - beta1**before) ** 2
            v = torch.maximum(v, (U.T @ M @ V) ** 2 * ratio)
        M = beta1 * M + (1 - beta1) * G
        v = beta2 * v + (1 - beta2) * (U.T @ G @ V) ** 2
        direction = (U.T @ M @ V / (1 - beta1**step)) / ((v / (1 - beta2**step)).sqrt() + EPS)
        W = (1 - LR * DECAY) * W - LR * U @ direction @ V.T
        weights.append(W)
    return weights


@pytest.mark.parametrize("theta", [0.3, 1.0, "random"])
def test_turned_rotation_is_its_transcription(theta):
    found, _ = trained(TurnedBasisRotation, theta=theta)
    for ours, expected in zip(found, naive_turned(theta), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)


def test_transcription_without_a_turn_is_basis_rotation():
    found, _ = trained(BasisRotation)
    for ours, expected in zip(found, naive_turned(0.0), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)


def test_no_turn_is_basis_rotation_bit_for_bit():
    (plain, _), (turned, _) = trained(BasisRotation), trained(TurnedBasisRotation, theta=0.0)
    assert torch.equal(plain[-1], turned[-1])


def test_turned_run_resumes_to_the_bit():
    parameter = weight()
    optimizer = TurnedBasisRotation([parameter], **OPTIONS, theta=0.3)
    for step in range(1, NUM_STEPS + 1):
        if step == 6:
            saved = optimizer.state_dict()
            optimizer = TurnedBasisRotation([parameter], **OPTIONS, theta=0.3)
            optimizer.load_state_dict(saved)
        parameter.grad = gradient_of(step)
        optimizer.step()
    expected, _ = trained(TurnedBasisRotation, theta=0.3)
    assert torch.equal(parameter.detach(), expected[-1])


@pytest.mark.parametrize("theta", [0.0, 0.1, 1.0, "random"])
def test_fixed_rotation_is_orthogonal(theta):
    turn = fixed_rotation(64, "left", theta)
    torch.testing.assert_close(turn.T @ turn, torch.eye(64, dtype=torch.float64))


@pytest.mark.parametrize("theta", [0.1, 0.3])
def test_theta_is_the_root_mean_square_angle(theta):
    angles = torch.linalg.eigvals(fixed_rotation(64, "left", theta)).angle()
    assert angles.square().mean().sqrt().item() == pytest.approx(theta)


def test_random_rotation_has_no_direction_of_its_own():
    turn = fixed_rotation(256, "left", "random")
    # Entries of a uniform orthogonal matrix have variance 1 / size; its trace has variance 1.
    assert turn.square().mean().item() == pytest.approx(1 / 256)
    assert abs(turn.trace().item()) < 4


def test_sides_turn_differently():
    left, right = (fixed_rotation(8, side, 0.3) for side in ("left", "right"))
    assert not torch.allclose(left, right)


def naive_lion(bases):
    """Lion with its momentum in the original space, its step in the bases of each update."""
    beta1, beta2 = 0.9, BETAS[0]
    W = weight().detach().clone()
    M = torch.zeros(m, n, dtype=W.dtype)
    weights = []
    for step in range(1, NUM_STEPS + 1):
        G, (U, V) = gradient_of(step), bases(step)
        direction = torch.sign(beta1 * (U.T @ M @ V) + (1 - beta1) * (U.T @ G @ V))
        W = (1 - LR * DECAY) * W - LR * U @ direction @ V.T
        M = beta2 * M + (1 - beta2) * G
        weights.append(W)
    return weights


def test_lion_in_the_eigenbasis_is_its_transcription():
    found, states = trained(LionInEigenbasis)
    expected = naive_lion(lambda step: bases_of(states, step, 0.0))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_lion_before_a_basis_is_lion():
    found, _ = trained(LionInEigenbasis, first_refresh=100)
    identity = torch.eye(m, dtype=torch.float64), torch.eye(n, dtype=torch.float64)
    torch.testing.assert_close(found[-1], naive_lion(lambda step: identity)[-1])


def library_steps(name, **options):
    pytorch_optimizer = pytest.importorskip("pytorch_optimizer")
    parameter = weight()
    optimizer = getattr(pytorch_optimizer, name)([parameter], lr=LR, weight_decay=DECAY, **options)
    for step in range(1, NUM_STEPS + 1):
        parameter.grad = gradient_of(step)
        optimizer.step()
    return parameter.detach()


def test_librarys_lion_is_its_equation():
    found = library_steps("Lion", betas=(0.9, BETAS[0]), weight_decouple=True)
    identity = torch.eye(m, dtype=torch.float64), torch.eye(n, dtype=torch.float64)
    torch.testing.assert_close(found, naive_lion(lambda step: identity)[-1])


def test_librarys_adan_is_its_equation():
    found = library_steps("Adan", betas=(0.98, 0.92, 0.99), eps=EPS)
    w = weight().detach().clone()
    b1, b2, b3 = 0.98, 0.92, 0.99
    mean, difference, square = (torch.zeros_like(w) for _ in range(3))
    before = gradient_of(1)  # the first difference is zero
    for step in range(1, NUM_STEPS + 1):
        g = gradient_of(step)
        mean = b1 * mean + (1 - b1) * g
        difference = b2 * difference + (1 - b2) * (g - before)
        square = b3 * square + (1 - b3) * (g + b2 * (g - before)) ** 2
        size = (square / (1 - b3**step)).sqrt() + EPS
        update = mean / (1 - b1**step) + b2 * difference / (1 - b2**step)
        w = (w - LR * update / size) / (1 + LR * DECAY)
        before = g
    torch.testing.assert_close(found, w)


def test_newton_schulz_commutes_with_rotations():
    matrix = random(8, 6, seed=3, dtype=torch.float64)
    U, V = fixed_rotation(8, "left", "random"), fixed_rotation(6, "right", "random")

    def newton_schulz(X):  # Muon's and Scion's polynomial, in float64
        a, b, c = 3.4445, -4.7750, 2.0315
        X = X / X.norm()
        for _ in range(5):
            A = X @ X.T
            X = a * X + (b * A + c * A @ A) @ X
        return X

    torch.testing.assert_close(U @ newton_schulz(U.T @ matrix @ V) @ V.T, newton_schulz(matrix))


def step_of(name, gradient):
    """The change of a matrix in the library's first step, divided by the learning rate."""
    matrix = torch.nn.Parameter(torch.zeros_like(gradient))
    matrix.grad = gradient
    if name == "muon":
        optimizer = torch.optim.Muon([matrix], lr=1.0, weight_decay=0.0)
    else:
        library = pytest.importorskip("pytorch_optimizer")
        spectral = int(
            importlib.import_module("pytorch_optimizer.optimizer.scion").LMONorm.SPECTRAL
        )
        optimizer = library.SCION([matrix], lr=1.0, norm_type=spectral, scale=1.0)
    optimizer.step()
    return matrix.detach()


@pytest.mark.parametrize("name", ["muon", "scion"])
def test_spectral_steps_commute_with_rotations(name):
    gradient = random(8, 6, seed=3)
    U, V = fixed_rotation(8, "left", "random"), fixed_rotation(6, "right", "random")
    U, V = U.float(), V.float()
    step = step_of(name, gradient)
    in_the_bases = U @ step_of(name, U.T @ gradient @ V) @ V.T
    # Only the iterations' rounding to bf16 differs.
    assert (in_the_bases - step).norm() < 0.05 * step.norm()


def test_sign_steps_do_not_commute_with_rotations():
    gradient = random(8, 6, seed=3)
    U, V = fixed_rotation(8, "left", "random"), fixed_rotation(6, "right", "random")
    U, V = U.float(), V.float()
    step = gradient.sign()
    in_the_bases = U @ (U.T @ gradient @ V).sign() @ V.T
    assert (in_the_bases - step).norm() > 0.5 * step.norm()


@pytest.mark.usefixtures("own_code")
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("TurnedRotation", "{theta: 0.3, beta2: 0.997}"),
        ("TurnedRotation", "{theta: random}"),
        ("RotatedLion", "{beta2: 0.997}"),
    ],
)
def test_configuration_names_it(tmp_path, name, arguments):
    config = tiny_config(
        tmp_path,
        f"optimizer.method=brx.methods.causes:{name}",
        f"optimizer.arguments={arguments}",
    )
    check_method(config, torch.device("cpu"))


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("TurnedRotation", {"theta": -1.0}, "theta must be an angle of at least 0, or random"),
        ("TurnedRotation", {"theta": math.inf}, "theta must be an angle"),
        ("TurnedRotation", {"theta": "all"}, "theta must be an angle"),
        ("TurnedRotation", {"beta2": 1.0}, "beta2 must be in [0, 1), got 1.0"),
        ("RotatedLion", {"lion_beta1": 1.0}, "lion_beta1 must be in [0, 1)"),
        ("RotatedLion", {"weight_decay": -1.0}, "weight_decay must not be negative"),
    ],
)
def test_mistakes_are_one_line(name, arguments, expected):
    with pytest.raises(UserError, match=r"^optimizer\.arguments: ") as refused:
        getattr(causes, name)(**arguments)
    assert expected in str(refused.value)


def test_turned_first_bases_are_counted():
    weight = torch.nn.Parameter(torch.zeros(4, 3))
    optimizer = TurnedBasisRotation([weight], theta=0.3)
    told = []
    optimizer.on_first_bases = lambda *counts: told.append(counts)
    for seed in range(2):  # the first bases come with update 2
        weight.grad = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
        optimizer.step()
    assert told == [(1, 2), (2, 2)]
