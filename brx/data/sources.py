"""Reads documents from their source: the code of installed packages, local files, or a Hugging Face
dataset.

The packages are a corpus that needs no network. With the versions in `constraints.txt` it is the
same text on every system: the packages' wheels differ only in `BUILD_FILES`, which are left out,
and in line ends, which are read as newlines."""

import glob
import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import chain, islice
from pathlib import Path
from typing import Any, TextIO

from brx.config.schema import DataConfig
from brx.errors import RunError, UserError, counted
from brx.files import user_path
from brx.readers import Damaged, lines_of, parse_json

# Graph algorithms, tables, numerics and symbolic algebra, by different authors; 41 MB together.
PUBLISHED_VERSIONS = {"networkx": "3.6.1", "pandas": "3.1.1", "scipy": "1.17.1", "sympy": "1.14.0"}
# `PreparedData.fingerprint` of these versions, with the tokenizer `bytes` and the default split.
PUBLISHED_FINGERPRINT = "7380bd28584846aaff92d029d3653235345915142e262ede74ecf3454b34fe71"
SKIPPED_FOLDERS = {"tests", "test-examples", "benchmarks"}
# Files that are written, or on Windows patched, when a wheel is built.
BUILD_FILES = {
    "__init__.py",
    "__config__.py",
    "_distributor_init.py",
    "_version.py",
    "_version_meson.py",
    "version.py",
}

EXTENSIONS = (".txt", ".jsonl", ".parquet")
HOW_TO_CONVERT = "docs/how-to.md says how to convert others"
# A text file does not say where a document ends. It is cut at line ends into pieces of about this
# many characters.
TEXT_PIECE = 16_384

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
# The usual names of datasets that the hub lists under their owner's name.
_HUB_ALIASES = {"openwebtext": "Skylion007/openwebtext"}
_HUB_TIMEOUT_S = 10.0
_ROWS_AT_A_TIME = 256


def is_validation(document: str, fraction: float, seed: int) -> bool:
    """Whether a document is held out for validation, as about `fraction` of all documents are. Its
    text and the seed alone decide."""
    return _drawn(f"{seed}/{document}", fraction)


def is_sampled(document: str, fraction: float, seed: int) -> bool:
    """Whether a document is used at all, as about `fraction` of all documents are. This does not
    depend on whether it is held out."""
    return _drawn(f"sample/{seed}/{document}", fraction)


def _drawn(text: str, fraction: float) -> bool:
    """True with this probability, drawn from a hash of the text."""
    digest = hashlib.sha256(text.encode("utf-8", "replace")).digest()
    return int.from_bytes(digest[:8], "little") < fraction * 2**64


def documents(config: DataConfig, *, skip: int = 0) -> Iterator[str]:
    """The documents of `config.source`, always in the same order: the sampled ones
    (`config.sample_fraction`) that are not empty.

    Args:
        skip: how many documents to leave out at the start, when a preparation is continued.

    Raises:
        UserError: the source does not exist, cannot be reached, or holds no text.
        RunError: the stream from the hub broke off.
    """
    if config.source == "packages":
        texts = package_sources()
    elif (files := local_files(config.source)) is not None:
        texts = chain.from_iterable(_local_file(path, config.text_field) for path in files)
    else:
        texts = _hub(config.source, config.text_field)
    return islice(_sampled(texts, config.sample_fraction, config.sample_seed), skip, None)


def _sampled(texts: Iterable[str], fraction: float, seed: int) -> Iterator[str]:
    """The texts that are sampled and not empty."""
    takes_all = fraction == 1  # then no text needs to be hashed
    for text in texts:
        if text and (takes_all or is_sampled(text, fraction, seed)):
            yield text


def package_sources() -> Iterator[str]:
    """The text of each source file of the corpus's packages. The order mixes the packages and
    depends on the names of the files alone.

    Raises:
        UserError: a package is not installed.
    """
    files = {}
    for package in PUBLISHED_VERSIONS:
        folder = _package_folder(package)
        for file in folder.rglob("*.py"):
            relative = file.relative_to(folder)
            # The build writes files with these names only in the package's top folder.
            is_built = str(relative) in BUILD_FILES
            is_skipped = not SKIPPED_FOLDERS.isdisjoint(relative.parts)
            if not is_built and not is_skipped:
                files[f"{package}/{relative.as_posix()}"] = file
    # Sorted by hashes, which shuffles the files. So the first `data.tokens` tokens come from all
    # packages, as does every stretch of the validation tokens.
    for name in sorted(files, key=_digest):
        yield files[name].read_text(encoding="utf-8", errors="replace")


