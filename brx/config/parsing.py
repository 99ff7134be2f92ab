"""Parses text into plain values: YAML, and numbers with a unit. Every mistake, and every trap of
YAML, becomes one line."""

import math
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import yaml

from brx.errors import UserError

try:
    from yaml import CSafeLoader as SafeLoader
except ImportError:  # PyYAML was built without libyaml: slower, with the same results
    from yaml import SafeLoader  # type: ignore[assignment]

MOST_VALUES, MOST_LEVELS = 100_000, 50
"""More values, and deeper nesting, than any configuration or sweep has. A file beyond these limits
is damaged, or consists of aliases that multiply each other."""

PREFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "p": 10**15}
PREFIXES |= {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


class _Loader(SafeLoader):
    """Reads plain words as YAML 1.2 does, and refuses a key that appears twice.

    PyYAML reads YAML 1.1, in which 3e-4 is a string, 010 is eight, 1:30 is ninety, `no` is false
    and 2001-01-01 is a date."""

    # Its own tables of patterns, by first character (`_CORE_SCHEMA`). From YAML 1.1, only `<<`
    # (merge) and 1_000 remain.
    yaml_implicit_resolvers = {}  # noqa: RUF012  # PyYAML's own kind of class variable

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        text = str(self.construct_scalar(node))
        for prefix, base in (("0o", 8), ("0x", 16)):
            if text.startswith(prefix):
                return int(text.removeprefix(prefix), base)
        return int(text)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise _problem(f"key '{key.value}' appears twice", key)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes every text that would be read as something else, by YAML 1.1 (PyYAML's own rule) or by
    YAML 1.2 (`_Loader`'s)."""


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    # In other quotes PyYAML would write line ends such as U+0085, which are read as spaces.
    style = None if text.isprintable() else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)

# The core schema of YAML 1.2 (section 10.3.2): name, pattern, first characters. Patterns are tried
# in this order, because the pattern of floats matches integers, too.
_CORE_SCHEMA = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    # As in YAML 1.1, digits may be in groups of three: 1_000_000.
    (
        "int",
        r"[-+]?[0-9]+|[-+]?[1-9][0-9]{0,2}(_[0-9]{3})+|0o[0-7]+|0x[0-9a-fA-F]+",
        list("-+0123456789"),
    ),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+0123456789."),
    ),
    ("merge", r"<<", ["<"]),
)
for _name, _pattern, _first in _CORE_SCHEMA:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(
            f"tag:yaml.org,2002:{_name}", re.compile(f"(?:{_pattern})\\Z"), _first
        )
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


def dump_yaml(content: Any, **options: Any) -> str:
    """Plain values as YAML that `parse_yaml` reads back to equal ones; `options` are PyYAML's."""
    text = yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True, **options)
    return str(text)


def parse_yaml(text: str, where: str) -> Any:
    """Parse YAML text; a mistake in it becomes a UserError that starts with `where`."""
    try:
        _check_size(text)
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" (line {mark.line + 1})" if mark else ""
        problem = " ".join(str(getattr(error, "problem", None) or error).split())
        raise UserError(f"{where}: not valid YAML: {problem[:200]}{line}") from None
    # An impossible date, a number with thousands of digits, or PyYAML's own failure at a tag that
    # does not suit its value.
    except (ValueError, OverflowError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"{where}: not valid YAML: {str(error)[:200]}") from None


def parse_value(text: str, where: str) -> Any:
    """The value of `--set key=VALUE`: as in a YAML file, but without comments.

    A plain text keeps its ` #`; in a file it would need quotes.

    Raises:
        UserError: it is not YAML, or a comment follows a quoted text, a list or a mapping.
    """
    value = parse_yaml(text, where)
    comment = _comment_in(text)
    if comment is None:
        return value
    if isinstance(value, dict | list) or text.lstrip().startswith(("'", '"', "#")):
        raise UserError(f"{where}: '{comment:.60}' would be a comment; quote it, or leave it out")
    return text.strip()


def _comment_in(text: str) -> str | None:
    """The part at the end of a value that YAML reads as a comment; None if there is none."""
    last = 0
    for event in yaml.parse(text, Loader=SafeLoader):
        if isinstance(event, yaml.ScalarEvent | yaml.CollectionEndEvent):
            end: Any = event.end_mark
            last = max(last, end.index)
    rest = text[last:].strip()
    return rest if rest.startswith("#") else None


