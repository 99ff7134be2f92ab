"""`brx verdict`: synchronous or asynchronous, for P stages and M micro-batches per update."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from brx.cli.options import FigurePath, Overrides, complete_config
from brx.cli.plan import Bandwidth, DeviceMemory, Throughput
from brx.cli.usage import Application, Command
from brx.errors import UserError

if TYPE_CHECKING:
    from brx.planning.planned_run import PlannedRun

EXAMPLES = """\
  brx verdict --stages 32 --micro-batches 8                         from the committed runs
  brx verdict runs/mine --stages 8 --micro-batches 4 --loss 2.5     from your own
  brx verdict --stages 8 --micro-batches 8 --cost basis-rotation=0.03      3 % of an iteration more than AdamW
  brx verdict --stages 8 --micro-batches 8 --cost-from runs/timing-*       what it takes on your machine and model
  brx verdict --stages 8 --micro-batches 8 --config paper-1b --device-memory 24GB --bandwidth 25GB --throughput A100
  brx verdict --stages 32 --micro-batches 8 --figure figures/verdict       over P and M
"""
MODEL = "Your model, for memory, updates and transfers"
REPLICAS = "Data-parallel replicas with local steps"

RunsOrFile = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="RUNS", help="folders of runs, or a file that --save wrote (default: the committed measurements)"
    ),
]
Loss = Annotated[
    float | None,
    typer.Option(metavar="NATS", help="training loss to reach (default: the lowest that AdamW reaches here, too)"),
]
Costs = Annotated[
    list[str] | None,
    typer.Option(
        metavar="METHOD=SHARE...",
        help="what a method's update costs beyond AdamW's, as a share of an iteration (default: as in the runs, or by"
        " the FLOPs of --config)",
    ),
]
CostFrom = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="PATH...",
        help="take the costs of updates from your own runs (any model), or from benchmarks/results/methods.json",
    ),
]
Config = Annotated[
    str | None,
    typer.Option(
        metavar="CONFIG",
        help="a YAML file or a preset's name; its batch size is that of an update",
        autocompletion=complete_config,
        rich_help_panel=MODEL,
    ),
]
Save = Annotated[Path | None, typer.Option(metavar="FILE", help="keep what the runs say, to be asked again at once")]

LocalStepsOption = Annotated[
    int | None,
    typer.Option(metavar="H", min=1, help="a third rival: P replicas with H local steps", rich_help_panel=REPLICAS),
]
Averaging = Annotated[
    str | None,
    typer.Option(
        metavar="COST",
        help="of their weights: 3 (times an update's passes); with --throughput 0.5s, or a bandwidth as 1GB",
        rich_help_panel=REPLICAS,
    ),
]
LocalSlowdown = Annotated[
    float,
    typer.Option(metavar="RATIO", help="their iterations over synchronous ones", rich_help_panel=REPLICAS),
]
Verbose = Annotated[bool, typer.Option("--verbose", help="tables, what is not measured, what is assumed")]

app = Application()


@app.command(cls=Command, epilog=EXAMPLES)
def verdict(
    runs: RunsOrFile = None,
    *,
    stages: Annotated[int, typer.Option(metavar="P", min=2, help="stages, a device each", show_default=False)],
    micro_batches: Annotated[
        int, typer.Option(metavar="M", min=1, help="micro-batches per update", show_default=False)
    ],
    loss: Loss = None,
    cost: Costs = None,
    cost_from: CostFrom = None,
    config: Config = None,
    overrides: Overrides,
    device_memory: DeviceMemory = None,
    bandwidth: Bandwidth = None,
    throughput: Throughput = None,
    local_steps: LocalStepsOption = None,
    averaging: Averaging = None,
    local_slowdown: LocalSlowdown = 1.0,
    figure: FigurePath = None,
    save: Save = None,
    verbose: Verbose = False,
) -> None:
    """Print who is faster and why; with --verbose the schedules, the methods, and what is assumed."""
    from brx.planning.cuts import EqualStages
    from brx.planning.verdict import Question, answer, losses_to_ask
    from brx.planning.verdict_inputs import parse_costs, parse_local_steps, read_costs, read_measurements
    from brx.planning.verdict_text import long_text, verdict_text

    if loss is not None and not 0 < loss < math.inf:
        raise UserError(f"--loss {loss:g}: must be a loss above 0, in nats")
    if config is None and (overrides or device_memory or bandwidth or throughput):
        raise UserError(
            "--set, --device-memory, --bandwidth and --throughput: need a --config, whose sizes they are about"
        )
    measurements, notes = read_measurements(runs or [])
    costs = read_costs(cost_from or []) | parse_costs(cost or [], measurements)
    model = None if config is None else _model(config, overrides, device_memory, throughput, bandwidth)
    run = None if model is None else model.split(stages, micro_batches)
    local = parse_local_steps(local_steps, averaging, local_slowdown, stages, run)
    losses = losses_to_ask(measurements, (stages - 1) / micro_batches) if loss is None else [loss]

    def ask(num_stages: int, num_micro_batches: int, to_loss: float = losses[0]) -> Question:
        equal = EqualStages(num_stages, num_micro_batches, measurements.examples)
        devices = equal if model is None else model.split(num_stages, num_micro_batches)
        return Question(to_loss, num_stages, num_micro_batches, devices, costs, local)

    found = [answer(measurements, ask(stages, micro_batches, one)) for one in losses]
    print(verdict_text(found, measurements, run))
    if verbose:
        print(long_text(found[0], run), *notes, sep="\n")
    if save is not None:
        measurements.write(save)
        print(save)
    if figure is not None:
        from brx.plot.verdict import draw_verdict, grid  # loads matplotlib

        for path in draw_verdict(grid(measurements, ask), figure, measurements, run):
            print(path)


def _model(
    config: str, overrides: list[str], device_memory: str | None, throughput: str | None, bandwidth: str | None
) -> PlannedRun:
    from brx.config.loading import load_config
    from brx.planning.planned_run import parse_devices  # loads torch

    return parse_devices(load_config(config, overrides), device_memory, throughput, bandwidth)
