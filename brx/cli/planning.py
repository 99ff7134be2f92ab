"""Before a run: `brx schedule`, `plan`, `verdict`, `memory`, `stages` and `similarity`."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from brx.cli.options import (
    CONFIG_HELP,
    Bandwidth,
    ConfigName,
    DeviceMemory,
    FigurePath,
    Format,
    Overrides,
    TableFormat,
    Throughput,
    argument,
    complete_config,
    flag,
    option,
)
from brx.cli.usage import Application, print_note, print_table, refuse
from brx.errors import counted

if TYPE_CHECKING:
    from brx.config.schema import PipelineConfig
    from brx.planning.report import Report

# An option that the help lists in a panel of its own.
of_own_model = partial(
    option, rich_help_panel="A model of your own (default: the paper's LLaMA models)"
)

app = Application()

LARGEST_SIZE = 10**9  # of a model or batch in `brx stages`, far beyond any real one


@app.add("""\
  # the actions of each device, as the engine runs them
  brx schedule --stages 4
  # PipeDream-2BW: every stage is one update behind
  brx schedule --stages 4 --delay 2bw --accumulation 4
  # draw the synchronous and the asynchronous schedule, and the delays
  brx schedule --stages 4 --figure figures/schedule
""")
def schedule(
    *,
    stages: Annotated[int, option("P", "number of stages", min=1)],
    devices: Annotated[
        int | None, option("R", "number of devices (default: one per stage)")
    ] = None,
    micro_batches: Annotated[int, option("N", "micro-batches per synchronous step", min=1)] = 4,
    accumulation: Annotated[int, option("M", "micro-batches per asynchronous update")] = 1,
    delay: Annotated[
        str,
        option("PROFILE", "pipeline.delay: pipeline, 2bw, 7, [3, 0, 0], {like: 32}, FILE.py:NAME"),
    ] = "pipeline",
    figure: FigurePath = None,
) -> None:
    """Print the schedules (F: forward pass, B: backward pass, U: update), or draw them (needs R =
    P)."""
    from brx.config.user_code import allow
    from brx.pipeline.schedule_text import check_size, schedule_lines

    allow()  # --delay may name a function in a user's file
    num_ranks = stages if devices is None else devices
    refuse(
        not 1 <= num_ranks <= stages,
        f"--devices must be from 1 to --stages ({stages}), got {num_ranks}",
    )
    pipeline = _parse_pipeline(stages, num_ranks, accumulation, delay)
    if figure is None:
        width = shutil.get_terminal_size().columns
        print(*schedule_lines(pipeline, micro_batches, width), sep="\n")
        return
    shown = "--figure shows one {} per {}: leave out {}"
    is_plain = (accumulation, delay) == (1, "pipeline")
    refuse(not is_plain, shown.format("micro-batch", "update", "--accumulation and --delay"))
    refuse(num_ranks != stages, shown.format("stage", "device", f"--devices, or make it {stages}"))
    check_size(stages, num_ranks, 2 * micro_batches)
    from brx.plot.planning import draw_schedules  # loads matplotlib

    print(*draw_schedules(num_ranks, micro_batches, figure), sep="\n")


def _parse_pipeline(stages: int, devices: int, accumulation: int, delay: str) -> PipelineConfig:
    from brx.config.loading import validate
    from brx.config.parsing import parse_value
    from brx.config.schema import PipelineConfig

    content = {"stages": stages, "devices": devices, "accumulation": accumulation}
    content["delay"] = parse_value(delay, f"--delay {delay}")
    options: dict[tuple[str, ...], str] = {(key,): f"--{key}" for key in content}
    return validate(content, PipelineConfig, "brx schedule", options)


@app.add("""\
  # on one device
  brx plan paper-95m
  # does it fit, and on how few devices would it?
  brx plan paper-1b --devices 6 --device-memory 80GB
  # with the time at 40 % of the data sheet's peak (too short for small models)
  brx plan paper-1b --devices 6 --throughput A100
  # at a rate that was measured: model_flops_per_second in a run's summary.json
  brx plan paper-95m --throughput 23T
""")
def plan(
    config: ConfigName,
    *,
    overrides: Overrides,
    devices: Annotated[
        int | None, option("R", "number of devices (default: pipeline.devices)")
    ] = None,
    device_memory: DeviceMemory = None,
    throughput: Throughput = None,
    bandwidth: Bandwidth = None,
) -> None:
    """Print the plan; exit code 0 even if the run does not fit."""
    from brx.config.loading import allow_code_of, load_config_to_plan
    from brx.planning.planned_run import parse_devices
    from brx.planning.report import plan_report

    settings = overrides if devices is None else [*overrides, f"pipeline.devices={devices}"]
    allow_code_of(config)
    run_config = load_config_to_plan(config, settings)
    _print_report(plan_report(parse_devices(run_config, device_memory, throughput, bandwidth)))


def _print_report(report: Report) -> None:
    for title, table in report.tables:
        print_table(table, title=title)
    print(*report.lines, sep="\n")


@app.add("""\
  # the paper's table, for the matrices of Llama-3-8B
  brx memory
  # the matrices of a configuration, its stages and its device
  brx memory paper-1b
  # the same on six devices
  brx memory paper-1b \\
      --set pipeline.devices=6 optimizer.method=basis-rotation
  # any matrices
  brx memory --matrix 4096x4096 1024x4096
