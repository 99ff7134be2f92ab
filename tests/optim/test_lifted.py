"""The folder by itself: copied elsewhere under another name, it trains where brx cannot be
imported."""

import importlib
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

import brx.optim

FOLDER = Path(brx.optim.__file__).parent


def modules_of(package):
    return [name for name in sys.modules if name.partition(".")[0] == package]


@pytest.fixture
def lifted(tmp_path, monkeypatch):
    """A copy of the folder, imported where brx cannot be."""
    shutil.copytree(FOLDER, tmp_path / "lifted")
    monkeypatch.syspath_prepend(tmp_path)
    for name in modules_of("brx"):
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "brx", None)  # importing it, or anything in it, fails
    yield importlib.import_module("lifted")
    for name in modules_of("lifted"):
        del sys.modules[name]


def final_loss(make):
    """The loss after 30 steps; the optimizer is `make(model)`."""
    torch.manual_seed(0)
    inputs = torch.randn(64, 6)
    targets = torch.randn(64, 6) @ torch.randn(6, 3)
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
    optimizer = make(model)
    for _ in range(30):
        optimizer.zero_grad()
        loss = (model(inputs) - targets).square().mean()
        loss.backward()
        optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    return loss.item()


def test_copied_folder_trains_without_brx(lifted):
    first = final_loss(lambda model: lifted.BasisRotation(model, lr=0.0))
    of_model = final_loss(lambda model: lifted.BasisRotation(model, lr=0.02))
    assert of_model < 0.9 * first
    of_groups = final_loss(lambda model: lifted.BasisRotation(lifted.param_groups(model), lr=0.02))
    assert of_groups < 0.9 * first
    assert modules_of("brx") == ["brx"]


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
