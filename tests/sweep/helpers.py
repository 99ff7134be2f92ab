"""Sweeps of runs that take a second each."""

import yaml

from brx.config.loading import dump_config
from tests.train.helpers import tiny_config


def write_sweep(folder, **content):
    """A sweep file over the tiny run: by default two methods at P = 1 and 4."""
    base = folder / "tiny.yaml"
    if not base.exists():
        base.write_text(dump_config(tiny_config(folder)))
    content = {
        "base": str(base),
        "out": str(folder / "cells"),
        "grid": {
            "pipeline.stages": [4, 1],
            "method": [{"optimizer.method": "pipedream"}, {"optimizer.method": "nesterov"}],
        },
        **content,
    }
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path
