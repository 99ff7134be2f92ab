"""The device, its precision, its determinism and its random numbers, and the signals that ask a
process to stop."""

import os
import platform
import shutil
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Any, Self

import torch

from brx.config.schema import RuntimeConfig
from brx.environment import stop_signals
from brx.errors import RunError, UserError
from brx.pipeline.world import World

# What torch and the system say when host memory is used up.
_NO_MEMORY = ("can't allocate memory", "not enough memory", "Cannot allocate memory")


def choose_device(
    requested: str, local_rank: int = 0, *, share_gpus: bool = False
) -> tuple[torch.device, str]:
    """The device to compute on, and the reason in a few words.

    Args:
        requested: `runtime.device`.
        local_rank: the rank's number among the ranks of its machine.
        share_gpus: the ranks of a machine take its GPUs in turn, even if there are fewer GPUs than
            ranks.

    Raises:
        UserError: the requested device is not on this machine, or has no GPU left for the rank.
    """
    available = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    kind, reason = requested, "runtime.device"
    if requested == "auto" and available["cuda"]:
        kind, reason = "cuda", "found"
    elif requested == "auto":
        kind, reason = "cpu", "CUDA not available"
    elif not available[kind]:
        present = ", ".join(name for name, is_available in available.items() if is_available)
        raise UserError(
            f"runtime.device: {kind} is not available on this machine (available: {present})"
        )
    if kind != "cuda":
        return torch.device(kind), reason
    num_gpus = torch.cuda.device_count()
    if share_gpus:
        return torch.device("cuda", local_rank % num_gpus), reason
    # Some launchers show each rank only its own GPU, as number 0. `check_gpus_differ` checks later
    # that the ranks see different GPUs.
    shows_one = num_gpus == 1 and "CUDA_VISIBLE_DEVICES" in os.environ
    if shows_one:
        return torch.device("cuda", 0), reason
    if local_rank >= num_gpus:
        raise UserError(
            f"pipeline.devices: rank {local_rank} needs a GPU of its own, there are {num_gpus}; "
            f"set pipeline.devices to at most {num_gpus}, runtime.device to cpu, or "
            f"runtime.share_gpus to true"
        )
    return torch.device("cuda", local_rank), reason


def check_gpus_differ(world: World, device: torch.device) -> None:
    """Make sure that each rank has a GPU of its own. NCCL needs that, and its error names neither
    the ranks nor the GPU.

    Raises:
        UserError: ranks share a GPU. Every rank raises it.
    """
    if device.type != "cuda" or world.num_ranks == 1:
        return
    gpu = (socket.gethostname(), str(torch.cuda.get_device_properties(device).uuid))
    everybody = world.gather(gpu)  # empty but on rank 0
    count = Counter(everybody)
    shared = [rank for rank, own in enumerate(everybody) if count[own] > 1]
    shared = world.broadcast(shared)
    if shared:
        raise UserError(
            f"ranks {', '.join(map(str, shared))} see the same GPU ({gpu[0]}); give each rank "
            f"a GPU of its own, or set runtime.share_gpus to true"
        )


def check_compiler(runtime: RuntimeConfig, device: torch.device) -> None:
    """UserError if `runtime.compile` is set and the system has no C or C++ compiler, which
    torch.compile needs."""
    if not runtime.compile:
        return
    variable, usual = ("CXX", "g++") if device.type == "cpu" else ("CC", "gcc")
    if platform.system() == "Darwin":
        usual = "clang++" if variable == "CXX" else "clang"
    compiler = os.environ.get(variable) or usual
    if shutil.which(compiler) is None:
        raise UserError(
            f"runtime.compile: torch.compile needs a compiler, and there is no {compiler}; install "
            f"it, set {variable} to one that is there, or set runtime.compile to false"
        )


def make_room_for_graphs(runtime: RuntimeConfig) -> None:
    """Drop the compiled graphs of earlier runs of this process.

    torch.compile makes at most eight graphs of a function, and afterwards calls it uncompiled. A
    run needs up to three, and the functions are the same in each run."""
    if runtime.compile:
        torch.compiler.reset()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the memory, of the system or the GPU, is full."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    said = str(error)
    return isinstance(error, RuntimeError) and any(words in said for words in _NO_MEMORY)


@contextmanager
def out_of_memory_in_one_line() -> Iterator[None]:
    """A context in which an out-of-memory error, of the system or the GPU, becomes a RunError of
    one line."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        first = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise RunError(f"out of memory: {first}; brx plan shows what needs how much") from error


def autocast(
    runtime: RuntimeConfig, device: torch.device
) -> Callable[[], AbstractContextManager[object]]:
    """A function that makes the context in which a forward pass runs: bf16 autocast, or nothing for
    fp32.

    Raises:
        UserError: the run is in bf16, and the hardware lacks it.
    """
    if runtime.precision == "fp32":
        return nullcontext
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        name = torch.cuda.get_device_name(device)
        raise UserError(f"runtime.precision: bf16 is not supported by {name}; use fp32")
    return lambda: torch.autocast(device.type, dtype=torch.bfloat16)


def set_up(runtime: RuntimeConfig, device: torch.device, num_local_ranks: int) -> None:
    """Set torch's threads, determinism and CUDA device for this process. The ranks of a machine
    share its threads, unless `runtime.threads` says how many each one has."""
    share = max(1, torch.get_num_threads() // num_local_ranks)
    torch.set_num_threads(runtime.threads or share)
    torch.use_deterministic_algorithms(runtime.deterministic)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        if runtime.deterministic:
            # torch 2.9 looks for it at the first matrix product, and fails without it.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def generator_states(device: torch.device) -> dict[str, torch.Tensor]:
    """The states of the random number generators from which a user's optimizer or model may draw:
    the host's, and on CUDA the GPU's."""
    states = {"rng": torch.get_rng_state()}
    if device.type == "cuda":
        states["device_rng"] = torch.cuda.get_rng_state(device)
    return states


def set_generator_states(device: torch.device, states: Mapping[str, Any]) -> None:
    """Continue with what `generator_states` gave. A state from another kind of device lacks the
    GPU's generator, which is left as it is."""
    torch.set_rng_state(states["rng"])
    if device.type == "cuda" and "device_rng" in states:
        torch.cuda.set_rng_state(states["device_rng"], device)


SAME_REQUEST_S = 0.5  # signals within this time count as one request


class StopSignal:
    """A context in which signals ask for a stop instead of ending the process.

    The first signal (Ctrl-C, SIGTERM, SIGHUP or SIGUSR1) sets `requested`. A later Ctrl-C raises
    KeyboardInterrupt, if more than `SAME_REQUEST_S` has passed: schedulers and launchers send
    several signals for one request, one after the other and to several processes of a run.
    """

    def __init__(self) -> None:
        self.requested = False
        self._first = 0.0  # when it was requested
        self._handlers: dict[int, Any] = dict.fromkeys(stop_signals(), self._handle)

    def __enter__(self) -> Self:
        self._before = {
            number: signal.signal(number, handler) for number, handler in self._handlers.items()
        }
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.requested:
            self.requested = True
            self._first = now
        elif number == signal.SIGINT and now - self._first > SAME_REQUEST_S:
            raise KeyboardInterrupt
