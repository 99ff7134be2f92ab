"""`brx tables`: the paper's tables from runs."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "the paper's tables, from the runs of a scale"
EXAMPLES = """\
  brx tables slowdown                         print one
  brx tables all --out results/cpu/tables     write all of them as Markdown and CSV
  brx tables all --scale paper --runs runs/paper --out tables
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("table", metavar="TABLE", help="all, list, or the name of one")
    parser.add_argument("--scale", choices=["cpu", "paper"], default="cpu", help="which experiments (default: cpu)")
    parser.add_argument("--runs", type=Path, metavar="DIR", help="folder of the runs (default: the scale's)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write TABLE.md and TABLE.csv there")


def run(args: argparse.Namespace) -> int:
    """Print or write the tables."""
    import sys

    from brx.errors import UserError
    from brx.files import write_text
    from brx.paper.scales import SCALES, Experiments
    from brx.paper.tables import TABLES
    from brx.runs.formats import format_table

    if args.table == "list":
        for table in TABLES.values():
            print(f"{table.name:20}{table.label:38}{table.title}")
        return 0
    if args.table not in (*TABLES, "all"):
        raise UserError(f"TABLE: unknown table '{args.table}' (known: all, list, {', '.join(TABLES)})")
    experiments = Experiments(SCALES[args.scale], args.runs)
    for note in experiments.results.notes:
        print(f"brx: note: {note}", file=sys.stderr)
    for name in TABLES if args.table == "all" else [args.table]:
        found = experiments.fresh()
        try:
            columns, rows = TABLES[name].rows(found)
        except UserError as error:
            if args.table != "all":
                raise
            print(f"brx: note: table {name}: {error}", file=sys.stderr)
            continue
        if not rows and args.table != "all":
            raise UserError(f"table {name}: none of its runs are in {found.folder}; make them with {found.makers}")
        if found.missing:
            number = len(found.missing)
            print(f"brx: note: table {name}: {number} experiments not there: {found.makers}", file=sys.stderr)
        if args.out is None:
            print(f"{TABLES[name].title}\n{format_table(columns, rows, 'table')}")
            continue
        args.out.mkdir(parents=True, exist_ok=True)
        write_text(args.out / f"{name}.csv", format_table(columns, rows, "csv") + "\n")
        title = f"# {TABLES[name].title}\n\n"
        write_text(args.out / f"{name}.md", title + format_table(columns, rows, "markdown") + "\n")
        print(args.out / f"{name}.md")
    return 0
