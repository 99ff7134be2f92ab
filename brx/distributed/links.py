"""Tensors between neighbouring devices: non-blocking, and posted before they are needed."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from brx.errors import NeighbourLostError
from brx.pipeline.engine import Neighbours


def connect(
    rank: int, num_ranks: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, timeout_s: float
) -> Neighbours:
    """Connect a device to its neighbours for tensors of one shape (B, S, D); all devices call this at the same time.

    Activations and gradients travel in process groups of their own: with NCCL the operations of one group are run in
    the order in which they were posted, and a receive posted ahead in one direction would hold up the other.
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
        self.wait_for_send()
        missing = self._num_examples - len(tensor)
        if missing:  # the last validation batch may be smaller; messages are all of one size
            tensor = torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])])
        tensor = tensor.contiguous()
        with told_if_lost(self._target, self._timeout_s):
            work = dist.isend(tensor, self._target, group=self._group)
        assert work is not None
        self._sending = work, tensor  # the tensor has to outlive the transfer

    def wait_for_send(self) -> None:
        if self._sending is not None:
            self._wait(self._sending[0], self._target)
            self._sending = None

    def post_receive(self) -> None:
        if self._receiving is not None or self._source is None:
            return
        buffer = self._free.popleft()
        self._free.append(buffer)
        with told_if_lost(self._source, self._timeout_s):
            work = dist.irecv(buffer, self._source, group=self._group)
        assert work is not None
        self._receiving = work, buffer

    def receive(self) -> Tensor:
        self.post_receive()
        assert self._receiving is not None
        work, buffer = self._receiving
        self._wait(work, self._source)
        self._receiving = None
        return buffer.detach()

    def _wait(self, work: dist.Work, peer: int | None) -> None:
        with told_if_lost(peer, self._timeout_s):
            work.wait(timedelta(seconds=self._timeout_s))


@contextlib.contextmanager
def told_if_lost(peer: int | None, timeout_s: float) -> Iterator[None]:
    """What torch.distributed's error says about a peer (None: any), in words: NeighbourLostError."""
    try:
        yield
    except RuntimeError as error:
        waited = "timed out" in str(error).lower() or "timeout" in str(error).lower()
        problem = f"did not answer for {timeout_s:g} s" if waited else "closed its connection"
        raise NeighbourLostError(peer, problem) from None
