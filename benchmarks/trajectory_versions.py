"""Does a new trajectory version change where basis rotation ends? Differences between runs with the
same settings and seed.

Runs of two versions whose settings are equal have the same hash at the end of their folders' names.
The default compares version 6 with version 4, the one of `results/similar`. A later version:
`brx sweep trajectory/similar`, then `brx export runs/trajectory --to NEW`.

    python -m benchmarks.trajectory_versions [--new results/trajectory-6] [--old results/similar]
"""

import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import Table, parser_of


@dataclass(frozen=True)
class Pair:
    """Two runs with the same settings and seed, at two trajectory versions."""

    delay: str
    seed: int
    new_loss: float  # final validation loss, nats
    old_loss: float
    versions: tuple[int, int]  # new, old

    @property
    def difference(self) -> float:
        return self.new_loss - self.old_loss


def settings_hash(folder: Path) -> str:
    """The hash of a run's settings: the end of `s0-p1--1f3a9c07`."""
    return folder.name.rpartition("--")[2]


def read_pairs(new: Path, old: Path) -> list[Pair]:
    """Every run of `new` with the run of `old` that has its settings."""
    old_folders = {settings_hash(path.parent): path.parent for path in old.glob("*/summary.json")}
    pairs = []
    for path in sorted(new.glob("*/summary.json")):
        folder = path.parent
        old_path = old_folders[settings_hash(folder)] / "summary.json"
        new_summary = json.loads(path.read_text(encoding="utf-8"))
        old_summary = json.loads(old_path.read_text(encoding="utf-8"))
        seed, depth = folder.name.rpartition("--")[0].split("-", maxsplit=1)
        pair = Pair(
            delay="none" if depth == "p1" else "of 32 stages",
            seed=int(seed.removeprefix("s")),
            new_loss=new_summary["final_val_loss"],
            old_loss=old_summary["final_val_loss"],
            versions=(new_summary["trajectory_version"], old_summary["trajectory_version"]),
        )
        pairs.append(pair)
    return pairs


def main() -> None:
    """Compare and print."""
    parser = parser_of(__doc__)
    parser.add_argument("--new", type=Path, default=Path("results/trajectory-6"))
    parser.add_argument("--old", type=Path, default=Path("results/similar"))
    options = parser.parse_args()
    pairs = read_pairs(options.new, options.old)
    new_version, old_version = pairs[0].versions
    columns = ["delay", "seed", f"version {new_version}", f"version {old_version}", "difference"]
    table = Table("trajectory_versions", columns)
    for delay in sorted({pair.delay for pair in pairs}):
        of_delay = [pair for pair in pairs if pair.delay == delay]
        for pair in of_delay:
            losses = f"{pair.new_loss:.4f}", f"{pair.old_loss:.4f}"
            table.add(delay, str(pair.seed), *losses, f"{pair.difference:+.4f}")
        differences = [pair.difference for pair in of_delay]
        standard_error = statistics.stdev(differences) / math.sqrt(len(differences))
        mean = f"{statistics.mean(differences):+.4f} (standard error {standard_error:.4f})"
        table.add(delay, "mean", "", "", mean)
    table.write("Final validation loss of basis rotation, preset similar, rate 1e-3, in nats")


if __name__ == "__main__":
    main()
