"""Mixture of experts in nanoMoE's shape: top-k routing, a load-balancing loss and a router z-loss.

Shape legend: N tokens, D width, F hidden width, X experts, K experts per token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from brx.config.schema import MoEConfig


class Experts(nn.Module):
    """One linear map per expert, batched: weight (X, out, in) and bias (X, out)."""

    def __init__(self, num_experts: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, outputs, inputs))
        self.bias = nn.Parameter(torch.empty(num_experts, outputs))

    def forward(self, x: Tensor) -> Tensor:
        """(X, N, in) to (X, N, out)."""
        return torch.baddbmm(self.bias.unsqueeze(1), x, self.weight.transpose(1, 2))


class Mixture(nn.Module):
    """Each token goes to its top-k experts, weighted by the router's probabilities renormalised over them."""

    def __init__(self, width: int, hidden: int, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.router = nn.Linear(width, config.experts, bias=False)
        self.expand = Experts(config.experts, width, hidden)
        self.contract = Experts(config.experts, hidden, width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(B, S, D) to (B, S, D), and the weighted sum of the two auxiliary losses (a scalar)."""
        tokens = x.reshape(-1, x.shape[-1])
        # Routing in fp32 at least: a rounding of the logits would change which expert is chosen (ST-MoE, section 3.3).
        at_least_fp32 = torch.promote_types(tokens.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(tokens.to(at_least_fp32), self.router.weight.to(at_least_fp32))  # (N, X)
        chosen_logits, chosen = logits.topk(self.config.top_k, dim=-1)  # (N, K)
        weights = torch.zeros_like(logits).scatter(1, chosen, chosen_logits.softmax(dim=-1))  # (N, X)
        everywhere = tokens.expand(self.config.experts, *tokens.shape)
        outputs = self.contract(F.gelu(self.expand(everywhere)))  # (X, N, D)
        mixed = torch.einsum("nx,xnd->nd", weights.to(outputs.dtype), outputs)
        return mixed.view_as(x), self._auxiliary_loss(logits, chosen)

    def _auxiliary_loss(self, logits: Tensor, chosen: Tensor) -> Tensor:
        num_experts = self.config.experts
        share = F.one_hot(chosen, num_experts).float().mean(dim=(0, 1))  # of the tokens, by expert
        probability = logits.softmax(dim=-1).mean(dim=0)
        load_balance = num_experts * (share * probability).sum()
        router_z = logits.logsumexp(dim=-1).square().mean()
        return self.config.load_balance_weight * load_balance + self.config.router_z_weight * router_z
