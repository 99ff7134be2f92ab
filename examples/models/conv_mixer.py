"""A language model without attention. Each block mixes positions with a gated causal convolution
per channel, and channels with an MLP.

    brx train quick --set model.class=examples/models/conv_mixer.py:ConvMixer model.kernel=8
"""

import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Takes and returns the residual stream (examples, tokens, width)."""

    def __init__(self, width: int, kernel: int) -> None:
        super().__init__()
        self.mix_norm = nn.RMSNorm(width)
        self.mlp_norm = nn.RMSNorm(width)
        self.value = nn.Linear(width, width)
        self.gate = nn.Linear(width, width)
        self.convolution = nn.Conv1d(width, width, kernel, groups=width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        normal = self.mix_norm(x)
        value = self.value(normal).transpose(1, 2)  # (examples, width, tokens)
        # Zeros before the first token, so that no token sees a later one.
        (kernel,) = self.convolution.kernel_size
        past = F.pad(value, (kernel - 1, 0))
        mixed = self.convolution(past).transpose(1, 2)
        x = x + F.silu(self.gate(normal)) * mixed
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class ConvMixer(nn.Module):
    """The three parts of a model in the order of the pipeline."""

    def __init__(
        self, vocabulary_size: int, sequence_length: int, blocks: int, width: int, kernel: int = 4
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary_size, width)
        self.blocks = nn.ModuleList(Block(width, kernel) for _ in range(blocks))
        self.head = nn.Sequential(nn.RMSNorm(width), nn.Linear(width, vocabulary_size))

    def initialize(self, seed: int) -> None:
        """Start the head with small weights; brx has seeded torch before the constructor."""
        nn.init.normal_(self.head[1].weight, std=0.02)
