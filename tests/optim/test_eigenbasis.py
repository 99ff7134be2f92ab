"""The power iteration converges to the eigenvectors, keeps order, and survives zeros."""

import math
from functools import partial

import pytest
import torch

from brx.optim.eigenbasis import (
    _cholesky_qr,
    _decompositions,
    _householder_qr,
    _reduced_by_cholesky,
    _reduced_by_householder,
    exact_eigenbasis,
    exact_factor_eigenbasis,
    factor_product,
    power_iteration,
)
from tests.optim.helpers import random
from tests.optim.naive_basis_rotation import gram_schmidt


def covariances(num, n):
    Q = torch.linalg.qr(
        torch.randn(num, n, n, generator=torch.Generator().manual_seed(0)).double()
    ).Q
    eigenvalues = torch.logspace(0, -3, n).double()
    return Q @ torch.diag(eigenvalues) @ Q.mT, Q, eigenvalues


def assert_same_up_to_sign(basis, expected):
    identity = torch.eye(basis.shape[-1]).double().expand_as(basis)
    torch.testing.assert_close((basis.mT @ expected).abs(), identity, rtol=0, atol=1e-9)


def test_fixed_covariance_converges_to_its_eigenvectors():
    matrices, expected, eigenvalues = covariances(3, 6)
    basis = torch.linalg.qr(
        torch.randn(3, 6, 6, generator=torch.Generator().manual_seed(1)).double()
    ).Q
    for _ in range(300):
        basis = power_iteration(matrices @ basis, basis).basis
    assert_same_up_to_sign(basis, expected)
    diagonal = torch.diagonal(basis.mT @ matrices @ basis, dim1=-2, dim2=-1)
    torch.testing.assert_close(diagonal, eigenvalues.expand(3, 6), rtol=1e-9, atol=0)


def test_exact_bases_are_ordered_by_eigenvalue():
    matrices, expected, _ = covariances(2, 5)
    refreshed = exact_eigenbasis(matrices)
    assert refreshed.valid.all()
    assert_same_up_to_sign(refreshed.basis, expected)


@pytest.mark.parametrize("spectrum", [[3, 2, 2, 1], [3, 2, 2, 2, 1]])
def test_equal_eigenvalues_between_others_keep_their_space(spectrum):
    eigenvalues = torch.tensor(spectrum).double()
    Q = torch.linalg.qr(random(len(spectrum), len(spectrum)).double()).Q
    C = Q @ torch.diag(eigenvalues) @ Q.mT
    basis = exact_eigenbasis(C[None]).basis[0]
    torch.testing.assert_close(C @ basis, basis * eigenvalues, rtol=0, atol=1e-12)


def test_exact_basis_does_not_depend_on_the_scale():
    C, _, _ = covariances(2, 5)
    tiny = exact_eigenbasis(2.0**-60 * C).basis
    torch.testing.assert_close(tiny, exact_eigenbasis(C).basis, rtol=0, atol=1e-12)


def test_basis_of_a_factor_is_its_covariances():
    factor = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(0)).double()
    expected = exact_eigenbasis(factor @ factor.mT).basis
    assert_same_up_to_sign(exact_factor_eigenbasis(factor).basis, expected)


@pytest.mark.parametrize(("rank", "scale"), [(1, 1.0), (3, 1.0), (3, 1e-26), (3, 1e25)])
def test_directions_without_energy_do_not_depend_on_rounding(rank, scale):
    # The covariance in float32, and again with other rounding: whatever eigh returns for the zero
    # eigenvalues differs.
    generator = torch.Generator().manual_seed(0)
    factor = torch.randn(8, rank, generator=generator)
    covariance = factor @ torch.diag(torch.linspace(1, 2, rank)) @ factor.mT
    noise = torch.randn(8, 8, generator=generator) * 1e-7
    basis, other = exact_eigenbasis(torch.stack([covariance, covariance + noise + noise.mT])).basis
    torch.testing.assert_close(basis, other, rtol=0, atol=2e-6)
    for _ in range(30):  # nor do thirty refreshes turn them, whatever the gradients' scale
        [basis], [is_valid] = power_iteration(scale * (covariance @ basis)[None], basis[None])
        assert is_valid
    torch.testing.assert_close(basis[:, rank:], other[:, rank:], rtol=0, atol=1e-4)


