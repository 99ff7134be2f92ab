"""Exceptions for expected failures; each becomes one line and an exit code. Also words that many
messages need."""

import difflib
from collections.abc import Iterable, Sequence
from typing import Literal

SYNONYMS = {
    "adam": ("pipedream", "which is AdamW"),
    "adamw": ("pipedream", "which is AdamW"),
    "nadam": ("nesterov", "which is NAdam"),
    "micro_batches": ("accumulation", "the micro-batches per update"),
}
"""What users may call a method or a key, with the name that brx uses and an explanation."""


class UserError(Exception):
    """The request cannot be carried out as written (usage, configuration, missing file): exit code
    2.

    The message is one line that names the file, key or shape, and says what would be right.
    """


class RunError(Exception):
    """The request was right, but the run failed (non-finite loss, full disk, dead rank): exit code
    1."""


class DamagedRunError(Exception):
    """A run cannot be read, and `--strict` asked to stop there: exit code 2.

    This is not a UserError: code that skips a figure because it has no runs catches UserErrors, and
    must not catch this one.
    """


class DivergedError(RunError):
    """The loss or a gradient is no longer finite: a result of the run's settings, unlike other
    failures."""


class NeighbourLostError(RunError):
    """Another rank is lost, or the launcher through which the ranks talk.

    Args:
        peer: the lost rank, or the launcher; None if it is not known which rank it is.
        problem: what it did, such as `closed its connection`.
    """

    def __init__(self, peer: int | Literal["the launcher"] | None, problem: str) -> None:
        who = f"rank {peer}" if isinstance(peer, int) else peer or "a rank"
        super().__init__(f"{who} {problem}")
        self.peer = peer
        self.problem = problem


def counted(count: float, noun: str, form: str = "") -> str:
    """A number of things: `1 run`, `3 runs`, `2 forward passes`.

    Args:
        count: how many.
        noun: what they are, in the singular.
        form: the format of the number; `,` gives `4,000 tokens`.
    """
    if count == 1:
        return f"{count:{form}} {noun}"
    ending = "es" if noun.endswith(("s", "ch", "sh", "x")) else "s"
    return f"{count:{form}} {noun}{ending}"


def counted_choices(counts: Sequence[int], noun: str) -> str:
    """Several numbers of things, one of which applies: `1 or 2 devices`; for one number as
    `counted`.

    Args:
        counts: the numbers, in ascending order.
        noun: what they are, in the singular.
    """
    *fewer, most = counts
    return " or ".join([*map(str, fewer), counted(most, noun)])


def some(names: Sequence[str]) -> str:
    """The beginning of a sentence about one or more names: `head.weight is`, or `head.weight and 3
    more are`."""
    return f"{names[0]} is" if len(names) == 1 else f"{names[0]} and {len(names) - 1} more are"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint for an unknown word: `, did you mean 'quick'?`; empty if no known word is similar."""
    by_lower = {name.lower(): name for name in known}
    name, why = SYNONYMS.get(word.lower(), ("", ""))
    if name in by_lower:
        return f", did you mean '{name}', {why}?"
    close = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.5)
    return f", did you mean '{by_lower[close[0]]}'?" if close else ""
