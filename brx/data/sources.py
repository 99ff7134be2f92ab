"""Where documents come from: the sources of installed packages, local files, or a Hugging Face
dataset.

The packages are the corpus that needs no network. With the versions in `constraints.txt` it is the
same text on any system: their wheels differ only in `BUILD_FILES`, which are left out, and in line
ends, which are read as newlines."""

import glob
import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import chain, islice
from pathlib import Path
from typing import Any, TextIO

from brx.config.schema import DataConfig
from brx.errors import RunError, UserError
from brx.files import user_path
from brx.readers import Damaged, lines_of, parse_json

# Symbolic algebra, graph algorithms, numerics and tables: different authors and subjects, 41 MB
#     together.
PUBLISHED_VERSIONS = {"networkx": "3.6.1", "pandas": "3.1.1", "scipy": "1.17.1", "sympy": "1.14.0"}
# `PreparedData.fingerprint` of these versions, as bytes with the default split.
PUBLISHED_FINGERPRINT = "7380bd28584846aaff92d029d3653235345915142e262ede74ecf3454b34fe71"
SKIPPED_FOLDERS = {"tests", "test-examples", "benchmarks"}
# Written, or on Windows patched, when a wheel is built.
BUILD_FILES = {
    "__init__.py",
    "__config__.py",
    "_distributor_init.py",
    "_version.py",
    "_version_meson.py",
    "version.py",
}

EXTENSIONS = (".txt", ".jsonl", ".parquet")
# A text file has no documents of its own: it is cut at line ends into pieces of about this many
#     characters.
TEXT_PIECE = 16_384

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
# Names under which datasets are known, where the hub files them under their owner.
_HUB_ALIASES = {"openwebtext": "Skylion007/openwebtext"}
_HUB_TIMEOUT_S = 10.0
_ROWS_AT_A_TIME = 256


def is_validation(document: str, fraction: float, seed: int) -> bool:
    """Whether a document is held out. Only a seed and its text decide."""
    return _drawn(f"{seed}/{document}", fraction)


def is_sampled(document: str, fraction: float, seed: int) -> bool:
    """Whether a document is used at all; independent of whether it is held out."""
    return _drawn(f"sample/{seed}/{document}", fraction)


def _drawn(text: str, fraction: float) -> bool:
    digest = hashlib.sha256(text.encode("utf-8", "replace")).digest()
    return int.from_bytes(digest[:8], "little") < fraction * 2**64


def documents(config: DataConfig, *, skip: int = 0) -> Iterator[str]:
    """The sampled documents of `config.source` that are not empty, without the first `skip`, always
    in one order."""
    if config.source == "packages":
        texts = package_sources()
    elif (files := local_files(config.source)) is not None:
        texts = chain.from_iterable(_local_file(path, config.text_field) for path in files)
    else:
        texts = _hub(config.source, config.text_field)
    share, seed = config.sample_fraction, config.sample_seed
    return islice(
        (text for text in texts if text and (share == 1 or is_sampled(text, share, seed))),
        skip,
        None,
    )


def package_sources() -> Iterator[str]:
    """The text of each source file, in an order that mixes the packages and depends on the files'
    names alone."""
    files = {}
    for package in PUBLISHED_VERSIONS:
        folder = _package_folder(package)
        for file in folder.rglob("*.py"):
            relative = file.relative_to(folder)
            # Of a package's top folder alone: those are written when it is built.
            if str(relative) not in BUILD_FILES and SKIPPED_FOLDERS.isdisjoint(relative.parts):
                files[f"{package}/{relative.as_posix()}"] = file
    # Shuffled, so that any prefix (`data.tokens`) and any stretch of the validation tokens holds
    # all packages.
    for name in sorted(files, key=lambda name: hashlib.sha256(name.encode()).digest()):
        yield files[name].read_text(encoding="utf-8", errors="replace")


def installed_versions() -> dict[str, str]:
    """The installed version of each package of the corpus; UserError where one is missing."""
    versions = {}
    for package in PUBLISHED_VERSIONS:
        _package_folder(package)
        try:
            versions[package] = version(package)
        except PackageNotFoundError:  # a folder on the path, not an installation
            versions[package] = "of an unknown version"
    return versions


