"""The corpus that needs no network: the Python sources of four packages that come with every installation.

With the versions in `constraints.txt` it is the same text on any system and any version of Python: the wheels for Linux
(x86-64, ARM), macOS and Windows differ only in the files of `BUILD_FILES`, which are left out, and in line ends, which
are read as newlines.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from brx.errors import UserError

# Symbolic algebra, graph algorithms, numerics and tables: different authors and subjects, 41 MB together.
PUBLISHED_VERSIONS = {"networkx": "3.6.1", "pandas": "3.1.1", "scipy": "1.17.1", "sympy": "1.14.0"}
# `PreparedData.fingerprint` of these versions, as bytes with the default split.
PUBLISHED_FINGERPRINT = "7380bd28584846aaff92d029d3653235345915142e262ede74ecf3454b34fe71"

SKIPPED_FOLDERS = {"tests", "test-examples", "benchmarks"}
# Written, or on Windows patched, when a wheel is built.
BUILD_FILES = {"__init__.py", "__config__.py", "_distributor_init.py", "_version.py", "_version_meson.py", "version.py"}


def package_sources() -> Iterator[str]:
    """The text of each source file, in an order that mixes the packages and depends on the files' names alone.

    Raises:
        UserError: a package is missing.
    """
    files = {name: file for package in PUBLISHED_VERSIONS for name, file in _source_files(package)}
    # Shuffled, so that any prefix (`data.tokens`) and any stretch of the validation tokens holds all packages.
    for name in sorted(files, key=lambda name: hashlib.sha256(name.encode()).digest()):
        yield files[name].read_text(encoding="utf-8", errors="replace")


def installed_versions() -> dict[str, str]:
    """Version by package.

    Raises:
        UserError: a package is missing.
    """
    versions = {}
    for package in PUBLISHED_VERSIONS:
        _folder(package)
        try:
            versions[package] = version(package)
        except PackageNotFoundError:  # a folder on the path, not an installation
            versions[package] = "of an unknown version"
    return versions


def _source_files(package: str) -> Iterator[tuple[str, Path]]:
    """Name (`scipy/stats/_qmc.py`) and path of each file."""
    folder = _folder(package)
    for file in folder.rglob("*.py"):
        relative = file.relative_to(folder)
        written_by_build = len(relative.parts) == 1 and file.name in BUILD_FILES
        if not written_by_build and SKIPPED_FOLDERS.isdisjoint(relative.parts):
            yield f"{package}/{relative.as_posix()}", file


def _folder(package: str) -> Path:
    spec = find_spec(package)  # finds it without importing it
    if spec is None or not spec.submodule_search_locations:
        raise UserError(f"data.source: packages: {package} is not installed: pip install {package}")
    return Path(spec.submodule_search_locations[0])
