"""`brx.optim` can be lifted as a folder: torch and the standard library are enough (see tests/test_imports.py)."""

import shutil
import subprocess
import sys
from pathlib import Path

import brx.optim

CODE = """
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


def test_folder_alone_takes_a_step(tmp_path):
    # Beside brx.optim there is only an empty `brx`; what brx needs and torch does not cannot be imported.
    folder = Path(brx.optim.__file__).parent
    shutil.copytree(folder, tmp_path / "brx" / "optim", ignore=shutil.ignore_patterns("__pycache__"))
    command, environment = [sys.executable, "-c", CODE], {"PYTHONPATH": str(tmp_path)}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True)
    assert result.returncode == 0, result.stderr.decode()
    assert str(tmp_path) in result.stdout.decode()
