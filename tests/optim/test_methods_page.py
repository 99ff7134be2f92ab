"""Basis rotation rebuilt from docs/methods.md alone ("Every step of basis rotation"), in float64.

It shares nothing with the package or with the other oracle: who changes the page changes this."""

import itertools

import numpy as np
import pytest
import torch

from benchmarks.first_steps import GRADIENTS
from brx.optim import BasisRotation
from tests.optim.helpers import STRATEGIES

U64 = np.finfo(np.float64).eps
GOLDEN = (np.sqrt(5) - 1) / 2
LR, DECAY, EPS, BETA1, BETA2 = 1.0, 0.01, 1e-8, 0.9, 0.999
FREQUENCY, FIRST = 5, 2


def weights_by_the_page(gradients, source, geometry):
    m, n = gradients[0].shape
    is_left_rotated = geometry == "bilateral" or m < n
    is_right_rotated = geometry == "bilateral" or m >= n
    W, M, v = np.zeros((m, n)), np.zeros((m, n)), np.zeros((m, n))
    L, R, U, V = np.zeros((m, m)), np.zeros((n, n)), np.eye(m), np.eye(n)
    for t, G in enumerate(gradients, start=1):
        # 1. Averages
        M_new = BETA1 * M + (1 - BETA1) * G
        L = BETA2 * L + (1 - BETA2) * G @ G.T
        R = BETA2 * R + (1 - BETA2) * G.T @ G
        # 2. Bases
        is_due = t == FIRST or (t > FIRST and t % FREQUENCY == 0)
        if is_due:
            of_left = L if source == "2nd" else M_new @ M_new.T
            of_right = R if source == "2nd" else M_new.T @ M_new
            if is_left_rotated:
                U = exact(of_left, source) if t == FIRST else iterated(of_left, U)
            if is_right_rotated:
                V = exact(of_right, source) if t == FIRST else iterated(of_right, V)
        # 3. v in the first basis
        if t == FIRST and v.any():
            rows = shares(v.sum(axis=1), U, L, source) if is_left_rotated else v.sum(axis=1)
            columns = shares(v.sum(axis=0), V, R, source) if is_right_rotated else v.sum(axis=0)
            v = v.sum() * np.outer(rows / rows.sum(), columns / columns.sum())
        # 4. At every refresh
        if is_due:
            mean = U.T @ M @ V / (1 - BETA1 ** (t - 1))
            v = np.maximum(v, (1 - BETA2 ** (t - 1)) * mean**2)
        # 5. The step
        v = BETA2 * v + (1 - BETA2) * (U.T @ G @ V) ** 2
        M = M_new
        s = U.T @ M @ V / (1 - BETA1**t) / (np.sqrt(v / (1 - BETA2**t)) + EPS)
        s *= damping(v, (1 - BETA2**t) * (U.T @ M @ V / (1 - BETA1**t)) ** 2)
        p = BETA1**2 / BETA2
        A = (1 - BETA2**t) / (1 - BETA2) * ((1 - BETA1) / (1 - BETA1**t)) ** 2
        A = np.sqrt(A * (1 - p**t) / (1 - p))
        D = np.clip(U @ s @ V.T, -1.8 * A, 1.8 * A)
        W = (1 - LR * DECAY) * W - LR * D
    return W


def exact(S, source):
    eigenvalues, vectors = np.linalg.eigh(S)
    eigenvalues, vectors = eigenvalues[::-1], vectors[:, ::-1]
    floor = 64 * U64 if source == "2nd" else max((64 * U64) ** 2, 64 * U64)
    mean = np.maximum(eigenvalues, 0).mean()
    spaces = []
    for k, eigenvalue in enumerate(eigenvalues):
        is_empty = eigenvalue <= floor * eigenvalues[0]
        was_empty = k > 0 and eigenvalues[k - 1] <= floor * eigenvalues[0]
        is_close = k > 0 and eigenvalues[k - 1] - eigenvalue <= 1e-5 * mean
        if k > 0 and (was_empty if is_empty else is_close):
            spaces[-1].append(k)
        else:
            spaces.append([k])
    columns = []
    for space in spaces:
        if len(space) == 1:
            q = vectors[:, space[0]]
            leading = next(entry for entry in q if abs(entry) > GOLDEN * np.abs(q).max())
            columns.append(q * np.sign(leading))
            continue
        inside = vectors[:, space] @ vectors[:, space].T
        if 2 * len(space) > len(S):
            taken = chosen_axes(np.eye(len(S)) - inside, len(S) - len(space))
            axes = [axis for axis in range(len(S)) if axis not in taken]
        else:
            axes = chosen_axes(inside, len(space))
        columns += [inside[:, axis] for axis in axes]
    return orthonormalised(columns)


