"""The example of docs/optimizer.md trains."""

import runpy
from pathlib import Path

import brx
from brx.optim import BasisRotation, param_groups


def test_example_trains():
    example = runpy.run_path(str(Path(brx.__file__).parents[1] / "examples" / "optimizer.py"))
    first, last = example["train"](lambda model: BasisRotation(param_groups(model), lr=1e-2), num_steps=60)
    assert last < first / 5
