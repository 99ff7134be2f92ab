"""Checks whether a run fits into the memory of its devices, so that one that does not is refused
before it starts."""

from collections.abc import Iterator, Sequence

import torch

from brx.config.loading import apply_overrides
from brx.config.schema import RunConfig
from brx.errors import UserError
from brx.pipeline.world import World
from brx.planning.cuts import possible_cuts
from brx.planning.free_memory import Free, free_memory
from brx.planning.margin import MARGIN, usable
from brx.planning.plan import Phase, RankMemory, plan_memory


def check_memory(
    config: RunConfig, device: torch.device, world: World, ranges: Sequence[range]
) -> RankMemory:
    """Plan the memory of this rank, and compare it with the free memory.

    Args:
        config: the run's configuration.
        device: this rank's device.
        world: the ranks.
        ranges: the stages of each rank.

    Returns:
        The plan of this rank.

    Raises:
        UserError: the run is certain not to fit. The message says which changes would help.
    """
    ranks = plan_memory(config, device.type, ranges)
    own = ranks[world.rank]
    first = world.rank - world.local_rank
    for free in free_memory(device):
        sharing = ranks[first : first + world.num_local_ranks] if free.is_shared else [own]
        needed = sum(rank.peak for rank in sharing)
        if config.runtime.compile:
            # Only half of the activations is certain to be kept: compiled blocks may compute norms
            # and GELU again instead.
            needed -= sum(rank.activations // 2 for rank in sharing)
        if needed > free.num_bytes:
            raise UserError(_too_little(config, device, world, sharing, needed, free))
    return own


def _too_little(
    config: RunConfig,
    device: torch.device,
    world: World,
    sharing: Sequence[RankMemory],
    needed: int,
    free: Free,
) -> str:
    """What is needed, what is free, and which changes would help."""
    largest = max(sharing, key=lambda rank: rank.peak)
    parts = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in present(largest.fullest))
    if len(sharing) > 1:
        who = f"{len(sharing)} ranks on this machine, the largest"
    else:
        who = f"rank {world.rank} (stages {largest.stages[0]}-{largest.stages[-1]})"
    remedies: list[str] = []
    if not free.is_shared or world.num_ranks == 1:
        remedies = what_would_fit(config, device.type, free.num_bytes)
    # More ranks on the same machine share its memory: only a device of its own helps. Where a limit
    # holds for each process, ranks that talk to each other use up far more of it than one alone.
    if device.type != "cuda":
        remedies = [remedy for remedy in remedies if "pipeline.devices" not in remedy]
    would = f"; would fit: {' or '.join(remedies)}" if remedies else ""
    return (
        f"not enough memory: {who}: {needed / 1e9:.2f} GB needed ({parts}; see brx plan),"
        f" {free.num_bytes / 1e9:.2f} GB free {free.where}{would}"
    )


def present(phase: Phase) -> list[tuple[str, int]]:
    """The items of a phase that take memory, the largest first."""
    items = [(name, size) for name, size in phase.items.items() if size]
    return sorted(items, key=lambda item: -item[1])


def size_text(num_bytes: float) -> str:
    """For example `37.3 GB`; below 1 GB `47.6 MB`."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


def fits(ranks: Sequence[RankMemory], device_memory: float) -> bool:
    """Whether every rank's peak leaves the margin free."""
    return max(rank.peak for rank in ranks) <= usable(device_memory)


def smallest_num_ranks(config: RunConfig, device_type: str, device_memory: float) -> int | None:
    """The smallest R that can run the delays and whose ranks all fit; None if there is none."""
    for ranges in possible_cuts(config):
        if fits(plan_memory(config, device_type, ranges), device_memory):
            return len(ranges)
    return None


def what_would_fit(config: RunConfig, device_type: str, device_memory: float) -> list[str]:
    """Changes with which the configuration would fit, as texts for `--set`.

    The first one changes the number of devices, if any number helps. The last one keeps the number
    of devices, if other changes alone help."""
    remedies: list[str] = []
    for overrides in _changes(config, device_type):
        changed = apply_overrides(config.model_dump(mode="json"), overrides, "the configuration")
        if overrides and fits(plan_memory(changed, device_type), device_memory):
            return [*remedies, " ".join(overrides)]
        if remedies:
            continue
        smallest = smallest_num_ranks(changed, device_type, device_memory)
        if smallest is not None:
            remedies.append(" ".join([f"pipeline.devices={smallest}", *overrides]))
    return remedies


def _changes(config: RunConfig, device_type: str) -> Iterator[list[str]]:
    """Overrides that save memory, those that cost least first."""
    yield []
    savings = []
    if device_type != "cuda" and config.checkpoint.background:
        savings = ["checkpoint.background=false"]
        yield savings
    if config.pipeline.stash == "exact" and not config.pipeline.recompute:
        savings = [*savings, "pipeline.recompute=true"]
        yield savings
    if config.pipeline.rings == "device":
        host = "pipeline.rings=host"
        yield [host]
        savings = [*savings, host]
        yield savings
    for halvings in range(1, config.training.batch_size.bit_length()):
        yield [*savings, f"training.batch_size={config.training.batch_size >> halvings}"]


def fit_line(
    config: RunConfig, ranks: Sequence[RankMemory], device_type: str, memory: float
) -> str:
    """A line that says whether the run fits into `memory` bytes per device, on how few devices it
    would fit, and if it does not fit, which changes would help."""
    spare = f"{MARGIN:.0%} to spare for CUDA's context and the allocator"
    smallest = smallest_num_ranks(config, device_type, memory)
    if smallest is not None:
        least = f"the smallest R that fits is {smallest}"
    else:
        least = _least_peak(config, device_type)
    if fits(ranks, memory):
        return f"Fits into {size_text(memory)} per device with {spare}; {least}."
    remedies = what_would_fit(config, device_type, memory)
    would = f" Would fit: {' or '.join(remedies)}." if remedies else ""
    return f"Does not fit into {size_text(memory)} per device with {spare}; {least}.{would}"


def _least_peak(config: RunConfig, device_type: str) -> str:
    """The number of devices with the lowest peak."""
    plans = [
        [rank.peak for rank in plan_memory(config, device_type, ranges)]
        for ranges in possible_cuts(config)
    ]
    peaks = min(plans, key=max)
    fullest = peaks.index(max(peaks))
    return f"even R = {len(peaks)} needs {size_text(max(peaks))} on rank {fullest}"
