"""Made-up run folders."""

import json

from brx.config.loading import dump_config
from brx.files import write_json
from brx.runs.run import Run
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
    """Write a run whose training loss falls along a line from 4; returns it as read back.

    Args:
        folder: the folder of the test.
        name: the name of the run's folder in `folder`/runs.
        overrides: settings.
        crosses_3_at: the iteration at which the loss is 3; None for a run without losses.
        val_loss: the validation loss at the end.
        status: the status in summary.json; None for a run without that file.
        corpus: the fingerprint of the data.
        summary: further values of summary.json.
    """
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
    """Write metrics.jsonl: a training loss per iteration from 1, and then the validations."""
    steps = [
        {"iteration": t, "train_loss": loss, "seconds": 0.5 * t}
        for t, loss in enumerate(losses, start=1)
    ]
    (path / "metrics.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in [*steps, *validations])
    )
