"""Tables of runs for the terminal."""

from __future__ import annotations

from rich.table import Table

from brx.analysis.runs import Run, iterations_to_target


def loss_table(runs: list[Run], target: float) -> Table:
    """A row a run: losses, speed, and the iterations until the smoothed training loss stays at or below `target`."""
    columns = ("method", "P", "final training loss", "validation loss", "iterations/s", f"iterations to {target:.2f}")
    table = Table(*columns)
    for run in runs:
        reached = iterations_to_target(run, target)
        table.add_row(
            run.method,
            str(run.stages),
            f"{run.smoothed[-1]:.3f}",
            f"{run.val_loss[-1]:.3f}",
            f"{run.iterations_per_second:.1f}",
            "never" if reached is None else f"{reached:.0f}",
        )
    return table
