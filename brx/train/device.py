"""The device, its precision and its determinism, and the signals that ask a process to stop."""

import signal
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any, Self

import torch

from brx.config.schema import RuntimeConfig
from brx.errors import UserError


def choose_device(requested: str, local_rank: int = 0) -> tuple[torch.device, str]:
    """The device to compute on, and why in a few words; UserError where the requested one is not
    there."""
    available = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    if requested == "auto":
        kind, reason = ("cuda", "found") if available["cuda"] else ("cpu", "CUDA not available")
    else:
        kind, reason = requested, "runtime.device"
        if not available[kind]:
            there = ", ".join(name for name, is_there in available.items() if is_there)
            raise UserError(
                f"runtime.device: {kind} is not available on this machine (available: {there})"
            )
    if kind != "cuda":
        return torch.device(kind), reason
    if local_rank >= torch.cuda.device_count():
        raise UserError(
            f"pipeline.devices: rank {local_rank} needs a CUDA device of its own, there are"
            f" {torch.cuda.device_count()}; set pipeline.devices to at most that, or "
            f"runtime.device to cpu"
        )
    return torch.device("cuda", local_rank), reason


def autocast(
    runtime: RuntimeConfig, device: torch.device
) -> Callable[[], AbstractContextManager[object]]:
    """The context of a forward pass: bf16 autocast, or nothing; UserError for bf16 on hardware
    without it."""
    if runtime.precision == "fp32":
        return nullcontext
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        name = torch.cuda.get_device_name(device)
        raise UserError(f"runtime.precision: bf16 is not supported by {name}; use fp32")
    return lambda: torch.autocast(device.type, dtype=torch.bfloat16)


def set_up(runtime: RuntimeConfig, device: torch.device, num_local_ranks: int) -> None:
    torch.set_num_threads(runtime.threads or max(1, torch.get_num_threads() // num_local_ranks))
    torch.use_deterministic_algorithms(runtime.deterministic)
    if device.type == "cuda":
        torch.cuda.set_device(device)


class StopSignal:
    """While active, the first SIGINT or SIGTERM sets `requested`; a second one interrupts at once.

    In a process that does not `listen`, Ctrl-C is ignored (rank 0 says when to stop) and SIGTERM
    kills."""

    def __init__(self, listen: bool = True) -> None:
        self.requested = False
        self._handlers: dict[int, Any] = {signal.SIGINT: signal.SIG_IGN}
        if listen:
            self._handlers = {signal.SIGINT: self._handle, signal.SIGTERM: self._handle}

    def __enter__(self) -> Self:
        self._before = {
            number: signal.signal(number, handler) for number, handler in self._handlers.items()
        }
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
