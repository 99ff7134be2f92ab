"""What a model takes, without giving it memory: its parameters, what its blocks keep for the
backward pass, multiplications. All of it is read off the model itself, on the meta device.

Shape legend: B examples, S positions, N = B S tokens, D width, V vocabulary."""

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import nn

from brx.config.schema import ModelSection, OwnModelConfig
from brx.config.user_code import fault, is_allowed
from brx.errors import UserError
from brx.model.head import CHUNK_LOGITS, Head
from brx.model.models import make_model
from brx.model.stage import Stage
from brx.model.trace import RandomNumbersError, Trace, trace

FP32 = 4  # bytes


class Size(NamedTuple):
    """Of a parameter."""

    shape: tuple[int, ...]
    is_matrix: bool = False  # see `Stage.matrices`
    is_cast: bool = False  # see `Stage.cast`

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


Sizes = dict[str, Size]  # of parameters, by name


@lru_cache(maxsize=64)
def _model(model: ModelSection, vocabulary_size: int) -> nn.Module:
    return make_model(model, vocabulary_size, None, []).to("meta")  # buffers as well


def meta_stage(model: ModelSection, vocabulary_size: int, blocks: range) -> Stage:
    """A stage with these blocks, on the meta device."""
    return Stage(_model(model, vocabulary_size), model, vocabulary_size, blocks)


@lru_cache(maxsize=1024)
def stage_sizes(model: ModelSection, vocabulary_size: int, blocks: range) -> Sizes:
    """The parameters of a stage with these blocks, from the stage itself."""
    stage = meta_stage(model, vocabulary_size, blocks)
    return {
        name: Size(tuple(parameter.shape), name in stage.matrices, name in stage.cast)
        for name, parameter in stage.named_parameters()
    }


def num_elements(sizes: Sizes) -> int:
    return sum(size.numel for size in sizes.values())


def count_parameters(model: ModelSection, vocabulary_size: int) -> tuple[int, int]:
    """Of the whole model, and of its blocks alone; of a run's model of the user's own as noted when
    it trained."""
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
    """Bytes that the head and the loss need at their worst beside weights and gradients."""
    tokens, width = batch_size * model.sequence_length, model.width
    element = 2 if bf16 else FP32
    weight = vocabulary_size * width
    always = 2 * tokens * width * element
    if bf16:
        always += 2 * weight  # autocast's copy of the weight
    if tokens * vocabulary_size <= CHUNK_LOGITS:
        # Log-softmax, its gradient and the logits' gradient in fp32.
        return 3 * tokens * vocabulary_size * FP32 + always
    # One chunk in fp32 (and in bf16 if autocast runs), and a partial product of the weight's
    # gradient.
    return CHUNK_LOGITS * (FP32 + (element if bf16 else 0)) + weight * element + always


def early_gradient_bytes(model: ModelSection, vocabulary_size: int, batch_size: int) -> int:
    """Bytes of the gradients that a loss in chunks makes before all others."""
    parts: Any = _model(model, vocabulary_size)
    is_chunked = batch_size * model.sequence_length * vocabulary_size > CHUNK_LOGITS
    if not is_chunked or not isinstance(parts.head, Head):
        return 0
    return FP32 * sum(weight.numel() for weight in parts.head.linear.parameters())


def stage_forward_flops(
    model: ModelSection, vocabulary_size: int, blocks: range, batch_size: int
) -> int:
    """Floating-point operations of a stage's forward pass over a micro-batch, without a discount
    for causality."""
    flops = sum(_block_trace(model, block, batch_size, False, "cpu").flops for block in blocks)
    if blocks.stop == model.blocks:
        flops += _head_flops(model, vocabulary_size, batch_size)
    return flops


def training_flops(model: ModelSection, vocabulary_size: int, batch_size: int) -> int:
    """The whole model's in an iteration: a forward pass, and twice as much for the backward
    pass."""
    return 3 * stage_forward_flops(model, vocabulary_size, range(model.blocks), batch_size)


def distinct_blocks(model: ModelSection) -> dict[int, int]:
    """By block, the first one that is like it."""
    return {index: _kinds(model)[index] for index in range(model.blocks)}


@lru_cache(maxsize=64)
def _kinds(model: ModelSection) -> list[int]:
    blocks: Any = _model(model, 256).blocks
    first: dict[str, int] = {}
    return [first.setdefault(_likeness(block), index) for index, block in enumerate(blocks)]


def _likeness(block: nn.Module) -> str:
    """A text that is equal for blocks that compute alike: their modules, the shapes of their
    weights, and their plain attributes."""
    shapes = [(name, tuple(weight.shape)) for name, weight in block.named_parameters()]
    plain = [
        (name, key, value)
        for name, module in block.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, int | float | str | tuple | None)
    ]
    return repr((str(block), shapes, plain))


def _block_trace(
    model: ModelSection, block: int, batch_size: int, bf16: bool, device_type: str
) -> Trace:
    return _trace_of_kind(model, _kinds(model)[block], batch_size, bf16, device_type)


@lru_cache(maxsize=4096)
def _trace_of_kind(
    model: ModelSection, block: int, batch_size: int, bf16: bool, device_type: str
) -> Trace:
    blocks: Any = _model(model, 256).blocks
    stream, name = meta_stream(model, batch_size, bf16=bf16), f"blocks.{block}"
    return traced(model, blocks[block], name, stream, bf16=bf16, device_type=device_type)[1]


@lru_cache(maxsize=4096)
def _head_flops(model: ModelSection, vocabulary_size: int, batch_size: int) -> int:
    head: Any = _model(model, vocabulary_size).head
    stream = meta_stream(model, batch_size, bf16=False)
    return traced(model, head, "head", stream, bf16=False, device_type="cpu")[1].flops


def traced(
    model: ModelSection,
    part: nn.Module,
    name: str,
    given: torch.Tensor,
    *,
    bf16: bool,
    device_type: str,
) -> tuple[Any, Trace]:
    """`brx.model.trace.trace` of a part; UserError for what goes wrong in one of the user's own."""
    try:
        return trace(part, [given], bf16=bf16, device_type=device_type)
    except Exception as error:
        if not isinstance(model, OwnModelConfig):
            raise
        where = f"model.class {model.name}: {name}"
        if isinstance(error, RandomNumbersError):
            raise UserError(
                f"{where} draws random numbers ({error}), which would depend on the number of"
                " devices; leave dropout out"
            ) from None
        raise UserError(
            f"{where}: {fault(error, model.name)} (run on the meta device, without numbers)"
        ) from None


def meta_stream(model: ModelSection, batch_size: int, *, bf16: bool) -> torch.Tensor:
    """A residual stream (B, S, D) without numbers."""
    return torch.empty(
        (batch_size, model.sequence_length, model.width),
        dtype=torch.bfloat16 if bf16 else torch.float32,
        device="meta",
        requires_grad=True,
    )
