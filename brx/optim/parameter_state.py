"""A parameter's matrices, rotated sides and state, which follow from its group's options."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from .dtensor import is_wrapper
from .options import FORM, Group

Side = Literal["left", "right"]

# The largest height and width of a convolution's kernel. A parameter of four or more dimensions
# counts as a kernel if its last two dimensions are at most this; else it is a stack of matrices.
LONGEST_KERNEL = 16


def is_flattened(parameter: Tensor, options: Group) -> bool:
    """Whether a parameter (out, in, h, w) is treated as one matrix (out, in h w)."""
    if options["flatten"] is None:
        return parameter.ndim >= 4 and max(parameter.shape[-2:]) <= LONGEST_KERNEL
    return bool(options["flatten"]) and parameter.ndim > 2


def matrix_shape(parameter: Tensor, options: Group) -> tuple[int, ...]:
    """The parameter's shape as matrices (*lead, m, n); a vector keeps its own."""
    shape = list(parameter.shape)
    if is_flattened(parameter, options):
        shape = [shape[0], math.prod(shape[1:])]
    if options["split"] and len(shape) >= 2:
        parts, dim = options["split"]
        shape[dim] //= parts
        shape.insert(-2, parts)
    return tuple(shape)


def as_matrices(
    tensors: Tensor,  # (k, *parameter.shape): k tensors of a parameter's shape
    options: Group,
) -> Tensor:
    """The same as matrices (k, *lead, m, n), in the shape of `matrix_shape`."""
    if is_flattened(tensors[0], options):
        tensors = tensors.flatten(2)
    if not options["split"]:
        return tensors
    parts, dim = options["split"]
    # (k, .., parts, m, n) for parts of the rows, (k, .., m, parts, n) for parts of the columns
    tensors = tensors.unflatten(dim, (parts, -1))  # type: ignore[no-untyped-call]
    return tensors.movedim(-2, -3) if dim == -1 else tensors


def rotated_sides(parameter: Tensor, options: Group) -> tuple[tuple[Side, ...], str]:
    """The sides of a parameter's matrices that are rotated, and why the others are not."""
    if not options["rotate"]:
        return (), ""
    shape = matrix_shape(parameter, options)
    if len(shape) < 2 or min(shape[-2:]) <= 1:
        return (), "a vector"
    rows, columns = shape[-2:]  # U is (rows, rows), V (columns, columns)
    sides: list[Side] = []
    reasons = []
    both: tuple[Side, Side] = ("left", "right")
    for side in both:
        reason = _why_not(side, rows, columns, options)
        if reason:
            reasons.append(f"{side}: {reason}")
        else:
            sides.append(side)
    if is_flattened(parameter, options):
        reasons += _drop_costly_sides(sides, rows, columns, options)
    return tuple(sides), ", ".join(reasons)


def _why_not(side: Side, rows: int, columns: int, options: Group) -> str:
    """Why a side of a matrix is not rotated; "" if it is."""
    size, other = (rows, columns) if side == "left" else (columns, rows)
    smaller_side = "left" if rows < columns else "right"
    if options["geometry"] == "unilateral" and side != smaller_side:
        return "unilateral"
    if options["max_dim"] is not None and size > options["max_dim"]:
        return f"{size} > max_dim"
    if options["max_aspect"] is not None and size > options["max_aspect"] * other:
        return f"{size} > {options['max_aspect']} x {other} (max_aspect)"
    return ""


def _drop_costly_sides(sides: list[Side], rows: int, columns: int, options: Group) -> list[str]:
    """Remove sides of a convolution kernel from `sides`, the longest first, until it keeps at most
    `max_kernel_state` numbers per weight. Returns the reason for each removal.

    A kernel's right side has h w times as many entries as channels: without the bound ResNet-18
    would keep 18 numbers per weight, and spend as much on products.
    """
    limit = options["max_kernel_state"]
    if limit is None:
        return []
    lengths: dict[Side, int] = {"left": rows, "right": columns}
    per_side = 2 if options["source"] == "2nd" else 1  # a basis, and a covariance
    reasons = []
    for side in sorted(sides, key=lambda side: (lengths[side], side), reverse=True):
        elements = sum(per_side * lengths[side] ** 2 for side in sides)
        per_weight = 2 + elements / (rows * columns)  # two moments
        if per_weight <= limit:
            break
        sides.remove(side)
        reasons.append(f"{side}: {per_weight:.1f} numbers per weight > {limit} (max_kernel_state)")
    return reasons


