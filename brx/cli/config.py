"""`brx config`: look at configurations."""

from __future__ import annotations

from brx.cli.options import ConfigName, Overrides
from brx.cli.usage import Application, Command

EXAMPLES = """\
  brx config show quick
  brx config show my.yaml --set pipeline.stages=16
"""

app = Application(epilog=EXAMPLES)


@app.callback()
def config() -> None:
    """Look at configurations."""


@app.command(cls=Command, epilog=EXAMPLES)
def show(config: ConfigName, *, overrides: Overrides) -> None:
    """Print the resolved configuration as YAML."""
    from brx.config import dump_config, load_config

    print(dump_config(load_config(config, overrides)), end="")
