"""Where each parameter is in a model: its layer, and the weight of that layer that it is or is a
part of. Parametrizations, adapters (LoRA) and wrappers are seen through."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

# Parts of a path that say nothing about a layer: wrappers, and the names that peft adds.
WRAPPERS = {
    "module",
    "_orig_mod",
    "_fsdp_wrapped_module",
    "_checkpoint_wrapped_module",
    "base_layer",
    "original_module",
}
# Modules that hold the factors of a weight's change, inside the layer that they change.
ADAPTER = re.compile(r"^(lora|ia3|hada|lokr|vera|oft|boft)_")
# Names of the parts of a `weight` in the older weight_norm and spectral_norm.
OLDER_PARTS = re.compile(r"^(\w+)_(g|v|orig)$")


@dataclass(frozen=True, eq=False)
class PlaceInModel:
    """A parameter of a model, and where it is.

    Attributes:
        name: as `named_parameters` has it.
        path: the layer's name, without wrappers: `h.0.attn.c_attn`.
        tensor: the layer's name for the weight that this parameter is, or is a part of: `weight`.
        layer: the module that computes with that weight.
        is_adapter: whether it is a factor of the weight's change (LoRA), not of the weight.
    """

    name: str
    parameter: Tensor
    path: str
    tensor: str
    layer: nn.Module
    is_adapter: bool

    @property
    def weight(self) -> str:
        """The name of the weight: the same for all parts of it."""
        return f"{self.path}.{self.tensor}" if self.path else self.tensor

    @property
    def own_name(self) -> str:
        """The name that identifies the layer: its own, or the parameter's if it is not a layer's
        `weight`."""
        return self.weight.removesuffix(".weight").rpartition(".")[2]

    @property
    def is_convolution(self) -> bool:
        return isinstance(self.layer, nn.modules.conv._ConvNd)

    @property
    def is_embedding(self) -> bool:
        return is_embedding(self.layer)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape as a matrix (m, n) or a stack of matrices; (out, in h w) for a
        convolution."""
        shape = tuple(self.parameter.shape)
        if self.is_convolution and len(shape) > 2:
            return shape[0], self.parameter[0].numel()
        return shape

    @property
    def output_dim(self) -> int:
        """The dimension of a weight's outputs: the columns (-1) of transformers' Conv1D, which is
        (in, out), otherwise the rows (-2)."""
        kinds = type(self.layer).__mro__
        return -1 if any(kind.__name__ == "Conv1D" for kind in kinds) else -2

    @property
    def is_vector(self) -> bool:
        """Whether it has no two sides. Parameters of norms count as vectors whatever their shape,
        and so do matrices of one row or one column."""
        kind = type(self.layer).__name__
        if "Norm" in kind and "Linear" not in kind:
            return True
        if is_lazy(self.parameter):  # its shape is not known yet
            return self.tensor != "weight"
        return len(self.shape) < 2 or min(self.shape[-2:]) <= 1


def is_embedding(module: nn.Module) -> bool:
    """Whether a module looks up rows of a table. Other libraries' modules are recognised by the
    name of their class."""
    is_table = isinstance(module, nn.Embedding | nn.EmbeddingBag)
    return is_table or "Embedding" in type(module).__name__


def places_in(model: nn.Module) -> list[PlaceInModel]:
    """Where each of a model's parameters belongs, in the order of `named_parameters`."""
    modules = dict(model.named_modules())
    tables: dict[int, nn.Module] = {}  # by the identity of an embedding's weight
    for module in modules.values():
        if is_embedding(module):
            tables |= {id(weight): module for weight in module.parameters(recurse=False)}
    found = []
    for name, parameter in model.named_parameters():
        path, tensor, is_adapter = _look_through(name, modules)
        layer = _wrapped_layer(modules[path])
        # A tied weight is an embedding's, whatever layer has it first.
        layer = tables.get(id(parameter), layer)
        found.append(
            PlaceInModel(name, parameter, without_wrappers(path), tensor, layer, is_adapter)
        )
    return found


def _wrapped_layer(module: nn.Module) -> nn.Module:
    """The layer that peft has wrapped; the module itself if there is none."""
    inner = getattr(module, "base_layer", None)
    return _wrapped_layer(inner) if isinstance(inner, nn.Module) else module


def _look_through(name: str, modules: Mapping[str, nn.Module]) -> tuple[str, str, bool]:
    """A layer's path, what it calls the weight, and whether the parameter is an adapter's."""
    parts = name.split(".")
    if "parametrizations" in parts:  # LAYER.parametrizations.WEIGHT.original0, or .0.lora_A
        index = parts.index("parametrizations")
        is_adapter = not parts[index + 2].startswith("original")
        return ".".join(parts[:index]), parts[index + 1], is_adapter
    for index, part in enumerate(parts):
        if ADAPTER.match(part):  # LAYER.lora_A.default.weight
            return ".".join(parts[:index]), "weight", True
    path, tensor = ".".join(parts[:-1]), parts[-1]
    older = OLDER_PARTS.match(tensor)
    if older and isinstance(getattr(modules[path], older[1], None), Tensor):
        tensor = older[1]
    return path, tensor, False


def without_wrappers(path: str) -> str:
    """A path without the parts that wrappers add to it."""
    parts = path.split(".")
    kept = []
    for index, part in enumerate(parts):
        is_copy = part == "modules_to_save" or (index > 0 and parts[index - 1] == "modules_to_save")
        if part not in WRAPPERS and not is_copy:
            kept.append(part)
    return ".".join(kept)
