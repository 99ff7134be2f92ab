"""The arguments of `delayed`: what is wrong with them, and the forms in which they may be given."""

from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any, get_args

from torch import Tensor
from torch.optim import Optimizer

from brx.errors import UserError
from brx.pipeline.delay import StageDelay, delays_of
from brx.pipeline.forecasts import FORECAST_RULES, StashMode

WRAPPED = ("optimizer", "base_optimizer", "_optimizer")
"""The attributes in which wrappers of optimizers keep the wrapped optimizer."""


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number (numpy's, too)."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def without_arrays(delay: Any) -> Any:
    """A delay in the form that `delays_of` takes: numpy's arrays and torch's tensors become lists
    and numbers."""
    return delay.tolist() if hasattr(delay, "tolist") else delay


def stage_delays(delay: Any, num_stages: int, accumulation: int, seed: int) -> list[StageDelay]:
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
    each = list(given) if isinstance(given, Iterable) else [given]
    return [_innermost(optimizer) for optimizer in each]


def _innermost(given: Any) -> Optimizer:
    """The optimizer within accelerate's or another's wrapper."""
    if hasattr(given, "first_step") and hasattr(given, "second_step"):
        raise UserError(
            f"delayed: {type(given).__name__} steps in two halves; give delayed its base optimizer,"
            " and put both forward passes and both halves into one `with pipeline.micro_batch():`"
        )
    optimizer = given
    while True:
        attributes = [getattr(optimizer, name, None) for name in WRAPPED]
        inner = [attribute for attribute in attributes if hasattr(attribute, "step")]
        if not inner:
            break
        optimizer = inner[0]
    if not isinstance(optimizer, Optimizer):
        raise UserError(
            f"delayed: optimizer must be a torch optimizer, several, or a wrapper that has one as "
            f"`.optimizer`, got {type(given).__name__}"
        )
    return optimizer


def optimized(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    """All parameters of some optimizers."""
    parameters: list[Tensor] = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            parameters += group["params"]
    return parameters
