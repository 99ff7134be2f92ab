"""`brx memory`: what basis rotation adds to the optimizer's memory, and what a run holds in all."""

from __future__ import annotations

from typing import Annotated

import typer

from brx.cli.options import Overrides, complete_config
from brx.cli.usage import Application, Command
from brx.errors import UserError

EXAMPLES = """\
  brx memory                                         the paper's table: the matrices of Llama-3-8B
  brx memory paper-1b                                the matrices of a configuration, its stages and its device
  brx memory paper-1b --set pipeline.devices=6 optimizer.method=basis-rotation      the same on six devices
  brx memory --matrix 4096x4096 1024x4096            any matrices
"""

app = Application()


@app.command(cls=Command, epilog=EXAMPLES)
def memory(
    config: Annotated[
        str | None,
        typer.Argument(metavar="CONFIG", help="a YAML file or a preset's name", autocompletion=complete_config),
    ] = None,
    *,
    overrides: Overrides,
    matrix: Annotated[list[str] | None, typer.Option(metavar="MxN...", help="weight matrices")] = None,
) -> None:
    """Print the table; for a configuration, two more, of its stages and of its devices."""
    from collections import Counter

    from brx.config.loading import load_config
    from brx.paper.printed import LLAMA_3_8B
    from brx.planning.memory_tables import (
        matrices_of,
        overhead_texts,
        parse_matrix,
        rank_notes,
        rank_table,
        stage_table,
    )
    from brx.planning.plan import plan_memory, planned_device_type
    from brx.runs.formats import format_table

    if config is not None and matrix:
        raise UserError("CONFIG and --matrix: give one of the two")
    if overrides and config is None:
        raise UserError("--set: needs a CONFIG to change")
    notes: list[str] = []
    if config is None and matrix:
        tables = [overhead_texts(Counter(parse_matrix(text) for text in matrix), {})]
    elif config is None:
        names = {shape: name for name, shape in LLAMA_3_8B.items()}
        tables = [overhead_texts(dict.fromkeys(names, 1), names)]
    else:
        run_config = load_config(config, overrides, is_new=True)
        ranks = plan_memory(run_config, planned_device_type(run_config))
        overhead = overhead_texts(matrices_of(run_config), {})
        tables = [overhead, stage_table(run_config, ranks), rank_table(run_config, ranks)]
        notes = rank_notes(run_config)
    for title, table in tables:
        print(title, format_table(table, "table"), sep="\n")
    if notes:
        print(*notes, sep="\n")
