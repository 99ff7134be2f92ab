"""`brx memory`: what basis rotation adds to the optimizer's memory, and what a run holds in all."""

from __future__ import annotations

import argparse
import math
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
    from brx.planning.optimizer_memory import LLAMA_3_8B, overhead_rows

    if args.config is not None and args.matrices:
        raise UserError("CONFIG and --matrix: give one of the two")
    if args.overrides and args.config is None:
        raise UserError("--set: needs a CONFIG to change")
    config = None if args.config is None else load_config(args.config, args.overrides)
    names: dict[tuple[int, int], str] = {}
    if config is not None:
        shapes = _matrices_of(config)
    elif args.matrices:
        shapes = Counter(_parse(text) for text in args.matrices)
    else:
        shapes = Counter(LLAMA_3_8B.values())
        names = {shape: name for name, shape in LLAMA_3_8B.items()}
    title, columns, rows = overhead_rows(shapes, names)
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, no_wrap=True, justify="left" if column in columns[:4] else "right")
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 160
    console.print(table)
    if config is not None:
        _print_run(console, config)
    return 0


def _print_run(console: Console, config: RunConfig) -> None:
    """What a run holds, by stage and by device."""
    from brx.cli.memory_tables import rank_notes, rank_table, stage_table
    from brx.planning.plan import plan_memory, planned_device_type

    ranks = plan_memory(config, planned_device_type(config))
    console.print(stage_table(config, ranks), rank_table(config, ranks))
    console.print(*rank_notes(config), sep="\n", soft_wrap=True)


def _matrices_of(config: RunConfig) -> Counter[tuple[int, int]]:
    """How often each shape of matrix (experts counted one by one) is in a configuration's model."""
    from brx.model.sizes import stage_shapes
    from brx.model.stage import is_rotated

    found: Counter[tuple[int, int]] = Counter()
    shapes = stage_shapes(config.model, config.data.vocabulary_size, range(config.model.blocks))
    for parameter, shape in shapes.items():
        if is_rotated(parameter):
            *lead, rows, columns = shape
            found[rows, columns] += math.prod(lead)
    return found


def _parse(text: str) -> tuple[int, int]:
    from brx.errors import UserError

    sides = text.lower().split("x")
    if len(sides) != 2 or not all(side.isdecimal() and int(side) > 0 for side in sides):
        raise UserError(f"--matrix {text}: write rows x columns, for example 4096x14336")
    return int(sides[0]), int(sides[1])
