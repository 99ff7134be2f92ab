"""The power iteration converges to the eigenvectors, keeps order, and survives zeros."""

import torch

from brx.optim.eigenbasis import exact_basis, exact_left_basis, followed_basis


def covariances(num, n):
    generator = torch.Generator().manual_seed(0)
    Q = torch.linalg.qr(torch.randn(num, n, n, generator=generator).double()).Q
    eigenvalues = torch.logspace(0, -3, n).double()
    return Q @ torch.diag(eigenvalues) @ Q.mT, Q, eigenvalues


def test_fixed_covariance_converges_to_its_eigenvectors():
    matrices, expected, eigenvalues = covariances(3, 6)
    basis = torch.linalg.qr(torch.randn(3, 6, 6, generator=torch.Generator().manual_seed(1)).double()).Q
    for _ in range(200):
        basis, _ = followed_basis(matrices, basis)
    torch.testing.assert_close((basis.mT @ expected).abs(), torch.eye(6).double().expand(3, 6, 6), rtol=0, atol=1e-9)
    diagonal = torch.diagonal(basis.mT @ matrices @ basis, dim1=-2, dim2=-1)
    torch.testing.assert_close(diagonal, eigenvalues.expand(3, 6), rtol=1e-9, atol=0)


def test_exact_basis_is_ordered_by_eigenvalue():
    matrices, expected, _ = covariances(2, 5)
    basis, num_failed = exact_basis(matrices)
    assert num_failed == 0
    torch.testing.assert_close((basis.mT @ expected).abs(), torch.eye(5).double().expand(2, 5, 5), rtol=0, atol=1e-9)


def test_left_singular_vectors_are_the_covariances_eigenvectors():
    matrix = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(0)).double()
    basis, _ = exact_left_basis(matrix)
    expected, _ = exact_basis(matrix @ matrix.mT)
    torch.testing.assert_close((basis.mT @ expected).abs(), torch.eye(4).double().expand(2, 4, 4), rtol=0, atol=1e-9)


def test_order_says_which_old_column_became_which():
    matrices = torch.diag(torch.tensor([1.0, 3.0, 2.0]).double()).unsqueeze(0)
    basis, order = followed_basis(matrices, torch.eye(3).double().unsqueeze(0))
    assert order.tolist() == [[1, 2, 0]]
    torch.testing.assert_close(basis.abs(), torch.eye(3).double()[:, [1, 2, 0]].unsqueeze(0))


def test_zero_covariance_keeps_its_basis():
    _, Q, _ = covariances(1, 4)
    basis, _ = followed_basis(torch.zeros(1, 4, 4).double(), Q)
    assert torch.equal(basis, Q)
