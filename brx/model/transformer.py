"""A decoder-only Transformer in nanoGPT's shape with the authors' details.

Learned positions, pre-LayerNorm with bias, separate query, key and value matrices without bias (so
that each is rotated by itself), output projection and 4x MLP with bias, untied head with bias, no
dropout.

A mixture of experts is in nanoMoE's shape: top-k routing, a load-balancing loss and a router
z-loss.

Shape legend: B examples, S positions, N = B S tokens, D width, H heads, E head width (D / H), V
vocabulary; in a mixture F hidden width, X experts, K experts per token."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from brx.config.schema import ModelConfig, MoEConfig

MLP_RATIO = 4
CHUNK_LOGITS = (
    2**25
)  # of a chunk of the loss: 128 MiB in fp32, and still hundreds of tokens per matrix product


class Embedding(nn.Module):
    """Token plus position embedding: (B, S) token ids to (B, S, D)."""

    def __init__(self, config: ModelConfig, vocabulary_size: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary_size, config.width)
        self.positions = nn.Embedding(config.sequence_length, config.width)

    def forward(self, token_ids: Tensor) -> Tensor:
        x: Tensor = self.tokens(token_ids) + self.positions.weight[: token_ids.shape[1]]
        # Under autocast the residual stream is bf16 from here on, as are the tensors that devices
        # exchange.
        device_type = x.device.type
        return (
            x.to(torch.get_autocast_dtype(device_type))
            if torch.is_autocast_enabled(device_type)
            else x
        )


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
        projections = (self.query, self.key, self.value)
        query, key, value = (
            linear(x).view(heads).transpose(1, 2) for linear in projections
        )  # each (B, H, S, E)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.projection(mixed.transpose(1, 2).reshape(batch, positions, width))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """Two linear maps with a GELU between them: (B, S, D) to (B, S, D)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, MLP_RATIO * width)
        self.down = nn.Linear(MLP_RATIO * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))  # type: ignore[no-any-return]


class Experts(nn.Module):
    """One linear map per expert: weight (X, out, in) and bias (X, out)."""

    def __init__(self, num_experts: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, outputs, inputs))
        self.bias = nn.Parameter(torch.empty(num_experts, outputs))

    def forward(self, x: Tensor, counts: list[int]) -> Tensor:
        """(A, in) to (A, out): the first counts[0] rows by the first expert, the next by the
        second, and so on."""
        # Views of the parameters, not copies: a pipeline without stashing overwrites them before
        #     the backward pass.
        parts = zip(
            x.split_with_sizes(counts), self.weight.unbind(), self.bias.unbind(), strict=True
        )
        return torch.cat([F.linear(part, weight, bias) for part, weight, bias in parts])


