"""Made-up runs of the presets, as compact results."""

import numpy as np

from brx.config.loading import dump_config, preset_with
from brx.files import write_json
from brx.paper.claims import CLAIMS, judge
from brx.paper.scales import SCALES, VARIANTS, Experiments, depth_settings
from brx.pipeline.delay import depth
from brx.sweep.spec import identity

LAPTOP = SCALES["laptop"]


def row(folder, name, scale=LAPTOP):
    """A claim beside the runs in a folder."""
    (claim,) = [claim for claim in CLAIMS if claim.name == name]
    return judge(Experiments.load(scale, folder), [claim])[0]


def write_method(folder, method, stages=32, settings=None, **options):
    """Runs of a method (of VARIANTS) on the laptop's preset; see `write_experiment`."""
    settings = {"pipeline.stages": stages, **VARIANTS[method], **(settings or {})}
    write_experiment(folder, LAPTOP.preset, settings, **options)


def write_experiment(
    folder, preset, settings, *, seeds=(0,), val_loss=None, slowness=None, status="finished"
):
    """Runs whose loss falls as 3 / (1 + t / (100 slowness)); slowness: P unless given. More stages
    than the model has blocks are made up by their delays, as in the sweeps."""
    stages, blocks = (settings.get(key) for key in ("pipeline.stages", "model.blocks"))
    settings = settings | depth_settings(
        stages or 1, blocks or preset_with(preset, {}).model.blocks
    )
    for seed in seeds:
        config = preset_with(preset, {**settings, "training.seed": seed})
        last = config.training.last_iteration
        loss = (
            3.0 / (1.0 + np.arange(1, last + 1) / (100.0 * (slowness or depth(config.pipeline))))
            + 0.001 * seed
        )
        val_losses = {last // 2: loss[last // 2], last: loss[-1] if val_loss is None else val_loss}
        summary = {"status": status, "data_fingerprint": "f"}
        write_compact(folder / identity(config), config, loss, val_losses, 100.0, summary)


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
