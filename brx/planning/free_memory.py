"""Finds out how much memory is free on a device, or on the machine of a CPU."""

import resource
from pathlib import Path
from typing import NamedTuple

import torch

CONTROL_GROUPS = Path("/sys/fs/cgroup")


class Free(NamedTuple):
    """Bytes that are free under one limit.

    Attributes:
        num_bytes: their number.
        where: the limit, as messages name it after the number.
        is_shared: the ranks of a machine share them. Otherwise each rank has as many.
    """

    num_bytes: int
    where: str
    is_shared: bool


def free_memory(device: torch.device) -> list[Free]:
    """What is free under each limit that is known, the least first."""
    if device.type == "cuda":
        return [Free(torch.cuda.mem_get_info(device)[0], f"on {device}", is_shared=False)]
    if device.type == "mps":
        left = torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
        return [Free(left, f"on {device}", is_shared=True)]
    limits = (
        (_available_on_host(), f"on {device}", True),
        (_available_in_container(), "under the control group's limit", True),
        (_available_in_address_space(), "under the limit of a process (ulimit -v)", False),
    )
    return sorted(Free(left, where, shared) for left, where, shared in limits if left is not None)


def _available_on_host() -> int | None:
    words = _words(Path("/proc/meminfo"))
    if "MemAvailable:" not in words:
        return None
    kilobytes = int(words[words.index("MemAvailable:") + 1])
    return 1024 * kilobytes


def _available_in_container() -> int | None:
    """The memory left under the limit of the control group (version 2, or 1); cached files count as
    free."""
    versions = (
        (CONTROL_GROUPS, "memory.max", "memory.current"),
        (CONTROL_GROUPS / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    )
    for folder, limit_name, used_name in versions:
        limit = _words(folder / limit_name)
        if not limit or not limit[0].isdigit():  # no such version, or no limit ("max")
            continue
        used = _words(folder / used_name)
        num_used = int(used[0]) if used else 0
        # memory.stat has a name and a number per line.
        words = _words(folder / "memory.stat")
        counts = dict(zip(words[::2], words[1::2], strict=False))
        cached = counts.get("total_inactive_file", counts.get("inactive_file", 0))
        return max(0, int(limit[0]) - num_used + int(cached))
    return None


def _available_in_address_space() -> int | None:
    """The memory left under a limit on address space (`ulimit -v`, as batch systems set it)."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    words = _words(Path("/proc/self/statm"))
    if limit == resource.RLIM_INFINITY or not words:
        return None
    num_pages = int(words[0])  # size of the whole address space
    return max(0, limit - num_pages * resource.getpagesize())


def _words(path: Path) -> list[str]:
    """The words of a file; none if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8").split()
    except OSError:
        return []
