"""A GAN with clamped weights (WGAN) on points of a circle, without delay and with each network in a
pipeline of 4 stages: `python gan.py [ITERATIONS]`."""

import argparse

import torch
from torch import nn

from brx import delayed, record
from brx.cli.main import main

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("iterations", nargs="?", type=int, default=600, help="default: 600")
iterations = parser.parse_args().iterations


def network(inputs: int, outputs: int) -> nn.Sequential:
    middle = [nn.Sequential(nn.Linear(32, 32), nn.LeakyReLU(0.2)) for _ in range(4)]
    return nn.Sequential(nn.Linear(inputs, 32), *middle, nn.Linear(32, outputs))


def circle(count: int, seed: int) -> torch.Tensor:
    """Random points on the unit circle (count, 2)."""
    angles = 6.2832 * torch.rand(count, 1, generator=torch.Generator().manual_seed(seed))
    return torch.cat([angles.cos(), angles.sin()], 1)


def distance(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The energy distance of two sets of points: 0 if they have the same distribution."""
    return 2 * torch.cdist(x, y).mean() - torch.cdist(x, x).mean() - torch.cdist(y, y).mean()


for stages in (1, 4):
    torch.manual_seed(0)
    critic, generator = network(2, 1), network(8, 2)
    critic_optimizer = torch.optim.RMSprop(critic.parameters(), lr=1e-3)
    generator_optimizer = torch.optim.RMSprop(generator.parameters(), lr=1e-3)
    pipeline = delayed(critic, critic_optimizer, stages)
    delayed(generator, generator_optimizer, stages)  # each network has versions of its own
    folder = f"runs/gan/p{stages}"
    with record(folder, "rmsprop", pipeline=pipeline, lr=1e-3, iterations=iterations) as run:
        for t in range(1, iterations + 1):
            fake = generator(torch.randn(128, 8))
            critic_optimizer.zero_grad()
            # Both passes of the critic are in one window, so they use the same version.
            loss = critic(fake.detach()).mean() - critic(circle(128, t)).mean()
            loss.backward()
            critic_optimizer.step()
            for weight in critic.parameters():  # after the step: the next version is clamped
                weight.data.clamp_(-0.1, 0.1)
            generator_optimizer.zero_grad()
            (-critic(fake).mean()).backward()
            generator_optimizer.step()
            run.log(t, distance(fake.detach(), circle(128, t)), critic=loss)

main(["slowdown", "runs/gan"])
