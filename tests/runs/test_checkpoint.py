"""Checkpoints: complete or absent, whatever fails on the way; what a run continues from, and what
is refused."""

import errno
import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

from brx.cli.main import main
from brx.config.loading import dump_config
from brx.errors import RunError, UserError
from brx.pipeline.world import World
from brx.runs import checkpoint
from brx.runs.checkpoint import (
    _digest,
    check_request,
    iteration_of,
    list_checkpoints,
    read_manifest,
)
from brx.runs.folder import RunFolder
from brx.train.loop import Trainer, train
from tests.train.helpers import losses, tiny_config


def write(run, iteration, value, keep=1):
    """A checkpoint of one stage that holds `value`."""
    entry = checkpoint.write_stage(run, iteration, 0, {"value": value})
    content = {
        "fingerprint": "f",
        "trajectory_version": 1,
        "settings": {},
        "num_stages": 1,
        "training_seconds": 1.0,
    }
    checkpoint.finish(run, iteration, content, [entry], keep)


def values(run):
    """What the checkpoints hold, by the names of their folders."""
    return {
        p.name: checkpoint.read_stage(p, 0, torch.device("cpu"))["value"]
        for p in checkpoint.list_checkpoints(run)
    }


@pytest.fixture
def disk(monkeypatch):
    """What a disk is told: each file or folder (by inode) that is synced, or gets another name."""
    told = []
    sync, rename, replace = os.fsync, os.rename, os.replace

    def synced(descriptor):
        told.append(("synced", os.fstat(descriptor).st_ino))
        sync(descriptor)

    def moved_by(move):
        def moved(source, target):
            told.append(("moved", os.stat(source).st_ino))
            move(source, target)

        return moved

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", moved_by(rename))
    monkeypatch.setattr(os, "replace", moved_by(replace))
    return told


def test_checkpoint_gets_its_name_when_all_of_it_is_on_the_disk(disk, tmp_path):
    write(tmp_path, 7, "new")
    folder = checkpoint.checkpoint_folder(tmp_path, 7)
    number = folder.stat().st_ino
    named = disk.index(("moved", number))
    files = sorted(folder.iterdir())
    assert [path.name for path in files] == ["manifest.json", "stage-000.pt"]
    for path in files:
        in_place = disk.index(("moved", path.stat().st_ino))
        assert disk.index(("synced", path.stat().st_ino)) < in_place < named
        assert ("synced", number) in disk[in_place:named]  # the file's name, too
    assert ("synced", folder.parent.stat().st_ino) in disk[named:]


def test_damaged_stage_is_refused(tmp_path):
    write(tmp_path, 7, "a" * 1000)
    stage = checkpoint.checkpoint_folder(tmp_path, 7) / "stage-000.pt"
    content = bytearray(stage.read_bytes())
    content[content.index(b"a" * 1000)] ^= 1
    stage.write_bytes(content)
    with pytest.raises(UserError, match="its SHA-256 is not the manifest's"):
        values(tmp_path)


FULL = OSError(28, "No space left on device")


@pytest.fixture
def fail(tmp_path, monkeypatch):
    """Writes a second checkpoint, which fails with an error, and gives what is raised."""
    write(tmp_path, 7, "old")

    def write_failing(error):
        def rename(path, target):
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", rename)
            with pytest.raises((RunError, KeyboardInterrupt)) as raised:
                write(tmp_path, 14, "new")
        return raised.value

    return write_failing


@pytest.mark.parametrize("error", [FULL, KeyboardInterrupt()], ids=["full disk", "interrupt"])
def test_failed_checkpoint_leaves_the_last_one(error, fail, tmp_path):
    fail(error)
    assert values(tmp_path) == {"00000007": "old"}


def test_full_disk_is_told(fail):
    assert "No space left on device; what was" in str(fail(FULL))


def test_leftovers_of_a_failed_checkpoint_are_removed(fail, tmp_path):
    fail(FULL)
    checkpoint.recover(tmp_path)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["00000007"]


@pytest.fixture
def three(tmp_path):
    """A run's folder with three checkpoints; a crash has half removed the last one."""
    for iteration in (7, 14, 21):
        write(tmp_path, iteration, "old", keep=3)
    (tmp_path / "checkpoints" / "00000021" / "manifest.json").unlink()
    return tmp_path


def test_later_checkpoints_are_removed(three):
    checkpoint.remove_after(three, 7)
    assert values(three) == {"00000007": "old"}


def test_half_removed_checkpoint_is_written_anew(three):
    write(three, 21, "new", keep=3)
    assert values(three)["00000021"] == "new"


