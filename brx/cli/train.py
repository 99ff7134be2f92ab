"""`brx train`: train one run, or continue it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from brx.cli.options import ConfigName, Overrides, option
from brx.cli.usage import Application

app = Application()


@app.add("""\
  brx train quick                                          a preset
  brx train quick --set optimizer.method=basis-rotation    another method
  brx train my.yaml --set pipeline.stages=16 optimizer.lr=3e-4 --out runs/mine
  brx train runs/mine --resume                             continue a run
  brx train quick --devices 2                              two processes, one per device; the same trajectory
  torchrun --nnodes 2 --nproc-per-node 8 -m brx train paper-95m       several machines

CONFIG may also be a run's folder. Exit code 130: stopped with Ctrl-C, and can be resumed.
""")
def train(
    config: ConfigName,
    *,
    overrides: Overrides,
    out: Annotated[Path | None, option("DIR", "the run's folder (default: runs/NAME-METHOD-pP-sSEED)")] = None,
    devices: Annotated[int | None, option("R", "processes, one per device (sets pipeline.devices)")] = None,
    profile: Annotated[bool, typer.Option("--profile", help="write a profiler trace of a few iterations")] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="continue from the newest checkpoint, if there is one")
    ] = False,
) -> None:
    """Train; exit code 0 when the run is finished, 130 when it was stopped and can be resumed."""
    from brx.config.loading import find_config, load_config
    from brx.distributed.launch import end_with_launcher, launch, started_as_one_of_many

    source = Path(config)
    is_run = source.is_dir()
    is_rank = started_as_one_of_many()
    num_ranks = os.environ["WORLD_SIZE"] if is_rank else devices
    settings = overrides if num_ranks is None else [*overrides, f"pipeline.devices={num_ranks}"]
    run_config = load_config(source / "config.yaml" if is_run else config, settings, is_new=not resume)
    # Wrong settings are told at once; torch takes seconds to load.
    from brx.distributed.processes import DistributedWorld
    from brx.pipeline.world import World
    from brx.runs.checkpoint import check_request
    from brx.runs.folder import RunFolder, default_folder, hand_down, hold
    from brx.train.device import choose_device
    from brx.train.loop import train

    folder = out or (source if is_run else default_folder(run_config, find_config(config).stem))

    world = World()
    if is_rank:
        end_with_launcher()
        world = DistributedWorld(run_config.pipeline.timeout_s)
    elif run_config.pipeline.devices > 1:
        # Refuses more devices than there are.
        choose_device(run_config.runtime.device, run_config.pipeline.devices - 1)
        flags = [flag for flag, given in (("--resume", resume), ("--profile", profile)) if given]
        arguments = ["train", config, "--out", str(folder), *flags, "--set", *settings]
        with hold(folder) as lock:
            check_request(RunFolder(folder), run_config, resume=resume)
            code = launch(arguments, run_config.pipeline.devices, descriptors=[lock], environment=hand_down(lock))
        raise typer.Exit(code)
    status = train(run_config, folder, resume=resume, world=world, profile=profile)
    world.close()
    if world.rank == 0:
        print(folder)
    if status != "finished":
        raise typer.Exit(130)
