"""Sharded matrices (DTensor: FSDP2, tensor parallelism): each is updated, whole, by one rank of its mesh, the owner.

A step sends every gradient's shards to the owner, and the shards of the update back: two all-to-all exchanges, each of
the size of this rank's shards. So refreshes and rotations are shared among the ranks, and every matrix is updated as on
one device. The owner keeps the state; in a state dict it is sharded by rows, so that tools for DTensor can save it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from brx.optim.matrix_batch import Member

T = TypeVar("T")

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Where a shard lies: its shape, and its offset in the whole tensor."""


def is_sharded(tensor: Any) -> bool:
    """Whether it is a DTensor. Their package is not imported for it: where it is not, there are none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """The part that lies on this rank; sharing its memory."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def whole(tensor: Any) -> Any:
    """All of it, on every rank (all of which have to ask)."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def like_parameter(tensor: Tensor, parameter: Any) -> Tensor:
    """The tensor (a gradient, a whole state), sharded as the parameter is."""
    if not is_sharded(parameter):
        return tensor
    if not is_sharded(tensor):
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(tensor, parameter.device_mesh, parameter.placements)
    if tensor.placements == parameter.placements:  # type: ignore[attr-defined]
        return tensor
    return tensor.redistribute(placements=parameter.placements)  # type: ignore[attr-defined, no-any-return]


@dataclass(frozen=True, eq=False)
class Shards:
    """Where the shards of one tensor are."""

    group: dist.ProcessGroup  # the ranks of its mesh
    boxes: list[Box]  # by rank in the group
    owner: int  # the rank in the group that has, or takes, the whole tensor

    @property
    def is_owner(self) -> bool:
        """Whether this rank is."""
        return self.owner == dist.get_rank(self.group)

    def sends(self, rank: int) -> bool:
        """Whether the owner takes this rank's shard; of equal ones (replicas) it takes the first."""
        return self.boxes.index(self.boxes[rank]) == rank

    def part(self, tensor: Tensor, rank: int) -> Tensor:
        """A rank's shard of a whole tensor; a view."""
        shape, offset = self.boxes[rank]
        return tensor[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))]

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

    def add(self, parameters: Iterable[Tensor]) -> None:
        """Share new parameters among the ranks, the most expensive ones first, so that all have about equal work."""
        new = [parameter for parameter in parameters if parameter not in self._shards]
        boxes = {parameter: self._boxes(parameter) for parameter in new}
        for parameter in sorted(new, key=rotation_cost, reverse=True):
            mesh = parameter.device_mesh  # type: ignore[attr-defined]
            loads = self._loads.setdefault(mesh, [0] * mesh.size())
            owner = loads.index(min(loads))
            loads[owner] += rotation_cost(parameter)
            self._shards[parameter] = Shards(self._group(mesh, parameter.device), boxes[parameter], owner)

    def agree(self, parameters: Iterable[Any], flags: dict[torch.device, Tensor]) -> None:
        """Set the flag () of a device on all ranks of the parameters' meshes where it is set on any."""
        for mesh, device in dict.fromkeys((p.device_mesh, p.device) for p in parameters):  # everywhere in this order
            count = flags[device].int()
            dist.all_reduce(count, group=self._group(mesh, device))
            flags[device] = count > 0

    def _boxes(self, parameter: Any) -> list[Box]:
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        mesh, placements = parameter.device_mesh, parameter.placements
        shape, offset = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
        mine: Box = tuple(map(int, shape)), tuple(map(int, offset))
        group = self._group(mesh, parameter.device)
        boxes: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(boxes, mine, group=group)
        return boxes

    def _group(self, mesh: Any, device: torch.device) -> dist.ProcessGroup:
        """The process group of all ranks of a mesh, for tensors of a device: the CPU where FSDP2 offloads to it."""
        if (mesh, device.type) not in self._groups:
            ranks = sorted(mesh.mesh.flatten().tolist())
            if mesh.ndim == 1:
                group = mesh.get_group()
            elif len(ranks) == dist.get_world_size():
                group = _present(dist.group.WORLD)
            else:
                group = dist.new_group(ranks, use_local_synchronization=True)
            if f"{device.type}:" not in dist.get_backend_config(group):  # NCCL alone takes no tensors of the CPU
                group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
            self._groups[mesh, device.type] = group
        return self._groups[mesh, device.type]


def gather_gradients(members: Sequence[Member]) -> None:
    """Replace gradients that are sharded as their parameters by whole ones at the owner and by none elsewhere."""
    for alike in _by_mesh_and_dtype(members):
        gradients = [local(_present(member.gradient)) for member in alike]
        wholes = collect([_present(member.shards) for member in alike], gradients)
        for member, gradient in zip(alike, wholes, strict=True):
            member.gradient = None if gradient is None else gradient.view(member.parameter.shape)


def apply_updates(members: Sequence[Member], decays: Sequence[Tensor]) -> None:
    """W <- decay W + update, on the shards that lie here, from the updates that the owners computed."""
    decay_of = dict(zip(members, decays, strict=True))
    for alike in _by_mesh_and_dtype(members):
        like = local(alike[0].parameter).new_empty(0, dtype=decay_of[alike[0]].dtype)
        updates = distribute([_present(member.shards) for member in alike], [member.update for member in alike], like)
        for member, update in zip(alike, updates, strict=True):
            weight = local(member.parameter)
            # Half-precision weights are rounded once, after the sum.
            weight.copy_(weight.to(update.dtype, copy=True).mul_(decay_of[member]).add_(update.view(weight.shape)))


