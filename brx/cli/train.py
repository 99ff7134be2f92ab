"""Training: `brx train` (one run), `brx sweep` (a grid), `brx compare` (the same runs for every
method)."""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from brx.cli.options import (
    ConfigName,
    DryRun,
    FigurePath,
    Format,
    Jobs,
    Overrides,
    RetryFailed,
    Strict,
    argument,
    complete_method,
    flag,
    option,
)
from brx.cli.usage import Application, print_note, print_table, refuse
from brx.errors import UserError

if TYPE_CHECKING:
    from brx.config.schema import RunConfig
    from brx.pipeline.world import World
    from brx.runs.formats import Format as TableFormat
    from brx.sweep.compare import Board

app = Application()


@app.add("""\
  # a preset
  brx train quick
  # with another method
  brx train quick --set optimizer.method=basis-rotation
  # continue a run
  brx train runs/mine --resume
  # two processes, one per device, with the same trajectory
  brx train quick --devices 2
  # several machines: on each of them
  torchrun --nnodes 2 --nproc-per-node 8 -m brx train paper-95m
  # stop before the time limit of a job
  brx train paper-95m --resume --stop-after 11h50m
  # read the token files as a whole first
  brx train runs/mine --resume --verify

CONFIG may also be the folder of a run. With exit code 130 the run was stopped
(Ctrl-C) and can be resumed.
""")
def train(
    config: ConfigName,
    *,
    overrides: Overrides,
    out: Annotated[
        Path | None,
        option(
            "DIR",
            "the run's folder (default: runs/NAME-METHOD-pP-sSEED, or NAME-CLASS-METHOD-... if the "
            "model class is not the file's)",
        ),
    ] = None,
    devices: Annotated[
        int | None,
        option("R", "number of processes, one per device (sets pipeline.devices)", min=1),
    ] = None,
    profile: Annotated[
        bool, flag("--profile", "write a profiler trace of iterations 8 to 12")
    ] = False,
    resume: Annotated[
        bool, flag("--resume", "continue from the newest checkpoint, if there is one")
    ] = False,
    stop_after: Annotated[
        str | None,
        option("TIME|N", "save and stop after a time (11h50m) or after iteration N"),
    ] = None,
    verify: Annotated[
        bool,
        flag(
            "--verify",
            "check the SHA-256 of the token files, even if they look unchanged",
        ),
    ] = False,
) -> None:
    """Train; exit code 0 when the run is finished or its time is over, 130 when it was stopped.

    A run that is not finished can be resumed.
    """
    started = time.monotonic()
    from brx.config.loading import find_config, load_config
    from brx.distributed.launch import end_with_launcher, rank_and_world_size
    from brx.files import user_path

    source = user_path(config)
    is_run = (source / "config.yaml").is_file()
    place = rank_and_world_size()
    num_ranks = devices
    if place is not None:
        _, num_ranks = place
    refuse(
        devices not in (None, num_ranks),
        f"--devices {devices}: WORLD_SIZE is {num_ranks}; leave one out",
    )
    settings = [*overrides]
    if num_ranks is not None:
        settings.append(f"pipeline.devices={num_ranks}")
    stop_settings, seconds = _when_to_stop(stop_after)
    settings += stop_settings
    run_config = load_config(config, settings, is_new=not resume)
    seconds = min(seconds, run_config.training.session_seconds)
    refuse(
        run_config.is_recorded,
        f"{config}: was recorded from a loop of your own; continue it in that loop",
    )
    # Imported after the settings are checked: loading torch takes seconds.
    from brx.runs.folder import default_folder
    from brx.train.loop import train

    folder = out or (source if is_run else default_folder(run_config, find_config(config)))
    if place is None and run_config.pipeline.devices > 1:
        arguments = ["train", config, "--out", str(folder)]
        switches = {"--resume": resume, "--profile": profile, "--verify": verify}
        arguments += [name for name, is_given in switches.items() if is_given]
        if math.isfinite(seconds):
            left = seconds - (time.monotonic() - started)
            arguments += ["--stop-after", f"{max(1, int(left))}s"]
        if settings:
            arguments += ["--set", *settings]
        raise typer.Exit(_start_ranks(run_config, folder, arguments, resume=resume))

    if place is not None:
        end_with_launcher()
    world = _meet(run_config, is_one_of_many=place is not None)
    left = seconds - (time.monotonic() - started)
    status = train(
        run_config,
        folder,
        resume=resume,
        world=world,
        profile=profile,
        seconds=left,
        verify=verify,
    )
    world.close()
    if world.rank == 0:
        print(folder)
    if status == "interrupted":
        raise typer.Exit(130)


