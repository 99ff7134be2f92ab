"""The older versions of one stage's weights: slots, and the copies into and out of them.

Contents move, tensors do not. `Slots.store` copies a new version of the weights into its slot;
`Slots.load` copies the version that a micro-batch needs into the tensors that compute. Neither the
slots nor these tensors ever change their addresses.

The tensors of a slot lie one after another in one buffer per data type (`FlatTensors`). Where the
other side of a copy is flat in the same layout, a copy is one operation per buffer; any other list
of tensors (somebody's parameters, local shards) takes one `_foreach_copy_` per pair of data types.

Needs torch alone.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from brx.pipeline.delay import StageDelay

ALIGNMENT = 64  # bytes; torch's own CPU allocator aligns tensors to this, too

UNKNOWN = -(2**62)  # in place of a stored version: older than any


@dataclass
class _Group:
    """The tensors of a layout that share a device, a data type, and a data type in the slots."""

    device: torch.device
    dtype: torch.dtype
    slot_dtype: torch.dtype
    num_elements: int = 0  # length of a buffer so far, with the gaps that align tensors

    def reserve(self, shape: torch.Size) -> int:
        """Reserve room for one more tensor. Returns the offset of its first element."""
        offset = self.num_elements
        # One offset serves the weights and the slots. The smaller elements need the larger step.
        itemsize = min(self.dtype.itemsize, self.slot_dtype.itemsize)
        step = max(1, ALIGNMENT // itemsize)
        self.num_elements = offset + math.ceil(shape.numel() / step) * step
        return offset


class _PlaceInBuffer(NamedTuple):
    """Where a tensor of a layout lies."""

    group: int  # index of its group
    offset: int  # of its first element in the group's buffer, in elements
    shape: torch.Size


class FlatLayout:
    """Gives each tensor of a list its place in a flat buffer.

    Tensors with the same device, the same data type, and the same data type in the slots form a
    group. Each group has one buffer, so one copy per buffer moves all tensors, and casts them on
    the way.

    Args:
        weights: only their shapes, devices and data types are used.
        slot_dtypes: the data type of each weight's older versions; by default the weight's own.
    """

    def __init__(
        self, weights: Sequence[Tensor], slot_dtypes: Sequence[torch.dtype] | None = None
    ) -> None:
        if slot_dtypes is None:
            slot_dtypes = [weight.dtype for weight in weights]
        groups: dict[tuple[torch.device, torch.dtype, torch.dtype], _Group] = {}
        self.places: list[_PlaceInBuffer] = []  # by tensor
        for weight, slot_dtype in zip(weights, slot_dtypes, strict=True):
            key = (weight.device, weight.dtype, slot_dtype)
            group = groups.setdefault(key, _Group(*key))
            index = list(groups).index(key)
            self.places.append(_PlaceInBuffer(index, group.reserve(weight.shape), weight.shape))
        self.groups = list(groups.values())

    def like_weights(self) -> "FlatTensors":
        """New tensors, all zero, with the weights' devices and data types."""
        buffers = [
            torch.zeros(group.num_elements, dtype=group.dtype, device=group.device)
            for group in self.groups
        ]
        return FlatTensors(self, buffers)

    def like_slot(self, *, on_host: bool = False) -> "FlatTensors":
        """New tensors, all zero, with the slots' data types, on the weights' devices or in host
        memory (pinned if a weight is on CUDA, so that copies need not wait)."""
        return FlatTensors(self, [block[0] for block in self.blocks(1, on_host=on_host)])

    def blocks(self, num_slots: int, *, on_host: bool = False) -> list[Tensor]:
        """Allocate memory for `num_slots` slots, all zero, where `like_slot` says.

        Returns:
            One tensor per group, (num_slots, num_elements). Row i is the buffer of slot i.
        """
        blocks = []
        for group in self.groups:
            device = torch.device("cpu") if on_host else group.device
            is_pinned = on_host and group.device.type == "cuda" and num_slots > 0
            blocks.append(
                torch.zeros(
                    num_slots,
                    group.num_elements,
                    dtype=group.slot_dtype,
                    device=device,
                    pin_memory=is_pinned,
                )
            )
        return blocks


@dataclass
class FlatTensors:
    """Tensors that lie one after another in a buffer per group of their layout (`FlatLayout`)."""

    layout: FlatLayout
    buffers: list[Tensor]  # (num_elements,) each, one per group

    @cached_property
    def views(self) -> list[Tensor]:
        """The tensors, in the order of the layout's weights.

        Made on first use, because the tensors of many slots of a small stage would take more memory
        than the slots.
        """
        return [
            self.buffers[group][offset : offset + shape.numel()].view(shape)
            for group, offset, shape in self.layout.places
        ]

    def parameters(self) -> list[nn.Parameter]:
        """Leaf parameters to compute with, in the views' memory. A copy into the buffers does not
        raise their version counters, so autograd does not notice it."""
        return [nn.Parameter(view.data) for view in self.views]

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers, with the gaps that align tensors."""
        return sum(buffer.nbytes for buffer in self.buffers)


Tensors = FlatTensors | Sequence[Tensor]
"""Tensors in the order of a layout's weights: flat, or any list."""


