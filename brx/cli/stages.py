"""`brx stages`: how many pipeline stages a model needs on a device."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

HELP = "the least number of pipeline stages that a model needs, by the memory of a device"
EXAMPLES = """\
  brx stages                                            the paper's table
  brx stages --memory 24 141 --format markdown          the same models on other devices (GB = 1e9 bytes)
  brx stages --hidden 8192 --heads 64 --params-per-block 856e6 --blocks 80 --sequence-length 8192
"""

MODEL_OPTIONS = ("hidden", "heads", "params_per_block", "blocks")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    model = parser.add_argument_group("a model of your own (default: the paper's LLaMA models)")
    model.add_argument("--hidden", type=int, metavar="H", help="embedding dimension")
    model.add_argument("--heads", type=int, metavar="A", help="attention heads")
    model.add_argument("--params-per-block", type=float, metavar="W", help="parameters of one block, for example 202e6")
    model.add_argument("--blocks", type=int, metavar="L", help="Transformer blocks")
    parser.add_argument(
        "--memory", type=gigabytes, nargs="+", metavar="GB", help="of devices, 1e9 bytes (default: the paper's)"
    )
    parser.add_argument("--sequence-length", type=int, default=4096, metavar="S", help="default: 4096")
    parser.add_argument("--batch-size", type=int, default=1, metavar="B", help="of a micro-batch (default: 1)")
    parser.add_argument("--format", choices=["table", "markdown", "csv", "json"], default="table")


def run(args: argparse.Namespace) -> int:
    """Print the table."""
    import sys

    from brx.errors import UserError
    from brx.planning.stage_count import DEVICES_GB, LLAMAS, ModelShape, stage_count_rows
    from brx.runs.formats import format_table

    missing = [f"--{name.replace('_', '-')}" for name in MODEL_OPTIONS if getattr(args, name) is None]
    if 0 < len(missing) < len(MODEL_OPTIONS):
        raise UserError(f"a model of your own needs {', '.join(missing)} too")
    models: Sequence[ModelShape] = LLAMAS
    if not missing:
        models = [ModelShape("model", args.hidden, args.heads, args.params_per_block, args.blocks)]
    memories = DEVICES_GB if args.memory is None else args.memory
    columns, rows = stage_count_rows(models, memories, args.sequence_length, args.batch_size)
    print(format_table(columns, rows, args.format))
    if any(cell.startswith(">=") for row in rows for cell in row):
        print("brx: note: >=: the device does not hold a whole block, so that each needs at least two", file=sys.stderr)
    if missing and args.memory is None and (args.sequence_length, args.batch_size) == (4096, 1):
        print(
            "brx: note: for Llama 3.1 405B the paper prints >= 512 where its formula, P >= 2 L, gives >= 252",
            file=sys.stderr,
        )
    return 0


def gigabytes(text: str) -> float:
    return float(text.lower().removesuffix("gb"))
