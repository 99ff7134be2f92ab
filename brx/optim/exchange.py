"""The two exchanges of a step with sharded matrices: gradients to the owners, updates back.

Each is one all-to-all, in which a rank sends or receives as much as its own shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor

from .dtensor import local
from .shards import Shards, distribute, exchange
from .step_member import StepMember

T = TypeVar("T")


def gather_gradients(members: Sequence[StepMember]) -> None:
    """Replace sharded gradients: each owner gets the whole gradient, other ranks get None."""
    for alike, shards in _by_mesh_and_dtype(members):
        parts = [local(_present(member.gradient)) for member in alike]
        group = shards[0].group
        rank = dist.get_rank(group)
        outgoing = []
        for each, part in zip(shards, parts, strict=True):
            if each.sends(rank):
                outgoing.append((each.owner, part))
        expected = []
        for each in shards:
            if each.is_owner:
                expected += [(source, each.size(source)) for source in each.senders()]
        pieces = iter(exchange(outgoing, expected, parts[0], group))
        for member, each in zip(alike, shards, strict=True):
            member.gradient = _assembled(each, pieces, parts[0]) if each.is_owner else None


def _assembled(shards: Shards, pieces: Iterator[Tensor], like: Tensor) -> Tensor:
    """A whole gradient, from its senders' pieces: the next ones of `pieces`."""
    gradient = like.new_empty(shards.shape)
    for source in shards.senders():
        part = shards.part(gradient, source)
        part.copy_(next(pieces).view(part.shape))
    return gradient


def apply_updates(members: Sequence[StepMember], decay: Callable[[StepMember], Tensor]) -> None:
    """W <- decay W + update on this rank's shards, with the updates that the owners computed."""
    for alike, shards in _by_mesh_and_dtype(members):
        like = local(alike[0].parameter).new_empty(0, dtype=decay(alike[0]).dtype)
        updates = distribute(shards, [member.update for member in alike], like)
        for member, update in zip(alike, updates, strict=True):
            weight = local(member.parameter)
            # Half-precision weights are rounded once, after the sum.
            exact = weight.to(update.dtype, copy=True)
            exact.mul_(decay(member)).add_(update.view(weight.shape))
            weight.copy_(exact)


def _by_mesh_and_dtype(
    members: Sequence[StepMember],
) -> Iterator[tuple[list[StepMember], list[Shards]]]:
    """Members that one exchange can take, and their shards."""
    alike: dict[object, list[StepMember]] = {}
    for member in members:
        key = _present(member.shards).group, member.parameter.dtype
        alike.setdefault(key, []).append(member)
    for together in alike.values():
        yield together, [_present(member.shards) for member in together]


def _present(value: T | None) -> T:
    assert value is not None
    return value
