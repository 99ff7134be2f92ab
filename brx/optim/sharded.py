"""Sharded matrices (DTensor: FSDP2, tensor parallelism): each is updated, whole, by one rank of its
mesh, the owner.

A step sends every gradient's shards to the owner, and the shards of the update back: two all-to-all
exchanges, each of the size of this rank's shards. The owner keeps the state; in a state dict it is
sharded by rows, for tools for DTensor."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from brx.optim.matrix_batch import Member

T = TypeVar("T")
Box = tuple[
    tuple[int, ...], tuple[int, ...]
]  # where a shard lies: its shape, and its offset in the whole tensor

FSDP1 = (
    "FSDP1 flattens the parameters of a module (with use_orig_params, too), so that no matrix is "
    "left to rotate; shard "
    "the model with FSDP2 (torch.distributed.fsdp.fully_shard)"
)


def is_sharded(tensor: Any) -> bool:
    """Whether it is a DTensor. Their package is not imported for it: where it is not, there are
    none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def whole(tensor: Any) -> Any:
    """All of it, on every rank (all of which have to ask)."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def like_parameter(tensor: Any, parameter: Any) -> Any:
    """The tensor (a gradient, a whole state), sharded as the parameter is."""
    if is_sharded(parameter) and not is_sharded(tensor):
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(tensor, parameter.device_mesh, parameter.placements)
    if is_sharded(parameter) and tensor.placements != parameter.placements:
        return tensor.redistribute(placements=parameter.placements)
    return tensor


@dataclass(frozen=True, eq=False)
class Shards:
    shape: tuple[int, ...]  # of the whole
    group: dist.ProcessGroup  # the ranks of its mesh
    boxes: list[Box]  # by rank in the group
    owner: int  # the rank in the group that has, or takes, the whole tensor

    @property
    def is_owner(self) -> bool:
        return self.owner == dist.get_rank(self.group)

    def sends(self, rank: int) -> bool:
        return (
            self.boxes.index(self.boxes[rank]) == rank
        )  # of equal shards (replicas) the owner takes the first

    def part(self, tensor: Tensor, rank: int) -> Tensor:
        """A rank's shard of a whole tensor; a view."""
        shape, offset = self.boxes[rank]
        return tensor[
            tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
        ]

    def size(self, rank: int) -> int:
        return math.prod(self.boxes[rank][0])


class Sharding:
    """Where shards are, and who updates which matrix; every rank has to ask for the same ones in
    the same order."""

    def __init__(self) -> None:
        self.of: dict[Tensor, Shards] = {}
        self._groups: dict[Any, dist.ProcessGroup] = {}
        self._loads: dict[Any, list[int]] = {}

    def add(self, parameters: Iterable[Tensor]) -> None:
        """Share new parameters among the ranks, the most expensive ones first, so that all have
        about equal work."""
        new = [parameter for parameter in parameters if parameter not in self.of]
        for parameter in sorted(new, key=rotation_cost, reverse=True):
            mesh = parameter.device_mesh  # type: ignore[attr-defined]
            loads = self._loads.setdefault(mesh, [0] * mesh.size())
            owner = loads.index(min(loads))  # the rank with the least work so far
            loads[owner] += rotation_cost(parameter)
            group = self._group(mesh, parameter.device)
            boxes = _boxes(parameter.shape, mesh, parameter.placements, group)  # type: ignore[attr-defined]
            self.of[parameter] = Shards(tuple(parameter.shape), group, boxes, owner)

    def agree(self, parameters: Iterable[Any], flags: dict[torch.device, Tensor]) -> None:
        """Set the flag () of a device on all ranks of the parameters' meshes where it is set on
        any."""
        for mesh, device in dict.fromkeys(
            (p.device_mesh, p.device) for p in parameters
        ):  # everywhere in this order
            count = flags[device].int()
            dist.all_reduce(count, group=self._group(mesh, device))
            flags[device] = count > 0

    def _group(self, mesh: Any, device: torch.device) -> dist.ProcessGroup:
        """The process group of all ranks of a mesh, for tensors of a device: the CPU where FSDP2
        offloads to it."""
        if (mesh, device.type) not in self._groups:
            ranks = sorted(mesh.mesh.flatten().tolist())
            group = mesh.get_group() if mesh.ndim == 1 else _present(dist.group.WORLD)
            if len(ranks) != dist.get_world_size(group):  # one part of a larger job
                group = dist.new_group(ranks, use_local_synchronization=True)
            if f"{device.type}:" not in dist.get_backend_config(
                group
            ):  # NCCL alone takes no tensors of the CPU
                group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
            self._groups[mesh, device.type] = group
        return self._groups[mesh, device.type]


def _boxes(
    shape: Sequence[int], mesh: Any, placements: Sequence[Any], group: dist.ProcessGroup
) -> list[Box]:
    """Where each rank's shard lies, by rank in the group."""
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

    coordinates = [
        (mesh.mesh == rank).nonzero()[0].tolist() for rank in dist.get_process_group_ranks(group)
    ]
    return [
        _compute_local_shape_and_global_offset(tuple(shape), mesh.shape, at, placements)
        for at in coordinates
    ]


