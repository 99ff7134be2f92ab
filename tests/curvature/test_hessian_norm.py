"""The estimators against exact norms: random matrices, the whole Hessians of tiny models, Kronecker products."""

import math

import numpy as np
import pytest
import torch

from brx.curvature.bases import Basis, from_weights, to_weights
from brx.curvature.hessian import hessian_vector_product
from brx.curvature.hessian_norm import GeometricEstimate, below_resolution, cauchy_vector, median_sums
from brx.model.stage import is_block_matrix
from tests.curvature.helpers import KINDS, flat, full_hessian, tiny_model


def random_symmetric(size, seed=0):
    """Rows of very different sums."""
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(size, size, generator=generator, dtype=torch.float64)
    scale = torch.logspace(-2, 1, size, dtype=torch.float64)
    return scale[:, None] * (matrix + matrix.T) * scale


def estimate(matrix, num_vectors, seed=0):
    """Both estimators' sums from products with a matrix, as two tensors of rows."""
    size = len(matrix)
    like = {"a": torch.zeros(size // 3, dtype=matrix.dtype), "b": torch.zeros(size - size // 3, dtype=matrix.dtype)}
    geometric, samples = GeometricEstimate(like), []
    for number in range(num_vectors):
        product = matrix @ flat(cauchy_vector(like, seed, number))
        geometric.add({"a": product[: size // 3], "b": product[size // 3 :]})
        samples.append(product.abs().numpy())
    return {
        "geometric": geometric.sums(),
        "median": median_sums(np.stack(samples), list(like), [len(value) for value in like.values()]),
    }


def total(sums, power=1):
    """The sum over all rows, and its standard error."""
    grouped = sums.grouped(lambda name: "all")
    return grouped.sums[power - 1, 0], grouped.covariance(power)[0, 0] ** 0.5


@pytest.mark.parametrize("estimator", ["geometric", "median"])
@pytest.mark.parametrize("seed", range(3))
def test_random_symmetric_matrix(estimator, seed):
    matrix = random_symmetric(60, seed)
    sums = estimate(matrix, 500, seed)[estimator]
    scales = matrix.abs().sum(dim=1)
    for power in (1, 2):
        found, error = total(sums, power)
        assert error < 0.2 * found
        assert abs(found - (scales**power).sum().item()) < 3 * error
    assert sums.names == ["a", "b"]
    assert sums.num_rows == [20, 40]
    for place, rows in enumerate([slice(0, 20), slice(20, 60)]):
        error = sums.covariance(1)[place, place] ** 0.5
        assert abs(sums.sums[0, place] - scales[rows].sum().item()) < 3 * error


def test_intervals_cover_as_often_as_they_say():
    matrix = random_symmetric(12)
    exact = matrix.abs().sum().item()
    covered = {"geometric": 0, "median": 0}
    for seed in range(150):
        for estimator, sums in estimate(matrix, 60, seed).items():
            found, error = total(sums)
            covered[estimator] += abs(math.log(found / exact)) < 1.96 * error / found
    for estimator, count in covered.items():
        assert 0.90 <= count / 150 <= 0.99, estimator


def test_geometric_estimate_is_unbiased_in_few_vectors():
    # Independent rows of scale 2: the mean over rows is the estimator's expectation.
    like = {"rows": torch.zeros(400_000, dtype=torch.float64)}
    found = GeometricEstimate(like)
    for number in range(9):
        found.add({"rows": 2 * cauchy_vector(like, 0, number)["rows"]})
    sums = found.sums().sums[:, 0] / 400_000
    assert sums[0] == pytest.approx(2, rel=0.01)
    assert sums[1] == pytest.approx(4, rel=0.03)


def test_rows_that_are_sometimes_zero_count_with_their_share():
    like = {"rows": torch.zeros(3, dtype=torch.float64)}
    found = GeometricEstimate(like)
    for number in range(2000):
        product = cauchy_vector(like, 0, number)["rows"]
        product[0] = 0.0
        product[1] *= number % 4 == 0
        found.add({"rows": product})
    assert float(found._scales("rows", 1)[0]) == 0.0
    assert float(found._scales("rows", 1)[1]) == pytest.approx(0.25, rel=0.2)
    assert float(found._scales("rows", 1)[2]) == pytest.approx(1.0, rel=0.1)
    assert np.isfinite(found.sums().deviations).all()


def random_basis(shape, generator):
    def orthogonal(size):
        matrix = torch.randn(*shape[:-2], size, size, generator=generator, dtype=torch.float64)
        return torch.linalg.qr(matrix).Q

    return Basis(orthogonal(shape[-2]), orthogonal(shape[-1]))


@pytest.mark.parametrize("space", ["original", "rotated"])
@pytest.mark.parametrize("kind", KINDS)
def test_whole_hessian_of_a_tiny_model(kind, space):
    model, parameters, batch = tiny_model(kind)
    generator = torch.Generator().manual_seed(5)
    rotated = {name: random_basis(p.shape, generator) for name, p in parameters.items() if is_block_matrix(name)}
    bases = rotated if space == "rotated" else {}

    # Q as an explicit matrix: kron(U, V) for each matrix in row-major order, the identity for all else.
    blocks = []
    for name, parameter in parameters.items():
        stack = [torch.eye(parameter.numel(), dtype=torch.float64)]
        if name in bases:
            left, right = bases[name].left, bases[name].right
            pairs = zip(
                left.flatten(0, -3) if left.ndim > 2 else left[None], right.reshape(-1, *right.shape[-2:]), strict=True
            )
            stack = [torch.kron(u.contiguous(), v.contiguous()) for u, v in pairs]
        blocks += stack
    rotation = torch.block_diag(*blocks)
    matrix = rotation.T @ full_hessian(model, parameters, batch) @ rotation

    geometric, samples = GeometricEstimate(parameters), []
    for number in range(80):
        vector = to_weights(bases, cauchy_vector(parameters, 3, number))
        product = from_weights(bases, hessian_vector_product(model, parameters, batch, vector))
        geometric.add(product)
        samples.append(flat(product).abs().numpy())
    num_rows = [parameter.numel() for parameter in parameters.values()]
    for sums in (geometric.sums(), median_sums(np.stack(samples), list(parameters), num_rows)):
        for power in (1, 2):
            found, error = total(sums, power)
            assert error < 0.5 * found
            assert abs(found - (matrix.abs().sum(dim=1) ** power).sum().item()) < 3 * error


def test_kronecker_factored_hessian_bilateral_below_unilateral_below_original():
    # H vec(W) = vec(L W R): with U, V the eigenvectors of L and R, the theorem "covariance Hessian approximation".
    generator = torch.Generator().manual_seed(0)
    left, right = (
        factor @ factor.T
        for factor in (torch.randn(size, size + 2, generator=generator, dtype=torch.float64) for size in (5, 7))
    )
    like = {"w": torch.zeros(5, 7, dtype=torch.float64)}
    u, v = torch.linalg.eigh(left).eigenvectors, torch.linalg.eigh(right).eigenvectors
    norms = []
    for basis in (Basis(u, v), Basis(u, None), Basis(None, None)):
        columns = []
        for unit in torch.eye(35, dtype=torch.float64):
            matrix = to_weights({"w": basis}, {"w": unit.view(5, 7)})["w"]
            columns.append(flat(from_weights({"w": basis}, {"w": left @ matrix @ right})))
        exact = torch.stack(columns, dim=1).abs().sum().item()
        geometric = GeometricEstimate(like)
        for number in range(300):
            matrix = to_weights({"w": basis}, cauchy_vector(like, 1, number))["w"]
            geometric.add(from_weights({"w": basis}, {"w": left @ matrix @ right}))
        found, error = total(geometric.sums())
        assert abs(found - exact) < 3 * error
        norms.append(exact)
    assert norms[0] < 0.95 * norms[1] < 0.9 * norms[2]
    hessian = torch.kron(left, right)
    assert norms[0] == pytest.approx(torch.linalg.eigvalsh(hessian).abs().sum().item(), rel=1e-9)


def test_parts_merge_into_what_one_pass_gives():
    matrix = random_symmetric(30)
    like = {"a": torch.zeros(10, dtype=torch.float64), "b": torch.zeros(20, dtype=torch.float64)}

    def estimate_of(numbers):
        found = GeometricEstimate(like)
        for number in numbers:
            product = matrix @ flat(cauchy_vector(like, 0, number))
            product[number % 30] = 0.0
            found.add({"a": product[:10], "b": product[10:]})
        return found

    whole = estimate_of(range(60)).sums()
    merged = estimate_of(range(0, 60, 2))
    merged.merge(GeometricEstimate.from_state(estimate_of(range(1, 60, 2)).state_dict()))
    np.testing.assert_allclose(merged.sums().sums, whole.sums, rtol=1e-12)
    np.testing.assert_allclose(merged.sums().covariance(1), whole.covariance(1), rtol=0.5)


def test_median_does_not_depend_on_the_chunks(monkeypatch):
    samples = np.abs(np.random.default_rng(0).standard_cauchy((11, 50)))
    whole = median_sums(samples, ["a", "b"], [20, 30])
    monkeypatch.setattr("brx.curvature.hessian_norm.MEDIAN_CHUNK_BYTES", 7 * samples.itemsize * len(samples))
    parts = median_sums(samples, ["a", "b"], [20, 30])
    np.testing.assert_allclose(parts.sums, whole.sums, rtol=1e-12)
    np.testing.assert_allclose(parts.deviations, whole.deviations, rtol=1e-12)
    assert whole.sums[0].sum() == pytest.approx(np.median(samples, axis=0).sum())


def test_cauchy_vectors_depend_on_seed_and_number_and_not_on_precision():
    like = {"a": torch.zeros(1000, dtype=torch.float64), "b": torch.zeros(5, 4, dtype=torch.float64)}
    one = cauchy_vector(like, 0, 3)
    assert torch.equal(one["a"], cauchy_vector(like, 0, 3)["a"])
    assert not torch.equal(one["a"], cauchy_vector(like, 0, 4)["a"])
    assert not torch.equal(one["a"], cauchy_vector(like, 1, 3)["a"])
    assert one["b"].shape == (5, 4)
    assert torch.equal(cauchy_vector({"a": like["a"].float()}, 0, 3)["a"], one["a"].float())
    assert one["a"].abs().median().item() == pytest.approx(1, rel=0.15)


def test_share_below_resolution():
    product = {"a": torch.tensor([1e8, 1.0, 20.0]), "b": torch.tensor([0.0])}
    assert below_resolution(product) == 0.25
    assert below_resolution({name: value.double() for name, value in product.items()}) == 0.0