""")
def memory(
    config: Annotated[
        str | None, argument("CONFIG", CONFIG_HELP, autocompletion=complete_config)
    ] = None,
    *,
    overrides: Overrides,
    matrix: Annotated[list[str] | None, option("MxN...", "weight matrices")] = None,
) -> None:
    """Print the table of the matrices; for a configuration also those of its stages and devices."""
    refuse(config is not None and matrix, "CONFIG and --matrix: give one of the two")
    refuse(overrides and config is None, "--set: needs a CONFIG to change")
    if config is None:
        _print_overhead(matrix)
        return
    from brx.config.loading import allow_code_of, load_config_to_plan
    from brx.planning.report import memory_report

    allow_code_of(config)
    _print_report(memory_report(load_config_to_plan(config, overrides)))


def _print_overhead(matrix: Sequence[str] | None) -> None:
    """Print the overhead for matrices such as `4096x4096`, by default the paper's."""
    from brx.paper.printed import LLAMA_3_8B
    from brx.planning.memory_tables import overhead_texts, parse_matrix

    if matrix:
        title, table = overhead_texts(Counter(map(parse_matrix, matrix)), {})
    else:
        names = {shape: name for name, shape in LLAMA_3_8B.items()}
        title, table = overhead_texts(dict.fromkeys(names, 1), names)
    print_table(table, title=title)


@app.add("""\
  # the paper's table
  brx stages
  # the same models on other devices (1 GB = 1e9 bytes)
  brx stages --memory 24 141 --format markdown
  # a model of your own
  brx stages --hidden 8192 --heads 64 --params-per-block 856e6 --blocks 80
  # the devices that a configuration needs, as brx plan counts them
  brx stages llama-8b --memory 48 80 --set pipeline.rings=host
""")
def stages(
    config: Annotated[
        str | None,
        argument(
            "CONFIG",
            f"{CONFIG_HELP}: count the devices that it needs, as brx plan does",
            autocompletion=complete_config,
        ),
    ] = None,
    *,
    overrides: Overrides,
    hidden: Annotated[
        int | None, of_own_model("H", "embedding dimension", min=1, max=LARGEST_SIZE)
    ] = None,
    heads: Annotated[
        int | None, of_own_model("A", "attention heads", min=1, max=LARGEST_SIZE)
    ] = None,
    params_per_block: Annotated[
        float | None,
        of_own_model("W", "parameters of one block, for example 202e6", min=1, max=1e18),
    ] = None,
    blocks: Annotated[
        int | None, of_own_model("L", "Transformer blocks", min=1, max=LARGEST_SIZE)
    ] = None,
    memory: Annotated[
        list[str] | None, option("GB...", "memory of devices, in 1e9 bytes (default: the paper's)")
    ] = None,
    sequence_length: Annotated[
        int | None, option("S", "tokens per sequence (default: 4096)", min=1, max=LARGEST_SIZE)
    ] = None,
    batch_size: Annotated[
        int | None, option("B", "examples per micro-batch (default: 1)", min=1, max=LARGEST_SIZE)
    ] = None,
    format: Format = "table",
) -> None:
    """Print the table, and what it assumes."""
    from brx.config.parsing import parse_bytes
    from brx.paper.printed import DEVICES_GB, LLAMAS
    from brx.planning import stage_count

    sizes = list(DEVICES_GB)
    if memory:
        with_units = [text if text[-1:].isalpha() else f"{text}GB" for text in memory]
        sizes = [parse_bytes(text, "--memory") / 1e9 for text in with_units]
    shape = stage_count.parse_shape(hidden, heads, params_per_block, blocks)
    if config is not None:
        refuse(
            shape is not None or sequence_length is not None or batch_size is not None,
            "CONFIG: has a model, a batch and a sequence length of its own; change them with --set",
        )
        _print_device_counts(config, overrides, sizes, format)
        return
    refuse(overrides, "--set: needs a CONFIG to change")
    models: Sequence[stage_count.ModelShape] = LLAMAS if shape is None else [shape]
    length, batch = sequence_length or 4096, batch_size or 1
    table = stage_count.stage_count_table(models, sizes, length, batch)
    print_table(table, format)
    if table.map(lambda cell: cell.startswith(">=")).any(axis=None):
        print_note(
            ">=: a block does not fit on one device, so each block needs at least two devices"
        )
    for note in stage_count.stage_count_notes(length, batch):
        print_note(note)
    if models is LLAMAS and memory is None and (length, batch) == (4096, 1):
        print_note(
            "for Llama 3.1 405B the paper prints >= 512 where its formula, P >= 2 L, gives >= 252"
        )