@pytest.mark.parametrize(("stop", "expected"), [(7, [7]), (9, [7, 9])])
def test_stopped_at_a_checkpoint_is_saved_once(stop, expected, tmp_path, monkeypatch):
    trainer = Trainer(tiny_config(tmp_path), RunFolder(tmp_path / "run"), World())
    trainer._after_iteration = lambda: (
        trainer.iteration == stop and signal.raise_signal(signal.SIGINT)
    )
    saved = []
    original = checkpoint.finish
    monkeypatch.setattr(
        checkpoint, "finish", lambda run, t, *rest: (saved.append(t), original(run, t, *rest))
    )
    assert trainer.run(resume=False) == "interrupted"
    assert saved == expected


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run stopped at iteration 20 of 30, with checkpoints at 14 and 20."""
    folder = tmp_path_factory.mktemp("trained")
    assert train(tiny_config(folder, "training.stop_after=20"), folder / "run") == "finished"
    return folder / "run"


@pytest.fixture
def run(trained, tmp_path):
    """The same, of data in another folder."""
    folder = Path(shutil.copytree(trained, tmp_path / "run"))
    (folder / "config.yaml").write_text(
        dump_config(tiny_config(tmp_path, "training.stop_after=20"))
    )
    return folder


def content_of(folder):
    return {
        path: path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), "holds a run; continue it"),
        (
            ("--resume", "--set", "data.tokenizer=gpt2"),
            "data.tokenizer was 'bytes' and is now 'gpt2'",
        ),
        (("--resume", "--set", "training.stop_after=19"), "training.stop_after: 19: the run in"),
        (("--resume", "--set", "training.seed=1"), "training.seed was 0 and is now 1"),
    ],
)
def test_refused_before_data_are_prepared(arguments, expected, run, tmp_path, capsys):
    before = content_of(run)
    assert main(["train", str(run), *arguments]) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert len(error.splitlines()) == 1
    assert content_of(run) == before
    assert not (tmp_path / "data").exists()


def test_run_at_its_stop_is_finished(run, tmp_path):
    before = content_of(run)
    assert train(tiny_config(tmp_path, "training.stop_after=20"), run, resume=True) == "finished"
    assert content_of(run) == before


def test_run_that_was_to_go_on_needs_more(run, tmp_path):
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:-1]))  # without the last validation
    with pytest.raises(UserError, match="has made 20 already; give more"):
        train(tiny_config(tmp_path, "training.stop_after=20"), run, resume=True)


def test_metrics_of_two_writers_are_refused(run, tmp_path):
    text = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(text + text)
    with pytest.raises(UserError, match="two processes have written here"):
        train(tiny_config(tmp_path), run, resume=True)


@pytest.mark.parametrize(
    "missing",
    [["config.yaml"], ["config.yaml", "metrics.jsonl"]],
    ids=["metrics are left", "checkpoints are left"],
)
def test_remains_of_a_run_are_refused(missing, run, tmp_path):
    for name in missing:
        (run / name).unlink()
    with pytest.raises(UserError, match="holds a run"):
        check_request(RunFolder(run), tiny_config(tmp_path), resume=False)


@pytest.mark.parametrize("target", ["a link to gone", "a file"])
def test_checkpoints_on_a_disk_that_is_gone_are_not_forgotten(target, run, tmp_path):
    (run / "summary.json").unlink()  # as after a kill
    shutil.rmtree(run / "checkpoints")
    if target == "a file":
        (run / "checkpoints").touch()
    else:
        (run / "checkpoints").symlink_to("gone")
    before = (run / "metrics.jsonl").read_bytes()
    with pytest.raises(UserError, match=f"checkpoints: is {target}, and no folder is there"):
        train(tiny_config(tmp_path), run, resume=True)
    assert (run / "metrics.jsonl").read_bytes() == before


def test_settings_of_the_checkpoint_count(run, tmp_path):
    """Whatever config.yaml says."""
    other = tiny_config(tmp_path, "optimizer.lr=0.5")
    (run / "config.yaml").write_text(dump_config(other))
    told = r"00000020: optimizer\.lr was 0\.01 and is now 0\.5: it is not a checkpoint"
    with pytest.raises(UserError, match=told):
        train(other, run, resume=True)


@pytest.fixture
def manifest(run):
    """The content of the newest checkpoint's manifest, and a function that writes it back with a
    new check sum, as if an older brx had written it."""
    newest = list_checkpoints(run)[-1]
    content = read_manifest(newest)

    def write():
        (newest / "manifest.json").write_text(json.dumps(content | {"sha256": _digest(content)}))

    return content, write


def test_setting_new_in_brx_is_no_difference(run, manifest, tmp_path):
    content, write = manifest
    assert content["settings"]["training"].pop("clip") == 1.0
    write()
    assert train(tiny_config(tmp_path), run, resume=True) == "finished"


def test_setting_that_decides_no_number_is_no_difference(run, manifest, tmp_path):
    """An older brx counted it, and wrote it into the manifest."""
    content, write = manifest
    content["settings"]["runtime"]["share_gpus"] = False
    write()
    assert train(tiny_config(tmp_path), run, resume=True) == "finished"


def test_a_manifest_that_was_changed_is_refused(run):
    path = list_checkpoints(run)[-1] / "manifest.json"
    text = path.read_text()
    manifest = {**json.loads(text), "fingerprint": 1}
    manifest["sha256"] = _digest({key: value for key, value in manifest.items() if key != "sha256"})
    told = {
        json.dumps(manifest): "was written by another version of brx: fingerprint",
        text.replace('"iteration": 20', '"iteration": 19'): "damaged",
        text.replace("training_seconds", "training_secondz"): "damaged",
        text.replace('"sha256"', '"x"'): "damaged",
    }
    for wrong in (*told, "", "null", "[" * 99999):
        path.write_text(wrong)
        with pytest.raises(UserError) as error:
            read_manifest(path.parent)
        assert f"manifest.json: {told.get(wrong, '')}" in str(error.value)
        assert str(error.value).endswith(f"; remove {path.parent} to resume before it")


def test_other_folder_among_checkpoints_is_left_alone(run, tmp_path):
    copy = run / "checkpoints" / "20 (copy)"
    shutil.copytree(list_checkpoints(run)[-1], copy)
    assert [iteration_of(path) for path in list_checkpoints(run)] == [14, 20]
    assert train(tiny_config(tmp_path), run, resume=True) == "finished"
    assert copy.is_dir()


def test_checkpoint_under_another_name_is_refused(run, tmp_path):
    newest = list_checkpoints(run)[-1]
    newest.rename(newest.with_name("00000019"))
    with pytest.raises(UserError, match="holds iteration 20, but its folder has another name"):
        train(tiny_config(tmp_path), run, resume=True)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (5, "metrics.jsonl: not readable in line 5; continuing from"),
        (18, "00000014 instead of 00000020"),
    ],
    ids=["before the first checkpoint", "after one"],
)
def test_run_continues_after_a_garbled_line(line, said, run, tmp_path, capsys):
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    lines[line - 1] = "[1,2]\n"
    (run / "metrics.jsonl").write_text("".join(lines))
    for stop in (25, 30):  # twice: the line may still be there
        train(tiny_config(tmp_path, f"training.stop_after={stop}"), run, resume=True)
    assert said in capsys.readouterr().err
    train(tiny_config(tmp_path), tmp_path / "straight")
    assert steps(run) == [
        record for record in steps(tmp_path / "straight") if line != 5 or record["iteration"] != 5
    ]


def steps(folder):
    """Without validations: a run that stops has one more."""
    return [record for record in losses(folder) if "train_loss" in record]


@pytest.mark.parametrize("stages", [[0, 1, 1, 2], [0, 1], []])
def test_checkpoint_with_other_stages_is_not_written(stages, tmp_path):
    entries = [{"stage": stage, "bytes": 0, "sha256": ""} for stage in stages]
    with pytest.raises(RunError, match="must have 0 to 2, each once; nothing is written"):
        checkpoint.finish(tmp_path, 7, {"num_stages": 3}, entries, keep=1)
    assert list_checkpoints(tmp_path) == []


def test_file_system_without_fsync_holds_checkpoints(tmp_path, monkeypatch):
    def refuse(descriptor):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "fsync", refuse)
    write(tmp_path, 7, "kept")
    assert values(tmp_path) == {"00000007": "kept"}


@pytest.mark.parametrize("num_bytes", [None, 3], ids=["missing", "cut off"])
def test_stage_on_another_machines_disk_is_told(num_bytes, tmp_path):
    """In a folder that machines do not share, rank 0 has only its own stages."""
    here, there = (checkpoint.write_stage(tmp_path, 7, stage, {}) for stage in (0, 1))
    (file,) = tmp_path.glob("checkpoints/.*/stage-001.pt")
    if num_bytes is None:
        file.unlink()
    else:
        file.write_bytes(b"x" * num_bytes)
    with pytest.raises(RunError, match="written of stage 1; all machines must share the run's"):
        checkpoint.finish(tmp_path, 7, {"num_stages": 2}, [here, there], keep=1)


def test_manifest_is_read_once_for_all_stages(tmp_path, monkeypatch):
    train(tiny_config(tmp_path, "training.iterations=7"), tmp_path / "run")
    reads = []

    def counted(path):
        reads.append(path)
        return read_manifest(path)

    monkeypatch.setattr(checkpoint, "read_manifest", counted)
    newest = list_checkpoints(tmp_path / "run")[-1]
    checkpoint.check_stage_files(newest, range(4))
    assert reads == [newest]
