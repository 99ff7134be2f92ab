"""Data flows one way: a room of the package never imports a higher one, and the optimizer can be lifted out."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "brx"
# Lowest first; see docs/architecture.md.
ROOMS = (
    "errors", "files", "progress", "config", "data", "model", "optim", "pipeline", "distributed", "methods", "runs",
    "planning", "train", "sweep", "curvature", "plot", "paper", "report", "cli", "__main__",
)  # fmt: skip


def imports(folder: Path) -> Iterator[tuple[str, str]]:
    """File and imported module, those inside functions included."""
    files = folder.rglob("*.py") if folder.is_dir() else [folder.with_suffix(".py")]
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.ImportFrom(module=str(module)):
                    yield str(path.relative_to(PACKAGE)), module
                case ast.Import(names=names):
                    yield from ((str(path.relative_to(PACKAGE)), name.name) for name in names)


def test_every_room_has_its_place():
    modules = {path.stem for path in PACKAGE.iterdir() if path.is_dir() or path.suffix == ".py"}
    assert modules - {"__init__", "__pycache__", "presets"} == set(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_lower_rooms_alone(room):
    for file, module in imports(PACKAGE / room):
        package, *rest = module.split(".")
        if package == "brx" and rest:
            assert ROOMS.index(rest[0]) <= ROOMS.index(room), f"{file} imports {module}"


def test_the_optimizer_needs_torch_alone():
    for file, module in imports(PACKAGE / "optim"):
        package = module.partition(".")[0]
        allowed = module.startswith("brx.optim") or package == "torch" or package in sys.stdlib_module_names
        assert allowed, f"{file} imports {module}"


def test_the_modules_of_commands_load_nothing_heavy():
    """So that `brx COMMAND --help` is quick: what a command needs, its function imports."""
    modules = [f"brx.cli.{path.stem}" for path in sorted((PACKAGE / "cli").glob("*.py")) if path.stem != "__init__"]
    program = f"import {', '.join(modules)}, sys; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    heavy = {"torch", "numpy", "pandas", "matplotlib", "scipy", "datasets", "brx.config"}
    assert not heavy & set(found)


def test_what_trains_does_not_load_pandas():
    """Every rank of a pipeline would wait for it."""
    program = "import brx.cli.train, brx.train.loop, brx.distributed.launch, sys; print('pandas' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout == "False\n"
