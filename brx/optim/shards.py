"""Where the shards of a matrix lie (DTensor: FSDP2, tensor parallelism), and which rank updates it.

One rank of its mesh, the owner, updates the whole matrix and keeps its state. In a state dict the
state is sharded by rows, as tools for DTensors expect."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .dtensor import local

# A shard's shape, and its offset in the whole tensor.
Box = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, eq=False)
class Shards:
    """One sharded matrix.

    Attributes:
        shape: the shape of the whole matrix.
        group: the ranks of its mesh.
        boxes: the place of each rank's shard, by rank in the group.
        owner: the rank in the group that updates the matrix.
    """

    shape: tuple[int, ...]
    group: dist.ProcessGroup
    boxes: list[Box]
    owner: int

    @property
    def is_owner(self) -> bool:
        return self.owner == dist.get_rank(self.group)

    def sends(self, rank: int) -> bool:
        """Whether a rank sends its shard to the owner: of replicas, only the first does."""
        return self.boxes.index(self.boxes[rank]) == rank

    def senders(self) -> list[int]:
        return [rank for rank in range(len(self.boxes)) if self.sends(rank)]

    def part(self, tensor: Tensor, rank: int) -> Tensor:
        """A rank's shard of a whole tensor; a view."""
        shape, offset = self.boxes[rank]
        place = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
        return tensor[place]

    def size(self, rank: int) -> int:
        """The number of elements of a rank's shard."""
        shape, _ = self.boxes[rank]
        return math.prod(shape)


class Sharding:
    """Decides which rank updates each sharded matrix.

    All ranks must add the same matrices in the same order.
    """

    def __init__(self) -> None:
        self.of: dict[Tensor, Shards] = {}
        self._groups: dict[Any, dist.ProcessGroup] = {}
        self._loads: dict[Any, list[int]] = {}  # by mesh, the cost of each rank's matrices

    def assign_owners(self, parameters: Iterable[Tensor]) -> None:
        """Divide new parameters among the ranks, the most expensive first, so that all ranks have
        about equal work."""
        new = [parameter for parameter in parameters if parameter not in self.of]
        for parameter in sorted(new, key=rotation_cost, reverse=True):
            mesh = parameter.device_mesh  # type: ignore[attr-defined]
            loads = self._loads.setdefault(mesh, [0] * mesh.size())
            owner = loads.index(min(loads))
            loads[owner] += rotation_cost(parameter)
            group = self._group(mesh, parameter.device)
            boxes = _boxes(parameter.shape, mesh, parameter.placements, group)  # type: ignore[attr-defined]
            self.of[parameter] = Shards(tuple(parameter.shape), group, boxes, owner)

    def agree(self, parameters: Iterable[Any], flags: dict[torch.device, Tensor]) -> None:
        """Make ranks agree: a device's flag () in `flags` becomes set on all ranks of the
        parameters' meshes if it is set on any."""
        # A dict, unlike a set, has the same order on all ranks.
        meshes = dict.fromkeys((p.device_mesh, p.device) for p in parameters)
        for mesh, device in meshes:
            count = flags[device].int()
            dist.all_reduce(count, group=self._group(mesh, device))
            flags[device] = count > 0

    def _group(self, mesh: Any, device: torch.device) -> dist.ProcessGroup:
        """The process group of all ranks of a mesh, for tensors of a device. With FSDP2's offload
        that is the CPU."""
        key = mesh, device.type
        if key in self._groups:
            return self._groups[key]
        ranks = sorted(mesh.mesh.flatten().tolist())
        group = mesh.get_group() if mesh.ndim == 1 else dist.group.WORLD
        assert group is not None
        if len(ranks) != dist.get_world_size(group):  # the mesh is a part of a larger job
            group = dist.new_group(ranks, use_local_synchronization=True)
        # NCCL does not take tensors of the CPU.
        if f"{device.type}:" not in dist.get_backend_config(group):
            group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        self._groups[key] = group
        return group


def _boxes(
    shape: Sequence[int], mesh: Any, placements: Sequence[Any], group: dist.ProcessGroup
) -> list[Box]:
    """Where each rank's shard lies, by rank in the group."""
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

    boxes = []
    for rank in dist.get_process_group_ranks(group):
        coordinates = (mesh.mesh == rank).nonzero()[0].tolist()
        boxes.append(
            _compute_local_shape_and_global_offset(
                tuple(shape), mesh.shape, coordinates, placements
            )
        )
    return boxes


def as_rows(
    parameter: Any,
    shards: Shards,
    state: Tensor,  # has the given shape at the owner; ignored on other ranks
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> Tensor:
    """A state that the owner holds whole, as a DTensor that is sharded by rows; a counter () as a
    plain tensor."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = parameter.device_mesh
    by_rows: list[Any] = [Shard(0) if shape else Replicate()] * mesh.ndim
    boxes = _boxes(shape, mesh, by_rows, shards.group)
    rows = Shards(shape, shards.group, boxes, shards.owner)
    like = local(parameter).new_empty(0, dtype=dtype)
    (part,) = distribute([rows], [state if shards.is_owner else None], like)
    part_shape, _ = rows.boxes[dist.get_rank(shards.group)]
    part = part.view(part_shape)
    if not shape:
        return part
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        part, mesh, by_rows, run_check=False, shape=torch.Size(shape), stride=stride
    )


def distribute(
    shards: Sequence[Shards],  # all in one process group
    wholes: Sequence[Tensor | None],  # one for each: the whole tensor at its owner, else None
    like: Tensor,  # has the dtype and device of all
) -> list[Tensor]:
    """This rank's flattened parts of tensors that their owners hold whole."""
    group = shards[0].group
    rank = dist.get_rank(group)
    outgoing = []
    for each, tensor in zip(shards, wholes, strict=True):
        if tensor is not None:
            for target in range(dist.get_world_size(group)):
                outgoing.append((target, each.part(tensor, target)))
    expected = [(each.owner, each.size(rank)) for each in shards]
    return exchange(outgoing, expected, like, group)


def exchange(
    outgoing: Sequence[tuple[int, Tensor]],  # target rank, and what it gets
    expected: Sequence[tuple[int, int]],  # source rank, and the number of elements from there
    like: Tensor,
    group: dist.ProcessGroup,
) -> list[Tensor]:
    """Send flattened tensors to other ranks, and return the received ones in the order of
    `expected`.

    What a rank sends to another one must have the order in which that one expects it.
    """
    ranks = range(dist.get_world_size(group))
    flat = [like.new_empty(0)]
    num_sent = []
    for rank in ranks:
        to_rank = [tensor.reshape(-1) for target, tensor in outgoing if target == rank]
        flat += to_rank
        num_sent.append(sum(tensor.numel() for tensor in to_rank))
    num_received = [0] * len(ranks)  # by source
    for source, size in expected:
        num_received[source] += size
    receive = like.new_empty(sum(num_received))
    dist.all_to_all_single(receive, torch.cat(flat), num_received, num_sent, group=group)
    # Pieces come ordered by source. The sort is stable: pieces of one source keep their order.
    by_source = sorted(range(len(expected)), key=lambda index: expected[index][0])
    pieces = torch.split(receive, [expected[index][1] for index in by_source])
    piece_by_index = dict(zip(by_source, pieces, strict=True))
    return [piece_by_index[index] for index in range(len(expected))]


def rotation_cost(matrices: Tensor) -> int:
    """The multiply-adds that it takes to rotate both sides of matrices (*, m, n), for comparing
    costs."""
    return matrices.numel() * sum(matrices.shape[-2:])
