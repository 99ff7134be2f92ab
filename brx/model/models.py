"""Make a model from its settings: one of brx's classes, or a class in a user's file.

A model is a torch.nn.Module with three parts in the order of the pipeline:

- `embed`: token ids (B, S) to the stream (B, S, D);
- `blocks`: an nn.ModuleList; each block maps the stream to the stream;
- `head`: the stream to logits (B, S, V).

Nothing outside this package knows what a block is (docs/models.md).
"""

import contextlib
import inspect
import random
import traceback
import typing
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from pydantic import TypeAdapter, ValidationError
from torch import nn
from torch.nn.parameter import is_lazy

from brx.config.schema import ModelSection, OwnModelConfig
from brx.config.user_code import check_unchanged, fault, load_attribute
from brx.errors import UserError, counted, did_you_mean
from brx.model.gpt import GPT
from brx.model.llama import Llama
from brx.model.trace import MarkUninitialized, drop_values, without_values
from brx.optim.param_groups import param_groups

MODELS: dict[str, type[nn.Module]] = {"gpt": GPT, "llama": Llama}
PARTS = ("embed", "blocks", "head")


def make_model(
    config: ModelSection, vocabulary_size: int, seed: int | None, parts: Sequence[range]
) -> nn.Module:
    """Make a model with the initial weights of some of its parts.

    A user's own model gets all its weights. In one of brx's, only the weights of `parts` take
    memory; the others are on the meta device.

    Args:
        config: the section `model` of the settings.
        vocabulary_size: V.
        seed: the seed of the initial weights. None: the whole model is on the meta device, without
            weights.
        parts: runs of blocks. The embedding comes with the first block, the head with the last.

    Raises:
        UserError: a user's own model cannot be made.
    """
    if isinstance(config, OwnModelConfig):
        return _make_own(config, vocabulary_size, seed)
    with without_values():
        model = MODELS[config.name](vocabulary_size, **config.options())
    if seed is not None:
        _give_memory(_modules_of(model, parts))
        model.initialize(seed)  # type: ignore[operator]
    return model


def _modules_of(model: nn.Module, parts: Sequence[range]) -> list[nn.Module]:
    """The blocks of these parts, with the embedding and the head if they are among them."""
    whole: Any = model
    modules: list[nn.Module] = []
    for part in parts:
        modules += [whole.blocks[index] for index in part]
    if any(part.start == 0 for part in parts):
        modules.append(whole.embed)
    if any(part.stop == len(whole.blocks) for part in parts):
        modules.append(whole.head)
    return modules


def _give_memory(modules: Sequence[nn.Module]) -> None:
    """Replace parameters on the meta device by ones on the CPU, without values. A parameter that
    several modules share stays shared."""
    on_cpu: dict[nn.Parameter, nn.Parameter] = {}  # by the parameter that it replaces
    for module in modules:
        for submodule in module.modules():
            for name, parameter in submodule._parameters.items():
                if parameter is None or not parameter.is_meta:
                    continue
                if parameter not in on_cpu:
                    on_cpu[parameter] = nn.Parameter(torch.empty_like(parameter, device="cpu"))
                submodule._parameters[name] = on_cpu[parameter]


def _make_own(config: OwnModelConfig, vocabulary_size: int, seed: int | None) -> nn.Module:
    """A user's own model, checked (`check_parts`).

    Its constructor draws random numbers from the seed; `initialize(seed)` is called if it has one.
    """
    model_class = load_model_class(config)
    options = {"vocabulary_size": vocabulary_size, **config.options()}
    check_model_options(config.name, model_class, options)
    try:
        if seed is None:
            model = _without_values(model_class, options)
        else:
            with _seeded(seed), MarkUninitialized():  # type: ignore[no-untyped-call]
                model = model_class(**options)
                _initialize(config.name, model, seed)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"model.class {config.name}: {fault(error, config.name)}") from None
    check_parts(config, model)
    if seed is not None:
        _check_values(config.name, model)
    return model


