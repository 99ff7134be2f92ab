"""Micro-batches: random windows of the token file, and their way to the device. A micro-batch
depends on the run's seed and on its own number n alone.

Shape legend: B examples, S positions.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from brx.data.token_file import TokenFile, Tokens
from brx.errors import UserError, counted

Batch = tuple[Tensor, Tensor]
"""Token ids and next tokens, each (B, S), int64."""
AHEAD = 4  # micro-batches that are made in advance, on CUDA


class Batches:
    """The training micro-batches of a run. Micro-batch n depends on (seed, n) alone: not on the
    method, the number of stages or devices, or the micro-batches before it.

    Args:
        file: the training tokens.
        sequence_length: S.
        batch_size: B.
        seed: the run's.

    Raises:
        UserError: the file has fewer than S + 1 tokens.
    """

    def __init__(
        self, file: TokenFile, *, sequence_length: int, batch_size: int, seed: int
    ) -> None:
        check_length(file, sequence_length)
        self._tokens = file.tokens
        self._window = sequence_length + 1
        self._batch_size = batch_size
        self._seed = seed

    def batch(self, n: int) -> Batch:
        """Token ids and next tokens of micro-batch n (from 1), each (B, S), int64."""
        # n is a spawn key, not part of the entropy, so that no two pairs (seed, n) share a stream
        # of random numbers.
        generator = np.random.default_rng(np.random.SeedSequence(self._seed, spawn_key=(n,)))
        starts = generator.integers(len(self._tokens) - self._window + 1, size=self._batch_size)
        return windows(self._tokens, starts, self._window)


def validation_set(
    file: TokenFile, *, sequence_length: int, examples: int, batch_size: int
) -> list[Batch]:
    """The fixed validation examples, evenly spread over the file, in batches of at most
    `batch_size`; the last batch may be smaller.

    Raises:
        UserError: the file has too few tokens for a window.
    """
    check_length(file, sequence_length)
    starts = np.linspace(0, len(file.tokens) - sequence_length - 1, examples).astype(np.int64)
    return [
        windows(file.tokens, starts[first : first + batch_size], sequence_length + 1)
        for first in range(0, examples, batch_size)
    ]


def windows(tokens: Tokens, starts: NDArray[np.int64], length: int) -> Batch:
    """The windows of `length` tokens that begin at `starts` (B,), as inputs and targets, each
    (B, length - 1), int64. Targets are the inputs shifted by one token."""
    gathered = torch.from_numpy(tokens[starts[:, None] + np.arange(length)].astype(np.int64))
    return gathered[:, :-1].contiguous(), gathered[:, 1:].contiguous()


def check_validation_examples(
    file: TokenFile,
    sequence_length: int,
    examples: int,
    setting: str = "training.validation_examples",
) -> None:
    """UserError for more validation examples than the file has different windows.

    Args:
        setting: what gave the number of examples, for the message.
    """
    check_length(file, sequence_length)
    num_windows = file.num_tokens - sequence_length
    if examples > num_windows:
        most = (
            f"must be at most {num_windows:,}, the windows of model.sequence_length "
            f"{sequence_length}"
        )
        there = f"in the {counted(file.num_tokens, 'validation token', ',')}"
        raise UserError(f"{setting}: {most} {there}, got {examples:,}")


def check_length(file: TokenFile, sequence_length: int) -> None:
    """UserError if the file is too short for a window of S + 1 tokens."""
    if file.num_tokens <= sequence_length:
        raise UserError(
            f"data.source: {file.sidecar.source}: gave {counted(file.num_tokens, 'token')}, too "
            f"few for model.sequence_length {sequence_length}"
        )


class Prefetcher:
    """Fetches micro-batches for a device, and measures how long the training loop waited for them
    (`seconds_waited`).

    On CUDA a thread makes the next `AHEAD` micro-batches in pinned memory, so that the copy to the
    device is asynchronous. Elsewhere a thread would compete with the computation, so a micro-batch
    is made when it is asked for.

    Args:
        make: makes micro-batch n on the CPU, as inputs and targets (B, S).
        device: where the micro-batches go.
    """

    def __init__(self, make: Callable[[int], Batch], device: torch.device) -> None:
        self._make, self._device = make, device
        self._thread = ThreadPoolExecutor(1, "brx-batches") if device.type == "cuda" else None
        self._ahead: dict[int, Future[Batch]] = {}
        self.seconds_waited = 0.0

    def batch(self, n: int) -> Batch:
        """Inputs and targets (B, S) of micro-batch n on the device. If they are asked for in
        ascending order they are ready; any other order works, too."""
        started = time.perf_counter()
        if self._thread is None:
            inputs, targets = self._make(n)
        else:
            inputs, targets = self._from_thread(self._thread, n)
        # The caching allocator of pinned memory keeps a buffer until the copy from it is over.
        on_device = (
            inputs.to(self._device, non_blocking=True),
            targets.to(self._device, non_blocking=True),
        )
        self.seconds_waited += time.perf_counter() - started
        return on_device

    def _from_thread(self, thread: ThreadPoolExecutor, n: int) -> Batch:
        """Wait for micro-batch n from the thread, and let the thread begin the next `AHEAD`
        ones."""
        ahead: dict[int, Future[Batch]] = {}
        for number in range(n, n + 1 + AHEAD):
            begun = self._ahead.get(number)
            ahead[number] = begun or thread.submit(self._make_pinned, number)
        self._ahead = ahead
        return ahead[n].result()

    def _make_pinned(self, n: int) -> Batch:
        inputs, targets = self._make(n)
        return inputs.pin_memory(), targets.pin_memory()

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
