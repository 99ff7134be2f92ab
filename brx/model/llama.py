"""Llama: RMSNorm, rotary positions, gated MLP (SwiGLU), grouped-query attention, no bias.

It computes the same numbers as LlamaForCausalLM of Hugging Face's transformers does from the same
weights (arXiv:2302.13971, arXiv:2407.21783).

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
    """The model `llama`: `embed`, `blocks` and `head` in the order of the pipeline.

    Args:
        vocabulary_size: V.
        sequence_length: the largest S.
        blocks: the number of blocks.
        width: D, a multiple of `heads`.
        heads: H, a multiple of `kv_heads`.
        kv_heads: K; H for attention without groups.
        hidden: F.
        rope_theta: the base of the rotary frequencies.
        rope_scaling: Llama 3.1's change of the frequencies for longer contexts; None for none.
        norm_eps: added to the mean square in each norm.
        tied: whether the head's matrix is the embedding's.
        moe: the mixtures of experts that replace the MLPs of some blocks; None for none.
    """

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
            attention = Attention(width, heads, kv_heads, rotary)
            mlp: nn.Module
            if moe is not None and moe.is_in_block(index):
                mlp = GatedMixture(width, hidden, moe)
            else:
                mlp = MLP(width, hidden)
            self.blocks.append(
                Block(RMSNorm(width, norm_eps), attention, RMSNorm(width, norm_eps), mlp)
            )
        self.head = Head(RMSNorm(width, norm_eps), nn.Linear(width, vocabulary_size, bias=False))
        if tied:
            self.head.linear.weight = self.embed.tokens.weight

    def initialize(self, seed: int) -> None:
        """Give all parameters the initial weights of the seed, as in GPT-2."""
        initialize_as_gpt2(self, len(self.blocks), seed)

    def matrices(self) -> list[str]:
        """The names of the weight matrices of attention and MLP, and of the stacks of experts'
        matrices."""
        return [name for name, _ in self.named_parameters() if _MATRIX.fullmatch(name)]


class Embedding(nn.Module):
    """Token ids (B, S) to (B, S, D), without positions, which the blocks add by rotation."""

    def __init__(self, vocabulary_size: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary_size, width)

    def forward(self, token_ids: Tensor) -> Tensor:
        return self.tokens(token_ids)  # type: ignore[no-any-return]


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, computed in fp32 at least: (*, D) to (*, D)."""

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
    (RoPE, arXiv:2104.09864). All blocks share one table of angles.

    Args:
        num_positions: the largest S.
        head_width: E.
        theta, scaling: as in `rotary_frequencies`.
    """

    cosine: Tensor  # (S, E)
    sine: Tensor  # (S, E)

    def __init__(
        self, num_positions: int, head_width: int, theta: float, scaling: RopeScalingConfig | None
    ) -> None:
        super().__init__()
        frequencies = rotary_frequencies(head_width, theta, scaling)
        positions = torch.arange(num_positions).float()
        angles = torch.outer(positions, frequencies)  # (S, E/2)
        angles = torch.cat([angles, angles], dim=-1)  # (S, E)
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)

    def forward(
        self,
        x: Tensor,  # (B, *, S, E)
    ) -> Tensor:
        """The turned entries, in the same shape and dtype."""
        positions = x.shape[-2]
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat([-second, first], dim=-1)  # x turned by a right angle
        rotated = x * self.cosine[:positions] + turned * self.sine[:positions]
        return rotated.to(x.dtype)


def rotary_frequencies(head_width: int, theta: float, scaling: RopeScalingConfig | None) -> Tensor:
    """The angle by which each pair turns from one position to the next: (E/2,), in radians, fp32.

    Args:
        head_width: E.
        theta: pair i turns by theta^(-2i/E).
        scaling: Llama 3.1's rule for a context that is longer than the original one
            (arXiv:2407.21783); None leaves the frequencies as they are.
    """
    exponents = torch.arange(0, head_width, 2).float() / head_width
    frequencies = 1.0 / theta**exponents
    if scaling is None:
        return frequencies
    # Pairs that make few turns in the original context become `factor` times slower. Those that
    # make many stay as they were, and those in between get a weighted mean of the two.
    wavelengths = 2 * math.pi / frequencies  # positions per turn
    turns = scaling.original_sequence_length / wavelengths
    low = scaling.low_frequency  # in turns
    high = scaling.high_frequency  # in turns
    unchanged = ((turns - low) / (high - low)).clamp(0.0, 1.0)  # weight of the original frequency
    return (1.0 - unchanged) * frequencies / scaling.factor + unchanged * frequencies


class Attention(nn.Module):
    """Causal self-attention in which groups of H / K heads of the queries share their keys and
    values (grouped-query attention, arXiv:2305.13245): (B, S, D) to (B, S, D)."""

    def __init__(self, width: int, num_heads: int, num_kv_heads: int, rotary: Rotary) -> None:
        super().__init__()
        self.head_width = width // num_heads
        self.is_grouped = num_kv_heads < num_heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, num_kv_heads * self.head_width, bias=False)
        self.value = nn.Linear(width, num_kv_heads * self.head_width, bias=False)
        self.projection = nn.Linear(width, width, bias=False)
        self.rotary = rotary

    def forward(
        self,
        x: Tensor,  # (B, S, D)
    ) -> Tensor:
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
