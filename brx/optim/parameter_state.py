"""The options of a parameter group, and what they make of a parameter: its matrices, rotated sides
and state."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from operator import itemgetter
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from brx.optim.sharded import whole

Group = dict[str, Any]  # a torch parameter group
Side = Literal["left", "right"]

CHOICES = {
    "source": ("2nd", "1st"),
    "geometry": ("bilateral", "unilateral"),
    "covariance": ("step", "refresh", "interval"),
    "rotation_precision": ("highest", "tf32", "bf16"),
}
NUMBERS = ("lr", "eps", "weight_decay")
FLAGS = ("staggered", "maximize", "rotate", "flatten", "as_published")
NONE_MEANS = {"frequency": "never again", "max_dim": "no limit", "max_aspect": "no limit"}

FORM = ("source", "geometry", "rotate", "flatten", "split", "max_dim", "max_aspect", "as_published")
# What parameters must agree in to go through an update together.
shared_options = itemgetter(
    "lr", "weight_decay", "betas", "eps", "maximize", "as_published", *CHOICES
)


def form_options(group: Group) -> tuple[object, ...]:
    """What decides which state a parameter has; a pair may be a list, if it comes from a file."""
    return tuple(
        tuple(group[name]) if isinstance(group[name], list) else group[name] for name in FORM
    )


def step_options(group: Group) -> Group:
    """A group as numbers, where it may hold tensors; checked, since a training loop may have
    changed it."""
    check_options(group)
    return {
        **group,
        **{name: float(group[name]) for name in NUMBERS},
        "betas": tuple(map(float, group["betas"])),
    }


def check_options(group: Group) -> None:
    for name, (accepts, wanted) in RULES.items():
        if not accepts(group[name]):
            raise ValueError(f"Invalid {name}={group[name]!r}: must be {wanted}")
    if group["as_published"] and group["covariance"] != "step":
        raise ValueError(
            f"Invalid covariance={group['covariance']!r}: as_published has every gradient's (step)"
        )
    if group["as_published"] and (group["rotation_precision"], group["first_refresh"]) != (
        "highest",
        2,
    ):
        raise ValueError(
            "as_published has a rotation_precision and a first_refresh of its own: leave them out"
        )


def _is_number(value: Any, smallest: float, limit: float = math.inf) -> bool:
    if isinstance(value, Tensor):
        is_one = value.numel() == 1 and not value.is_complex()
    else:
        is_one = isinstance(value, Real) and not isinstance(value, bool)
    return is_one and smallest <= float(value) < limit


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2


def _is_split(value: Any) -> bool:
    return _is_pair(value) and isinstance(value[0], int) and value[0] >= 1 and value[1] in (-2, -1)


# By option: whether a value will do, and which would.
RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(NUMBERS, (lambda value: _is_number(value, 0), "a number >= 0")),
    "betas": (
        lambda betas: _is_pair(betas) and all(_is_number(b, 0, 1) for b in betas),
        "two numbers in [0, 1)",
    ),
    **{
        name: (values.__contains__, f"one of {', '.join(map(repr, values))}")
        for name, values in CHOICES.items()
    },
    **dict.fromkeys(FLAGS, (lambda value: isinstance(value, bool), "True or False")),
    **{
        name: (
            lambda value: value is None or _is_number(value, 1),
            f"a number >= 1, or None for {meaning}",
        )
        for name, meaning in NONE_MEANS.items()
    },
    "split": (
        lambda value: value is None or _is_split(value),
        "(parts, -2 for rows or -1 for columns), or None",
    ),
    "first_refresh": (lambda value: type(value) is int and value >= 2, "a whole number >= 2"),
}


def matrix_shape(parameter: Tensor, group: Group) -> tuple[int, ...]:
    """The parameter as matrices (*lead, m, n); a vector as it is."""
    shape = list(parameter.shape)
    if group["flatten"] and len(shape) > 2:
        return shape[0], math.prod(shape[1:])
    if group["split"] and len(shape) >= 2:
        parts, dim = group["split"]
        shape[dim] //= parts
        shape.insert(-2, parts)
    return tuple(shape)


def split_into_matrices(tensors: Tensor, group: Group) -> Tensor:
    """Tensors (.., m, n) as (.., parts, m, n / parts), or (.., parts, m / parts, n), where the
    group splits them."""
    if not group["split"]:
        return tensors
    parts, dim = group["split"]
    tensors = tensors.unflatten(dim, (parts, -1))  # type: ignore[no-untyped-call]  # (.., m, parts, n), or as wanted
    return tensors.movedim(-2, -3) if dim == -1 else tensors


def rotated_sides(parameter: Tensor, group: Group) -> tuple[tuple[Side, ...], str]:
    """The sides of a parameter's matrices that are rotated, and why the others are not."""
    shape = matrix_shape(parameter, group)
    if not group["rotate"]:
        return (), ""
    if len(shape) < 2 or min(shape[-2:]) <= 1:
        return (), "a vector"
    rows, columns = shape[-2:]  # U is (rows, rows), V (columns, columns)
    sides: list[Side] = []
    reasons = []
    lengths: tuple[tuple[Side, int, int], ...] = (("left", rows, columns), ("right", columns, rows))
    for side, size, other in lengths:
        if group["geometry"] == "unilateral" and (side == "left") != (rows < columns):
            reasons.append(f"{side}: unilateral")
        elif group["max_dim"] is not None and size > group["max_dim"]:
            reasons.append(f"{side}: {size} > max_dim")
        elif group["max_aspect"] is not None and size > group["max_aspect"] * other:
            reasons.append(f"{side}: {size} > {group['max_aspect']} x {other} (max_aspect)")
        else:
            sides.append(side)
    return tuple(sides), ", ".join(reasons)


