"""Algorithms 1 and 2 of the paper, and brx's start, for one matrix in float64, as plainly as they can be written."""

import torch

NOISE = 64 * torch.finfo(torch.float64).eps
FIRST_REFRESH = 10


def naive_basis_rotation(
    weight, gradients, lr, betas, eps, weight_decay, source, geometry, frequency, covariance="step"
):
    """The weights after each of the gradients in turn."""
    (beta1, beta2), (m, n) = betas, weight.shape
    W, M, v = weight.double().clone(), torch.zeros(m, n).double(), torch.zeros(m, n).double()
    sides = {"left": geometry == "bilateral" or m < n, "right": geometry == "bilateral" or m >= n}
    Q = {"left": torch.eye(m).double(), "right": torch.eye(n).double()}
    C = {"left": torch.zeros(m, m).double(), "right": torch.zeros(n, n).double()}
    weights, multiples = [], range(frequency, len(gradients), frequency)
    for t, G in enumerate(gradients, start=1):
        G = G.double()
        M_before, M = M, beta1 * M + (1 - beta1) * G
        last = t - 1 if t <= FIRST_REFRESH else max(u for u in range(FIRST_REFRESH, t) if u in (10, *multiples))
        refresh = t == FIRST_REFRESH or (t > FIRST_REFRESH and t % frequency == 0)
        for side in ("left", "right"):
            if not sides[side]:
                continue
            outer = G @ G.T if side == "left" else G.T @ G
            if covariance == "step" or refresh or t < FIRST_REFRESH:
                decay = beta2 ** (t - last) if covariance == "interval" else beta2
                C[side] = decay * C[side] + (1 - decay) * outer
            if not refresh:
                continue
            S = C[side] if source == "2nd" else (M @ M.T if side == "left" else M.T @ M)
            if t == FIRST_REFRESH:
                Q[side] = first_basis(S, NOISE)
            else:
                Q[side], order = power_iteration(S, Q[side])
                v = v[order, :] if side == "left" else v[:, order]
        U, V = Q["left"], Q["right"]
        if refresh:
            mean = (U.T @ M_before @ V) / (1 - beta1 ** (t - 1))
            v = torch.maximum(v, (1 - beta2 ** (t - 1)) * mean**2)
        v = beta2 * v + (1 - beta2) * (U.T @ G @ V) ** 2
        step = (U.T @ M @ V) / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + eps)
        step = torch.where(v > 0, step * v / (v + NOISE**2 * v.sum()), 0.0)
        W = W - lr * weight_decay * W - lr * U @ step @ V.T
        weights.append(W)
    return weights


def first_basis(S, smallest):
    """Eigenvectors by falling eigenvalue; where that is next to nothing, axes as the others' reflections turn them."""
    eigenvalues, vectors = torch.linalg.eigh(S)
    vectors = vectors[:, eigenvalues > smallest * eigenvalues[-1]].flip(1)
    size = len(S)
    turned, product = vectors.clone(), torch.eye(size).double()
    for j in range(vectors.shape[1]):  # Householder: reflect column j onto axis j
        x = turned[:, j].clone()
        x[:j] = 0
        x[j] += torch.copysign(x.norm(), x[j])
        reflection = torch.eye(size).double() - 2 * torch.outer(x, x) / x.dot(x)
        turned, product = reflection @ turned, product @ reflection
    product[:, : vectors.shape[1]] = vectors
    return product


def power_iteration(S, Q):
    """One step towards the eigenvectors of S, column by column, where S decides; and the order of the columns."""
    eigenvalues = torch.diag(Q.T @ S @ Q).clamp(min=0)
    floor = NOISE * eigenvalues.max()
    columns = []
    for q, eigenvalue in zip(Q.T, eigenvalues, strict=True):
        decided = eigenvalue**2 / (eigenvalue**2 + floor**2) if floor > 0 else 0.0
        columns.append(decided * S @ q + ((1 - decided) * floor + 0.1 * eigenvalue if floor > 0 else 1.0) * q)
    order = eigenvalues.where(eigenvalues > floor, 0.0).argsort(descending=True, stable=True)
    basis, triangle = torch.linalg.qr(torch.stack(columns, dim=1)[:, order])
    return basis * torch.where(triangle.diagonal() < 0, -1.0, 1.0), order
