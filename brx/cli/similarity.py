"""`brx similarity`: how far a training resembles another one, by the dimensionless numbers of both."""

from __future__ import annotations

from typing import Annotated

import typer

from brx.cli.options import ConfigName, Format, Overrides
from brx.cli.usage import Application, Command, print_note

EXAMPLES = """\
  brx similarity laptop                                     beside the paper's main model
  brx similarity laptop --set pipeline.delay.like=32 optimizer.lr=1e-3 --like-set optimizer.lr=1e-3
  brx similarity my.yaml --like paper-1b                    beside another preset or file
  brx similarity laptop --noise-scale 200                   with the gradient noise scale after 200 iterations
"""

app = Application()


@app.command(cls=Command, epilog=EXAMPLES)
def similarity(
    config: ConfigName,
    *,
    overrides: Overrides,
    like: Annotated[str, typer.Option(metavar="CONFIG", help="the configuration to resemble")] = "paper-95m",
    like_set: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE...", help="its settings that differ from its file")
    ] = None,
    noise_scale: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="measure the gradient noise scale of CONFIG after N iterations"),
    ] = None,
    format: Format = "table",
) -> None:
    """Print the numbers side by side, marked where they differ by more than a factor of three."""
    from brx.config.loading import load_config
    from brx.planning.similarity import similarity_table
    from brx.runs.formats import format_table

    run_config = load_config(config, overrides, is_new=True)
    names = (str(config), str(like) if str(like) != str(config) else f"{like} (like)")
    print(format_table(similarity_table(run_config, load_config(like, like_set or []), names), format))
    if noise_scale is not None:
        from brx.train.noise_scale import SAMPLES, gradient_noise_scale

        scale = gradient_noise_scale(run_config, noise_scale)
        print_note(
            f"gradient noise scale of {config} after {noise_scale} iterations without delay: {scale:,.0f} tokens, of"
            f" {SAMPLES} batches"
        )
