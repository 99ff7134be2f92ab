"""Code of a user's own, `my_method.py:MyMethod` or `package.module:Name`: its file, fingerprint,
import and faults, and who may run it.

**Reading a run runs nothing.** A run's config.yaml may come from somebody else, with a Python file
next to it. So `import_code` refuses unless somebody has allowed it in this context:

- `allowed()` is entered by what trains (`brx.train.loop.train`, sweeps, `brx compare METHOD`), and
  by planning a configuration that is no run's. It ends where runs are read: see `reading`.
- `allow_for_reading()` is `brx --run-code`: the person at the keyboard asked for it.

What is imported is named on stderr before it runs. What a reader needs of such code is noted in
config.yaml when the run trains; `brx.train.code_facts` tells how to add to it.
"""

import contextlib
import hashlib
import importlib
import importlib.machinery
import importlib.util
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from enum import Enum
from functools import cache, wraps
from pathlib import Path
from types import ModuleType
from typing import Any

from brx.errors import UserError, did_you_mean
from brx.files import user_path

RUN_CODE = "--run-code"
"""The option of `brx` that lets a command which reads runs execute their code."""


_PACKAGE = "brx_user_code"  # of the modules that files become


class _Permission(Enum):
    NOTHING = "analyses: no code of a user's"
    OWN_RUN = "what trains: the code of the run that it was asked to train"
    EVERYTHING = "asked for by the user: any run's"


_permission: ContextVar[_Permission] = ContextVar("permission", default=_Permission.NOTHING)


def is_allowed() -> bool:
    """Whether `import_code` may run code here."""
    return _permission.get() is not _Permission.NOTHING


@contextlib.contextmanager
def allowed() -> Iterator[None]:
    """Let the code of a run's settings be imported in this block, because the run trains in it."""
    if is_allowed():
        yield
        return
    token = _permission.set(_Permission.OWN_RUN)
    try:
        yield
    finally:
        _permission.reset(token)


@contextlib.contextmanager
def reading() -> Iterator[None]:
    """Import nothing in this block, although what is around it trains: it reads runs, which may be
    anybody's."""
    if _permission.get() is not _Permission.OWN_RUN:
        yield
        return
    token = _permission.set(_Permission.NOTHING)
    try:
        yield
    finally:
        _permission.reset(token)


def allow() -> None:
    """As `allowed`, until the command ends."""
    if not is_allowed():
        _permission.set(_Permission.OWN_RUN)


def allow_for_reading() -> None:
    """Let reading runs import their code too, until the command ends (`brx --run-code`)."""
    _permission.set(_Permission.EVERYTHING)


def code_file(name: str) -> Path | None:
    """The file of `FILE.py:NAME` or `package.module:NAME`; None for an installed package, and for
    brx itself: these have versions."""
    module, _, _ = name.rpartition(":")
    if module.endswith(".py"):
        return user_path(module)
    # Whether brx is found as a package depends on how it was started, which must not count.
    if module.partition(".")[0] == "brx":
        return None
    spec = _find_spec(module)
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        return None
    file = Path(spec.origin).resolve()
    installed = {Path(path).resolve() for path in sysconfig.get_paths().values()}
    is_installed = any(
        folder in installed or folder.name in ("site-packages", "dist-packages")
        for folder in file.parents
    )
    return None if is_installed else file


def _find_spec(module: str) -> importlib.machinery.ModuleSpec | None:
    """Where a module is. `importlib.util.find_spec` would import the packages around it."""
    folders: list[str] | None = None  # sys.path
    spec = None
    names = module.split(".")
    for depth in range(1, len(names) + 1):
        try:
            spec = importlib.machinery.PathFinder.find_spec(".".join(names[:depth]), folders)
        except (ValueError, ImportError, OSError):
            return None
        if spec is None:
            return None
        if spec.origin is None:  # a folder without __init__.py
            within = sys.path if folders is None else folders
            folders = [os.path.join(folder, names[depth - 1]) for folder in within]
        else:
            folders = list(spec.submodule_search_locations or [])
    return spec


def name_without_folder(name: str) -> str:
    """`my_method.py:MyMethod` of `folder/my_method.py:MyMethod`; other names as they are."""
    return Path(name).name


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
    lines = _lines_of(error, file)
    # Without lines it was raised elsewhere, by what the file's code has returned.
    location = f"{file}:{lines[-1]}" if lines else file
    return f"{location}: {type(error).__name__}: {said}"


def is_raised_in(error: BaseException, name: str) -> bool:
    """Whether the file of `name`, or what it called, has raised an error."""
    file = code_file(name)
    return file is not None and bool(_lines_of(error, file))


def _lines_of(error: BaseException, file: Path) -> list[int | None]:
    """The lines of a file through which an error came, the outermost first."""
    frames = traceback.extract_tb(error.__traceback__)
    return [frame.lineno for frame in frames if Path(frame.filename).resolve() == file.resolve()]


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
    """Import a file or a module, which is told on stderr first.

    Raises:
        UserError: it may not run here (see the module's docstring), or it cannot be imported;
            the code is the user's.
    """
    if not is_allowed():
        raise UserError(
            f"{where}: {module_name} is code that came with the run, and reading a run executes "
            f"none; brx {RUN_CODE} COMMAND ... executes it"
        )
    _tell(module_name, where)
    try:
        if module_name.endswith(".py"):
            return _import_file(user_path(module_name).resolve(), code_sha256(f"{module_name}:"))
        return importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        advice = " (install it, or put its folder on PYTHONPATH)"
        if module_name.endswith(".py"):
            advice = _advice_on_import(error)
        what = fault(error, f"{module_name}:")
        raise UserError(f"{where}: {module_name} cannot be imported: {what}{advice}") from None


def _advice_on_import(error: BaseException) -> str:
    """What would help where a file imports something that is not there."""
    if not isinstance(error, ModuleNotFoundError):
        return ""
    if error.name == _PACKAGE:
        return " (the file is imported alone; for relative imports, name package.module:NAME)"
    return " (install it, or put its folder on PYTHONPATH)"


@cache
def _tell(module_name: str, where: str) -> None:
    """Say whose code is about to run; once, and of several devices by the first."""
    is_dependency = module_name.partition(".")[0] in ("torch", "brx")
    is_first_rank = os.environ.get("RANK", "0") in ("", "0")
    if is_dependency or not is_first_rank:
        return
    file = code_file(f"{module_name}:")
    what = module_name if file is None else file.resolve()
    print(f"brx: note: runs code that is not brx's: {what} ({where})", file=sys.stderr, flush=True)


@cache
def _import_file(path: Path, sha256: str | None) -> ModuleType:
    """Execute a file, anew only when its content is another."""
    # Not its plain name, which may be an installed module's.
    spec = importlib.util.spec_from_file_location(f"{_PACKAGE}.{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # where pickle and dataclasses look for it
    spec.loader.exec_module(module)
    return module
