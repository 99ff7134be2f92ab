"""Changes to Typer's defaults: wrong usage is one line, an option may have several values, and help
is plain text."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from brx.errors import UserError
from brx.files import user_path
from brx.names import shown

if TYPE_CHECKING:
    import pandas as pd

    from brx.runs.formats import Format as TableFormat

_EMPTY = "got an empty text; is a variable of the shell not set?"

Function = TypeVar("Function", bound=Callable[..., Any])
CONTEXT_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 120}


class _PlainHelp:
    """Help without boxes: arguments and options by panel, the commands of a group, then the
    examples, verbatim."""

    epilog: str | None

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):  # type: ignore[attr-defined]  # mixed into Typer's commands
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            name, text = record
            panel = "Options"
            if parameter.param_type_name == "argument":
                panel = "Arguments"
                name = name.partition(" <")[0]  # `CONFIG <str>` without its type
            panel = getattr(parameter, "rich_help_panel", None) or panel
            panels.setdefault(panel, []).append((name, text))
        for title, records in panels.items():
            with formatter.section(title):
                formatter.write_dl(records)
        if isinstance(self, TyperGroup):
            self.format_commands(ctx, formatter)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        if self.epilog:
            formatter.write(f"\nExamples:\n{self.epilog.rstrip()}\n")


class Command(_PlainHelp, TyperCommand):
    """A command whose list options take several values after one flag: `--set a=1 b=2`, as well as
    repeated flags."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Write every value of a list option behind a flag of its own, then parse as Typer does."""
        # While the shell completes a line, an option at its end may still get its value.
        if not ctx.resilient_parsing:
            self._refuse_missing_value(ctx, args)
        rest = super().parse_args(ctx, self._one_value_per_flag(args))
        ctx.params = {name: _without_tilde(value) for name, value in ctx.params.items()}
        return rest

    def _options_by_flag(self) -> dict[str, TyperOption]:
        found: dict[str, TyperOption] = {}
        for option in self.params:
            if isinstance(option, TyperOption):
                found |= dict.fromkeys(option.opts, option)
        return found

    def _refuse_missing_value(self, ctx: Any, args: list[str]) -> None:
        """Refuse `--out --resume`, where a folder was forgotten: the parser itself would take
        `--resume` for its name. Refuse empty texts, too: an empty path would be the working
        folder."""
        options = self._options_by_flag()
        for word, following in pairwise([*args, "--"]):
            if word == "--":
                return
            flag, equals, value = word.partition("=")
            option = options.get(flag)
            if not word:
                raise typer.BadParameter(_EMPTY, ctx=ctx)
            if option is None or option.is_flag:
                continue
            given = value if equals else following
            if not given:
                raise typer.BadParameter(_EMPTY, ctx=ctx, param=option)
            if not equals and _is_option(following):
                raise typer.BadParameter(f"needs a value: {option.help}", ctx=ctx, param=option)

    def _one_value_per_flag(self, args: list[str]) -> list[str]:
        """The arguments with the flag of a list option before each of its values."""
        options = self._options_by_flag()
        written: list[str] = []
        list_flag: str | None = None  # the flag of the list option whose values are being read
        needs_flag = False  # whether its next value must get a flag of its own
        for position, word in enumerate(args):
            if word == "--":
                return written + args[position:]
            if _is_option(word):
                option = options.get(word)
                list_flag = word if option is not None and option.multiple else None
                needs_flag = False
            elif list_flag is not None:
                if needs_flag:
                    written.append(list_flag)
                needs_flag = True
            written.append(word)
        return written

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Pieces such as `CONFIG` and `[NAME]`, without Typer's braces around required ones."""
        return [re.sub(r"[{}]", "", piece) for piece in super().collect_usage_pieces(ctx)]


class CommandGroup(_PlainHelp, TyperGroup):
    """A command with subcommands."""


class Application(typer.Typer):
    """A Typer application without boxes, tracebacks and markup. `brx.cli.main` prints errors."""

    def __init__(self, cls: type[CommandGroup] = CommandGroup, **settings: Any) -> None:
        super().__init__(
            cls=cls,
            context_settings=CONTEXT_SETTINGS,
            rich_markup_mode=None,
            pretty_exceptions_enable=False,
            **{"add_completion": False, **settings},
        )

    def add(self, examples: str, name: str | None = None) -> Callable[[Function], Function]:
        """Make a command of a function; its help ends with the examples."""
        return self.command(name, cls=Command, epilog=examples)


def refuse(is_wrong: object, message: str) -> None:
    """Raise a UserError with this message if `is_wrong` is true (or not empty)."""
    if is_wrong:
        raise UserError(message)


def refuse_settings(context: typer.Context, names: Iterable[str]) -> None:
    """Raise a UserError if a setting of a measurement is given with `--measured`, which would
    ignore it."""
    for name in names:
        source = context.get_parameter_source(name)
        refuse(
            source is not None and source.name != "DEFAULT",
            f"--{name.replace('_', '-')} and --measured: give one of the two; --measured shows "
            f"what was measured, whatever its settings",
        )


def print_note(*lines: str) -> None:
    """Print lines on stderr that the user should read, but that are not part of the result."""
    for line in lines:
        print(f"brx: note: {shown(line)}", file=sys.stderr)


def print_table(table: pd.DataFrame, format: TableFormat = "table", title: str = "") -> None:
    """Print a table of texts on stdout. Only the format `table` has a title, as the others are for
    programs."""
    from brx.runs.formats import format_table

    if title and format == "table":
        print(title)
    print(format_table(table, format))


def usage_line(error: typer.TyperException) -> str:
    """Say in one line what was wrong with the arguments and what would be right."""
    context = getattr(error, "ctx", None)
    parameter = getattr(error, "param", None)
    command = context.command_path if context is not None else "brx"
    if parameter is None:
        message = " ".join(error.format_message().split()).removesuffix(".")
        if context is not None and isinstance(context.command, TyperGroup) and "command" in message:
            message += f" (known: {', '.join(context.command.list_commands(context))})"
    else:
        is_option = isinstance(parameter, TyperOption)
        name = parameter.opts[0] if is_option else parameter.display_name_raw
        message = name + (_what_is_wrong(error) or f" is missing: {parameter.help}")
    return f"{command}: {message}; see {command} --help"


def _what_is_wrong(error: typer.TyperException) -> str:
    """The complaint about one parameter, to follow its name; empty if the parameter is missing."""
    # Pydantic checks the values for Typer, and its error has the details.
    details = getattr(error.__cause__, "errors", None)
    if details is None:
        return error.message and f" {error.message}"
    first = details()[0]
    message = str(first["msg"]).removeprefix("Value error, ").removesuffix(".")
    got = "" if repr(first["input"]) in message else f", got {first['input']!r}"
    return f": {message[:1].lower()}{message[1:]}{got}"


def _without_tilde(value: Any) -> Any:
    """A parameter's value, with `~` in paths replaced by the home folder. The shell does not do so
    everywhere (after `=`, in quotes)."""
    if isinstance(value, Path):
        return user_path(value)
    if isinstance(value, list):
        return [_without_tilde(one) for one in value]
    return value


def _is_option(word: str) -> bool:
    """Whether a word is a flag rather than a value; a negative number is a value."""
    return len(word) > 1 and word.startswith("-") and not re.match(r"-\.?\d", word)
