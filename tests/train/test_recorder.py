"""Numbers of summaries and log points, from made-up rates and records; and the commit."""

import json
import subprocess
from pathlib import Path

import pytest
import torch

import brx
from brx.config.loading import load_config
from brx.runs.folder import RunFolder
from brx.train.recorder import RefreshTime, Utilization, git_commit, write_summary


@pytest.fixture
def a100(monkeypatch):
    """CUDA devices are A100s, with a peak of 312 TFLOPs per second in bf16."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    return torch.device("cuda")


def test_model_flops_are_the_closed_form(a100):
    one = Utilization(load_config("paper-95m"), a100)
    # 6 per weight of the blocks and the head, and 12 S D of attention for each of 32 blocks.
    assert one.flops_per_token == 6 * (32 * 12 * 384**2 + 50257 * 384) + 32 * 12 * 512 * 384


def test_utilization_is_a_share_of_the_peak(a100):
    one = Utilization(load_config("paper-95m"), a100)
    assert one.mfu(100_000) == pytest.approx(100_000 * one.flops_per_token / 312e12)


def test_peak_is_of_all_devices(a100):
    one = Utilization(load_config("paper-95m"), a100)
    four = Utilization(load_config("paper-95m", ["pipeline.devices=4"]), a100)
    assert four.mfu(100_000) == pytest.approx(one.mfu(100_000) / 4)


def test_utilization_of_a_cpu_is_unknown():
    assert Utilization(load_config("quick"), torch.device("cpu")).mfu(1000.0) is None


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        ("basis-rotation, frequency: 3", pytest.approx(4.0)),
        ("pipedream", None),
        ("basis-rotation, staggered: true", None),
        ("basis-rotation, refresh_schedule: stage-aware", None),
    ],
)
def test_refresh_time_needs_refreshes_at_one_time(optimizer, expected):
    times = RefreshTime(load_config("quick", [f"optimizer={{method: {optimizer}}}"]))
    # Up to the first basis, at update 2, there is nothing to refresh.
    for iteration, seconds in [(1, 100.0), (2, 100.0), (4, 1.0)]:
        times.add(iteration, seconds)
    assert times.seconds is None
    for iteration in range(5, 20):
        times.add(iteration, 5.0 if iteration % 3 == 0 else 1.0)
    assert times.seconds == expected


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """brx's code lies in a checkout that does not know it; gives `git` there."""

    def git(*arguments):
        identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    git("init", "--quiet")
    git("commit", "--quiet", "--allow-empty", "--message", "somebody else's")
    code = tmp_path / "brx" / "__init__.py"
    code.parent.mkdir()
    code.write_text("")
    monkeypatch.setattr(brx, "__file__", str(code))
    return git


@pytest.fixture
def own_checkout(checkout):
    """brx's code is part of the checkout."""
    checkout("add", "brx")
    checkout("commit", "--quiet", "--message", "ours")
    return checkout


@pytest.mark.usefixtures("checkout")
def test_copy_in_another_checkout_has_no_commit():
    assert git_commit() is None


def test_commit_is_the_checkouts(own_checkout):
    assert git_commit() == own_checkout("rev-parse", "HEAD")


def test_files_elsewhere_do_not_change_the_commit(own_checkout, tmp_path):
    (tmp_path / "elsewhere.txt").write_text("")  # runs, results: no code
    assert git_commit() == own_checkout("rev-parse", "HEAD")


def test_changed_code_is_dirty(own_checkout):
    Path(brx.__file__).write_text("changed = True\n")
    assert git_commit() == own_checkout("rev-parse", "HEAD") + "-dirty"


def test_commit_does_not_depend_on_a_hooks_repository(tmp_path, monkeypatch):
    ours = git_commit()
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere.git"))
    assert git_commit() == ours


@pytest.mark.parametrize(
    ("losses", "final", "best", "best_iteration"),
    [
        ([3.0, 2.0, 2.5], 2.5, 2.0, 20),
        ([3.0, float("nan")], float("nan"), 3.0, 10),
        ([2.0, 2.0], 2.0, 2.0, 10),
        ([], None, None, None),
    ],
    ids=["lowest in between", "not a number", "twice", "none"],
)
def test_summary_tells_when_the_validation_loss_was_lowest(
    losses, final, best, best_iteration, tmp_path
):
    records = []
    for number, loss in enumerate(losses, 1):
        records.append(json.dumps({"iteration": 10 * number, "val_loss": loss}))
    folder = RunFolder(tmp_path)
    folder.metrics.write_text("".join(f"{record}\n" for record in records))
    write_summary(folder, load_config("quick"), "finished", None, 30, "fingerprint")
    summary = folder.read_summary()
    assert summary["final_val_loss"] == pytest.approx(final, nan_ok=True)
    assert (summary["best_val_loss"], summary["best_val_iteration"]) == (best, best_iteration)
