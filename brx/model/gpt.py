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
    """The model `gpt`: `embed`, `blocks` and `head` in the order of the pipeline.

    Args:
        vocabulary_size: V.
        sequence_length: the largest S.
        blocks: the number of blocks.
        width: D, a multiple of `heads`.
        heads: H.
        moe: the mixtures of experts that replace the MLPs of some blocks; None for none.
    """

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
            attention = Attention(width, heads)
            mlp: nn.Module
            if moe is not None and moe.is_in_block(index):
                mlp = Mixture(width, MLP_RATIO * width, moe)
            else:
                mlp = MLP(width)
            self.blocks.append(Block(nn.LayerNorm(width), attention, nn.LayerNorm(width), mlp))
        self.head = Head(nn.LayerNorm(width), nn.Linear(width, vocabulary_size))

    def initialize(self, seed: int) -> None:
        """Give all parameters the initial weights of the seed, as in GPT-2."""
        initialize_as_gpt2(self, len(self.blocks), seed)

    def matrices(self) -> list[str]:
        """The names of the weight matrices of attention and MLP, and of the stacks of experts'
        matrices. Basis rotation, SOAP, Muon and Scion treat them as matrices (appendix
        "Experimental Details")."""
        return [name for name, _ in self.named_parameters() if _MATRIX.fullmatch(name)]


class Embedding(nn.Module):
    """Token plus position embedding: (B, S) token ids to (B, S, D)."""

    def __init__(self, vocabulary_size: int, sequence_length: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary_size, width)
        self.positions = nn.Embedding(sequence_length, width)

    def forward(
        self,
        token_ids: Tensor,  # (B, S)
    ) -> Tensor:
        positions = self.positions.weight[: token_ids.shape[1]]  # (S, D)
        return self.tokens(token_ids) + positions  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Causal multi-head self-attention: (B, S, D) to (B, S, D)."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.projection = nn.Linear(width, width)

    def forward(
        self,
        x: Tensor,  # (B, S, D)
    ) -> Tensor:
        query = self._by_head(self.query(x))  # (B, H, S, E)
        key = self._by_head(self.key(x))
        value = self._by_head(self.value(x))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)  # (B, H, S, E)
        return self.projection(mixed.transpose(1, 2).reshape(x.shape))  # type: ignore[no-any-return]

    def _by_head(self, x: Tensor) -> Tensor:
        """(B, S, D) to (B, H, S, E)."""
        batch, positions, width = x.shape
        head_width = width // self.num_heads
        return x.view(batch, positions, self.num_heads, head_width).transpose(1, 2)


class MLP(nn.Module):
    """down(gelu(up x)): (B, S, D) to (B, S, D)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, MLP_RATIO * width)
        self.down = nn.Linear(MLP_RATIO * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))  # type: ignore[no-any-return]
