"""What each process of the distributed tests runs."""

import json
import signal
import time
from pathlib import Path
from unittest import mock

import torch

from brx.data.prepare import prepare
from brx.distributed.processes import DistributedWorld
from brx.errors import NeighbourLostError
from brx.runs.folder import RunFolder
from brx.train.loop import Trainer, train
from tests.train.helpers import tiny_config

OVERRIDES = {
    "pipedream": ["optimizer.method=pipedream"],
    "bilateral": ["optimizer.method=basis-rotation", "optimizer.frequency=5"],
    "unilateral": [
        "optimizer={method: basis-rotation, lr: 0.01, source: 1st, geometry: unilateral, "
        "frequency: 5}"
    ],
}
CONV_MIXER = f"{Path(__file__).parents[2] / 'examples/models/conv_mixer.py'}:ConvMixer"
ROPE_GPT = f"{Path(__file__).parents[2] / 'examples/models/rope_gpt.py'}:RopeGPT"
XPIPE = f"{Path(__file__).parents[2] / 'examples/methods/xpipe.py'}:XPipe"
STAGE_AWARE = "{method: basis-rotation, lr: 0.01, frequency: 3, refresh_schedule: stage-aware}"


# At least one run with each stage count, method, stash mode, delay, ring and model.
FEW = (
    "pipedream-p4-none",
    "bilateral-p4-predict",
    "unilateral-p8-predict",
    "pipedream-2bw-exact",
    "pipedream-two-versions-none",
    "pipedream-host-predict",
    "pipedream-forecast",
    "pipedream-error-feedback",
    "pipedream-xpipe",
    "pipedream-llama",
    "pipedream-own-model",
    "pipedream-rope-gpt",
    "stage-aware-mixture",
    "scion-mixture",
)


def equality_configs(folder, which="all"):
    """The runs that must not depend on the number of devices, by name.

    Args:
        folder: the folder of their data.
        which: `all`, `few` (those in `FEW`) or `rest` (the others).
    """
    runs = {}
    for stages, modes in ((4, ("none", "predict", "exact")), (8, ("exact", "none", "predict"))):
        for (name, method), stash in zip(OVERRIDES.items(), modes, strict=True):
            settings = [f"pipeline.stages={stages}", f"pipeline.stash={stash}", *method]
            runs[f"{name}-p{stages}-{stash}"] = [*settings, f"training.iterations={stages + 5}"]
    split = ["model.blocks=4", "training.iterations=9", "pipeline.accumulation=3"]
    for stash in ("exact", "none", "predict"):
        common = [*split, f"pipeline.stash={stash}"]
        runs[f"pipedream-2bw-{stash}"] = [*common, "pipeline.delay=2bw"]
        runs[f"pipedream-two-versions-{stash}"] = [
            *common,
            "model.blocks=8",
            "pipeline.stages=8",
            "optimizer.method=delay-compensation",
        ]
        runs[f"pipedream-host-{stash}"] = [
            *common,
            "pipeline.rings=host",
            "pipeline.delay=[5, 4, 4, 3]",
        ]
    deep = ["pipeline.stages=8", "training.iterations=12"]
    mixture = ["model.blocks=4", "model.moe={experts: 4}", "training.iterations=9"]
    runs |= {
        "pipedream-forecast": [*split, "pipeline.forecast=average-update"],
        "pipedream-last-update": [*deep, "pipeline.forecast=last-update"],
        "pipedream-error-feedback": [*split, "pipeline.delay=2bw", "pipeline.error_feedback=1"],
        "pipedream-xpipe": [*deep, f"optimizer.method={XPIPE}"],
        "pipedream-mixture": [*mixture, "pipeline.accumulation=3", "pipeline.delay=2bw"],
        "pipedream-llama": ["model.class=llama", "model.kv_heads=1", *deep],
        "pipedream-own-model": [f"model.class={CONV_MIXER}", "model.kernel=3", *deep],
        "pipedream-rope-gpt": [f"model.class={ROPE_GPT}", "model.heads=2", "training.iterations=9"],
        "stage-aware-mixture": [*mixture, f"optimizer={STAGE_AWARE}"],
        "scion-mixture": [*mixture, "optimizer.method=scion", "optimizer.lr=0.001"],
    }
    names = {"all": set(runs), "few": set(FEW), "rest": set(runs) - set(FEW)}[which]
    return {
        name: tiny_config(folder, "model.blocks=8", *overrides)
        for name, overrides in runs.items()
        if name in names
    }


def equality(folder, world, which):
    """Train the runs of `equality_configs` on the devices of `world`."""
    for name, config in equality_configs(folder, which).items():
        train(config, folder / f"r{world.num_ranks}" / name, world=world)


def resume(folder, world):
    """Continue the run in `resumed`, which one device has begun."""
    config = tiny_config(folder, f"pipeline.devices={world.num_ranks}", "pipeline.balance=time")
    train(config, folder / "resumed", resume=True, world=world)


def stop(folder, world):
    """Ask the last rank to stop between two validations, and note which micro-batches are in flight
    when all ranks have saved."""
    # All ranks stop 2 R - 1 updates after the last rank's update 20. A segment ends at 21.
    intervals = [
        "training.log_every=10",
        "training.validation_every=21",
        "training.checkpoint_every=100",
    ]
    trainer = Trainer(
        tiny_config(folder, "training.iterations=100", *intervals),
        RunFolder(folder / "stopped"),
        world,
    )
    if world.rank == world.num_ranks - 1:
        trainer._after_iteration = lambda: (
            trainer.iteration == 20 and signal.raise_signal(signal.SIGTERM)
        )
    status = trainer.run(resume=False)
    found = {
        "status": status,
        "iteration": trainer.iteration,
        "in_flight": sorted(trainer.assembly.engine._in_flight),
    }
    (folder / f"stop-{world.rank}.json").write_text(json.dumps(found))
    world.barrier()


def connect(folder, is_absent):
    """Connect to the neighbours, and note the error. With `is_absent`, stop before: as a rank that
    ends or hangs while it makes its model."""
    world = DistributedWorld(timeout_s=5)
    if is_absent:
        signal.pause()
    try:
        world.connect((1, 1, 1), torch.float32, torch.device("cpu"))
    except NeighbourLostError as error:
        (folder / "error").write_text(str(error))


def announce(folder):
    """Announce something as rank 0 first, then as every rank; note what is announced."""
    world = DistributedWorld(timeout_s=60)
    if world.rank == 0:
        world.announce_first("diverged", "by rank 0")
    world.barrier()
    world.announce_first("diverged", f"later, by rank {world.rank}")
    world.barrier()
    (folder / f"announced-{world.rank}").write_text(world.announced("diverged"))
    world.close()


def prepare_slowly(folder):
    """Train, while the last rank takes longer for its data than ranks otherwise wait."""
    timeout_s = 5

    def slow(*arguments, **options):
        time.sleep(timeout_s + 3)
        return prepare(*arguments, **options)

    world = DistributedWorld(timeout_s)
    is_slow = world.rank == world.num_ranks - 1
    with mock.patch("brx.train.loop.prepare", slow if is_slow else prepare):
        train(tiny_config(folder, "training.iterations=3"), folder / "slow", world=world)
    world.close()


def work(folder, jobs):
    """Do one job after the other, as one of the processes that the environment names.

    A job is `few`, `rest` or `all` (the runs of `equality_configs`), `resume` or `stop`."""
    world = DistributedWorld(timeout_s=120)
    for job in jobs:
        if job == "stop":
            stop(folder, world)
        elif job == "resume":
            resume(folder, world)
        else:
            equality(folder, world, job)
    world.close()
