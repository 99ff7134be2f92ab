"""GPT: a decoder-only Transformer in nanoGPT's shape with the authors' details.

Learned positions, pre-LayerNorm with bias, separate query, key and value matrices without bias (so
that each is rotated by itself), output projection and 4x MLP with bias, untied head with bias, no
dropout.

Shape legend: B examples, S positions, D width, H heads, E head width (D / H), V vocabulary."""

import re

import torch.nn.functional as F
from torch import Tensor, nn

from brx.config.schema import MoEConfig
from brx.model.block import Block
from brx.model.head import Head
from brx.model.initial import initialize_as_gpt2
from brx.model.mixture import Mixture

MLP_RATIO = 4
_MATRIX = re.compile(r"blocks\.\d+\.(attention|mlp)\.(query|key|value|projection|up|down)\.weight")


class GPT(nn.Module):
    """The model `gpt`; options as in `brx.config.schema.GPTConfig`."""

    def __init__(
        self,
        vocabulary_size: int,
        sequence_length: int,
        blocks: int,
        width: int,
        heads: int,
        moe: MoEConfig | None = None,
    ) -> None:
        super().__init__()
        self.embed = Embedding(vocabulary_size, sequence_length, width)
        self.has_auxiliary_loss = moe is not None
        self.blocks = nn.ModuleList()
        for index in range(blocks):
            mixture = moe if moe is not None and moe.is_in_block(index) else None
            self.blocks.append(
                Block(
                    nn.LayerNorm(width),
                    Attention(width, heads),
                    nn.LayerNorm(width),
                    MLP(width) if mixture is None else Mixture(width, MLP_RATIO * width, mixture),
                )
            )
        self.head = Head(nn.LayerNorm(width), nn.Linear(width, vocabulary_size))

    def initialize(self, seed: int) -> None:
        initialize_as_gpt2(self, len(self.blocks), seed)

    def matrices(self) -> list[str]:
        """Weight matrices of attention and MLP, or stacks of experts' matrices: what basis
        rotation, SOAP, Muon and Scion treat as matrices (appendix "Experimental Details")."""
        return [name for name, _ in self.named_parameters() if _MATRIX.fullmatch(name)]


class Embedding(nn.Module):
    """Token plus position embedding: (B, S) token ids to (B, S, D)."""

    def __init__(self, vocabulary_size: int, sequence_length: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary_size, width)
        self.positions = nn.Embedding(sequence_length, width)

    def forward(self, token_ids: Tensor) -> Tensor:
        return self.tokens(token_ids) + self.positions.weight[: token_ids.shape[1]]  # type: ignore[no-any-return]


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
        # Each (B, H, S, E)
        query, key, value = (linear(x).view(heads).transpose(1, 2) for linear in projections)
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
