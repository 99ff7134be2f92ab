"""Algorithms 1 and 2 of the paper, with brx's start, for one matrix in float64. They are written as
plainly as possible, and share no code with brx."""

import math

import torch

NOISE = 64 * torch.finfo(torch.float64).eps


def naive_basis_rotation(
    weight,
    gradients,
    lr=0.01,
    weight_decay=0.01,
    source="2nd",
    geometry="bilateral",
    frequency=10,
    covariance="step",
    first_refresh=2,
    betas=(0.9, 0.999),
    eps=1e-8,
):
    """The weights (m, n) after each step, in float64.

    The names are the paper's: momentum M, second moment v, bases Q (U on the left, V on the right)
    and covariances C (L and R)."""
    first = first_refresh
    (beta1, beta2), (m, n) = betas, weight.shape
    W, M, v = weight.double().clone(), torch.zeros(m, n).double(), torch.zeros(m, n).double()
    sides = {"left": geometry == "bilateral" or m < n, "right": geometry == "bilateral" or m >= n}
    Q = {"left": torch.eye(m).double(), "right": torch.eye(n).double()}
    C = {"left": torch.zeros(m, m).double(), "right": torch.zeros(n, n).double()}
    weights, multiples = [], range(frequency, len(gradients), frequency)
    for t, G in enumerate(gradients, start=1):
        G = G.double()
        M_before, M = M, beta1 * M + (1 - beta1) * G
        # The update up to which `covariance="interval"` has averaged: the last refresh before t, or
        # at the start the previous update.
        last = t - 1 if t <= first else max(u for u in range(first, t) if u in (first, *multiples))
        refresh = t == first or (t > first and t % frequency == 0)
        for side in ("left", "right"):
            if not sides[side]:
                continue
            outer = G @ G.T if side == "left" else G.T @ G
            if covariance == "step" or refresh or t < first:
                decay = beta2 ** (t - last) if covariance == "interval" else beta2
                C[side] = decay * C[side] + (1 - decay) * outer
            if not refresh:
                continue
            S = C[side] if source == "2nd" else (M @ M.T if side == "left" else M.T @ M)
            if t == first:
                Q[side] = first_basis(S, NOISE)
            else:
                Q[side] = power_iteration(S, Q[side])
        U, V = Q["left"], Q["right"]
        if t == first:
            v = shared_out(v, C if source == "2nd" else None, Q, sides)
        if refresh:
            # In the new basis, v is at least what the momentum's mean gradient alone would give.
            mean = (U.T @ M_before @ V) / (1 - beta1 ** (t - 1))
            v = torch.maximum(v, (1 - beta2 ** (t - 1)) * mean**2)
        v = beta2 * v + (1 - beta2) * (U.T @ G @ V) ** 2
        step = (U.T @ M @ V) / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + eps)
        step = step * above_noise(v, (1 - beta2**t) * (U.T @ M @ V / (1 - beta1**t)) ** 2)
        # No entry of an update exceeds 1.8 times the largest that Cauchy-Schwarz allows Adam: M and
        # v average the same gradients, with these weights by age.
        in_m = [(1 - beta1) * beta1**k / (1 - beta1**t) for k in range(t)]
        in_v = [(1 - beta2) * beta2**k / (1 - beta2**t) for k in range(t)]
        largest = 1.8 * math.sqrt(sum(a**2 / b for a, b in zip(in_m, in_v, strict=True)))
        step = (U @ step @ V.T).clamp(-largest, largest)
        W = W - lr * weight_decay * W - lr * step
        weights.append(W)
    return weights


def above_noise(v, mean_square):
    """A factor from 0 to 1 for each entry (m, n): near 0 if the entry, its momentum, its row or its
    column holds only what rounding leaves."""
    (m, n), eps, factor = v.shape, torch.finfo(torch.float64).eps, torch.zeros_like(v)
    for i in range(m):
        for j in range(n):
            if v[i, j] > 0 and mean_square[i, j] > 0:
                noise = (
                    math.sqrt(m + n) * (1000 * eps) ** 2 * (v[i].mean() + v[:, j].mean() + v.mean())
                )
                of_row, of_column = (
                    (1000 * eps) ** 2 * v.sum() / part.sum() for part in (v[i], v[:, j])
                )
                of_mean = noise / 256 / mean_square[i, j]
                factor[i, j] = 1 / (
                    1 + (noise / v[i, j]) ** 4 + of_row**4 + of_column**4 + of_mean**2
                )
    return factor


