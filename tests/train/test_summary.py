"""Which commit a summary names."""

import subprocess

import pytest

import brx
from brx.train.summary import git_commit


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A repository with one commit, in which a copy of brx lies that git does not know."""

    def git(*arguments):
        identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    git("init", "--quiet")
    git("commit", "--quiet", "--allow-empty", "--message", "somebody else's")
    package = tmp_path / "brx"
    package.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.setattr(brx, "__file__", str(package / "__init__.py"))
    return git


def test_a_strangers_checkout_is_not_ours(checkout):
    assert git_commit() is None


def test_our_checkout_has_its_commit_and_whether_its_code_has_changed(checkout, tmp_path):
    checkout("add", "brx")
    checkout("commit", "--quiet", "--message", "ours")
    (tmp_path / "elsewhere.txt").write_text("")  # runs, results: no code
    assert git_commit() == checkout("rev-parse", "HEAD")
    (tmp_path / "brx" / "__init__.py").write_text("changed = True\n")
    assert git_commit() == checkout("rev-parse", "HEAD") + "-dirty"
