"""Packet B, third part: whole iterations of a preset, refreshes included.

For each variant: wall-clock time, time in kernels, kernel launches, and the share of the wall-clock
time in which no kernel runs because the host has not launched it yet. The plain loop is what one
would write without brx: compiled blocks, autocast, gradient clipping, fused AdamW. The variants run
one after the other, so that each has the device to itself. After Ctrl-C or when the time is over,
the rows measured so far are written.

    python -m benchmarks.gpu.iterations paper-95m --stages 1 32 [--only basis ...]
        [--set KEY=VALUE ...] [--seconds 300] --out results/gpu
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.report import (
    Table,
    gpu_parser_of,
    quick_first_basis,
    random_tokens,
    runner,
    synchronize,
    take_turns,
)
from brx.config.loading import load_config
from brx.config.schema import RunConfig
from brx.data.batches import Prefetcher
from brx.model.stage import whole_model
from brx.train.build import assemble
from brx.train.device import autocast, choose_device, set_up

PLAIN = "plain loop"
ADAMW = "pipedream"
GRAPHS = "runtime.graphs=true"
FP32_COVARIANCES = "optimizer.covariance_precision=highest"
FP32 = ["optimizer.rotation_precision=highest", FP32_COVARIANCES]
VARIANTS: dict[str, list[str]] = {
    "pipedream": [],
    "pipedream, graphs": [GRAPHS],
    "basis-rotation": [],
    "basis-rotation, graphs": [GRAPHS],
    "basis-rotation, fp32": FP32,
    "basis-rotation, TF32 rotations": ["optimizer.rotation_precision=tf32", FP32_COVARIANCES],
    "basis-rotation, covariance at refreshes": ["optimizer.covariance=refresh"],
    "basis-rotation, covariance at refreshes, graphs": ["optimizer.covariance=refresh", GRAPHS],
    "basis-rotation, 1st unilateral": [
        "optimizer.source=1st",
        "optimizer.geometry=unilateral",
        "optimizer.covariance=refresh",
    ],
    "soap": [],
    "muon": [],
}
"""Settings by variant, whose name begins with its method. Every variant runs at every P, those with
graphs only on a GPU. The products of basis rotation are in TF32 where no precision is named."""

PROFILED = 10
"""Iterations under the profiler; one of them has a refresh of basis rotation."""


@dataclass(frozen=True)
class Cost:
    """One iteration, on average."""

    wall: float  # seconds, without the profiler
    kernels: float  # seconds in kernels, under the profiler; 0 without a GPU
    launches: float  # kernels and copies

    @property
    def idle_share(self) -> float:
        """The share of the wall-clock time without a kernel."""
        return max(0.0, 1 - self.kernels / self.wall)


def main() -> None:
    """Measure and print."""
    parser = gpu_parser_of(__doc__, rounds=1, iterations=100)
    parser.add_argument(
        "--only", nargs="*", default=[""], help="rows whose names contain one of these texts"
    )
    parser.add_argument("--seconds", type=float, default=300, help="no variant begins after these")
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    config = load_config(options.config, [*options.overrides, "pipeline.stages=1"])
    device, _ = choose_device(config.runtime.device)
    set_up(config.runtime, device, 1)

    costs: dict[tuple[str, int], Cost] = {}
    with suppress(KeyboardInterrupt):
        costs[PLAIN, 1] = measure(lambda: plain_loop(config, device), device, options)
        chosen = chosen_variants(options.only, options.stages, device)
        for (name, stages), settings in chosen.items():
            if time.monotonic() > deadline:
                print(f"{name}, P = {stages}: no time left", flush=True)
                continue
            variant = load_config(options.config, [*options.overrides, *settings])
            costs[name, stages] = measure(lambda v=variant: engine_loop(v, device), device, options)
            print(f"{name}, P = {stages}: {costs[name, stages]}", flush=True)
    write(costs, options, config)


def chosen_variants(
    only: list[str], stages: list[int], device: torch.device
) -> dict[tuple[str, int], list[str]]:
    """Settings by variant and P, for variants that are asked for and that the device can run."""
    chosen = {}
    for name, own in VARIANTS.items():
        is_possible = device.type == "cuda" or GRAPHS not in own
        if is_possible and any(text in name for text in only):
            method = f"optimizer.method={name.partition(',')[0]}"
            for number in stages:
                chosen[name, number] = [method, *own, f"pipeline.stages={number}"]
    return chosen


def measure(
    make: Callable[[], Callable[[int], Tensor | None]],
    device: torch.device,
    options: argparse.Namespace,
) -> Cost:
    """What an iteration of the loop that `make` returns costs; the loop is freed afterwards."""
    with quick_first_basis():
        loop = and_wait(make())
        seconds = take_turns({"": loop}, options.rounds, options.iterations)[""]
    kernels, launches = profiled(loop, device)
    del loop
    gc.collect()
    torch._dynamo.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return Cost(statistics.median(seconds), kernels, launches)


def profiled(loop: Callable[[int], None], device: torch.device) -> tuple[float, float]:
    """Seconds in kernels and launches per iteration."""
    if device.type != "cuda":
        return 0.0, 0.0
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        loop(PROFILED)
        synchronize(device)
    on_device = [event for event in profiler.events() if event.device_type.name == "CUDA"]
    # Annotations of the host appear among the device's events, with the time of what they span.
    kernels = [event for event in on_device if not event.is_user_annotation]
    seconds = sum(event.self_device_time_total for event in kernels) / 1e6
    return seconds / PROFILED, len(kernels) / PROFILED


def and_wait(run: Callable[[int], Tensor | None]) -> Callable[[int], None]:
    """The loop, but it returns only when the device has finished."""

    def work(iterations: int) -> None:
        loss = run(iterations)
        assert loss is not None
        loss.item()

    return work


def engine_loop(config: RunConfig, device: torch.device) -> Callable[[int], Tensor | None]:
    """brx's loop, as `brx train` runs it."""
    return runner(assemble(config, random_batches(config, device).batch, device=device).engine)


