"""Any torch optimizer by name: `package.module:Class`."""

from __future__ import annotations

import difflib
import importlib
import inspect
from typing import Any

from torch.optim import Optimizer

from brx.errors import UserError
from brx.methods.groups import Group


def load_optimizer_class(name: str) -> type[Optimizer]:
    """The optimizer class that `package.module:Class` names.

    Raises:
        UserError: there is no such class, or it is none that a pipeline can use.
    """
    module_name, _, class_name = name.partition(":")
    where = f"optimizer.method {name}"
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # the module is the user's: anything can be wrong with it
        raise UserError(
            f"{where}: module {module_name} cannot be imported: {one_line(error)}"
            " (install it, or put its folder on PYTHONPATH)"
        ) from None
    found = getattr(module, class_name, None)
    if not (isinstance(found, type) and issubclass(found, Optimizer)):
        there = [key for key, value in vars(module).items() if isinstance(value, type) and issubclass(value, Optimizer)]
        by_lower = {key.lower(): key for key in there}
        close = difflib.get_close_matches(class_name.lower(), by_lower, n=1)
        hint = f"; did you mean {by_lower[close[0]]}?" if close else f" (there: {', '.join(there) or 'none'})"
        problem = f"is no torch.optim.Optimizer of {module_name}"
        raise UserError(f"{where}: {class_name} {problem}{hint}")
    closure = inspect.signature(found.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UserError(f"{where}: its step needs a closure that computes the loss anew, which a pipeline cannot do")
    return found


def make_optimizer(name: str, groups: list[Group], lr: float, arguments: dict[str, Any]) -> Optimizer:
    """Construct the optimizer; what its constructor objects to becomes one line.

    Raises:
        UserError: see `load_optimizer_class`; or an argument is unknown or wrong.
    """
    optimizer_class = load_optimizer_class(name)
    accepted = inspect.signature(optimizer_class).parameters
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in accepted.values())
    unknown = [key for key in ("lr", *arguments) if key not in accepted and not takes_any]
    if unknown:
        options = ", ".join(key for key in accepted if key not in ("params", "lr"))
        raise UserError(f"optimizer.method {name}: takes no argument '{unknown[0]}' (known: {options})")
    try:
        return optimizer_class(groups, lr=lr, **arguments)  # type: ignore[call-arg]
    except Exception as error:  # libraries raise what they like
        raise UserError(f"optimizer.arguments: {name} refuses them: {one_line(error)}") from None


def one_line(error: Exception) -> str:
    """What a library says of its failure, without line breaks."""
    return " ".join(str(error).split()) or type(error).__name__
