"""The role of each parameter of a model, which its name, shape and use decide."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .dtensor import FSDP1
from .options import Group
from .places_in_model import PlaceInModel, is_embedding, places_in, without_wrappers

# Usual names of the last layer, or of a module that ends in it: `lm_head`, `value_head` and the
# like. But timm calls a convolution of features `conv_head`, and `attention_heads` make no outputs.
HEAD_NAME = re.compile(
    r"(?!(conv|sa|(\w+_)?(attn|attention))_head)(\w+_)?heads?"
    r"|head_dist|last_linear|output|unembed|embed_out|classifier|score|fc_out|logits"
)
# Names of the layer of an attention that makes the queries, or queries, keys and values.
QUERIES = re.compile(r"((to_|w)?q(kv)?|q(ueries|uery|_lin|(kv)?_proj)|c_attn)", re.IGNORECASE)
# Names of plain parameters that are looked up or added, not multiplied by.
EMBEDDING_NAME = re.compile(
    r"(^|[._\d])(emb|embeds?|embeddings?|pos|positions?|positional|tokens?|table|prompts?|latents|codebook|wte|wpe)"
    r"($|[._\d])"
)
# Names of embeddings of positions, not of tokens.
POSITIONS = re.compile(r"wpe|(^|[._])pos(ition)?")
# Projections that hold several matrices one after the other, and how many. `query_key_value` is not
# among them, because there the matrices alternate from head to head.
FUSED = {
    "c_attn": 3,
    "qkv": 3,
    "Wqkv": 3,
    "qkv_proj": 3,
    "to_qkv": 3,
    "in_proj_weight": 3,
    "kv": 2,
    "to_kv": 2,
    "gate_up_proj": 2,
    "gate_up": 2,
    "w12": 2,
}
# What `Role.kind` can be.
KINDS = ("matrices", "kernels", "embeddings", "head", "vectors", "kept")
# The names in `FUSED` whose matrices may be rectangular.
GATES = ("gate_up_proj", "gate_up", "w12", "to_qkv", "to_kv")

Split = tuple[int, int]  # number of parts, and the dimension that they divide: -2 or -1


@dataclass(frozen=True)
class Role:
    """What a parameter is.

    Attributes:
        kind: `matrices` and convolution `kernels` are rotated; `embeddings`, the `head`, `vectors`
            and parameters that are `kept` are not.
        why: the reason, in words.
        split: how a fused projection of several matrices is divided; None for other parameters.
    """

    kind: str
    why: str
    split: Split | None = None

    @property
    def options(self) -> Group:
        """The role as options of a parameter group."""
        options: Group = {
            "kind": self.kind,
            "why": self.why,
            "rotate": self.kind in ("matrices", "kernels"),
            "flatten": self.kind == "kernels",
        }
        return {**options, "split": self.split} if self.split else options

    def over(self, options: Group) -> Group:
        """A group's options for a parameter of this role. A group that rotates nothing keeps its
        own."""
        if not options["rotate"]:
            return options
        split = options["split"] or self.split
        flatten = options["flatten"] or self.kind == "kernels"
        return {**options, **self.options, "split": split, "flatten": flatten}


def roles(
    model: nn.Module,
    *,
    rotate: Iterable[str] = (),
    keep: Iterable[str] = (),
    split: Mapping[str, int | Split] | None = None,
) -> dict[str, Role]:
    """The role of each parameter, by name; for the arguments and errors see `param_groups`."""
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise ValueError(FSDP1)
    found = {place.name: place for place in places_in(model)}
    to_rotate = _matching(found, rotate, "rotate")
    to_keep = _matching(found, keep, "keep")
    _check_rotate(to_rotate, to_keep, found)
    heads = find_heads(model, list(found.values()))
    asked = _asked_parts(found, split or {})
    role_by_name = {}
    for name, place in found.items():
        role = _role(place, heads, name in to_rotate)
        if name in to_keep:
            role = Role("kept", "keep")
        if name in asked and role.kind not in ("matrices", "kernels"):
            raise ValueError(f"split: {name} is no matrix to rotate ({role.why})")
        if role.kind in ("matrices", "kernels"):
            role = Role(role.kind, role.why, asked.get(name) or _known_parts(place))
        role_by_name[name] = role
    return role_by_name


def _check_rotate(to_rotate: set[str], to_keep: set[str], found: dict[str, PlaceInModel]) -> None:
    for name in sorted(to_rotate):
        if name in to_keep:
            raise ValueError(f"{name} matches a pattern of rotate and one of keep")
        if found[name].is_vector:
            raise ValueError(f"rotate: {name} is a vector, which does not have two sides to rotate")


def _role(place: PlaceInModel, heads: Mapping[str, str], must_rotate: bool) -> Role:
    if place.is_vector:
        return Role("vectors", "vector")
    if not must_rotate:
        embedding = _embedding(place)
        if embedding:
            return Role("embeddings", embedding)
        if place.weight in heads:
            return Role("head", heads[place.weight])
    return Role("kernels", "kernel") if place.is_convolution else Role("matrices", "matrix")


def _embedding(place: PlaceInModel) -> str:
    """Why a parameter is an embedding's; "" if it is not."""
    if place.is_embedding:
        return "adapter of an embedding" if place.is_adapter else "embedding"
    if place.tensor != "weight" and EMBEDDING_NAME.search(place.tensor.lower()):
        return "embedding by its name"
    return ""


