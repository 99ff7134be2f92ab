"""Made-up runs of the study of causes."""

import json

import numpy as np

from brx.config.loading import preset_with
from brx.paper.causes.arms import ADAMW, ARMS, BASES, DEEPEST, EIGHT, NONE, ONE_UPDATE
from brx.paper.causes.study import Study
from brx.sweep.cell import trajectory_id
from tests.paper.helpers import write_compact

LENGTH = 40  # iterations
DELAYS = {
    NONE: {"pipeline.stages": 1},
    ONE_UPDATE: {"pipeline.stages": 8, "pipeline.delay": "2bw"},
    EIGHT: {"pipeline.stages": 8},
    DEEPEST: {"pipeline.stages": 8, "pipeline.delay.like": 32},
}
NOISE = (0.0, 0.004, -0.003)  # nats, of the three seeds with delay


def write_arm(folder, arm, costs, noise=NOISE, without=1.3, *, slowness=None):
    """Write the runs of an arm, without delay and with the delays in `costs`.

    Args:
        folder: the folder of the runs.
        arm: a key of `ARMS`.
        costs: by how many nats each delay raises the final validation loss.
        noise: shifts of the final validation losses with delay, in nats, one per seed.
        without: the final validation loss without delay.
        slowness: with delay, the training loss falls 1 + slowness times as slowly; by default, this
            is the cost.
    """
    for seed in range(len(noise)):
        write_arm_run(folder, arm, NONE, seed, without + 0.01 * seed, slow=1)
    for delay, cost in costs.items():
        slow = 1 + (cost if slowness is None else slowness)
        for seed, shift in enumerate(noise):
            final = without + cost + 0.01 * seed + shift
            write_arm_run(folder, arm, delay, seed, final, slow)


def write_arm_run(folder, arm, delay, seed, final, slow):
    """Write a run whose training loss falls as 3 / (1 + t / (5 slow)), and whose final validation
    loss is `final`."""
    settings = {
        **ARMS[arm],
        **DELAYS[delay],
        "training.seed": seed,
        "training.iterations": LENGTH,
        "training.warmup_fraction": 0.1,
    }
    config = preset_with("similar", settings)
    losses = 3.0 / (1 + np.arange(1, LENGTH + 1) / (5 * slow))
    summary = {"status": "finished", "data_fingerprint": "f"}
    write_compact(folder / trajectory_id(config), config, losses, {LENGTH: final}, 10.0, summary)


def diverge(folder, arm, delay, seed):
    """Make a run one that diverged."""
    runs = Study.load(folder).runs_by_place[arm, delay]
    (run,) = runs.index[runs["training.seed"] == seed]
    (folder / str(run).rpartition("/")[2] / "summary.json").write_text(
        json.dumps({"status": "diverged", "data_fingerprint": "f"})
    )


def write_bases(folder, costs, adamw=0.3):
    """Write the runs of all bases and of AdamW, with the nats that the longest delay costs each."""
    for arm, cost in zip(BASES, costs, strict=True):
        write_arm(folder, arm, {DEEPEST: cost})
    write_arm(folder, ADAMW, {DEEPEST: adamw})


def write_norms(folder, norms, space=None):
    """Norms by arm at half of the training, as `brx hessian-norm` keeps them.

    Args:
        space: the coordinates of all arms; by default, AdamW's are the original ones, and the
            others' the rotated ones.
    """
    groups = {"names": [], "num_rows": [], "sums": [], "covariances": []}
    for arm, norm in norms.items():
        delayed = Study.load(folder).runs_by_place[arm, DEEPEST]
        for run in delayed.index:
            usual = "original" if arm == ADAMW else "rotated"
            content = {
                "run": run,
                "method": "m",
                "num_stages": 32,
                "iteration": LENGTH // 2,
                "space": space or usual,
                "settings": {},
                "num_parameters": 10,
                "norm": norm,
                "norm_of_half": norm,
                "standard_error": 0.0,
                "tokens": 1,
                "below_resolution": 0.0,
                "blocks": groups,
                "kinds": groups,
                "num_own_stages": 8,
            }
            analysis = folder / str(run).rpartition("/")[2] / "analysis"
            analysis.mkdir(exist_ok=True)
            path = analysis / f"hessian-norm-{space or usual}-{LENGTH // 2:08d}.json"
            path.write_text(json.dumps(content))
