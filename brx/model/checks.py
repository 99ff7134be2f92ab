"""Checks that a user's own model can be trained in a pipeline, before data are prepared for it."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from brx.config.schema import ModelSection, OwnModelConfig, RunConfig
from brx.errors import UserError, some
from brx.model.models import make_model
from brx.model.sizes import distinct_blocks, meta_stream, traced
from brx.model.stage import partition

BATCH = 2  # examples of the trial, which has no numbers


def check_model_of(config: RunConfig) -> None:
    """`check_model` for the model and the stages of a run."""
    blocks = partition(config.model.blocks, config.pipeline.stages)
    check_model(config.model, config.data.vocabulary_size, blocks)


def check_model(config: ModelSection, vocabulary_size: int, parts: Sequence[range]) -> None:
    """Run each part of a user's own model once, forward and backward, on the meta device.

    Models of brx are not checked.

    Args:
        config: the section `model` of the settings.
        vocabulary_size: V.
        parts: the blocks of each stage.

    Raises:
        UserError: the model cannot be made; a part is missing, fails, draws random numbers, changes
            a buffer, or returns a stream or logits of another shape; a weight is in two stages, or
            has no effect on the loss.
    """
    if not isinstance(config, OwnModelConfig):
        return
    model: Any = make_model(config, vocabulary_size, None, []).to("meta")
    where = f"model.class {config.name}"
    _check_shared(model, parts, where)
    tokens = torch.zeros((BATCH, config.sequence_length), dtype=torch.int64, device="meta")
    stream = meta_stream(config, BATCH, bf16=False)
    shape = tuple(stream.shape)
    _check_part(config, model.embed, "embed", tokens, shape)
    for block in sorted(set(distinct_blocks(config).values())):
        _check_part(config, model.blocks[block], f"blocks.{block}", stream, shape)
    _check_part(config, model.head, "head", stream, (*shape[:2], vocabulary_size))


def _check_part(
    config: ModelSection,
    part: nn.Module,
    name: str,
    given: Tensor,
    expected_shape: tuple[int, ...],
) -> None:
    """Run one part, forward and backward; UserError if anything is wrong with it."""
    where = f"model.class {config.name}: {name}"
    buffers = [(buffer, buffer._version) for buffer in part.buffers()]
    output, _ = traced(config, part, name, given, bf16=False, device_type="cpu")
    losses = []
    if isinstance(output, tuple) and name.startswith("blocks."):
        output, auxiliary_loss = _pair(config, output, where)
        losses.append(auxiliary_loss)
    actual = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
    if actual != expected_shape:
        what = "logits" if name == "head" else "a stream"
        meaning = "vocabulary" if name == "head" else "model.width"
        raise UserError(
            f"{where} returns {what} of shape {actual}, must be {expected_shape}: examples, "
            f"tokens, {meaning}"
        )
    _check_gradients(part, [output.sum(), *losses], where)
    _check_buffers(part, buffers, where)


def _pair(config: ModelSection, output: tuple[Any, ...], where: str) -> tuple[Tensor, Tensor]:
    """The stream and the auxiliary loss that a block returned; UserError if it returned something
    else."""
    if len(output) != 2 or not all(isinstance(one, Tensor) for one in output):
        raise UserError(f"{where} returns a tuple, must be a pair of stream and auxiliary loss")
    stream, auxiliary_loss = output
    if auxiliary_loss.shape != ():
        raise UserError(
            f"{where} returns an auxiliary loss of shape {tuple(auxiliary_loss.shape)}, must be"
            " a number"
        )
    if not _has_auxiliary_loss(config):
        raise UserError(
            f"{where} returns an auxiliary loss; set has_auxiliary_loss = True in the model's class"
        )
    return stream, auxiliary_loss


def _check_buffers(part: nn.Module, before: Sequence[tuple[Tensor, int]], where: str) -> None:
    """UserError if a buffer was replaced or written since `before`, a list of each buffer with its
    version counter."""
    now = part.named_buffers()
    for (key, buffer), (buffer_before, version) in zip(now, before, strict=True):
        if buffer is not buffer_before or buffer._version != version:
            raise UserError(
                f"{where}.{key} is changed by the forward pass; checkpoints and other devices would"
                " not see that"
            )


def _has_auxiliary_loss(config: ModelSection) -> bool:
    model = make_model(config, 256, None, [])
    return bool(getattr(model, "has_auxiliary_loss", False))


def _check_gradients(part: nn.Module, losses: Sequence[Tensor], where: str) -> None:
    """UserError if a weight of a part has no effect on the losses, which depend on its output."""
    named = dict(part.named_parameters())
    if not named:
        return
    total = torch.stack([loss.float() for loss in losses]).sum()
    if not total.requires_grad:
        raise UserError(f"{where}: its output depends on none of its weights")
    gradients = torch.autograd.grad(total, list(named.values()), allow_unused=True)
    unused = [name for name, found in zip(named, gradients, strict=True) if found is None]
    if unused:
        raise UserError(f"{where}: {some(unused)} without effect on its output")


def _check_shared(model: nn.Module, parts: Sequence[range], where: str) -> None:
    """UserError if a weight belongs to two stages."""
    stage_of: dict[int, tuple[int, str]] = {}
    for stage, blocks in enumerate(parts):
        for name, parameter in _weights_of(model, blocks):
            other, other_name = stage_of.setdefault(id(parameter), (stage, name))
            if other != stage:
                raise UserError(
                    f"{where}: {other_name} and {name} are one weight, used in stages {other} and"
                    f" {stage}: a weight belongs to one stage (with pipeline.stages=1 to the only"
                    " one)"
                )


def _weights_of(model: Any, blocks: range) -> Iterator[tuple[str, nn.Parameter]]:
    """The names and weights of a stage with these blocks."""
    if blocks.start == 0:
        yield from model.embed.named_parameters("embed")
    for index in blocks:
        yield from model.blocks[index].named_parameters(f"blocks.{index}")
    if blocks.stop == len(model.blocks):
        yield from model.head.named_parameters("head")
