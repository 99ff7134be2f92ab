"""The processes of a run, one per device, and the links between neighbours.

torchrun or `brx train --devices R` starts them.
"""

import contextlib
import os
import pickle
import secrets
from collections import deque
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.rendezvous import rendezvous

from brx.distributed.launch import LAUNCHED, rank_and_world_size
from brx.environment import variable, whole_number
from brx.errors import NeighbourLostError, UserError
from brx.pipeline.world import Channel, Neighbours, Topic, World

T = TypeVar("T")

_PREPARATION_TIMEOUT_S = 2 * 86_400.0  # rank 0 may tokenize a corpus while the others wait
_START = secrets.token_hex(8)  # with the process id, it tells apart processes of the same rank
_MEETING_TIMEOUT_S = 300.0  # the least time for all ranks to meet: they start at different times


def _master() -> str:
    """The place where a launcher lets the ranks meet, for messages."""
    return (
        f"MASTER_ADDR, MASTER_PORT {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    )


class DistributedWorld(World):
    """One of several processes, over torch.distributed.

    The processes meet here. Activations and gradients go over NCCL between GPUs, everything else
    over gloo.

    Args:
        timeout_s: once all have met, a rank counts as lost after this many seconds without an
            answer.
        through_host: exchange activations and gradients through host memory. Ranks that share a GPU
            need this, as NCCL needs a GPU per rank.

    Raises:
        UserError: the processes cannot find each other, or two of them have the same rank.
        NeighbourLostError: (all methods) another rank is lost.
    """

    def __init__(self, timeout_s: float, *, through_host: bool = False) -> None:
        place = rank_and_world_size()
        assert place is not None, "RANK and WORLD_SIZE are not set"
        self.rank, self.num_ranks = place
        local_rank = whole_number("LOCAL_RANK")
        self.local_rank = self.rank if local_rank is None else local_rank
        self.num_local_ranks = whole_number("LOCAL_WORLD_SIZE", least=1) or self.num_ranks
        self._timeout_s = timeout_s
        self._through_host = through_host
        # The messages of `gather` that are still being sent. A tensor has to outlive its transfer.
        self._sending: list[tuple[dist.Work | None, Tensor]] = []
        self._meet()
        self._control = _make_group(timeout_s, backend="gloo")
        self._patient = _make_group(_PREPARATION_TIMEOUT_S, backend="gloo")
        # All ranks see what any rank sets in the store. It is in torchrun's own process, or else in
        # rank 0.
        is_with_launcher = variable("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self._store_host: int | Literal["the launcher"] = "the launcher" if is_with_launcher else 0
        self._store: Any = _get_default_store().clone()  # type: ignore[attr-defined]
        self._store.set_timeout(timedelta(seconds=timeout_s))

    def _meet(self) -> None:
        """Wait until all processes have met; UserError if they cannot find each other."""
        backend = "gloo"
        if torch.cuda.is_available():
            backend = "cpu:gloo,cuda:nccl"
            _check_watchdog()
        patience = timedelta(seconds=max(self._timeout_s, _MEETING_TIMEOUT_S))
        try:
            store = self._meeting_place(patience)
            dist.init_process_group(
                backend, timeout=patience, store=store, rank=self.rank, world_size=self.num_ranks
            )
        except (RuntimeError, ValueError) as error:
            meeting = variable(LAUNCHED)
            where = f"TMPDIR {meeting}" if meeting else _master()
            problem = " ".join(str(error).split())[:150]
            if "EADDRINUSE" in str(error):
                problem = "the port is in use"
            elif "Unable to find address for" in str(error):  # gloo's, also where they have met
                where = f"GLOO_SOCKET_IFNAME {variable('GLOO_SOCKET_IFNAME')}"
                problem = "no network interface here has this name and an address"
            raise UserError(
                f"{where}: the {self.num_ranks} processes cannot meet: {problem}"
            ) from None

    def _meeting_place(self, patience: timedelta) -> Any:
        """The store through which the ranks meet.

        If `launch` has started the ranks, it is a file, so that no port is open to others.
        Otherwise the launcher has named an address (MASTER_ADDR and MASTER_PORT)."""
        meeting = variable(LAUNCHED)
        if meeting is not None:
            return dist.FileStore(meeting, self.num_ranks)  # type: ignore[attr-defined]
        store, _, _ = next(rendezvous("env://", timeout=patience))
        store.set_timeout(patience)
        self._claim_rank(store)
        self._compare_sizes(store)
        return dist.PrefixStore("default_pg", store)  # type: ignore[attr-defined]

    def _claim_rank(self, store: Any) -> None:
        """Claim this rank; UserError if another process has claimed it. Without this check, one of
        the two would wait for ranks that talk to the other one."""
        this_process = f"{_START}-{os.getpid()}"
        holder = store.compare_set(f"brx/rank-{self.rank}", "", this_process).decode()
        if holder != this_process:
            raise UserError(
                f"RANK {self.rank}: another process has joined at {_master()} with this rank; "
                "every process of a run needs its own rank, and every run its own port"
            )

    def _compare_sizes(self, store: Any) -> None:
        """UserError if another process has another WORLD_SIZE. Without this check, processes would
        wait for ranks that do not exist, or that do not know of them."""
        store.set(f"brx/world-size-{self.rank}", str(self.num_ranks))
        for rank in range(self.num_ranks):
            theirs = store.get(f"brx/world-size-{rank}").decode()  # waits for this rank
            if theirs != str(self.num_ranks):
                raise UserError(
                    f"WORLD_SIZE: is {self.num_ranks} for rank {self.rank} and {theirs} for rank "
                    f"{rank}, which has joined at {_master()}; give all processes of a run the same"
                )

    def connect(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Neighbours | None:
        if self.num_ranks == 1:
            return None
        previous = self.rank - 1 if self.rank > 0 else None
        following = self.rank + 1 if self.rank + 1 < self.num_ranks else None

        def channel(source: int | None, target: int | None, num_buffers: int) -> Channel:
            num_needed = num_buffers if source is not None else 0
            # (B, S, D) each
            buffers = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_needed)]
            if not (self._through_host and device.type == "cuda"):
                return PointToPoint(source, target, shape[0], buffers, self._timeout_s)
            incoming = torch.empty(shape, dtype=dtype, pin_memory=True)
            outgoing = torch.empty(shape, dtype=dtype, pin_memory=True)
            received = [incoming] if source is not None else []
            on_host = PointToPoint(source, target, shape[0], received, self._timeout_s)
            return ThroughHost(on_host, buffers, outgoing)

        # A received activation is the input of a graph until its backward pass: one buffer per
        # micro-batch that may be in flight here (R - r), and one for the next to arrive. A gradient
        # is used at once.
        return Neighbours(
            activations=channel(previous, following, self.num_ranks - self.rank + 1),
            gradients=channel(following, previous, 2),
        )

    def gather(self, value: T) -> list[T]:
        # With dist.gather_object, all ranks would wait for all. Here only rank 0 waits.
        if self.rank == 0:
            return [value, *(self._receive(peer) for peer in range(1, self.num_ranks))]
        self._sending = [
            (work, tensor)
            for work, tensor in self._sending
            if work is None or not work.is_completed()
        ]
        payload = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        for tensor in (torch.tensor([len(payload)]), payload):
            with raises_if_lost(0, self._timeout_s):
                work = dist.isend(tensor, 0, group=self._control)
            self._sending.append((work, tensor))
        return []

    def broadcast(self, value: T) -> T:
        box = [value]
        with raises_if_lost(None, self._timeout_s):
            dist.broadcast_object_list(box, src=0, group=self._control)
        return box[0]

    def barrier(self, *, patient: bool = False) -> None:
        with raises_if_lost(None, self._timeout_s):
            dist.barrier(group=self._patient if patient else self._control)

    def announce(self, topic: Topic, message: str) -> None:
        # If the store is gone, rank 0 is gone with it, and nobody is left to read the message.
        with contextlib.suppress(RuntimeError):
            self._store.set(topic, message)

    def announce_first(self, topic: Topic, message: str) -> None:
        with contextlib.suppress(RuntimeError):  # as in `announce`
            self._store.compare_set(topic, "", message)  # "": there is no message yet

    def announced(self, topic: Topic) -> str | None:
        with raises_if_lost(self._store_host, self._timeout_s):
            is_there = self._store.check([topic])
            return self._store.get(topic).decode() if is_there else None

    def close(self) -> None:
        """Wait for all ranks and for what is still being sent, and leave the group."""
        self.barrier()
        for work, _ in self._sending:
            if work is not None:
                with raises_if_lost(0, self._timeout_s):
                    work.wait()
        dist.destroy_process_group()

    def _receive(self, peer: int) -> T:  # type: ignore[type-var]
        """Receive the value that another rank has given to `gather`."""
        size = torch.empty(1, dtype=torch.int64)
        with raises_if_lost(peer, self._timeout_s):
            dist.recv(size, peer, group=self._control)
            payload = torch.empty(int(size), dtype=torch.uint8)
            dist.recv(payload, peer, group=self._control)
        value: T = pickle.loads(payload.numpy().tobytes())
        return value


def _check_watchdog() -> None:
    """Refuse settings with which NCCL's watchdog does not end a process whose peer is lost."""
    for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"):
        value = variable(name)
        if value in ("0", "2"):
            raise UserError(
                f"{name}: is {value}: a rank that has lost another one would wait forever, or go "
                f"on with messages that never arrived; unset it, or set it to 1 or 3"
            )


def _make_group(timeout_s: float, backend: str | None = None) -> Any:
    """A process group of all ranks. All of them have to make their groups in the same order.

    Args:
        timeout_s: how long the group waits for a rank, from now on.
        backend: by default that of the default group.

    Raises:
        NeighbourLostError: a rank does not make the group.
    """
    with raises_if_lost(None, timeout_s):
        return dist.new_group(backend=backend, timeout=timedelta(seconds=timeout_s))


class PointToPoint:
    """Implements `brx.pipeline.world.Channel` over torch.distributed.

    At most one send and one receive are in flight. All devices must make their channels in the same
    order, since each channel makes a process group.

    Args:
        source: the rank from which tensors are received; None: there is no such neighbour.
        target: the rank to which they are sent; None likewise.
        num_examples: B of every message.
        buffers: (B, S, D) each; received tensors go into them in turn.
        timeout_s: seconds after which a neighbour counts as lost.
    """

    def __init__(
        self,
        source: int | None,
        target: int | None,
        num_examples: int,
        buffers: list[Tensor],
        timeout_s: float,
    ) -> None:
        self._source = source
        self._target = target
        self._num_examples = num_examples
        self._free = deque(buffers)
        # Each direction has a process group of its own. With NCCL, the operations of one group run
        # in the order in which they were posted, so a receive posted ahead would hold up the other
        # direction.
        self._group = _make_group(timeout_s)
        self._timeout_s = timeout_s
        self._receiving: tuple[dist.Work, Tensor] | None = None
        self._sending: tuple[dist.Work, Tensor] | None = None

    def send(self, tensor: Tensor) -> None:
        self.wait_for_send()
        # The last validation batch may be smaller, but all messages are of one size.
        missing = self._num_examples - len(tensor)
        if missing:
            tensor = torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])])
        tensor = tensor.contiguous()
        with raises_if_lost(self._target, self._timeout_s):
            work = dist.isend(tensor, self._target, group=self._group)
        assert work is not None
        self._sending = work, tensor  # the tensor has to outlive the transfer

    def wait_for_send(self) -> None:
        if self._sending is not None:
            self._wait(*self._sending, self._target)
            self._sending = None

    def post_receive(self) -> None:
        if self._receiving is not None or self._source is None:
            return
        buffer = self._free.popleft()
        self._free.append(buffer)
        with raises_if_lost(self._source, self._timeout_s):
            work = dist.irecv(buffer, self._source, group=self._group)
        assert work is not None
        self._receiving = work, buffer

    def receive(self) -> Tensor:
        self.post_receive()
        assert self._receiving is not None
        work, buffer = self._receiving
        self._wait(work, buffer, self._source)
        self._receiving = None
        return buffer.detach()

    def _wait(self, work: dist.Work, message: Tensor, peer: int | None) -> None:
        with raises_if_lost(peer, self._timeout_s):
            # The device's next work waits, not the host. NCCL's watchdog limits the time.
            if message.is_cuda:
                work.wait()
            else:
                work.wait(timedelta(seconds=self._timeout_s))


