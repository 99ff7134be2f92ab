"""Tensors between neighbouring devices: non-blocking, and posted before they are needed."""

from __future__ import annotations

from collections import deque
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from brx.errors import NeighbourLostError
from brx.pipeline.engine import Neighbours


def connect(
    rank: int, num_ranks: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, timeout_s: float
) -> Neighbours:
    """Connect a device to its neighbours; all devices call this at the same time.

    Activations and gradients travel in process groups of their own: with NCCL the operations of one group are run in
    the order in which they were posted, and a receive posted ahead in one direction would hold up the other.

    Args:
        rank: of this device.
        num_ranks: of all.
        shape: of what is exchanged (B, S, D).
        dtype: likewise; bf16 where autocast runs.
        device: where the tensors are.
        timeout_s: seconds without an answer after which a neighbour counts as lost.
    """
    previous = rank - 1 if rank > 0 else None
    following = rank + 1 if rank + 1 < num_ranks else None

    def channel(source: int | None, target: int | None, num_buffers: int) -> PointToPoint:
        needed = num_buffers if source is not None else 0
        buffers = [torch.empty(shape, dtype=dtype, device=device) for _ in range(needed)]
        return PointToPoint(source, target, shape[0], buffers, timeout_s)

    # A received activation is the input of a graph until its backward pass: one buffer for each micro-batch that may
    # be in flight here, and one to receive into meanwhile.
    num_in_flight = num_ranks - rank
    return Neighbours(channel(previous, following, num_in_flight + 1), channel(following, previous, 2))


class PointToPoint:
    """Implements `brx.pipeline.engine.Channel` over torch.distributed: a send and a receive in flight at most.

    Args:
        source: the rank that is received from; None for none.
        target: the rank that is sent to; None for none.
        num_examples: B of the messages.
        buffers: to receive into, in turn; a tensor is overwritten when its turn comes again.
        timeout_s: seconds without an answer after which a neighbour counts as lost.
    """

    def __init__(
        self, source: int | None, target: int | None, num_examples: int, buffers: list[Tensor], timeout_s: float
    ) -> None:
        self._source = source
        self._target = target
        self._num_examples = num_examples
        self._free = deque(buffers)
        self._group = dist.new_group(timeout=timedelta(seconds=timeout_s))
        self._timeout_s = timeout_s
        self._receiving: tuple[dist.Work, Tensor] | None = None
        self._sending: tuple[dist.Work, Tensor] | None = None

    def send(self, tensor: Tensor) -> None:
        assert self._target is not None
        self.wait_for_send()
        missing = self._num_examples - len(tensor)
        if missing:  # the last validation batch may be smaller; messages are all of one size
            tensor = torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])])
        tensor = tensor.contiguous()
        try:
            work = dist.isend(tensor, self._target, group=self._group)
        except RuntimeError as error:
            raise lost(self._target, error, self._timeout_s) from None
        assert work is not None
        self._sending = work, tensor  # the tensor has to outlive the transfer

    def wait_for_send(self) -> None:
        if self._sending is not None:
            assert self._target is not None
            self._wait(self._sending[0], self._target)
            self._sending = None

    def post_receive(self) -> None:
        if self._receiving is not None or self._source is None:
            return
        buffer = self._free.popleft()
        self._free.append(buffer)
        try:
            work = dist.irecv(buffer, self._source, group=self._group)
        except RuntimeError as error:
            raise lost(self._source, error, self._timeout_s) from None
        assert work is not None
        self._receiving = work, buffer

    def receive(self) -> Tensor:
        assert self._source is not None
        self.post_receive()
        assert self._receiving is not None
        work, buffer = self._receiving
        self._wait(work, self._source)
        self._receiving = None
        return buffer.detach()

    def _wait(self, work: dist.Work, peer: int) -> None:
        try:
            work.wait(timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            raise lost(peer, error, self._timeout_s) from None


def lost(peer: int | None, error: RuntimeError, timeout_s: float) -> NeighbourLostError:
    """What torch.distributed's error says about a peer, in words."""
    text = str(error).lower()
    waited = "timed out" in text or "timeout" in text
    return NeighbourLostError(peer, f"did not answer for {timeout_s:g} s" if waited else "closed its connection")
