"""Parameter groups of a whole model for one `BasisRotation`: which parameters are rotated, and which get AdamW."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

HEAD_NAMES = {"lm_head", "head", "heads", "output", "unembed", "embed_out", "classifier", "score", "fc_out", "logits"}
"""What the last layer is usually called: its rows are classes or words, as an embedding's are."""

OPTIONS: dict[str, dict[str, Any]] = {
    "matrices": {"rotate": True},
    "kernels": {"rotate": True, "flatten": True},
    "embeddings": {"rotate": False},
    "head": {"rotate": False},
    "vectors": {"rotate": False},
    "kept": {"rotate": False},
}
"""The groups, by their `kind`."""


def param_groups(model: nn.Module, *, rotate: Iterable[str] = (), keep: Iterable[str] = ()) -> list[dict[str, Any]]:
    """Groups for `BasisRotation(param_groups(model))`, with the parameters' names.

    A group's `kind` says what is in it: `matrices` of two or more dimensions inside the network and convolution
    `kernels` are rotated; `embeddings`, the `head` (a module called as in `HEAD_NAMES`, one that shares its weight with
    an embedding or has as many rows as an embedding) and `vectors` get AdamW. Print the result to see who is where.

    Args:
        model: the model, whole or sharded by FSDP2 or tensor parallelism.
        rotate: patterns (`*.head.weight`) of further names to rotate.
        keep: patterns of names to leave to AdamW.

    Raises:
        ValueError: a pattern matches no parameter, a name both kinds of pattern, a pattern of `rotate` a vector, or
            FSDP1 wraps the model.
    """
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise ValueError(
            "FSDP1 flattens the parameters of a module, so that no matrix is left to rotate: shard the model with "
            "FSDP2 (torch.distributed.fsdp.fully_shard)"
        )
    named = dict(model.named_parameters())
    to_rotate, to_keep = _matching(named, rotate, "rotate"), _matching(named, keep, "keep")
    if both := sorted(to_rotate & to_keep):
        raise ValueError(f"{both[0]} matches a pattern of rotate and one of keep")
    if vectors := [name for name in to_rotate if named[name].ndim < 2]:
        raise ValueError(f"rotate: {min(vectors)} is a vector, which has no two sides to rotate")
    by_kind: dict[str, list[tuple[str, Tensor]]] = {kind: [] for kind in OPTIONS}
    modules = dict(model.named_modules())
    matrices = [name for name, parameter in named.items() if parameter.ndim >= 2]
    embeddings = [module.weight for module in modules.values() if isinstance(module, nn.Embedding | nn.EmbeddingBag)]
    for name, parameter in named.items():
        path = name.rpartition(".")[0]
        if name in to_keep:
            kind = "kept"
        elif parameter.ndim < 2:
            kind = "vectors"
        elif name not in to_rotate and any(parameter is embedding for embedding in embeddings):
            kind = "embeddings"
        elif name not in to_rotate and (
            path.rpartition(".")[2] in HEAD_NAMES
            or (name == matrices[-1] and len(parameter) in {len(embedding) for embedding in embeddings})
        ):
            kind = "head"
        else:
            kind = "kernels" if isinstance(modules[path], nn.modules.conv._ConvNd) else "matrices"
        by_kind[kind].append((name, parameter))
    return [{"params": params, "kind": kind, **OPTIONS[kind]} for kind, params in by_kind.items() if params]


def _matching(names: Iterable[str], patterns: Iterable[str], argument: str) -> set[str]:
    matching: set[str] = set()
    for pattern in patterns:
        of_pattern = {name for name in names if fnmatchcase(name, pattern)}
        if not of_pattern:
            raise ValueError(f"{argument}={pattern!r} matches no parameter; there are {', '.join(names)}")
        matching |= of_pattern
    return matching
