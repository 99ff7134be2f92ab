"""A user's own code, `my_method.py:MyMethod` or `package.module:Name`: its file, its fingerprint,
its import, its errors, and who may run it.

**Reading a run runs nothing.** A run's config.yaml may come from somebody else, with a Python file
next to it. So `import_code` refuses unless somebody has allowed it in this context:

- `allowed()` is entered by code that trains (`brx.train.loop.train`, sweeps, `brx compare METHOD`),
  and by code that plans a configuration that belongs to no run. Within it, code that reads runs
  takes the permission back: see `reading`.
- `allow_for_reading()` is `brx --run-code`: the person at the keyboard asked for it.

Imported code is named on stderr before it runs. What a reader needs to know of it is noted in
config.yaml when the run trains; `brx.train.code_facts` tells how to note more.
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


LONGEST_MESSAGE = 300  # characters of an error of a user's code that are shown

_PACKAGE = "brx_user_code"  # how the packages of modules begin that files become


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
    """Import nothing in this block, even if the code around it trains: the block reads runs, which
    may come from somebody else."""
    if _permission.get() is not _Permission.OWN_RUN:
        yield
        return
    token = _permission.set(_Permission.NOTHING)
    try:
        yield
    finally:
        _permission.reset(token)


def allow() -> None:
    """The same as `allowed`, until the command ends."""
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
    # How brx was started decides whether it is found as an installed package. That must not
    # matter here.
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
    """The place of a module, without importing anything. `importlib.util.find_spec` would import
    the packages around it."""
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
    """`my_method.py:MyMethod` for `folder/my_method.py:MyMethod`; other names stay as they are."""
    return Path(name).name


def code_sha256(name: str, key: str = "") -> str | None:
    """The SHA-256 of `code_file`; None for an installed package. ValueError, which begins with
    `key`, if the file cannot be read."""
    file = code_file(name)
    if file is None:
        return None
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError as error:
        raise ValueError(f"{key}{file} cannot be read: {error.strerror}") from None


def check_unchanged(name: str, sha256: str | None, where: str) -> None:
    """UserError if a file has changed since the run's settings were made, or cannot be read.

    Args:
        name: `FILE.py:NAME` or `package.module:NAME`.
        sha256: the file's fingerprint in the run's settings.
        where: the key and the name, for the message.
    """
    try:
        now = code_sha256(name)
    except ValueError as error:
        raise UserError(f"{where.partition(' ')[0]}: {error}") from None
    if now != sha256:
        raise UserError(
            f"{where}: its file has changed since this run was set up; give another run a new --out"
        )


def load_attribute(name: str, where: str, kind: str, fits: Callable[[Any], bool]) -> Any:
    """Import the object that `FILE.py:NAME` or `package.module:NAME` names.

    Args:
        name: the object.
        where: the key and the name, for messages.
        kind: what the object must be, for messages.
        fits: whether an object is of that kind.

    Raises:
        UserError: the code cannot be imported (`import_code`), or has no such object.
    """
    module_name, _, attribute = name.rpartition(":")
    module = import_code(module_name, where)
    chosen = getattr(module, attribute, None)
    if not fits(chosen):
        present = [key for key, value in vars(module).items() if fits(value)]
        hint = did_you_mean(attribute, present) or f" (there: {', '.join(present) or 'none'})"
        raise UserError(f"{where}: {attribute} is no {kind} of {module_name}{hint}")
    return chosen


def fault(error: BaseException, name: str) -> str:
    """Say in one line what went wrong, and where in the file of `name`."""
    file = code_file(name)
    kind = type(error).__name__
    message = " ".join(str(error).split())
    if len(message) > LONGEST_MESSAGE:  # torch can list every tensor of a module
        message = f"{message[:LONGEST_MESSAGE].rstrip()} ..."
    what = f"{kind}: {message}" if message else kind
    if file is None:
        # Libraries explain themselves. A KeyError's message is the key alone.
        return what if isinstance(error, KeyError) or not message else message
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}: {kind}: {error.msg}"
    lines = _lines_of(error, file)
    # Without lines, the error was raised elsewhere, because of what the code returned.
    location = f"{file}:{lines[-1]}" if lines else file
    return f"{location}: {what}"


def is_raised_in(error: BaseException, name: str) -> bool:
    """Whether the file of `name`, or what it called, has raised an error."""
    file = code_file(name)
    return file is not None and bool(_lines_of(error, file))


def _lines_of(error: BaseException, file: Path) -> list[int | None]:
    """The lines of a file through which an error came, the outermost first."""
    frames = traceback.extract_tb(error.__traceback__)
    return [frame.lineno for frame in frames if Path(frame.filename).resolve() == file.resolve()]


def in_one_line(function: Callable[..., Any], name: str) -> Any:
    """Wrap the delay function `name`: an exception that it raises becomes a UserError with file and
    line."""

    @wraps(function)
    def wrapped(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except (Exception, SystemExit) as error:
            raise UserError(f"pipeline.delay {name}: {fault(error, name)}") from error

    return wrapped


def import_code(module_name: str, where: str) -> ModuleType:
    """Import a user's file or module, after naming it on stderr.

    Raises:
        UserError: it may not run here (see this module's docstring), or it cannot be imported.
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
    if (error.name or "").startswith(_PACKAGE):
        return " (the file is imported alone; for relative imports, name package.module:NAME)"
    return " (install it, or put its folder on PYTHONPATH)"


@cache
def _tell(module_name: str, where: str) -> None:
    """Say on stderr which code is about to run. It is said once, and only by the first rank."""
    is_dependency = module_name.partition(".")[0] in ("torch", "brx")
    is_first_rank = os.environ.get("RANK", "0") in ("", "0")
    if is_dependency or not is_first_rank:
        return
    file = code_file(f"{module_name}:")
    what = module_name if file is None else file.resolve()
    print(f"brx: note: runs code that is not brx's: {what} ({where})", file=sys.stderr, flush=True)


@cache
def _import_file(path: Path, sha256: str | None) -> ModuleType:
    """Execute a file. It is executed again only if its content has changed."""
    # A name of its own, because the file's plain name may be an installed module's, and another
    # folder may have a file of the same name.
    folder = hashlib.sha256(str(path).encode()).hexdigest()[:8]
    spec = importlib.util.spec_from_file_location(f"{_PACKAGE}_{folder}.{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # pickle and dataclasses look for it there
    spec.loader.exec_module(module)
    return module
