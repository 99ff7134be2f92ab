"""A stage: a contiguous run of blocks, with the embedding if it is the first and the head if it is
the last.

Parameter names are those of the whole model ("blocks.5.attention.query.weight") whatever the
partition is."""

import hashlib
import re
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from brx.config.schema import ModelConfig
from brx.model.transformer import Block, Embedding, Head

_BLOCK_MATRIX = re.compile(
    r"blocks\.\d+\.(attention|mlp)\.(query|key|value|projection|up|down)\.weight"
)


class StageOutput(NamedTuple):
    stream: Tensor  # (B, S, D), behind the stage's last block
    loss: Tensor | None  # mean cross-entropy in nats; of the last stage
    auxiliary_loss: Tensor | None  # sum over the stage's mixtures of experts; None if it has none


class Stage(nn.Module):
    """Blocks `blocks` of the model; stage boundaries carry the residual stream (B, S, D)."""

    def __init__(
        self, config: ModelConfig, vocabulary_size: int, blocks: range, *, recompute: bool = False
    ) -> None:
        super().__init__()
        self.recompute = recompute
        self.embedding = Embedding(config, vocabulary_size) if blocks.start == 0 else None
        self.blocks = nn.ModuleDict({str(index): Block(config, index) for index in blocks})
        self.head = Head(config, vocabulary_size) if blocks.stop == config.blocks else None

    def forward(self, x: Tensor, targets: Tensor | None = None) -> StageOutput:
        """Compute the stage: `x` are token ids (B, S) in the first one, else the residual stream
        (B, S, D); `targets` the next tokens (B, S), which the last one needs."""
        if self.embedding is not None:
            x = self.embedding(x)
        auxiliary_losses = []
        for block in self.blocks.values():
            x, auxiliary_loss = (
                checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
            )
            if auxiliary_loss is not None:
                auxiliary_losses.append(auxiliary_loss)
        loss = None
        if self.head is not None:
            assert targets is not None, "the last stage needs the targets"
            loss = self.head.loss(x, targets)
        return StageOutput(
            x, loss, torch.stack(auxiliary_losses).sum() if auxiliary_losses else None
        )


def whole_model(config: ModelConfig, vocabulary_size: int) -> Stage:
    return Stage(config, vocabulary_size, range(config.blocks))


def partition(num_items: int, num_parts: int) -> list[range]:
    """Split items into contiguous parts whose sizes differ by at most one, the same way every
    time."""
    bounds = [part * num_items // num_parts for part in range(num_parts + 1)]
    return [range(start, stop) for start, stop in pairwise(bounds)]


def is_block_matrix(name: str) -> bool:
    """Whether it is a weight matrix of attention or MLP (or a stack of experts' matrices): what
    basis rotation, SOAP, Muon and Scion treat as matrices (appendix "Experimental Details").
    Autocast casts them; rings may keep bf16."""
    return _BLOCK_MATRIX.fullmatch(name) is not None


@torch.no_grad()
def initialize(stage: nn.Module, num_blocks: int, seed: int) -> None:
    """Draw the initial weights, each parameter from (seed, name) alone, so that every partition
    starts equal.

    GPT-2's scheme: normal with deviation 0.02, zero biases, unit norms.
    """
    for name, parameter in stage.named_parameters():
        if "norm" in name:
            parameter.fill_(1.0 if name.endswith("weight") else 0.0)
        elif name.endswith("bias"):
            parameter.zero_()
        else:
            writes_residual = name.endswith(("projection.weight", "down.weight"))
            deviation = (
                0.02 / (2 * num_blocks) ** 0.5 if writes_residual else 0.02
            )  # two such sums per block
            digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            parameter.copy_(
                torch.empty(parameter.shape).normal_(0.0, deviation, generator=generator)
            )
