"""Cuts a user's model into stages: decides which parameter belongs to which. Needs torch alone."""

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from numbers import Integral
from typing import Any

from torch import nn

from brx.errors import UserError, some

Stages = int | Mapping[str, int] | Callable[[str], int]

LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)  # containers whose children may be blocks


@dataclass(frozen=True)
class Part:
    """A block or a layer, which is never divided."""

    path: str  # its name in the model
    parameters: tuple[str, ...]  # their names; several parts may hold a tied one


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
    """Whether the cut does not depend on the order in which the model uses its parameters."""
    return not isinstance(stages, int) or stages == 1


def cut(
    model: nn.Module, trained: Sequence[str], stages: Stages, positions: Mapping[str, int]
) -> list[list[str]]:
    """Assign each parameter that trains to a stage.

    Args:
        model: the model. Its blocks or layers are never divided.
        trained: the names of the parameters that train.
        stages: the number of stages, which cuts the model's blocks evenly, in the order of their
            use; or a mapping from names or their prefixes to stages; or a function of the name.
        positions: each parameter's place in the order of use, by name. Only a number of stages
            needs it.

    Returns:
        The names of each stage's parameters.

    Raises:
        UserError: a parameter has no stage, or the model cannot have such stages.
    """
    if isinstance(stages, Mapping):
        _check_prefixes(model, stages)
    stage_of = _stage_function(model, stages, positions)
    stage_by_name: dict[str, Any] = {name: stage_of(name) for name in trained}
    wrong = [name for name, stage in stage_by_name.items() if not _is_stage(stage)]
    if wrong:
        raise UserError(
            f"delayed: stages: {some(wrong)} assigned to no stage; each needs a whole number from "
            f"0, as stages={_example(model)}"
        )
    if isinstance(stages, int):
        count = stages
    else:
        # The last stage may be frozen, or a head that is tied to an embedding. It counts in P even
        # so.
        given = given_stages(model, stages, positions)
        count = 1 + max(given.values())
        for name, names in tied_places(model).items():
            if name in stage_by_name:
                stage_by_name[name] = given[name_in_lowest_stage(names, given)]
    by_stage: list[list[str]] = [[] for _ in range(count)]
    for name in trained:
        by_stage[stage_by_name[name]].append(name)
    return by_stage


def given_stages(model: nn.Module, stages: Stages, positions: Mapping[str, int]) -> dict[str, int]:
    """The stages of all names: of parameters that train and that do not, and of tied ones in all
    their places. A stage may consist of names alone that have no versions. The arguments are those
    of `cut`; a name may have no stage."""
    stage_of = _stage_function(model, stages, positions)
    names = [*_names(model).values(), *chain.from_iterable(tied_places(model).values())]
    stage_by_name: dict[str, int] = {}
    for name in dict.fromkeys(names):
        try:
            stage = stage_of(name)
        except Exception:  # a function of the user's own may know only the names that train
            continue
        if _is_stage(stage):
            stage_by_name[name] = stage
    return stage_by_name


def name_in_lowest_stage(names: Iterable[str], given: Mapping[str, int]) -> str:
    """Of all names of a tied parameter, the one with the lowest stage. Stages are in the order of
    the pipeline, so this stage uses the parameter first. `given` is from `given_stages`."""
    return min((name for name in names if name in given), key=given.__getitem__)


def _stage_function(
    model: nn.Module, stages: Stages, positions: Mapping[str, int]
) -> Callable[[str], Any]:
    """A function from a parameter's name to its stage; see `cut`."""
    if isinstance(stages, Mapping):
        return partial(_by_prefix, stages)
    if isinstance(stages, int):
        return _evenly(model, stages, positions)
    return stages


