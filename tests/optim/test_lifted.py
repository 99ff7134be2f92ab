"""The folder by itself: copied elsewhere under another name, it trains where brx cannot be
imported."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import brx.optim

PROGRAM = """
import sys
sys.modules["brx"] = None  # importing it, or anything in it, fails
import torch
from lifted import BasisRotation, param_groups

torch.manual_seed(0)
inputs = torch.randn(64, 6)
targets = torch.randn(64, 6) @ torch.randn(6, 3)


def final_loss(make):
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
    optimizer = make(model)
    for _ in range(30):
        optimizer.zero_grad()
        loss = (model(inputs) - targets).square().mean()
        loss.backward()
        optimizer.step()
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    return loss.item()


first = final_loss(lambda model: BasisRotation(model, lr=0.0))
assert final_loss(lambda model: BasisRotation(model, lr=0.02)) < 0.9 * first
assert final_loss(lambda model: BasisRotation(param_groups(model), lr=0.02)) < 0.9 * first
assert not [name for name in sys.modules if name.startswith("brx.")]
"""

FOLDER = Path(brx.optim.__file__).parent


def test_copied_folder_trains_without_brx(tmp_path):
    shutil.copytree(FOLDER, tmp_path / "lifted")
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr


@pytest.fixture(scope="module")
def listed_files():
    """The names of the README's table of files, in its order."""
    _, table = (FOLDER / "README.md").read_text().split("## The files")
    return re.findall(r"`(\w+)\.py`", table.split("|---|")[1])


def test_readme_lists_every_file(listed_files):
    assert sorted([*listed_files, "__init__"]) == sorted(path.stem for path in FOLDER.glob("*.py"))


def test_files_import_only_those_listed_above(listed_files):
    first, *others = listed_files
    assert first == "basis_rotation"
    for place, name in enumerate(others):
        text = (FOLDER / f"{name}.py").read_text()
        imported = set(re.findall(r"^from \.(\w+) import", text, re.MULTILINE))
        assert imported <= {first, *others[:place]}, name
        assert first not in imported or name == "graphs"
