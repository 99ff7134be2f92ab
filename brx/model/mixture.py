"""A mixture of experts in nanoMoE's shape: top-k routing, a load-balancing loss and a router
z-loss.

Shape legend: B examples, S positions, N = B S tokens, D width, F hidden width, X experts, K experts
per token, A = N K assignments."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from brx.config.schema import MoEConfig
from brx.model.head import at_least_fp32
from brx.model.trace import without_autocast


class Experts(nn.Module):
    """One linear map per expert: weight (X, out, in) and bias (X, out), if there is one."""

    def __init__(self, num_experts: int, inputs: int, outputs: int, *, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, outputs, inputs))
        self.bias = nn.Parameter(torch.empty(num_experts, outputs)) if bias else None

    def forward(self, x: Tensor, counts: list[int]) -> Tensor:
        """(A, in) to (A, out): the first counts[0] rows by the first expert, the next by the
        second, and so on."""
        # Views of the parameters, not copies: a pipeline without stashing overwrites them before
        #     the backward pass.
        biases = [None] * len(counts) if self.bias is None else self.bias.unbind()
        parts = zip(x.split_with_sizes(counts), self.weight.unbind(), biases, strict=True)
        return torch.cat([F.linear(part, weight, bias) for part, weight, bias in parts])


class Mixture(nn.Module):
    """Each token goes to its top-k experts, weighted by the router's renormalised probabilities;
    none is dropped. The experts are MLPs with a GELU."""

    has_bias = True

    def __init__(self, width: int, hidden: int, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.router = nn.Linear(width, config.experts, bias=False)
        self.up = Experts(config.experts, width, hidden, bias=self.has_bias)
        self.down = Experts(config.experts, hidden, width, bias=self.has_bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(B, S, D) to (B, S, D), and the weighted sum of the two auxiliary losses (a scalar)."""
        tokens = x.reshape(-1, x.shape[-1])
        # Routing in fp32 at least: a rounding of the logits would change which expert is chosen
        #     (ST-MoE, section 3.3).
        precision = at_least_fp32(tokens.dtype)
        with without_autocast(x.device.type):
            logits = F.linear(tokens.to(precision), self.router.weight.to(precision))  # (N, X)
        chosen_logits, chosen = logits.topk(self.config.top_k, dim=-1)  # (N, K)
        outputs: Tensor = self._through_experts(tokens, chosen)  # (N, K, D)
        weights = chosen_logits.softmax(dim=-1).to(outputs.dtype)
        mixed = (weights.unsqueeze(1) @ outputs).view_as(x)
        return mixed, self._auxiliary_loss(logits, chosen)

    def leave_experts_uncompiled(self) -> None:
        # How many tokens an expert gets changes at every step, and torch.compile would compile anew
        # each time. No decorator: that loads the compiler, seconds of start-up for every command.
        uncompiled = torch.compiler.disable(self._through_experts)  # type: ignore[no-untyped-call]
        self._through_experts = uncompiled  # type: ignore[method-assign]

    def _through_experts(self, tokens: Tensor, chosen: Tensor) -> Tensor:
        """What the chosen experts (N, K) make of each token (N, D), as (N, K, D)."""
        num_tokens, top_k = chosen.shape
        # (N K,) by expert: each computes on its own tokens only
        order = chosen.flatten().argsort(stable=True)
        counts = self._counts(chosen)
        # A permutation of copies, rather than rows picked K times: its gradient needs no atomic
        #     additions.
        copies = tokens.unsqueeze(1).expand(-1, top_k, -1).reshape(num_tokens * top_k, -1)
        outputs = self._experts(copies[order], counts)
        return outputs[order.argsort()].view(num_tokens, top_k, -1)

    def _experts(self, x: Tensor, counts: list[int]) -> Tensor:
        """(A, D) to (A, D), rows by expert as `Experts.forward` has them."""
        return self.down(F.gelu(self.up(x, counts)), counts)  # type: ignore[no-any-return]

    def _counts(self, chosen: Tensor) -> list[int]:
        """How many assignments each expert has, of the chosen ones (N, K)."""
        num_experts = self.config.experts
        if chosen.is_meta:  # nobody knows: as many as evenly go to each
            share, rest = divmod(chosen.numel(), num_experts)
            return [share + 1] * rest + [share] * (num_experts - rest)
        counts: list[int] = torch.bincount(chosen.flatten(), minlength=num_experts).tolist()
        return counts

    def _auxiliary_loss(self, logits: Tensor, chosen: Tensor) -> Tensor:
        num_experts = self.config.experts
        # Share of the assignments, by expert.
        share = F.one_hot(chosen, num_experts).to(logits.dtype).mean(dim=(0, 1))
        probability = logits.softmax(dim=-1).mean(dim=0)
        load_balance = num_experts * (share * probability).sum()
        router_z = logits.logsumexp(dim=-1).square().mean()
        return (
            self.config.load_balance_weight * load_balance + self.config.router_z_weight * router_z
        )


class GatedMixture(Mixture):
    """Likewise, of experts that are gated MLPs without bias (Mixtral, arXiv:2401.04088)."""

    has_bias = False

    def __init__(self, width: int, hidden: int, config: MoEConfig) -> None:
        super().__init__(width, hidden, config)
        self.gate = Experts(config.experts, width, hidden, bias=False)

    def _experts(self, x: Tensor, counts: list[int]) -> Tensor:
        gated = F.silu(self.gate(x, counts)) * self.up(x, counts)
        return self.down(gated, counts)  # type: ignore[no-any-return]
