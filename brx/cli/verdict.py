"""`brx verdict`: synchronous or asynchronous, for P stages and M micro-batches per update."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from brx.cli.options import FigurePath, Overrides, complete_config
from brx.cli.usage import Application, Command
from brx.errors import UserError

if TYPE_CHECKING:
    from brx.planning.schedule_memory import Fitting

EXAMPLES = """\
  brx verdict --stages 32 --micro-batches 8                         from the committed runs
  brx verdict runs/mine --stages 8 --micro-batches 4 --loss 2.5     from your own
  brx verdict --stages 8 --micro-batches 8 --cost basis-rotation=0.03      3 % of an iteration more than AdamW
  brx verdict --stages 8 --micro-batches 8 --cost-from runs/timing-*       what it takes on your machine and model
  brx verdict --stages 8 --micro-batches 8 --config paper-1b --device-memory 24GB --bandwidth 25GB --throughput A100
  brx verdict --stages 32 --micro-batches 8 --figure figures/verdict       over P and M
"""
GRID_STAGES, GRID_MICRO_BATCHES = (2, 4, 8, 16, 32), (1, 2, 4, 8, 16, 32)
MODEL = "Your model, for memory and transfers"

RunsOrFile = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="RUNS", help="folders of runs, or a file that --save wrote (default: the committed measurements)"
    ),
]
Loss = Annotated[
    float | None,
    typer.Option(metavar="NATS", help="training loss to reach (default: the lowest under the longest delay)"),
]
Costs = Annotated[
    list[str] | None,
    typer.Option(
        metavar="METHOD=SHARE...",
        help="what a method's update costs beyond AdamW's, as a share of an iteration (default: as in the runs)",
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
DeviceMemory = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="leave out schedules that need more, for example 24GB", rich_help_panel=MODEL),
]
Bandwidth = Annotated[
    str | None,
    typer.Option(metavar="BYTES", help="bytes per second between neighbours, for example 25GB", rich_help_panel=MODEL),
]
Throughput = Annotated[
    str | None,
    typer.Option(metavar="FLOPS", help="FLOP/s of a device: 120T, or a device's name", rich_help_panel=MODEL),
]
Save = Annotated[Path | None, typer.Option(metavar="FILE", help="keep what the runs say, to be asked again at once")]

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
    figure: FigurePath = None,
    save: Save = None,
) -> None:
    """Print the schedules, the methods, and who is faster."""
    from brx.planning.verdict import Question, answer, default_loss, grid
    from brx.planning.verdict_inputs import parse_costs, read_costs, read_measurements
    from brx.planning.verdict_text import verdict_text

    if loss is not None and not 0 < loss < math.inf:
        raise UserError(f"--loss {loss:g}: must be a loss above 0, in nats")
    if config is None and (overrides or device_memory or bandwidth or throughput):
        raise UserError(
            "--set, --device-memory, --bandwidth and --throughput: need a --config, whose sizes they are about"
        )
    if (bandwidth is None) != (throughput is None):
        raise UserError("--bandwidth and --throughput: give both, since transfers are compared with passes")
    measurements, notes = read_measurements(runs or [])
    question = Question(
        loss=default_loss(measurements) if loss is None else loss,
        num_stages=stages,
        num_micro_batches=micro_batches,
        costs=read_costs(cost_from or []) | parse_costs(cost or [], measurements),
    )
    fitting, memory = None, {}
    if config is not None:
        fitting = _fitting(config, overrides, device_memory, bandwidth, throughput)
        question, memory = fitting.fitted(question), fitting.memory(question)
    print(verdict_text(answer(measurements, question), measurements, memory), *notes, sep="\n")
    if save is not None:
        measurements.write(save)
        print(save)
    if figure is not None:
        from brx.plot.verdict import draw_verdict  # loads matplotlib

        fitted = None if fitting is None else fitting.fitted_if_possible
        cells = grid(measurements, question, GRID_STAGES, GRID_MICRO_BATCHES, fitted)
        for path in draw_verdict(cells, figure, measurements):
            print(path)


def _fitting(
    config: str, overrides: list[str], device_memory: str | None, bandwidth: str | None, throughput: str | None
) -> Fitting:
    """The model and its devices, from texts."""
    from brx.config.loading import load_config
    from brx.config.quantities import parse_bytes
    from brx.planning.prospects import parse_throughput  # loads torch
    from brx.planning.schedule_memory import Fitting

    run_config = load_config(config, overrides)
    return Fitting(
        run_config,
        device_memory=None if device_memory is None else parse_bytes(device_memory, "--device-memory"),
        bandwidth=None if bandwidth is None else parse_bytes(bandwidth, "--bandwidth"),
        throughput=None if throughput is None else parse_throughput(throughput, run_config.runtime.precision),
    )
