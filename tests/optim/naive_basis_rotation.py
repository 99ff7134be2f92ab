"""Algorithms 1 and 2 of the paper for one matrix in float64, as plainly as they can be written."""

import torch


def naive_basis_rotation(
    weight, gradients, lr, betas, eps, weight_decay, source, geometry, frequency, every_step=False
):
    """The weights after each of the gradients in turn."""
    (beta1, beta2), (m, n) = betas, weight.shape
    W, M, v = weight.double().clone(), torch.zeros(m, n).double(), torch.zeros(m, n).double()
    sides = {"left": geometry == "bilateral" or m < n, "right": geometry == "bilateral" or m >= n}
    Q = {"left": torch.eye(m).double(), "right": torch.eye(n).double()}
    C = {"left": torch.zeros(m, m).double(), "right": torch.zeros(n, n).double()}
    found = []
    for t, G in enumerate(gradients, start=1):
        G = G.double()
        M = beta1 * M + (1 - beta1) * G
        refresh = t == 1 or t % frequency == 0
        for side in ("left", "right"):
            if not sides[side] or not (refresh or every_step):
                continue
            outer = G @ G.T if side == "left" else G.T @ G
            C[side] = beta2 * C[side] + (1 - beta2) * outer
            if not refresh:
                continue
            S = C[side] if source == "2nd" else (M @ M.T if side == "left" else M.T @ M)
            if t == 1:
                Q[side] = torch.linalg.eigh(S).eigenvectors.flip(1)
            else:
                eigenvalues = torch.diag(Q[side].T @ S @ Q[side])
                order = eigenvalues.argsort(descending=True)
                v = v[order, :] if side == "left" else v[:, order]
                shifted = S + 1e-6 * eigenvalues.max() * torch.eye(len(S))
                Q[side] = torch.linalg.qr(shifted @ Q[side][:, order]).Q
        U, V = Q["left"], Q["right"]
        v = beta2 * v + (1 - beta2) * (U.T @ G @ V) ** 2
        step = (U.T @ M @ V) / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + eps)
        W = W - lr * weight_decay * W - lr * U @ step @ V.T
        found.append(W)
    return found
