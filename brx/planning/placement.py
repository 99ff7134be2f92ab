"""Checks whether a run fits into the memory of its devices, so that one that does not is refused
before it starts. Also measures the time of its stages on a device, for `pipeline.balance: time`."""

import resource
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from brx.config.loading import apply_overrides
from brx.config.schema import RunConfig
from brx.errors import UserError
from brx.model.head import loss_of
from brx.model.sizes import distinct_blocks
from brx.model.stage import Stage, make_stage, partition
from brx.pipeline.world import World
from brx.planning.cuts import possible_cuts
from brx.planning.margin import MARGIN, usable
from brx.planning.plan import Moment, RankMemory, plan_memory

REPEATS = 7
CONTROL_GROUPS = Path("/sys/fs/cgroup")


def measure_stage_costs(config: RunConfig, device: torch.device) -> list[float]:
    """The seconds of each stage's passes on a device. Embedding, blocks and head are measured
    separately, because with GPT-2's vocabulary the head takes as long as several blocks."""
    model = config.model
    vocabulary_size = config.data.vocabulary_size
    shape = (config.training.batch_size, model.sequence_length)
    tokens = torch.zeros(shape, dtype=torch.int64, device=device)  # (B, S)
    stream = torch.randn(*shape, model.width, device=device, requires_grad=True)  # (B, S, D)

    def part(block: int) -> Stage:
        """A stage of one block; the first one has the embedding, too, and the last one the head."""
        return make_stage(model, vocabulary_size, range(block, block + 1), seed=0).to(device)

    recompute = config.pipeline.recompute
    like = distinct_blocks(model)
    seconds = {}
    for block in set(like.values()):
        (module,) = part(block).blocks.values()
        run = partial(checkpoint, module, use_reentrant=False) if recompute else module
        seconds[block] = _seconds(partial(_output, run, stream), device)
    blocks = partition(model.blocks, config.pipeline.stages)
    costs = [sum(seconds[like[block]] for block in own) for own in blocks]
    embedding = part(0).embedding
    head = part(model.blocks - 1).head
    assert embedding is not None
    assert head is not None
    costs[0] += _seconds(lambda: embedding(tokens).sum(), device)
    costs[-1] += _seconds(lambda: loss_of(head, stream, tokens, vocabulary_size), device)
    return costs


def _output(
    block: Callable[[Tensor], Any],
    stream: Tensor,  # (B, S, D)
) -> Tensor:
    """The sum of a block's output."""
    output = block(stream)
    total: Tensor = output[0].sum() if isinstance(output, tuple) else output.sum()
    return total


def _seconds(forward: Callable[[], Tensor], device: torch.device) -> float:
    """The median time of a forward and backward pass."""
    seconds = []
    for _ in range(1 + REPEATS):
        started = time.perf_counter()
        torch.autograd.backward(forward())
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])  # the first one warms up


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
    is_shared = device.type != "cuda"
    sharing = [own]
    if is_shared:
        first = world.rank - world.local_rank
        sharing = ranks[first : first + world.num_local_ranks]
    needed = sum(rank.peak for rank in sharing)
    if config.runtime.compile:
        # Only half of the activations is certain to be kept: compiled blocks may compute norms and
        # GELU again instead.
        needed -= sum(rank.activations // 2 for rank in sharing)
    free = free_memory(device)
    if free is None or needed <= free:
        return own
    largest = max(sharing, key=lambda rank: rank.peak)
    parts = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in present(largest.fullest))
    if len(sharing) > 1:
        who = f"{len(sharing)} ranks on this machine, the largest"
    else:
        who = f"rank {world.rank} (stages {largest.stages[0]}-{largest.stages[-1]})"
    remedies: list[str] = []
    # More ranks on the same machine share its memory: only a device of its own helps.
    if not is_shared or world.num_ranks == 1:
        remedies = what_would_fit(config, device.type, free)
    if is_shared:
        remedies = [remedy for remedy in remedies if "pipeline.devices" not in remedy]
    would = f"; would fit: {' or '.join(remedies)}" if remedies else ""
    raise UserError(
        f"not enough memory: {who}: {needed / 1e9:.2f} GB needed ({parts}; see brx plan),"
        f" {free / 1e9:.2f} GB free on {device}{would}"
    )


def present(moment: Moment) -> list[tuple[str, int]]:
    """The items of a moment that take memory, the largest first."""
    items = [(name, size) for name, size in moment.items.items() if size]
    return sorted(items, key=lambda item: -item[1])


def free_memory(device: torch.device) -> int | None:
    """Free bytes of a device, or of the machine for a CPU; None if that is not known."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    limits = (_available_on_host(), _available_in_container(), _available_in_address_space())
    return min((limit for limit in limits if limit is not None), default=None)


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
