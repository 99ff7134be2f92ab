"""The file of a user's own method, `my_method.py:MyMethod` or `package.module:Name`, and its fingerprint."""

from __future__ import annotations

import hashlib
import importlib.util
import sysconfig
from pathlib import Path


def code_file(name: str) -> Path | None:
    """The file that a method's name refers to; None for an installed package, which has a version instead.

    Args:
        name: `FILE.py:NAME` or `package.module:NAME`.
    """
    module, _, _ = name.rpartition(":")
    if module.endswith(".py"):
        return Path(module)
    try:
        spec = importlib.util.find_spec(module)
    except (Exception, SystemExit):  # it imports the packages around the module; told when it is loaded
        return None
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        return None
    file = Path(spec.origin).resolve()
    installed = {Path(path).resolve() for path in sysconfig.get_paths().values()}
    return None if any(folder in file.parents for folder in installed) else file


def name_without_folder(name: str) -> str:
    """`my_method.py:MyMethod` of `folder/my_method.py:MyMethod`; other names as they are."""
    return Path(name).name


def code_sha256(name: str) -> str | None:
    """The SHA-256 of `code_file`; None for an installed package.

    Raises:
        ValueError: the file cannot be read.
    """
    file = code_file(name)
    if file is None:
        return None
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError as error:
        raise ValueError(f"method: {file} cannot be read: {error.strerror}") from None
