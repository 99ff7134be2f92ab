"""Numbers with a unit, as people write them: 24GB, 80GiB, 120T."""

from __future__ import annotations

import re

from brx.errors import UserError

_PREFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "p": 10**15}
_BINARY_PREFIXES = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_bytes(text: str, where: str) -> float:
    """Bytes, from a number with a decimal or binary unit; else a UserError that names `where` it was given."""
    return _parse(text, where, "b", "80GB or 24GiB")


def parse_flops(text: str, where: str) -> float:
    """FLOP/s, from a number with a prefix or a unit; else a UserError that names `where` it was given."""
    return _parse(text, where, "flops|flop/s", "120T")


def _parse(text: str, where: str, units: str, example: str) -> float:
    match = re.fullmatch(rf"(\d+\.?\d*(?:e\d+)?)\s*([kmgtp]?|[kmgt]i)({units})?", text.strip().lower())
    value = float(match[1]) * (_PREFIXES | _BINARY_PREFIXES)[match[2]] if match else 0.0
    if match is None or value <= 0 or not (match[2] or match[3]):
        raise UserError(f"{where} {text}: must be a number above 0 with a unit, for example {example}")
    return value