@torch.no_grad()
def copy_tensors(targets: Tensors, sources: Tensors, *, non_blocking: bool = False) -> None:
    """Copy the contents of each source into its target. The version counters of parameters do not
    rise, so autograd does not notice the copy.

    This takes one operation per buffer if both sides are flat in the same layout. Otherwise it
    takes one `_foreach_copy_` per pair of devices and data types, never with several types in one
    list: on CUDA that wrote wrong values (pytorch/pytorch#173531)."""
    if (
        isinstance(targets, FlatTensors)
        and isinstance(sources, FlatTensors)
        and targets.layout is sources.layout
    ):
        for target, source in zip(targets.buffers, sources.buffers, strict=True):
            target.copy_(source, non_blocking=non_blocking)
        return
    if not isinstance(targets, FlatTensors):
        # `.data` has a version counter of its own.
        targets = [target.data for target in targets]
    by_kind: dict[object, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(as_list(targets), as_list(sources), strict=True):
        kind = (target.device, target.dtype, source.device, source.dtype)
        alike_targets, alike_sources = by_kind.setdefault(kind, ([], []))
        alike_targets.append(target)
        alike_sources.append(source)
    for alike_targets, alike_sources in by_kind.values():
        torch._foreach_copy_(alike_targets, alike_sources, non_blocking=non_blocking)


def as_list(tensors: Tensors) -> Sequence[Tensor]:
    """The tensors one by one."""
    return tensors.views if isinstance(tensors, FlatTensors) else tensors


MOST_ROWS = 64
"""How many slots of a stage keep their Python objects. For a thousand small stages, objects for all
slots would take a tenth as much memory as the slots' contents."""


class _Rows:
    """The slots of a stage, as a sequence: slot i is row i of each block.

    A slot's `FlatTensors` is made on first use. The `MOST_ROWS` that were used last are kept, with
    their views.

    Args:
        layout: the layout of the weights.
        blocks: (num_slots, num_elements) each, one per group of the layout.
        num_slots: the number of rows.
    """

    def __init__(self, layout: FlatLayout, blocks: Sequence[Tensor], num_slots: int) -> None:
        self._layout = layout
        self._blocks = blocks
        self._num_slots = num_slots
        self._made: dict[int, FlatTensors] = {}  # in the order of their last use

    def __len__(self) -> int:
        return self._num_slots

    def __iter__(self) -> Iterator[FlatTensors]:
        return (self[index] for index in range(self._num_slots))

    def __getitem__(self, index: int) -> FlatTensors:
        slot = range(self._num_slots)[index]  # checks the index, and resolves a negative one
        # Taken out and put back in, so that the slot used last comes last in the dictionary.
        row = self._made.pop(slot, None)
        if row is None:
            row = FlatTensors(self._layout, [block[slot] for block in self._blocks])
        self._made[slot] = row
        if len(self._made) > MOST_ROWS:
            del self._made[next(iter(self._made))]
        return row


class Slots:
    """Keeps the versions of a stage's weights that its `StageDelay` needs, on the weights' devices
    or in host memory.

    There are ceil(tau / M) + 1 slots, one of them for the newest version; with tau = 0 there are
    none. All start with version 0.

    Slots in host memory come with staging buffers on the device: while micro-batch n computes, the
    version of n + 1 is fetched into one of them (`prefetch`). On CUDA these slots are pinned, and
    copies to and from them run on a stream of their own; elsewhere they are plain copies (for
    tests).

    Args:
        layout: the layout of the weights.
        delay: the stage's delay.
        initial: version 0 of the weights.
        on_host: keep the slots in host memory.
        num_in_flight: the most micro-batches that are between their forward and backward pass at
            one time. If there are several, the version of each is loaded a second time, before its
            backward pass. So with slots in host memory, each keeps a staging buffer.
    """

    def __init__(
        self,
        layout: FlatLayout,
        delay: StageDelay,
        initial: Tensors,
        *,
        on_host: bool = False,
        num_in_flight: int = 1,
    ) -> None:
        self.delay = delay
        num_slots = delay.num_slots if delay.tau else 0
        num_buffers = 0
        if num_slots and on_host:
            # One for the version that is fetched next, and one for each micro-batch that waits for
            # its backward pass.
            num_buffers = 1 if num_in_flight == 1 else num_in_flight + 1
        self._layout = layout
        self._blocks = layout.blocks(num_slots, on_host=on_host)
        self.slots = _Rows(layout, self._blocks, num_slots)
        self.buffers = [layout.like_slot() for _ in range(num_buffers)]
        if num_slots:
            copy_tensors(self.slots[0], initial)
            for block in self._blocks:
                block[1:] = block[0]  # one operation, however many slots there are
        self._held: list[int | None] = [None] * num_buffers  # the micro-batch of each buffer
        self._newest_stored = 0
        devices = {group.device for group in layout.groups} if num_buffers else set()
        self._copying = _CopyStreams([device for device in devices if device.type == "cuda"])
        self._loaded = [self._copying.events() for _ in self.buffers]
        self._stored = self._copying.events()

    def load(self, micro_batch: int, targets: Tensors) -> None:
        """Copy the version that the forward pass of a micro-batch (from 1) uses into `targets`.

        These are the tensors that compute, in the order of the layout's weights. They may have any
        data types."""
        if not self.buffers:
            copy_tensors(targets, self.slots[self.delay.slot_used(micro_batch)])
            return
        index = self._buffer_of(micro_batch)
        if self._held[index] != micro_batch:  # it was not fetched ahead
            self._fetch(micro_batch)
        self._copying.wait_for(self._loaded[index])
        copy_tensors(targets, self.buffers[index])

    def load_version(self, version: int, targets: Tensors) -> None:
        """Copy a version into `targets`. It must still have its slot: it is one of the `num_slots`
        versions stored last."""
        self._copying.wait_for(self._stored)
        copy_tensors(targets, self.slots[self.delay.slot_of(version)], non_blocking=True)

    def prefetch(self, micro_batch: int) -> None:
        """Begin to fetch the version of a micro-batch from host memory, if it is stored already.
        Call it after `load` of the previous micro-batch."""
        if not self.buffers:
            return
        is_fetched = self._held[self._buffer_of(micro_batch)] == micro_batch
        is_stored = self.delay.version_used(micro_batch) <= self._newest_stored
        if not is_fetched and is_stored:
            self._fetch(micro_batch)

    def store(self, version: int, sources: Tensors) -> None:
        """Copy the weights that have become this version (from 1) into its slot. Until
        `finish_store` they may be read, but not changed."""
        with self._copying.on_streams():
            copy_tensors(self.slots[self.delay.slot_of(version)], sources, non_blocking=True)
            self._copying.keep_alive(sources)
            self._copying.record(self._stored)
        self._newest_stored = version

    def finish_store(self) -> None:
        """Call this before an update: the device's next work waits until the last `store` has read
        the weights."""
        self._copying.wait_for(self._stored)

    def forget(self) -> None:
        """Drop what was fetched ahead, because a micro-batch may come again or the slots have new
        contents."""
        self._held = [None] * len(self.buffers)
        self._newest_stored = UNKNOWN  # nothing is fetched ahead until the next `store`

    def wait(self) -> None:
        """Wait until the slots may be read or written on the host."""
        self._copying.synchronize()

    def stacked(self) -> list[Tensor]:
        """Per weight of the layout, its older versions in all slots, (num_slots, *shape); they
        share the slots' memory.

        A tensor per weight, not per weight and slot: saving thousands of slots is quick.
        """
        stacked = []
        for group, offset, shape in self._layout.places:
            versions = self._blocks[group][:, offset : offset + shape.numel()]
            stacked.append(versions.view(len(self.slots), *shape))
        return stacked

    @property
    def nbytes(self) -> int:
        """Bytes of all slots and staging buffers."""
        slots = sum(block.nbytes for block in self._blocks)
        return slots + sum(buffer.nbytes for buffer in self.buffers)

    def _buffer_of(self, micro_batch: int) -> int:
        return (micro_batch - 1) % len(self.buffers)

    def _fetch(self, micro_batch: int) -> None:
        index = self._buffer_of(micro_batch)
        slot = self.slots[self.delay.slot_used(micro_batch)]
        with self._copying.on_streams():
            copy_tensors(self.buffers[index], slot, non_blocking=True)
            self._copying.record(self._loaded[index])
        self._held[index] = micro_batch


class _CopyStreams:
    """A stream per CUDA device for copies to and from the host; without devices it does nothing."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._streams = [torch.cuda.Stream(device) for device in devices]  # type: ignore[no-untyped-call]

    def events(self) -> list[torch.cuda.Event]:
        """One per stream, to be recorded and waited for."""
        return [torch.cuda.Event() for _ in self._streams]  # type: ignore[no-untyped-call]

    @contextmanager
    def on_streams(self) -> Iterator[None]:
        """Work launched in this context runs on the copy streams, after all work that the devices
        have been given so far."""
        with ExitStack() as stack:
            for stream in self._streams:
                stream.wait_stream(torch.cuda.current_stream(stream.device))
                stack.enter_context(torch.cuda.stream(stream))
            yield

    def record(self, events: Sequence[torch.cuda.Event]) -> None:
        """Mark in each stream the work that it has been given so far."""
        for event, stream in zip(events, self._streams, strict=True):
            event.record(stream)

    def wait_for(self, events: Sequence[torch.cuda.Event]) -> None:
        """Let the devices' next work wait for these events; the host does not wait."""
        for event, stream in zip(events, self._streams, strict=True):
            torch.cuda.current_stream(stream.device).wait_event(event)

    def keep_alive(self, tensors: Tensors) -> None:
        """Let the allocator reuse the memory of these tensors only after the copies from it are
        over. A forecast's tensors may be freed before that."""
        for stream in self._streams:
            for tensor in as_list(tensors):
                if tensor.device == stream.device:
                    tensor.record_stream(stream)

    def synchronize(self) -> None:
        """Let the host wait for all copies."""
        for stream in self._streams:
            stream.synchronize()