class _Size(NamedTuple):
    """The size of a value, with its aliases written out."""

    num_values: int
    num_levels: int  # of collections within each other; 0 for a scalar


_SCALAR = _Size(1, 0)
_EMPTY = _Size(1, 0)  # a collection is itself a value


@dataclass
class _Collection:
    """A list or mapping whose end has not been read yet."""

    anchor: str | None
    size: _Size = _EMPTY  # so far

    def add(self, size: _Size) -> None:
        num_levels = max(self.size.num_levels, size.num_levels + 1)
        self.size = _Size(self.size.num_values + size.num_values, num_levels)


def _check_size(text: str) -> None:
    """yaml.YAMLError if there are too many values or levels, counting aliases as if they were
    written out, or if an alias contains itself."""
    sizes: dict[str | None, _Size] = {}  # by anchor
    # The collections around an event. The first one is the whole text, which is no value.
    around = [_Collection(None, _Size(0, 0))]
    # Events come one by one. libyaml would build nodes by recursion, and might crash.
    for event in yaml.parse(text, Loader=SafeLoader):
        anchor = getattr(event, "anchor", None)
        if isinstance(event, yaml.CollectionStartEvent):
            _check_levels(len(around) - 1, event)
            around.append(_Collection(anchor))
            continue  # it counts when it ends
        if isinstance(event, yaml.CollectionEndEvent):
            ended = around.pop()
            anchor, size = ended.anchor, ended.size
        elif isinstance(event, yaml.AliasEvent):
            if any(anchor == collection.anchor for collection in around):
                raise _problem("an alias that contains itself", event)
            size = sizes.get(anchor, _SCALAR)
        elif isinstance(event, yaml.ScalarEvent):
            size = _SCALAR
        else:
            continue
        sizes[anchor] = size
        around[-1].add(size)
        if around[-1].size.num_values > MOST_VALUES:
            raise _problem(f"more than {MOST_VALUES:,} values, its aliases written out", event)
        _check_levels(len(around) - 1 + size.num_levels, event)


def _check_levels(num_levels: int, event: yaml.Event) -> None:
    if num_levels > MOST_LEVELS:
        raise _problem(f"nested more than {MOST_LEVELS} levels deep", event)


def _problem(text: str, place: yaml.Node | yaml.Event) -> yaml.constructor.ConstructorError:
    mark: Any = place.start_mark  # libyaml's is of a class of its own
    return yaml.constructor.ConstructorError(None, None, text, mark)


def parse_bytes(text: str, where: str) -> float:
    """Read a number of bytes with a decimal or binary unit, such as `80GB` or `24GiB`.

    `10Gb` and `10Gbit` are refused, because they are bits.

    Args:
        text: the number and its unit.
        where: the option or key, for the message.

    Raises:
        UserError: it is no such number above 0.
    """
    bits = re.fullmatch(r"(.*\d)\s*([KMGTP]i?)(b|bits?)", text.strip())
    if bits is not None:
        eighth = parse_bytes(f"{bits[1]}{bits[2]}B", where) / 8
        raise UserError(
            f"{where} {text}: {bits[2]}{bits[3]} are bits; give bytes: {eighth / 1e9:g}GB, or "
            f"{bits[1]}{bits[2]}B if bytes were meant"
        )
    return _parse_number(text, where, "b", "80GB or 24GiB")


def parse_flops(text: str, where: str) -> float:
    """Read a number of FLOP/s with a unit, such as `120T`; see `parse_bytes`."""
    return _parse_number(text, where, "flops|flop/s", "120T")


def _parse_number(text: str, where: str, units: str, example: str) -> float:
    match = re.fullmatch(
        rf"(\d+\.?\d*(?:e\d+)?)\s*([kmgtp]?|[kmgt]i)({units})?", text.strip().lower()
    )
    value = float(match[1]) * PREFIXES[match[2]] if match else 0.0
    if match is None or not 0 < value < math.inf or not (match[2] or match[3]):
        raise UserError(
            f"{where} {text}: must be a number above 0 with a unit, for example {example}"
        )
    return value
