"""Iterations to every loss, by method and delay: what a folder of runs says about delay, in one small file.

Written beside the committed results, so that `brx verdict` need not read two hundred runs.
"""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from brx.config.loading import validate
from brx.errors import UserError
from brx.files import write_text

LOSS_STEP = 0.02
"""Nats between the losses that are kept; between them, iterations are interpolated."""

HIGHEST_LOSS = 4.0


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Experiment(_Frozen):
    """The seeds of one method under one delay, at the learning rate that was chosen for them."""

    method: str
    """The method, with what tells its variants apart."""
    delay: float = Field(ge=0)
    """The largest delay of a stage, in updates: 0 without asynchrony."""
    lr: float
    """The chosen learning rate."""
    num_rates: int
    """How many learning rates were tried."""
    seconds: float = Field(gt=0)
    """Seconds per iteration of the fastest seed while nothing else used the machine."""
    micro_batches: int = 1
    """M of these runs: the pace of runs compares among equal M."""
    iterations: list[list[float | None]]
    """Iterations to each loss (rows, as `Measurements.losses`) by each seed (columns); None: it never got there."""


class Measurements(_Frozen):
    """Runs that compare: on the same data, model and budget."""

    source: str
    """Where the runs are."""
    model: str
    """The model in a few words."""
    last_iteration: int = Field(gt=0)
    """The iteration at which the runs end."""
    losses: list[float] = Field(min_length=1)
    """Losses in nats, descending by `LOSS_STEP`."""
    experiments: list[Experiment] = Field(min_length=1)

    @model_validator(mode="after")
    def _check_tables(self) -> Self:
        if any(higher <= lower for higher, lower in pairwise(self.losses)):
            raise ValueError("losses: must descend")
        for experiment in self.experiments:
            lengths = {len(row) for row in experiment.iterations}
            if len(experiment.iterations) != len(self.losses) or len(lengths) != 1 or 0 in lengths:
                where = f"{experiment.method} at delay {experiment.delay:g}"
                rows = f"a row per loss, {len(self.losses)}, of a number per seed"
                raise ValueError(f"{where}: iterations must have {rows}")
        return self

    @classmethod
    def read(cls, path: Path) -> Self:
        """From a file that `write` made.

        Raises:
            UserError: it is none.
        """
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"{path}: not readable: {error}") from None
        return validate(content, cls, str(path))

    def write(self, path: Path) -> None:
        """Write the measurements as JSON, which `read` reads again."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, self.model_dump_json(exclude_defaults=True) + "\n")

    def reached(self, experiment: Experiment, loss: float) -> tuple[float, bool]:
        """Iterations to a loss, the mean over seeds, and whether that is a lower bound since a seed never got there."""
        if loss > self.losses[0]:
            raise UserError(f"--loss {loss:g}: above {self.losses[0]:g}, where these measurements begin")
        below = next((index for index, kept in enumerate(self.losses) if kept <= loss + 1e-9), None)
        if below is None:
            return float(self.last_iteration), True
        above = max(0, below - 1)
        share = (self.losses[above] - loss) / LOSS_STEP if above < below else 0.0
        iterations = [
            None if after is None or before is None else before + share * (after - before)
            for before, after in zip(experiment.iterations[above], experiment.iterations[below], strict=True)
        ]
        counted = [float(self.last_iteration) if reached is None else reached for reached in iterations]
        return sum(counted) / len(counted), None in iterations

    def lowest_loss(self, experiment: Experiment) -> float:
        """The lowest of `losses` that all seeds reach; infinite if there is none."""
        reached = [loss for loss, row in zip(self.losses, experiment.iterations, strict=True) if None not in row]
        return min(reached, default=math.inf)
