"""Parameter groups of a whole model for one `BasisRotation`, by each parameter's role."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from .places_in_model import places_in
from .roles import FUSED, Role, Split, refuse_lazy, roles


def param_groups(
    model: nn.Module,
    *,
    rotate: Iterable[str] = (),
    keep: Iterable[str] = (),
    split: Mapping[str, int | Split] | None = None,
) -> list[dict[str, Any]]:
    """Groups for `BasisRotation(param_groups(model))`, with the parameters' names.

    A group's `kind` says what is in it, and its `why` gives the reason (names, shapes and use).
    `matrices` and convolution `kernels` are rotated; `embeddings`, the `head` and `vectors` get
    AdamW. `BasisRotation(model)` decides the same and keeps all parameters in one group.

    Args:
        rotate: patterns (`*.head.weight`) of further names to rotate.
        keep: patterns of names that get AdamW.
        split: for a pattern, or a part of a name, the number of matrices in a fused projection; or
            (number, dimension) with -2 (rows) or -1 (columns) if they do not lie along the output.
            Projections in `roles.FUSED` with equal parts are known; 1 keeps one whole.

    Raises ValueError if a pattern matches no parameter, or one that it cannot apply to, if parts
    are not equal, or if FSDP1 wraps the model.
    """
    for place in places_in(model):
        if place.own_name in FUSED and not place.is_vector:
            refuse_lazy(place)
    named = dict(model.named_parameters())
    groups: dict[Role, dict[str, Any]] = {}
    for name, role in roles(model, rotate=rotate, keep=keep, split=split).items():
        group = groups.setdefault(role, {"params": [], **role.options})
        group["params"].append((name, named[name]))
    return list(groups.values())