def chosen_axes(projector, number):
    """Column a of the projector is the projection of axis a."""
    projections, axes = projector.copy(), []
    for _ in range(number):
        lengths = np.linalg.norm(projections, axis=0)
        axis = int(np.nonzero(lengths > GOLDEN * lengths.max())[0][0])
        direction = projections[:, axis] / lengths[axis]
        projections = projections - np.outer(direction, direction @ projections)
        axes.append(axis)
    return axes


def orthonormalised(columns):
    """Gram-Schmidt, twice for the sake of rounding."""
    done = []
    for column in columns:
        q = column
        for _ in range(2):
            for other in done:
                q = q - other * (other @ q)
            q = q / np.linalg.norm(q)
        done.append(q)
    return np.stack(done, axis=1)


def iterated(S, Q):
    if not S.any():
        return Q
    quotients = np.array([max(0.0, q @ S @ q) for q in Q.T])
    F = 64 * U64 * quotients.max()
    columns = []
    for q, own in zip(Q.T, quotients, strict=True):
        a = own**2 / (own**2 + F**2)
        columns.append(a * (S @ q) + ((1 - a) * F + 0.1 * np.linalg.norm(S @ q)) * q)
    sizes = quotients + F
    falling = np.argsort(-sizes, kind="stable")
    directions = np.empty_like(Q)
    directions[:, falling] = orthonormalised([columns[k] for k in falling])
    reduced = []
    for column, size in zip(columns, sizes, strict=True):
        parts = directions.T @ column
        reduced.append(directions @ (np.minimum(1, 2 * size / sizes) ** 2 * parts))
    return orthonormalised(reduced)


def shares(sums, Q, C, source):
    uncorrelated = np.array([sum(q**2 * sums) for q in Q.T])
    if source == "1st":
        return uncorrelated
    quotients = np.array([q @ C @ q for q in Q.T])
    return np.where(quotients > 64 * U64 * quotients.max(), quotients, uncorrelated)


def damping(v, mean_square):
    m, n = v.shape
    row_sums, column_sums, factor = v.sum(axis=1), v.sum(axis=0), np.zeros_like(v)
    for i, j in itertools.product(range(m), range(n)):
        if v[i, j] == 0 or mean_square[i, j] == 0:
            continue
        means = row_sums[i] / n + column_sums[j] / m + v.mean()
        noise = (1000 * U64) ** 2 * np.sqrt(m + n) * means
        tilts = [(1000 * U64) ** 2 * v.sum() / part for part in (row_sums[i], column_sums[j])]
        ratios = [noise / v[i, j], *tilts]
        of_mean = noise / 256 / mean_square[i, j]
        factor[i, j] = 1 / (1 + sum(ratio**4 for ratio in ratios) + of_mean**2)
    return factor


FAMILIES = [
    "normal",
    "decaying spectrum",
    "absent rows",
    "duplicated rows and columns",
    "rank 1, always another",
    "an expert's, of 0, 1, 2 tokens",
]


@pytest.mark.parametrize(("source", "geometry"), STRATEGIES)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shape", [(8, 12), (12, 8)])
def test_page_alone_rebuilds_basis_rotation(shape, family, source, geometry):
    generator = torch.Generator().manual_seed(0)
    gradients = [GRADIENTS[family](generator, shape, t).double() for t in range(1, 23)]
    weight = torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64))
    optimizer = BasisRotation(
        [weight],
        lr=LR,
        weight_decay=DECAY,
        frequency=FREQUENCY,
        source=source,
        geometry=geometry,
    )
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
    expected = weights_by_the_page([g.numpy() for g in gradients], source, geometry)
    np.testing.assert_allclose(weight.detach().numpy(), expected, rtol=0, atol=1e-9 * LR)