def other_packages(config: DataConfig, fingerprint: str) -> str:
    """Say which installed packages are not as they were for the published results; empty if
    none."""
    versions = installed_versions()
    differing = {
        name: wanted for name, wanted in PUBLISHED_VERSIONS.items() if versions[name] != wanted
    }
    others = [f"{name} {versions[name]} instead of {wanted}" for name, wanted in differing.items()]
    decides = {
        "tokenizer",
        "tokens",
        "validation_fraction",
        "split_seed",
        "sample_fraction",
        "sample_seed",
    }
    is_default = config.model_dump(include=decides) == DataConfig(source="packages").model_dump(
        include=decides
    )
    if not others and is_default and fingerprint != PUBLISHED_FINGERPRINT:
        return "files of the installed packages were changed"
    return ", ".join(others)


def _package_folder(package: str) -> Path:
    spec = find_spec(package)  # finds it without importing it
    if spec is None or not spec.submodule_search_locations:
        raise UserError(f"data.source: packages: {package} is not installed: pip install {package}")
    return Path(spec.submodule_search_locations[0])


def local_files(source: str) -> list[Path] | None:
    """The files that a path, a folder (at any depth) or a glob names, sorted.

    A folder and a glob leave out hidden files and folders (`.ipynb_checkpoints`) and follow links;
    a file that is reached in several ways counts once. None for what may be a dataset on the hub.
    """
    path, missing = user_path(source), "no such file"
    if path.is_file():
        files = [path]
    elif path.is_dir():
        files = _each_once(file for file in _below(path) if file.suffix in EXTENSIONS)
        missing = f"the folder holds no {', '.join(EXTENSIONS)} file"
    elif glob.has_magic(source):
        files = _each_once(map(Path, glob.glob(str(path), recursive=True)))
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
                f"data.source: {file}: unknown kind of file; known are {', '.join(EXTENSIONS)}"
            )
    return files


def _below(folder: Path, *, hidden: bool = False) -> Iterator[Path]:
    """All files below a folder, links followed, without the hidden ones; with `hidden` those alone,
    each in a folder that is not hidden or hidden itself."""
    seen = set()  # a link may lead back to a folder around it
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
    """The files among some paths, sorted, without those that are links to one before."""
    by_place: dict[str, Path] = {}
    for file in sorted(files):
        if file.is_file():
            by_place.setdefault(os.path.realpath(file), file)
    return list(by_place.values())


def notes_on_files(source: str) -> list[str]:
    """What a reader of a local source should know of the choice of files: hidden ones that are left
    out, and links that are followed."""
    path, files = user_path(source), local_files(source)
    if files is None or path.is_file():
        return []
    if path.is_dir():
        hidden = [file for file in _below(path, hidden=True) if file.suffix in EXTENSIONS]
        linked = [file for file in files if _is_linked(file, path)]
    else:
        hidden = _hidden_matches(str(path))
        linked = [file for file in files if file.is_symlink()]
    notes = []
    if hidden:
        notes.append(f"{len(hidden)} hidden file(s) left out, such as {min(hidden)}")
    if linked:
        notes.append(f"{len(linked)} file(s) reached through links, such as {linked[0]}")
    return notes


def _hidden_matches(pattern: str) -> list[Path]:
    """The files that a glob would match if it did not leave out hidden ones."""
    shown = set(glob.glob(pattern, recursive=True))
    everything = glob.glob(pattern, recursive=True, include_hidden=True)
    return _each_once(Path(name) for name in everything if name not in shown)


def _is_linked(file: Path, folder: Path) -> bool:
    """Whether the file, or a folder around it that is below `folder`, is a link."""
    around = [place for place in file.parents if folder in place.parents]
    return any(place.is_symlink() for place in (file, *around))


# Where some rows are from, the names of their fields, and the values of the one that holds text, if
# it is among them.
_Rows = Iterable[tuple[str, Sequence[str], list[Any]]]


