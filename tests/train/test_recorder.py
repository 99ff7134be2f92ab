"""A summary and a log point without their losses: MFU and refresh times from made-up rates, and the
commit."""

import subprocess

import pytest
import torch

import brx
from brx.config.loading import load_config
from brx.train.recorder import RefreshTime, Utilization, git_commit


def test_utilization_is_a_share_of_all_devices_peaks(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    one = Utilization(load_config("paper-95m"), torch.device("cuda"))
    # 6 per weight of the blocks and the head, and 12 S D of attention for each of 32 blocks.
    assert one.flops_per_token == 6 * (32 * 12 * 384**2 + 50257 * 384) + 32 * 12 * 512 * 384
    assert one.mfu(100_000) == pytest.approx(100_000 * one.flops_per_token / 312e12)
    four = Utilization(load_config("paper-95m", ["pipeline.devices=4"]), torch.device("cuda"))
    assert four.mfu(100_000) == pytest.approx(one.mfu(100_000) / 4)
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
def test_refresh_time_is_the_difference_where_all_stages_refresh_at_once(optimizer, expected):
    times = RefreshTime(load_config("quick", [f"optimizer={{method: {optimizer}}}"]))
    # Up to the first basis, at update 2, there is nothing to refresh.
    for iteration, seconds in [(1, 100.0), (2, 100.0), (4, 1.0)]:
        times.see(iteration, seconds)
    assert times.seconds is None
    for iteration in range(5, 20):
        times.see(iteration, 5.0 if iteration % 3 == 0 else 1.0)
    assert times.seconds == expected


def test_commit_is_that_of_our_own_checkout_and_says_whether_its_code_has_changed(
    tmp_path, monkeypatch
):
    def git(*arguments):
        command = [
            "git",
            "-C",
            str(tmp_path),
            "-c",
            "user.name=x",
            "-c",
            "user.email=x@example.org",
            *arguments,
        ]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    git("init", "--quiet")
    git("commit", "--quiet", "--allow-empty", "--message", "somebody else's")
    (code := tmp_path / "brx" / "__init__.py").parent.mkdir()
    code.write_text("")
    monkeypatch.setattr(brx, "__file__", str(code))
    assert git_commit() is None  # a copy of brx in a checkout that does not know it
    git("add", "brx")
    git("commit", "--quiet", "--message", "ours")
    (tmp_path / "elsewhere.txt").write_text("")  # runs, results: no code
    assert git_commit() == git("rev-parse", "HEAD")
    code.write_text("changed = True\n")
    assert git_commit() == git("rev-parse", "HEAD") + "-dirty"


def test_commit_does_not_depend_on_a_hooks_repository(tmp_path, monkeypatch):
    ours = git_commit()
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere.git"))
    assert git_commit() == ours
