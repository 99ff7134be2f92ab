"""Text into plain values: YAML, and numbers with a unit. Every mistake, and every trap, becomes one
line."""

import math
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
"""More than any configuration or sweep has: a file beyond them is damaged, or aliases that multiply
each other."""

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "p": 10**15}
UNITS |= {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


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
    re.compile(
        r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$|^[-+]?\.(inf|Inf|INF)$|^\.(nan|NaN|NAN)$"
    ),
    list("-+0123456789."),
)
# The float pattern above matches integers too, and resolvers are tried in order of registration:
# PyYAML's own integer rule comes first, so 12 stays an int.


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
    # An impossible date, a number of thousands of digits, and what PyYAML meets where a tag does
    # not suit its value.
    except (ValueError, OverflowError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"{where}: not valid YAML: {str(error)[:200]}") from None


def _check_size(text: str) -> None:
    """yaml.YAMLError where values or levels are too many, aliases written out, or an alias contains
    itself."""
    sizes: dict[str | None, list[int]] = {}  # values and levels of what an anchor names
    around: list[Any] = [
        (None, [0, 0])
    ]  # anchor, and values and levels so far, of each collection around an event
    for event in yaml.parse(
        text, Loader=SafeLoader
    ):  # one by one: libyaml builds nodes by recursion, and would crash
        anchor, size = getattr(event, "anchor", None), [1, 0]
        if isinstance(event, yaml.CollectionStartEvent):
            around.append((anchor, size))
            size = [0, -1]  # it counts when it ends
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, size = around.pop()
        elif isinstance(event, yaml.AliasEvent):
            if any(anchor == name for name, _ in around):
                raise _problem("an alias that contains itself", event)
            size = sizes.get(anchor, size)
        elif not isinstance(event, yaml.ScalarEvent):
            continue
        sizes[anchor] = size
        total = around[-1][1]
        total[:] = total[0] + size[0], max(total[1], size[1] + 1)
        if total[0] > MOST_VALUES:
            raise _problem(f"more than {MOST_VALUES:,} values, its aliases written out", event)
        if len(around) - 1 + size[1] > MOST_LEVELS:
            raise _problem(f"nested more than {MOST_LEVELS} levels deep", event)


def _problem(text: str, place: yaml.Node | yaml.Event) -> yaml.constructor.ConstructorError:
    mark: Any = place.start_mark  # libyaml's is of a class of its own
    return yaml.constructor.ConstructorError(None, None, text, mark)


def parse_bytes(text: str, where: str) -> float:
    """From a number with a decimal or binary unit; else a UserError that names `where` it was
    given."""
    return _parse_number(text, where, "b", "80GB or 24GiB")


def parse_flops(text: str, where: str) -> float:
    """FLOP/s, likewise."""
    return _parse_number(text, where, "flops|flop/s", "120T")


def _parse_number(text: str, where: str, units: str, example: str) -> float:
    match = re.fullmatch(
        rf"(\d+\.?\d*(?:e\d+)?)\s*([kmgtp]?|[kmgt]i)({units})?", text.strip().lower()
    )
    value = float(match[1]) * UNITS[match[2]] if match else 0.0
    if match is None or not 0 < value < math.inf or not (match[2] or match[3]):
        raise UserError(
            f"{where} {text}: must be a number above 0 with a unit, for example {example}"
        )
    return value
