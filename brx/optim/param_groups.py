"""Parameter groups of a whole model for one `BasisRotation`: which parameters are rotated, and
which get AdamW."""

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from brx.optim.sharded import FSDP1

# What the last layer, or a Sequential that ends in it, is usually called.
HEAD_NAMES = {
    "lm_head",
    "head",
    "heads",
    "output",
    "unembed",
    "embed_out",
    "classifier",
    "score",
    "fc_out",
    "logits",
}
# A plain parameter that is looked up or added, not multiplied by.
EMBEDDING_NAME = re.compile(
    r"(^|[._\d])(emb|embeds?|embeddings?|pos|positions?|positional|tokens?|table|prompts?|latents|codebook|wte|wpe)"
    r"($|[._\d])"
)
POSITIONS = re.compile(r"wpe|(^|[._])pos(ition)?")  # a module that embeds no tokens
# Projections of several matrices one after the other, and how many. Not `query_key_value`, whose
# heads take turns.
FUSED = {
    "c_attn": 3,
    "qkv": 3,
    "Wqkv": 3,
    "qkv_proj": 3,
    "to_qkv": 3,
    "in_proj_weight": 3,
    "kv": 2,
    "to_kv": 2,
}
FUSED |= {"gate_up_proj": 2, "gate_up": 2, "w12": 2}
GATES = (
    "gate_up_proj",
    "gate_up",
    "w12",
    "to_qkv",
    "to_kv",
)  # those whose parts need not be square


def param_groups(
    model: nn.Module,
    *,
    rotate: Iterable[str] = (),
    keep: Iterable[str] = (),
    split: Mapping[str, int | tuple[int, int]] | None = None,
) -> list[dict[str, Any]]:
    """Groups for `BasisRotation(param_groups(model))`, with the parameters' names.

    A group's `kind` says what is in it, its `why` how that was told by names, shapes and use
    (docs/optimizer.md): `matrices` and convolution `kernels` are rotated; `embeddings`, the `head`
    and `vectors` get AdamW.

    Args: rotate: patterns (`*.head.weight`) of further names to rotate. keep: patterns of names to
        leave to AdamW. split: by pattern, or by part of a name: how many matrices a fused
        projection is, and where their dimension is
            not the output's, -2 (rows) or -1 (columns). `FUSED` ones of equal parts are known; 1
            leaves one whole.

    Raises ValueError where a pattern matches no parameter, or not of this kind, parts are not
    equal, or FSDP1 wraps it."""
    modules = dict(model.named_modules())
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in modules.values()):
        raise ValueError(FSDP1)
    named = dict(model.named_parameters())
    tables = [module for module in modules.values() if _is_embedding(module)]
    of_tables = {
        id(weight): table for table in tables for weight in table.parameters(recurse=False)
    }
    owners = {
        name: of_tables.get(id(weight)) or modules[name.rpartition(".")[0]]
        for name, weight in named.items()
    }
    to_rotate, to_keep = _matching(named, rotate, "rotate"), _matching(named, keep, "keep")
    for name in sorted(to_rotate):
        if name in to_keep:
            raise ValueError(f"{name} matches a pattern of rotate and one of keep")
        if _is_vector(named[name], owners[name]):
            raise ValueError(f"rotate: {name} is a vector, which has no two sides to rotate")
    heads, parts = _heads(model, modules, named), _asked_parts(named, owners, split or {})
    groups: dict[Any, dict[str, Any]] = {}
    for name, parameter in named.items():
        module = owners[name]
        if name in to_keep:
            kind, why = "kept", "keep"
        elif _is_vector(parameter, module):
            kind, why = "vectors", "vector"
        elif name not in to_rotate and (why := _embedding(name, module)):
            kind = "embeddings"
        elif name not in to_rotate and (why := heads.get(name, "")):
            kind = "head"
        else:
            kind, why = ("kernels", "kernel") if _is_convolution(module) else ("matrices", "matrix")
        if name in parts and kind != "matrices":
            raise ValueError(f"split: {name} is no matrix to rotate ({why})")
        split_into = (
            parts.get(name) or _known_parts(name, parameter, module) if kind == "matrices" else None
        )
        options: dict[str, Any] = {
            "rotate": kind in ("matrices", "kernels"),
            "flatten": kind == "kernels",
        }
        options |= {"split": split_into} if split_into else {}
        group = groups.setdefault(
            (kind, why, split_into), {"params": [], "kind": kind, "why": why, **options}
        )
        group["params"].append((name, parameter))
    return list(groups.values())


def _is_vector(parameter: Tensor, module: nn.Module) -> bool:
    """Also what lies in a norm, whatever its shape, and what has one row or one column."""
    sides = (
        (len(parameter), parameter[0].numel()) if _is_convolution(module) else parameter.shape[-2:]
    )
    kind = type(module).__name__
    return parameter.ndim < 2 or min(sides) <= 1 or ("Norm" in kind and "Linear" not in kind)


def _is_convolution(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.conv._ConvNd)


