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
    """One linear map per expert.

    Its parameters are the weight (X, out, in) and, unless `bias` is false, the bias (X, out)."""

    def __init__(self, num_experts: int, inputs: int, outputs: int, *, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, outputs, inputs))
        self.bias = nn.Parameter(torch.empty(num_experts, outputs)) if bias else None

    def forward(
        self,
        x: Tensor,  # (A, in), sorted by expert
        counts: list[int],  # rows of each expert, X numbers
    ) -> Tensor:
        """Map each row by its expert; returns (A, out) in the same order."""
        # Views of the parameters, not copies: a pipeline without stashing overwrites them before
        # the backward pass, which has to see that.
        weights = self.weight.unbind()
        biases = [None] * len(counts) if self.bias is None else self.bias.unbind()
        outputs = []
        for expert, rows in enumerate(x.split_with_sizes(counts)):
            outputs.append(F.linear(rows, weights[expert], biases[expert]))
        return torch.cat(outputs)


class Mixture(nn.Module):
    """A mixture of MLPs with a GELU, in place of a block's MLP.

    Each token goes to the K experts whose router logits are largest. Their outputs are weighted by
    the softmax of these K logits. No token is dropped, however many an expert gets.

    Args:
        width: D.
        hidden: F.
        config: the numbers of experts, and the weights of the auxiliary losses.
    """

    has_bias = True  # whether the maps of the experts have one

    def __init__(self, width: int, hidden: int, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.router = nn.Linear(width, config.experts, bias=False)
        self.up = Experts(config.experts, width, hidden, bias=self.has_bias)
        self.down = Experts(config.experts, hidden, width, bias=self.has_bias)

    def forward(
        self,
        x: Tensor,  # (B, S, D)
    ) -> tuple[Tensor, Tensor]:
        """The mixed outputs (B, S, D), and the weighted sum of the two auxiliary losses, a
        scalar."""
        tokens = x.reshape(-1, x.shape[-1])  # (N, D)
        # Routing in fp32 at least: a rounding of the logits would change which expert is chosen
        # (ST-MoE, arXiv:2202.08906, section 3.3).
        precision = at_least_fp32(tokens.dtype)
        with without_autocast(x.device.type):
            logits = F.linear(tokens.to(precision), self.router.weight.to(precision))  # (N, X)
        chosen_logits, chosen = logits.topk(self.config.top_k, dim=-1)  # (N, K)
        outputs: Tensor = self._through_experts(tokens, chosen)  # (N, K, D)
        weights = chosen_logits.softmax(dim=-1).to(outputs.dtype)  # (N, K)
        mixed = (weights.unsqueeze(1) @ outputs).view_as(x)  # (N, 1, K) @ (N, K, D)
        return mixed, self._auxiliary_loss(logits, chosen)

    def leave_experts_uncompiled(self) -> None:
        """Exclude the experts from a later `torch.compile` of the module."""
        # How many tokens an expert gets changes at every step, and torch.compile would recompile
        # each time. No decorator: that loads the compiler, seconds of start-up for every command.
        uncompiled = torch.compiler.disable(self._through_experts)  # type: ignore[no-untyped-call]
        self._through_experts = uncompiled  # type: ignore[method-assign]

    def _through_experts(
        self,
        tokens: Tensor,  # (N, D)
        chosen: Tensor,  # (N, K), the indices of each token's experts
    ) -> Tensor:
        """The outputs of each token's experts, (N, K, D)."""
        num_tokens, top_k = chosen.shape
        # Sorted by expert, so that each computes on its own tokens only.
        order = chosen.flatten().argsort(stable=True)  # (A,)
        counts = self._counts(chosen)
        # A permutation of copies, rather than rows picked K times: its gradient needs no atomic
        # additions, whose order would change from run to run.
        copies = tokens.unsqueeze(1).expand(-1, top_k, -1).reshape(num_tokens * top_k, -1)
        outputs = self._experts(copies[order], counts)  # (A, D), by expert
        back = order.argsort()
        return outputs[back].view(num_tokens, top_k, -1)

    def _experts(
        self,
        x: Tensor,  # (A, D), sorted by expert
        counts: list[int],  # rows of each expert
    ) -> Tensor:
        """Apply each row's expert MLP; returns (A, D) in the same order."""
        return self.down(F.gelu(self.up(x, counts)), counts)  # type: ignore[no-any-return]

    def _counts(
        self,
        chosen: Tensor,  # (N, K)
    ) -> list[int]:
        """The number of assignments of each expert."""
        num_experts = self.config.experts
        if chosen.is_meta:  # without values: assume that the assignments are evenly spread
            share, rest = divmod(chosen.numel(), num_experts)
            return [share + 1] * rest + [share] * (num_experts - rest)
        counts: list[int] = torch.bincount(chosen.flatten(), minlength=num_experts).tolist()
        return counts

    def _auxiliary_loss(
        self,
        logits: Tensor,  # (N, X)
        chosen: Tensor,  # (N, K)
    ) -> Tensor:
        """The weighted sum of the load-balancing loss (Switch Transformer, arXiv:2101.03961) and
        the router z-loss (ST-MoE, arXiv:2202.08906), a scalar."""
        num_experts = self.config.experts
        # f_i, the share of the assignments that expert i has; p_i, its mean probability. Both (X,).
        share = F.one_hot(chosen, num_experts).to(logits.dtype).mean(dim=(0, 1))
        probability = logits.softmax(dim=-1).mean(dim=0)
        load_balance = num_experts * (share * probability).sum()  # X sum_i f_i p_i
        router_z = logits.logsumexp(dim=-1).square().mean()  # mean of (log sum_i exp(logit_i))^2
        return (
            self.config.load_balance_weight * load_balance + self.config.router_z_weight * router_z
        )


class GatedMixture(Mixture):
    """A mixture of gated MLPs without bias, down(silu(gate x) * up x) (Mixtral,
    arXiv:2401.04088)."""

    has_bias = False

    def __init__(self, width: int, hidden: int, config: MoEConfig) -> None:
        super().__init__(width, hidden, config)
        self.gate = Experts(config.experts, width, hidden, bias=False)

    def _experts(
        self,
        x: Tensor,  # (A, D), sorted by expert
        counts: list[int],  # rows of each expert
    ) -> Tensor:
        gated = F.silu(self.gate(x, counts)) * self.up(x, counts)
        return self.down(gated, counts)  # type: ignore[no-any-return]
