"""`brx schedule`: what the devices of a pipeline do over time."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from brx.cli.usage import Application, Command
from brx.errors import UserError

EXAMPLES = """\
  brx schedule --stages 4                                       the actions of each device, as the engine runs them
  brx schedule --stages 8 --devices 2 --micro-batches 6
  brx schedule --stages 4 --delay 2bw --accumulation 4          PipeDream-2BW: all stages one update behind
  brx schedule --stages 4 --figure figures/schedule             the picture: synchronous, asynchronous, delay
"""

app = Application()


@app.command(cls=Command, epilog=EXAMPLES)
def schedule(
    *,
    stages: Annotated[int, typer.Option(metavar="P", min=1, help="virtual stages", show_default=False)],
    devices: Annotated[int | None, typer.Option(metavar="R", help="devices (default: one per stage)")] = None,
    micro_batches: Annotated[int, typer.Option(metavar="N", min=1, help="in a synchronous step")] = 4,
    accumulation: Annotated[int, typer.Option(metavar="M", help="micro-batches per asynchronous update")] = 1,
    delay: Annotated[
        str, typer.Option(metavar="PROFILE", help="as pipeline.delay: pipeline, 2bw, 7, [3, 0, 0], {like: 32}")
    ] = "pipeline",
    figure: Annotated[
        Path | None, typer.Option(metavar="PATH", help="draw PATH.png and PATH.pdf (needs R = P)")
    ] = None,
) -> None:
    """Print the schedules (F: forward pass, B: backward pass, U: update), or draw them."""
    from brx.config.loading import validate
    from brx.config.schema import PipelineConfig
    from brx.config.yaml_text import parse_yaml
    from brx.pipeline.schedule_text import check_size, schedule_lines

    num_ranks = stages if devices is None else devices
    if not 1 <= num_ranks <= stages:
        raise UserError(f"--devices must be from 1 to --stages ({stages}), got {num_ranks}")
    content = {"stages": stages, "devices": num_ranks, "accumulation": accumulation}
    content["delay"] = parse_yaml(delay, f"--delay {delay}")
    pipeline = validate(content, PipelineConfig, "brx schedule", {(key,): f"--{key}" for key in content})
    if figure is None:
        print(*schedule_lines(pipeline, micro_batches, shutil.get_terminal_size().columns), sep="\n")
        return
    if (accumulation, delay) != (1, "pipeline"):
        raise UserError("--figure shows one micro-batch per update: leave out --accumulation and --delay")
    if num_ranks != stages:
        raise UserError(f"--figure shows one stage per device: leave out --devices, or make it {stages}")
    check_size(stages, num_ranks, 2 * micro_batches)
    from brx.plot.schedule import draw_schedules  # loads matplotlib

    for path in draw_schedules(num_ranks, micro_batches, figure):
        print(path)