def test_failed_eigh_gives_the_same_basis(monkeypatch):
    factor = torch.zeros(12, 5).double()
    factor[::2] = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)).double()
    expected = exact_factor_eigenbasis(factor[None])

    def fail(_):
        raise torch.linalg.LinAlgError("failed to converge")

    monkeypatch.setattr(torch.linalg, "eigh", fail)
    found = exact_factor_eigenbasis(factor[None])
    assert found.valid.all()
    torch.testing.assert_close(found.basis, expected.basis, rtol=0, atol=1e-9)


def test_exact_basis_of_zero_is_the_identity():
    assert torch.equal(exact_eigenbasis(torch.zeros(2, 3, 3)).basis, torch.eye(3).expand(2, 3, 3))


def test_zero_covariance_keeps_the_basis():
    _, basis, _ = covariances(2, 4)
    refreshed = power_iteration(torch.zeros_like(basis), basis)
    torch.testing.assert_close(refreshed.basis, basis, rtol=0, atol=1e-14)


def test_covariance_that_is_not_finite_keeps_the_basis():
    matrices, basis, _ = covariances(2, 4)
    product = matrices @ basis
    product[1, 0, 0] = float("nan")
    refreshed = power_iteration(product, basis)
    assert refreshed.valid.tolist() == [True, False]
    assert torch.equal(refreshed.basis[1], basis[1])


@pytest.mark.parametrize("columns", [4, 9])
def test_factor_product_is_its_covariances(columns):
    _, basis, _ = covariances(2, 7)
    factor = torch.randn(2, 7, columns, generator=torch.Generator().manual_seed(3)).double()
    torch.testing.assert_close(factor_product(factor, basis), factor @ factor.mT @ basis)


def test_triangle_of_qr_has_a_positive_diagonal():
    matrices = torch.randn(3, 5, 5, generator=torch.Generator().manual_seed(2)).double()
    triangular = _householder_qr(matrices).mT @ matrices
    assert (triangular.diagonal(dim1=-2, dim2=-1) > 0).all()
    torch.testing.assert_close(triangular, triangular.triu(), rtol=0, atol=1e-12)


def test_columns_keep_their_places():
    identity = torch.eye(3).double()[None]
    covariance = torch.diag(torch.tensor([1.0, 9.0, 3.0]).double())[None]
    refreshed = power_iteration(covariance.clone(), identity)
    torch.testing.assert_close(refreshed.basis, identity)


def test_columns_converge_where_they_stand():
    # The smallest eigenvalue in front: its column gives way to the large ones behind it.
    matrices, expected, _ = covariances(2, 5)
    expected = expected.flip(-1)
    noise = torch.randn(2, 5, 5, generator=torch.Generator().manual_seed(3))
    basis = _householder_qr(expected + 0.01 * noise.double())
    for _ in range(300):
        basis = power_iteration(matrices @ basis, basis).basis
    assert_same_up_to_sign(basis, expected)


def test_leak_of_a_large_direction_does_not_grow():
    # A column with 1e-4 of the energy, in front, which holds 1e-6 of the large direction.
    covariance = torch.diag(torch.tensor([1e-4, 1.0])).double()
    leak = 1e-6
    basis = torch.tensor([[1.0, -leak], [leak, 1.0]]).double()
    [refreshed] = power_iteration((covariance @ basis)[None], basis[None]).basis
    assert abs(refreshed[1, 0]) < 2 * leak


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("first", [2 ** (-1 / 16), 1.0])
def test_rounding_does_not_turn_the_basis(first, dtype):
    # Two coupled axes. At 2^(-1/16), an edge of the sizes by which trajectory version 4 sorted,
    # these two turned the basis by 31 degrees against each other; at 1 the eigenvalues cross.
    identity = torch.eye(2, dtype=dtype).expand(2, 2, 2)
    entries = [first * (1 - 2e-7), first * (1 + 2e-7)]
    covariances = torch.tensor([[[x, 0.3], [0.3, 1.0]] for x in entries], dtype=dtype)
    below, above = power_iteration(covariances @ identity, identity).basis
    torch.testing.assert_close(below, above, rtol=0, atol=1e-6)


def ill_conditioned(condition):
    """Columns of length about 1, with singular values down to the inverse of the condition."""
    left, right = (
        torch.linalg.qr(random(2, 48, 48, seed=s, dtype=torch.float64)).Q for s in (1, 2)
    )
    return (left * torch.logspace(0, -math.log10(condition), 48).double()) @ right


