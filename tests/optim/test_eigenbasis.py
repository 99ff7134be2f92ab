"""The power iteration converges to the eigenvectors, keeps order, and survives zeros."""

import pytest
import torch

from brx.optim.eigenbasis import eigenvectors, factor_product, left_singular_vectors, orthonormalize, power_iteration


def covariances(num, n):
    generator = torch.Generator().manual_seed(0)
    Q = torch.linalg.qr(torch.randn(num, n, n, generator=generator).double()).Q
    eigenvalues = torch.logspace(0, -3, n).double()
    return Q @ torch.diag(eigenvalues) @ Q.mT, Q, eigenvalues


def assert_same_up_to_sign(basis, expected):
    identity = torch.eye(basis.shape[-1]).double().expand_as(basis)
    torch.testing.assert_close((basis.mT @ expected).abs(), identity, rtol=0, atol=1e-9)


def test_fixed_covariance_converges_to_its_eigenvectors():
    matrices, expected, eigenvalues = covariances(3, 6)
    basis = torch.linalg.qr(torch.randn(3, 6, 6, generator=torch.Generator().manual_seed(1)).double()).Q
    for _ in range(200):
        basis = power_iteration(matrices @ basis, basis).basis
    assert_same_up_to_sign(basis, expected)
    diagonal = torch.diagonal(basis.mT @ matrices @ basis, dim1=-2, dim2=-1)
    torch.testing.assert_close(diagonal, eigenvalues.expand(3, 6), rtol=1e-9, atol=0)


def test_exact_basis_is_ordered_by_eigenvalue():
    matrices, expected, _ = covariances(2, 5)
    renewal = eigenvectors(matrices)
    assert renewal.valid.all()
    assert_same_up_to_sign(renewal.basis, expected)


def test_left_singular_vectors_are_the_covariances_eigenvectors():
    matrix = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(0)).double()
    assert_same_up_to_sign(left_singular_vectors(matrix).basis, eigenvectors(matrix @ matrix.mT).basis)


@pytest.mark.parametrize("shape", [(4, 7), (7, 4)])
def test_factor_product_is_the_covariance_times_the_basis(shape):
    factor, (_, basis, _) = torch.randn(2, *shape).double(), covariances(2, shape[0])
    torch.testing.assert_close(factor_product(factor, basis), factor @ factor.mT @ basis)


def test_order_says_which_old_column_became_which():
    matrices = torch.diag(torch.tensor([1.0, 3.0, 2.0]).double()).unsqueeze(0)
    basis = torch.eye(3).double().unsqueeze(0)
    renewal = power_iteration(matrices @ basis, basis)
    assert renewal.order.tolist() == [[1, 2, 0]]
    torch.testing.assert_close(renewal.basis, basis[..., [1, 2, 0]])


def test_zero_covariance_keeps_its_basis():
    _, basis, _ = covariances(1, 4)
    torch.testing.assert_close(power_iteration(torch.zeros_like(basis), basis).basis, basis, rtol=0, atol=1e-14)


def test_product_that_is_not_finite_keeps_basis_and_order_and_is_told():
    matrices, basis, _ = covariances(2, 4)
    product = matrices @ basis
    product[1, 0, 0] = float("nan")
    renewal = power_iteration(product, basis)
    assert renewal.valid.tolist() == [True, False]
    assert torch.equal(renewal.basis[1], basis[1])
    assert renewal.order[1].tolist() == [0, 1, 2, 3]


def test_orthonormalize_gives_a_positive_diagonal():
    matrices = torch.randn(3, 5, 5, generator=torch.Generator().manual_seed(2)).double()
    orthogonal = orthonormalize(matrices)
    triangular = orthogonal.mT @ matrices
    assert (triangular.diagonal(dim1=-2, dim2=-1) > 0).all()
    torch.testing.assert_close(triangular, triangular.triu(), rtol=0, atol=1e-12)
