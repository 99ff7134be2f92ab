"""What a model takes, without giving it memory: shapes of parameters, activations, multiplications.

Shape legend: N tokens in a micro-batch (B S), D width, S positions, H heads, V vocabulary, X
experts, K of them for a token."""

import math
from functools import lru_cache
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from brx.config.schema import ModelConfig
from brx.model.stage import Stage
from brx.model.transformer import CHUNK_LOGITS, MLP_RATIO

Shapes = dict[str, tuple[int, ...]]  # of parameters, by name
FP32 = 4  # bytes


class _WithoutInitialValues(TorchFunctionMode):
    """Leaves out `torch.nn.init`, which on the meta device draws nothing, and for that imports half
    of torch (2 s)."""

    def __torch_function__(
        self, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if getattr(function, "__module__", None) == "torch.nn.init":
            return None
        return function(*args, **(kwargs or {}))


@lru_cache(maxsize=1024)
def stage_shapes(model: ModelConfig, vocabulary_size: int, blocks: range) -> Shapes:
    """The parameters of a stage with these blocks, from the stage itself on the meta device, where
    it holds no data."""
    with _WithoutInitialValues(), torch.device("meta"):
        stage = Stage(model, vocabulary_size, blocks)
    return {name: tuple(parameter.shape) for name, parameter in stage.named_parameters()}


def num_elements(shapes: Shapes) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


def block_activation_bytes(
    model: ModelConfig, block: int, batch_size: int, *, bf16: bool, device_type: str
) -> int:
    """Bytes that a block's forward pass keeps for its backward pass, if it is not compiled."""
    tokens, width = batch_size * model.sequence_length, model.width
    element = 2 if bf16 else FP32
    # In units of N D: the inputs of the two norms, of query, key and value (one tensor), of
    # attention (three), of the projection, of the MLP, of its GELU (4) and of its second matrix
    # (4).
    per_token = 16 * width * element
    if (
        bf16 and device_type == "cuda"
    ):  # norms run in fp32, and keep such inputs; query, key and value a bf16 copy each
        per_token += 2 * width * (FP32 - element) + 2 * width * element
    per_token += (
        4 * FP32 + model.heads * FP32
    )  # mean and deviation of two norms; attention's log-sum-exp
    if model.moe is not None and model.moe.is_in_block(block):
        # For each of a token's K experts: the inputs of both matrices and of GELU, and the output
        # to be mixed.
        routed = model.moe.top_k * (2 + 2 * MLP_RATIO) * width * element
        per_token += routed - 2 * MLP_RATIO * width * element
        per_token += (FP32 if bf16 else 0) * width  # the router's input in fp32
    return tokens * per_token


def head_bytes(model: ModelConfig, vocabulary_size: int, batch_size: int, *, bf16: bool) -> int:
    """Bytes that the head and the loss need at their worst beside weights and gradients."""
    tokens, width = batch_size * model.sequence_length, model.width
    element = 2 if bf16 else FP32
    weight = vocabulary_size * width
    always = 2 * tokens * width * element + (
        2 * weight if bf16 else 0
    )  # with autocast, the weight in bf16, too
    if (
        tokens * vocabulary_size <= CHUNK_LOGITS
    ):  # log-softmax, its gradient and the logits' gradient in fp32
        return 3 * tokens * vocabulary_size * FP32 + always
    # One chunk in fp32 (and in bf16 if autocast runs), and a partial product of the weight's
    # gradient.
    return CHUNK_LOGITS * (FP32 + (element if bf16 else 0)) + weight * element + always


def stage_forward_flops(
    model: ModelConfig, vocabulary_size: int, blocks: range, batch_size: int
) -> int:
    """Floating-point operations of a stage's forward pass over a micro-batch (PaLM,
    arXiv:2204.02311, appendix B)."""
    tokens, width = batch_size * model.sequence_length, model.width
    per_token = 0
    for block in blocks:
        mlp = 2 * MLP_RATIO * width**2
        if model.moe is not None and model.moe.is_in_block(
            block
        ):  # the K experts that a token is sent to, and router
            mlp = model.moe.top_k * mlp + model.moe.experts * width
        # Two per weight, and 4 S D for attention, without a discount for causality.
        per_token += 2 * (4 * width**2 + mlp) + 4 * model.sequence_length * width
    if blocks.stop == model.blocks:
        per_token += 2 * vocabulary_size * width
    return tokens * per_token


def training_flops(model: ModelConfig, vocabulary_size: int, batch_size: int) -> int:
    """The whole model's in an iteration: a forward pass, and twice as much for the backward
    pass."""
    return 3 * stage_forward_flops(model, vocabulary_size, range(model.blocks), batch_size)
