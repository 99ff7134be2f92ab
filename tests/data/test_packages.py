"""The embedded corpus, against a plain list of the installed files and against its published fingerprint."""

import importlib
import re
from importlib import metadata
from pathlib import Path

import pytest

from brx.config.schema import DataConfig
from brx.data import packages, prepare
from brx.data.packages import PUBLISHED_FINGERPRINT, PUBLISHED_VERSIONS, installed_versions, package_sources
from brx.errors import UserError

CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
as_published = pytest.mark.skipif(
    {name: metadata.version(name) for name in PUBLISHED_VERSIONS} != PUBLISHED_VERSIONS,
    reason="other versions than constraints.txt",
)


def test_the_published_versions_are_those_of_the_constraints():
    pinned = dict(line.split("==") for line in CONSTRAINTS.read_text().split())
    assert {name: pinned[name] for name in PUBLISHED_VERSIONS} == PUBLISHED_VERSIONS


@as_published
def test_the_published_fingerprint(tmp_path, capsys):
    data = prepare.prepare(DataConfig(directory=str(tmp_path)))
    assert data.fingerprint == PUBLISHED_FINGERPRINT
    assert "published" not in capsys.readouterr().err
    assert data.train.num_tokens > 130_000 * 128


def test_the_sources_are_the_packages_own_files_without_tests():
    expected = set()
    for name in PUBLISHED_VERSIONS:
        root = Path(importlib.import_module(name).__file__).parent
        for path in root.rglob("*.py"):
            inside = path.relative_to(root).as_posix()
            if re.search(r"(^|/)(tests|test-examples|benchmarks)/", inside):
                continue
            if inside not in packages.BUILD_FILES:
                expected.add(path.read_bytes().decode("utf-8", "replace").replace("\r\n", "\n"))
    assert set(package_sources()) == expected


def test_each_part_holds_all_packages():
    """Validation examples are spread evenly over the held-out documents, and `data.tokens` takes the first ones."""
    texts = list(package_sources())
    tenth = len(texts) // 10
    for start in range(0, 9 * tenth, tenth):
        part = "".join(texts[start : start + tenth])
        assert all(re.search(rf"^(from|import) {name}\b", part, re.M) for name in PUBLISHED_VERSIONS)


def test_other_versions_are_said_and_have_a_folder_of_their_own(tmp_path, capsys, monkeypatch):
    config = DataConfig(directory=str(tmp_path), tokens=20_000, validation_fraction=0.5)
    others = PUBLISHED_VERSIONS | {"scipy": "1.18.0"}
    monkeypatch.setattr(prepare, "installed_versions", lambda: PUBLISHED_VERSIONS)
    published = prepare.prepare(config)
    assert "published" not in capsys.readouterr().err
    monkeypatch.setattr(prepare, "installed_versions", lambda: others)
    assert prepare.token_folder(config) not in [*tmp_path.iterdir()]
    assert prepare.prepare(config).fingerprint == published.fingerprint
    line = "data.source: packages: scipy 1.18.0 instead of 1.17.1: not the corpus of the published results"
    assert capsys.readouterr().err.count(line) == 1
    prepare.prepare(config, quiet=True)
    assert capsys.readouterr().err == ""


def test_changed_files_are_said(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(prepare, "installed_versions", lambda: PUBLISHED_VERSIONS)
    monkeypatch.setattr("brx.data.sources.package_sources", lambda: (f"document {n}" for n in range(100)))
    prepare.prepare(DataConfig(directory=str(tmp_path)))
    assert "data.source: packages: files of the installed packages were changed" in capsys.readouterr().err


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(PUBLISHED_VERSIONS, "no_such_package", "1.0")
    with pytest.raises(UserError, match=r"^data\.source: packages: no_such_package is not installed"):
        installed_versions()
    with pytest.raises(UserError, match="no_such_package is not installed"):
        list(package_sources())
