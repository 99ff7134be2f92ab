"""The arguments of `delayed`: what is wrong with them, and the forms in which they may be given."""

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, get_args

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_leaves

from brx.errors import UserError
from brx.pipeline.delay import StageDelay, delays_of
from brx.pipeline.forecasts import FORECAST_RULES, StashMode
from brx.pipeline.history import contents, is_equal
from brx.pipeline.hooks import fields, has_nonzero

WRAPPED = ("optimizer", "base_optimizer", "_optimizer")
"""The attributes in which wrappers of optimizers keep the wrapped optimizer. They come first: some
wrappers are optimizers themselves."""


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number (numpy's, too)."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def without_arrays(delay: Any) -> Any:
    """A delay in the form that `delays_of` takes: numpy's arrays and torch's tensors become lists
    and numbers."""
    return delay.tolist() if hasattr(delay, "tolist") else delay


def checked_delays(delay: Any, num_stages: int, accumulation: int, seed: int) -> list[StageDelay]:
    """`delays_of`, with a UserError that names `delayed` if the delay is wrong."""
    try:
        return delays_of(delay, num_stages, accumulation, seed=seed)
    except ValueError as error:
        raise UserError(f"delayed: {error}") from error


def check_settings(accumulation: Any, stash: Any, forecast: Any, rings: Any) -> None:
    if not is_whole(accumulation) or accumulation < 1:
        raise UserError(
            f"delayed: accumulation must be a whole number from 1, got {accumulation!r}"
        )
    known = {
        "stash": get_args(StashMode),
        "forecast": (None, *FORECAST_RULES),
        "rings": ("device", "host"),
    }
    for name, value in (("stash", stash), ("forecast", forecast), ("rings", rings)):
        if value not in known[name]:
            choices = ", ".join(map(str, known[name]))
            raise UserError(f"delayed: {name} must be one of {choices}, got {value!r}")
    if forecast is not None and stash != "exact":
        raise UserError(f"delayed: forecast needs stash exact, got {stash}")


def optimizers_in(given: Any) -> list[Optimizer]:
    """The optimizers that were given, each without its wrappers."""
    if isinstance(given, Mapping):
        given = given.values()
    found: dict[int, Optimizer] = {}  # by id: a wrapper may have one in several places
    for each in given if isinstance(given, Iterable) else [given]:
        found |= {id(optimizer): optimizer for optimizer in _within(each)}
    return list(found.values())


def _within(given: Any) -> list[Optimizer]:
    """The optimizers within accelerate's or another's wrapper, or the optimizer itself."""
    if hasattr(given, "first_step") and hasattr(given, "second_step"):
        raise UserError(
            f"delayed: {type(given).__name__} steps in two halves; give delayed its base optimizer,"
            " and put both forward passes and both halves into one `with pipeline.micro_batch():`"
        )
    for name in WRAPPED:
        wrapped = getattr(given, name, None)
        if hasattr(wrapped, "step"):
            return _within(wrapped)
    # Old wrappers derive from Optimizer, but never call its constructor, so they take no hooks.
    if isinstance(given, Optimizer) and hasattr(given, "_optimizer_step_pre_hooks"):
        return [given]
    inner = _attributes_that_step(given)
    if not inner:
        kind = type(given).__name__
        if isinstance(given, Optimizer):
            kind += ", whose constructor has not called Optimizer.__init__"
        raise UserError(
            "delayed: optimizer must be a torch optimizer, several, or a wrapper that has them as "
            f"attributes, got {kind}"
        )
    return [optimizer for wrapped in inner for optimizer in _within(wrapped)]


def _attributes_that_step(given: Any) -> list[Any]:
    """The optimizers and wrappers of optimizers among an object's attributes, also those in lists
    and dictionaries. (A learning-rate schedule has a `step`, too, but no groups.)"""
    leaves, _ = tree_flatten(fields(given))
    return [leaf for leaf in leaves if hasattr(leaf, "step") and hasattr(leaf, "param_groups")]


def optimized(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    """All parameters of some optimizers."""
    parameters: list[Tensor] = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            parameters += group["params"]
    return parameters


def has_stepped(optimizer: Optimizer) -> bool:
    """Whether an optimizer's state shows that it has made a step.

    Some optimizers make state in their constructor: zeros with a counter at 0 (Adagrad), masks,
    numbers that seed something, copies of the weights.
    """
    for parameter, kept in optimizer.state.items():
        if not isinstance(parameter, Tensor):
            continue
        step = kept.get("step")
        if isinstance(step, int | float | Tensor):  # where there is a counter, it decides
            if bool(torch.as_tensor(step).any()):
                return True
        elif any(_is_left_by_a_step(leaf, parameter) for leaf in tree_leaves(kept)):
            return True
    return False


def _is_left_by_a_step(kept: Any, parameter: Tensor) -> bool:
    """Whether a value in a parameter's state is an average, or whatever else only a step makes."""
    if not isinstance(kept, Tensor):
        return False
    now = contents(kept)
    is_average = now.is_floating_point() and has_nonzero(now)
    return is_average and not is_equal(now, contents(parameter))
