"""Parsed runs are kept next to them: what is read is always what the files say now."""

import os

import numpy as np
import pytest

from brx.runs import cache
from brx.runs.cache import CACHE, read_parsed
from brx.runs.export import export_runs
from brx.runs.frames import load
from tests.runs.helpers import ITERATIONS, write_metrics, write_run


@pytest.fixture(autouse=True)
def old_files(monkeypatch):
    """Files count as settled the moment they are written."""
    monkeypatch.setattr(cache, "SETTLED_S", -60.0)


@pytest.fixture
def run(tmp_path):
    """A run's folder that was read once, and whose parsed content is kept."""
    path = write_run(tmp_path, "a", "optimizer.arguments={}", "optimizer.method=torch.optim:SGD")
    read_parsed(path.path)
    assert (path.path / CACHE).is_file()
    return path.path


@pytest.fixture
def parses(monkeypatch):
    """The folders that were parsed, in order."""
    parsed = []
    parse = cache._parse

    def noted(path):
        parsed.append(path)
        return parse(path)

    monkeypatch.setattr(cache, "_parse", noted)
    return parsed


def assert_equal(one, other):
    assert (one.settings, one.summary) == (other.settings, other.summary)
    for values, others in zip(one.curves, other.curves, strict=True):
        np.testing.assert_array_equal(values, others, strict=True)


def test_unchanged_run_is_parsed_once(run, parses):
    read_parsed(run)
    assert parses == []


def test_kept_content_equals_the_files(run):
    assert_equal(read_parsed(run), cache._parse(run))


def test_rows_are_those_of_parsed_files(run):
    kept = load(run)
    (run / CACHE).unlink()
    assert load(run).equals(kept)


@pytest.mark.parametrize("name", ["config.yaml", "summary.json", "metrics.jsonl", "curves.npz"])
def test_changed_file_is_parsed_again(name, run, parses):
    file = run / name
    file.write_bytes(file.read_bytes() + b"\n" if file.exists() else b"")
    read_parsed(run)
    assert parses == [run]


def test_change_with_the_same_time_is_seen(run):
    file = run / "metrics.jsonl"
    before = file.stat()
    file.write_text(file.read_text().replace('"train_loss": 3.98', '"train_loss": 2.98'))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert read_parsed(run).curves.train_loss[0] == 2.98


def test_change_while_parsing_is_not_kept(run, monkeypatch):
    (run / CACHE).unlink()
    parse = cache._parse

    def interrupted(path):
        parsed = parse(path)
        with (path / "summary.json").open("a") as file:
            file.write("\n")
        return parsed

    monkeypatch.setattr(cache, "_parse", interrupted)
    read_parsed(run)
    assert not (run / CACHE).exists()


def test_file_that_may_still_change_is_not_kept(run, monkeypatch):
    (run / CACHE).unlink()
    monkeypatch.setattr(cache, "SETTLED_S", 60.0)
    read_parsed(run)
    assert not (run / CACHE).exists()


def test_another_parser_reads_again(run, parses, monkeypatch):
    monkeypatch.setattr(cache, "_parser_digest", lambda: "another")
    read_parsed(run)
    assert parses == [run]


def test_damaged_cache_is_no_error(run):
    parsed = cache._parse(run)
    content = (run / CACHE).read_bytes()
    for place in range(0, len(content), len(content) // 60):
        damaged = bytearray(content)
        damaged[place] ^= 0x40
        (run / CACHE).write_bytes(damaged)
        assert_equal(read_parsed(run), parsed)


@pytest.mark.parametrize(
    "content", [b"", b"PAR1", b"?" * 5000, b"{}\n", b"[1]\n", b"[" * 100_000, b"\xff\n"]
)
def test_cache_of_another_format_is_replaced(content, run):
    (run / CACHE).write_bytes(content)
    read_parsed(run)
    assert (run / CACHE).read_bytes().startswith(b'{"key": ')


def test_cache_that_is_a_link_is_left_alone(run, tmp_path, parses):
    target = tmp_path / "elsewhere"
    (run / CACHE).rename(target)
    (run / CACHE).symlink_to(target)
    content = target.read_bytes()
    read_parsed(run)
    assert (parses, target.read_bytes()) == ([run], content)


def test_folder_without_room_is_no_error(run, monkeypatch):
    (run / CACHE).unlink()

    def refuse(path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache, "_replace", refuse)
    assert len(read_parsed(run).curves.iterations) == ITERATIONS


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_read_only_folder_is_no_error(run):
    (run / CACHE).unlink()
    run.chmod(0o555)
    try:
        assert len(read_parsed(run).curves.iterations) == ITERATIONS
    finally:
        run.chmod(0o755)


def test_no_temporary_file_stays(run):
    assert [path.name for path in run.glob(".*")] == [CACHE]


def test_run_that_lacks_iterations_is_told_each_time(run, capsys):
    losses = [4.0 - t / 50 for t in range(1, ITERATIONS + 1)]
    write_metrics(run, losses)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:7] + lines[8:]))
    for _ in range(2):
        read_parsed(run)
        assert "lacks 1 of the 400 iterations" in capsys.readouterr().err


def test_settings_that_json_cannot_hold_are_not_kept(run):
    config = run / "config.yaml"
    (run / CACHE).unlink()
    config.write_text(config.read_text().replace("arguments: {}", "arguments: {1: .nan}"))
    kept = read_parsed(run)
    assert list(kept.settings["optimizer"]["arguments"]) == [1]
    assert not (run / CACHE).exists()


def test_export_leaves_the_cache_out(run, tmp_path):
    export_runs([run], tmp_path / "out")
    assert not (tmp_path / "out" / "a" / CACHE).exists()


def test_cache_of_an_export_holds_no_curves(run, tmp_path, parses):
    export_runs([run], tmp_path / "out")
    exported = tmp_path / "out" / "a"
    parsed = cache._parse(exported)
    parses.clear()
    for _ in range(2):
        assert_equal(read_parsed(exported), parsed)
    assert parses == [exported]
    texts = sum((exported / name).stat().st_size for name in ("config.yaml", "summary.json"))
    assert (exported / CACHE).stat().st_size < texts + 1000  # and its first line


def test_export_replaces_one_with_a_cache(run, tmp_path):
    export_runs([run], tmp_path / "out")
    read_parsed(tmp_path / "out" / "a")
    assert export_runs([run], tmp_path / "out") == (1, 0)


def test_forged_cache_with_another_key_is_not_read(run):
    states = list(cache.file_states(run))
    *others, inode = states[2]  # the inode, which no archive brings along
    states[2] = (*others, inode + 1)
    parsed = cache._parse(run)
    forged = cache.Parsed(parsed.settings, {"status": "diverged"}, parsed.curves)
    cache._write(run, tuple(states), forged)
    assert read_parsed(run).summary["status"] == "finished"


def test_forged_cache_with_the_key_is_read(run):
    parsed = cache._parse(run)
    forged = cache.Parsed(parsed.settings, {"status": "diverged"}, parsed.curves)
    cache._write(run, cache.file_states(run), forged)
    assert read_parsed(run).summary["status"] == "diverged"
