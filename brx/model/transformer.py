"""A decoder-only Transformer in nanoGPT's shape with the authors' details.

Learned positions, pre-LayerNorm with bias, separate query, key and value matrices without bias (so that each is
rotated by itself), output projection and 4x MLP with bias, untied head with bias, no dropout.

A mixture of experts is in nanoMoE's shape: top-k routing, a load-balancing loss and a router z-loss.

Shape legend: B examples, S positions, D width, H heads, E head width (D / H), V vocabulary; in a mixture N tokens, F
hidden width, X experts, K experts per token.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from brx.config.schema import ModelConfig, MoEConfig
from brx.model.cross_entropy import head_loss

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


class Experts(nn.Module):
    """One linear map per expert: weight (X, out, in) and bias (X, out)."""

    def __init__(self, num_experts: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, outputs, inputs))
        self.bias = nn.Parameter(torch.empty(num_experts, outputs))

    def forward(self, x: Tensor, counts: list[int]) -> Tensor:
        """(A, in) to (A, out): the first counts[0] rows by the first expert, the next by the second, and so on."""
        # Views of the parameters, not copies: a pipeline without stashing overwrites them before the backward pass.
        parts = zip(x.split_with_sizes(counts), self.weight.unbind(), self.bias.unbind(), strict=True)
        return torch.cat([F.linear(part, weight, bias) for part, weight, bias in parts])


class Mixture(nn.Module):
    """Each token goes to its top-k experts, weighted by the router's probabilities renormalised over them.

    No token is dropped, however many an expert gets.
    """

    def __init__(self, width: int, hidden: int, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.router = nn.Linear(width, config.experts, bias=False)
        self.up = Experts(config.experts, width, hidden)
        self.down = Experts(config.experts, hidden, width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(B, S, D) to (B, S, D), and the weighted sum of the two auxiliary losses (a scalar)."""
        tokens = x.reshape(-1, x.shape[-1])
        # Routing in fp32 at least: a rounding of the logits would change which expert is chosen (ST-MoE, section 3.3).
        at_least_fp32 = torch.promote_types(tokens.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(tokens.to(at_least_fp32), self.router.weight.to(at_least_fp32))  # (N, X)
        chosen_logits, chosen = logits.topk(self.config.top_k, dim=-1)  # (N, K)
        outputs: Tensor = self._through_experts(tokens, chosen)  # (N, K, D)
        weights = chosen_logits.softmax(dim=-1).to(outputs.dtype)
        mixed = (weights.unsqueeze(1) @ outputs).view_as(x)
        return mixed, self._auxiliary_loss(logits, chosen)

    def leave_experts_uncompiled(self) -> None:
        """Before the block is compiled: how many tokens an expert gets changes at every step, and torch.compile would
        compile anew each time. (No decorator: that loads the compiler, seconds of start-up for every command.)
        """
        uncompiled = torch.compiler.disable(self._through_experts)  # type: ignore[no-untyped-call]
        self._through_experts = uncompiled  # type: ignore[method-assign]

    def _through_experts(self, tokens: Tensor, chosen: Tensor) -> Tensor:
        """What the chosen experts (N, K) make of each token (N, D), as (N, K, D).

        The N K assignments are sorted by expert, so that each expert computes on its own tokens only.
        """
        num_tokens, top_k = chosen.shape
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=self.config.experts).tolist()
        # A permutation of copies, rather than rows picked K times: its gradient needs no atomic additions.
        copies = tokens.unsqueeze(1).expand(-1, top_k, -1).reshape(num_tokens * top_k, -1)
        outputs: Tensor = self.down(F.gelu(self.up(copies[order], counts)), counts)
        return outputs[order.argsort()].view(num_tokens, top_k, -1)

    def _auxiliary_loss(self, logits: Tensor, chosen: Tensor) -> Tensor:
        num_experts = self.config.experts
        share = F.one_hot(chosen, num_experts).to(logits.dtype).mean(dim=(0, 1))  # of the assignments, by expert
        probability = logits.softmax(dim=-1).mean(dim=0)
        load_balance = num_experts * (share * probability).sum()
        router_z = logits.logsumexp(dim=-1).square().mean()
        return self.config.load_balance_weight * load_balance + self.config.router_z_weight * router_z


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