def is_rotated(parameter: Tensor, options: Group) -> bool:
    """Whether any side is rotated; not of a lazy module's parameter, which has no shape yet."""
    return not is_lazy(parameter) and bool(rotated_sides(parameter, options)[0])


def arithmetic(parameter: Tensor) -> torch.dtype:
    """The dtype in which a parameter's update is computed and its state is kept."""
    return torch.float64 if parameter.dtype == torch.float64 else torch.float32


def state_shapes(parameter: Tensor, options: Group) -> dict[str, tuple[int, ...]]:
    """The shapes of a parameter's state tensors, by name.

    A split parameter's moments have the shape of its parts.
    """
    sides, _ = rotated_sides(parameter, options)
    shape = tuple(parameter.shape)
    if not sides:
        return {"step": (), "exp_avg": shape, "exp_avg_sq": shape}
    *lead, rows, columns = matrix_shape(parameter, options)
    if options["split"]:
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
        if options["source"] == "2nd":
            shapes[f"{side}_covariance"] = (*lead, size, size)
    return shapes


def state_dtype(name: str, parameter: Tensor) -> torch.dtype:
    """The dtype of one entry of a parameter's state."""
    if name == "step":
        return torch.float32
    if name == "num_failed_refreshes":
        return torch.int64
    return arithmetic(parameter)


def check_state(
    state: Mapping[str, Any],
    parameter: Tensor,
    options: Group,
    describe: Callable[[Tensor], str],  # the parameter's name and shape for messages
) -> None:
    """Raise ValueError unless a state has the names and shapes that the options need, and no
    further basis or covariance."""
    wanted = state_shapes(parameter, options)
    shapes = {name: tuple(getattr(value, "shape", ())) for name, value in sorted(state.items())}
    found = {name: shape for name, shape in shapes.items() if name in wanted}
    superfluous = [
        name for name in state if name.endswith(("_basis", "_covariance")) and name not in wanted
    ]
    if found == wanted and not superfluous:
        return
    chosen = ", ".join(f"{name}={options[name]!r}" for name in FORM)
    message = (
        f"{describe(parameter)}: the state has {_listed(shapes)}, but {chosen} need "
        f"{_listed(wanted)}"
    )
    if "exp_avg" in state and _has_bases(wanted) and not _has_bases(state):
        message += "; to continue from AdamW, load its state into AdamW, and call take_over(it)"
    raise ValueError(message)


def _has_bases(names: Iterable[str]) -> bool:
    return any(name.endswith("_basis") for name in names)


def _listed(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{name} {shape}" for name, shape in sorted(shapes.items()))


def problem(parameter: Tensor, options: Group) -> str | None:
    """Why a parameter cannot be optimized with these options; None if it can."""
    wrong = _why_untrainable(parameter) if parameter.requires_grad else None
    if wrong:
        return wrong
    if not options["rotate"] or not options["split"] or is_lazy(parameter) or parameter.ndim < 2:
        return None
    shape = list(parameter.shape)
    if is_flattened(parameter, options):
        shape = [shape[0], math.prod(shape[1:])]
    parts, dim = options["split"]
    if shape[dim] % parts:
        return f"split={options['split']} does not divide it into equal matrices"
    return None


def _why_untrainable(parameter: Tensor) -> str | None:
    """Why no step can update a parameter, whatever its options; None if one can."""
    # Numbers of one byte (float8) are for storage: torch has no arithmetic for them.
    if not parameter.is_floating_point() or parameter.dtype.itemsize == 1:
        return "BasisRotation takes parameters of real numbers with 16 bits or more"
    if is_wrapper(parameter):
        return (
            f"BasisRotation takes plain tensors and DTensors, but this is a "
            f"{type(parameter).__name__}"
        )
    if is_lazy(parameter):  # it has no memory yet
        return None
    if parameter.is_inference():
        return "it was made in inference mode, so no step can write it; make or clone it outside"
    if _repeats_elements(parameter):
        return "its elements share memory (expand()), so no step can write it; clone it"
    return None


def _repeats_elements(parameter: Tensor) -> bool:
    """Whether several elements of a tensor lie at one place in memory."""
    sizes = zip(parameter.shape, parameter.stride(), strict=True)
    return parameter.numel() > 0 and any(size > 1 and step == 0 for size, step in sizes)
