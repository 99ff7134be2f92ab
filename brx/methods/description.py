"""The methods in words: equation, source, defaults, options, and how often each stage refreshes its
basis."""

import inspect
import textwrap
from typing import Any, Literal, get_args, get_origin

from brx.config.schema import RefreshSchedule, Section
from brx.config.user_code import allowed
from brx.errors import UserError, did_you_mean
from brx.methods.custom import load_method_class
from brx.methods.method import Method
from brx.methods.table import CUSTOM, METHODS, refresh_intervals, refreshes_per_iteration
from brx.pipeline.delay import pipeline_delays

WIDTH = 110


def all_methods() -> str:
    """Every built-in method with its defaults; for `brx methods`."""
    entries = []
    for name, method in METHODS.items():
        defaults = [f"{key}={_shown(default)}" for key, default, _ in _options(method.section)]
        entries.append(_entry(name, method, {"defaults": " ".join(defaults)}))
    return "\n\n".join(entries)


def one_method(name: str) -> str:
    """One method with all its options; a user's own, with the arguments of its constructor.

    Args:
        name: the name of a built-in method, FILE.py:NAME or package.module:NAME.

    Raises:
        UserError: there is no method of this name.
    """
    chosen = None
    if ":" in name:
        with allowed():
            chosen = load_method_class(name)
    if chosen is None and name not in METHODS:
        raise UserError(
            f"{name}: no such method{did_you_mean(name, METHODS)} (known: {', '.join(METHODS)})"
        )
    method: Method | type[Method]
    if chosen is None:
        method = METHODS[name]
    elif issubclass(chosen, Method):
        method = chosen
    else:
        method = METHODS[CUSTOM]
    lines = [_entry(name, method, {"why": method.why}), ""]
    lines.append("options (section `optimizer`; change one with --set optimizer.KEY=VALUE)")
    for key, default, explanation in _options(method.section):
        title = f"  {key} = {_shown(default)}"
        lines.append(
            textwrap.fill(
                explanation, WIDTH, initial_indent=f"{title:<34}", subsequent_indent=" " * 34
            )
        )
    if chosen:
        parameters = inspect.signature(chosen).parameters
        lines += ["", f"arguments of {name} (under `optimizer.arguments`)"]
        lines += [
            f"  {parameters[key]}" for key in parameters if key not in ("self", "params", "lr")
        ]
    return "\n".join(lines)


def refresh_table(num_stages: int, frequency: int) -> str:
    """A table of the iterations between the refreshes of each stage, with a column per refresh
    schedule. Its last row has the refreshes per iteration of all stages together."""
    schedules = get_args(RefreshSchedule)
    delays = pipeline_delays(num_stages)
    columns = {name: refresh_intervals(delays, frequency, name) for name in schedules}
    lines = [f"iterations between refreshes, P = {num_stages}, optimizer.frequency = {frequency}"]
    lines.append("  stage  tau" + "".join(f"{name:>20}" for name in schedules))
    for stage in range(num_stages):
        cells = "".join(f"{_interval(columns[name][stage]):>20}" for name in schedules)
        lines.append(f"  {stage:>5}  {delays[stage].tau:>3}{cells}")
    budgets = {name: refreshes_per_iteration(intervals) for name, intervals in columns.items()}
    lines.append("  sum of 1/f" + "".join(f"{budgets[name]:>20.4f}" for name in schedules))
    return "\n".join(lines)


def _entry(name: str, method: Method | type[Method], further: dict[str, str]) -> str:
    gets = "; ".join(f"{optimizer}: {parameters}" for optimizer, parameters in method.gets.items())
    facts = {"equation": method.equation, "source": method.source, "gets": gets, **further}
    lines = [f"{name}: {method.summary}"]
    for title, text in facts.items():
        lines.append(
            textwrap.fill(text, WIDTH, initial_indent=f"  {title:<10}", subsequent_indent=" " * 12)
        )
    return "\n".join(lines)


def _options(section: type[Section]) -> list[tuple[str, Any, str]]:
    """Name, default and explanation of every option but the method's name, choices included."""
    options = []
    for key, field in section.model_fields.items():
        if key == "method":
            continue
        choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
        listed = f"{' | '.join(map(str, choices))}. " if choices else ""
        explanation = listed + " ".join((field.description or "").split())
        options.append((key, field.get_default(call_default_factory=True), explanation))
    return options


def _interval(value: float | None) -> str:
    if value is None:
        return "never"
    if value == int(value):
        return f"{value:g}"
    return f"{value:.2f}"


def _shown(value: Any) -> str:
    """A value as YAML writes it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)
