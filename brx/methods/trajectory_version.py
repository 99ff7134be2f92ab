"""The version of the trajectory: equal settings, data and version give equal numbers, but for a
machine's rounding.

Every summary and checkpoint carries it; runs of two versions are never compared silently, or
continued. Raise it in the commit that changes, by more than rounding, what a method, the model, the
delay or the order of the data computes, and say here what changed:

1. Until the version was recorded: runs without one count as this.
2. Basis rotation: the first basis comes with update 10 instead of update 1; refreshes leave
   undecided directions where they were and raise second moments to the momentum's square; rounding
   noise in rotated gradients moves nothing; covariances take every gradient unless told otherwise.
3. The weights of a block's MLP are called `up` and `down`, and initial weights are drawn by name.
4. Basis rotation alone. The floor below which entries of a rotated gradient do not move follows
   what rounding leaves in them. The first basis comes with update 2 and does not depend on
   rounding: eigenspaces that tie, or have no energy, get projected axes; v is shared out in it. A
   refresh keeps the order of columns whose eigenvalues are about as large. No entry moves further
   than 1.8 times what AdamW's could. Every other method computes what it computed in version 3.
   `pipeline.forecast: average-update` corrects the bias of what was called `momentum`.
5. Basis rotation alone. A refresh no longer sorts columns by eigenvalue: each keeps its place, and
   with it its second moment. Before, rounding chose the order of some columns. A first basis for
   which LAPACK's `eigh` fails comes from singular vectors. Every other method computes what it
   computed in version 4.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from brx.errors import UserError

TRAJECTORY_VERSION = 5


def recorded_version(content: Mapping[str, Any]) -> int:
    return int(content.get("trajectory_version", 1))  # of a summary or a checkpoint's manifest


def check_trajectory_version(content: Mapping[str, Any], path: Path) -> None:
    version = recorded_version(content)
    if version != TRAJECTORY_VERSION:
        raise UserError(
            f"{path}: trained at trajectory version {version}, this brx computes version "
            f"{TRAJECTORY_VERSION}, whose"
            " numbers differ: start a new run in another folder, or go on with the brx that began "
            "this one"
        )
