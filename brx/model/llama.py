"""Llama: RMSNorm, rotary positions, gated MLP (SwiGLU), grouped-query attention, no bias.

The same numbers as LlamaForCausalLM of Hugging Face's transformers from the same weights
(arXiv:2302.13971, arXiv:2407.21783).

Shape legend: B examples, S positions, D width, H heads of the queries, K heads of keys and values,
E head width (D / H), F hidden width of the MLP, V vocabulary."""

import math
import re

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from brx.config.schema import MoEConfig, RopeScalingConfig
from brx.model.block import Block
from brx.model.head import Head, at_least_fp32
from brx.model.initial import initialize_as_gpt2
from brx.model.mixture import GatedMixture

_MATRIX = re.compile(
    r"blocks\.\d+\.(attention|mlp)\.(query|key|value|projection|gate|up|down)\.weight"
)


class Llama(nn.Module):
    """The model `llama`; options as in `brx.config.schema.LlamaConfig`."""

    def __init__(
        self,
        vocabulary_size: int,
        sequence_length: int,
        blocks: int,
        width: int,
        heads: int,
        kv_heads: int,
        hidden: int,
        rope_theta: float = 10_000.0,
        rope_scaling: RopeScalingConfig | None = None,
        norm_eps: float = 1e-5,
        tied: bool = False,
        moe: MoEConfig | None = None,
    ) -> None:
        super().__init__()
        self.has_auxiliary_loss = moe is not None
        self.embed = Embedding(vocabulary_size, width)
        rotary = Rotary(sequence_length, width // heads, rope_theta, rope_scaling)
        self.blocks = nn.ModuleList()
        for index in range(blocks):
            mixture = moe if moe is not None and moe.is_in_block(index) else None
            self.blocks.append(
                Block(
                    RMSNorm(width, norm_eps),
                    Attention(width, heads, kv_heads, rotary),
                    RMSNorm(width, norm_eps),
                    MLP(width, hidden) if mixture is None else GatedMixture(width, hidden, mixture),
                )
            )
        self.head = Head(RMSNorm(width, norm_eps), nn.Linear(width, vocabulary_size, bias=False))
        if tied:
            self.head.linear.weight = self.embed.tokens.weight

    def initialize(self, seed: int) -> None:
        initialize_as_gpt2(self, len(self.blocks), seed)

    def matrices(self) -> list[str]:
        """Weight matrices of attention and MLP, or stacks of experts' matrices."""
        return [name for name, _ in self.named_parameters() if _MATRIX.fullmatch(name)]


class Embedding(nn.Module):
    """(B, S) token ids to (B, S, D); positions are for the blocks."""

    def __init__(self, vocabulary_size: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary_size, width)

    def forward(self, token_ids: Tensor) -> Tensor:
        return self.tokens(token_ids)  # type: ignore[no-any-return]


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) times a weight, in fp32 at least; (*, D) to (*, D)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        precise = x.to(at_least_fp32(x.dtype))
        return F.rms_norm(precise, self.weight.shape, self.weight, self.eps).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{len(self.weight)}, eps={self.eps}"


class Rotary(nn.Module):
    """Turns each pair (i, i + E/2) of a head's entries by an angle in proportion to the position
    (RoPE, arXiv:2104.09864). All blocks share one table."""

    cosine: Tensor  # (S, E)
    sine: Tensor  # (S, E)

    def __init__(
        self, num_positions: int, head_width: int, theta: float, scaling: RopeScalingConfig | None
    ) -> None:
        super().__init__()
        frequencies = rotary_frequencies(head_width, theta, scaling)
        angles = torch.outer(torch.arange(num_positions).float(), frequencies)  # (S, E/2)
        angles = torch.cat([angles, angles], dim=-1)
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, *, S, E) to the same shape and dtype."""
        positions = x.shape[-2]
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat([-second, first], dim=-1)  # by a right angle
        rotated = x * self.cosine[:positions] + turned * self.sine[:positions]
        return rotated.to(x.dtype)


def rotary_frequencies(head_width: int, theta: float, scaling: RopeScalingConfig | None) -> Tensor:
    """Radians per position of each pair, (E/2,) in fp32."""
    exponents = torch.arange(0, head_width, 2).float() / head_width
    frequencies = 1.0 / theta**exponents
    if scaling is None:
        return frequencies
    # Llama 3.1: waves that are long relative to the original context turn `factor` times slower,
    # short ones as before, and those between the two by a mean.
    wavelengths = 2 * math.pi / frequencies
    turns = scaling.original_sequence_length / wavelengths  # in the original context
    low, high = scaling.low_frequency, scaling.high_frequency
    share = ((turns - low) / (high - low)).clamp(0.0, 1.0)  # of the frequency as it was
    return (1.0 - share) * frequencies / scaling.factor + share * frequencies


class Attention(nn.Module):
    """Causal self-attention in which H / K heads of the queries share keys and values (grouped
    queries, arXiv:2305.13245): (B, S, D) to (B, S, D)."""

    def __init__(self, width: int, num_heads: int, num_kv_heads: int, rotary: Rotary) -> None:
        super().__init__()
        self.head_width = width // num_heads
        self.is_grouped = num_kv_heads < num_heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, num_kv_heads * self.head_width, bias=False)
        self.value = nn.Linear(width, num_kv_heads * self.head_width, bias=False)
        self.projection = nn.Linear(width, width, bias=False)
        self.rotary = rotary

    def forward(self, x: Tensor) -> Tensor:
        query = self.rotary(self._by_head(self.query(x)))  # (B, H, S, E)
        key = self.rotary(self._by_head(self.key(x)))  # (B, K, S, E)
        value = self._by_head(self.value(x))  # (B, K, S, E)
        mixed = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=self.is_grouped
        )
        return self.projection(mixed.transpose(1, 2).reshape(x.shape))  # type: ignore[no-any-return]

    def _by_head(self, x: Tensor) -> Tensor:
        """(B, S, heads E) to (B, heads, S, E)."""
        batch, positions, width = x.shape
        heads = width // self.head_width
        return x.view(batch, positions, heads, self.head_width).transpose(1, 2)


class MLP(nn.Module):
    """down(silu(gate x) * up x) (SwiGLU, arXiv:2002.05202): (B, S, D) to (B, S, D)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]