def is_rotated(parameter: Tensor, group: Group) -> bool:
    return bool(rotated_sides(parameter, group)[0])


def arithmetic(parameter: Tensor) -> torch.dtype:
    return torch.float64 if parameter.dtype == torch.float64 else torch.float32


def state_shapes(parameter: Tensor, group: Group) -> dict[str, tuple[int, ...]]:
    """What is kept for a parameter, by name; of a split one the moments, too, are those of its
    parts."""
    sides, _ = rotated_sides(parameter, group)
    shape = tuple(parameter.shape)
    if not sides:
        return {"step": (), "exp_avg": shape, "exp_avg_sq": shape}
    *lead, rows, columns = matrix_shape(parameter, group)
    if group["split"]:
        shape = *lead, rows, columns
    shapes = {
        "step": (),
        "exp_avg": shape,
        "exp_avg_sq": shape,
        "num_failed_refreshes": tuple(lead),
    }
    for side in sides:
        size = rows if side == "left" else columns
        shapes[f"{side}_basis"] = (*lead, size, size)
        if group["source"] == "2nd":
            shapes[f"{side}_covariance"] = (*lead, size, size)
    return shapes


def state_dtype(name: str, parameter: Tensor) -> torch.dtype:
    return {"step": torch.float32, "num_failed_refreshes": torch.int64}.get(
        name, arithmetic(parameter)
    )


def check_state(
    state: Mapping[str, Any], parameter: Tensor, group: Group, description: str
) -> None:
    wanted = state_shapes(parameter, group)
    shapes = {name: tuple(getattr(value, "shape", ())) for name, value in sorted(state.items())}
    superfluous = [
        name for name in state if name.endswith(("_basis", "_covariance")) and name not in wanted
    ]
    if superfluous or {name: shape for name, shape in shapes.items() if name in wanted} != wanted:
        told, needed = (
            ", ".join(f"{name} {shape}" for name, shape in sorted(of.items()))
            for of in (shapes, wanted)
        )
        options = ", ".join(f"{name}={group[name]!r}" for name in FORM)
        raise ValueError(f"{description}: the state has {told}, but {options} need {needed}")