def _start_ranks(config: RunConfig, folder: Path, arguments: list[str], *, resume: bool) -> int:
    """Run `brx` with these arguments in one process per device, which train together in `folder`;
    returns the exit code."""
    from brx.distributed.launch import launch
    from brx.runs.checkpoint import check_request
    from brx.runs.folder import RunFolder
    from brx.runs.lock import hand_down, hold
    from brx.train.device import choose_device

    runtime = config.runtime
    num_devices = config.pipeline.devices
    # Raises a UserError if there are fewer devices than the run needs.
    choose_device(runtime.device, num_devices - 1, share_gpus=runtime.share_gpus)
    with hold(folder) as lock:
        check_request(RunFolder(folder), config, resume=resume)
        return launch(arguments, num_devices, descriptors=[lock], environment=hand_down(lock))


def _when_to_stop(stop_after: str | None) -> tuple[list[str], float]:
    """`--stop-after` as settings and as seconds: an iteration becomes a setting, a time becomes
    seconds. Without a time, the seconds are infinite."""
    if stop_after is None:
        return [], math.inf
    if stop_after.isdecimal():
        return [f"training.stop_after={stop_after}"], math.inf
    from brx.config.schema import parse_duration

    try:
        return [], parse_duration(stop_after)
    except ValueError as error:
        raise UserError(f"--stop-after: {error}") from None


def _meet(config: RunConfig, *, is_one_of_many: bool) -> World:
    """This process's view of all processes of the run; waits until all of them have joined."""
    from brx.distributed.processes import DistributedWorld
    from brx.pipeline.world import World

    if not is_one_of_many:
        return World()
    return DistributedWorld(config.pipeline.timeout_s, through_host=config.runtime.share_gpus)


@app.add("""\
  # list the runs, and how long they will take
  brx sweep configs/sweeps/similar/main.yaml --dry-run
  # the same file by its name, two runs at a time
  brx sweep similar/main --jobs 2
  # on the Ray cluster that this node belongs to
  brx sweep configs/sweeps/paper/main.yaml --launcher ray --address auto
""")
def sweep(
    sweeps: Annotated[
        list[Path],
        argument(
            "SWEEP.yaml",
            "sweep files, or names of sweeps that come with brx (similar/main); run in this order",
        ),
    ],
    *,
    out: Annotated[
        Path | None, option("DIR", "folder of the runs (default: the one in the file)")
    ] = None,
    jobs: Jobs = None,
    launcher: Annotated[
        Literal["local", "ray"], typer.Option(help="where to run the cells")
    ] = "local",
    address: Annotated[
        str | None,
        option("ADDRESS", "of a Ray cluster: auto or HOST:PORT (default: start one here)"),
    ] = None,
    dry_run: DryRun = False,
    retry_failed: RetryFailed = False,
) -> None:
    """Exit code 0 when all cells are done, 1 when some failed, 130 when interrupted."""
    from brx.sweep.checks import check_names, check_own_methods
    from brx.sweep.run import list_cells, make_launcher, run_and_print
    from brx.sweep.spec import Sweep

    refuse(address is not None and launcher != "ray", "--address: needs --launcher ray")
    specifications = [Sweep.load(path, out) for path in sweeps]
    check_own_methods(specifications)
    if dry_run:
        for specification in specifications:
            launching = make_launcher(launcher, specification, jobs, address)
            list_cells(specification, launching, retry_failed=retry_failed)
        return
    check_names(specifications)
    succeeded = [
        run_and_print(
            specification,
            make_launcher(launcher, specification, jobs, address),
            retry_failed=retry_failed,
        )
        for specification in specifications
    ]
    if not all(succeeded):
        raise typer.Exit(1)


