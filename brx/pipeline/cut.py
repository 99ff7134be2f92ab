"""The cut of somebody's model into stages: which parameter belongs to which. Needs torch alone."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from numbers import Integral
from typing import Any

from torch import nn

from brx.errors import UserError, some

Stages = int | Mapping[str, int] | Callable[[str], int]

LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass(frozen=True)
class Part:
    """A block or a layer, which is never divided."""

    path: str  # its name in the model
    parameters: tuple[str, ...]  # their names


def check_stages(model: nn.Module, trained: Sequence[str], stages: Stages) -> None:
    """UserError for stages that the model cannot have; see `cut`."""
    if isinstance(stages, bool) or (not isinstance(stages, int | Mapping) and not callable(stages)):
        raise UserError(
            f"delayed: stages must be a number, a mapping or a function of parameter names, got "
            f"{stages!r}"
        )
    if isinstance(stages, int):
        parts_for(model, stages)
    else:
        cut(model, trained, stages, {})


def is_known_before_use(stages: Stages) -> bool:
    """Whether the order of use has no say in the cut."""
    return not isinstance(stages, int) or stages == 1


def cut(
    model: nn.Module, trained: Sequence[str], stages: Stages, positions: Mapping[str, int]
) -> list[list[str]]:
    """The names of each stage's parameters, of those that train; UserError for one without a stage.

    Args:
        model: whose blocks or layers are not divided.
        trained: the names of the parameters that train.
        stages: their number, which cuts the model's blocks evenly, in the order of their use; or a
            mapping from names or their beginnings; or a function of the name.
        positions: by name of each parameter, its place in the order of use. Only a number needs it.
    """
    stage_of: Callable[[str], Any]
    if isinstance(stages, Mapping):
        _check_beginnings(model, stages)
        stage_of = partial(_by_beginning, stages)
    elif isinstance(stages, int):
        stage_of = _evenly(model, stages, positions)
    else:
        stage_of = stages
    found: dict[str, Any] = {name: stage_of(name) for name in trained}
    wrong = [name for name, stage in found.items() if not _is_stage(stage)]
    if wrong:
        raise UserError(
            f"delayed: stages: {some(wrong)} assigned to no stage; each needs a whole number from "
            f"0, as stages={_example(model)}"
        )
    count = stages if isinstance(stages, int) else 1 + max(found.values())
    by_stage: list[list[str]] = [[] for _ in range(count)]
    for name in trained:
        by_stage[found[name]].append(name)
    return by_stage


def _is_stage(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0


def stage_map(by_stage: Sequence[Sequence[str]]) -> dict[str, int]:
    """The shortest beginnings of names that say each parameter's stage; `delayed(stages=...)` takes
    them."""
    stage_of: dict[str, int] = {}
    for stage, names in enumerate(by_stage):
        for name in names:
            stage_of[name] = stage
    stages_below: dict[str, set[int]] = {}
    for name, stage in stage_of.items():
        for beginning in _beginnings(name):
            stages_below.setdefault(beginning, set()).add(stage)
    found: dict[str, int] = {}
    for name, stage in stage_of.items():
        alone = [each for each in _beginnings(name) if len(stages_below[each]) == 1]
        found[alone[0]] = stage
    return found


def _beginnings(name: str) -> list[str]:
    """`a`, `a.b` and `a.b.c` of `a.b.c`."""
    words = name.split(".")
    return [".".join(words[: count + 1]) for count in range(len(words))]


def _check_beginnings(model: nn.Module, stages: Mapping[str, int]) -> None:
    every = [name for name, _ in model.named_parameters(remove_duplicate=False)]  # a tied head, too
    unknown = []
    for key in stages:
        if not any(f"{name}.".startswith(f"{key}.") for name in every):
            unknown.append(key)
    if unknown:
        raise UserError(
            f"delayed: stages: no parameter's name is or begins with {', '.join(unknown)}; names "
            f"are as in stages={_example(model)}"
        )


def _by_beginning(stages: Mapping[str, int], name: str) -> int | None:
    """The stage of the longest beginning of a name that the mapping has; None if it has none."""
    beginnings = [key for key in stages if f"{name}.".startswith(f"{key}.")]
    return stages[max(beginnings, key=len)] if beginnings else None


def _example(model: nn.Module) -> str:
    """A mapping with names of this model, to follow."""
    parts = _layers(model)
    chosen = [parts[0], parts[len(parts) // 2], parts[-1]] if len(parts) > 2 else parts
    stages: dict[str, int] = {}
    for part in chosen:
        stages.setdefault(part.path or part.parameters[0], len(stages))
    return "{" + ", ".join(f"{path!r}: {stage}" for path, stage in stages.items()) + ", ...}"


def _evenly(
    model: nn.Module, num_stages: int, positions: Mapping[str, int]
) -> Callable[[str], int]:
    """The stage by name, when the parts are cut evenly in the order of their use."""
    parts = parts_for(model, num_stages)
    tied = _tied_names(model)
    starts: list[tuple[int, Part]] = []
    for part in parts:
        own = [name for name in part.parameters if name not in tied] or part.parameters
        starts.append((min(positions[name] for name in own), part))
    starts.sort(key=lambda start: start[0])
    # Part i of n is in stage k where k n // P <= i < (k + 1) n // P, as in brx's own partition.
    bounds = [(stage + 1) * len(parts) // num_stages for stage in range(num_stages)]
    stage_of_part = [
        next(stage for stage, bound in enumerate(bounds) if index < bound)
        for index in range(len(parts))
    ]
    stage_of: dict[str, int] = {}
    for (_, part), stage in zip(starts, stage_of_part, strict=True):
        for name in part.parameters:
            if name not in tied:
                stage_of[name] = stage
    # What belongs to no part, or to several, goes with the part that has begun when it is used.
    for name, position in positions.items():
        begun = [index for index, (start, _) in enumerate(starts) if start <= position]
        stage_of.setdefault(name, stage_of_part[begun[-1]] if begun else 0)
    return stage_of.__getitem__


def parts_for(model: nn.Module, num_stages: int) -> list[Part]:
    """What a number of stages divides, in the order of definition: runs of like blocks (lists of
    modules that have modules themselves); where these are too few, all runs of like modules; then
    all layers. UserError where even these are too few."""
    runs = _runs(model)
    structured = [run for run in runs if any(True for _ in run[0].children())]
    for chosen in (structured, runs):
        blocks = list(chain.from_iterable(chosen))
        if 1 <= num_stages <= len(blocks):
            return _parts_of(model, blocks)
    layers = _layers(model)
    if not 1 <= num_stages <= max(1, len(layers)):
        raise UserError(
            f"delayed: stages must be from 1 to {max(1, len(layers))}, the model's layers, got "
            f"{num_stages}; or give a mapping from parameter names to stages, as "
            f"stages={_example(model)}"
        )
    return layers


def _runs(model: nn.Module) -> list[list[nn.Module]]:
    """The longest run of like modules of each list (`ModuleList`, `Sequential`, `ModuleDict`), but
    of lists within such modules (heads or experts of a block)."""
    runs: list[list[nn.Module]] = []
    inner: set[nn.Module] = set()
    for container in model.modules():
        if container in inner or not isinstance(container, LISTS):
            continue
        longest: list[nn.Module] = []
        run: list[nn.Module] = []
        for child in container.children():
            if next(child.parameters(), None) is None:  # an activation between two blocks
                continue
            if run and _kind(child) != _kind(run[0]):
                run = []
            run = [*run, child]
            longest = max(longest, run, key=len)
        if len(longest) > 1:
            runs.append(longest)
            for block in longest:
                inner |= set(block.modules())
    return runs


def _kind(block: nn.Module) -> object:
    """What like blocks have in common: their class, and what is in one that is a mere list."""
    return [type(module) for module in block.modules()] if isinstance(block, LISTS) else type(block)


def _parts_of(model: nn.Module, blocks: Sequence[nn.Module]) -> list[Part]:
    paths = {module: path for path, module in model.named_modules()}
    names = _names(model)
    parts = []
    for block in blocks:
        own = {names[id(parameter)]: None for parameter in block.parameters()}
        parts.append(Part(paths[block], tuple(own)))
    return parts


def _layers(model: nn.Module) -> list[Part]:
    """The modules that have parameters of their own, each with these; a parameter of the model
    itself is in none unless nothing else is."""
    names = _names(model)
    parts: list[Part] = []
    taken: set[str] = set()
    for path, module in model.named_modules():
        own = [names[id(p)] for p in module.parameters(recurse=False) if names[id(p)] not in taken]
        if own and path:
            parts.append(Part(path, tuple(own)))
            taken.update(own)
    return parts or [Part("", tuple(names.values()))]


def _names(model: nn.Module) -> dict[int, str]:
    return {id(parameter): name for name, parameter in model.named_parameters()}


def tied_places(model: nn.Module) -> dict[str, list[str]]:
    """By name of each parameter that several modules hold: all its names. A module that is itself
    reached by several names (as wrappers do) holds it once."""
    names = _names(model)
    places: dict[str, list[str]] = {}
    for path, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                place = f"{path}.{attribute}" if path else attribute
                places.setdefault(names[id(parameter)], []).append(place)
    return {name: found for name, found in places.items() if len(found) > 1}


def _tied_names(model: nn.Module) -> set[str]:
    return set(tied_places(model))


def trained_names(model: nn.Module, optimized: Sequence[Any]) -> list[str]:
    """The names of the parameters that optimizers train; UserError for what is not the model's."""
    named = dict(model.named_parameters())
    given = {id(p) for p in optimized if p.is_floating_point() or p.is_complex()}  # no integers
    trained = [name for name, parameter in named.items() if id(parameter) in given]
    if len(trained) < len(given):
        raise UserError(
            "delayed: the optimizer trains parameters that are not the model's; make it of its "
            "parameters"
        )
    if not trained:
        raise UserError("delayed: the optimizer trains no parameter of the model")
    return trained
