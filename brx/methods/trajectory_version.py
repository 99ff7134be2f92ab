"""The version of the trajectory: equal settings, data and version give equal numbers, up to a
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
6. Basis rotation alone. In a refresh a column gives way to directions more than twice as large,
   wherever they stand, and keeps 0.1 |C q| of its old direction. The noise floor of rotated
   gradients is 140 times as high, and there is one for their momentum. Every other method computes
   what it computed in version 5.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from brx.errors import UserError

TRAJECTORY_VERSION = 6

CHANGED_ALONE = {5: "basis-rotation", 6: "basis-rotation"}
"""Versions that changed the numbers of one built-in method alone; every other version counts for
all methods."""
NEVER_OURS = ("torch.optim:", "pytorch_optimizer:")
"""Classes of these packages compute the same whatever changes in a method of brx."""


def recorded_version(content: Mapping[str, Any]) -> int:
    """The trajectory version in a summary or a manifest; 1 where none was recorded yet."""
    return int(content.get("trajectory_version", 1))


def changes(version: int, method: str) -> bool:
    """Whether a version changed what a method (`optimizer.method`) computes."""
    changed = CHANGED_ALONE.get(version)
    if changed is None or method == changed:
        return True
    # A class of a user's own may build on the method that changed.
    is_own = ":" in method
    return is_own and not method.startswith(NEVER_OURS)


def oldest_alike(version: int, method: str) -> int:
    """The first trajectory version in which a method computed what it computed in `version`."""
    while version > 1 and not changes(version, method):
        version -= 1
    return version


def newest_alike(version: int, method: str) -> int:
    """The last trajectory version up to now in which a method computes what it computed in
    `version`."""
    while version < TRAJECTORY_VERSION and not changes(version + 1, method):
        version += 1
    return version


def check_trajectory_version(content: Mapping[str, Any], path: Path, method: str) -> None:
    """Refuse a run, by its summary or a checkpoint's manifest, whose method has changed since.

    Raises:
        UserError: this brx computes other numbers for the method than the brx that trained it.
    """
    version = recorded_version(content)
    if newest_alike(version, method) != TRAJECTORY_VERSION:
        raise UserError(
            f"{path}: trained at trajectory version {version}, this brx computes version "
            f"{TRAJECTORY_VERSION}, whose"
            " numbers differ: start a new run in another folder, or go on with the brx that began "
            "this one"
        )