def _print_device_counts(
    config: str, overrides: Sequence[str], sizes: Sequence[float], format: TableFormat
) -> None:
    from brx.config.loading import allow_code_of, load_config_to_plan
    from brx.planning.device_counts import device_count_notes, device_count_table

    allow_code_of(config)
    run_config = load_config_to_plan(config, overrides)
    print_table(device_count_table(config, run_config, sizes), format)
    for note in device_count_notes(run_config):
        print_note(note)


@app.add("""\
  # compare with the paper's main model
  brx similarity laptop
  brx similarity laptop --set pipeline.delay.like=32 optimizer.lr=1e-3 \\
      --like-set optimizer.lr=1e-3
  # compare with another preset or file
  brx similarity laptop --like paper-1b
  # with the gradient noise scale after 200 iterations
  brx similarity laptop --noise-scale 200
""")
def similarity(
    config: ConfigName,
    *,
    overrides: Overrides,
    like: Annotated[
        str, option("CONFIG", "configuration to compare with", autocompletion=complete_config)
    ] = "paper-95m",
    like_set: Annotated[
        list[str] | None, option("KEY=VALUE...", "override settings of --like")
    ] = None,
    noise_scale: Annotated[
        int | None,
        option("N", "measure the gradient noise scale of CONFIG after N iterations", min=1),
    ] = None,
    format: Format = "table",
) -> None:
    """Print the numbers side by side, marked where they differ by more than a factor of three."""
    from brx.config.loading import allow_code_of, load_config_to_plan
    from brx.planning.similarity import similarity_table

    allow_code_of(config, like)
    run_config = load_config_to_plan(config, overrides)
    like_config = load_config_to_plan(like, like_set or [])
    names = (config, like if like != config else f"{like} (like)")
    print_table(similarity_table(run_config, like_config, names), format)
    if noise_scale is not None:
        from brx.train.noise_scale import SAMPLES, gradient_noise_scale

        scale = gradient_noise_scale(run_config, noise_scale)
        iterations = counted(noise_scale, "iteration")
        after = f"gradient noise scale of {config} after {iterations} without delay"
        print_note(f"{after}: {scale:,.0f} tokens, of {SAMPLES} batches")


@app.add("""\
  # from the committed runs
  brx verdict --stages 32 --micro-batches 8
  # from your own runs
  brx verdict runs/mine --stages 8 --micro-batches 4 --loss 2.5
  # with update times that were measured on your machine and model
  brx verdict --stages 8 --micro-batches 8 --cost-from runs/timing-*
  # on your devices
  brx verdict --stages 8 --micro-batches 8 --config paper-1b \\
      --device-memory 24GB --bandwidth 25GB --throughput A100
  # draw the verdict for many P and M
  brx verdict --stages 32 --micro-batches 8 --figure figures/verdict
""")
def verdict(
    runs: Annotated[
        list[Path] | None,
        argument(
            "RUNS",
            "folders of runs, or a file that --save wrote (default: the committed measurements)",
        ),
    ] = None,
    *,
    stages: Annotated[
        int, option("P", "number of stages, each on its own device", min=2, max=1024)
    ],
    micro_batches: Annotated[int, option("M", "micro-batches per update", min=1, max=1024)],
    loss: Annotated[
        float | None,
        option("NATS", "training loss to reach (default: the lowest that AdamW also reaches)"),
    ] = None,
    cost: Annotated[
        list[str] | None,
        option(
            "METHOD=SHARE...",
            "time that an update takes longer than AdamW's, as a fraction of one iteration "
            "(default: from the runs, or from its FLOPs)",
        ),
    ] = None,
    cost_from: Annotated[
        list[Path] | None,
        option(
            "PATH...",
            "take these costs from your own runs (any model), or from "
            "benchmarks/results/methods.json",
        ),
    ] = None,
    config: Annotated[
        str | None,
        option(
            "CONFIG",
            f"your model, {CONFIG_HELP}; M must divide its examples per update",
            autocompletion=complete_config,
        ),
    ] = None,
    overrides: Overrides,
    device_memory: DeviceMemory = None,
    bandwidth: Bandwidth = None,
    throughput: Throughput = None,
    figure: FigurePath = None,
    save: Annotated[
        Path | None,
        option("FILE", "save what the runs say; RUNS may then be this file, which is faster"),
    ] = None,
    verbose: Annotated[
        bool, flag("--verbose", "also print tables, what was not measured, and all assumptions")
    ] = False,
) -> None:
    from brx.planning.verdict_request import VerdictRequest

    answers = VerdictRequest(
        runs=runs or [],
        num_stages=stages,
        num_micro_batches=micro_batches,
        loss=loss,
        costs=cost or [],
        cost_files=cost_from or [],
        config=config,
        overrides=overrides,
        device_memory=device_memory,
        bandwidth=bandwidth,
        throughput=throughput,
    ).answers()
    print_note(*answers.notes)
    print(*answers.lines(verbose=verbose), sep="\n")
    if save is not None:
        answers.measurements.write(save)
        print(save)
    if figure is not None:
        from brx.plot.planning import draw_verdict, grid  # loads matplotlib

        cells = grid(answers.measurements, answers.question)
        print(*draw_verdict(cells, figure, answers.measurements, answers.run), sep="\n")