class Mixture(nn.Module):
    """Each token goes to its top-k experts, weighted by the router's renormalised probabilities;
    none is dropped."""

    def __init__(self, width: int, hidden: int, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.router = nn.Linear(width, config.experts, bias=False)
        self.up = Experts(config.experts, width, hidden)
        self.down = Experts(config.experts, hidden, width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(B, S, D) to (B, S, D), and the weighted sum of the two auxiliary losses (a scalar)."""
        tokens = x.reshape(-1, x.shape[-1])
        # Routing in fp32 at least: a rounding of the logits would change which expert is chosen
        #     (ST-MoE, section 3.3).
        at_least_fp32 = _at_least_fp32(tokens.dtype)
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(
                tokens.to(at_least_fp32), self.router.weight.to(at_least_fp32)
            )  # (N, X)
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
        order = chosen.flatten().argsort(
            stable=True
        )  # (N K,) by expert: each computes on its own tokens only
        counts = torch.bincount(chosen.flatten(), minlength=self.config.experts).tolist()
        # A permutation of copies, rather than rows picked K times: its gradient needs no atomic
        #     additions.
        copies = tokens.unsqueeze(1).expand(-1, top_k, -1).reshape(num_tokens * top_k, -1)
        outputs: Tensor = self.down(F.gelu(self.up(copies[order], counts)), counts)
        return outputs[order.argsort()].view(num_tokens, top_k, -1)

    def _auxiliary_loss(self, logits: Tensor, chosen: Tensor) -> Tensor:
        num_experts = self.config.experts
        share = (
            F.one_hot(chosen, num_experts).to(logits.dtype).mean(dim=(0, 1))
        )  # of the assignments, by expert
        probability = logits.softmax(dim=-1).mean(dim=0)
        load_balance = num_experts * (share * probability).sum()
        router_z = logits.logsumexp(dim=-1).square().mean()
        return (
            self.config.load_balance_weight * load_balance + self.config.router_z_weight * router_z
        )


class Block(nn.Module):
    """From and to the residual stream (B, S, D); also gives the auxiliary loss of its mixture (None
    if it is dense)."""

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
        output = self.mlp(self.mlp_norm(x))
        mixed, auxiliary_loss = output if isinstance(self.mlp, Mixture) else (output, None)
        return x + mixed, auxiliary_loss

    def compile(self, *args: Any, **kwargs: Any) -> None:
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
        return self.linear(self.norm(x))  # type: ignore[no-any-return]

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats of the targets (B, S), computed in fp32 (float64 for a float64
        model)."""
        return head_loss(
            self.norm(x).flatten(0, 1), self.linear.weight, self.linear.bias, targets.flatten()
        )


def head_loss(x: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats of the logits x W^T + b, in chunks if there are more than
    `CHUNK_LOGITS` logits.

    x (N, D), weight (V, D), bias (V,), targets (N,). The matrix products run in autocast's dtype
    where it is on, everything after them in fp32 (float64 for float64).

    The logits of a GPT-2 vocabulary are the largest tensor of training by far (8 x 512 tokens: 0.8
    GB in fp32). Here each chunk of tokens has its logits, loss and gradients computed at once, so
    that only one chunk's logits exist."""
    if len(x) * len(weight) <= CHUNK_LOGITS:
        return _plain_loss(x, weight, bias, targets)
    return _ChunkedLoss.apply(x, weight, bias, targets, torch.is_grad_enabled())  # type: ignore[no-untyped-call, no-any-return]


def _plain_loss(x: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
    logits = F.linear(x, weight, bias)
    return F.cross_entropy(logits.to(_at_least_fp32(logits.dtype)), targets)


class _ChunkedLoss(torch.autograd.Function):
    """The loss, with its gradients made on the way: the backward pass only scales them."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, with_gradients: bool
    ) -> Tensor:
        device_type = x.device.type
        autocasts = torch.is_autocast_enabled(device_type)
        dtype = torch.get_autocast_dtype(device_type) if autocasts else weight.dtype
        with torch.autocast(device_type, enabled=False):
            loss, gradients = _by_chunks(
                x.to(dtype), weight.to(dtype), bias.to(dtype), targets, with_gradients
            )
        if with_gradients:
            ctx.save_for_backward(x, weight, bias, targets)
            inputs = (x, weight, bias)
            ctx.gradients = [
                gradient.to(like.dtype) for gradient, like in zip(gradients, inputs, strict=True)
            ]
            ctx.autocast = {
                "device_type": device_type,
                "dtype": dtype if autocasts else None,
                "enabled": autocasts,
            }
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is not None and not torch.is_grad_enabled():
            gradients, ctx.gradients = ctx.gradients, None  # scaled in place, so good for once
            return *(gradient.mul_(upstream) for gradient in gradients), None, None
        # Differentiated twice (the Hessian), or called a second time: by way of the plain loss.
        inputs, targets = ctx.saved_tensors[:3], ctx.saved_tensors[3]
        with torch.enable_grad(), torch.autocast(**ctx.autocast):
            again = _plain_loss(inputs[0], inputs[1], inputs[2], targets)
        wanted = [
            tensor
            for tensor, needed in zip(inputs, ctx.needs_input_grad[:3], strict=True)
            if needed
        ]
        gradients = iter(
            torch.autograd.grad(again, wanted, upstream, create_graph=torch.is_grad_enabled())
        )
        return (
            *(next(gradients) if needed else None for needed in ctx.needs_input_grad[:3]),
            None,
            None,
        )


def _by_chunks(
    x: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, with_gradients: bool
) -> tuple[Tensor, list[Tensor]]:
    """The mean loss and, if wanted, its gradients with respect to x (as x), weight and bias (at
    least fp32)."""
    precision = _at_least_fp32(x.dtype)
    total = x.new_zeros((), dtype=precision)
    gradients = []
    if with_gradients:
        gradients = [
            torch.empty_like(x),
            *(torch.zeros_like(tensor, dtype=precision) for tensor in (weight, bias)),
        ]
    length = max(1, CHUNK_LOGITS // len(weight))  # tokens in a chunk
    for start in range(0, len(x), length):
        chunk = x[start : start + length]
        chunk_loss, by_logits = _softmax_loss(
            F.linear(chunk, weight, bias), targets[start : start + length, None]
        )
        total += chunk_loss
        if with_gradients:
            by_logits.div_(len(x))  # of the mean
            gradients[2] += by_logits.sum(dim=0)
            by_logits = by_logits.to(x.dtype)
            torch.mm(by_logits, weight, out=gradients[0][start : start + length])
            gradients[1] += by_logits.T @ chunk
        del by_logits  # before there is another one
    return total / len(x), gradients


def _softmax_loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of the losses, and its gradient with respect to the logits (N, V): softmax minus
    one-hot."""
    logits = logits.to(_at_least_fp32(logits.dtype))
    wanted = logits.gather(1, targets)
    largest = logits.amax(dim=1, keepdim=True)
    exponentials = logits.sub_(
        largest
    ).exp_()  # in place: torch's logsumexp alone would take twice as much again
    normalizer = exponentials.sum(dim=1, keepdim=True)
    by_logits = exponentials.div_(normalizer)
    by_logits.scatter_add_(1, targets, by_logits.new_full((1, 1), -1.0).expand_as(targets))
    return (normalizer.log() + largest - wanted).sum(), by_logits


def _at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
