"""Finds the order in which a model uses its parameters, from its first passes. Needs torch alone.

Two things show it. The graph of a forward pass has a node for each operation, with a number that
grows in the order of execution; a parameter's first use is the node of the lowest number that takes
it. Where the graph hides parameters (reentrant activation checkpointing, autograd functions of the
user's own, parts of a model that are called by themselves), their gradients arrive in the opposite
order of their first uses.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from brx.errors import UserError
from brx.pipeline.hooks import tensors_with_gradient


class UseOrder:
    """Collects what the first passes show of the parameters with the given names."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        # By name, its first use in a graph: number of the node, place among the node's inputs.
        self._in_graph: dict[str, tuple[int, int]] = {}
        self._arrived: list[str] = []  # names, in the order in which first gradients arrived

    def see_output(self, model: nn.Module, tensors: Sequence[Tensor]) -> None:
        """Read the graph of a forward pass that has just ended.

        Args:
            model: it made the pass.
            tensors: those tensors of its output that a backward pass may begin at.
        """
        names = self._names | _unsharded_names(model, self._names)
        for position, variable in _uses(tensors):
            name = names.get(id(variable))
            if name is not None:
                self._in_graph[name] = min(position, self._in_graph.get(name, position))

    def see_gradient(self, name: str) -> None:
        """Note that a parameter's gradient has arrived in a backward pass."""
        if name not in self._arrived:
            self._arrived.append(name)

    def is_known(self, names: Iterable[str]) -> bool:
        """Whether a pass has shown these parameters: its whole graph, or a backward pass."""
        return bool(self._arrived) or all(name in self._in_graph for name in names)

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been seen yet."""
        return not self._in_graph and not self._arrived

    def positions(self) -> dict[str, int]:
        """Each parameter's place in the order of use, from 0, by name. A parameter that was not
        seen comes right after the one defined before it."""
        if set(self._arrived) <= self._in_graph.keys():
            seen = sorted(self._in_graph, key=lambda name: self._in_graph[name])
        else:
            # A gradient arrived at a parameter that the graphs hide, so they are not complete.
            seen = self._arrived[::-1]
        rank = {name: index for index, name in enumerate(seen)}
        # Sort keys: the rank of the parameter seen last, and behind it the unseen ones in turn.
        keys: dict[str, tuple[int, int]] = {}
        latest = -1
        for index, name in enumerate(self._names.values()):
            is_seen = name in rank
            latest = rank.get(name, latest)
            keys[name] = (latest, -1 if is_seen else index)
        in_order = sorted(keys, key=lambda name: keys[name])
        return {name: index for index, name in enumerate(in_order)}


def _uses(tensors: Sequence[Tensor]) -> Iterator[tuple[tuple[int, int], Tensor]]:
    """Each use of a leaf in the graph behind some tensors: the number of the node that takes it and
    its place among that node's inputs, and the leaf."""
    waiting = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        number = node._sequence_nr()
        for position, (source, _) in enumerate(node.next_functions):
            if source is None:
                continue
            variable = getattr(source, "variable", None)
            if variable is not None:
                yield (number, position), variable
            elif source not in seen:
                seen.add(source)
                waiting.append(source)


def _unsharded_names(model: nn.Module, names: dict[int, str]) -> dict[int, str]:
    """By id of the whole parameters that FSDP2 computes with: the names of the sharded ones."""
    name_by_id: dict[int, str] = {}
    for module in model.modules():
        get_state = getattr(module, "_get_fsdp_state", None)
        group = getattr(get_state(), "_fsdp_param_group", None) if get_state else None
        for kept in getattr(group, "fsdp_params", []):
            name = names.get(id(kept.sharded_param))
            whole = getattr(kept, "_unsharded_param", None)
            if name is not None and whole is not None:
                name_by_id[id(whole)] = name
    return name_by_id


def on_meta_device(model: nn.Module, example: Any) -> UseOrder:
    """The order of use in a forward pass of a copy of the model on the meta device, which computes
    only shapes.

    Args:
        model: it stays as it is.
        example: the inputs, as a tuple, a dictionary (keyword arguments) or a single value. Only
            their shapes and data types count.

    Raises:
        UserError: the model does not run on the meta device.
    """
    named = dict(model.named_parameters())
    # `deepcopy` takes what its memo has, so no parameter or buffer is copied with its contents.
    memo: dict[int, Any] = {}
    copies: dict[str, Tensor] = {}
    for name, parameter in named.items():
        copies[name] = nn.Parameter(
            torch.empty_like(parameter, device="meta"), requires_grad=parameter.is_floating_point()
        )
        memo[id(parameter)] = copies[name]
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    order = UseOrder(copies)
    try:
        twin = copy.deepcopy(model, memo)
        args, kwargs = _arguments(torch.utils._pytree.tree_map_only(Tensor, _to_meta, example))
        with torch.enable_grad():
            order.see_output(twin, tensors_with_gradient(twin(*args, **kwargs)))
    except Exception as error:
        reason = str(error).split("\n")[0]
        raise UserError(
            f"delayed: example: the model does not run on the meta device ({reason}); leave it out,"
            " or give stages as a mapping"
        ) from error
    return order


def _to_meta(tensor: Tensor) -> Tensor:
    return tensor.detach().to("meta")


def _arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example, dict):
        return (), example
    return (example if isinstance(example, tuple) else (example,)), {}
