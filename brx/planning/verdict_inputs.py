"""What a verdict is asked with: measurements, from runs or from the file that keeps what they say; costs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from brx.errors import UserError
from brx.runs.time_to_loss import Measurements

COMMITTED = tuple(Path("results") / "tables" / scale / "time-to-loss.json" for scale in ("laptop", "cpu"))
"""What the committed runs of a scale say, the longest runs first; `make reproduce-figures` writes it."""


def read_measurements(runs: Sequence[Path]) -> Measurements:
    """From a file of measurements, or from runs: the largest set of them that compares.

    Args:
        runs: one JSON file, or folders of runs; none for the committed ones.

    Raises:
        UserError: there are none.
    """
    if not runs:
        kept = [path for path in COMMITTED if path.is_file()]
        if not kept:
            raise UserError(f"RUNS: needed, since {COMMITTED[-1]} is not there (it is in a checkout of brx)")
        return Measurements.read(kept[0])
    if len(runs) == 1 and runs[0].suffix == ".json":
        return Measurements.read(runs[0])
    # The committed answer is to come at once: these load scipy.
    from brx.runs.experiments import at_best_rates, tried_rates
    from brx.runs.frames import comparable, load
    from brx.runs.measuring import measure

    all_runs = load(runs)
    num_rates = tried_rates(all_runs).groupby("experiment").size().to_dict()
    return measure(comparable(at_best_rates(all_runs))[0], num_rates, ", ".join(map(str, runs)))


def parse_costs(texts: Sequence[str], measurements: Measurements) -> dict[str, float]:
    """`METHOD=SHARE` as numbers.

    Raises:
        UserError: a method is not among those measured, or its share is none.
    """
    methods = {experiment.method for experiment in measurements.experiments}
    costs = {}
    for text in texts:
        method, _, share = text.rpartition("=")
        if method not in methods:
            raise UserError(f"--cost {text}: write METHOD=SHARE, METHOD one of: {'; '.join(sorted(methods))}")
        try:
            costs[method] = float(share)
        except ValueError:
            costs[method] = -1.0
        if not 0.0 <= costs[method] < float("inf"):
            raise UserError(
                f"--cost {text}: the share of an iteration must be a number from 0, for example 0.05 for 5 %"
            )
    return costs
