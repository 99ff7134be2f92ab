"""Several devices, one process each, as torchrun or `brx train --devices R` starts them."""

from __future__ import annotations

import contextlib
import os
import pickle
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from brx.distributed.links import connect, told_if_lost
from brx.errors import UserError
from brx.pipeline.engine import Neighbours

T = TypeVar("T")

_PREPARATION_TIMEOUT = timedelta(days=2)
"""Rank 0 may tokenize a corpus while the others wait."""

_MEETING_TIMEOUT_S = 300.0
"""How long the first process waits for the last at least: they start, and load torch, at different times."""


class DistributedWorld:
    """Implements `brx.pipeline.world.World` over torch.distributed.

    Reads RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT; UserError where the processes
    cannot find each other. Once all have met, a device counts as lost after `timeout_s` seconds without an answer. What
    is exchanged outside of the pipeline goes over gloo, whatever the devices are.
    """

    def __init__(self, timeout_s: float) -> None:
        self.rank = int(os.environ["RANK"])
        self.num_ranks = int(os.environ["WORLD_SIZE"])
        self.local_rank = int(os.environ.get("LOCAL_RANK", self.rank))
        self.num_local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", self.num_ranks))
        self._timeout_s = timeout_s
        self._sending: list[tuple[dist.Work | None, Tensor]] = []
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        try:
            dist.init_process_group(backend, timeout=timedelta(seconds=max(timeout_s, _MEETING_TIMEOUT_S)))
        except (RuntimeError, ValueError) as error:
            address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            problem = "the port is in use" if "EADDRINUSE" in str(error) else " ".join(str(error).split())[:150]
            who = f"the {self.num_ranks} processes"
            raise UserError(f"MASTER_ADDR, MASTER_PORT {address}: {who} cannot meet: {problem}") from None
        self._control = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._patient = dist.new_group(backend="gloo", timeout=_PREPARATION_TIMEOUT)
        self._store = self._make_store()

    def connect(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Neighbours | None:
        if self.num_ranks == 1:
            return None
        return connect(self.rank, self.num_ranks, shape, dtype, device, self._timeout_s)

    def gather(self, value: T) -> list[T]:
        # dist.gather_object would make all wait for all; here only rank 0 waits.
        if self.rank != 0:
            self._sending = [entry for entry in self._sending if entry[0] is None or not entry[0].is_completed()]
            payload = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
            for tensor in (torch.tensor([len(payload)]), payload):
                self._sending.append((dist.isend(tensor, 0, group=self._control), tensor))
            return []
        return [value, *(self._receive(peer) for peer in range(1, self.num_ranks))]

    def broadcast(self, value: T) -> T:
        box = [value]
        with told_if_lost(None, self._timeout_s):
            dist.broadcast_object_list(box, src=0, group=self._control)
        return box[0]

    def barrier(self, *, patient: bool = False) -> None:
        with told_if_lost(None, self._timeout_s):
            dist.barrier(group=self._patient if patient else self._control)

    def announce_stop(self, iteration: int) -> None:
        self._store.set("stop", str(iteration))

    def announced_stop(self) -> int | None:
        return int(self._store.get("stop")) if self._store.check(["stop"]) else None

    def announce_divergence(self, message: str) -> None:
        with contextlib.suppress(RuntimeError):  # rank 0 is gone: nobody is left who would write it down
            self._store.set("divergence", message)

    def announced_divergence(self) -> str | None:
        return self._store.get("divergence").decode() if self._store.check(["divergence"]) else None

    def close(self) -> None:
        """Part from the others, all at once."""
        self.barrier()
        for work, _ in self._sending:
            if work is not None:
                work.wait()
        dist.destroy_process_group()

    def _receive(self, peer: int) -> T:  # type: ignore[type-var]
        size = torch.empty(1, dtype=torch.int64)
        with told_if_lost(peer, self._timeout_s):
            dist.recv(size, peer, group=self._control)
            payload = torch.empty(int(size), dtype=torch.uint8)
            dist.recv(payload, peer, group=self._control)
        value: T = pickle.loads(payload.numpy().tobytes())
        return value

    def _make_store(self) -> TCPStore:
        """A store of our own: what rank 0 has set, everybody sees from then on."""
        host = os.environ.get("MASTER_ADDR", "127.0.0.1")
        timeout = timedelta(seconds=self._timeout_s)
        if self.rank == 0:
            store = TCPStore(host, 0, is_master=True, timeout=timeout, wait_for_workers=False)
            self.broadcast(store.port)
            return store
        return TCPStore(host, self.broadcast(0), is_master=False, timeout=timeout)
