"""Counts the parameters, activations and operations of a model. All are read off the model itself,
on the meta device, where it takes no memory.

Shape legend: B examples, S positions, N = B S tokens, D width, V vocabulary."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass
from enum import Enum
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import nn

from brx.config.schema import ModelSection, OwnModelConfig
from brx.config.user_code import fault, is_allowed
from brx.errors import UserError
from brx.model.attributes import plain_attributes
from brx.model.head import CHUNK_LOGITS, has_own_loss
from brx.model.models import make_model
from brx.model.stage import Stage, matrix_names_in_stages, uncast_weights
from brx.model.trace import RandomNumbersError, Trace, WrittenWeightError, trace

FP32 = 4  # bytes


class Size(NamedTuple):
    """The size of a parameter, and its roles."""

    shape: tuple[int, ...]
    is_matrix: bool = False
    """See `Stage.matrices`."""
    is_cast: bool = False
    """See `Stage.cast`."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


Sizes = dict[str, Size]
"""The sizes of parameters, by name."""


TOO_LARGE = ("overflow", "allocate memory", "failed to unpack")
"""In the messages of torch about a tensor with more elements, or more bytes, than it can have."""


@contextmanager
def _refusing_size(model: ModelSection) -> Iterator[None]:
    """Turn torch's errors about tensors that are too large into a UserError."""
    try:
        yield
    except (RuntimeError, TypeError, OverflowError) as error:
        message = str(error).partition("\n")[0]
        if not any(words in str(error).lower() for words in TOO_LARGE):
            raise
        # Each parameter takes memory for a moment. If little is free, even a small one gets none.
        where = " in the memory that is free" if "allocate memory" in message.lower() else ""
        raise UserError(
            f"model {model.in_words}: too large to plan{where}, with {model.sequence_length} tokens"
            f" per example (model.sequence_length) and this training.batch_size: {message[:200]}"
        ) from None


@lru_cache(maxsize=64)
def _model(model: ModelSection, vocabulary_size: int) -> nn.Module:
    # Its parameters are on the meta device from the beginning; `to` moves its buffers there.
    with _refusing_size(model):
        return make_model(model, vocabulary_size, None, []).to("meta")


def meta_stage(model: ModelSection, vocabulary_size: int, blocks: range) -> Stage:
    """A stage with these blocks, on the meta device."""
    whole = _model(model, vocabulary_size)
    matrices = _matrices(model, vocabulary_size)
    return Stage(whole, model, vocabulary_size, blocks, matrices, uncast_weights(model))


@lru_cache(maxsize=64)
def _matrices(model: ModelSection, vocabulary_size: int) -> frozenset[str]:
    return frozenset(matrix_names_in_stages(_model(model, vocabulary_size)))


@lru_cache(maxsize=1024)
def stage_sizes(model: ModelSection, vocabulary_size: int, blocks: range) -> Sizes:
    """The parameters of a stage with these blocks, from the stage itself."""
    stage = meta_stage(model, vocabulary_size, blocks)
    return {
        name: Size(tuple(parameter.shape), name in stage.matrices, name in stage.cast)
        for name, parameter in stage.named_parameters()
    }


def num_elements(sizes: Sizes) -> int:
    """The number of elements of all parameters together."""
    return sum(size.numel for size in sizes.values())


def count_parameters(model: ModelSection, vocabulary_size: int) -> tuple[int, int]:
    """The numbers of parameters of the whole model, and of its blocks alone.

    For a user's own model whose code must not be imported, they come from the notes of its run."""
    facts = model.facts if isinstance(model, OwnModelConfig) else None
    if facts is not None and not is_allowed():
        return facts.num_parameters, facts.num_in_blocks
    sizes = stage_sizes(model, vocabulary_size, range(model.blocks))
    in_blocks = {name: size for name, size in sizes.items() if name.startswith("blocks.")}
    return num_elements(sizes), num_elements(in_blocks)


def block_activation_bytes(
    model: ModelSection, block: int, batch_size: int, *, bf16: bool, device_type: str
) -> int:
    """Bytes that a block's forward pass keeps for its backward pass, if it is not compiled."""
    return _block_trace(model, block, batch_size, bf16, device_type).kept_bytes


