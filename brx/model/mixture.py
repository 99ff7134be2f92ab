"""Mixture of experts in nanoMoE's shape: top-k routing, a load-balancing loss and a router z-loss.

Shape legend: N tokens, D width, F hidden width, X experts, K experts per token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from brx.config.schema import MoEConfig


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
