"""Made-up runs of the study of causes."""

import numpy as np

from brx.config.loading import preset_with
from brx.paper.causes.arms import ADAMW, ARMS, BASES, DEEPEST, EIGHT, NONE, ONE_UPDATE
from brx.sweep.spec import identity
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
    """Runs of an arm without delay, and with delays that cost so many nats.

    With delay the loss also falls more slowly, by a factor of 1 + slowness (by default 1 + the
    cost)."""
    for seed in range(len(noise)):
        write_arm_run(folder, arm, NONE, seed, without + 0.01 * seed, slow=1)
    for delay, cost in costs.items():
        slow = 1 + (cost if slowness is None else slowness)
        for seed, shift in enumerate(noise):
            final = without + cost + 0.01 * seed + shift
            write_arm_run(folder, arm, delay, seed, final, slow)


def write_arm_run(folder, arm, delay, seed, final, slow):
    """A run whose training loss falls as 3 / (1 + t / (5 slow)), with a final validation loss."""
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
    write_compact(folder / identity(config), config, losses, {LENGTH: final}, 10.0, summary)


def write_bases(folder, costs, adamw=0.3):
    for arm, cost in zip(BASES, costs, strict=True):
        write_arm(folder, arm, {DEEPEST: cost})
    write_arm(folder, ADAMW, {DEEPEST: adamw})
