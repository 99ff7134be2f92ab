"""A stage: a contiguous run of blocks, with the embedding if it is the first and the head if it is
the last.

Parameters have the names of the whole model (`blocks.5.attention.query.weight`), whatever the
partition is.
"""

from collections.abc import Sequence, Set
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from brx.config.schema import ModelSection, OwnModelConfig
from brx.model.head import loss_of
from brx.model.initial import stage_name
from brx.model.mixture import Experts
from brx.model.models import make_model, matrix_names
from brx.model.trace import not_always_cast


class StageOutput(NamedTuple):
    """The results of a stage's forward pass."""

    stream: Tensor  # (B, S, D), after the stage's last block
    loss: Tensor | None  # the mean cross-entropy in nats, from the last stage; else None
    auxiliary_loss: Tensor | None  # the sum over the stage's mixtures of experts; None without any


class Stage(nn.Module):
    """Some blocks of a model. Between stages goes the residual stream (B, S, D).

    Args:
        model: the whole model, from `brx.model.models.make_model`.
        config: the model's settings.
        vocabulary_size: V.
        blocks: the blocks of the stage.
        matrices: the names that `matrix_names_in_stages` returns for the whole model.
        uncast: the names that `uncast_weights` returns for the whole model.
        recompute: keep only the input of each block for the backward pass, and run it again there.

    Attributes:
        matrices: names of the parameters that basis rotation, SOAP, Muon and Scion treat as
            matrices: weight matrices in blocks, or stacks of them.
        stacks: names of parameters whose first dimension counts members, such as experts. Some
            methods treat each member separately.
        cast: names of the matrices that autocast casts wherever they are used, which are those of
            linear maps; older versions of them may be kept in bf16.
        has_auxiliary_loss: whether the model has auxiliary losses, which are not means over
            examples.
    """

    def __init__(
        self,
        model: nn.Module,
        config: ModelSection,
        vocabulary_size: int,
        blocks: range,
        matrices: Set[str],
        uncast: Set[str] = frozenset(),
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
        self._is_own_model = isinstance(config, OwnModelConfig)
        self.has_auxiliary_loss = bool(getattr(model, "has_auxiliary_loss", False))
        own = dict(self.named_parameters())
        self.matrices = frozenset(name for name in own if name in matrices)
        self.stacks = _stacks(self) | {name for name in self.matrices if own[name].ndim > 2}
        self.cast = (_cast(self) & self.matrices) - uncast

    def forward(
        self,
        x: Tensor,  # first stage: token ids (B, S); others: the residual stream (B, S, D)
        targets: Tensor | None = None,  # last stage: the next tokens (B, S)
    ) -> StageOutput:
        """Run the stage's blocks, after the embedding and before the head if it has them."""
        if self.embedding is not None:
            # Under autocast the residual stream is bf16 from here on, as are the tensors that
            # devices exchange.
            x = _as_autocast(self.embedding(x))
            if self._is_own_model:
                # Without autocast it is what the weights are, whatever a user's embedding makes.
                x = _as_weights(x, self)
        auxiliary_losses = []
        for block in self.blocks.values():
            output = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
            if isinstance(output, tuple):
                output, auxiliary = output
                auxiliary_losses.append(auxiliary)
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
    """x in the dtype of autocast, if that is on."""
    return x.to(torch.get_autocast_dtype(x.device.type)) if _is_autocast(x) else x


def _as_weights(x: Tensor, stage: nn.Module) -> Tensor:
    """x in the dtype of the stage's weights, unless autocast is on."""
    return x if _is_autocast(x) else x.to(next(stage.parameters()).dtype)


def _is_autocast(x: Tensor) -> bool:
    device_type = x.device.type
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


@lru_cache(maxsize=64)
def uncast_weights(config: ModelSection) -> frozenset[str]:
    """The names of the weights in blocks of a user's own model that autocast does not cast wherever
    they are used (`not_always_cast`). It casts the matrices of brx's models everywhere."""
    if not isinstance(config, OwnModelConfig):
        return frozenset()
    model: Any = make_model(config, 256, None, []).to("meta")  # the vocabulary is not blocks'
    names: set[str] = set()
    shape = (1, config.sequence_length, config.width)
    for index, block in enumerate(model.blocks):
        try:
            found = not_always_cast(block, [torch.empty(shape, device="meta")])
        except Exception:  # of the user's code; `check_model` tells it
            found = {name for name, _ in block.named_parameters()}
        names |= {f"blocks.{index}.{name}" for name in found}
    return frozenset(names)


def _stacks(stage: nn.Module) -> set[str]:
    """Names of the parameters of experts; their first dimension counts the experts."""
    stacks: set[str] = set()
    for path, module in stage.named_modules():
        if isinstance(module, Experts):
            stacks |= {f"{path}.{name}" for name, _ in module.named_parameters()}
    return stacks


def _cast(stage: nn.Module) -> set[str]:
    """Names of the weights of linear maps, which autocast casts to bf16 wherever they are used."""
    linear = (nn.Linear.forward, Experts.forward)
    cast = set()
    for path, module in stage.named_modules():
        # The class of a scripted module (torch.jit.script) has no `forward`.
        if getattr(type(module), "forward", None) in linear:
            cast.add(f"{path}.weight")
    return cast


def matrix_names_in_stages(model: nn.Module) -> set[str]:
    """`matrix_names` of a whole model, as the names that the parameters have in a stage."""
    return {stage_name(name) for name in matrix_names(model)}


def make_stages(
    config: ModelSection,
    vocabulary_size: int,
    parts: Sequence[range],
    seed: int | None,
    *,
    recompute: bool = False,
) -> list[Stage]:
    """Make some stages of a model.

    Args:
        config: the section `model` of the settings.
        vocabulary_size: V.
        parts: the blocks of each stage.
        seed: the seed of the initial weights. None: the stages are on the meta device, without
            weights.
        recompute: see `Stage`.
    """
    model = make_model(config, vocabulary_size, seed, parts)
    # Once for all stages: it looks at every block of the model, and a stage may be a single block.
    matrices = matrix_names_in_stages(model)
    uncast = uncast_weights(config)
    return [
        Stage(model, config, vocabulary_size, own, matrices, uncast, recompute=recompute)
        for own in parts
    ]


def make_stage(
    config: ModelSection, vocabulary_size: int, blocks: range, seed: int | None
) -> Stage:
    """Make one stage, as `make_stages` does."""
    (stage,) = make_stages(config, vocabulary_size, [blocks], seed)
    return stage


def whole_model(config: ModelSection, vocabulary_size: int, seed: int | None) -> Stage:
    """Make the whole model as one stage, as `make_stages` does."""
    return make_stage(config, vocabulary_size, range(config.blocks), seed)


def partition(num_items: int, num_parts: int) -> list[range]:
    """Split items into contiguous parts whose sizes differ by one at most.

    Part k begins at item floor(k num_items / num_parts).
    """
    bounds = [part * num_items // num_parts for part in range(num_parts + 1)]
    return [range(start, stop) for start, stop in pairwise(bounds)]