def _is_stage(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0


def stage_map(by_stage: Sequence[Sequence[str]]) -> dict[str, int]:
    """The inverse of `cut`: the stage by the shortest prefixes of names that decide it. The mapping
    may be given to `delayed(stages=...)`."""
    stage_of: dict[str, int] = {}
    for stage, names in enumerate(by_stage):
        for name in names:
            stage_of[name] = stage
    stages_below: dict[str, set[int]] = {}
    for name, stage in stage_of.items():
        for prefix in prefixes_of(name):
            stages_below.setdefault(prefix, set()).add(stage)
    stage_of_prefix: dict[str, int] = {}
    for name, stage in stage_of.items():
        # Prefixes whose parameters are all in this stage; the first one is the shortest.
        decisive = [prefix for prefix in prefixes_of(name) if len(stages_below[prefix]) == 1]
        stage_of_prefix[decisive[0]] = stage
    return stage_of_prefix


def prefixes_of(name: str) -> list[str]:
    """For `a.b.c`: `a`, `a.b` and `a.b.c`."""
    words = name.split(".")
    return [".".join(words[: count + 1]) for count in range(len(words))]


def stage_map_in_order(
    by_stage: Sequence[Sequence[str]], names: Sequence[str]
) -> list[tuple[str, int]]:
    """The prefixes of `stage_map` with their stages, in the order in which the parameters are
    defined.

    Args:
        by_stage: the names of each stage's parameters.
        names: all these names, in the order of definition.
    """
    stage_of_prefix = stage_map(by_stage)
    in_order: dict[str, int] = {}
    for name in names:
        for prefix in prefixes_of(name):
            if prefix in stage_of_prefix:
                in_order.setdefault(prefix, stage_of_prefix[prefix])
    return list(in_order.items())


def _check_prefixes(model: nn.Module, stages: Mapping[str, int]) -> None:
    """UserError for a key that is neither a parameter's name nor the beginning of one."""
    # With duplicates, so that a key may name a tied parameter by any of its names.
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    unknown = []
    for key in stages:
        if not any(f"{name}.".startswith(f"{key}.") for name in names):
            unknown.append(key)
    if unknown:
        raise UserError(
            f"delayed: stages: no parameter's name is or begins with {', '.join(unknown)}; names "
            f"are as in stages={_example(model)}"
        )


def _by_prefix(stages: Mapping[str, int], name: str) -> int | None:
    """The stage of the longest prefix of a name in the mapping; None if it has no prefix of it."""
    prefixes = [key for key in stages if f"{name}.".startswith(f"{key}.")]
    return stages[max(prefixes, key=len)] if prefixes else None


def _example(model: nn.Module) -> str:
    """An example of a mapping with names of this model, for error messages."""
    parts = _layers(model)
    chosen = [parts[0], parts[len(parts) // 2], parts[-1]] if len(parts) > 2 else parts
    stages: dict[str, int] = {}
    for part in chosen:
        stages.setdefault(part.path or part.parameters[0], len(stages))
    return "{" + ", ".join(f"{path!r}: {stage}" for path, stage in stages.items()) + ", ...}"


def _evenly(
    model: nn.Module, num_stages: int, positions: Mapping[str, int]
) -> Callable[[str], int]:
    """A function from names to stages, with the parts cut evenly in the order of their use."""
    parts = parts_for(model, num_stages)
    owned = _owned(parts, tied_places(model), positions)
    first_uses: list[int] = []
    for names in owned:
        if names:
            first_uses.append(min(positions[name] for name in names))
        else:  # all its parameters are another part's: it comes right after the part before it
            first_uses.append(first_uses[-1] if first_uses else 0)
    in_order = sorted(range(len(parts)), key=first_uses.__getitem__)
    # Part i of n is in stage k where k n // P <= i < (k + 1) n // P, as in brx's own partition.
    bounds = [(stage + 1) * len(parts) // num_stages for stage in range(num_stages)]
    stage_of: dict[str, int] = {}
    for place, index in enumerate(in_order):
        for name in owned[index]:
            stage_of[name] = bisect_right(bounds, place)
    # Any other parameter goes to the stage of the part that began last before it is used.
    first_uses.sort()
    for name, position in positions.items():
        num_begun = bisect_right(first_uses, position)
        stage_of.setdefault(name, bisect_right(bounds, num_begun - 1) if num_begun else 0)
    return stage_of.__getitem__


def _owned(
    parts: Sequence[Part], tied: Collection[str], positions: Mapping[str, int]
) -> list[list[str]]:
    """By part, the names of its parameters that no other part uses before it.

    Args:
        parts: in the order of definition.
        tied: the names of the parameters that several modules hold.
        positions: as in `cut`.
    """
    owned = [[name for name in part.parameters if name not in tied] for part in parts]
    shared = [set(part.parameters).intersection(tied) for part in parts]
    begins = [min((positions[name] for name in names), default=None) for names in owned]
    in_order = sorted(positions, key=positions.__getitem__)
    for name in tied:
        users: list[tuple[int, int]] = []  # when a part begins, and its index
        for index, begin in enumerate(begins):
            if name not in shared[index]:
                continue
            position = positions[name]
            if begin is not None and begin < position:
                users.append((begin, index))
            # The part may begin with this parameter. But if parameters that it does not hold are
            # used from there to its `begin`, then this first use is another part's.
            elif begin is None or shared[index].issuperset(in_order[position:begin]):
                users.append((position, index))
        if users:
            _, first = min(users)
            owned[first].append(name)
    return owned


def parts_for(model: nn.Module, num_stages: int) -> list[Part]:
    """The parts of a model that are divided among a number of stages, in the order of definition.

    These are the blocks: runs of like modules in a list that have modules of their own. If they are
    too few, all runs of like modules; then all layers.

    Raises:
        UserError: the model has even fewer layers than that.
    """
    runs = _runs(model)
    structured = [run for run in runs if list(run[0].children())]
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
    """The longest run of like modules in each list (`ModuleList`, `Sequential`, `ModuleDict`). A
    list within a block of such a run, as of its heads or experts, does not count."""
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
    """A key that is equal for like blocks: their class or, if they are mere lists, the classes of
    all modules in them."""
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
    """The modules that hold parameters directly, each with these parameters. A module that holds
    only those of earlier ones does not count (a tied head).

    Parameters of the model itself are in none of them, unless the model has no others."""
    names = _names(model)
    parts: list[Part] = []
    taken: set[str] = set()
    for path, module in model.named_modules():
        own = [names[id(parameter)] for parameter in module.parameters(recurse=False)]
        if path and not taken.issuperset(own):
            parts.append(Part(path, tuple(own)))
            taken.update(own)
    return parts or [Part("", tuple(names.values()))]


def _names(model: nn.Module) -> dict[int, str]:
    return {id(parameter): name for name, parameter in model.named_parameters()}


def tied_places(model: nn.Module) -> dict[str, list[str]]:
    """All names of each parameter that several modules hold, by its first name.

    A module that has several names itself (in a wrapper, for example) counts once."""
    names = _names(model)
    places: dict[str, list[str]] = {}
    for path, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                place = f"{path}.{attribute}" if path else attribute
                places.setdefault(names[id(parameter)], []).append(place)
    return {name: all_names for name, all_names in places.items() if len(all_names) > 1}


def trained_names(model: nn.Module, optimized: Sequence[Any]) -> list[str]:
    """The names of the model's parameters that optimizers train; UserError if the optimizers have
    parameters that are not the model's."""
    named = dict(model.named_parameters())
    # Integer parameters (quantized ones, for example) do not train.
    given = {id(p) for p in optimized if p.is_floating_point() or p.is_complex()}
    trained = [name for name, parameter in named.items() if id(parameter) in given]
    if not trained:
        raise UserError(
            "delayed: the optimizer trains no parameter of the model. It may have copies of them "
            "(master weights), or those from before the model was wrapped or converted; make it of "
            "model.parameters()"
        )
    if len(trained) < len(given):
        raise UserError(
            "delayed: the optimizer trains parameters that are not the model's; give those an "
            "optimizer of their own, or put all modules that it trains into one (nn.ModuleList), "
            "with their passes in `with pipeline.micro_batch():`"
        )
    return trained