def state_from(
    other: Optimizer, parameter: Tensor, group: Group, description: str
) -> dict[str, Any]:
    """What AdamW or pytorch-optimizer's SOAP keeps for a parameter, whole, by the names of
    `BasisRotation`'s state.

    ValueError where it has no such moments, or bases of other sides than the group's options ask
    for."""
    own, shapes = other.state[parameter], state_shapes(parameter, group)
    if "exp_avg" not in own or "exp_avg_sq" not in own:
        raise ValueError(
            f"{description}: its state has {', '.join(own)}, but exp_avg and exp_avg_sq are needed"
        )
    if any(name.endswith("_basis") for name in own):
        raise ValueError(f"{description}: is a BasisRotation's already; use load_state_dict")
    bases = {
        side: q for side, q in zip(("left", "right"), own.get("Q") or (), strict=False) if len(q)
    }
    wanted = [name.removesuffix("_basis") for name in shapes if name.endswith("_basis")]
    if bases and (
        sorted(bases) != wanted or "step" in own or parameter.ndim != 2 or group["split"]
    ):
        raise ValueError(
            f"{description}: bases of {', '.join(bases)} are no state of "
            f"{', '.join(wanted) or 'AdamW'}"
        )
    if group["as_published"]:
        raise ValueError(
            f"{description}: as_published has a start of its own, and takes nothing over"
        )
    momentum, second = (
        whole(own[name]).detach().to(arithmetic(parameter)) for name in ("exp_avg", "exp_avg_sq")
    )
    if (
        "left" in bases
        # SOAP's momentum is in the original space; AdamW's moments are those in bases of the
        # identity
    ):
        momentum = bases["left"].to(momentum).mT @ momentum
    if "right" in bases:
        momentum = momentum @ bases["right"].to(momentum)
    if wanted:
        momentum, second = (split_into_matrices(moment, group) for moment in (momentum, second))
    of_other = next(g for g in other.param_groups if any(p is parameter for p in g["params"]))
    step = (
        own["step"] if "step" in own else of_other["step"] - 1
    )  # SOAP's first step updates nothing
    state: dict[str, Any] = {
        "step": torch.as_tensor(float(step)),
        "exp_avg": momentum,
        "exp_avg_sq": second,
    }
    for name, shape in shapes.items():
        side, _, what = name.partition("_")
        if what == "basis":
            state[name] = bases.get(side, torch.eye(shape[-1]).expand(shape))
        elif what == "covariance" and bases:
            state[name] = own["GG"][0 if side == "left" else 1]
        elif name not in state:
            state[name] = torch.zeros(shape)
    return state


class ParameterSummary(NamedTuple):
    """What was decided for one parameter: `num_state` numbers of moments, bases and covariances;
    `why` in words."""

    name: str
    shape: tuple[int, ...]
    matrices: tuple[int, ...]
    sides: tuple[Side, ...]
    num_state: int
    why: str


class Summary(list[ParameterSummary]):
    """One row per parameter; printed as a table."""

    @classmethod
    def of(cls, named: Iterable[tuple[str, Tensor, Group]]) -> Summary:
        summary = cls()
        for name, p, group in named:
            (sides, reasons), shapes = rotated_sides(p, group), state_shapes(p, group)
            kept = [
                math.prod(shapes[kept])
                for kept in shapes
                if kept not in ("step", "num_failed_refreshes")
            ]
            num_state = sum(kept) if p.requires_grad else 0
            why = ", ".join(
                filter(
                    None,
                    [group.get("why", "matrix" if group["rotate"] else "rotate=False"), reasons],
                )
            )
            summary.append(
                ParameterSummary(
                    name, tuple(p.shape), matrix_shape(p, group), sides, num_state, why
                )
            )
        return summary

    def __str__(self) -> str:
        rows = [("parameter", "shape", "update", "state", "why")]
        for row in self:
            parts = "" if row.matrices == row.shape else " x ".join(map(str, row.matrices)) + ", "
            update = (
                f"{parts}rotated: {' and '.join(row.sides)}" if row.sides else "elementwise (AdamW)"
            )
            rows.append((row.name, str(row.shape), update, f"{row.num_state:,}", row.why))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        num_rotated, state = (
            sum(bool(row.sides) for row in self),
            sum(row.num_state for row in self),
        )
        weights = sum(math.prod(row.shape) for row in self)
        total = (
            f"{num_rotated} of {len(self)} parameters rotated; {state:,} numbers of state for "
            f"{weights:,} weights"
        )
        return "\n".join([*lines, total])
