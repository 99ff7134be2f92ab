"""How the differences between the authors' implementation and brx (docs/methods.md) change a
training.

Trains the model of `brx compare` at P = 8 with the four strategies, as brx takes them and
`as_published`, rate 1e-3; continues where it stopped.

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
            settings = {
                "source": source,
                "geometry": geometry,
                "as_published": str(is_theirs).lower(),
            }
            keys = [
                "method=basis-rotation",
                "lr=1e-3",
                *(f"{key}={value}" for key, value in settings.items()),
            ]
            common = [
                f"training.iterations={options.iterations}",
                f"training.seed={seed}",
                "pipeline.stages=8",
            ]
            folder = (
                RUNS / f"{source}-{geometry}-{'theirs' if is_theirs else 'ours'}"
                f"-t{options.iterations}-s{seed}"
            )
            losses.append(final_loss(folder, [*common, *(f"optimizer.{key}" for key in keys)]))
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
    """The validation loss at the end of a run of the preset `compare`; a run that is there already
    is continued."""
    if RunFolder(folder).read_summary().get("status") != "finished":
        train(load_config("compare", overrides), folder, resume=True)
    return float(load([folder])["val_loss"].item())


if __name__ == "__main__":
    main()
