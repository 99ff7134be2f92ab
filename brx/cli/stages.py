"""`brx stages`: how many pipeline stages a model needs on a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from brx.cli.options import Format
from brx.cli.usage import Application, Command, print_note
from brx.errors import UserError

EXAMPLES = """\
  brx stages                                            the paper's table
  brx stages --memory 24 141 --format markdown          the same models on other devices (GB = 1e9 bytes)
  brx stages --hidden 8192 --heads 64 --params-per-block 856e6 --blocks 80 --sequence-length 8192
"""
OWN_MODEL = "A model of your own (default: the paper's LLaMA models)"


def gigabytes(text: str) -> float:
    """`24` or `24GB` as 24.0."""
    try:
        return float(text.lower().removesuffix("gb"))
    except ValueError:
        raise UserError(f"--memory {text}: write a number of GB, for example 24") from None


app = Application()


@app.command(cls=Command, epilog=EXAMPLES)
def stages(
    *,
    hidden: Annotated[
        int | None, typer.Option(metavar="H", help="embedding dimension", rich_help_panel=OWN_MODEL)
    ] = None,
    heads: Annotated[int | None, typer.Option(metavar="A", help="attention heads", rich_help_panel=OWN_MODEL)] = None,
    params_per_block: Annotated[
        float | None,
        typer.Option(metavar="W", help="parameters of one block, for example 202e6", rich_help_panel=OWN_MODEL),
    ] = None,
    blocks: Annotated[
        int | None, typer.Option(metavar="L", help="Transformer blocks", rich_help_panel=OWN_MODEL)
    ] = None,
    memory: Annotated[
        list[float] | None,
        typer.Option(metavar="GB...", parser=gigabytes, help="memory of devices, in 1e9 bytes (default: the paper's)"),
    ] = None,
    sequence_length: Annotated[int, typer.Option(metavar="S", help="tokens of a sequence")] = 4096,
    batch_size: Annotated[int, typer.Option(metavar="B", help="examples per micro-batch")] = 1,
    format: Format = "table",
) -> None:
    """Print the table."""
    from brx.paper.printed import DEVICES_GB, LLAMAS
    from brx.planning.stage_count import ModelShape, stage_count_table
    from brx.runs.formats import format_table

    own = {"--hidden": hidden, "--heads": heads, "--params-per-block": params_per_block, "--blocks": blocks}
    missing = [option for option, value in own.items() if value is None]
    if 0 < len(missing) < len(own):
        raise UserError(f"a model of your own needs {', '.join(missing)} too")
    models: Sequence[ModelShape] = LLAMAS
    if hidden is not None and heads is not None and params_per_block is not None and blocks is not None:
        models = (ModelShape("model", hidden, heads, params_per_block, blocks),)
    table = stage_count_table(models, DEVICES_GB if memory is None else memory, sequence_length, batch_size)
    print(format_table(table, format))
    if table.map(lambda cell: cell.startswith(">=")).any(axis=None):
        print_note(">=: the device does not hold a whole block, so that each needs at least two")
    if models is LLAMAS and memory is None and (sequence_length, batch_size) == (4096, 1):
        print_note("for Llama 3.1 405B the paper prints >= 512 where its formula, P >= 2 L, gives >= 252")
