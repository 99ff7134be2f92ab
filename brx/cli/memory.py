"""`brx memory`: what basis rotation adds to the optimizer's memory, and what a run holds in all."""

from __future__ import annotations

import argparse
from collections import Counter
from typing import TYPE_CHECKING

from brx.cli.arguments import add_overrides

if TYPE_CHECKING:
    from rich.console import Console

    from brx.config.schema import RunConfig

HELP = "print the memory overhead of the basis-rotation strategies; for a configuration, of every stage and device too"
EXAMPLES = """\
  brx memory                                         the paper's table: the matrices of Llama-3-8B
  brx memory paper-1b                                the matrices of a configuration, its stages and its device
  brx memory paper-1b --set pipeline.devices=6 optimizer.method=basis-rotation      the same on six devices
  brx memory --matrix 4096x4096 --matrix 1024x4096   any matrices
"""

FP32 = 4
"""Bytes; the state of basis rotation is fp32 whatever the weights are."""

UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("config", metavar="CONFIG", nargs="?", help="a YAML file or a preset's name")
    add_overrides(parser)
    parser.add_argument("--matrix", dest="matrices", metavar="MxN", action="append", default=[], help="a weight matrix")


def run(args: argparse.Namespace) -> int:
    """Print the table."""
    from rich.console import Console
    from rich.table import Table

    from brx.config.loading import load_config
    from brx.errors import UserError
    from brx.optim.overhead import LLAMA_3_8B, STRATEGIES, overhead_elements

    if args.config is not None and args.matrices:
        raise UserError("CONFIG and --matrix: give one of the two")
    if args.overrides and args.config is None:
        raise UserError("--set: needs a CONFIG to change")
    if args.config is not None:
        shapes = _matrices_of(load_config(args.config, args.overrides))
        names = {shape: _times(shape) for shape in shapes}
    elif args.matrices:
        shapes = Counter(_parse(text) for text in args.matrices)
        names = {shape: _times(shape) for shape in shapes}
    else:
        shapes = Counter(LLAMA_3_8B.values())
        names = {shape: f"{name} {_times(shape)}" for name, shape in LLAMA_3_8B.items()}

    largest = max(FP32 * overhead_elements(shape, *STRATEGIES[0]) for shape in shapes)
    unit, unit_bytes = next(((unit, size) for unit, size in UNITS.items() if largest >= size / 20), ("bytes", 1))
    title = f"Memory beyond Adam's moments, {unit} a matrix (fp32)"
    table = Table(title=title, title_justify="left")
    for column in ("source", "geometry", "rotation", "covariances"):
        table.add_column(column, no_wrap=True)
    for shape, count in shapes.items():
        table.add_column(names[shape] + (f" ({count} of them)" if count > 1 else ""), justify="right")
    together = sum(shapes.values()) > len(shapes)
    if together:
        table.add_column(f"all, {unit}", justify="right")
    table.add_column("share of Adam's moments", justify="right")
    for source, geometry in STRATEGIES:
        formula = "m^2 + n^2" if geometry == "bilateral" else "min(m, n)^2"
        by_shape = {shape: FP32 * overhead_elements(shape, source, geometry) for shape in shapes}
        total = sum(by_shape[shape] * count for shape, count in shapes.items())
        moments = 2 * FP32 * sum(_size(shape) * count for shape, count in shapes.items())
        cells = [_two_decimals(size, unit_bytes) for size in [*by_shape.values(), *([total] if together else [])]]
        covariances = formula if source == "2nd" else "--"
        table.add_row(source, geometry, formula, covariances, *cells, f"{total / moments:.1%}")
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 160
    console.print(table)
    if args.config is not None:
        _print_run(console, load_config(args.config, args.overrides))
    return 0


def _print_run(console: Console, config: RunConfig) -> None:
    """What a run holds, by stage and by device."""
    from brx.cli.memory_tables import rank_notes, rank_table, stage_table
    from brx.train.plan import plan_memory, planned_device_type

    ranks = plan_memory(config, planned_device_type(config))
    console.print(stage_table(config, ranks), rank_table(config, ranks))
    console.print(*rank_notes(config), sep="\n", soft_wrap=True)


def _two_decimals(num_bytes: int, unit_bytes: int) -> str:
    """Halves rounded up, as in the paper's table (0.125 is 0.13)."""
    from decimal import ROUND_HALF_UP, Decimal

    return str((Decimal(num_bytes) / Decimal(unit_bytes)).quantize(Decimal("0.01"), ROUND_HALF_UP))


def _matrices_of(config: RunConfig) -> Counter[tuple[int, ...]]:
    """How often each shape of matrix (experts counted one by one) is in a configuration's model."""
    from brx.model.sizes import stage_shapes
    from brx.model.stage import is_rotated

    found: Counter[tuple[int, ...]] = Counter()
    shapes = stage_shapes(config.model, config.data.vocabulary_size, range(config.model.blocks))
    for parameter, shape in shapes.items():
        if is_rotated(parameter):
            found[shape[-2:]] += shape[0] if len(shape) == 3 else 1
    return found


def _parse(text: str) -> tuple[int, ...]:
    from brx.errors import UserError

    sides = text.lower().split("x")
    if len(sides) != 2 or not all(side.isdecimal() and int(side) > 0 for side in sides):
        raise UserError(f"--matrix {text}: write rows x columns, for example 4096x14336")
    return int(sides[0]), int(sides[1])


def _times(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def _size(shape: tuple[int, ...]) -> int:
    return shape[0] * shape[1]
