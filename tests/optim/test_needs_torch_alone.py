"""`brx.optim` can be lifted as a folder: it imports torch, itself and the standard library."""

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import brx.optim

FOLDER = Path(brx.optim.__file__).parent


def imported_packages(file):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            yield node.module


def test_imports_name_torch_itself_and_the_standard_library():
    for file in FOLDER.glob("*.py"):
        for name in imported_packages(file):
            allowed = name.split(".")[0] in {"torch", *sys.stdlib_module_names} or name.startswith("brx.optim")
            assert allowed, f"{file.name} imports {name}"


def test_folder_alone_takes_a_step(tmp_path):
    # Beside brx.optim there is only an empty `brx`; what brx needs and torch does not cannot be imported.
    shutil.copytree(FOLDER, tmp_path / "brx" / "optim", ignore=shutil.ignore_patterns("__pycache__"))
    code = """
import sys
for name in ("numpy", "pandas", "scipy", "pydantic", "yaml", "typer", "rich", "matplotlib", "datasets", "tiktoken"):
    sys.modules[name] = None
import torch
from brx.optim import BasisRotation, param_groups
assert "torch.distributed.tensor" not in sys.modules
model = torch.nn.Linear(4, 4)
optimizer = BasisRotation(param_groups(model))
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
print(sys.modules["brx"].__path__)
"""
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, capture_output=True
    )
    assert result.returncode == 0, result.stderr.decode()
    assert str(tmp_path) in result.stdout.decode()
