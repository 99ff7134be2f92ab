"""A decoder-only Transformer in nanoGPT's shape with the authors' details.

Learned positions, pre-LayerNorm with bias, separate query, key and value matrices without bias (so that each is
rotated by itself), output projection and 4x MLP with bias, untied head with bias, no dropout.

Shape legend: B examples, S positions, D width, H heads, E head width (D / H), V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from brx.config.schema import ModelConfig
from brx.model.cross_entropy import head_loss
from brx.model.mixture import Mixture

MLP_RATIO = 4


class Embedding(nn.Module):
    """Token plus position embedding: (B, S) token ids to (B, S, D)."""

    def __init__(self, config: ModelConfig, vocabulary_size: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary_size, config.width)
        self.positions = nn.Embedding(config.sequence_length, config.width)

    def forward(self, token_ids: Tensor) -> Tensor:
        x: Tensor = self.tokens(token_ids) + self.positions.weight[: token_ids.shape[1]]
        # Under autocast the residual stream is bf16 from here on, as are the tensors that devices exchange.
        device_type = x.device.type
        return x.to(torch.get_autocast_dtype(device_type)) if torch.is_autocast_enabled(device_type) else x


class Attention(nn.Module):
    """Causal multi-head self-attention: (B, S, D) to (B, S, D)."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.projection = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, positions, width = x.shape
        heads = (batch, positions, self.num_heads, width // self.num_heads)
        query, key, value = (
            linear(x).view(heads).transpose(1, 2) for linear in (self.query, self.key, self.value)
        )  # each (B, H, S, E)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        merged: Tensor = self.projection(mixed.transpose(1, 2).reshape(batch, positions, width))
        return merged


class MLP(nn.Module):
    """Two linear maps with a GELU between them: (B, S, D) to (B, S, D)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, MLP_RATIO * width)
        self.down = nn.Linear(MLP_RATIO * width, width)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down(F.gelu(self.up(x)))
        return output


class Block(nn.Module):
    """One pre-LayerNorm Transformer block.

    Returns the residual stream (B, S, D) and the auxiliary loss of its mixture of experts (None for a dense block).
    """

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config.width, config.heads)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp: MLP | Mixture
        if config.moe is not None and config.moe.is_in_block(index):
            self.mlp = Mixture(config.width, MLP_RATIO * config.width, config.moe)
        else:
            self.mlp = MLP(config.width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        x = x + self.attention(self.attention_norm(x))
        if isinstance(self.mlp, Mixture):
            mixed, auxiliary_loss = self.mlp(self.mlp_norm(x))
            return x + mixed, auxiliary_loss
        return x + self.mlp(self.mlp_norm(x)), None

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """As any module's, but for the experts of a mixture."""
        if isinstance(self.mlp, Mixture):
            self.mlp.leave_experts_uncompiled()
        super().compile(*args, **kwargs)


class Head(nn.Module):
    """Final norm and language-model head: (B, S, D) to logits (B, S, V)."""

    def __init__(self, config: ModelConfig, vocabulary_size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width)
        self.linear = nn.Linear(config.width, vocabulary_size)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.linear(self.norm(x))
        return logits

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats of the targets (B, S), computed in fp32 (float64 for a float64 model)."""
        return head_loss(self.norm(x).flatten(0, 1), self.linear.weight, self.linear.bias, targets.flatten())
