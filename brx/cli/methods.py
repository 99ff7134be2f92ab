"""`brx methods`: what can be trained with, and what exactly each method does."""

from __future__ import annotations

from typing import Annotated

import typer

from brx.cli.options import complete_method
from brx.cli.usage import Application, Command
from brx.errors import UserError

EXAMPLES = """\
  brx methods                                     all of them
  brx methods basis-rotation                      one in full, with every option
  brx methods basis-rotation --stages 32          and how often each stage refreshes its basis, by schedule
  brx methods torch.optim:RMSprop                 any torch optimizer: what its constructor takes
  brx methods my_method.py:MyMethod               a method of your own (docs/methods.md)
"""

app = Application()


@app.command(cls=Command, epilog=EXAMPLES)
def methods(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME", help="a method, FILE.py:NAME or package.module:NAME", autocompletion=complete_method
        ),
    ] = None,
    *,
    stages: Annotated[
        int | None, typer.Option(metavar="P", min=1, help="basis-rotation: print the refresh intervals of P stages")
    ] = None,
    frequency: Annotated[int | None, typer.Option(metavar="F", min=1, help="their mean (default: 10)")] = None,
) -> None:
    """Print all methods, or one."""
    from brx.methods.description import all_methods, one_method, refresh_table

    if stages is not None and name != "basis-rotation":
        raise UserError("--stages: only basis-rotation has refresh intervals: brx methods basis-rotation --stages 32")
    if stages is None and frequency is not None:
        raise UserError("--frequency: is the mean of refresh intervals; give --stages too")
    mean = 10 if frequency is None else frequency
    print(all_methods() if name is None else one_method(name))
    if stages is not None:
        print("\n" + refresh_table(stages, mean))
