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
    """YAML 1.2 numbers (PyYAML alone reads 3e-4 as a string), no key twice, and no more values than there may be."""

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None:
            _check_size(node)
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        twice = next((key for key, count in keys.items() if count > 1), None)
        if twice is not None:
            raise yaml.constructor.ConstructorError(None, None, f"key '{twice}' appears twice", node.start_mark)
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
        _check_depth(text)
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" (line {mark.line + 1})" if mark else ""
        problem = " ".join(str(getattr(error, "problem", None) or error).split())
        raise UserError(f"{where}: not valid YAML: {problem[:200]}{line}") from None
    # An impossible date, a number of thousands of digits, and what PyYAML meets where a tag does not suit its value.
    except (ValueError, OverflowError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"{where}: not valid YAML: {str(error)[:200]}") from None


def _check_depth(text: str) -> None:
    """Refuse what is nested too deeply by its events, which are read one by one: libyaml crashes where it recurses.

    Raises:
        yaml.YAMLError: says so, or that the text is no YAML.
    """
    level = 0
    for event in yaml.parse(text, Loader=SafeLoader):
        level += isinstance(event, yaml.CollectionStartEvent)
        level -= isinstance(event, yaml.CollectionEndEvent)
        if level > MOST_LEVELS:
            raise _too_large(f"nested more than {MOST_LEVELS} levels deep", event)


def _check_size(root: yaml.Node) -> None:
    """Refuse a document that aliases make endless or huge, before anything is built from it.

    Raises:
        yaml.YAMLError: says which.
    """
    waiting, num_values = [(root, 1)], 0
    while waiting:
        node, level = waiting.pop()
        num_values += 1
        if level > MOST_LEVELS:
            raise _too_large(f"nested more than {MOST_LEVELS} levels deep, or an alias that contains itself", node)
        if num_values > MOST_VALUES:
            raise _too_large(f"its aliases stand for more than {MOST_VALUES:,} values", node)
        if isinstance(node, yaml.SequenceNode):
            waiting += [(child, level + 1) for child in node.value]
        elif isinstance(node, yaml.MappingNode):
            waiting += [(child, level + 1) for pair in node.value for child in pair]


def _too_large(problem: str, place: yaml.Node | yaml.Event) -> yaml.constructor.ConstructorError:
    mark: Any = place.start_mark  # libyaml's is of a class of its own
    return yaml.constructor.ConstructorError(None, None, problem, mark)
