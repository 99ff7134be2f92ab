"""What processes inherit: import paths, and environment variables set by others."""

import errno
import gc
import io
import os
import subprocess
import sys

import pytest

from brx.environment import (
    OutputStream,
    brx_command,
    child_environment,
    environment_for_git,
    has_room_for_sockets,
    num_cores,
    rare_collections,
    whole_number,
)
from brx.errors import UserError


def test_child_finds_brx_despite_a_folder_brx(tmp_path):
    (tmp_path / "brx").mkdir()
    told = subprocess.check_output(
        brx_command("--version"), cwd=tmp_path, env=child_environment(), text=True
    )
    assert told.startswith("brx ")


def test_child_imports_from_our_places(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", "/elsewhere", *sys.path])
    places = child_environment()["PYTHONPATH"].split(os.pathsep)
    assert places[:2] == [str(tmp_path), "/elsewhere"]


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_stream_is_no_place_for_a_file(closed, tmp_path):
    code = (
        "import sys; from brx.environment import fill_standard_descriptors as fill; "
        "fill(); file = open(sys.argv[1], 'w'); print(file.fileno(), file=file)"
    )
    subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", code, tmp_path / "file"],
        env=child_environment(),
        check=True,
    )
    assert int((tmp_path / "file").read_text()) > 2


def test_empty_variable_is_none(monkeypatch):
    monkeypatch.setenv("RANK", "")
    assert whole_number("RANK") is None


@pytest.mark.parametrize("text", ["-1", "1.5", "one", "²"])
def test_variable_that_is_no_number_is_refused(text, monkeypatch):
    monkeypatch.setenv("RANK", text)
    with pytest.raises(UserError, match="RANK: must be a whole number from 0, got"):
        whole_number("RANK")


def test_git_looks_where_it_is_told(monkeypatch):
    monkeypatch.setenv("GIT_DIR", "/elsewhere/.git")
    monkeypatch.setenv("GIT_CONFIG_COUNT", "0")
    ours = environment_for_git()
    assert ("GIT_DIR" in ours, "GIT_CONFIG_COUNT" in ours) == (False, True)


@pytest.mark.parametrize(("length", "expected"), [(71, True), (72, False)])
def test_long_temporary_folder_has_no_room(length, expected, monkeypatch):
    # /pymp-12345678/listener-12345678 makes 32 more; macOS allows 103
    monkeypatch.setattr("tempfile.tempdir", "/" + "t" * (length - 1))
    assert has_room_for_sockets() == expected


@pytest.fixture
def full_disk():
    with open("/dev/full", "w") as stream:
        yield OutputStream(stream)


def test_full_disk_under_a_stream_is_remembered(full_disk):
    print("some text", file=full_disk, flush=True)
    assert full_disk.lost.errno == errno.ENOSPC


def test_stream_without_a_reader_is_no_failure():
    source, target = os.pipe()
    stream = OutputStream(os.fdopen(target, "w"))
    os.close(source)
    print("some text", file=stream, flush=True)
    assert stream.lost.errno == errno.EPIPE


def test_stream_writes_what_it_is_given(tmp_path):
    with (tmp_path / "text").open("w") as file:
        print("some text", file=OutputStream(file), flush=True)
    assert (tmp_path / "text").read_text() == "some text\n"


def test_unbuffered_stream_stays_so(tmp_path):
    path = tmp_path / "log"
    with path.open("wb", buffering=0) as raw:
        stream = OutputStream(io.TextIOWrapper(raw, write_through=True))
        print("a cell is done", file=stream)
        assert path.read_text() == "a cell is done\n"


def test_result_that_cannot_be_written_is_a_failure(full_disk):
    command = brx_command("config", "show", "quick")
    ended = subprocess.run(command, stdout=full_disk, stderr=subprocess.PIPE, text=True)
    assert (ended.returncode, ended.stderr) == (
        1,
        "brx: standard output: No space left on device\n",
    )


def test_collections_are_rarer_within():
    usual = gc.get_threshold()[0]
    with rare_collections():
        assert gc.get_threshold()[0] == 100 * usual


def test_collections_are_as_before_after_an_error():
    before = gc.get_threshold()
    with pytest.raises(UserError), rare_collections():
        raise UserError("a damaged run")
    assert gc.get_threshold() == before


@pytest.mark.skipif(sys.platform != "linux", reason="needs sched_setaffinity")
def test_cores_are_those_that_the_process_may_use():
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert num_cores() == 1
    finally:
        os.sched_setaffinity(0, before)
