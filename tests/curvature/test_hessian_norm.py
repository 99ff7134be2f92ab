"""The estimators against exact norms: of random matrices, and of the whole Hessian of a tiny model."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from brx.curvature.hessian_norm import GeometricEstimate, below_resolution, cauchy_vector, median_sums
from brx.curvature.norm_measurement import vector_product
from brx.curvature.norm_result import NormSettings
from tests.curvature.helpers import VOCABULARY, flat, full_hessian, norm_result, tiny_model


def estimates(products, sizes):
    """Both estimators' sums, by tensors of these sizes, from products with Cauchy vectors."""
    names = [str(index) for index in range(len(sizes))]
    geometric = GeometricEstimate(sizes, torch.float64)
    for product in products:
        geometric.add(product)
    samples = torch.stack(products).abs().numpy()
    median = median_sums(lambda rows: samples[:, rows], names, sizes)
    return {"geometric": geometric.sums(names), "median": median}


def random_products(size, num_vectors):
    """A symmetric matrix whose rows have very different sums, and its products with Cauchy vectors."""
    matrix = torch.randn(size, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    scale = torch.logspace(-2, 1, size, dtype=torch.float64)
    matrix = scale[:, None] * (matrix + matrix.T) * scale
    vectors = [cauchy_vector({"x": torch.zeros(size).double()}, 0, number)["x"] for number in range(num_vectors)]
    return matrix, [matrix @ vector for vector in vectors]


def total(sums, power=1):
    """The sum over all rows, and its standard error."""
    grouped = sums.grouped(lambda name: "all")
    return grouped.sums[power - 1, 0], grouped.covariance(power)[0, 0] ** 0.5


def test_random_symmetric_matrix():
    matrix, products = random_products(60, 500)
    scales = matrix.abs().sum(dim=1)
    for sums in estimates(products, [20, 40]).values():
        for power in (1, 2):
            found, error = total(sums, power)
            assert error < 0.2 * found
            assert abs(found - (scales**power).sum().item()) < 3 * error
        assert sums.num_rows == [20, 40]
        for place, rows in enumerate([slice(0, 20), slice(20, 60)]):
            error = sums.covariance(1)[place, place] ** 0.5
            assert abs(sums.sums[0, place] - scales[rows].sum().item()) < 3 * error


def test_intervals_cover_as_often_as_they_say():
    matrix, products = random_products(12, 60 * 100)
    covered = {"geometric": 0, "median": 0}
    for first in range(0, len(products), 60):
        for estimator, sums in estimates(products[first : first + 60], [4, 8]).items():
            found, error = total(sums)
            covered[estimator] += abs(math.log(found / matrix.abs().sum().item())) < 1.96 * error / found
    for estimator, count in covered.items():
        assert 90 <= count <= 99, estimator


def test_the_mean_of_the_geometric_estimate_is_the_scale_in_few_vectors():
    # Independent rows of scale 2: the mean over rows is the estimator's expectation.
    like = {"rows": torch.zeros(400_000, dtype=torch.float64)}
    found = GeometricEstimate([400_000], torch.float64)
    for number in range(9):
        found.add(2 * cauchy_vector(like, 0, number)["rows"])
    sums = found.sums(["rows"]).sums[:, 0] / 400_000
    assert sums[0] == pytest.approx(2, rel=0.01)
    assert sums[1] == pytest.approx(4, rel=0.03)


def test_rows_that_are_sometimes_zero_count_with_their_share():
    like = {"rows": torch.zeros(3, dtype=torch.float64)}
    found = GeometricEstimate([3], torch.float64)
    for number in range(2000):
        product = cauchy_vector(like, 0, number)["rows"]
        product[0] = 0.0
        product[1] *= number % 4 == 0
        found.add(product)
    never, sometimes, always = found.scales(1).tolist()
    assert never == 0.0
    assert sometimes == pytest.approx(0.25, rel=0.2)
    assert always == pytest.approx(1.0, rel=0.1)
    assert np.isfinite(found.sums(["rows"]).deviations).all()


def test_sampled_norm_and_the_extrapolated_one_enclose_the_norm_of_the_whole_corpus():
    """The full Hessian over all windows of a corpus, against few of them drawn at random: their noise adds to it."""
    model, parameters, _ = tiny_model("dense")
    tokens = torch.randint(VOCABULARY, (106,), generator=torch.Generator().manual_seed(3))
    windows = tokens.unfold(0, 6, 1)  # (101, 6)
    corpus = windows[:, :-1], windows[:, 1:]
    matrix = full_hessian(model, parameters, corpus)
    sizes = [parameter.numel() for parameter in parameters.values()]
    vectors = [cauchy_vector(parameters, 0, number) for number in range(40)]
    # The same vectors, so that their chance is common to both; they are 40, and it is large.
    whole = estimates([matrix @ flat(vector) for vector in vectors], sizes)["geometric"]
    error = total(whole)[1]
    assert abs(total(whole)[0] - matrix.abs().sum().item()) < 3 * error
    drawn = torch.randint(len(windows), (1 + 64, 1), generator=torch.Generator().manual_seed(0))
    checkpoint = SimpleNamespace(
        model=model, parameters=parameters, bases={}, path="here",
        batches=lambda numbers: ((number, (corpus[0][drawn[number]], corpus[1][drawn[number]])) for number in numbers),
    )  # fmt: skip
    products = [vector_product(checkpoint, NormSettings(batches_per_vector=64), number) for number in range(40)]
    parts = [[product.mean(0) for product in products], *zip(*products, strict=True)]
    norm, *halves = (total(estimates(list(part), sizes)["geometric"])[0] for part in parts)
    result = norm_result("r", "m", 1, 1, "original", len(matrix), norm, [1.0] * 4, norm_of_half=sum(halves) / 2)
    norm, half, extrapolated = (one / total(whole)[0] for one in result.norms)
    assert half > 1.1 * norm
    assert norm > 1.15  # what 64 batches per vector alone would be taken for
    assert 0.3 < extrapolated < 1


def test_median_does_not_depend_on_the_chunks(monkeypatch):
    samples = np.abs(np.random.default_rng(0).standard_cauchy((11, 50)))
    whole = median_sums(lambda rows: samples[:, rows], ["a", "b"], [20, 30])
    monkeypatch.setattr("brx.curvature.hessian_norm.MEDIAN_CHUNK_BYTES", 7 * samples.itemsize * len(samples))
    parts = median_sums(lambda rows: samples[:, rows], ["a", "b"], [20, 30])
    np.testing.assert_allclose(parts.sums, whole.sums, rtol=1e-12)
    np.testing.assert_allclose(parts.deviations, whole.deviations, rtol=1e-12)
    assert whole.sums[0].sum() == pytest.approx(np.median(samples, axis=0).sum())


def test_cauchy_vectors_depend_on_seed_and_number_and_not_on_precision():
    like = {"a": torch.zeros(1000, dtype=torch.float64), "b": torch.zeros(5, 4, dtype=torch.float64)}
    one = cauchy_vector(like, 0, 3)
    assert [torch.equal(one["a"], cauchy_vector(like, *at)["a"]) for at in ((0, 3), (0, 4), (1, 3))] == [1, 0, 0]
    assert torch.equal(cauchy_vector({"a": like["a"].float()}, 0, 3)["a"], one["a"].float())
    assert one["a"].abs().median().item() == pytest.approx(1, rel=0.15)
    product = torch.tensor([1e8, 1.0, 20.0, 0.0])
    assert (below_resolution(product), below_resolution(product.double())) == (0.25, 0.0)