class ThroughHost:
    """Implements `brx.pipeline.world.Channel` between GPUs by way of host memory, for ranks that
    share a GPU.

    The copies do not overlap with anything: this is for tests and small machines, not for speed.

    Args:
        channel: sends and receives tensors on the host, with one receive buffer.
        buffers: (B, S, D) each, on the GPU: what is received is copied into them, in turn.
        outgoing: (B, S, D), pinned: what is sent is copied here first.
    """

    def __init__(self, channel: Channel, buffers: list[Tensor], outgoing: Tensor) -> None:
        self._channel = channel
        self._free = deque(buffers)
        self._outgoing = outgoing

    def send(self, tensor: Tensor) -> None:
        # The buffer is free again once the message before this one has left.
        self._channel.wait_for_send()
        message = self._outgoing[: len(tensor)]
        message.copy_(tensor)
        self._channel.send(message)

    def wait_for_send(self) -> None:
        self._channel.wait_for_send()

    def post_receive(self) -> None:
        self._channel.post_receive()

    def receive(self) -> Tensor:
        message = self._channel.receive()
        buffer = self._free.popleft()
        self._free.append(buffer)
        # A blocking copy, because the next receive overwrites the message.
        buffer.copy_(message)
        return buffer.detach()


@contextlib.contextmanager
def raises_if_lost(peer: int | Literal["the launcher"] | None, timeout_s: float) -> Iterator[None]:
    """A context in which errors of torch.distributed become NeighbourLostErrors.

    Args:
        peer: the rank that is waited for, or the launcher; None: any rank.
        timeout_s: how long it is waited for, for the message.
    """
    try:
        yield
    except RuntimeError as error:
        waited = "timed out" in str(error).lower() or "timeout" in str(error).lower()
        problem = f"did not answer for {timeout_s:g} s" if waited else "closed its connection"
        raise NeighbourLostError(peer, problem) from None
