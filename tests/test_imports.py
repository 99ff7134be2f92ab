"""Data flows one way: a package of brx imports only those before it, and the optimizer can be
lifted out."""

import ast
import graphlib
import pydoc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import brx
import brx.runs

BRX = Path(__file__).resolve().parents[1] / "brx"
# In the order of docs/architecture.md.
PACKAGES = (
    "errors",
    "names",
    "readers",
    "files",
    "environment",
    "accelerators",
    "progress",
    "config",
    "data",
    "optim",
    "model",
    "pipeline",
    "distributed",
    "methods",
    "runs",
    "planning",
    "train",
    "sweep",
    "curvature",
    "plot",
    "toy",
    "paper",
    "report",
    "cli",
    "__main__",
)


def imports(folder: Path) -> Iterator[tuple[str, str]]:
    """Pairs of a file and a module that it imports, also within functions."""
    files = folder.rglob("*.py") if folder.is_dir() else [folder.with_suffix(".py")]
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.ImportFrom(module=module, level=level) if level:
                    above = ("brx", *path.relative_to(BRX).parts[:-level])
                    yield str(path.relative_to(BRX)), ".".join((*above, *filter(None, [module])))
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
        is_own = module.startswith("brx.optim")
        allowed = is_own or package == "torch" or package in sys.stdlib_module_names
        assert allowed, f"{file} imports {module}"


def test_the_optimizer_has_no_circle():
    needs: dict[str, set[str]] = {}
    for file, module in imports(BRX / "optim"):
        of_file = needs.setdefault(f"brx.optim.{Path(file).stem}", set())
        if module.startswith("brx.optim."):
            of_file.add(module)
    order = tuple(graphlib.TopologicalSorter(needs).static_order())  # CycleError names a circle
    assert set(order) == set(needs)


HELP = "from brx.cli.main import COMMANDS, main\nfor command in COMMANDS: main([command, '--help'])"
VERDICT = (
    "from brx.cli.main import main; main(['verdict', '--stages', '8', '--micro-batches', '8'])"
)
WRONG = "from brx.cli.main import main; main(['train', 'quick', '--set', 'pipeline.stages=9'])"


@pytest.mark.parametrize(
    ("steps", "heavy"),
    [
        # Help, errors and answers from small files must not wait until torch is loaded.
        (
            (HELP,),
            {"torch", "numpy", "pandas", "matplotlib", "scipy", "datasets", "yaml", "brx.config"},
        ),
        ((WRONG,), {"torch", "matplotlib", "scipy", "datasets"}),
        (
            (VERDICT,),
            {"torch", "matplotlib", "scipy.stats", "datasets"},
        ),  # an interval takes scipy's quantile
        # It needs torch alone.
        (
            ("from brx import delayed",),
            {"pydantic", "yaml", "pandas", "typer", "rich", "scipy", "brx.config"},
        ),
        # Every rank of a pipeline would wait for it.
        (
            ("import brx.cli.train, brx.train.loop, brx.distributed.launch",),
            {"pandas", "matplotlib", "torch._dynamo"},
        ),
    ],
)
def test_what_is_not_needed_is_not_loaded(steps, heavy):
    program = "\n".join(
        (*steps, f"import sys; sys.exit(' '.join({heavy} & set(sys.modules)) or 0)")
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=BRX.parent, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("package", [brx, brx.runs], ids=lambda package: package.__name__)
def test_help_shows_the_names_that_are_imported_on_first_use(package):
    shown = pydoc.plain(pydoc.render_doc(package))
    for name in package.__all__:
        assert f"    {name} = class " in shown or f"    {name}(" in shown
