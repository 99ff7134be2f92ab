"""YAML text into plain values, whatever the text: every mistake, and every trap, becomes one line."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import yaml

from brx.errors import UserError

try:
    from yaml import CSafeLoader as SafeLoader
except ImportError:  # PyYAML was built without libyaml: slower, and the same
    from yaml import SafeLoader  # type: ignore[assignment]

MOST_VALUES, MOST_LEVELS = 100_000, 50
"""More than any configuration or sweep has: a file beyond them is damaged, or aliases that multiply each other."""


class _Loader(SafeLoader):
    """YAML 1.2 numbers (PyYAML alone reads 3e-4 as a string), and no key twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        twice = next((key for key, count in keys.items() if count > 1), None)
        if twice is not None:
            raise _problem(f"key '{twice}' appears twice", node)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$|^[-+]?\.(inf|Inf|INF)$|^\.(nan|NaN|NAN)$"),
    list("-+0123456789."),
)
# The float pattern above matches integers too, and resolvers are tried in order of registration:
# PyYAML's own integer rule comes first, so 12 stays an int.


def parse_yaml(text: str, where: str) -> Any:
    """Parse YAML text; a mistake in it becomes a UserError that starts with `where`."""
    try:
        _check_size(text)
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" (line {mark.line + 1})" if mark else ""
        problem = " ".join(str(getattr(error, "problem", None) or error).split())
        raise UserError(f"{where}: not valid YAML: {problem[:200]}{line}") from None
    # An impossible date, a number of thousands of digits, and what PyYAML meets where a tag does not suit its value.
    except (ValueError, OverflowError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"{where}: not valid YAML: {str(error)[:200]}") from None


def _check_size(text: str) -> None:
    """Refuse what is too deep or, its aliases written out, too large or endless: libyaml would crash, or not return.

    Reads events one by one, and builds nothing. Raises yaml.YAMLError.
    """
    num_values = 0
    anchored: dict[str | None, tuple[int, int]] = {}  # values and levels of what an alias may stand for
    around: list[list[Any]] = []  # of each open collection: its anchor, the values before it, its levels so far
    for event in yaml.parse(text, Loader=SafeLoader):
        height, anchor = 0, getattr(event, "anchor", None)
        if isinstance(event, yaml.CollectionStartEvent):
            around.append([anchor, num_values, 0])
            num_values += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before, height = around.pop()
            anchored[anchor] = num_values - before, height
        elif isinstance(event, yaml.AliasEvent):
            if any(anchor == outer for outer, _, _ in around):
                raise _problem("an alias that contains itself", event)
            size, height = anchored.get(anchor, (1, 0))  # one of nothing is refused by the loader
            num_values += size
        elif isinstance(event, yaml.ScalarEvent):
            anchored[anchor] = 1, 0
            num_values += 1
        if num_values > MOST_VALUES:
            raise _problem(f"more than {MOST_VALUES:,} values, its aliases written out", event)
        if len(around) + height > MOST_LEVELS:
            raise _problem(f"nested more than {MOST_LEVELS} levels deep", event)
        if around and not isinstance(event, yaml.CollectionStartEvent):
            around[-1][2] = max(around[-1][2], height + 1)


def _problem(text: str, place: yaml.Node | yaml.Event) -> yaml.constructor.ConstructorError:
    mark: Any = place.start_mark  # libyaml's is of a class of its own
    return yaml.constructor.ConstructorError(None, None, text, mark)
