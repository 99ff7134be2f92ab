"""Where documents come from: the standard library's source, local files, or a Hugging Face dataset."""

from __future__ import annotations

import glob
import re
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from brx.config.schema import DataConfig
from brx.errors import UserError

EXTENSIONS = (".txt", ".jsonl", ".parquet")
# A text file has no documents of its own: it is cut at line ends into pieces of about this many characters.
TEXT_PIECE = 16_384

_STDLIB_SKIPPED = {"site-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "__pycache__"}
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
# Names under which datasets are known, where the hub files them under their owner.
_HUB_ALIASES = {"openwebtext": "Skylion007/openwebtext"}


def documents(config: DataConfig) -> Iterator[str]:
    """The documents of `config.source`, in an order that is the same every time.

    Raises:
        UserError: the source is missing, unreadable, or of an unknown kind; names the file or field.
    """
    if config.source == "stdlib":
        return _stdlib()
    files = local_files(config.source)
    if files is None:
        return _texts(_hub_rows(config.source), config.text_field, config.source)
    return chain.from_iterable(_file(path, config.text_field) for path in files)


def local_files(source: str) -> list[Path] | None:
    """The files that a path, folder or glob names, sorted; None if it looks like the name of a dataset on the hub.

    Raises:
        UserError: there are none, or one has an unknown extension.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        found = sorted(file for file in path.rglob("*") if file.suffix in EXTENSIONS)
        if not found:
            raise UserError(f"data.source: {source}: the folder holds no {', '.join(EXTENSIONS)} file")
        return found
    if glob.has_magic(source):
        found = [Path(name) for name in sorted(glob.glob(str(path), recursive=True))]
        if not found:
            raise UserError(f"data.source: {source}: the pattern matches no file")
    elif path.is_file():
        found = [path]
    elif _HUB_NAME.fullmatch(source) and path.suffix not in EXTENSIONS:
        return None
    else:
        raise UserError(f"data.source: {source}: no such file")
    for file in found:
        if file.suffix not in EXTENSIONS:
            raise UserError(f"data.source: {file}: unknown kind of file; known are {', '.join(EXTENSIONS)}")
    return found


def _stdlib() -> Iterator[str]:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [file.relative_to(root) for file in root.rglob("*.py")]
    for file in sorted(file for file in files if not _STDLIB_SKIPPED.intersection(file.parts)):
        yield (root / file).read_text(encoding="utf-8", errors="replace")


def _file(path: Path, text_field: str) -> Iterator[str]:
    if path.suffix == ".txt":
        return _text_pieces(path)
    kind = "json" if path.suffix == ".jsonl" else "parquet"
    datasets = _import_datasets(f"{path.suffix} files")
    rows = datasets.load_dataset(kind, data_files=str(path), split="train", streaming=True)
    return _texts(_readable(rows, path), text_field, str(path))


def _text_pieces(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8") as file:
            while lines := file.readlines(TEXT_PIECE):
                yield "".join(lines)
    except UnicodeDecodeError:
        raise UserError(f"data.source: {path}: not UTF-8 text") from None
    except OSError as error:
        raise UserError(f"data.source: {path}: cannot be read: {error.strerror}") from None


def _hub_rows(name: str) -> Iterable[Mapping[str, Any]]:
    datasets = _import_datasets("Hugging Face datasets")
    try:
        rows: Iterable[Mapping[str, Any]] = datasets.load_dataset(
            _HUB_ALIASES.get(name, name), split="train", streaming=True
        )
        return rows
    except Exception as error:  # the library raises a different one for each way to be unreachable
        problem = " ".join(str(error).split())[:150]
        raise UserError(
            f"data.source: {name}: no such file, and the Hugging Face dataset cannot be reached: {problem}"
        ) from None


def _readable(rows: Iterable[Mapping[str, Any]], path: Path) -> Iterator[Mapping[str, Any]]:
    try:
        yield from rows
    except Exception as error:  # json and pyarrow errors, wrapped differently from version to version
        problem = " ".join(str(error.__cause__ or error).split())[:150]
        raise UserError(f"data.source: {path}: cannot be read: {problem}") from None


def _texts(rows: Iterable[Mapping[str, Any]], text_field: str, where: str) -> Iterator[str]:
    for row in rows:
        if not isinstance(row.get(text_field), str):
            fields = ", ".join(name for name, value in row.items() if isinstance(value, str)) or "none"
            raise UserError(f"data.text_field: {where} has no text in '{text_field}' (fields with text: {fields})")
        yield row[text_field]


def _import_datasets(what: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise UserError(f"data.source: {what} need the datasets package: pip install 'brx[datasets]'") from None
    datasets.disable_progress_bars()
    return datasets