def gather_gradients(members: Sequence[Member]) -> None:
    """Replace gradients that are sharded as their parameters by whole ones at the owner and by none
    elsewhere."""
    for alike, shards in _by_mesh_and_dtype(members):
        parts, group = [local(_present(member.gradient)) for member in alike], shards[0].group
        rank, ranks = dist.get_rank(group), range(dist.get_world_size(group))
        outgoing = [
            (where.owner, part)
            for where, part in zip(shards, parts, strict=True)
            if where.sends(rank)
        ]
        expected = [
            (r, where.size(r))
            for where in shards
            if where.is_owner
            for r in ranks
            if where.sends(r)
        ]
        pieces = iter(
            _exchange(outgoing, expected, parts[0], group)
        )  # flat, matrix by matrix in order of rank
        for member, where in zip(alike, shards, strict=True):
            member.gradient = None
            if where.is_owner:
                member.gradient = parts[0].new_empty(where.shape)
                for source in filter(where.sends, ranks):
                    target = where.part(member.gradient, source)
                    target.copy_(next(pieces).view(target.shape))


def apply_updates(members: Sequence[Member], decay: Callable[[Member], Tensor]) -> None:
    """W <- decay W + update, on the shards that lie here, from the updates that the owners
    computed."""
    for alike, shards in _by_mesh_and_dtype(members):
        like = local(alike[0].parameter).new_empty(0, dtype=decay(alike[0]).dtype)
        updates = distribute(shards, [member.update for member in alike], like)
        for member, update in zip(alike, updates, strict=True):
            weight = local(member.parameter)
            # Half-precision weights are rounded once, after the sum.
            weight.copy_(
                weight.to(update.dtype, copy=True)
                .mul_(decay(member))
                .add_(update.view(weight.shape))
            )


def as_rows(
    parameter: Any, where: Shards, state: Tensor, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """A state that the owner has whole, as a DTensor that is sharded by rows; a counter () as it
    is."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = parameter.device_mesh
    by_rows: list[Any] = [Shard(0) if shape else Replicate()] * mesh.ndim
    rows = Shards(shape, where.group, _boxes(shape, mesh, by_rows, where.group), where.owner)
    (part,) = distribute(
        [rows], [state if where.is_owner else None], local(parameter).new_empty(0, dtype=dtype)
    )
    part = part.view(rows.boxes[dist.get_rank(where.group)][0])
    if not shape:
        return part
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        part, mesh, by_rows, run_check=False, shape=torch.Size(shape), stride=stride
    )


def distribute(
    shards: Sequence[Shards], wholes: Sequence[Tensor | None], like: Tensor
) -> list[Tensor]:
    """This rank's parts (flattened) of tensors of which the owners have the whole; of one process
    group and dtype."""
    group = shards[0].group
    rank, ranks = dist.get_rank(group), range(dist.get_world_size(group))
    owned = [
        (where, tensor) for where, tensor in zip(shards, wholes, strict=True) if tensor is not None
    ]
    outgoing = [(target, where.part(tensor, target)) for where, tensor in owned for target in ranks]
    return _exchange(outgoing, [(where.owner, where.size(rank)) for where in shards], like, group)


def _exchange(
    outgoing: Sequence[tuple[int, Tensor]],
    expected: Sequence[tuple[int, int]],
    like: Tensor,
    group: dist.ProcessGroup,
) -> list[Tensor]:
    """Send tensors to target ranks, flattened; what has come here, in the order of `expected`:
    source and size.

    Between two ranks, what one sends has to be in the order in which the other expects it.
    """
    ranks = range(dist.get_world_size(group))
    by_target = [
        [tensor.reshape(-1) for target, tensor in outgoing if target == rank] for rank in ranks
    ]
    send = torch.cat([like.new_empty(0), *(tensor for tensors in by_target for tensor in tensors)])
    # all_to_all_single delivers by source; the sort is stable, so that pieces of one source keep
    # their order.
    by_source = sorted(range(len(expected)), key=lambda place: expected[place][0])
    receive = like.new_empty(sum(size for _, size in expected))
    num_received = [sum(size for source, size in expected if source == rank) for rank in ranks]
    num_sent = [sum(tensor.numel() for tensor in tensors) for tensors in by_target]
    dist.all_to_all_single(receive, send, num_received, num_sent, group=group)
    pieces = torch.split(receive, [expected[place][1] for place in by_source])
    return [piece for _, piece in sorted(zip(by_source, pieces, strict=True), key=itemgetter(0))]


def _by_mesh_and_dtype(members: Sequence[Member]) -> Iterator[tuple[list[Member], list[Shards]]]:
    alike: dict[Any, list[Member]] = {}
    for member in members:
        alike.setdefault((_present(member.shards).group, member.parameter.dtype), []).append(member)
    for together in alike.values():
        yield together, [_present(member.shards) for member in together]


def _present(value: T | None) -> T:
    assert value is not None
    return value


def rotation_cost(matrices: Tensor) -> int:
    """Multiply-adds of a rotation of both sides of (*, m, n); the order of sizes is what
    matters."""
    return matrices.numel() * sum(matrices.shape[-2:])
