"""Made-up runs of the presets, in compact form."""

import numpy as np

from brx.config.loading import dump_config, preset_with
from brx.files import write_json
from brx.paper.claims import CLAIMS, judge
from brx.paper.scales import SCALES, VARIANTS, Experiments, depth_settings
from brx.pipeline.delay import depth
from brx.sweep.cell import trajectory_id

LAPTOP = SCALES["laptop"]


def row(folder, name, scale=LAPTOP):
    """The outcome of a claim, judged by the runs in a folder."""
    (claim,) = [claim for claim in CLAIMS if claim.name == name]
    (outcome,) = judge(Experiments.load(scale, folder), [claim])
    return outcome


def write_method(folder, method, stages=32, settings=None, **options):
    """Runs of a method (of VARIANTS) on the laptop's preset; see `write_experiment`."""
    settings = {"pipeline.stages": stages, **VARIANTS[method], **(settings or {})}
    write_experiment(folder, LAPTOP.preset, settings, **options)


def write_experiment(
    folder,
    preset,
    settings,
    *,
    seeds=(0,),
    val_loss=None,
    slowness=None,
    status="finished",
    version=1,
):
    """Runs whose training loss falls as 3 / (1 + t / (100 slowness)), a run per seed.

    If there are more stages than the model has blocks, the blocks get the stages' delays, as in the
    sweeps.

    Args:
        folder: the folder of the runs.
        preset: the name of a preset.
        settings: overrides of the preset.
        seeds: the seeds of the runs.
        val_loss: the final validation loss; by default the training loss.
        slowness: by default P.
        status: the status in summary.json.
        version: the trajectory version there.
    """
    stages = settings.get("pipeline.stages") or 1
    blocks = settings.get("model.blocks") or preset_with(preset, {}).model.blocks
    settings = settings | depth_settings(stages, blocks)
    for seed in seeds:
        config = preset_with(preset, {**settings, "training.seed": seed})
        last = config.training.last_iteration
        steps = np.arange(1, last + 1)
        loss = 3.0 / (1.0 + steps / (100.0 * (slowness or depth(config.pipeline)))) + 0.001 * seed
        final = loss[-1] if val_loss is None else val_loss
        val_losses = {last // 2: loss[last // 2], last: final}
        summary = {"status": status, "data_fingerprint": "f", "trajectory_version": version}
        write_compact(folder / trajectory_id(config), config, loss, val_losses, 100.0, summary)


def write_compact(folder, config, loss, val_loss, seconds, summary):
    """A run in compact form: the training loss of each iteration from 1, validation losses by
    iteration."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(dump_config(config))
    np.savez(
        folder / "curves.npz",
        iterations=np.arange(1, len(loss) + 1),
        train_loss=loss,
        second_places=[0, len(loss) - 1],
        seconds=[0.0, seconds],
        val_iterations=list(val_loss),
        val_loss=list(val_loss.values()),
    )
    write_json(folder / "summary.json", summary)
