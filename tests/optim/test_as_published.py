"""`as_published` against the authors' implementation, transcribed for one matrix in float64."""

import pytest
import torch

from brx.optim import BasisRotation
from tests.optim.helpers import STRATEGIES, full_rank_gradients, parameters


def as_their_code_has_it(W, gradients, lr, b1, b2, eps, wd, source, geometry, f, first):
    """The weights after each gradient; None stands for a basis that they do not have."""
    (m, n), M, v, U, V, L, R = (
        W.shape,
        0 * W,
        0 * W,
        None,
        None,
        *(torch.zeros(k, k).double() for k in W.shape),
    )
    use_U, use_V = geometry == "bilateral" or m < n, geometry == "bilateral" or m >= n
    for t, G in enumerate(gradients, start=1):
        L, R = torch.lerp(L, G @ G.T, 1 - b2), torch.lerp(R, G.T @ G, 1 - b2)
        M = b1 * M + (1 - b1) * G
        if t % f == 0 or U is None:
            is_warm = (U is not None or not use_U) and (V is not None or not use_V)
            if source == "2nd" and is_warm:
                if use_U:
                    order = (U.T @ L @ U).diag().argsort(descending=True)
                    U, v = torch.linalg.qr(L @ U[:, order]).Q, v[order]
                if use_V:
                    order = (V.T @ R @ V).diag().argsort(descending=True)
                    V, v = torch.linalg.qr(R @ V[:, order]).Q, v[:, order]
            elif source == "2nd":
                U, V = first  # eigenvectors of L and R
            elif is_warm:
                old_U, old_V = (
                    (torch.eye(m).double() if U is None else U),
                    (torch.eye(n).double() if V is None else V),
                )
                if use_U:
                    order = (M @ old_V).square().sum(0).argsort(descending=True)
                    U, v = torch.linalg.qr(M @ old_V[:, order], mode="complete").Q, v[:, order]
                if use_V:
                    order = (M.T @ old_U).square().sum(0).argsort(descending=True)
                    V, v = torch.linalg.qr(M.T @ old_U[:, order], mode="complete").Q, v[order]
            else:
                left, _, right = torch.linalg.svd(M)
                U, V = left if use_U else None, right.T if use_V else None
        left, right = (
            torch.eye(m).double() if U is None else U,
            torch.eye(n).double() if V is None else V,
        )
        v = b2 * v + (1 - b2) * (left.T @ G @ right) ** 2
        step = left.T @ M @ right / (v.sqrt() + eps) * (1 - b2**t) ** 0.5 / (1 - b1**t)
        W = W - lr * wd * W - lr * left @ step @ right.T
        yield W


def first_bases(state, gradient):
    """The optimizer's own, checked: where rows or columns have no energy yet, rounding chooses
    among the rest."""
    bases = []
    for name, outer in (
        ("left_basis", gradient @ gradient.T),
        ("right_basis", gradient.T @ gradient),
    ):
        bases.append(state[name].clone() if name in state else None)
        if name in state:
            rotated = bases[-1].T @ outer @ bases[-1]
            torch.testing.assert_close(
                rotated, rotated.diag().sort(descending=True).values.diag(), rtol=0, atol=1e-10
            )
    return bases


@pytest.mark.parametrize(("source", "geometry"), STRATEGIES)
@pytest.mark.parametrize("shape", [(5, 5), (4, 7), (7, 4)])
def test_equals_the_authors_code(shape, source, geometry):
    gradients = full_rank_gradients(25, *shape)
    series = parameters(2, *shape, dtype=torch.float64)
    initial = [parameter.detach().clone() for parameter in series]
    options = {
        "betas": (0.9, 0.99),
        "eps": 1e-4,
        "weight_decay": 0.1,
        "source": source,
        "geometry": geometry,
    }
    optimizer, expected = (
        BasisRotation(series, lr=0.01, frequency=4, as_published=True, **options),
        [],
    )
    for time, gradient in enumerate(gradients):
        for parameter in series:
            parameter.grad = gradient.clone()
        optimizer.step()
        if time == 0:
            for weight, parameter in zip(initial, series, strict=True):
                bases = first_bases(optimizer.state[parameter], gradient)
                arguments = (0.01, 0.9, 0.99, 1e-4, 0.1, source, geometry, 4, bases)
                expected.append(list(as_their_code_has_it(weight, gradients, *arguments)))
        for parameter, weights in zip(series, expected, strict=True):
            torch.testing.assert_close(parameter.detach(), weights[time], rtol=0, atol=1e-9)
        if time == 12:  # resumed
            saved = optimizer.state_dict()
            optimizer = BasisRotation(series)
            optimizer.load_state_dict(saved)


def test_covariances_of_refreshes_alone_are_refused():
    with pytest.raises(ValueError, match="Invalid covariance='refresh': as_published"):
        BasisRotation(
            [torch.nn.Parameter(torch.ones(3, 3))], as_published=True, covariance="refresh"
        )


@pytest.mark.parametrize(
    ("name", "value"),
    [("rotation_precision", "tf32"), ("covariance_precision", "tf32"), ("first_refresh", 3)],
)
def test_options_that_it_decides_are_refused(name, value):
    parameter = torch.nn.Parameter(torch.ones(3, 3))
    with pytest.raises(ValueError, match="as_published has its own rotation_precision"):
        BasisRotation([parameter], as_published=True, **{name: value})
