"""The refusal of a run that cannot fit, before it starts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from brx.config.schema import RunConfig
from brx.errors import UserError
from brx.pipeline.world import World
from brx.planning.plan import RANK_PARTS, RankMemory, plan_memory, what_would_fit

CONTROL_GROUPS = Path("/sys/fs/cgroup")


def check_memory(config: RunConfig, device: torch.device, world: World, ranges: Sequence[range]) -> RankMemory:
    """Compare what the ranks of this device or machine need with what is free.

    The ranks of a machine share the memory of their CPU; `ranges` are the stages of each rank.

    Returns:
        The plan of this rank.

    Raises:
        UserError: it is certain not to fit; one line with the numbers and with what would fit.
    """
    ranks = plan_memory(config, device.type, ranges)
    shared = device.type != "cuda"
    first = world.rank - world.local_rank
    sharing = ranks[first : first + world.num_local_ranks] if shared else [ranks[world.rank]]
    needed = sum(_least(config, rank) for rank in sharing)
    free = free_memory(device)
    if free is None or needed <= free:
        return ranks[world.rank]
    largest = max(sharing, key=lambda rank: rank.peak)
    parts = ", ".join(f"{part} {getattr(largest, part) / 1e9:.2f}" for part in RANK_PARTS if getattr(largest, part))
    who = f"rank {largest.rank} (stages {largest.stages[0]}-{largest.stages[-1]})"
    if len(sharing) > 1:
        who = f"{len(sharing)} ranks on this machine, the largest"
    # More ranks on the same machine share the same memory, so that only a device of its own is told to help.
    remedies = what_would_fit(config, device.type, free) if not shared or world.num_ranks == 1 else []
    if shared:
        remedies = [remedy for remedy in remedies if "pipeline.devices" not in remedy]
    would = f"; would fit: {' or '.join(remedies)}" if remedies else ""
    raise UserError(
        f"not enough memory: {who}: {needed / 1e9:.2f} GB needed ({parts}; see brx plan),"
        f" {free / 1e9:.2f} GB free on {device}{would}"
    )


def free_memory(device: torch.device) -> int | None:
    """Bytes that a run could take now; None where that cannot be told."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    limits = [limit for limit in (_available_on_host(), _available_in_container()) if limit is not None]
    return min(limits) if limits else None


def _least(config: RunConfig, rank: RankMemory) -> int:
    """A rank's peak; of compiled blocks' activations only half is sure, as they compute norms and GELU again."""
    return rank.peak - (rank.activations // 2 if config.runtime.compile else 0)


def _available_on_host() -> int | None:
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _available_in_container() -> int | None:
    """What is left under the limit of the control group that a container runs in (version 2, or version 1).

    Cached files count as used there, but are given up for a process that needs memory.
    """
    version_1 = CONTROL_GROUPS / "memory"
    for limit_file, used_file in (
        (CONTROL_GROUPS / "memory.max", CONTROL_GROUPS / "memory.current"),
        (version_1 / "memory.limit_in_bytes", version_1 / "memory.usage_in_bytes"),
    ):
        limit, used = (_lines(path) for path in (limit_file, used_file))
        if limit and limit[0].isdigit():
            statistics = dict(line.split() for line in _lines(limit_file.with_name("memory.stat")) if line)
            cached = int(statistics.get("total_inactive_file", statistics.get("inactive_file", 0)))
            return max(0, int(limit[0]) - (int(used[0]) if used else 0) + cached)
    return None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").split("\n")
    except OSError:
        return []
