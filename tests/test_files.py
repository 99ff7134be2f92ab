"""Files are replaced whole or not at all."""

import errno
import os
from pathlib import Path

import pytest

from brx.errors import RunError
from brx.files import make_folder, replacing, write_text


@pytest.mark.parametrize(
    ("error", "told", "message"),
    [
        (ZeroDivisionError("why"), ZeroDivisionError, "why"),
        (
            RuntimeError("[enforce fail at inline_container.cc:672]"),
            RunError,
            "cannot be written: no space",
        ),
        (
            OSError(28, "full"),
            RunError,
            "file: cannot be written: full; what was there before is unchanged",
        ),
    ],
)
def test_failed_write_leaves_the_old_content(tmp_path, error, told, message):
    def write():
        with replacing(path) as file:
            file.write(b"new")
            raise error

    path = tmp_path / "file"
    write_text(path, "old")
    with pytest.raises(told, match=message):
        write()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_file_system_without_fsync_is_told_once(number, tmp_path, monkeypatch, capsys):
    def refuse(descriptor):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    write_text(tmp_path / "a", "text")
    write_text(tmp_path / "b", "text")
    assert (tmp_path / "b").read_text() == "text"
    told = [line for line in capsys.readouterr().err.splitlines() if str(tmp_path) in line]
    assert len(told) == 1


def test_disk_that_fails_to_sync_is_an_error(tmp_path, monkeypatch):
    def fail(descriptor):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(RunError, match="Input/output error"):
        write_text(tmp_path / "a", "text")


def test_longest_name_can_be_replaced(tmp_path):
    path = tmp_path / ("x" * 255)
    write_text(path, "content")
    assert path.read_text() == "content"


@pytest.mark.parametrize("name", ["", ".", "folder"])
def test_folder_is_not_replaced(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(RunError, match="cannot be written: Is a directory"):
        write_text(Path(name), "text")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_name_that_is_too_long_is_one_line(tmp_path):
    with pytest.raises(RunError, match="x: cannot be written: File name too long"):
        write_text(tmp_path / ("x" * 256), "text")


def test_pipes_and_devices_are_not_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(RunError, match="pipe: cannot be written: not an ordinary file"):
        write_text(pipe, "text")
    assert pipe.is_fifo()


def test_folder_is_made_with_those_around_it(tmp_path):
    for _ in range(2):
        make_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()


def test_folder_in_a_file_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="file is a file, not a folder"):
        make_folder(tmp_path / "file" / "folder")
