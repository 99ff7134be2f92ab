"""`brx train`: train one run, or continue it."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from brx.cli.arguments import add_overrides

HELP = "train a GPT under asynchronous-pipeline delay"
EXAMPLES = """\
  brx train quick                                          a preset
  brx train quick --set optimizer.method=basis-rotation    another method
  brx train my.yaml --set pipeline.stages=16 optimizer.lr=3e-4 --out runs/mine
  brx train runs/mine --resume                             continue a run
  brx train quick --devices 2                              two processes, one a device; the same trajectory
  torchrun --nnodes 2 --nproc-per-node 8 -m brx train paper-95m       several machines
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("config", metavar="CONFIG", help="a YAML file, a preset's name, or a run's folder")
    add_overrides(parser)
    parser.add_argument("--out", type=Path, metavar="DIR", help="the run's folder (default: runs/NAME-METHOD-pP-sSEED)")
    parser.add_argument("--devices", type=int, metavar="R", help="processes, one a device (sets pipeline.devices)")
    parser.add_argument("--profile", action="store_true", help="write a profiler trace of a few iterations")
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint, if there is one")


def run(args: argparse.Namespace) -> int:
    """Train; 0 when the run is finished, 130 when it was stopped and can be resumed."""
    from brx.config.loading import find_config, load_config
    from brx.distributed.launch import end_with_launcher, launch
    from brx.distributed.processes import DistributedWorld, started_as_one_of_many
    from brx.pipeline.world import SingleDevice, World
    from brx.runs.folder import default_folder
    from brx.train.device import choose_device
    from brx.train.loop import train

    source = Path(args.config)
    is_run = source.is_dir()
    devices = os.environ["WORLD_SIZE"] if started_as_one_of_many() else args.devices
    overrides = args.overrides if devices is None else [*args.overrides, f"pipeline.devices={devices}"]
    config = load_config(source / "config.yaml" if is_run else args.config, overrides)
    out = args.out or (source if is_run else default_folder(config, find_config(args.config).stem))

    world: World = SingleDevice()
    if started_as_one_of_many():
        end_with_launcher()
        world = DistributedWorld(config.pipeline.timeout_s)
    elif config.pipeline.devices > 1:
        choose_device(config.runtime.device, config.pipeline.devices - 1)  # refuses more than there are
        flags = [f"--{name}" for name in ("resume", "profile") if getattr(args, name)]
        arguments = ["train", args.config, "--out", str(out), *flags, "--set", *overrides]
        return launch(arguments, config.pipeline.devices)
    status = train(config, out, resume=args.resume, world=world, profile=args.profile)
    world.close()
    if world.rank == 0:
        print(out)
    return 0 if status == "finished" else 130
