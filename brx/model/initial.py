"""Initial weights that depend on the seed and the parameter's name alone, so that every partition
of a model starts equal."""

import hashlib

import torch
from torch import Tensor, nn

DEVIATION = 0.02  # standard deviation of GPT-2's initial weights
# Endings of the names of weights whose output is added to the residual stream.
WRITES_RESIDUAL = ("projection.weight", "down.weight")


def stage_name(name: str) -> str:
    """The name that a model's parameter has in its stage, in checkpoints and in the draw of its
    initial weights. A model's `embed` is called `embedding` there, as it was before models were
    classes of their own."""
    return f"embedding.{name.removeprefix('embed.')}" if name.startswith("embed.") else name


@torch.no_grad()
def initialize_as_gpt2(model: nn.Module, num_blocks: int, seed: int) -> None:
    """GPT-2's scheme: normal with deviation 0.02, zero biases, unit norms.

    It decides by names. A parameter belongs to a norm if its name has "norm" in it: a norm called
    `ln_1` would get random weights. The output of a weight whose name ends in `projection.weight`
    or `down.weight` is added to the stream, so it gets a deviation of 0.02 / sqrt(2 `num_blocks`).

    Parameters on the meta device, which belong to other devices' stages, are left out."""
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            continue
        if "norm" in name:
            parameter.fill_(1.0 if name.endswith("weight") else 0.0)
        elif name.endswith("bias"):
            parameter.zero_()
        else:
            # Each block adds to the stream twice.
            scale = (2 * num_blocks) ** 0.5 if name.endswith(WRITES_RESIDUAL) else 1.0
            parameter.copy_(normal(parameter.shape, DEVIATION / scale, seed, stage_name(name)))


def normal(shape: torch.Size, deviation: float, seed: int, name: str) -> Tensor:
    """Normal numbers in fp32 that depend on the seed and the name alone."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.empty(shape).normal_(0.0, deviation, generator=generator)
