"""`brx sweep`: run a grid of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from brx.cli.usage import Application, Command
from brx.errors import UserError

EXAMPLES = """\
  brx sweep configs/sweeps/laptop/main.yaml --dry-run    list the cells and how long they will take
  brx sweep laptop/main --jobs 2                         the same file, by its name
  brx sweep configs/sweeps/paper/main.yaml --launcher ray --address auto    on the Ray cluster of this node
"""

app = Application()


@app.command(cls=Command, epilog=EXAMPLES)
def sweep(
    sweeps: Annotated[
        list[Path],
        typer.Argument(
            metavar="SWEEP.yaml",
            help="sweep files, or names of those that come with brx (laptop/main), run in this order",
            show_default=False,
        ),
    ],
    *,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="folder of the cells (default: as the file says)")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="cells at a time (default: one per GPU, else one per core)")
    ] = None,
    launcher: Annotated[Literal["local", "ray"], typer.Option(help="where cells run")] = "local",
    address: Annotated[
        str | None, typer.Option(help="address of a Ray cluster: auto or HOST:PORT (default: one started here)")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="list the cells and estimate the time; run nothing")
    ] = False,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="run failed cells again")] = False,
) -> None:
    """Exit code 0 when all cells are done, 1 when some failed, 130 when interrupted."""
    from brx.sweep.command import check_own_methods, list_cells, make_launcher, run_and_print
    from brx.sweep.spec import Sweep

    if address is not None and launcher != "ray":
        raise UserError("--address: only --launcher ray has one")
    specifications = [Sweep.load(path, out) for path in sweeps]
    check_own_methods(specifications)
    if dry_run:
        for specification in specifications:
            list_cells(specification, jobs, retry_failed=retry_failed)
        return
    succeeded = [
        run_and_print(specification, make_launcher(launcher, specification, jobs, address), retry_failed=retry_failed)
        for specification in specifications
    ]
    if not all(succeeded):
        raise typer.Exit(1)