def head_bytes(model: ModelSection, vocabulary_size: int, batch_size: int, *, bf16: bool) -> int:
    """The most bytes that the head and the loss need at one time, besides weights and gradients."""
    num_tokens = batch_size * model.sequence_length
    num_logits = num_tokens * vocabulary_size
    num_weights = vocabulary_size * model.width
    element = 2 if bf16 else FP32
    always = 2 * num_tokens * model.width * element
    if bf16:
        always += 2 * num_weights  # autocast's copy of the weight
    if num_logits <= CHUNK_LOGITS:
        # Log-softmax, its gradient and the logits' gradient in fp32.
        return 3 * num_logits * FP32 + always
    # One chunk of logits in fp32, and in bf16 if autocast runs.
    per_logit = FP32 + 2 if bf16 else FP32
    chunk = CHUNK_LOGITS * per_logit
    # A partial product of the weight's gradient.
    partial = num_weights * element
    return chunk + partial + always


def early_gradient_bytes(model: ModelSection, vocabulary_size: int, batch_size: int) -> int:
    """Bytes of the head's gradients, if the loss is computed in chunks: it makes them in the
    forward pass."""
    parts: Any = _model(model, vocabulary_size)
    is_chunked = batch_size * model.sequence_length * vocabulary_size > CHUNK_LOGITS
    if not is_chunked or not has_own_loss(parts.head):
        return 0
    num_weights = sum(weight.numel() for weight in parts.head.linear.parameters())
    return int(FP32 * num_weights)


def blocks_forward_flops(model: ModelSection, blocks: range, batch_size: int) -> int:
    """Floating-point operations of some blocks' forward pass over a micro-batch, without a discount
    for causality."""
    return sum(_block_trace(model, block, batch_size, False, "cpu").flops for block in blocks)


def stage_forward_flops(
    model: ModelSection, vocabulary_size: int, blocks: range, batch_size: int
) -> int:
    """The operations of a stage's forward pass over a micro-batch: of its blocks, and of the head
    if it has it."""
    flops = blocks_forward_flops(model, blocks, batch_size)
    if blocks.stop == model.blocks:
        flops += _head_flops(model, vocabulary_size, batch_size)
    return flops


def training_flops(model: ModelSection, vocabulary_size: int, batch_size: int) -> int:
    """The operations of the whole model for a batch: a forward pass, and twice as much for the
    backward pass."""
    return 3 * stage_forward_flops(model, vocabulary_size, range(model.blocks), batch_size)


def distinct_blocks(model: ModelSection) -> dict[int, int]:
    """For each block, the first block that is like it (perhaps itself); all by index."""
    return dict(enumerate(_kinds(model)))


@lru_cache(maxsize=64)
def _kinds(model: ModelSection) -> list[int]:
    """As `distinct_blocks`, in order."""
    # Blocks do not depend on the size of the vocabulary: any will do.
    blocks: Any = _model(model, 256).blocks
    first: dict[str, int] = {}
    return [first.setdefault(_likeness(block), index) for index, block in enumerate(blocks)]


def _likeness(block: nn.Module) -> str:
    """A text that is equal for blocks that compute alike. It consists of their modules, the shapes
    of their weights, and their plain attributes."""
    shapes = [(name, tuple(weight.shape)) for name, weight in block.named_parameters()]
    plain = []
    for name, module in block.named_modules():
        for key, value in vars(module).items():
            if key not in _OF_ALL_MODULES and _is_plain(value):
                plain.append((name, key, value))
    return repr((str(block), shapes, plain))


_OF_ALL_MODULES = vars(nn.Module()).keys() - {"training"}


def _is_plain(value: Any) -> bool:
    """Whether a value's text tells all of it."""
    if isinstance(value, Mapping):
        return all(map(_is_plain, (*value, *value.values())))
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_plain, value))
    return isinstance(value, int | float | str | Enum | None) or is_dataclass(value)


