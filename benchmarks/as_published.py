"""What the differences between the authors' implementation and brx (docs/methods.md) do to
training.

Trains the model of `brx compare` at P = 8 with the four strategies, each as in brx and with
`as_published`, at learning rate 1e-3. When called again, it continues where it stopped.

    python -m benchmarks.as_published [--iterations 1000] [--seeds 2]
"""

import itertools
import statistics
from pathlib import Path

from benchmarks.report import Table, parser_of
from brx.config.loading import load_config
from brx.runs.folder import RunFolder
from brx.runs.frames import load
from brx.train.loop import train

RUNS = Path("runs/as-published")


def main() -> None:
    """Train and print."""
    options = parser_of(__doc__, iterations=1000, seeds=2).parse_args()
    table = Table("as_published", ["strategy", "code", "final validation loss by seed", "mean"])
    strategies = list(itertools.product(("2nd", "1st"), ("bilateral", "unilateral")))
    for is_theirs, (source, geometry) in itertools.product((True, False), strategies):
        losses = []
        for seed in range(options.seeds):
            overrides = [
                f"training.iterations={options.iterations}",
                f"training.seed={seed}",
                "pipeline.stages=8",
                "optimizer.method=basis-rotation",
                "optimizer.lr=1e-3",
                f"optimizer.source={source}",
                f"optimizer.geometry={geometry}",
                f"optimizer.as_published={str(is_theirs).lower()}",
            ]
            code = "theirs" if is_theirs else "ours"
            folder = RUNS / f"{source}-{geometry}-{code}-t{options.iterations}-s{seed}"
            losses.append(final_loss(folder, overrides))
        table.add(
            f"{source} {geometry}",
            "the authors'" if is_theirs else "brx",
            " ".join(f"{loss:.3f}" for loss in losses),
            f"{statistics.mean(losses):.3f}",
        )
    table.rows.sort(key=lambda row: row[0], reverse=True)
    table.write(
        f"Basis rotation at P = 8: {options.iterations} iterations of the model of brx compare, "
        f"rate 1e-3"
    )


def final_loss(folder: Path, overrides: list[str]) -> float:
    """The validation loss at the end of a run of the preset `compare`. A run that has not finished
    is started, or continued."""
    if RunFolder(folder).read_summary().get("status") != "finished":
        train(load_config("compare", overrides), folder, resume=True)
    return float(load([folder])["val_loss"].item())


if __name__ == "__main__":
    main()
