"""Run folders that nobody has trained."""

import json

from brx.config.loading import dump_config
from brx.files import write_json
from brx.runs.frames import Run
from tests.train.helpers import tiny_config

ITERATIONS = 400


def write_run(
    folder,
    name,
    *overrides,
    crosses_3_at=50,
    val_loss=1.0,
    status="finished",
    corpus="f",
    **summary,
):
    """A run whose training loss falls on a line from 4, through 3 at the given iteration; None: it
    never had a loss."""
    config = tiny_config(folder, f"training.iterations={ITERATIONS}", *overrides)
    path = folder / "runs" / name
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(dump_config(config))
    losses = [4.0 - t / crosses_3_at for t in range(1, ITERATIONS + 1)] if crosses_3_at else []
    write_metrics(path, losses, [{"iteration": ITERATIONS, "val_loss": val_loss}] if losses else [])
    if status is not None:
        write_json(path / "summary.json", {"status": status, "data_fingerprint": corpus, **summary})
    return Run.load(path)


def write_metrics(path, losses, validations=()):
    steps = [
        {"iteration": t, "train_loss": loss, "seconds": 0.5 * t}
        for t, loss in enumerate(losses, start=1)
    ]
    (path / "metrics.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in [*steps, *validations])
    )