def _is_embedding(module: nn.Module) -> bool:
    return (
        isinstance(module, nn.Embedding | nn.EmbeddingBag) or "Embedding" in type(module).__name__
    )


def _embedding(name: str, module: nn.Module) -> str:
    """Why a parameter is one; nothing if it is not."""
    if _is_embedding(module):
        return "embedding"
    own_name = name.rpartition(".")[2]
    return (
        "embedding by its name"
        if own_name != "weight" and EMBEDDING_NAME.search(own_name.lower())
        else ""
    )


def _heads(
    model: nn.Module, modules: dict[str, nn.Module], named: Mapping[str, Tensor]
) -> dict[str, str]:
    """The names of the matrices that make the outputs, and why."""
    matrices = [name for name, parameter in named.items() if parameter.ndim >= 2]
    heads, ends = {}, {}
    for name in matrices:
        *above, last = name.split(".")[:-1] or [""]
        is_inside = any(part.isdigit() for part in above)  # a block's own `fc_out`, as in GPT-J
        # A wrapper's name (`module.fc`) may stand before that of a head.
        if not is_inside and (
            last in HEAD_NAMES or (last == "fc" and (not above or name == matrices[-1]))
        ):
            heads[name] = f"head: called {last}"
        inside = [place for place, part in enumerate(above) if part in HEAD_NAMES]
        if inside and not any(
            part.isdigit() for part in above[: inside[0]]
        ):  # not a block's own `output`
            ends[above[inside[0]]] = name
    heads |= {name: f"head: the last of {container}" for container, name in ends.items()}
    embeddings = [
        (name, m.weight)
        for name, m in modules.items()
        if isinstance(m, nn.Embedding | nn.EmbeddingBag)
    ]
    others = (module for module in modules.values() if not _is_embedding(module))
    in_others = {id(parameter) for module in others for parameter in module._parameters.values()}
    is_tied = any(id(weight) in in_others for _, weight in embeddings)
    tokens = next((w for name, w in embeddings if not POSITIONS.search(name)), None)
    if matrices and not is_tied:
        last_name, last_one = matrices[-1], named[matrices[-1]]
        rows, columns = last_one.shape[-2:]
        if tokens is not None and last_one is not tokens and rows == len(tokens) > 1:
            if rows > columns or columns == tokens.shape[-1]:
                heads.setdefault(last_name, "head: a row per token")
        elif len(matrices) > 1 and last_name.startswith(_end_of_sequence(model)):
            heads.setdefault(last_name, "head: the last layer of a Sequential")
    return heads


def _end_of_sequence(model: nn.Module) -> str:
    """The last layer's name where a model is one Sequential (in a wrapper, or with others at its
    end); else none's."""
    path, module, is_sequential = "", model, False
    while children := [
        (name, child) for name, child in module.named_children() if list(child.parameters())
    ]:
        is_sequential = is_sequential or isinstance(module, nn.Sequential)
        if len(children) > 1 and not isinstance(module, nn.Sequential):
            return "no layer"
        path, module = path + children[-1][0] + ".", children[-1][1]
    return path if is_sequential else "no layer"


def _asked_parts(
    named: Mapping[str, Tensor],
    owners: dict[str, nn.Module],
    split: Mapping[str, int | tuple[int, int]],
) -> dict[str, tuple[int, int]]:
    """By parameter: the parts that the caller has named, and the dimension that they divide."""
    parts = {}
    for pattern, given in split.items():
        names = {name for name in named if pattern in name.split(".") and named[name].ndim >= 2}
        for name in names or _matching(named, [pattern], "split"):
            number, dim = (given, _output(owners[name])) if isinstance(given, int) else given
            parts[name] = number, dim
            if (
                named[name].ndim < 2
                or number < 1
                or dim not in (-2, -1)
                or named[name].shape[dim] % number
            ):
                raise ValueError(
                    f"split: {name} of shape {tuple(named[name].shape)} is not {number} equal "
                    f"matrices"
                )
    return parts


def _known_parts(name: str, parameter: Tensor, module: nn.Module) -> tuple[int, int] | None:
    own_name, dim = name.removesuffix(".weight").rpartition(".")[2], _output(module)
    parts, size = FUSED.get(own_name), parameter.shape[dim]
    if parts is None or parameter.ndim != 2 or size % parts:
        return None
    return (parts, dim) if own_name in GATES or size == parts * parameter.shape[-3 - dim] else None


def _output(module: nn.Module) -> int:
    """The dimension of a weight that its outputs have: the columns of transformers' Conv1D (in,
    out), else the rows."""
    return -1 if any(kind.__name__ == "Conv1D" for kind in type(module).__mro__) else -2


def _matching(names: Iterable[str], patterns: Iterable[str], argument: str) -> set[str]:
    found = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        if not (matching := {name for name in names if fnmatchcase(name, pattern)}):
            raise ValueError(
                f"{argument}={pattern!r} matches no parameter; there are {', '.join(names)}"
            )
        found |= matching
    return found
