"""One reader per format of the files that somebody else may have made, cut short or damaged.

Whatever a library raises on the way becomes `Damaged`, a ValueError with one line; the caller names
the file and what would help. Memory is bounded by `most_bytes`, whatever a file says that it holds.
YAML is read by `brx.config.parsing.parse_yaml`, which keeps the same promise.
`python -m benchmarks.flipped_files` tries each reader on thousands of damaged files.
"""

import ast
import json
import math
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

MOST_TEXT_BYTES = 64 * 2**20
"""Of a JSON file: a hundred times the largest that brx writes."""
MOST_ARRAY_BYTES = 256 * 2**20
"""Of all arrays of an .npz file: millions of iterations."""
MOST_DIGITS = 300
"""Of an integer: more do not fit into a float."""


class Damaged(ValueError):
    """What a file holds is not of its format; the message is one line, without the file's name."""


def read_json(path: Path, *, most_bytes: int = MOST_TEXT_BYTES) -> Any:
    """The content of a JSON file.

    Raises:
        Damaged: it cannot be read, is longer than `most_bytes`, or is no JSON.
    """
    try:
        if path.stat().st_size > most_bytes:
            raise Damaged(f"longer than {most_bytes:,} bytes")
        return parse_json(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise Damaged(f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise Damaged("not UTF-8 text") from None


def parse_json(text: str) -> Any:
    """The value of a JSON text; numbers that a float cannot hold are refused.

    `NaN` and `Infinity`, which Python writes, are read.

    Raises:
        Damaged: it is no JSON.
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
    """The arrays of an .npz file by name, of numbers alone.

    Raises:
        Damaged: it is no such file, or holds more than `most_bytes`, written out.
    """
    try:
        with zipfile.ZipFile(path) as file:
            compressed = max((entry.compress_size for entry in file.infolist()), default=0)
            if compressed > path.stat().st_size:
                raise Damaged("cut off: says that it holds more than it does")
            held = sum(entry.file_size for entry in file.infolist())
            if held > most_bytes:
                raise Damaged(f"holds {held:,} bytes, more than {most_bytes:,}")
            return {
                name.removesuffix(".npy"): _parse_array(file.read(name)) for name in file.namelist()
            }
    except Damaged:
        raise
    # zipfile, zlib and numpy raise a dozen kinds, among them NotImplementedError (encryption),
    # RuntimeError, EOFError and TokenError.
    except Exception as error:
        raise Damaged(_in_one_line(error)) from None


def _parse_array(content: bytes) -> NDArray[Any]:
    """The array of an .npy file.

    numpy's own reader would make room for whatever shape the header says."""
    start = len(np.lib.format.MAGIC_PREFIX)
    if content[:start] != np.lib.format.MAGIC_PREFIX or content[start : start + 1] not in b"\1\2\3":
        raise Damaged("not an array of numpy's")
    length_bytes = 2 if content[start : start + 1] == b"\1" else 4
    begin = start + 2 + length_bytes
    end = begin + int.from_bytes(content[start + 2 : begin], "little")
    header = ast.literal_eval(content[begin : min(end, begin + 10_000)].decode("latin-1").strip())
    dtype, shape = np.dtype(header["descr"]), header["shape"]
    if dtype.hasobject:
        raise Damaged("holds Python objects")
    values = np.frombuffer(content[end:], dtype)
    return values.reshape(shape, order="F" if header["fortran_order"] else "C")


def read_tensors(path: Path, device: Any = "cpu") -> Any:
    """What `torch.save` wrote: tensors and plain values, nothing that would be executed.

    Raises:
        Damaged: it is no such file, or this version of torch cannot read it.
    """
    import torch  # readers of curves need not wait for it

    try:
        return torch.load(path, map_location=device, weights_only=True)
    except OSError as error:
        raise Damaged(f"cannot be read: {error.strerror}") from None
    except Exception as error:
        raise Damaged(f"torch {torch.__version__} cannot read it: {_in_one_line(error)}") from None


def _in_one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