def _check_values(name: str, model: nn.Module) -> None:
    """UserError if a weight has no initial values."""
    for weight, parameter in model.named_parameters():
        if bool(parameter.isnan().any()):
            raise UserError(
                f"model.class {name}: {weight} begins with nan, or with no values at all"
                " (torch.empty); let the constructor or initialize(seed) give it some"
            )


def _without_values(model_class: type[nn.Module], options: dict[str, Any]) -> nn.Module:
    """A model whose parameters are on the meta device."""
    with contextlib.suppress(Exception), _seeded(0), without_values():
        return model_class(**options)
    # The constructor may ask for values (an orthogonal parametrization does). If it fails for
    # another reason, it does so again.
    with _seeded(0):
        model = model_class(**options)
    drop_values(model)
    return model


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Let torch, numpy and Python draw from the seed in this block, and afterwards go on as if they
    had not."""
    of_python = random.getstate()
    of_numpy = np.random.get_state()  # noqa: NPY002  # the user's code draws from it
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        random.seed(seed)
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)  # noqa: NPY002


def _initialize(name: str, model: Any, seed: int) -> None:
    """Call the model's `initialize`, if it has one, and check what it did."""
    if not hasattr(model, "initialize"):
        return
    constructed = _weights(model)
    model.initialize(seed)
    _check_initialized(name, constructed, _weights(model))


def _weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """All weights by name. A weight with two names is there twice."""
    return dict(model.named_parameters(remove_duplicate=False))


