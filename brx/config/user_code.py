"""Code of a user's own, `my_method.py:MyMethod` or `package.module:Name`: its file, fingerprint,
import and faults."""

import hashlib
import importlib
import importlib.util
import sys
import sysconfig
import traceback
from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from types import ModuleType
from typing import Any

from brx.errors import UserError, did_you_mean


def code_file(name: str) -> Path | None:
    """The file of `FILE.py:NAME` or `package.module:NAME`; None for an installed package: that has
    a version."""
    module, _, _ = name.rpartition(":")
    if module.endswith(".py"):
        return Path(module)
    try:
        spec = importlib.util.find_spec(module)
    except (
        Exception,
        SystemExit,
    ):  # it imports the packages around the module; told when it is loaded
        return None
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        return None
    file = Path(spec.origin).resolve()
    installed = {Path(path).resolve() for path in sysconfig.get_paths().values()}
    return None if any(folder in file.parents for folder in installed) else file


def name_without_folder(name: str) -> str:
    return Path(
        name
    ).name  # `my_method.py:MyMethod` of `folder/my_method.py:MyMethod`; other names as they are


def code_sha256(name: str, key: str = "") -> str | None:
    """The SHA-256 of `code_file`, None for an installed package; ValueError where it cannot be
    read, naming the key."""
    file = code_file(name)
    if file is None:
        return None
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError as error:
        raise ValueError(f"{key}{file} cannot be read: {error.strerror}") from None


def check_unchanged(name: str, sha256: str | None, where: str) -> None:
    """Refuse a file that is no longer the one of the run's settings, or cannot be read, with a
    UserError."""
    try:
        now = code_sha256(name)
    except ValueError as error:
        raise UserError(f"{where.partition(' ')[0]}: {error}") from None
    if now != sha256:
        raise UserError(
            f"{where}: its file has changed since this run was set up; give another run a new --out"
        )


def load_attribute(name: str, where: str, kind: str, fits: Callable[[Any], bool]) -> Any:
    """What `FILE.py:NAME` or `package.module:NAME` names; a UserError, where it does not fit,
    starts with `where`."""
    module_name, _, attribute = name.rpartition(":")
    module = import_code(module_name, where)
    if not fits(chosen := getattr(module, attribute, None)):
        there = [key for key, value in vars(module).items() if fits(value)]
        hint = did_you_mean(attribute, there) or f" (there: {', '.join(there) or 'none'})"
        raise UserError(f"{where}: {attribute} is no {kind} of {module_name}{hint}")
    return chosen


def fault(error: BaseException, name: str) -> str:
    """What went wrong, in one line, and where in the file of `name`."""
    file = code_file(name)
    said = " ".join(str(error).split()) or type(error).__name__
    if file is None:
        return said
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}: {type(error).__name__}: {error.msg}"
    own = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if Path(f.filename).resolve() == file.resolve()
    ]
    location = (
        f"{file}:{own[-1].lineno}" if own else file
    )  # raised elsewhere, by what it has returned
    return f"{location}: {type(error).__name__}: {said}"


def in_one_line(function: Callable[..., Any], name: str) -> Any:
    """The delay function `name`; what it raises becomes a UserError with file and line."""

    @wraps(function)
    def told(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except Exception as error:
            raise UserError(f"pipeline.delay {name}: {fault(error, name)}") from error

    return told


def import_code(module_name: str, where: str) -> ModuleType:
    """Import a file or a module; whatever goes wrong is a UserError: the code is the user's."""
    try:
        if module_name.endswith(".py"):
            return _import_file(Path(module_name).resolve(), code_sha256(f"{module_name}:"))
        return importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        advice = (
            "" if module_name.endswith(".py") else " (install it, or put its folder on PYTHONPATH)"
        )
        what = fault(error, f"{module_name}:")
        raise UserError(f"{where}: {module_name} cannot be imported: {what}{advice}") from None


@cache
def _import_file(path: Path, sha256: str | None) -> ModuleType:
    """Execute a file, anew only when its content is another."""
    # Not its plain name, which may be an installed module's.
    spec = importlib.util.spec_from_file_location(f"brx_user_code.{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # where pickle and dataclasses look for it
    spec.loader.exec_module(module)
    return module
