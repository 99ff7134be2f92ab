"""`brx compare`: how robust is a method against delay?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from brx.cli.options import FigurePath, Format, complete_method
from brx.cli.usage import Application, Command
from brx.errors import UserError

EXAMPLES = """\
  brx compare my_method.py:MyMethod                     train what is missing, and show its place among the rest
  brx compare torch.optim:Adamax --set optimizer.arguments.betas='[0.9, 0.99]'
  brx compare muon soap --seeds 3                       with intervals
  brx compare muon --rest-lr 3e-4 --rest-lr 1e-3        a rate of its own for what is no matrix, a row for each
  brx compare --all-builtin --dry-run                   what is missing, and how long it takes
  brx compare                                           the leaderboard of what is there; trains nothing

The protocol is docs/compare.md; runs are in runs/compare, those committed in results/compare count as well.
"""

app = Application()


@app.command(cls=Command, epilog=EXAMPLES)
def compare(
    methods: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="METHOD",
            help="names, FILE.py:NAME or package.module:NAME",
            show_default=False,
            autocompletion=complete_method,
        ),
    ] = None,
    *,
    all_builtin: Annotated[bool, typer.Option("--all-builtin", help="all methods that come with brx")] = False,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE...", help="settings of the optimizer, for a variant of one METHOD"),
    ] = None,
    rest_lr: Annotated[
        list[float] | None,
        typer.Option(
            metavar="LR...", help="also try these as optimizer.rest_lr of one METHOD, lr chosen anew for each"
        ),
    ] = None,
    seeds: Annotated[
        int, typer.Option(metavar="N", min=1, help="seeds at the best rates; two or more give intervals")
    ] = 1,
    jobs: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="runs at a time (default: one per GPU or core)")
    ] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="folder of the runs")] = Path("runs/compare"),
    committed: Annotated[Path, typer.Option(metavar="DIR", help="folder of committed runs")] = Path("results/compare"),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="list the runs and their time; train nothing")] = False,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="train failed runs again")] = False,
    format: Format = "table",
    figure: FigurePath = None,
) -> None:
    """Exit code 0 when all runs are done, 1 when some failed, 130 when interrupted (the same command continues)."""
    from brx.data.prepare import prepare
    from brx.methods.table import CUSTOM, METHODS
    from brx.runs.formats import format_table
    from brx.runs.tables import leaderboard_table
    from brx.sweep.command import check_own_methods, list_cells, make_launcher, run_and_print
    from brx.sweep.compare import DELAYS, board_legend, parse_settings, protocol, protocols, read_board, take_committed

    if all_builtin and methods:
        raise UserError("METHOD and --all-builtin: give one of the two")
    for option, given in (("--set", overrides), ("--rest-lr", rest_lr)):
        if given and len(methods or []) != 1:
            raise UserError(f"{option}: is about one METHOD; name exactly one")
    asked = [name for name in METHODS if name != CUSTOM] if all_builtin else list(methods or [])
    settings = parse_settings(overrides or [])
    sweeps = protocols(asked, settings, seeds, out)
    sweeps += [protocol(asked[0], {**settings, "optimizer.rest_lr": rate}, seeds, out) for rate in rest_lr or []]
    check_own_methods(sweeps)
    # Prepared first: committed runs of another corpus do not count.
    corpus = prepare(sweeps[0].cells[0].config.data).fingerprint if sweeps and not dry_run else None
    take_committed(sweeps, committed, corpus)
    if dry_run:
        for sweep in sweeps:
            list_cells(sweep, jobs, retry_failed=retry_failed)
        return
    launches = [(sweep, make_launcher("local", sweep, jobs, None)) for sweep in sweeps]
    succeeded = [run_and_print(sweep, launching, retry_failed=retry_failed) for sweep, launching in launches]
    board = read_board([out, committed], [sweep.cells[0].config.optimizer.method for sweep in sweeps])
    print(format_table(leaderboard_table(board.rows, list(DELAYS)), format))
    beside = sys.stdout if format == "table" else sys.stderr
    print(*board_legend(board), sep="\n", file=beside)
    for note in board.notes:
        print(f"brx: note: {note}", file=sys.stderr)
    if figure is not None:
        from brx.plot.any_runs import draw_leaderboard  # loads matplotlib

        for path in draw_leaderboard(board.rows, list(DELAYS), figure):
            print(path, file=beside)
    if not all(succeeded):
        print("brx: note: some runs failed; those that diverged count as tried, with an infinite loss", file=sys.stderr)
        raise typer.Exit(1)
