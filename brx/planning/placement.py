"""Which device carries which stages, and whether they fit: a run that cannot is refused before it
starts."""

import resource
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor, nn

from brx.config.loading import apply_overrides
from brx.config.schema import RunConfig
from brx.errors import UserError
from brx.model.head import loss_of
from brx.model.sizes import distinct_blocks
from brx.model.stage import Stage, make_stage, partition
from brx.pipeline.delay import cannot_run, stage_delays
from brx.pipeline.world import World
from brx.planning.margin import MARGIN, usable
from brx.planning.plan import RANK_PARTS, Memory, plan_memory

REPEATS = 7
CONTROL_GROUPS = Path("/sys/fs/cgroup")


def assign(costs: Sequence[float], num_ranks: int) -> list[range]:
    """Cut stages into R <= P contiguous runs, such that the largest sum of costs is as small as
    possible."""
    num_stages, sums = len(costs), [0.0, *accumulate(costs)]

    @cache
    def best(first: int, ranks: int) -> tuple[float, int]:
        # The smallest possible largest sum for the stages from `first` on, and where the first of
        # their ranks ends.
        if ranks == 1:
            return sums[num_stages] - sums[first], num_stages
        stops = range(first + 1, num_stages - ranks + 2)
        return min(
            (max(sums[stop] - sums[first], best(stop, ranks - 1)[0]), stop) for stop in stops
        )

    ranges, first = [], 0
    for ranks in range(num_ranks, 0, -1):
        _, stop = best(first, ranks)
        ranges.append(range(first, stop))
        first = stop
    return ranges


def measure_stage_costs(config: RunConfig, device: torch.device) -> list[float]:
    """Seconds of each stage's passes, measured by part: at GPT-2's vocabulary the head weighs
    several blocks."""
    model, batch, vocabulary = config.model, config.training.batch_size, config.data.vocabulary_size
    tokens = torch.zeros(batch, model.sequence_length, dtype=torch.int64, device=device)
    stream = torch.randn(
        batch, model.sequence_length, model.width, device=device, requires_grad=True
    )

    def part(block: int) -> Stage:  # with what stands before a first block, behind a last one
        return make_stage(model, vocabulary, range(block, block + 1), seed=0).to(device)

    like = distinct_blocks(model)
    seconds = {}
    for block in set(like.values()):
        (module,) = part(block).blocks.values()
        seconds[block] = _seconds(partial(_output, module, stream), device)
    blocks = partition(model.blocks, config.pipeline.stages)
    costs = [sum(seconds[like[block]] for block in own) for own in blocks]
    embedding, head = part(0).embedding, part(model.blocks - 1).head
    assert embedding is not None
    assert head is not None
    costs[0] += _seconds(lambda: embedding(tokens).sum(), device)
    costs[-1] += _seconds(lambda: loss_of(head, stream, tokens, vocabulary), device)
    return costs


def _output(block: nn.Module, stream: Tensor) -> Tensor:
    """The sum of what a block makes of the stream."""
    output = block(stream)
    total: Tensor = output[0].sum() if isinstance(output, tuple) else output.sum()
    return total


