"""Make names that a user chose safe for a file name, a terminal or a figure.

Run folders, files of methods, text sources and settings have names that brx did not choose. On disk
they may hold anything but `/` and zero bytes, and each place has other characters that do harm.
"""

import hashlib
import os
import re
import unicodedata
from pathlib import Path

LONGEST_FILE_NAME = 120
"""The longest file name that brx makes, in bytes. File systems allow 255, encrypted ones 143, and
brx may add a hash, a dot in front or `.tmp` at the end."""

_ESCAPED_BYTE = re.compile(r"\\x([89a-f][0-9a-f])")


def file_name(*values: str, joint: str = "-") -> str:
    """Join values, such as methods and sources, into a file name.

    It has letters, digits and `._+=,@%-`, does not begin with a dot or a hyphen, and has at most
    `LONGEST_FILE_NAME` bytes of UTF-8. `folder/my_method.py:Mine` becomes `folder.my_method.Mine`.
    If other characters or the end are lost, a hash is added, so that two names stay different.
    """
    whole = joint.join(values)
    plain = joint.join(_plain(value) for value in values)
    kept = re.sub(r"[^\w.+=,@%-]+", "-", plain).lstrip(".-").rstrip(".")
    is_cut = len(kept.encode()) > LONGEST_FILE_NAME
    if kept == plain and kept and not is_cut:
        return kept
    digest = hashlib.sha256(whole.encode("utf-8", "surrogateescape")).hexdigest()[:8]
    most = LONGEST_FILE_NAME - len(digest) - 1
    start = kept.encode()[:most].decode("utf-8", "ignore").rstrip(".-")
    return f"{start}-{digest}" if start else digest


def _plain(value: str) -> str:
    """A value without the characters that mark a path, or a class in a file."""
    value = re.sub(r"^(\.*/)+", "", value)  # leading `/`, `./` and `../`
    return value.replace(".py:", ".").replace(":", ".").replace("/", ".")


def shown(text: str) -> str:
    r"""A text for a terminal or a page: one line, without control characters.

    Characters that are not visible (escape sequences, U+FEFF, marks that change the direction of
    writing) and bytes that are not UTF-8 are written as `\x1b`, `\ufeff` or `\xe9`.
    """
    if text.isprintable():
        return text
    return "".join(map(_shown_character, text))


def _shown_character(character: str) -> str:
    if character.isprintable() or unicodedata.category(character) == "Zs":
        return character
    code = ord(character)
    # Python decodes a byte that is not UTF-8 to one of these ("surrogateescape", PEP 383).
    if 0xDC80 <= code <= 0xDCFF:
        return f"\\x{code - 0xDC00:02x}"
    return character.encode("unicode_escape", "backslashreplace").decode("ascii")


def figure_label(text: str) -> str:
    """A text for a figure's legend, title or axis, drawn as it is written.

    matplotlib reads text between two `$` as mathematics, and leaves labels that begin with `_` out
    of the legend."""
    label = shown(text).replace("$", r"\$")
    return f" {label}" if label.startswith("_") else label


def path_text(path: str | os.PathLike[str]) -> str:
    """A path as a text for tables, which cannot hold bytes that are not UTF-8: these become
    `\\xe9`. `path_of_text` is the reverse."""
    return re.sub("[\udc80-\udcff]", lambda match: _shown_character(match[0]), os.fspath(path))


def path_of_text(text: str | os.PathLike[str]) -> Path:
    """The path that `path_text` turned into this text; the text itself if no such path exists."""
    path = Path(text)
    if path.exists():
        return path
    unescaped = Path(_ESCAPED_BYTE.sub(_surrogate_of_byte, str(text)))
    return unescaped if unescaped.exists() else path


def _surrogate_of_byte(escaped: re.Match[str]) -> str:
    """The character by which Python writes a byte of a path that is not UTF-8."""
    return chr(0xDC00 + int(escaped[1], 16))
