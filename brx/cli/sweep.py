"""`brx sweep`: run a grid of runs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from brx.sweep.run import Launcher
    from brx.sweep.spec import Sweep

HELP = "run a grid of runs, several at a time; continues where it was left"
EXAMPLES = """\
  brx sweep configs/sweeps/cpu/main.yaml --dry-run      list the cells and how long they will take
  brx sweep cpu/main --jobs 2                           the same file, by its name
  brx sweep configs/sweeps/paper/main.yaml --launcher ray --address auto     on the Ray cluster of this node
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "sweep",
        type=Path,
        metavar="SWEEP.yaml",
        nargs="+",
        help="sweep files, or names of those that come with brx (cpu/main), run in this order",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the cells (default: as the file says)")
    parser.add_argument("--jobs", type=int, metavar="N", help="cells at a time (default: one a GPU, else one a core)")
    parser.add_argument("--launcher", choices=["local", "ray"], default="local", help="where cells run")
    parser.add_argument("--address", help="of a Ray cluster: auto or HOST:PORT (default: one started here)")
    parser.add_argument("--dry-run", action="store_true", help="list the cells and estimate the time; run nothing")
    parser.add_argument("--retry-failed", action="store_true", help="run failed cells again")


def run(args: argparse.Namespace) -> int:
    """0 when all cells are done, 1 when some failed, 130 when interrupted."""
    from brx.errors import UserError
    from brx.sweep.spec import Sweep

    if args.jobs is not None and args.jobs < 1:
        raise UserError(f"--jobs: must be at least 1, got {args.jobs}")
    if args.address is not None and args.launcher != "ray":
        raise UserError("--address: only --launcher ray has one")
    sweeps = [Sweep.load(path, args.out) for path in args.sweep]
    if args.dry_run:
        for sweep in sweeps:
            _list(sweep, args.jobs, retry_failed=args.retry_failed)
        return 0
    return max(_run(sweep, args) for sweep in sweeps)


def _list(sweep: Sweep, jobs: int | None, *, retry_failed: bool) -> None:
    from collections import Counter

    from rich.console import Console

    from brx.sweep.cell_state import state_of
    from brx.sweep.display import duration
    from brx.sweep.estimate import remaining_seconds
    from brx.sweep.local import LocalLauncher
    from brx.sweep.run import choices_and_repetitions

    console = Console(highlight=False)
    _, repetitions = choices_and_repetitions(sweep)
    states = {cell.name: state_of(cell) for cell in sweep.cells}
    for name, state in states.items():
        console.print(f"{state.value:12}{name}", soft_wrap=True, markup=False)
    num_jobs = LocalLauncher(jobs, max(cell.config.pipeline.devices for cell in sweep.cells)).num_jobs
    left = remaining_seconds(
        [*sweep.cells, *repetitions],
        num_jobs,
        lambda line: Console(stderr=True).print(line, highlight=False),
        retry_failed=retry_failed,
    )
    counts = ", ".join(f"{count} {state.value}" for state, count in Counter(states.values()).items())
    time = (
        f"about {duration(left)} with {num_jobs} at a time" if left is not None else "too large to time without a GPU"
    )
    more = f" and {len(repetitions)} repetitions of the chosen ones" if repetitions else ""
    console.print(f"{sweep.path}: {len(states)} cells{more} in {sweep.out}: {counts}; {time}", soft_wrap=True)


def _run(sweep: Sweep, args: argparse.Namespace) -> int:
    import signal

    from rich.console import Console

    from brx.sweep.display import SweepDisplay
    from brx.sweep.report import choice_table, failure_table, write_choices
    from brx.sweep.run import run_sweep

    with _launcher(sweep, args) as launcher, SweepDisplay(launcher.num_jobs) as display:
        # From a terminal, a scheduler, or to a job in the background. After the launcher: Ray has a handler of its own.
        for stop in (signal.SIGINT, signal.SIGTERM):
            signal.signal(stop, signal.default_int_handler)
        outcome = run_sweep(sweep, launcher, display, retry_failed=args.retry_failed)
    console = Console(highlight=False)
    if outcome.chosen:
        assert sweep.spec.choose is not None
        console.print(choice_table(outcome.chosen, sweep.spec.choose))
        for path in write_choices(outcome.chosen, sweep):
            console.print(path, soft_wrap=True)
    if outcome.failures:
        console.print(failure_table(outcome.failures))
        return 1
    console.print(f"{sweep.path}: all {len(outcome.cells)} cells are done, in {sweep.out}", soft_wrap=True)
    return 0


def _launcher(sweep: Sweep, args: argparse.Namespace) -> AbstractContextManager[Launcher]:
    from contextlib import closing, nullcontext

    from brx.sweep.local import LocalLauncher
    from brx.sweep.ray_cluster import RayLauncher

    if args.launcher == "ray":
        return closing(RayLauncher(args.jobs, sweep.cells, args.address))
    return nullcontext(LocalLauncher(args.jobs, max(cell.config.pipeline.devices for cell in sweep.cells)))
