"""A GPT with RMSNorm and rotary positions (RoPE), made of brx's parts and an attention of its own.

brx train quick --set model.class=examples/models/rope_gpt.py:RopeGPT model.heads=4
"""

import torch.nn.functional as F
from torch import Tensor, nn

from brx.model.block import Block
from brx.model.gpt import MLP
from brx.model.head import Head
from brx.model.initial import initialize_as_gpt2
from brx.model.llama import RMSNorm, Rotary

EPS = 1e-5


class Attention(nn.Module):
    """Causal attention whose queries and keys are rotated by their positions. Takes the normalised
    stream (examples, tokens, width), and returns what the block adds to the stream."""

    def __init__(self, width: int, heads: int, rotary: Rotary) -> None:
        super().__init__()
        self.heads = heads
        self.rotary = rotary
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.projection = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        query = self.rotary(self.by_head(self.query(x)))
        key = self.rotary(self.by_head(self.key(x)))
        value = self.by_head(self.value(x))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.projection(mixed.transpose(1, 2).flatten(2))

    def by_head(self, x: Tensor) -> Tensor:
        """(examples, tokens, width) to (examples, heads, tokens, width / heads)."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class RopeGPT(nn.Module):
    """`width / heads` must be a whole, even number: rotary positions turn pairs of channels."""

    def __init__(
        self, vocabulary_size: int, sequence_length: int, blocks: int, width: int, heads: int = 4
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary_size, width)
        rotary = Rotary(sequence_length, width // heads, 10_000.0, None)  # one table for all blocks
        self.blocks = nn.ModuleList()
        for _ in range(blocks):
            attention, mlp = Attention(width, heads, rotary), MLP(width)
            self.blocks.append(Block(RMSNorm(width, EPS), attention, RMSNorm(width, EPS), mlp))
        self.head = Head(RMSNorm(width, EPS), nn.Linear(width, vocabulary_size, bias=False))

    def initialize(self, seed: int) -> None:
        initialize_as_gpt2(self, len(self.blocks), seed)
