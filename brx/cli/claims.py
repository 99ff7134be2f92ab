"""`brx claims`: what the paper states, and whether it holds here."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from brx.cli.options import Format, ScaleName, ScaleRuns
from brx.cli.usage import Application, Command
from brx.errors import UserError

EXAMPLES = """\
  brx claims                                    all of them, from results/laptop
  brx claims main-reduction                     one, with the runs that it is from
  brx claims --runs runs/laptop --format csv    from runs under way

The rules of the verdicts are in docs/protocol.md, sections 5 and 6.
"""

app = Application()


@app.command(cls=Command, epilog=EXAMPLES)
def claims(
    claim: Annotated[str | None, typer.Argument(metavar="CLAIM", help="one, by name (default: all)")] = None,
    *,
    scale: ScaleName = "laptop",
    runs: ScaleRuns = None,
    format: Format = "table",
) -> None:
    """Print the claims with the paper's number, ours, and the verdict."""
    from brx.paper.claim_list import CLAIMS
    from brx.paper.claims import claim_table, judge
    from brx.paper.scales import SCALES, Experiments
    from brx.runs.formats import format_table

    names = [known.name for known in CLAIMS]
    if claim is not None and claim not in names:
        raise UserError(f"CLAIM: unknown claim '{claim}' (known: {', '.join(names)})")
    experiments = Experiments.load(SCALES[scale], runs)
    for note in experiments.notes:
        print(f"brx: note: {note}", file=sys.stderr)
    outcomes = judge(experiments, CLAIMS if claim is None else [CLAIMS[names.index(claim)]])
    table = claim_table(outcomes, experiments.scale)
    if claim is None:
        shown = table[["claim", "paper", "here", "reproduced"]] if format == "table" else table
        print(format_table(shown, format))
        return
    for heading, text in table.iloc[0].items():
        print(f"{heading + ':':12} {text}")
    for run in outcomes[0].runs:
        print(f"{'':12} {run}")