def _local_file(path: Path, text_field: str) -> Iterator[str]:
    with _told(UserError, f"{path}: cannot be read"):
        if path.suffix == ".txt":
            with path.open(encoding="utf-8", newline="\n") as file:
                # The limit on the rest of the line bounds the memory that a file without line ends
                # takes.
                while piece := file.read(TEXT_PIECE) + file.readline(TEXT_PIECE):
                    if "\0" in piece:
                        raise UserError(
                            f"data.source: {path}: holds NUL characters: not a text file"
                        )
                    yield piece
        elif path.suffix == ".jsonl":
            yield from _texts(_json_lines(path, text_field), text_field)
        elif path.stat().st_size > 0:
            from pyarrow.parquet import ParquetFile

            with ParquetFile(path) as file:
                names = file.schema_arrow.names
                # The others may be large, or damaged, and nobody needs them.
                needed = [text_field] if text_field in names else names
                batches = file.iter_batches(_ROWS_AT_A_TIME, columns=needed)
                yield from _texts(_columns(batches, text_field, str(path)), text_field)


def _json_lines(path: Path, text_field: str) -> _Rows:
    """Line by line, since the other fields of two rows need not have the same names and types."""
    with path.open(encoding="utf-8-sig", newline="\n") as file:
        for number, line in enumerate(_bounded_lines(file, path), 1):
            if line.strip():
                row = None
                with suppress(Damaged):
                    row = parse_json(line)
                if not isinstance(row, dict):
                    raise UserError(
                        f"data.source: {path}:{number}: must be a JSON object, is "
                        f"{line.strip():.60}"
                    )
                yield f"{path}:{number}", list(row), [row[text_field]] if text_field in row else []


def _bounded_lines(file: TextIO, path: Path) -> Iterator[str]:
    try:
        yield from lines_of(file)
    except Damaged as error:
        raise UserError(f"data.source: {path}: {error}: not a file of JSON lines") from None


def _hub(name: str, text_field: str) -> Iterator[str]:
    from huggingface_hub import HfApi

    repository = _HUB_ALIASES.get(name, name)
    with _told(
        UserError,
        f"{name}: no such file, and the Hugging Face dataset {repository} cannot be reached",
    ):
        # Asked first because load_dataset alone tries again for half a minute before it admits
        # there is no network.
        HfApi().dataset_info(repository, timeout=_HUB_TIMEOUT_S)
        try:
            rows = _stream(repository)
        except RuntimeError as error:
            if "scripts" not in str(error):
                raise
            # Datasets that consist of a loading script are on the hub a second time, converted.
            rows = _stream(repository, revision="refs/convert/parquet")
    with _told(RunError, f"{name}: the stream broke off", "; prepare again to go on from here"):
        yield from _texts(
            _columns(rows.iter(batch_size=_ROWS_AT_A_TIME), text_field, name), text_field
        )


@contextmanager
def _told(kind: type[Exception], what: str, remedy: str = "") -> Iterator[None]:
    """Make one line of whatever a library or the network raises: a different thing for each way to
    fail."""
    try:
        yield
    except UserError:
        raise
    except UnicodeDecodeError:
        raise kind(f"data.source: {what}: not UTF-8 text; convert it first{remedy}") from None
    except Exception as error:
        cause = error.__cause__ or error
        shown = " ".join(f"{type(cause).__name__}: {cause}".split())[:200]
        raise kind(f"data.source: {what}: {shown}{remedy}") from None


def _stream(name: str, **where: str) -> Any:
    """Rows of the training split as Arrow tables, without downloading or caching the whole."""
    import datasets  # here, because it takes seconds, and runs on prepared tokens do without

    datasets.disable_progress_bars()
    # The library also raises every error that it logs.
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    return datasets.load_dataset(name, split="train", streaming=True, **where).with_format("arrow")


def _columns(tables: Iterable[Any], text_field: str, where: str) -> _Rows:
    for table in tables:
        names = table.schema.names
        yield where, names, table.column(text_field).to_pylist() if text_field in names else []


def _texts(rows: _Rows, text_field: str) -> Iterator[str]:
    for where, names, texts in rows:
        if text_field not in names:
            fields = ", ".join(sorted(names))
            raise UserError(
                f"data.text_field: {where} has no field '{text_field}'; its fields are {fields}"
            )
        for text in texts:
            if not isinstance(text, str):
                raise UserError(
                    f"data.text_field: {where}: '{text_field}' holds {text!r:.40} where text is "
                    f"expected"
                )
            yield text