@pytest.mark.parametrize("condition", [1e1, 1e3, 2e4])
def test_cholesky_finds_householders_factor(condition):
    matrices = ill_conditioned(condition)
    exact = _householder_qr(matrices)
    found = _cholesky_qr(matrices.float()).double()
    assert (found.mT @ found - torch.eye(48)).abs().max() < 1e-5
    assert (found - exact).norm(dim=-2).max() < condition * 1e-6


@pytest.mark.parametrize("orthonormalize", [_reduced_by_householder, _reduced_by_cholesky])
@pytest.mark.parametrize(
    ("sizes", "places"),
    [
        ([9.0, 8.0, 3.0, 1.0, 0.2], [4, 3, 2, 1, 0]),
        ([4.0, 1.0, 0.6, 0.5, 0.5], [3, 1, 4, 0, 2]),
        ([4.0, 1.0], [1, 0]),
    ],
)
def test_reduced_columns_are_gram_schmidts(orthonormalize, sizes, places):
    columns = random(len(sizes), len(sizes), dtype=torch.float64)
    falling = torch.tensor([sizes], dtype=torch.float64)
    found = orthonormalize(columns[None], falling, torch.tensor([places]))
    directions = gram_schmidt(columns.T)
    reduced = []
    for j in places:
        rest = torch.zeros(len(sizes)).double()
        for i, direction in enumerate(directions):
            share = min(1, 2 * sizes[j] / sizes[i]) ** 2
            rest += share * direction.dot(columns[:, j]) * direction
        reduced.append(rest)
    expected = torch.stack(gram_schmidt(reduced), dim=1)
    torch.testing.assert_close(found[0], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("dtype", "scale"), [(torch.float32, 1e-41), (torch.float64, 1e-60)])
def test_tiny_covariance_renews_the_basis(dtype, scale):
    covariance = scale * torch.tensor([[2, 1], [1, 2]], dtype=dtype)
    refreshed = power_iteration(covariance[None].clone(), torch.eye(2, dtype=dtype)[None])
    assert refreshed.valid.all()
    assert refreshed.basis[0, 1, 0] > 0.3


def test_covariance_is_measured_by_its_own_largest_eigenvalue():
    # The two smaller eigenvalues are about as large as the noise floor.
    small = 2.0**-87 * torch.tensor([[1, 0, 0], [0, 1e-5, 5e-6], [0, 5e-6, 1e-5]])
    large = torch.diag(torch.tensor([1.9, 1, 1]))
    bases = torch.eye(3).repeat(2, 1, 1)
    alone = power_iteration(small[None].clone(), bases[:1])
    together = power_iteration(torch.stack([small, large]), bases)
    assert together.valid.all()
    torch.testing.assert_close(together.basis[:1], alone.basis)


def test_cholesky_of_dependent_columns_is_told():
    matrices = random(3, 8, 8)
    matrices[1, :, 3] = 0
    assert _cholesky_qr(matrices).isnan().any(dim=(1, 2)).tolist() == [False, True, False]


def test_failed_orthonormalisation_keeps_the_basis(monkeypatch):
    monkeypatch.setattr("brx.optim.eigenbasis._reduced_by_householder", _reduced_by_cholesky)
    basis = torch.eye(6).repeat(2, 1, 1)
    product = random(2, 6, 6)
    product = product @ product.mT
    product[1] = torch.inf
    refreshed = power_iteration(product, basis)
    assert refreshed.valid.tolist() == [True, False]
    assert torch.equal(refreshed.basis[1], basis[1])


def test_decompositions_of_a_batch_are_those_of_each():
    C, _, _ = covariances(5, 12)
    one_by_one = [_decompositions(matrix[None])[0] for matrix in C]
    torch.testing.assert_close(_decompositions(C), one_by_one, rtol=0, atol=0)


def test_failed_decomposition_leaves_the_others(monkeypatch):
    def fails(matrices, usual):
        if matrices.isinf().any():
            raise torch.linalg.LinAlgError
        return usual(matrices)

    C, _, _ = covariances(3, 6)
    expected = _decompositions(C)
    C[1] = torch.inf
    for name in ("eigh", "svd"):
        usual = getattr(torch.linalg, name)
        monkeypatch.setattr(torch.linalg, name, partial(fails, usual=usual))
    first, second, third = _decompositions(C)
    assert second is None
    torch.testing.assert_close([first, third], expected[::2], rtol=0, atol=0)