def find_heads(model: nn.Module, found: list[PlaceInModel]) -> dict[str, str]:
    """The weights that make the model's outputs, by name, with the reason."""
    weights = _weights(found)
    heads: dict[str, str] = {}
    last_weight = next(reversed(weights), None)
    for weight in weights:
        called = _called_head(weight, is_last=weight == last_weight)
        if called:
            heads[weight] = f"head: called {called}"
    for container, weight in _ends_of_containers(model, weights).items():
        heads[weight] = f"head: the last of {container}"
    last = _last_as_head(model, weights)
    if last:
        weight, why = last
        heads.setdefault(weight, why)
    return heads


def _weights(found: list[PlaceInModel]) -> dict[str, PlaceInModel]:
    """The weights of two or more dimensions, by name. If a weight has several parts (weight_norm's
    length and direction), the largest one stands for it."""
    weights: dict[str, PlaceInModel] = {}
    for place in found:
        is_vector = place.tensor == "bias" if is_lazy(place.parameter) else len(place.shape) < 2
        if place.is_adapter or is_vector:
            continue
        other = weights.setdefault(place.weight, place)
        if not is_lazy(place.parameter) and place.parameter.numel() > other.parameter.numel():
            weights[place.weight] = place
    return weights


def _called_head(weight: str, is_last: bool) -> str:
    """The name of the layer if it is a head's name; otherwise ""."""
    # Without the weight's own name. A parameter of the model itself has no layer.
    *above, layer = weight.split(".")[:-1] or [""]
    # Within a block, no layer is a head, for example the `fc_out` in GPT-J.
    if any(part.isdigit() for part in above):
        return ""
    if HEAD_NAME.fullmatch(layer) or (layer == "fc" and (not above or is_last)):
        return layer
    return ""


def _ends_of_containers(model: nn.Module, weights: Collection[str]) -> dict[str, str]:
    """For each container with a head's name, the last weight in it. A list or a dictionary holds
    several heads, so each module in it is a container. What is called `heads` may also be those of
    an attention, so its layers are left out."""
    attentions = _attentions(weights)
    several = _lists(model)
    ends = {}
    for weight in weights:
        parts = weight.split(".")[:-1]
        inside = [index for index, part in enumerate(parts[:-1]) if HEAD_NAME.fullmatch(part)]
        # Within a block, no layer is a head, for example an `output`.
        if not inside or any(part.isdigit() for part in parts[: inside[0]]):
            continue
        if ".".join(parts[:-1]) in attentions:
            continue
        length = inside[0] + 1
        if ".".join(parts[:length]) in several:
            length += 1
        ends[".".join(parts[:length])] = weight
    return ends


def _attentions(weights: Collection[str]) -> set[str]:
    """The paths of the modules that hold a layer of queries."""
    paths = set()
    for weight in weights:
        layer_path = weight.rpartition(".")[0]
        module_path, _, layer = layer_path.rpartition(".")
        if QUERIES.fullmatch(layer):
            paths.add(module_path)
    return paths


def _lists(model: nn.Module) -> set[str]:
    """The paths of the lists and dictionaries of modules."""
    paths = set()
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            paths.add(without_wrappers(path))
    return paths


def _last_as_head(model: nn.Module, weights: dict[str, PlaceInModel]) -> tuple[str, str] | None:
    """The last weight and the reason, if it is a head: no layer shares an embedding's weight, and
    either it has a row per token, or the model is one Sequential."""
    if not weights or _is_tied(model):
        return None
    name = list(weights)[-1]
    last = weights[name]
    if is_lazy(last.parameter):
        return None
    tokens = _token_embedding(model)
    if tokens is not None and last.parameter is not tokens and not is_lazy(tokens):
        rows, columns = last.parameter.shape[-2:]
        if rows == len(tokens) > 1:
            if rows > columns or columns == tokens.shape[-1]:
                return name, "head: a row per token"
            return None
    end = _end_of_sequence(model)
    if len(weights) > 1 and end is not None and f"{name}.".startswith(end):
        return name, "head: the last layer of a Sequential"
    return None


