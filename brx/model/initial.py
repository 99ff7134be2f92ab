"""Initial weights that depend on the seed and the parameter's name alone, so that every partition
of a model starts equal."""

import hashlib

import torch
from torch import Tensor, nn

DEVIATION = 0.02  # standard deviation of GPT-2's initial weights
WRITES_RESIDUAL = ("projection.weight", "down.weight")  # names of what is added to the stream


def stage_name(name: str) -> str:
    """The name of a model's parameter in its stage, in checkpoints and in the draw of its initial
    weights: a model's `embed` has been `embedding` there since before a model was a class."""
    return f"embedding.{name.removeprefix('embed.')}" if name.startswith("embed.") else name


@torch.no_grad()
def initialize_as_gpt2(model: nn.Module, num_blocks: int, seed: int) -> None:
    """GPT-2's scheme: normal with deviation 0.02, zero biases, unit norms.

    It goes by names. A norm is what has "norm" anywhere in its name: a norm called `ln_1` would get
    random weights. A weight whose name ends in `projection.weight` or `down.weight` is added to the
    stream, and gets a deviation of 0.02 / sqrt(2 `num_blocks`).

    What lies on the meta device is left out: of a stage's model, the parts of other stages."""
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            continue
        if "norm" in name:
            parameter.fill_(1.0 if name.endswith("weight") else 0.0)
        elif name.endswith("bias"):
            parameter.zero_()
        else:
            # Two sums into the stream per block.
            scale = (2 * num_blocks) ** 0.5 if name.endswith(WRITES_RESIDUAL) else 1.0
            parameter.copy_(normal(parameter.shape, DEVIATION / scale, seed, stage_name(name)))


def normal(shape: torch.Size, deviation: float, seed: int, name: str) -> Tensor:
    """Normal numbers in fp32 that depend on the seed and the name alone."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.empty(shape).normal_(0.0, deviation, generator=generator)