def random_batches(config: RunConfig, device: torch.device) -> Prefetcher:
    """Random tokens that come through the trainer's prefetcher."""
    shape = (config.training.batch_size, config.model.sequence_length)
    return Prefetcher(random_tokens(*shape, config.data.vocabulary_size), device)


def plain_loop(config: RunConfig, device: torch.device) -> Callable[[int], Tensor]:
    """A training loop without brx: autocast, backward pass, gradient clipping, fused AdamW."""
    model = whole_model(config.model, config.data.vocabulary_size, config.training.seed)
    model.to(device)
    if config.runtime.compile:
        for block in model.blocks.values():
            block.compile()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.optimizer.lr, weight_decay=0.01, fused=True
    )
    batches, context = random_batches(config, device), autocast(config.runtime, device)
    done = 0

    def run(iterations: int) -> Tensor:
        nonlocal done
        for _ in range(iterations):
            done += 1
            with context():
                _, loss, auxiliary_loss = model(*batches.batch(done))
            optimizer.zero_grad()
            (loss if auxiliary_loss is None else loss + auxiliary_loss).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.training.clip)
            optimizer.step()
        found: Tensor = loss.detach()
        return found

    return run


def write(
    costs: dict[tuple[str, int], Cost], options: argparse.Namespace, config: RunConfig
) -> None:
    """Write the table. Its ratios are to AdamW at the same P, and to the same variant at P = 1."""
    columns = ["variant", "P", "ms", "kernels, ms", "launches", "no kernel runs", "tokens/s"]
    table = Table("iterations", [*columns, "over AdamW", "over own P = 1"])
    tokens = config.training.batch_size * config.model.sequence_length
    for (name, stages), cost in costs.items():
        adamw = costs.get((ADAMW, stages))
        undelayed = costs.get((name, 1))
        on_device = ["", "", ""]
        if cost.launches:
            kernels = f"{1e3 * cost.kernels:.2f}"
            on_device = [kernels, f"{cost.launches:.0f}", f"{cost.idle_share:.0%}"]
        table.add(
            name,
            str(stages),
            f"{1e3 * cost.wall:.2f}",
            *on_device,
            f"{tokens / cost.wall:,.0f}",
            "" if adamw is None else f"{cost.wall / adamw.wall:.2f}",
            "" if undelayed is None else f"{cost.wall / undelayed.wall:.2f}",
        )
    precision = f"{config.runtime.precision}, compile {config.runtime.compile}"
    table.write(
        f"An iteration of {options.config} on one device: {precision}",
        f"Mean of {options.iterations} iterations after as many to warm up, refreshes (every 10) "
        f"included, the first basis not. Kernels and launches: mean of {PROFILED} more iterations "
        f"under the profiler.",
        folder=options.out,
    )


if __name__ == "__main__":
    main()
