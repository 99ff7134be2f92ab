"""`brx plan`: what a run needs and how long it takes, before anybody pays for it."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from brx.cli.arguments import add_overrides

if TYPE_CHECKING:
    from brx.config.schema import RunConfig
    from brx.planning.plan import RankMemory

HELP = "say what a run needs: memory of every device, multiplications, time"
EXAMPLES = """\
  brx plan paper-95m                                                    on one device
  brx plan paper-1b --devices 6 --device-memory 80GB                    does it fit, and on how few devices would it
  brx plan paper-1b --devices 6 --throughput A100                       with the time, at 40 % of the data sheet's peak
  brx plan paper-1b --throughput 120T --set optimizer.method=basis-rotation    at 120 TFLOP/s, as measured
"""

UTILIZATION = 0.4
"""Assumed share of a data sheet's peak."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("config", metavar="CONFIG", help="a YAML file or a preset's name")
    add_overrides(parser)
    parser.add_argument("--devices", type=int, metavar="R", help="devices (default: pipeline.devices)")
    parser.add_argument("--device-memory", metavar="SIZE", help="of each device, for example 24GB or 80GiB")
    parser.add_argument(
        "--throughput",
        metavar="FLOPS",
        help=f"of each device: FLOP/s as measured (120T), or a device's name ({UTILIZATION:.0%}% of its peak)",
    )


def run(args: argparse.Namespace) -> int:
    """Print the plan; 0 also where it does not fit."""
    from rich.console import Console

    from brx.cli.memory_tables import rank_notes, rank_table
    from brx.config.loading import load_config
    from brx.config.quantities import parse_bytes
    from brx.planning.plan import plan_memory, planned_device_type

    overrides = args.overrides if args.devices is None else [*args.overrides, f"pipeline.devices={args.devices}"]
    config = load_config(args.config, overrides)
    memory = None if args.device_memory is None else parse_bytes(args.device_memory, "--device-memory")
    throughput = None if args.throughput is None else parse_throughput(args.throughput, config.runtime.precision)
    device_type = planned_device_type(config)
    ranks = plan_memory(config, device_type)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 140
    console.print(rank_table(config, ranks, memory))
    console.print(*rank_notes(config), sep="\n", soft_wrap=True)
    if memory is not None:
        console.print(_verdict(config, ranks, device_type, memory), soft_wrap=True)
    console.print(*_time_lines(config, throughput), sep="\n", soft_wrap=True)
    return 0


def parse_throughput(text: str, precision: str) -> float:
    """FLOP/s from a number, or from a device's name.

    Raises:
        UserError: it is neither.
    """
    from brx.config.quantities import parse_flops
    from brx.errors import UserError
    from brx.planning.device_peaks import PEAKS, peak_flops

    peak = peak_flops(text, precision)
    if peak is not None:
        return UTILIZATION * peak
    if text[:1].isdigit():
        return parse_flops(text, "--throughput")
    raise UserError(f"--throughput {text}: write FLOP/s as a number, for example 120T, or one of: {', '.join(PEAKS)}")


def _verdict(config: RunConfig, ranks: list[RankMemory], device_type: str, memory: float) -> str:
    """Whether it fits, on how few devices it would, and otherwise what would."""
    from brx.model.stage import partition
    from brx.planning.plan import fits, plan_memory, smallest_num_ranks, what_would_fit

    smallest = smallest_num_ranks(config, device_type, memory)
    least = f"the smallest R that fits is {smallest}"
    if smallest is None:
        stages = config.pipeline.stages
        finest = max(plan_memory(config, device_type, partition(stages, stages)), key=lambda rank: rank.peak)
        least = f"even R = {stages} needs {finest.peak / 1e9:.1f} GB on rank {finest.rank}"
    if fits(ranks, memory):
        return f"Fits into {memory / 1e9:.1f} GB a device; {least}."
    remedies = what_would_fit(config, device_type, memory)
    would = f" Would fit: {' or '.join(remedies)}." if remedies else ""
    return f"Does not fit into {memory / 1e9:.1f} GB a device; {least}.{would}"


def _time_lines(config: RunConfig, throughput: float | None) -> list[str]:
    """Multiplications, time, and what a synchronous pipeline would lose."""
    from brx.model.sizes import training_flops
    from brx.model.stage import partition
    from brx.planning.plan import rank_flops, synchronous_bubble

    training, num_ranks = config.training, config.pipeline.devices
    ranges = partition(config.pipeline.stages, num_ranks)
    by_rank = [rank_flops(config, own) for own in ranges]
    model = training_flops(config.model, config.data.vocabulary_size, training.batch_size)
    lines = [
        f"FLOPs an iteration: {model / 1e12:.3g} T for the model, {(sum(by_rank) - model) / 1e12:.3g} T for"
        f" recomputation and the method's matrix products; the busiest rank does {max(by_rank) / sum(by_rank):.0%}."
    ]
    # One micro-batch an update is what has this trajectory's data; more of them are smaller or make a larger batch.
    counts = sorted({1, 2, 4, training.batch_size})
    bubbles = {count: synchronous_bubble(num_ranks, count) for count in counts}
    if num_ranks > 1:
        shares = ", ".join(f"{share:.0%} with {count}" for count, share in bubbles.items())
        lines.append(f"A synchronous pipeline would idle {shares} micro-batches an update; this one does not.")
    if throughput is None:
        lines.append("For the time, give --throughput (FLOP/s a device as measured, or a device's name).")
        return lines
    seconds = max(by_rank) / throughput
    hours = seconds * training.last_iteration / 3600
    lines.append(
        f"At {throughput / 1e12:.4g} TFLOP/s a device: {seconds:.3g} s an iteration,"
        f" {training.last_iteration:,} iterations in {hours:.3g} h on {num_ranks} device(s)"
        + (f"; synchronously {hours / (1 - bubbles[1]):.3g} h." if num_ranks > 1 else ".")
    )
    return lines