def _digest(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def installed_versions() -> dict[str, str]:
    """The installed version of each package of the corpus.

    Raises:
        UserError: a package is not installed.
    """
    versions = {}
    for package in PUBLISHED_VERSIONS:
        _package_folder(package)
        try:
            versions[package] = version(package)
        except PackageNotFoundError:  # a folder on the path, not an installation
            versions[package] = "of an unknown version"
    return versions


def other_packages(config: DataConfig, fingerprint: str) -> str:
    """How the installed packages differ from those of the published results; empty if they do not.

    Args:
        fingerprint: the fingerprint of the data that were made of the installed packages
            (`PreparedData.fingerprint`).
    """
    versions = installed_versions()
    others = []
    for name, wanted in PUBLISHED_VERSIONS.items():
        if versions[name] != wanted:
            others.append(f"{name} {versions[name]} instead of {wanted}")
    if others:
        return ", ".join(others)
    if _has_default_content(config) and fingerprint != PUBLISHED_FINGERPRINT:
        return "files of the installed packages were changed"
    return ""


def _has_default_content(config: DataConfig) -> bool:
    """Whether all settings that decide the tokens of the packages have their defaults."""
    deciding = {
        "tokenizer",
        "tokens",
        "validation_fraction",
        "split_seed",
        "sample_fraction",
        "sample_seed",
    }
    default = DataConfig(source="packages")
    return config.model_dump(include=deciding) == default.model_dump(include=deciding)


def _package_folder(package: str) -> Path:
    """The folder of an installed package; UserError if it is not installed."""
    spec = find_spec(package)  # does not import the package
    if spec is None or not spec.submodule_search_locations:
        raise UserError(f"data.source: packages: {package} is not installed: pip install {package}")
    return Path(spec.submodule_search_locations[0])


def local_files(source: str) -> list[Path] | None:
    """The files that a path, a folder (at any depth) or a glob names, sorted.

    A folder and a glob leave out hidden files and folders (`.ipynb_checkpoints`) and follow links.
    A file that is reached in several ways counts once.

    Returns:
        None where there is no such file and `source` may name a dataset on the hub.

    Raises:
        UserError: there is no such file, or one of a kind that brx does not read.
    """
    path = user_path(source)
    missing = "no such file"
    if path.is_file():
        files = [path]
    elif path.is_dir():
        files = _each_once(file for file in _below(path) if file.suffix in EXTENSIONS)
        missing = f"the folder holds no {', '.join(EXTENSIONS)} file{_instead(path)}"
    elif glob.has_magic(source):
        matches = glob.glob(str(path), recursive=True)
        files = _each_once(map(Path, matches))
        missing = "the pattern matches no file"
    elif _HUB_NAME.fullmatch(source) and path.suffix not in EXTENSIONS:
        return None
    else:
        files = []
    if not files:
        raise UserError(f"data.source: {source}: {missing}")
    for file in files:
        if file.suffix not in EXTENSIONS:
            raise UserError(
                f"data.source: {file}: unknown kind of file; known are {', '.join(EXTENSIONS)} "
                f"({HOW_TO_CONVERT})"
            )
    return files


def _instead(folder: Path) -> str:
    """The end of a sentence about a folder without texts: what it does hold, and what helps."""
    others = min(_below(folder), default=None)
    return "" if others is None else f", but {others.name} ({HOW_TO_CONVERT})"


def _below(folder: Path, *, hidden: bool = False) -> Iterator[Path]:
    """All files below a folder that are not hidden, or with `hidden` only those that are. Links are
    followed. A file in a hidden folder counts as hidden."""
    seen = set()  # folders walked so far, since a link may lead back to one
    for place, folders, files in os.walk(folder, followlinks=True):
        inside = Path(place).relative_to(folder).parts
        is_hidden = any(part.startswith(".") for part in inside)
        real = os.path.realpath(place)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        if not hidden:
            folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            if hidden == (is_hidden or name.startswith(".")):
                yield Path(place, name)


def _each_once(files: Iterable[Path]) -> list[Path]:
    """The files among some paths, sorted. A file that is reached by several paths is listed once,
    under the first of them."""
    by_place: dict[str, Path] = {}
    for file in sorted(files):
        if file.is_file():
            by_place.setdefault(os.path.realpath(file), file)
    return list(by_place.values())


def notes_on_files(source: str) -> list[str]:
    """Sentences about the files of a local source: how many are left out because they are hidden or
    of another kind, and how many are reached through links. There are none for a single file or a
    dataset on the hub."""
    path = user_path(source)
    files = local_files(source)
    if files is None or path.is_file():
        return []
    if path.is_dir():
        hidden = [file for file in _below(path, hidden=True) if file.suffix in EXTENSIONS]
        unread = [file for file in _below(path) if file.suffix not in EXTENSIONS]
        linked = [file for file in files if _is_linked(file, path)]
    else:
        hidden = _hidden_matches(str(path))
        unread = []  # a glob that matches such a file is refused
        linked = [file for file in files if file.is_symlink()]
    notes = []
    if unread:
        num_left_out = counted(len(unread), "file")
        notes.append(f"{num_left_out} of other kinds left out, such as {min(unread)}")
    if hidden:
        notes.append(f"{counted(len(hidden), 'hidden file')} left out, such as {min(hidden)}")
    if linked:
        notes.append(f"{counted(len(linked), 'file')} reached through links, such as {linked[0]}")
    return notes


def _hidden_matches(pattern: str) -> list[Path]:
    """The hidden files that a glob leaves out."""
    shown = set(glob.glob(pattern, recursive=True))
    everything = glob.glob(pattern, recursive=True, include_hidden=True)
    return _each_once(Path(name) for name in everything if name not in shown)


def _is_linked(file: Path, folder: Path) -> bool:
    """Whether the file is a link, or lies in a linked folder below `folder`."""
    around = [place for place in file.parents if folder in place.parents]
    return any(place.is_symlink() for place in (file, *around))


@dataclass(frozen=True)
class _Rows:
    """Some rows of a table."""

    place: str  # where they come from, for messages
    fields: Sequence[str]  # the names of the columns
    texts: list[Any]  # the column that should hold text; empty if there is no column of that name


def _local_file(path: Path, text_field: str) -> Iterator[str]:
    """The documents of one file."""
    with _in_one_line(UserError, f"{path}: cannot be read"):
        if path.suffix == ".txt":
            yield from _text_pieces(path)
        elif path.suffix == ".jsonl":
            yield from _texts(_json_lines(path, text_field), text_field)
        elif path.stat().st_size > 0:  # an empty file is no Parquet, and holds no document
            yield from _texts(_parquet(path, text_field), text_field)


def _text_pieces(path: Path) -> Iterator[str]:
    """A text file in pieces that end with a line, unless the line is very long. A byte order mark
    at the beginning is no text."""
    with path.open(encoding="utf-8-sig", newline="\n") as file:
        while True:
            # The limit on the rest of the line bounds the memory if a file has no line ends.
            piece = file.read(TEXT_PIECE) + file.readline(TEXT_PIECE)
            if not piece:
                return
            if "\0" in piece:
                raise UserError(f"data.source: {path}: holds NUL characters: not a text file")
            yield piece


def _parquet(path: Path, text_field: str) -> Iterator[_Rows]:
    from pyarrow.parquet import ParquetFile

    with ParquetFile(path) as file:
        names = file.schema_arrow.names
        # The other columns are not needed, and may be large or damaged.
        needed = [text_field] if text_field in names else names
        batches = file.iter_batches(_ROWS_AT_A_TIME, columns=needed)
        yield from _columns(batches, text_field, str(path))


def _json_lines(path: Path, text_field: str) -> Iterator[_Rows]:
    """One row at a time, since the other fields of two rows may differ in name and type."""
    with path.open(encoding="utf-8-sig", newline="\n") as file:
        for number, line in enumerate(_bounded_lines(file, path), 1):
            if not line.strip():
                continue
            row = None
            with suppress(Damaged):
                row = parse_json(line)
            if not isinstance(row, dict):
                raise UserError(
                    f"data.source: {path}:{number}: must be a JSON object, is {line.strip():.60}"
                )
            texts = [row[text_field]] if text_field in row else []
            yield _Rows(f"{path}:{number}", list(row), texts)


def _bounded_lines(file: TextIO, path: Path) -> Iterator[str]:
    """The lines of a file; UserError for one that is too long to be JSON lines."""
    try:
        yield from lines_of(file)
    except Damaged as error:
        raise UserError(f"data.source: {path}: {error}: not a file of JSON lines") from None


def _hub(name: str, text_field: str) -> Iterator[str]:
    """The documents of a dataset on the Hugging Face hub, streamed."""
    from huggingface_hub import HfApi

    repository = _HUB_ALIASES.get(name, name)
    unreachable = (
        f"{name}: no such file, and the Hugging Face dataset {repository} cannot be reached"
    )
    remedy = "; check the name and the network, or name a file or folder"
    with _in_one_line(UserError, unreachable, remedy):
        # Ask the hub first, because without a network `load_dataset` tries for half a minute.
        HfApi().dataset_info(repository, timeout=_HUB_TIMEOUT_S)
        rows = _stream_or_converted(repository)
    with _in_one_line(
        RunError, f"{name}: the stream broke off", "; prepare again to go on from here"
    ):
        tables = rows.iter(batch_size=_ROWS_AT_A_TIME)
        yield from _texts(_columns(tables, text_field, name), text_field)


def _stream_or_converted(repository: str) -> Any:
    """The rows of a dataset. `datasets` no longer runs loading scripts; the hub keeps a second copy
    of datasets that consist of one, converted to Parquet."""
    try:
        return _stream(repository)
    except RuntimeError as error:
        if "scripts" not in str(error):
            raise
        return _stream(repository, revision="refs/convert/parquet")


@contextmanager
def _in_one_line(kind: type[Exception], what: str, remedy: str = "") -> Iterator[None]:
    """A context in which any exception of a library or the network becomes an error of one line.
    Libraries raise many kinds of exceptions, so all are caught.

    Args:
        kind: the exception to raise.
        what: what failed.
        remedy: the end of the line.
    """
    try:
        yield
    except UserError:
        raise
    except UnicodeDecodeError:
        raise kind(f"data.source: {what}: not UTF-8 text; convert it first{remedy}") from None
    except Exception as error:
        cause = error.__cause__ or error
        shown = " ".join(f"{type(cause).__name__}: {cause}".split())[:200].rstrip(".")
        raise kind(f"data.source: {what}: {shown}{remedy}") from None


def _stream(name: str, **where: str) -> Any:
    """The rows of the training split as Arrow tables, streamed instead of downloaded first."""
    import datasets  # here, because it takes seconds, and runs on prepared tokens do not need it

    datasets.disable_progress_bars()
    # The library also raises every error that it logs.
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    rows = datasets.load_dataset(name, split="train", streaming=True, **where)
    return rows.with_format("arrow")


def _columns(tables: Iterable[Any], text_field: str, place: str) -> Iterator[_Rows]:
    """The rows of each Arrow table, with the column of texts."""
    for table in tables:
        names = table.schema.names
        texts = table.column(text_field).to_pylist() if text_field in names else []
        yield _Rows(place, names, texts)


def _texts(tables: Iterable[_Rows], text_field: str) -> Iterator[str]:
    """The texts of all rows; UserError if there is no such field, or if it holds something else."""
    for rows in tables:
        if text_field not in rows.fields:
            fields = ", ".join(sorted(rows.fields))
            raise UserError(
                f"data.text_field: {rows.place} has no field '{text_field}'; its fields are "
                f"{fields}"
            )
        for text in rows.texts:
            if not isinstance(text, str):
                raise UserError(
                    f"data.text_field: {rows.place}: '{text_field}' holds {text!r:.40} where text "
                    f"is expected"
                )
            yield text
