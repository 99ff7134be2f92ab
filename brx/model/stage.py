"""A stage: a contiguous run of blocks, with the embedding if it is the first and the head if it is
the last.

Parameters have the names of the whole model ("blocks.5.attention.query.weight"), whatever the
partition is."""

from collections.abc import Sequence, Set
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from brx.config.schema import ModelSection
from brx.model.head import loss_of
from brx.model.initial import stage_name
from brx.model.mixture import Experts
from brx.model.models import make_model, matrix_names


class StageOutput(NamedTuple):
    stream: Tensor  # (B, S, D), behind the stage's last block
    loss: Tensor | None  # mean cross-entropy in nats; of the last stage
    auxiliary_loss: Tensor | None  # sum over the stage's mixtures of experts; None if it has none


class Stage(nn.Module):
    """Blocks `blocks` of a model (`brx.model.models`) with these settings; stage boundaries carry
    the residual stream (B, S, D).

    Attributes, of the stage's parameters by name: matrices: weight matrices in blocks, or stacks of
        them, which basis rotation, SOAP, Muon and Scion treat as matrices. stacks: parameters whose
        first dimension counts members; some methods treat each member separately. cast: matrices
        that autocast casts wherever they are used; rings may keep them in bf16.
    """

    def __init__(
        self,
        model: nn.Module,
        config: ModelSection,
        vocabulary_size: int,
        blocks: range,
        matrices: Set[str],  # of the whole model, by their names in a stage
        *,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        parts: Any = model
        self.recompute = recompute
        self.vocabulary_size = vocabulary_size
        self.width = config.width
        self.embedding = parts.embed if blocks.start == 0 else None
        self.blocks = nn.ModuleDict({str(index): parts.blocks[index] for index in blocks})
        self.head = parts.head if blocks.stop == len(parts.blocks) else None
        # True for a model whose auxiliary losses are not means over examples.
        self.has_auxiliary_loss = bool(getattr(model, "has_auxiliary_loss", False))
        own = dict(self.named_parameters())
        self.matrices = frozenset(name for name in own if name in matrices)
        self.stacks = _stacks(self) | {name for name in self.matrices if own[name].ndim > 2}
        self.cast = _cast(self) & self.matrices

    def forward(self, x: Tensor, targets: Tensor | None = None) -> StageOutput:
        """Compute the stage: `x` are token ids (B, S) in the first one, else the residual stream
        (B, S, D); `targets` the next tokens (B, S), which the last one needs."""
        if self.embedding is not None:
            # Under autocast the residual stream is bf16 from here on, as are the tensors that
            # devices exchange.
            x = _as_autocast(self.embedding(x))
        auxiliary_losses = []
        for block in self.blocks.values():
            output = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
            if isinstance(output, tuple):
                output, of_block = output
                auxiliary_losses.append(of_block)
            # The stream keeps its dtype whatever a block computes in, so that no cut into stages
            # changes a number.
            x = output.to(x.dtype)
        loss = None
        if self.head is not None:
            assert targets is not None, "the last stage needs the targets"
            loss = loss_of(self.head, x, targets, self.vocabulary_size)
        auxiliary_loss = torch.stack(auxiliary_losses).sum() if auxiliary_losses else None
        return StageOutput(x, loss, auxiliary_loss)


def _as_autocast(x: Tensor) -> Tensor:
    device_type = x.device.type
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return x
    return x.to(torch.get_autocast_dtype(device_type))


def _stacks(stage: nn.Module) -> set[str]:
    """Parameters of experts, whose first dimension counts them."""
    stacks: set[str] = set()
    for path, module in stage.named_modules():
        if isinstance(module, Experts):
            stacks |= {f"{path}.{name}" for name, _ in module.named_parameters()}
    return stacks


def _cast(stage: nn.Module) -> set[str]:
    """Weights that are used by a linear map alone, which autocast computes in bf16."""
    linear = (nn.Linear.forward, Experts.forward)
    modules = stage.named_modules()
    return {f"{path}.weight" for path, module in modules if type(module).forward in linear}


def matrices_of(model: nn.Module) -> set[str]:
    """`matrix_names` of a whole model, by the names that the parameters have in a stage."""
    return {stage_name(name) for name in matrix_names(model)}


def make_stages(
    config: ModelSection,
    vocabulary_size: int,
    parts: Sequence[range],
    seed: int | None,
    *,
    recompute: bool = False,
) -> list[Stage]:
    """Stages with these runs of blocks and the initial weights of the seed; without a seed on the
    meta device."""
    model = make_model(config, vocabulary_size, seed, parts)
    # Once: it takes time for each block of the model, and there may be as many stages.
    matrices = matrices_of(model)
    return [
        Stage(model, config, vocabulary_size, own, matrices, recompute=recompute) for own in parts
    ]


def make_stage(
    config: ModelSection, vocabulary_size: int, blocks: range, seed: int | None
) -> Stage:
    (stage,) = make_stages(config, vocabulary_size, [blocks], seed)
    return stage


def whole_model(config: ModelSection, vocabulary_size: int, seed: int | None) -> Stage:
    return make_stage(config, vocabulary_size, range(config.blocks), seed)


def partition(num_items: int, num_parts: int) -> list[range]:
    """Split items into contiguous parts whose sizes differ by at most one, the same way every
    time."""
    bounds = [part * num_items // num_parts for part in range(num_parts + 1)]
    return [range(start, stop) for start, stop in pairwise(bounds)]
