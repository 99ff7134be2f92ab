"""`BasisRotation` in an ordinary training loop: one optimizer for the whole model, compared with
AdamW.

python examples/optimizer.py
"""

import torch
from torch import nn

from brx.optim import BasisRotation


def train(make_optimizer, num_steps=300):
    """Train a network to imitate a smaller one on strongly correlated inputs; return the first and
    the last loss."""
    torch.manual_seed(0)
    # The inputs are noise times a matrix with singular values from 4 down to 0.13.
    left, right = torch.linalg.qr(torch.randn(2, 32, 32)).Q
    mixing = left * torch.logspace(0.6, -0.9, 32) @ right
    teacher = nn.Sequential(nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 8)).requires_grad_(False)
    model = nn.Sequential(
        nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)
    )
    optimizer = make_optimizer(model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
    losses = []
    for _ in range(num_steps):
        inputs = torch.randn(128, 32) @ mixing
        loss = nn.functional.mse_loss(model(inputs), teacher(inputs))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses[0], losses[-1]


if __name__ == "__main__":
    print("loss          first     last")
    first, last = train(lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2))
    print(f"AdamW         {first:.4f}    {last:.5f}")
    first, last = train(lambda model: BasisRotation(model, lr=1e-2))
    print(f"BasisRotation {first:.4f}    {last:.5f}")