def shared_out(v, C, Q, sides):
    """v in the first basis, as the product of the shares of its rows and columns.

    The shares of a side are its covariance's eigenvalues where these are above the noise. Otherwise
    the shares before are rotated as if their entries were uncorrelated."""
    shares = {"left": v.sum(1), "right": v.sum(0)}
    for side in [side for side in shares if sides[side]]:
        uncorrelated = (Q[side] ** 2).T @ shares[side]
        eigenvalues = (
            torch.diag(Q[side].T @ C[side] @ Q[side]) if C else torch.zeros_like(uncorrelated)
        )
        shares[side] = torch.where(
            eigenvalues > NOISE * eigenvalues.max(), eigenvalues, uncorrelated
        )
    left, right = (share / share.sum() for share in shares.values())
    return v.sum() * torch.outer(left, right)


def first_basis(S, smallest):
    """Eigenvectors of S (m, m) as columns, by falling eigenvalue, with positive leading entries.

    Where the eigenvalue is next to nothing, the columns are axes, projected on what is left."""
    eigenvalues, vectors = torch.linalg.eigh(S)
    is_decided = eigenvalues > smallest * eigenvalues[-1]
    decided, others = vectors[:, is_decided].flip(1), vectors[:, ~is_decided]
    columns = []
    for q in decided.T:
        columns.append(q * next(x for x in q if abs(x) > 0.618034 * q.abs().max()).sign())
    if 2 * others.shape[1] > len(S):
        axes = [axis for axis in range(len(S)) if axis not in leading_rows(decided)]
    else:
        axes = leading_rows(others)
    for axis in axes:
        q = others @ others[axis]
        for other in columns:
            q = q - other.dot(q) * other
        columns.append(q / q.norm())
    return torch.stack(columns, dim=1)


def leading_rows(vectors):
    """Choose rows one after another: each time, the first row whose part outside the span of those
    chosen before is about the longest (at least 0.618 of it)."""
    rows, chosen = vectors.clone(), []
    for _ in range(vectors.shape[1]):
        lengths = [row.norm() for row in rows]
        chosen.append(
            next(k for k, length in enumerate(lengths) if length > 0.618034 * max(lengths))
        )
        unit = rows[chosen[-1]] / lengths[chosen[-1]]
        rows = torch.stack([row - row.dot(unit) * unit for row in rows])
    return chosen


def power_iteration(S, Q):
    """One step towards the eigenvectors of S, column by column, where S decides."""
    eigenvalues = torch.diag(Q.T @ S @ Q).clamp(min=0)
    floor = NOISE * eigenvalues.max()
    if floor == 0:
        return Q
    columns = []
    for q, eigenvalue in zip(Q.T, eigenvalues, strict=True):
        decided = eigenvalue**2 / (eigenvalue**2 + floor**2)
        own = (1 - decided) * floor + 0.1 * (S @ q).norm()
        columns.append(decided * S @ q + own * q)
    sizes = [float(eigenvalue + floor) for eigenvalue in eigenvalues]
    by_size = sorted(range(len(sizes)), key=lambda k: -sizes[k])
    directions = dict(zip(by_size, gram_schmidt([columns[k] for k in by_size]), strict=True))
    reduced = []
    for column, size in zip(columns, sizes, strict=True):
        rest = column.clone()
        for k, direction in directions.items():
            rest -= (1 - min(1, 2 * size / sizes[k]) ** 2) * direction.dot(column) * direction
        reduced.append(rest)
    return torch.stack(gram_schmidt(reduced), dim=1)


def gram_schmidt(columns):
    """Orthonormalise columns in their order."""
    done = []
    for column in columns:
        rest = column
        for _ in range(2):  # the second pass removes what rounding left in the first
            for other in done:
                rest = rest - other.dot(rest) * other
            rest = rest / rest.norm()
        done.append(rest)
    return done