def _block_trace(
    model: ModelSection, block: int, batch_size: int, bf16: bool, device_type: str
) -> Trace:
    return _trace_of_kind(model, _kinds(model)[block], batch_size, bf16, device_type)


@lru_cache(maxsize=4096)
def _trace_of_kind(
    model: ModelSection, block: int, batch_size: int, bf16: bool, device_type: str
) -> Trace:
    blocks: Any = _model(model, 256).blocks
    stream = meta_stream(model, batch_size, bf16=bf16)
    name = f"blocks.{block}"
    try:
        _, costs = traced(model, blocks[block], name, stream, bf16=bf16, device_type=device_type)
    except UserError:
        if not bf16:
            raise
        # A trace knows most functions that autocast casts for, but not all (an RNN's, for example).
        # fp32 takes more memory, never less.
        return _trace_of_kind(model, block, batch_size, False, device_type)
    return costs


@lru_cache(maxsize=4096)
def _head_flops(model: ModelSection, vocabulary_size: int, batch_size: int) -> int:
    head: Any = _model(model, vocabulary_size).head
    stream = meta_stream(model, batch_size, bf16=False)
    _, costs = traced(model, head, "head", stream, bf16=False, device_type="cpu")
    return costs.flops


def traced(
    model: ModelSection,
    part: nn.Module,
    name: str,
    given: torch.Tensor,
    *,
    bf16: bool,
    device_type: str,
) -> tuple[Any, Trace]:
    """The output of a part of a model, and its trace (`brx.model.trace.trace`).

    Args:
        model: the settings of the model.
        part: the part, on the meta device.
        name: the part's name, for messages.
        given: the input of the part.
        bf16: whether autocast to bf16 is on.
        device_type: the type of the device that is planned for.

    Raises:
        UserError: the part belongs to a user's own model, and fails.
    """
    with failing_in_one_line(model, part, name):
        return trace(part, [given], bf16=bf16, device_type=device_type)


@contextmanager
def failing_in_one_line(model: ModelSection, part: nn.Module, name: str) -> Iterator[None]:
    """Turn what a part of a user's own model raises on the meta device into a UserError.

    Args:
        name: the part's name.
    """
    try:
        with _refusing_size(model):
            yield
    except UserError:
        raise
    except Exception as error:
        if not isinstance(model, OwnModelConfig):
            raise
        where = f"model.class {model.name}: {name}"
        if isinstance(error, RandomNumbersError):
            raise UserError(
                f"{where} draws random numbers ({error}), which would depend on the number of"
                " devices; leave dropout out"
            ) from None
        if isinstance(error, WrittenWeightError):
            raise UserError(
                f"{where}.{error} is changed by the forward pass; only the optimizer may change a"
                " weight"
            ) from None
        raise UserError(
            f"{where}: {fault(error, model.name)} (run on the meta device, without numbers"
            f"{_advice(part, error)})"
        ) from None


def _advice(part: nn.Module, error: Exception) -> str:
    """What would help where a part fails on the meta device; empty if nobody knows."""
    said = str(error)
    if "same device" in said or "expected device meta" in said:
        own = _tensors_elsewhere(part)
        which = f"the tensor {own[0]}" if own else "a tensor that it uses"
        return f", where {which} is not: register it as a buffer, or make it on x.device"
    if isinstance(error, NotImplementedError) or "meta " in said.lower():
        return "; docs/models.md says what to do if it needs them"
    return ""


def _tensors_elsewhere(part: nn.Module) -> list[str]:
    """The names of a part's tensors that are plain attributes, and not on the meta device."""
    return [
        name
        for name, value in plain_attributes(part)
        if isinstance(value, torch.Tensor) and not value.is_meta
    ]


def meta_stream(model: ModelSection, batch_size: int, *, bf16: bool) -> torch.Tensor:
    """A residual stream (B, S, D) on the meta device, in bf16 or fp32."""
    with _refusing_size(model):
        return torch.empty(
            (batch_size, model.sequence_length, model.width),
            dtype=torch.bfloat16 if bf16 else torch.float32,
            device="meta",
            requires_grad=True,
        )
