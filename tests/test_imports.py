"""Data flows one way: a package of brx imports only those before it, and the optimizer can be lifted out."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

BRX = Path(__file__).resolve().parents[1] / "brx"
# In the order of docs/architecture.md.
PACKAGES = (
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
                    yield str(path.relative_to(BRX)), module
                case ast.Import(names=names):
                    yield from ((str(path.relative_to(BRX)), name.name) for name in names)


def test_every_package_has_its_place():
    modules = {path.stem for path in BRX.iterdir() if path.is_dir() or path.suffix == ".py"}
    assert modules - {"__init__", "__pycache__", "presets"} == set(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_those_before_it_alone(package):
    for file, module in imports(BRX / package):
        root, *rest = module.split(".")
        if root == "brx" and rest:
            assert PACKAGES.index(rest[0]) <= PACKAGES.index(package), f"{file} imports {module}"


def test_the_optimizer_needs_torch_alone():
    for file, module in imports(BRX / "optim"):
        package = module.partition(".")[0]
        allowed = module.startswith("brx.optim") or package == "torch" or package in sys.stdlib_module_names
        assert allowed, f"{file} imports {module}"


def test_the_modules_of_commands_load_nothing_heavy():
    """So that `brx COMMAND --help` is quick: what a command needs, its function imports."""
    modules = [f"brx.cli.{path.stem}" for path in sorted((BRX / "cli").glob("*.py")) if path.stem != "__init__"]
    program = f"import {', '.join(modules)}, sys; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    heavy = {"torch", "numpy", "pandas", "matplotlib", "scipy", "datasets", "brx.config"}
    assert not heavy & set(found)


def test_what_trains_does_not_load_pandas():
    """Every rank of a pipeline would wait for it."""
    program = "import brx.cli.train, brx.train.loop, brx.distributed.launch, sys; print('pandas' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout == "False\n"