def _check_initialized(
    name: str, before: dict[str, nn.Parameter], after: dict[str, nn.Parameter]
) -> None:
    """UserError if `initialize` changed more than values.

    Plans and the check before training see the model as the constructor makes it.
    """
    where = f"model.class {name}: initialize"
    changed = sorted(before.keys() ^ after.keys())
    if changed:
        raise UserError(
            f"{where} adds or removes the weight {changed[0]}; only the constructor may do that"
        )
    names_before = _first_names(before)
    names_after = _first_names(after)
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
    """For the name of each weight, the first name of the same weight."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(weight), name) for name, weight in weights.items()}


def load_model_class(config: OwnModelConfig) -> type[nn.Module]:
    """The class that `model.class` names.

    Raises:
        UserError: it cannot be loaded, or its file has changed since the run was set up.
    """
    where = f"model.class {config.name}"
    check_unchanged(config.name, config.code_sha256, where)

    def fits(value: Any) -> bool:
        return isinstance(value, type) and issubclass(value, nn.Module)

    chosen: type[nn.Module] = load_attribute(config.name, where, "torch.nn.Module", fits)
    return chosen


def check_model_options(name: str, model_class: type[nn.Module], options: dict[str, Any]) -> None:
    """Check options against the signature of a constructor.

    Args:
        name: the name of the class, for messages.
        model_class: the class.
        options: the options by name.

    Raises:
        UserError: the constructor does not take an option, needs one that is missing, or annotates
            one with another type.
    """
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
        variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        has_default = parameter.default is not inspect.Parameter.empty
        is_needed = not has_default and parameter.kind not in variadic
        if is_needed and key not in options:
            raise UserError(f"model.{key}: {name} needs this option, which has no default")
    _check_types(name, model_class, options)


def _check_types(name: str, model_class: type[nn.Module], options: dict[str, Any]) -> None:
    """UserError if an option is not of the type with which the constructor annotates it."""
    constructor: Any = model_class.__init__
    try:
        types = typing.get_type_hints(constructor)
    except Exception:  # an annotation has a name that only type checkers know
        return
    for key, value in options.items():
        if key not in types:
            continue
        try:
            TypeAdapter(types[key]).validate_python(value, strict=True)
        except ValidationError as error:
            message = error.errors()[0]["msg"]
            complaint = message[0].lower() + message[1:]
            raise UserError(f"model.{key}: {complaint}, got {value!r} ({name})") from None
        except Exception:  # pydantic does not know the type
            continue


def check_parts(config: OwnModelConfig, model: nn.Module) -> None:
    """Refuse a model that cannot be divided into the stages of a pipeline.

    Raises:
        UserError: a part is missing or is of another kind, a weight is in none of the parts or
            cannot train, or two weights share memory.
    """
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
        there = counted(len(blocks), "block")
        raise UserError(f"{where}: has {there} where model.blocks is {config.blocks}")
    for name, parameter in model.named_parameters():
        if name.partition(".")[0] not in PARTS:
            raise UserError(f"{where}: {name} is in none of embed, blocks and head")
        if is_lazy(parameter):
            raise UserError(
                f"{where}: {name} gets its shape in the first forward pass (LazyLinear, perhaps);"
                " give it one in the constructor"
            )
        if not parameter.requires_grad:
            raise UserError(f"{where}: {name} does not train; register it as a buffer")
        if parameter.dtype != torch.float32:
            advice = ""
            if parameter.is_complex():
                advice = "; keep its real and imaginary parts (torch.view_as_real)"
            elif parameter.dtype in (torch.bfloat16, torch.float16):
                advice = "; runtime.precision=bf16 computes in bf16"
            raise UserError(
                f"{where}: {name} is in {parameter.dtype}, must be torch.float32{advice}"
            )
    _check_memory(model, where)


def _check_memory(model: nn.Module, where: str) -> None:
    """UserError if two weights share memory, as by `a.weight.data = b.weight.data`. Stages give
    each weight memory of its own, and the two would no longer be one."""
    spans: list[tuple[int, int, int, str]] = []  # storage, first and last element, name
    for name, weight in model.named_parameters():
        if weight.numel() == 0:
            continue
        first = int(weight.storage_offset())
        steps = zip(weight.shape, weight.stride(), strict=True)
        last = first + sum(int((size - 1) * stride) for size, stride in steps)
        spans.append((weight.untyped_storage()._cdata, first, last, name))
    for before, after in pairwise(sorted(spans)):
        if before[0] == after[0] and after[1] <= before[2]:
            raise UserError(
                f"{where}: {before[3]} and {after[3]} share memory; share the parameter itself"
                " (a.weight = b.weight), or copy (.clone())"
            )


def matrix_names(model: nn.Module) -> set[str]:
    """The names of the weights in a model's blocks that methods treat as matrices, or as stacks of
    matrices.

    A model may name them itself, by a method `matrices()`. Otherwise they are the weights that
    `BasisRotation` would rotate by default (`param_groups`), without kernels of convolutions.

    Raises:
        UserError: the model names something that is not one of its matrices.
    """
    if hasattr(model, "matrices"):
        return _named_matrices(model)
    rotated: set[str] = set()
    for group in param_groups(model):
        if group["kind"] == "matrices":
            rotated |= {name for name, weight in group["params"] if weight.ndim <= 3}
    return {name for name in rotated if name.startswith("blocks.")}


def _named_matrices(model: Any) -> set[str]:
    """What the model's `matrices()` names, checked."""
    where = f"model.class {type(model).__name__}: matrices()"
    try:
        names = model.matrices()
        if isinstance(names, Iterable) and not isinstance(names, str):
            names = list(names)
    except Exception as error:
        said = " ".join(str(error).split())
        line = traceback.extract_tb(error.__traceback__)[-1]
        at = f"{line.filename}:{line.lineno}"
        raise UserError(f"{where}: {at}: {type(error).__name__}: {said}") from None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"{where} must give a list of names of weights, gave {names!r:.60}")
    weights = dict(model.named_parameters(remove_duplicate=False))
    for name in names:
        if name not in weights:
            raise UserError(f"{where}: {name} is no weight{did_you_mean(name, weights)}")
        if weights[name].ndim not in (2, 3):
            raise UserError(
                f"{where}: {name} has the shape {tuple(weights[name].shape)}; a matrix has two"
                " dimensions, a stack of matrices three"
            )
    first_names = _first_names(weights)  # those that weights with several names go by
    return {first_names[name] for name in names}
