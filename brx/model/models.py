"""From settings to a model: the classes that there are, a user's own, and its parts.

A model is a torch.nn.Module with three parts in pipeline order, `embed` (token ids (B, S) to the
stream (B, S, D)), `blocks` (an nn.ModuleList, each from stream to stream) and `head` (stream to
logits (B, S, V)). Nothing outside this package knows what a block is (docs/models.md)."""

import inspect
import typing
from collections.abc import Sequence
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from torch import nn

from brx.config.schema import ModelSection, OwnModelConfig
from brx.config.user_code import check_unchanged, fault, load_attribute
from brx.errors import UserError, did_you_mean
from brx.model.gpt import GPT
from brx.model.llama import Llama
from brx.model.trace import without_values
from brx.optim.param_groups import param_groups

MODELS: dict[str, type[nn.Module]] = {"gpt": GPT, "llama": Llama}
PARTS = ("embed", "blocks", "head")


def make_model(
    config: ModelSection, vocabulary_size: int, seed: int | None, parts: Sequence[range]
) -> nn.Module:
    """The model with the initial weights of `parts`, runs of blocks (with the embedding before the
    first block, the head after the last); without a seed with none, on the meta device.

    Of a model that comes with brx nothing else takes memory; one of the user's own is made whole.
    UserError where that one cannot be made."""
    if isinstance(config, OwnModelConfig):
        return _make_own(config, vocabulary_size, seed)
    with without_values():
        model = MODELS[config.name](vocabulary_size, **config.options())
    if seed is not None:
        _give_memory(_modules_of(model, parts))
        model.initialize(seed)  # type: ignore[operator]
    return model


def _modules_of(model: nn.Module, parts: Sequence[range]) -> list[nn.Module]:
    blocks: Any = model.blocks
    modules = [blocks[index] for part in parts for index in part]
    if any(part.start == 0 for part in parts):
        modules.append(model.embed)
    if any(part.stop == len(blocks) for part in parts):
        modules.append(model.head)
    return modules


def _give_memory(modules: Sequence[nn.Module]) -> None:
    """Replace parameters on the meta device by ones on the CPU, without values; one that several
    modules share by one."""
    given: dict[nn.Parameter, nn.Parameter] = {}
    for module in modules:
        for submodule in module.modules():
            for name, parameter in submodule._parameters.items():
                if parameter is None or not parameter.is_meta:
                    continue
                if parameter not in given:
                    given[parameter] = nn.Parameter(torch.empty_like(parameter, device="cpu"))
                submodule._parameters[name] = given[parameter]


def _make_own(config: OwnModelConfig, vocabulary_size: int, seed: int | None) -> nn.Module:
    """A model of the user's own. Its constructor draws what it draws from the seed, and after it
    `initialize(seed)`, if there is one."""
    model_class = load_class(config)
    options = {"vocabulary_size": vocabulary_size, **config.options()}
    check_options(config.name, model_class, options)
    model: Any  # of whatever class
    try:
        if seed is None:
            with without_values():
                model = model_class(**options)
        else:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                model = model_class(**options)
                if hasattr(model, "initialize"):
                    constructed = _weights(model)
                    model.initialize(seed)
                    _check_initialized(config.name, constructed, _weights(model))
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"model.class {config.name}: {fault(error, config.name)}") from None
    check_parts(config, model)
    whole: nn.Module = model
    return whole


def _weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """All weights by name; one that has two names is there twice."""
    return dict(model.named_parameters(remove_duplicate=False))


def _check_initialized(
    name: str, before: dict[str, nn.Parameter], after: dict[str, nn.Parameter]
) -> None:
    """UserError where `initialize` changed more than values.

    Plans and the check before training see the model that the constructor makes."""
    where = f"model.class {name}: initialize"
    changed = sorted(before.keys() ^ after.keys())
    if changed:
        raise UserError(
            f"{where} adds or removes the weight {changed[0]}; only the constructor may do that"
        )
    names_before, names_after = _first_names(before), _first_names(after)
    for weight, parameter in after.items():
        if parameter.shape != before[weight].shape:
            raise UserError(
                f"{where} changes the shape of {weight} from {tuple(before[weight].shape)} to"
                f" {tuple(parameter.shape)}; only the constructor may do that"
            )
        if names_after[weight] != names_before[weight]:
            raise UserError(
                f"{where} ties or unties {weight}; only the constructor may decide which weights"
                " are shared"
            )


