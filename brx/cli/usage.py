"""How brx differs from Typer's defaults: wrong usage is one line, an option may have several values, help is plain."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

CONTEXT_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 120}


class _PlainHelp:
    """Help without boxes: options by their panels, the commands of a group, then examples, as they are written."""

    epilog: str | None

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):  # type: ignore[attr-defined]  # mixed into Typer's commands
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            name, text = record
            is_argument = parameter.param_type_name == "argument"
            panel = getattr(parameter, "rich_help_panel", None) or ("Arguments" if is_argument else "Options")
            # An argument has its type behind its name: `CONFIG <str>`.
            panels.setdefault(panel, []).append((name.partition(" <")[0] if is_argument else name, text))
        for title, records in panels.items():
            with formatter.section(title):
                formatter.write_dl(records)
        if isinstance(self, TyperGroup):
            self.format_commands(ctx, formatter)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        if self.epilog:
            formatter.write(f"\nExamples:\n{self.epilog.rstrip()}\n")


class Command(_PlainHelp, TyperCommand):
    """A command whose list options take several values after one flag: `--set a=1 b=2`, as well as repeated flags."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Write every value of a list option behind a flag of its own, then parse as Typer does."""
        options = [parameter for parameter in self.params if isinstance(parameter, TyperOption)]
        if not ctx.resilient_parsing:  # which is completion, of a line that is not at its end
            _refuse_flags_without_value(ctx, args, options)
        repeated = {flag for option in options if option.multiple for flag in option.opts}
        return super().parse_args(ctx, _one_value_per_flag(args, repeated))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """`CONFIG [NAME]`, without Typer's braces around what is required."""
        return [re.sub(r"[{}]", "", piece) for piece in super().collect_usage_pieces(ctx)]


class CommandGroup(_PlainHelp, TyperGroup):
    """A command that consists of commands."""


class Application(typer.Typer):
    """A Typer application in which wrong usage is left to `brx.cli.main`: no boxes, no tracebacks, no markup."""

    def __init__(
        self, cls: type[CommandGroup] = CommandGroup, *, epilog: str | None = None, add_completion: bool = False
    ) -> None:
        super().__init__(
            cls=cls,
            epilog=epilog,
            context_settings=CONTEXT_SETTINGS,
            add_completion=add_completion,
            rich_markup_mode=None,
            pretty_exceptions_enable=False,
        )


def print_note(line: str) -> None:
    """Something that the user should know, and that is not the result: on stderr."""
    print(f"brx: note: {line}", file=sys.stderr)


def usage_line(error: typer.TyperException) -> str:
    """What was wrong with the arguments and what would be right, in one line."""
    context, parameter = getattr(error, "ctx", None), getattr(error, "param", None)
    command = context.command_path if context is not None else "brx"
    if parameter is None:
        message = " ".join(error.format_message().split()).removesuffix(".")
        if context is not None and isinstance(context.command, TyperGroup) and "command" in message:
            message += f" (known: {', '.join(context.command.list_commands(context))})"
    else:
        name = parameter.opts[0] if isinstance(parameter, TyperOption) else parameter.display_name_raw
        message = name + (_what_is_wrong(error) or f" is missing: {parameter.help}")
    return f"{command}: {message}; see {command} --help"


def _what_is_wrong(error: typer.TyperException) -> str:
    """The complaint about one parameter, to be read behind its name; empty if it is missing."""
    details = getattr(error.__cause__, "errors", None)  # pydantic's, which checks the values for Typer
    if details is None:
        return error.message and f" {error.message}"
    first = details()[0]
    message = str(first["msg"]).removeprefix("Value error, ").removesuffix(".")
    got = "" if repr(first["input"]) in message else f", got {first['input']!r}"
    return f": {message[:1].lower()}{message[1:]}{got}"


def _one_value_per_flag(args: list[str], flags: set[str]) -> list[str]:
    """`--set a=1 b=2` as `--set a=1 --set b=2`; values end at the next option."""
    written: list[str] = []
    flag, has_value = None, False
    for position, word in enumerate(args):
        if word == "--":
            return written + args[position:]
        if _is_option(word):
            flag, has_value = (word if word in flags else None), False
        elif flag is not None:
            written += [flag] if has_value else []
            has_value = True
        written.append(word)
    return written


def _refuse_flags_without_value(ctx: Any, args: list[str], options: Iterable[TyperOption]) -> None:
    """`--out --resume` has forgotten a folder; the parser itself would name the folder `--resume`."""
    with_value = {flag: option for option in options if not option.is_flag for flag in option.opts}
    for word, following in pairwise([*args, "--"]):
        if word == "--":
            return
        if word in with_value and _is_option(following):
            option = with_value[word]
            raise typer.BadParameter(f"needs a value: {option.help}", ctx=ctx, param=option)


def _is_option(word: str) -> bool:
    """Whether a word is a flag rather than a value; a negative number is a value."""
    return len(word) > 1 and word.startswith("-") and not re.match(r"-\.?\d", word)
