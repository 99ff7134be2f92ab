"""`brx schedule`: what the devices of a pipeline do over time."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "show who computes what when, synchronously and asynchronously, with idle times and delays"
EXAMPLES = """\
  brx schedule --stages 4                                       the actions of each device, as the engine runs them
  brx schedule --stages 8 --devices 2 --micro-batches 6
  brx schedule --stages 4 --figure figures/schedule             the picture: synchronous, asynchronous, delay
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--stages", type=int, required=True, metavar="P", help="virtual stages")
    parser.add_argument("--devices", type=int, metavar="R", help="devices (default: one a stage)")
    parser.add_argument("--micro-batches", type=int, default=4, metavar="M", help="in a synchronous step (default: 4)")
    parser.add_argument("--figure", type=Path, metavar="PATH", help="draw PATH.png and PATH.pdf (needs R = P)")


def run(args: argparse.Namespace) -> int:
    """Print the schedules, or draw them."""
    from brx.errors import UserError
    from brx.plot.schedule import draw_schedules

    devices = args.stages if args.devices is None else args.devices
    if args.stages < 1 or args.micro_batches < 1:
        raise UserError("--stages and --micro-batches must be at least 1")
    if not 1 <= devices <= args.stages:
        raise UserError(f"--devices must be from 1 to --stages ({args.stages}), got {devices}")
    if args.figure is None:
        _print(args.stages, devices, args.micro_batches)
        return 0
    if devices != args.stages:
        raise UserError(f"--figure shows one stage a device: leave out --devices, or make it {args.stages}")
    for path in draw_schedules(devices, args.micro_batches, args.figure):
        print(path)
    return 0


def _print(num_stages: int, num_ranks: int, num_micro_batches: int) -> None:
    from brx.model.stage import partition
    from brx.pipeline.delay import stage_delay
    from brx.pipeline.schedule import asynchronous_1f1b, gpipe, synchronous_1f1b
    from brx.pipeline.timeline import bubble_share, steady_state, timeline

    ranks = range(num_ranks)
    last = num_micro_batches + 2 * num_ranks
    schedules = {
        "GPipe, one step": [list(gpipe(rank, num_ranks, num_micro_batches, 1)) for rank in ranks],
        "synchronous 1F1B, one step": [list(synchronous_1f1b(rank, num_ranks, num_micro_batches, 1)) for rank in ranks],
        "asynchronous 1F1B": [list(asynchronous_1f1b(rank, num_ranks, 1, lambda: last)) for rank in ranks],
    }
    for name, actions in schedules.items():
        timed = timeline(actions)
        print(f"{name}: idle {bubble_share(timed):.1%} of the time shown", end="")
        start, end = steady_state(timed)
        if name.startswith("asynchronous") and end > start:
            print(f", {bubble_share(timed, start, end):.1%} once the pipeline is full", end="")
        print()
        for row in actions:
            print("  " + " ".join(str(action) for action in row))
    print("delay of the stages, by device:")
    for rank, own in enumerate(partition(num_stages, num_ranks)):
        print(f"  {rank}: " + " ".join(str(stage_delay(stage, num_stages)) for stage in own))