def _is_tied(model: nn.Module) -> bool:
    """Whether another layer computes with an embedding's weight."""
    elsewhere = set()
    for module in model.modules():
        if not is_embedding(module):
            elsewhere |= {id(parameter) for parameter in module._parameters.values()}
    return any(id(table.weight) in elsewhere for _, table in _tables(model))


def _token_embedding(model: nn.Module) -> Tensor | None:
    """The first embedding that is not one of positions."""
    for name, table in _tables(model):
        if not POSITIONS.search(name):
            weight: Tensor = table.weight
            return weight
    return None


def _tables(model: nn.Module) -> list[tuple[str, Any]]:
    named = model.named_modules()
    return [(name, m) for name, m in named if isinstance(m, nn.Embedding | nn.EmbeddingBag)]


def _end_of_sequence(model: nn.Module) -> str | None:
    """The path of the last layer, with a dot, if a model is one Sequential (in a wrapper, or with
    Sequentials at its end); None for other models."""
    path, module, is_sequential = "", model, False
    while True:
        children = []
        for name, child in module.named_children():
            if name != "parametrizations" and list(child.parameters()):
                children.append((name, child))
        if not children or hasattr(module, "base_layer"):
            break
        is_sequential = is_sequential or isinstance(module, nn.Sequential)
        if len(children) > 1 and not isinstance(module, nn.Sequential):
            return None
        name, module = children[-1]
        path += name + "."
    if not is_sequential:
        return None
    return without_wrappers(path.rstrip(".")) + "."


def _asked_parts(
    found: Mapping[str, PlaceInModel], split: Mapping[str, int | Split]
) -> dict[str, Split]:
    """For each parameter, the parts that the caller has asked for."""
    parts = {}
    for pattern, given in split.items():
        names = set()
        for name, place in found.items():
            if pattern in name.split(".") and not place.is_vector:
                names.add(name)
        for name in names or _matching(found, [pattern], "split"):
            place = found[name]
            refuse_lazy(place)
            number, dim = (given, place.output_dim) if isinstance(given, int) else given
            is_possible = len(place.shape) >= 2 and number >= 1 and dim in (-2, -1)
            if not is_possible or place.shape[dim] % number:
                raise ValueError(
                    f"split: {name} of shape {tuple(place.parameter.shape)} is not {number} equal "
                    f"matrices"
                )
            parts[name] = number, dim
    return parts


def refuse_lazy(place: PlaceInModel) -> None:
    """Raise ValueError for a parameter whose shape would decide, but is not known yet."""
    if is_lazy(place.parameter):
        raise ValueError(
            f"{place.name} may be a fused projection, and its shape is not known yet: run a batch "
            f"through the model first, or give the model itself, BasisRotation(model)"
        )


def _known_parts(place: PlaceInModel) -> Split | None:
    """The parts of a fused projection with a known name, if they are equal."""
    parts = FUSED.get(place.own_name)
    if parts is None or place.is_adapter:
        return None
    if is_lazy(place.parameter):
        return None
    shape, dim = place.shape, place.output_dim
    if len(shape) != 2 or shape[dim] % parts:
        return None
    other_dim = -3 - dim  # -1 for -2, and -2 for -1
    is_square = shape[dim] == parts * shape[other_dim]
    return (parts, dim) if is_square or place.own_name in GATES else None


def _matching(names: Iterable[str], patterns: Iterable[str], argument: str) -> set[str]:
    """The names that match any of the patterns; ValueError for a pattern that matches none."""
    matched = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        matching = {name for name in names if fnmatchcase(name, pattern)}
        if not matching:
            raise ValueError(
                f"{argument}={pattern!r} matches no parameter; there are {', '.join(names)}"
            )
        matched |= matching
    return matched


def has_roles(group: Group) -> bool:
    """Whether a group is one of `param_groups`: its options come from its parameters' roles."""
    # A user's own group may have a `kind`, too.
    return group.get("kind") in KINDS


def looks_like_a_table(name: str) -> bool:
    """Whether a parameter has an embedding's or a head's name; for parameters without a model."""
    layer = without_wrappers(name.removesuffix(".weight")).rpartition(".")[2]
    return bool(HEAD_NAME.fullmatch(layer) or EMBEDDING_NAME.search(layer.lower()))