@app.add("""\
  # train the runs that are missing, and show the leaderboard
  brx compare my_method.py:MyMethod
  brx compare torch.optim:Adamax --set optimizer.arguments.betas='[0.9, 0.99]'
  # try two learning rates for the parameters that are not matrices
  brx compare muon --rest-lr 3e-4 --rest-lr 1e-3
  # list the missing runs, and how long they take
  brx compare --all-builtin --dry-run
  # show the leaderboard, and train nothing
  brx compare

docs/compare.md explains the protocol. The runs are in runs/compare; committed
runs in results/compare count, too.
""")
def compare(
    methods: Annotated[
        list[str] | None,
        argument(
            "METHOD",
            "methods: names, FILE.py:NAME or package.module:NAME",
            autocompletion=complete_method,
        ),
    ] = None,
    *,
    all_builtin: Annotated[
        bool, flag("--all-builtin", "compare all methods that come with brx")
    ] = False,
    overrides: Annotated[
        list[str] | None,
        option("KEY=VALUE...", "optimizer settings (needs exactly one METHOD)", "--set"),
    ] = None,
    rest_lr: Annotated[
        list[float] | None,
        option(
            "LR...",
            "also try these rates as optimizer.rest_lr of METHOD, each with its own best lr",
        ),
    ] = None,
    seeds: Annotated[
        int, option("N", "seeds at the best learning rates; two or more give intervals", min=1)
    ] = 1,
    jobs: Jobs = None,
    out: Annotated[Path, option("DIR", "folder of the runs")] = Path("runs/compare"),
    committed: Annotated[Path, option("DIR", "folder of committed runs")] = Path("results/compare"),
    dry_run: DryRun = False,
    retry_failed: RetryFailed = False,
    strict: Strict = False,
    format: Format = "table",
    figure: FigurePath = None,
) -> None:
    """Exit code 0 when all runs are done, 1 when some failed, 130 when interrupted (the same
    command continues)."""
    from brx.data.prepare import prepare
    from brx.methods.table import CUSTOM, METHODS
    from brx.runs.folder import stop_at_damage
    from brx.sweep import compare as comparison
    from brx.sweep.checks import check_names, check_own_methods
    from brx.sweep.run import list_cells, make_launcher, run_and_print

    stop_at_damage(strict)
    refuse(
        dry_run and not methods and not all_builtin, "--dry-run: give a METHOD, or --all-builtin"
    )
    refuse(all_builtin and methods, "METHOD and --all-builtin: give one of the two")
    for name, given in (("--set", overrides), ("--rest-lr", rest_lr)):
        refuse(given and len(methods or []) != 1, f"{name}: needs exactly one METHOD")
    asked = [name for name in METHODS if name != CUSTOM] if all_builtin else list(methods or [])
    settings = comparison.parse_settings(overrides or [])
    sweeps = comparison.protocols(asked, settings, rest_lr or [], seeds, out)
    check_own_methods(sweeps)
    # Prepare the data first: committed runs count only if their corpus is the same.
    corpus = prepare(sweeps[0].cells[0].config.data).fingerprint if sweeps else None
    comparison.take_committed(sweeps, committed, corpus)
    if dry_run:
        for sweep in sweeps:
            list_cells(sweep, make_launcher("local", sweep, jobs, None), retry_failed=retry_failed)
        return
    check_names(sweeps)
    launches = [(sweep, make_launcher("local", sweep, jobs, None)) for sweep in sweeps]
    succeeded = [
        run_and_print(sweep, launching, retry_failed=retry_failed) for sweep, launching in launches
    ]
    compared = [sweep.cells[0].config.optimizer.method for sweep in sweeps]
    _show(comparison.read_board([out, committed], compared), format, figure)
    if not all(succeeded):
        print_note("some runs failed; those that diverged count as tried, with an infinite loss")
        raise typer.Exit(1)


def _show(board: Board, format: TableFormat, figure: Path | None) -> None:
    """Print a leaderboard with its legend, and draw it."""
    from brx.runs.tables import leaderboard_table
    from brx.sweep.compare import DELAYS, board_legend

    print_table(leaderboard_table(board.rows, list(DELAYS)), format)
    # The other formats are for programs: stdout holds the table alone.
    comments = sys.stdout if format == "table" else sys.stderr
    print(*board_legend(board), sep="\n", file=comments)
    print_note(*board.notes)
    if figure is not None:
        from brx.plot.any_runs import draw_leaderboard  # loads matplotlib

        files = draw_leaderboard(board.rows, list(DELAYS), figure)
        print(*files, sep="\n", file=comments)