def _seconds(
    forward: Callable[[], Tensor], device: torch.device
) -> float:  # of a forward and backward pass, median
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
) -> Memory:
    """This rank's plan, by the stages of each rank; UserError if it is certain not to fit, with
    what would."""
    ranks = plan_memory(config, device.type, ranges)
    is_shared = device.type != "cuda"
    first = world.rank - world.local_rank
    sharing = ranks[first : first + world.num_local_ranks] if is_shared else [ranks[world.rank]]
    # Of compiled blocks' activations only half is sure, as they compute norms and GELU again.
    unsure = [rank.activations // 2 if config.runtime.compile else 0 for rank in sharing]
    needed = sum(rank.peak for rank in sharing) - sum(unsure)
    free = free_memory(device)
    if free is None or needed <= free:
        return ranks[world.rank]
    largest = max(sharing, key=lambda rank: rank.peak)
    parts = ", ".join(
        f"{part} {getattr(largest, part) / 1e9:.2f}"
        for part in RANK_PARTS
        if getattr(largest, part)
    )
    who = f"rank {ranks.index(largest)} (stages {largest.stages[0]}-{largest.stages[-1]})"
    if len(sharing) > 1:
        who = f"{len(sharing)} ranks on this machine, the largest"
    # More ranks on the same machine share the same memory, so that only a device of its own is told
    # to help.
    remedies = (
        what_would_fit(config, device.type, free) if not is_shared or world.num_ranks == 1 else []
    )
    remedies = [remedy for remedy in remedies if not (is_shared and "pipeline.devices" in remedy)]
    would = f"; would fit: {' or '.join(remedies)}" if remedies else ""
    raise UserError(
        f"not enough memory: {who}: {needed / 1e9:.2f} GB needed ({parts}; see brx plan),"
        f" {free / 1e9:.2f} GB free on {device}{would}"
    )


def free_memory(device: torch.device) -> int | None:  # in bytes; None where it cannot be told
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    limits = (_available_on_host(), _available_in_container(), _available_in_address_space())
    return min((limit for limit in limits if limit is not None), default=None)


def _available_on_host() -> int | None:
    words = _words(Path("/proc/meminfo"))
    return int(words[words.index("MemAvailable:") + 1]) * 1024 if "MemAvailable:" in words else None


def _available_in_container() -> int | None:
    """What is left under the limit of the control group (version 2, or 1); cached files count as
    free."""
    for folder, limit_name, used_name in (
        (CONTROL_GROUPS, "memory.max", "memory.current"),
        (CONTROL_GROUPS / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        limit, used, words = (
            _words(folder / name) for name in (limit_name, used_name, "memory.stat")
        )
        if limit and limit[0].isdigit():
            counts = dict(zip(words[::2], words[1::2], strict=False))
            cached = counts.get("total_inactive_file", counts.get("inactive_file", 0))
            return max(0, int(limit[0]) - int(used[0] if used else 0) + int(cached))
    return None


def _available_in_address_space() -> int | None:
    """What is left under a limit on address space (`ulimit -v`, as batch systems set it)."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    words = _words(Path("/proc/self/statm"))  # pages, first of the whole address space
    if limit == resource.RLIM_INFINITY or not words:
        return None
    return max(0, limit - int(words[0]) * resource.getpagesize())


def _words(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").split()
    except OSError:
        return []


def fits(ranks: Sequence[Memory], device_memory: float) -> bool:
    """Whether every rank's peak leaves the margin free."""
    return max(rank.peak for rank in ranks) <= usable(device_memory)


def smallest_num_ranks(config: RunConfig, device_type: str, device_memory: float) -> int | None:
    """The smallest R that can run the delays and all of whose ranks fit; None if there is none."""
    plans = (plan_memory(config, device_type, ranges) for ranges in _possible_cuts(config))
    return next((len(ranks) for ranks in plans if fits(ranks, device_memory)), None)


def _possible_cuts(
    config: RunConfig,
) -> Iterator[list[range]]:  # even ones that can run the configured delays, by R
    delays, num_stages = stage_delays(config.pipeline), config.pipeline.stages
    cuts = (partition(num_stages, num_ranks) for num_ranks in range(1, num_stages + 1))
    return (ranges for ranges in cuts if cannot_run(delays, ranges) is None)


def what_would_fit(config: RunConfig, device_type: str, device_memory: float) -> list[str]:
    """Changes of the configuration that would make it fit, as overrides: alone if that is enough,
    else with devices."""
    remedies: list[str] = []
    for overrides in _changes(config):
        changed = apply_overrides(config.model_dump(mode="json"), overrides, "the configuration")
        if overrides and fits(plan_memory(changed, device_type), device_memory):
            return [*remedies, " ".join(overrides)]
        smallest = smallest_num_ranks(changed, device_type, device_memory)
        if smallest is not None and not remedies:
            remedies.append(" ".join([f"pipeline.devices={smallest}", *overrides]))
    return remedies


def _changes(config: RunConfig) -> Iterator[list[str]]:  # in order of what they cost
    yield []
    savings = []
    if config.pipeline.stash == "exact" and not config.pipeline.recompute:
        savings = ["pipeline.recompute=true"]
        yield savings
    if config.pipeline.rings == "device":
        host = "pipeline.rings=host"
        yield [host]
        savings = [*savings, host]
        yield savings
    for halvings in range(1, config.training.batch_size.bit_length()):
        yield [*savings, f"training.batch_size={config.training.batch_size >> halvings}"]


def fit_line(config: RunConfig, ranks: Sequence[Memory], device_type: str, memory: float) -> str:
    """Whether it fits into `memory` bytes per device, on how few devices it would, and otherwise
    what would."""
    smallest = smallest_num_ranks(config, device_type, memory)
    spare = f"{MARGIN:.0%} to spare for communicators and the allocator"
    least = f"the smallest R that fits is {smallest}"
    if smallest is None:
        plans = (
            [rank.peak for rank in plan_memory(config, device_type, cut)]
            for cut in _possible_cuts(config)
        )
        peaks = min(plans, key=max)
        least = (
            f"even R = {len(peaks)} needs {max(peaks) / 1e9:.1f} GB on rank "
            f"{peaks.index(max(peaks))}"
        )
    if fits(ranks, memory):
        return f"Fits into {memory / 1e9:.1f} GB per device with {spare}; {least}."
    remedies = what_would_fit(config, device_type, memory)
    would = f" Would fit: {' or '.join(remedies)}." if remedies else ""
    return f"Does not fit into {memory / 1e9:.1f} GB per device with {spare}; {least}.{would}"