def shard_states(
    wanted: Sequence[tuple[Shards, tuple[int, ...], Tensor | None]], mesh: Any, like: Tensor
) -> list[Tensor]:
    """States of parameters of one mesh as DTensors that are sharded by rows; counters () as they are.

    `wanted`: where the parameters are, the shapes of their states, and the states where the owner is; `like`: a tensor
    of their dtype, on this rank's device.
    """
    from torch.distributed.tensor import DTensor, Shard

    rows = []
    for where, shape, _ in wanted:
        ranks = dist.get_process_group_ranks(where.group)
        rows.append(Shards(where.group, [_row_box(shape, mesh, rank) for rank in ranks], where.owner))
    parts = distribute(rows, [state for _, _, state in wanted], like)
    states: list[Tensor] = []
    for (_, shape, _), by_row, part in zip(wanted, rows, parts, strict=True):
        # A copy: the exchange's memory belongs to all of them.
        lies_here = part.clone().view(by_row.boxes[dist.get_rank(by_row.group)][0])
        if shape:
            by_rows, whole_state = [Shard(0)] * mesh.ndim, torch.empty(shape, device="meta")
            size, stride = whole_state.shape, whole_state.stride()
            states.append(DTensor.from_local(lies_here, mesh, by_rows, run_check=False, shape=size, stride=stride))
        else:
            states.append(lies_here)
    return states


def collect(shards: Sequence[Shards], parts: Sequence[Tensor]) -> list[Tensor | None]:
    """The whole tensors (flattened) where their owner is, from every rank's parts; of one process group and dtype."""
    rank, size = _rank_and_size(shards)
    outgoing = [
        [part for part, where in zip(parts, shards, strict=True) if where.owner == owner and where.sends(rank)]
        for owner in range(size)
    ]
    mine = [index for index, where in enumerate(shards) if where.is_owner]
    incoming = [[index for index in mine if shards[index].sends(source)] for source in range(size)]
    sizes = [[shards[index].size(source) for index in indices] for source, indices in enumerate(incoming)]
    pieces = iter(_exchange(outgoing, sizes, parts[0], shards[0].group))
    wholes: list[Tensor | None] = [None] * len(shards)
    for index in mine:
        wholes[index] = parts[0].new_empty(_whole_shape(shards[index]))
    for source, indices in enumerate(incoming):
        for index in indices:
            target = shards[index].part(_present(wholes[index]), source)
            target.copy_(next(pieces).view(target.shape))
    return wholes


def distribute(shards: Sequence[Shards], wholes: Sequence[Tensor | None], like: Tensor) -> list[Tensor]:
    """This rank's parts (flattened) of tensors of which the owners have the whole; of one process group and dtype."""
    rank, size = _rank_and_size(shards)
    outgoing = [
        [where.part(tensor, target) for tensor, where in zip(wholes, shards, strict=True) if tensor is not None]
        for target in range(size)
    ]
    order = [index for owner in range(size) for index, where in enumerate(shards) if where.owner == owner]
    sizes = [[where.size(rank) for where in shards if where.owner == owner] for owner in range(size)]
    pieces = _exchange(outgoing, sizes, like, shards[0].group)
    parts = dict(zip(order, pieces, strict=True))
    return [parts[index] for index in range(len(shards))]


def _exchange(
    outgoing: list[list[Tensor]], incoming_sizes: list[list[int]], like: Tensor, group: dist.ProcessGroup
) -> Sequence[Tensor]:
    """Send each rank its tensors, flattened; what the ranks sent here, in their order, by the sizes expected."""
    send = torch.cat([like.new_empty(0), *(tensor.reshape(-1) for tensors in outgoing for tensor in tensors)])
    receive = like.new_empty(sum(map(sum, incoming_sizes)))
    input_sizes = [sum(tensor.numel() for tensor in tensors) for tensors in outgoing]
    dist.all_to_all_single(receive, send, [sum(sizes) for sizes in incoming_sizes], input_sizes, group=group)
    return torch.split(receive, [size for sizes in incoming_sizes for size in sizes])


def _rank_and_size(shards: Sequence[Shards]) -> tuple[int, int]:
    return dist.get_rank(shards[0].group), dist.get_world_size(shards[0].group)


def _whole_shape(shards: Shards) -> tuple[int, ...]:
    ends = ([start + size for size, start in zip(*box, strict=True)] for box in shards.boxes)
    return tuple(map(max, zip(*ends, strict=True)))


def _row_box(shape: tuple[int, ...], mesh: Any, rank: int) -> Box:
    """The rows that a rank has when each dimension of the mesh splits them in turn, as `[Shard(0)] * ndim` does."""
    if not shape:
        return (), ()
    start, size = 0, shape[0]
    positions = (mesh.mesh == rank).nonzero()[0].tolist()
    for position, num_parts in zip(positions, mesh.shape, strict=True):
        step = -(-size // num_parts)
        first = min(size, step * position)
        start, size = start + first, min(size, first + step) - first
    return (size, *shape[1:]), (start, *(0 for _ in shape[1:]))


def _by_mesh_and_dtype(members: Sequence[Member]) -> list[list[Member]]:
    """Those that can go through one exchange."""
    alike: dict[Any, list[Member]] = {}
    for member in members:
        alike.setdefault((_present(member.shards).group, member.parameter.dtype), []).append(member)
    return list(alike.values())


def _present(value: T | None) -> T:
    assert value is not None
    return value


def rotation_cost(matrices: Tensor) -> int:
    """Multiply-adds of a rotation of both sides of (*, m, n); the order of sizes is what matters."""
    rows, columns = matrices.shape[-2:]
    return matrices.numel() * (rows + columns)
