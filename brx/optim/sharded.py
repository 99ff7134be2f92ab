"""Sharded matrices (DTensor: FSDP2, tensor parallelism): each is updated, whole, by one rank of its mesh.

A step sends every gradient's shards to the rank that updates the matrix, and the shards of the update back: two
all-to-all exchanges, each of the size of this rank's shards. Refreshes and rotations are shared among the ranks.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from brx.optim.matrix_batch import Member

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Where a shard lies: its shape, and its offset in the whole tensor."""


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor. Their package is not imported for it: where it is not, there are none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """The part that lies on this rank; sharing its memory."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


@dataclass(frozen=True, eq=False)
class Shards:
    """Where the shards of one parameter are.

    Attributes:
        group: the ranks of its mesh.
        boxes: by rank in the group.
        owner: the rank in the group that updates the matrix.
    """

    group: dist.ProcessGroup
    boxes: list[Box]
    owner: int

    @property
    def is_owner(self) -> bool:
        """Whether this rank updates the matrix."""
        return self.owner == dist.get_rank(self.group)

    def sends(self, rank: int) -> bool:
        """Whether the owner takes this rank's shard; of equal ones (replicas) it takes the first."""
        return self.boxes.index(self.boxes[rank]) == rank

    def part(self, whole: Tensor, rank: int) -> Tensor:
        """A rank's shard of a whole tensor; a view."""
        shape, offset = self.boxes[rank]
        return whole[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))]

    def size(self, rank: int) -> int:
        """Number of entries of a rank's shard."""
        return math.prod(self.boxes[rank][0])


class Sharding:
    """Finds out where shards are, and shares the matrices among the ranks.

    Every rank has to ask for the same parameters in the same order.
    """

    def __init__(self) -> None:
        self._shards: dict[Tensor, Shards] = {}
        self._groups: dict[Any, dist.ProcessGroup] = {}
        self._loads: dict[Any, list[int]] = {}

    def of(self, parameter: Tensor) -> Shards:
        """Where the shards of a parameter are, and who updates it; it stays so."""
        return self._shards[parameter]

    def add(self, parameters: Sequence[Tensor]) -> None:
        """Share new parameters among the ranks, the most expensive ones first, so that all have about equal work."""
        new = [parameter for parameter in parameters if parameter not in self._shards]
        boxes = {parameter: self._boxes(parameter) for parameter in new}
        for parameter in sorted(new, key=_cost, reverse=True):
            mesh = parameter.device_mesh  # type: ignore[attr-defined]
            loads = self._loads.setdefault(mesh, [0] * mesh.size())
            owner = loads.index(min(loads))
            loads[owner] += _cost(parameter)
            self._shards[parameter] = Shards(self._group(mesh), boxes[parameter], owner)

    def agree(self, mesh: Any, flags: dict[torch.device, Tensor]) -> None:
        """Let a flag () be set on all ranks of a mesh where it is set on any."""
        for device, flag in flags.items():
            if device.type == mesh.device_type:
                count = flag.int()
                dist.all_reduce(count, group=self._group(mesh))
                flags[device] = count > 0

    def _boxes(self, parameter: Any) -> list[Box]:
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        mesh, placements = parameter.device_mesh, parameter.placements
        shape, offset = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
        mine: Box = tuple(map(int, shape)), tuple(map(int, offset))
        group = self._group(mesh)
        boxes: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(boxes, mine, group=group)
        return boxes

    def _group(self, mesh: Any) -> dist.ProcessGroup:
        """The process group of all ranks of a mesh."""
        if mesh not in self._groups:
            ranks = sorted(mesh.mesh.flatten().tolist())
            if mesh.ndim == 1:
                group = mesh.get_group()
            elif len(ranks) == dist.get_world_size():
                group = dist.group.WORLD
            else:
                group = dist.new_group(ranks, use_local_synchronization=True)
            self._groups[mesh] = group
        return self._groups[mesh]


