"""Independent pieces of work on the CPU, one per core, instead of one after another with all cores on each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

import torch

Item = TypeVar("Item")


def for_each(work: Callable[[Item], None], items: Iterable[Item]) -> None:
    """Call `work` on each item, on as many threads as torch uses for one operation.

    Factorisations of small matrices gain little from a second core, and an operation that is shared among cores waits
    for the slowest of them. Each piece is computed by one thread. Gradients are off in the threads.
    """
    pieces = list(items)
    num_threads = torch.get_num_threads()
    if num_threads == 1 or len(pieces) == 1:
        for piece in pieces:
            work(piece)
        return

    @torch.no_grad()
    def quietly(piece: Item) -> None:
        work(piece)

    torch.set_num_threads(1)  # the matrix library's setting is shared by all threads
    try:
        for _ in _pool(num_threads).map(quietly, pieces):
            pass
    finally:
        torch.set_num_threads(num_threads)


@cache
def _pool(num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads, "brx-optim", initializer=lambda: torch.set_num_threads(1))
