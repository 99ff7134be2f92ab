"""`brx plan`: what a run needs and how long it takes, before anybody pays for it."""

from __future__ import annotations

from typing import Annotated

import typer

from brx.cli.options import ConfigName, Overrides
from brx.cli.usage import Application, Command

EXAMPLES = """\
  brx plan paper-95m                                                    on one device
  brx plan paper-1b --devices 6 --device-memory 80GB                    does it fit, and on how few devices would it
  brx plan paper-1b --devices 6 --throughput A100                       with the time, at 40 % of the data sheet's peak
  brx plan paper-1b --throughput 120T --set optimizer.method=basis-rotation    at 120 TFLOP/s, as measured
"""

DeviceMemory = Annotated[
    str | None, typer.Option(metavar="SIZE", help="memory of each device, for example 24GB or 80GiB")
]
Throughput = Annotated[
    str | None,
    typer.Option(
        metavar="FLOPS", help="FLOP/s of each device: as measured (120T), or its name (40 % of its data sheet's peak)"
    ),
]
Bandwidth = Annotated[
    str | None, typer.Option(metavar="BYTES", help="bytes per second between neighbours, with --throughput")
]

app = Application()


@app.command(cls=Command, epilog=EXAMPLES)
def plan(
    config: ConfigName,
    *,
    overrides: Overrides,
    devices: Annotated[int | None, typer.Option(metavar="R", help="devices (default: pipeline.devices)")] = None,
    device_memory: DeviceMemory = None,
    throughput: Throughput = None,
    bandwidth: Bandwidth = None,
) -> None:
    """Print the plan; exit code 0 also where it does not fit."""
    from brx.config.loading import load_config
    from brx.planning.memory_tables import rank_notes, rank_table
    from brx.planning.plan import plan_memory, planned_device_type
    from brx.planning.planned_run import parse_devices
    from brx.planning.prospects import fit_line, time_lines
    from brx.runs.formats import format_table

    run_config = load_config(
        config, overrides if devices is None else [*overrides, f"pipeline.devices={devices}"], is_new=True
    )
    run = parse_devices(run_config, device_memory, throughput, bandwidth)
    device_type = planned_device_type(run_config)
    ranks = plan_memory(run_config, device_type)
    title, table = rank_table(run_config, ranks, run.memory)
    print(title, format_table(table, "table"), *rank_notes(run_config), sep="\n")
    if run.memory is not None:
        print(fit_line(run_config, ranks, device_type, run.memory))
    print(*time_lines(run), sep="\n")