def gather_gradients(members: Sequence[Member]) -> None:
    """Replace the sharded gradients by whole ones where the owner is, and by none elsewhere."""
    for alike in _by_group(members):
        shards = [_shards(member) for member in alike]
        gradients = [local(_like_parameter(member)) for member in alike]
        rank, size = dist.get_rank(shards[0].group), dist.get_world_size(shards[0].group)
        outgoing = [
            [g for g, where in zip(gradients, shards, strict=True) if where.owner == owner and where.sends(rank)]
            for owner in range(size)
        ]
        mine = [member for member, where in zip(alike, shards, strict=True) if where.is_owner]
        incoming = [[(member, source) for member in mine if _shards(member).sends(source)] for source in range(size)]
        pieces = _exchange(outgoing, [[_shards(m).size(s) for m, s in of] for of in incoming], gradients[0], shards[0])
        for member in alike:
            member.gradient = local(member.parameter).new_empty(member.parameter.shape) if member in mine else None
        for (member, source), piece in zip((one for of in incoming for one in of), pieces, strict=True):
            assert member.gradient is not None
            part = _shards(member).part(member.gradient, source)
            part.copy_(piece.view(part.shape))


def apply_updates(members: Sequence[Member], decays: Sequence[Tensor]) -> None:
    """W <- (1 - lr weight_decay) W + update, on the shard that lies here, from the updates that the owners computed.

    Args:
        members: sharded parameters with gradients.
        decays: their factors 1 - lr weight_decay.
    """
    decay_of = dict(zip(members, decays, strict=True))
    for alike in _by_group(members):
        shards = [_shards(member) for member in alike]
        rank, size = dist.get_rank(shards[0].group), dist.get_world_size(shards[0].group)
        outgoing = [
            [where.part(m.update, target) for m, where in zip(alike, shards, strict=True) if m.update is not None]
            for target in range(size)
        ]
        incoming = [[m for m, where in zip(alike, shards, strict=True) if where.owner == o] for o in range(size)]
        like = torch.empty((), dtype=decays[0].dtype, device=local(alike[0].parameter).device)
        pieces = _exchange(outgoing, [[_shards(m).size(rank) for m in of] for of in incoming], like, shards[0])
        for member, piece in zip((one for of in incoming for one in of), pieces, strict=True):
            weight = local(member.parameter)
            # Half-precision weights are rounded once, after the sum.
            weight.copy_(weight.to(piece.dtype).mul_(decay_of[member]).add_(piece.view(weight.shape)))
            member.update = None


def _exchange(
    outgoing: list[list[Tensor]], incoming_sizes: list[list[int]], like: Tensor, shards: Shards
) -> Sequence[Tensor]:
    """Send each rank its tensors, flattened; what the ranks sent here, in their order, by the sizes expected."""
    nothing = like.new_empty(0)
    send = torch.cat([nothing, *(tensor.reshape(-1) for tensors in outgoing for tensor in tensors)])
    receive = like.new_empty(sum(map(sum, incoming_sizes)))
    input_sizes = [sum(tensor.numel() for tensor in tensors) for tensors in outgoing]
    dist.all_to_all_single(receive, send, [sum(sizes) for sizes in incoming_sizes], input_sizes, group=shards.group)
    return torch.split(receive, [size for sizes in incoming_sizes for size in sizes])


def _by_group(members: Sequence[Member]) -> list[list[Member]]:
    """Those that can go through one exchange: of one mesh and dtype."""
    alike: dict[Any, list[Member]] = {}
    for member in members:
        alike.setdefault((_shards(member).group, member.parameter.dtype), []).append(member)
    return list(alike.values())


def _shards(member: Member) -> Shards:
    assert member.shards is not None
    return member.shards


def _like_parameter(member: Member) -> Tensor:
    """The gradient, sharded as the parameter is."""
    gradient: Any = member.gradient
    placements = member.parameter.placements  # type: ignore[attr-defined]
    if gradient.placements != placements:
        gradient = gradient.redistribute(placements=placements)
    return gradient  # type: ignore[no-any-return]


def _cost(parameter: Tensor) -> int:
    """Multiply-adds of a rotation of both sides; the order of sizes is what matters."""
    rows, columns = parameter.shape[-2:]
    return parameter.numel() * (rows + columns)
