"""Read files that somebody else may have made, cut short or damaged: one function per format.

- Any error of a library becomes `Damaged`, a ValueError with one line. The caller adds the name of
  the file, and what would help.
- Memory is bounded, whatever sizes a file claims.
- Only ordinary files are read: a pipe or a device may never end.

`brx.config.parsing.parse_yaml` keeps the same promises for YAML. `python -m
benchmarks.flipped_files` tries each function on thousands of damaged files.
"""

import ast
import json
import math
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

MOST_TEXT_BYTES = 64 * 2**20
"""The longest JSON or YAML file: a hundred times the largest that brx writes."""
MOST_LINE = 64 * 2**20
"""The longest line of a JSONL file, in characters."""
MOST_ARRAY_BYTES = 256 * 2**20
"""The most bytes that all arrays of an .npz file may take: enough for millions of iterations."""
MOST_HEADER_BYTES = 10_000
"""The longest header of an array."""
MOST_DIGITS = 300
"""The most digits of an integer. A float holds at most 309."""


class Damaged(ValueError):
    """A file does not hold what its format promises; the message is one line, without the file's
    name."""


def read_text(path: Path, *, most_bytes: int = MOST_TEXT_BYTES) -> str:
    """The content of a UTF-8 file, without the byte order mark that some editors put first.

    Raises:
        Damaged: it cannot be read, is longer than `most_bytes`, or is not UTF-8.
    """
    try:
        _check_ordinary(path)
        if path.stat().st_size > most_bytes:
            raise Damaged(f"longer than {most_bytes:,} bytes")
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise Damaged(f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise Damaged("not UTF-8 text") from None


def lines_of(file: TextIO, *, most: int = MOST_LINE) -> Iterator[str]:
    """The lines of a text file, each with its line break.

    Raises:
        Damaged: a line has more than `most` characters.
    """
    while line := file.readline(most + 1):
        if len(line) > most:
            raise Damaged(f"a line has more than {most:,} characters")
        yield line


def _check_ordinary(path: Path) -> None:
    """Refuse pipes, devices and folders; a file that is not there is left to the reader."""
    if path.exists() and not path.is_file():
        raise Damaged("not an ordinary file")


def read_json(path: Path, *, most_bytes: int = MOST_TEXT_BYTES) -> Any:
    """The content of a JSON file.

    Raises:
        Damaged: it cannot be read, is longer than `most_bytes`, or is not JSON.
    """
    return parse_json(read_text(path, most_bytes=most_bytes))


def parse_json(text: str) -> Any:
    """The value of a JSON text; numbers that a float cannot hold are refused.

    `NaN` and `Infinity`, which Python writes, are read.

    Raises:
        Damaged: it is not JSON.
    """
    try:
        return json.loads(text, parse_int=_integer, parse_float=_number)
    except Damaged:
        raise
    except (ValueError, RecursionError) as error:
        raise Damaged(_in_one_line(error)) from None


def _integer(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise Damaged(f"a number of {len(digits)} digits")
    return int(digits)


def _number(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise Damaged(f"{text:.20} is larger than any number")
    return number


def read_arrays(path: Path, *, most_bytes: int = MOST_ARRAY_BYTES) -> dict[str, NDArray[Any]]:
    """The arrays of an .npz file by name. They hold numbers, texts or dates, not Python objects.

    Raises:
        Damaged: it is no such file, or its arrays take more than `most_bytes`.
    """
    try:
        _check_ordinary(path)
        with zipfile.ZipFile(path) as file:
            compressed = max((entry.compress_size for entry in file.infolist()), default=0)
            if compressed > path.stat().st_size:
                raise Damaged("cut off: says that it holds more than it does")
            held = sum(entry.file_size for entry in file.infolist())
            if held > most_bytes:
                raise Damaged(f"holds {held:,} bytes, more than {most_bytes:,}")
            arrays = {}
            for name in file.namelist():
                arrays[name.removesuffix(".npy")] = _parse_array(file.read(name))
            return arrays
    except Damaged:
        raise
    # zipfile, zlib and numpy raise a dozen kinds of errors, among them NotImplementedError
    # (encryption), RuntimeError, EOFError and TokenError.
    except Exception as error:
        raise Damaged(_in_one_line(error)) from None


def _parse_array(content: bytes) -> NDArray[Any]:
    """The array of an .npy file.

    The format (https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html) is a magic
    string, two bytes of version, the length of the header (two bytes in version 1, else four), the
    header as a Python dictionary, and the numbers. numpy's own reader would allocate memory for any
    shape that the header claims.
    """
    magic = np.lib.format.MAGIC_PREFIX
    version = content[len(magic) : len(magic) + 1]
    if not content.startswith(magic) or version not in b"\1\2\3":
        raise Damaged("not an array of numpy's")
    length_at = len(magic) + 2
    begin = length_at + (2 if version == b"\1" else 4)
    end = begin + int.from_bytes(content[length_at:begin], "little")
    text = content[begin : min(end, begin + MOST_HEADER_BYTES)].decode("latin-1")
    header = ast.literal_eval(text.strip())
    dtype = np.dtype(header["descr"])
    if dtype.hasobject:
        raise Damaged("holds Python objects")
    values = np.frombuffer(content[end:], dtype)
    return values.reshape(header["shape"], order="F" if header["fortran_order"] else "C")


def read_tensors(path: Path, device: Any = "cpu") -> Any:
    """The content of a file that `torch.save` wrote: tensors and plain values. No code of the file
    is executed.

    Args:
        path: the file.
        device: the device for the tensors, a name or a torch.device.

    Raises:
        Damaged: it is no such file, or this version of torch cannot read it.
    """
    import torch  # slow to load, and reading loss curves does not need it

    try:
        _check_ordinary(path)
        return torch.load(path, map_location=device, weights_only=True)
    except Damaged:
        raise
    except OSError as error:
        raise Damaged(f"cannot be read: {error.strerror}") from None
    except Exception as error:
        raise Damaged(f"torch {torch.__version__} cannot read it: {_in_one_line(error)}") from None


def _in_one_line(error: BaseException) -> str:
    """The first line of an error's message, or its type."""
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
