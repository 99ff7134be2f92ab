"""`brx verdict`: synchronous or asynchronous, for P stages and M micro-batches per update."""

from __future__ import annotations

import math
import shlex
from pathlib import Path
from typing import Annotated

import typer

from brx.cli.options import (
    CONFIG_HELP,
    Bandwidth,
    DeviceMemory,
    FigurePath,
    Overrides,
    Throughput,
    argument,
    complete_config,
    option,
)
from brx.cli.usage import Application, refuse

MODEL = "Your model, for memory, updates and transfers"
REPLICAS = "Data-parallel replicas with local steps"

app = Application()


@app.add("""\
  brx verdict --stages 32 --micro-batches 8                         from the committed runs
  brx verdict runs/mine --stages 8 --micro-batches 4 --loss 2.5     from your own
  brx verdict --stages 8 --micro-batches 8 --cost basis-rotation=0.03      3 % of an iteration more than AdamW
  brx verdict --stages 8 --micro-batches 8 --cost-from runs/timing-*       what it takes on your machine and model
  brx verdict --stages 8 --micro-batches 8 --config paper-1b --device-memory 24GB --bandwidth 25GB --throughput A100
  brx verdict --stages 32 --micro-batches 8 --figure figures/verdict       over P and M
""")
def verdict(
    runs: Annotated[
        list[Path] | None,
        argument("RUNS", "folders of runs, or a file that --save wrote (default: the committed measurements)"),
    ] = None,
    *,
    stages: Annotated[int, option("P", "stages, a device each", min=2)],
    micro_batches: Annotated[int, option("M", "micro-batches per update", min=1)],
    loss: Annotated[
        float | None, option("NATS", "training loss to reach (default: the lowest that AdamW reaches here, too)")
    ] = None,
    cost: Annotated[
        list[str] | None,
        option(
            "METHOD=SHARE...", "its update beyond AdamW's, in iterations (default: by the runs, or FLOPs of --config)"
        ),
    ] = None,
    cost_from: Annotated[
        list[Path] | None,
        option("PATH...", "take these costs from your own runs (any model), or from benchmarks/results/methods.json"),
    ] = None,
    config: Annotated[
        str | None,
        option(
            "CONFIG", f"{CONFIG_HELP}; its batch is an update's", autocompletion=complete_config, rich_help_panel=MODEL
        ),
    ] = None,
    overrides: Overrides,
    device_memory: DeviceMemory = None,
    bandwidth: Bandwidth = None,
    throughput: Throughput = None,
    local_steps: Annotated[
        int | None, option("H", "a third rival: P replicas with H local steps", min=1, rich_help_panel=REPLICAS)
    ] = None,
    averaging: Annotated[
        str | None,
        option(
            "COST", "3 times an update's passes; with --throughput 0.5s, or bandwidth 1GB", rich_help_panel=REPLICAS
        ),
    ] = None,
    local_slowdown: Annotated[
        float, option("RATIO", "their iterations over synchronous ones", rich_help_panel=REPLICAS)
    ] = 1.0,
    figure: FigurePath = None,
    save: Annotated[Path | None, option("FILE", "keep what the runs say, to be asked again at once")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="tables, what is not measured, what is assumed")] = False,
) -> None:
    from brx.planning import verdict as verdicts
    from brx.planning.schedules import EqualStages
    from brx.planning.verdict_text import long_text, verdict_text

    refuse(loss is not None and not 0 < loss < math.inf, f"--loss {loss}: must be a loss above 0, in nats")
    refuse(
        config is None and (overrides or device_memory or bandwidth or throughput),
        "--set, --device-memory, --bandwidth and --throughput: need a --config, whose sizes they are about",
    )
    measurements, notes = verdicts.read_measurements(runs or [])
    costs = verdicts.read_costs(cost_from or []) | verdicts.parse_costs(cost or [], measurements)
    model = None
    if config is not None:
        from brx.config.loading import load_config
        from brx.planning.planned_run import parse_devices  # loads torch

        asked = load_config(config, overrides)
        model = parse_devices(asked, device_memory, throughput, bandwidth)
    run = None if model is None else model.split(stages, micro_batches)
    local = verdicts.parse_local_steps(local_steps, averaging, local_slowdown, stages, run)
    losses = verdicts.losses_to_ask(measurements, (stages - 1) / micro_batches) if loss is None else [loss]

    def ask(num_stages: int, num_micro_batches: int, to_loss: float = losses[0]) -> verdicts.Question:
        equal = EqualStages(num_stages, num_micro_batches, measurements.examples)
        devices = equal if model is None else model.split(num_stages, num_micro_batches)
        return verdicts.Question(to_loss, num_stages, num_micro_batches, devices, costs, local)

    found = [verdicts.answer(measurements, ask(stages, micro_batches, one)) for one in losses]
    print(verdict_text(found, measurements, run))
    if run is not None and config is not None:
        fastest = [option.method for option in found[0].asynchronous[:1]]
        settings = verdicts.by_method(measurements)[fastest[0]][0].settings if fastest else {}
        devices = {"--device-memory": device_memory, "--throughput": throughput, "--bandwidth": bandwidth}
        given = [word for flag, value in devices.items() if value for word in (flag, value)]
        print(
            "  To check:",
            shlex.join(["brx", "plan", config, "--set", *overrides, *run.overrides(asked, settings), *given]),
        )
    if verbose:
        print(long_text(found[0], run), *notes, sep="\n")
    if save is not None:
        measurements.write(save)
        print(save)
    if figure is not None:
        from brx.plot.verdict import draw_verdict, grid  # loads matplotlib

        print(*draw_verdict(grid(measurements, ask), figure, measurements, run), sep="\n")