def _first_names(weights: dict[str, nn.Parameter]) -> dict[str, str]:
    """For each name of a weight the first name of the same weight."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(weight), name) for name, weight in weights.items()}


def load_class(config: OwnModelConfig) -> type[nn.Module]:
    """The class that `model.class` names; UserError where it cannot be had, or its file has changed
    since the run was set up."""
    where = f"model.class {config.name}"
    check_unchanged(config.name, config.code_sha256, where)

    def fits(value: Any) -> bool:
        return isinstance(value, type) and issubclass(value, nn.Module)

    chosen: type[nn.Module] = load_attribute(config.name, where, "torch.nn.Module", fits)
    return chosen


def check_options(name: str, model_class: type[nn.Module], options: dict[str, Any]) -> None:
    """UserError for an option that the class's constructor does not take, lacks, or takes of
    another type."""
    accepted = inspect.signature(model_class).parameters
    kinds = {parameter.kind for parameter in accepted.values()}
    takes_any = inspect.Parameter.VAR_KEYWORD in kinds
    for key in options:
        if key not in accepted and not takes_any:
            known = [key for key in accepted if key not in ("vocabulary_size", "args", "kwargs")]
            hint = did_you_mean(key, known)
            raise UserError(
                f"model.{key}: {name} takes no option '{key}'{hint} (known: {', '.join(known)})"
            )
    for key, parameter in accepted.items():
        is_needed = parameter.default is inspect.Parameter.empty and parameter.kind not in (
            inspect.Parameter.VAR_KEYWORD,
            inspect.Parameter.VAR_POSITIONAL,
        )
        if is_needed and key not in options:
            raise UserError(f"model.{key}: {name} needs this option, which has no default")
    try:
        types = typing.get_type_hints(model_class.__init__)
    except Exception:  # a name that exists for type checkers alone
        return
    for key, value in options.items():
        if key not in types:
            continue
        try:
            TypeAdapter(types[key]).validate_python(value, strict=True)
        except ValidationError as error:
            message = error.errors()[0]["msg"]
            told = message[0].lower() + message[1:]
            raise UserError(f"model.{key}: {told}, got {value!r} ({name})") from None
        except Exception:  # of a type that pydantic does not know
            continue


def check_parts(config: OwnModelConfig, model: nn.Module) -> None:
    """UserError where a part is missing, is of another kind, or has weights that cannot train."""
    where = f"model.class {config.name}"
    for part in PARTS:
        if not isinstance(getattr(model, part, None), nn.Module):
            raise UserError(
                f"{where}: has no part `{part}`; a model is a torch.nn.Module with embed, blocks"
                " and head, modules in this order"
            )
    blocks = model.blocks
    if not isinstance(blocks, nn.ModuleList):
        raise UserError(
            f"{where}: blocks must be a torch.nn.ModuleList, got {type(blocks).__name__}"
        )
    if len(blocks) != config.blocks:
        raise UserError(f"{where}: has {len(blocks)} blocks where model.blocks is {config.blocks}")
    for name, parameter in model.named_parameters():
        if name.partition(".")[0] not in PARTS:
            raise UserError(f"{where}: {name} is in none of embed, blocks and head")
        if not parameter.requires_grad:
            raise UserError(f"{where}: {name} does not train; register it as a buffer")
        if parameter.dtype != torch.float32:
            raise UserError(f"{where}: {name} is in {parameter.dtype}, must be torch.float32")


def matrix_names(model: nn.Module) -> set[str]:
    """The matrices (or stacks of them) in a model's blocks that methods treat as matrices: those
    that its `matrices()` names, or else what `BasisRotation`'s `param_groups` would rotate, without
    kernels of convolutions."""
    named: Any = model
    if hasattr(model, "matrices"):
        return set(named.matrices())
    found = set()
    for group in param_groups(model):
        if group["kind"] == "matrices":
            found |= {name for name, weight in group["params"] if weight.ndim <= 3}
    return {name for name in found if name.startswith("blocks.")}
