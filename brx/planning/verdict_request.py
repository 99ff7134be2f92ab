"""Answers a question of `brx verdict`, given by the texts of its options."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from brx.errors import UserError
from brx.planning.iterations import by_method, losses_to_ask, read_measurements
from brx.planning.schedules import EqualStages
from brx.planning.update_costs import parse_costs, read_costs
from brx.planning.verdict import Question, Verdict, answer
from brx.planning.verdict_text import long_text, verdict_text
from brx.runs.time_to_loss import Measurements

if TYPE_CHECKING:
    from brx.config.schema import RunConfig
    from brx.planning.planned_run import PlannedRun


@dataclass(frozen=True, kw_only=True)
class VerdictRequest:
    """The command's options, as the user gave them."""

    num_stages: int
    num_micro_batches: int
    runs: Sequence[Path] = ()
    """Folders of runs, or a file of measurements; none for the committed ones."""
    loss: float | None = None
    """In nats; None for the default losses."""
    costs: Sequence[str] = ()
    """`METHOD=SHARE`."""
    cost_files: Sequence[Path] = ()
    config: str | None = None
    """The user's model: a file or a preset."""
    overrides: Sequence[str] = ()
    device_memory: str | None = None
    bandwidth: str | None = None
    throughput: str | None = None

    def check(self) -> None:
        """UserError for options that do not go together."""
        if self.loss is not None and not 0 < self.loss < math.inf:
            raise UserError(f"--loss {self.loss}: must be a loss above 0, in nats")
        needs_config = self.overrides or self.device_memory or self.bandwidth or self.throughput
        if self.config is None and needs_config:
            raise UserError(
                "--set, --device-memory, --bandwidth and --throughput: need a --config, to "
                "whose model they apply"
            )

    def answers(self) -> Answers:
        """Read the runs, and compare.

        Raises:
            UserError: an option is wrong, or the runs do not answer.
        """
        self.check()
        measurements, notes = read_measurements(self.runs)
        costs = read_costs(self.cost_files) | parse_costs(self.costs, measurements)
        model = None
        if self.config is not None:
            model = self._model(self.config)
            model.split(self.num_stages, self.num_micro_batches)  # which it may refuse
        asker = Asker(measurements, costs, model)
        if self.loss is not None:
            losses = [self.loss]
        else:
            delay = (self.num_stages - 1) / self.num_micro_batches
            losses = losses_to_ask(measurements, delay)
        verdicts = []
        for loss in losses:
            question = asker.question(loss, self.num_stages, self.num_micro_batches)
            verdicts.append(answer(measurements, question))
        return Answers(self, asker, verdicts, notes)

    def _model(self, config: str) -> PlannedRun:
        from brx.config.loading import allow_code_of, load_config_to_plan
        from brx.planning.planned_run import parse_devices  # loads torch

        allow_code_of(config)
        asked = load_config_to_plan(config, self.overrides)
        return parse_devices(asked, self.device_memory, self.throughput, self.bandwidth)


@dataclass(frozen=True)
class Asker:
    """Makes questions about any numbers of stages and micro-batches."""

    measurements: Measurements
    costs: dict[str, float]
    model: PlannedRun | None

    def question(self, loss: float, num_stages: int, num_micro_batches: int) -> Question:
        """The question about a loss (in nats) on a pipeline; UserError if the model cannot be
        divided into so many stages or micro-batches."""
        devices: EqualStages | PlannedRun
        if self.model is None:
            devices = EqualStages(num_stages, num_micro_batches, self.measurements.examples)
        else:
            devices = self.model.split(num_stages, num_micro_batches)
        return Question(loss, num_stages, num_micro_batches, devices, self.costs)


@dataclass(frozen=True)
class Answers:
    """The answers to a request, and their texts."""

    request: VerdictRequest
    asker: Asker
    verdicts: Sequence[Verdict]
    """One verdict for the loss that was asked for, or one for each default loss, the highest loss
    first."""
    notes: Sequence[str]
    """Lines about runs that are left out."""

    @property
    def measurements(self) -> Measurements:
        return self.asker.measurements

    @property
    def run(self) -> PlannedRun | None:
        """The user's model on these devices; None if no model was given."""
        devices = self.verdicts[0].question.devices
        return None if isinstance(devices, EqualStages) else devices

    def question(self, num_stages: int, num_micro_batches: int) -> Question:
        """The question of the first loss on another pipeline."""
        loss = self.verdicts[0].question.loss
        return self.asker.question(loss, num_stages, num_micro_batches)

    def lines(self, *, verbose: bool) -> list[str]:
        """The text to print."""
        lines = [verdict_text(self.verdicts, self.measurements, self.run)]
        if self.asker.model is not None:
            lines.append(f"  To check: {self._plan_command(self.asker.model.config)}")
        if verbose:
            lines.append(long_text(self.verdicts[0], self.run))
        return lines

    def _plan_command(self, asked: RunConfig) -> str:
        """The command line of `brx plan` for the fastest asynchronous run."""
        run = self.run
        assert run is not None
        assert self.request.config is not None
        settings = {}
        for option in self.verdicts[0].asynchronous[:1]:
            settings = by_method(self.measurements)[option.method][0].settings
        changed = [*self.request.overrides, *run.overrides(asked, settings)]
        words = ["brx", "plan", self.request.config]
        if changed:
            words += ["--set", *changed]
        for name, value in (
            ("--device-memory", self.request.device_memory),
            ("--throughput", self.request.throughput),
            ("--bandwidth", self.request.bandwidth),
        ):
            if value:
                words += [name, value]
        return shlex.join(words)
