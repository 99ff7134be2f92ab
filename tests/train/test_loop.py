"""A run: what it writes, that it resumes value for value after any interruption, and how it fails.
Also the test of `Assembly` (brx/train/build.py) and of `RunRecorder`."""

import json
import os
import re
import shutil
import signal
import time
from functools import partial
from unittest.mock import MagicMock, patch

import pytest
import torch
import yaml

from brx.cli.main import main
from brx.config.loading import dump_config, load_config
from brx.config.user_code import allowed
from brx.data.prepare import prepare, token_folder, token_folders
from brx.errors import DivergedError, NeighbourLostError, RunError, UserError
from brx.methods.table import DelayCompensation
from brx.methods.trajectory_version import TRAJECTORY_VERSION
from brx.methods.updater import lr_factor
from brx.pipeline.world import World
from brx.runs import checkpoint
from brx.runs.folder import RunFolder
from brx.runs.metrics import read_metrics
from brx.train.checks import check_head, check_method
from brx.train.loop import Trainer, train
from tests.processes import start_brx
from tests.train.helpers import (
    files_of_at_most,
    losses,
    steps_of,
    tiny_config,
    wait_for_lines,
)

CUSTOM = {"torch.optim:SGD": "{momentum: 0.9}", "pytorch_optimizer:Lion": "{betas: [0.9, 0.99]}"}


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A run of `tiny_config` from its beginning to its end."""
    run = tmp_path_factory.mktemp("straight") / "run"
    assert train(tiny_config(run.parent), run) == "finished"
    return run


@pytest.fixture
def finished(straight, tmp_path):
    """A copy of it that may be spoiled."""
    return shutil.copytree(straight, tmp_path / "run")


def stopping(config, stop):
    """The configuration, to be stopped after an iteration."""
    return config.model_copy(
        update={"training": config.training.model_copy(update={"stop_after": stop})}
    )


def summary_of(run):
    return json.loads((run / "summary.json").read_text())


def names_of_checkpoints(run):
    return [int(path.name) for path in checkpoint.list_checkpoints(run)]


def assert_equal_but_for(found, expected, *extra_validations):
    """The records of a run that was stopped are the other run's, but for a validation at each
    stop."""
    extra = [record for record in losses(found) if record not in losses(expected)]
    assert [record["iteration"] for record in extra] == list(extra_validations)
    assert all("val_loss" in record for record in extra)
    assert [record for record in losses(found) if record not in extra] == losses(expected)


# The run folder


def test_every_iteration_has_a_record(straight):
    assert [step["iteration"] for step in steps_of(straight)] == list(range(1, 31))


def test_record_has_the_documented_keys(straight):
    assert steps_of(straight)[0].keys() == {"iteration", "train_loss", "lr", "grad_norm", "tokens"}


def test_tokens_are_counted(straight):
    assert steps_of(straight)[-1]["tokens"] == 30 * 2 * 16


def test_loss_falls(straight):
    steps = steps_of(straight)
    assert steps[-1]["train_loss"] < steps[0]["train_loss"] - 1


@pytest.mark.parametrize("key", ["stage_grad_norms", "stage_update_norms"])
def test_log_points_have_a_norm_per_stage(straight, key):
    counts = {step["iteration"]: len(step.get(key, [])) for step in steps_of(straight)}
    assert counts == {t: 4 if t % 5 == 0 else 0 for t in range(1, 31)}


def test_norm_of_the_gradient_is_of_all_stages(straight):
    (step,) = [step for step in steps_of(straight) if step["iteration"] == 5]
    of_stages = torch.tensor(step["stage_grad_norms"], dtype=torch.float64)
    assert step["grad_norm"] == pytest.approx(of_stages.norm().item())


def test_seconds_of_training_go_on_after_a_stop(tmp_path):
    for last in (7, 14):
        config = tiny_config(tmp_path, f"training.stop_after={last}")
        train(config, tmp_path / "run", resume=last == 14)
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    seconds = [record["seconds"] for record in records if "seconds" in record]
    assert len(seconds) == 14
    assert seconds == sorted(seconds)


def test_validations_come_when_due(straight):
    validated = [record["iteration"] for record in losses(straight) if "val_loss" in record]
    assert validated == [12, 24, 30]


def test_log_point_has_measured_rates(straight):
    record = list(read_metrics(straight / "metrics.jsonl"))[4]
    assert record.keys() >= {"tokens_per_second", "update_seconds", "peak_memory_bytes"}


def test_run_without_bases_has_no_refresh_time(straight):
    assert "refresh_seconds" not in list(read_metrics(straight / "metrics.jsonl"))[4]


def test_summary_says_how_the_run_ended(straight):
    summary = summary_of(straight)
    assert (summary["status"], summary["iteration"]) == ("finished", 30)


def test_summary_has_the_trajectory_version(straight):
    assert summary_of(straight)["trajectory_version"] == TRAJECTORY_VERSION


def test_summary_has_the_final_loss(straight):
    assert summary_of(straight)["final_train_loss"] == steps_of(straight)[-1]["train_loss"]


def test_summary_has_the_best_validation_loss(straight):
    val_losses = [record["val_loss"] for record in losses(straight) if "val_loss" in record]
    assert summary_of(straight)["best_val_loss"] == min(val_losses)


@pytest.mark.parametrize("rate", ["tokens_per_second", "model_flops_per_second"])
def test_summary_has_rates(straight, rate):
    assert summary_of(straight)[rate] > 0


def test_summary_has_measured_memory_above_the_plan(straight):
    summary = summary_of(straight)
    assert summary["peak_memory_bytes"][0] > summary["planned_memory_bytes"][0] > 0


def test_utilization_of_a_cpu_is_unknown(straight):
    assert summary_of(straight)["mfu"] is None


def test_configuration_reloads_as_it_was(straight):
    assert load_config(straight) == tiny_config(straight.parent)


def test_configuration_is_written_with_defaults(straight):
    written = yaml.safe_load((straight / "config.yaml").read_text())
    assert written["optimizer"]["beta2"] == 0.999


def test_newest_checkpoints_stay(straight):
    assert names_of_checkpoints(straight) == [28, 30]


# Resuming


@pytest.mark.parametrize(
    ("method", "mode"),
    [
        ("pipedream", "{stages: 4}"),
        ("pipedream", "{stages: 4, stash: predict}"),
        ("pipedream-lr", "{stages: 4, accumulation: 3, delay: 2bw, forecast: last-update}"),
        ("nesterov", "{stages: 4, accumulation: 3, delay: 2bw, stash: none}"),
        ("basis-rotation", "{stages: 4, stash: none}"),
        ("delay-compensation", "{stages: 4, accumulation: 3, delay: 2bw, stash: predict}"),
        ("soap", "{stages: 4, accumulation: 2, forecast: average-update}"),
        ("muon", "{stages: 4, delay: 2bw, error_feedback: 1}"),
        *((method, "{stages: 4}") for method in ("muon", "scion", *CUSTOM)),
    ],
)
def test_resumed_run_equals_uninterrupted(method, mode, tmp_path):
    lr = 0.001 if method == "scion" else 0.01
    arguments = [f"optimizer.arguments={CUSTOM[method]}"] if method in CUSTOM else []
    settings = [
        f"optimizer.method={method}",
        f"optimizer.lr={lr}",
        f"pipeline={mode}",
        "training.iterations=23",
    ]
    config = tiny_config(tmp_path, *settings, *arguments)
    train(config, tmp_path / "whole")
    for stop in (3, 21, None):
        train(stopping(config, stop), tmp_path / "stopped", resume=True)
    assert_equal_but_for(tmp_path / "stopped", tmp_path / "whole", 3, 21)
    assert steps_of(tmp_path / "whole")[-1]["tokens"] == 23 * config.pipeline.accumulation * 2 * 16


def test_failed_decompositions_are_counted_in_the_metrics(tmp_path, monkeypatch):
    # Where eigh fails, singular vectors are taken.
    for name in ("eigh", "svd"):
        failing = MagicMock(side_effect=torch.linalg.LinAlgError("no"))
        monkeypatch.setattr(torch.linalg, name, failing)
    train(
        tiny_config(tmp_path, "optimizer.method=basis-rotation", "training.iterations=10"),
        tmp_path / "run",
    )
    counts = {
        record["iteration"]: record.get("failed_refreshes") for record in steps_of(tmp_path / "run")
    }
    # At update 2 only: both sides of 6 matrices in each of 4 blocks. Later refreshes need no
    # decomposition.
    assert [counts[iteration] for iteration in (4, 5, 10)] == [None, 48, 48]


@pytest.mark.parametrize(
    ("kill_at", "accumulation"),
    [(28, []), (5, ["pipeline.accumulation=2", "pipeline.delay=3", "pipeline.stash=predict"])],
)
def test_killed_run_resumes_exactly(kill_at, accumulation, tmp_path):
    config = tiny_config(
        tmp_path, "optimizer.method=basis-rotation", "training.log_every=1", *accumulation
    )
    train(config, tmp_path / "straight")
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(config))
    run = tmp_path / "killed"
    process = start_brx("train", path, "--out", run)
    wait_for_lines(run / "metrics.jsonl", kill_at, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    # Whatever a crash can leave behind: a cut line, and a checkpoint half written.
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 99, "train_')
    (run / "checkpoints" / ".00000099.tmp").mkdir(parents=True)
    train(config, run, resume=True)
    assert losses(run) == losses(tmp_path / "straight")
    assert not list((run / "checkpoints").glob(".*"))


def test_metrics_are_on_disk_before_a_checkpoint_is(tmp_path, monkeypatch):
    path, synced, unsynced = tmp_path / "run" / "metrics.jsonl", {}, []
    fsync, finish = os.fsync, checkpoint.finish

    def watched_fsync(descriptor):
        fsync(descriptor)
        synced[os.fstat(descriptor).st_ino] = os.fstat(descriptor).st_size

    def watched_finish(*arguments):
        unsynced.append(path.stat().st_size - synced.get(path.stat().st_ino, 0))
        return finish(*arguments)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(checkpoint, "finish", watched_finish)
    in_turn = "checkpoint.background=false"  # else the next iterations are written meanwhile
    train(tiny_config(tmp_path, "training.iterations=9", in_turn), tmp_path / "run")
    assert unsynced == [0] * 2


@pytest.fixture(scope="module")
def chosen(tmp_path_factory):
    """A configuration with checkpoints at chosen iterations, and its run, stopped at 10 and 23."""
    folder = tmp_path_factory.mktemp("chosen")
    config = tiny_config(folder, "training.keep_checkpoints=1", "training.keep_at=[3, 14, 25]")
    for stop_after in (10, 23):
        train(stopping(config, stop_after), folder / "run", resume=True)
    return config, folder / "run"


@pytest.fixture
def resumed(chosen, tmp_path):
    """A copy of that run, trained to its end with iteration 3 no longer among the chosen ones."""
    config, run = chosen
    shutil.copytree(run, tmp_path / "run")
    fewer = config.training.model_copy(update={"keep_at": [14, 25]})
    train(config.model_copy(update={"training": fewer}), tmp_path / "run", resume=True)
    return tmp_path / "run"


def test_checkpoints_at_chosen_iterations_are_kept(chosen):
    assert names_of_checkpoints(chosen[1]) == [3, 14, 23]


def test_checkpoint_no_longer_asked_for_is_dropped(resumed):
    # 25 is no multiple of checkpoint_every.
    assert names_of_checkpoints(resumed) == [14, 25, 30]


def test_chosen_checkpoints_change_no_loss(resumed, straight):
    assert_equal_but_for(resumed, straight, 10, 23)


def cut(run, num_lines):
    """Keep the first lines of the metrics, as a power cut may."""
    path = run / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:num_lines]))


ITERATIONS_LOST = ["training.keep_checkpoints=9"]
VALIDATION_LOST = ["training.checkpoint_every=12", "training.stop_after=24"]


@pytest.mark.parametrize(
    ("overrides", "num_lines", "expected"),
    [(ITERATIONS_LOST, 8, "00000007"), (VALIDATION_LOST, 25, "00000012")],
)
def test_metrics_cut_short_are_written_again(
    overrides, num_lines, expected, tmp_path, capsys, straight
):
    run = tmp_path / "run"
    train(tiny_config(tmp_path, *overrides), run)
    cut(run, num_lines)
    # With room for one checkpoint. Later ones are of no use before their metrics; they must not
    # drive out the one that counts.
    keep_one = ["training.keep_checkpoints=1", "training.stop_after=13"]
    train(tiny_config(tmp_path, *keep_one), run, resume=True)
    assert f"continuing from {run}/checkpoints/{expected} instead of" in capsys.readouterr().err
    train(tiny_config(tmp_path), run, resume=True)
    assert_equal_but_for(run, straight, 13)


def test_metrics_before_any_checkpoint_are_refused(finished):
    cut(finished, 2)
    with pytest.raises(
        UserError, match=r"metrics\.jsonl: lacks records after iteration 2, before the first"
    ):
        train(load_config(finished), finished, resume=True)


# Stopping and failing


SLEEPS_IN_UPDATE_12 = """
import os, time
from pathlib import Path
from brx.methods.method import Method

class Sleeps(Method):
    def lr_divisor(self, tau, t, T):
        asleep = Path(__file__).with_name("asleep")
        if t == 12 and os.environ.get("RANK", "0") == "0" and not asleep.exists():
            asleep.write_text("once\\n")
            time.sleep(300)
        return 1.0
"""


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.slow)])
def cut_off(request, tmp_path_factory):
    """A run that a second Ctrl-C ends at once, by number of devices: its configuration, folder and
    output on stderr."""
    folder = tmp_path_factory.mktemp("cut_off")
    (folder / "sleeps.py").write_text(SLEEPS_IN_UPDATE_12)
    config = tiny_config(folder, f"optimizer={{method: '{folder}/sleeps.py:Sleeps', lr: 0.01}}")
    path = folder / "config.yaml"
    path.write_text(dump_config(config))
    process = start_brx("train", path, "--devices", request.param, "--out", folder / "run")
    wait_for_lines(folder / "asleep", 1, process)
    process.send_signal(signal.SIGINT)  # asks for a stop after this iteration, which takes its time
    time.sleep(1)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    return config, folder / "run", stderr


@pytest.mark.parametrize(
    "told", ["cut off at iteration 11", "the newest checkpoint is from iteration 7"]
)
def test_second_signal_says_what_is_saved(cut_off, told):
    assert told in cut_off[2]


def test_second_signal_ends_in_one_line(cut_off):
    assert cut_off[2].splitlines()[-1] == "brx: interrupted"


def test_cut_off_run_resumes_to_the_same_losses(cut_off, tmp_path):
    config, run, _ = cut_off
    train(config, run, resume=True)
    train(config, tmp_path / "uninterrupted")
    assert losses(run) == losses(tmp_path / "uninterrupted")


def test_finished_run_is_not_overwritten(finished):
    with pytest.raises(UserError, match="holds a run; continue it"):
        train(load_config(finished), finished)


def test_finished_run_takes_no_other_settings(finished):
    config = load_config(finished)
    other = config.optimizer.model_copy(update={"lr": 0.5})
    with pytest.raises(UserError, match=r"optimizer\.lr was 0\.01 and is now 0\.5"):
        train(config.model_copy(update={"optimizer": other}), finished, resume=True)


def test_resuming_a_finished_run_changes_no_file(finished):
    before = {path: path.read_text() for path in finished.glob("[!.]*.*")}
    assert train(load_config(finished), finished, resume=True) == "finished"
    assert {path: path.read_text() for path in before} == before


@pytest.fixture
def trained_again(finished):
    """A finished run that has lost its last checkpoint and trained its end again; and its summary
    before."""
    before = summary_of(finished)
    shutil.rmtree(finished / "checkpoints" / "00000030")
    train(load_config(finished), finished, resume=True)
    return finished, before


def test_end_trained_again_has_its_own_rate(trained_again):
    run, before = trained_again
    assert summary_of(run)["tokens_per_second"] not in (0, before["tokens_per_second"])


def test_end_trained_again_has_the_same_loss(trained_again):
    run, before = trained_again
    assert summary_of(run)["final_val_loss"] == before["final_val_loss"]


@pytest.fixture
def explode(monkeypatch):
    """Let the learning rate of one update be absurd; of none: as it should be."""
    name = "brx.methods.updater.lr_factor"
    return lambda at: monkeypatch.setattr(
        name, lambda t, training: 1e30 if t == at else lr_factor(t, training)
    )


@pytest.fixture
def diverged(tmp_path, explode):
    """A run that diverges after update 17."""
    explode(17)
    with pytest.raises(
        RunError, match=r"iteration 1[89]: the (loss is|gradient norm of stage \d is) (nan|inf)"
    ):
        train(tiny_config(tmp_path), tmp_path / "run")
    explode(None)
    return tmp_path / "run"


def test_diverged_run_saves_nothing_after_its_failure(diverged):
    assert names_of_checkpoints(diverged) == [7, 14]


def test_summary_says_where_a_run_diverged(diverged):
    summary = summary_of(diverged)
    assert summary["status"] == "diverged"
    assert "iteration 1" in summary["error"]


def test_training_seconds_of_a_diverged_run_count(diverged):
    records = read_metrics(diverged / "metrics.jsonl")
    latest = max(record["seconds"] for record in records if "seconds" in record)
    assert summary_of(diverged)["training_seconds"] >= latest


def test_diverged_run_resumes_from_before_its_failure(diverged, tmp_path, straight):
    assert train(tiny_config(tmp_path), diverged, resume=True) == "finished"
    assert losses(diverged) == losses(straight)


def test_bad_gradient_in_basis_rotation_is_a_divergence(tmp_path, monkeypatch, explode):
    """On a GPU, where the engine does not look at every update's losses and norms."""
    monkeypatch.setattr("brx.optim.gradient_guard.ASYNCHRONOUS_DEVICES", ("cpu",))
    monkeypatch.setattr("brx.pipeline.engine.check_finite", lambda *arguments: None)
    explode(17)
    config = tiny_config(
        tmp_path,
        "optimizer.method=basis-rotation",
        "optimizer.frequency=1",
        "training.log_every=100",
    )
    with pytest.raises(DivergedError, match=r"iteration 1[89]: .* NaN"):
        train(config, tmp_path / "run")
    assert summary_of(tmp_path / "run")["status"] == "diverged"


def test_losses_before_a_failure_are_written(tmp_path, explode):
    explode(4)
    # Before the first log point, and before the first checkpoint.
    with pytest.raises(RunError, match=r"iteration [5-7]:") as failure:
        train(tiny_config(tmp_path, "training.log_every=100"), tmp_path / "run")
    failed = int(re.search(r"iteration (\d)", str(failure.value))[1])
    assert [record["iteration"] for record in losses(tmp_path / "run")] == list(range(1, failed))


def flip(path):
    """Change a bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_damaged_newest_checkpoint_falls_back(finished, straight, capsys):
    flip(finished / "checkpoints" / "00000030" / "stage-002.pt")
    assert train(load_config(finished), finished, resume=True) == "finished"
    older = finished / "checkpoints" / "00000028"
    said = f"stage-002.pt: damaged (its SHA-256 is not the manifest's); continuing from {older}"
    assert said in capsys.readouterr().err
    assert losses(finished) == losses(straight)


def test_damaged_manifest_falls_back(finished, straight, capsys):
    flip(finished / "checkpoints" / "00000030" / "manifest.json")
    assert train(load_config(finished), finished, resume=True) == "finished"
    assert f"; continuing from {finished}/checkpoints/00000028" in capsys.readouterr().err
    assert losses(finished) == losses(straight)


def test_missing_stage_falls_back(finished, capsys):
    (finished / "checkpoints" / "00000030" / "stage-002.pt").unlink()
    assert train(load_config(finished), finished, resume=True) == "finished"
    assert "the checkpoint lacks stage 2; continuing from" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["stage-002.pt", "manifest.json"])
def test_run_whose_checkpoints_are_all_damaged_is_refused(name, finished):
    for path in finished.glob(f"checkpoints/*/{name}"):
        flip(path)
    with pytest.raises(UserError, match=r"to resume before it"):
        train(load_config(finished), finished, resume=True)


@pytest.mark.parametrize(
    ("stop", "told"),
    [
        (3, "all 3 iterations are done already, up to training.stop_after; --set training.stop"),
        (None, "all 30 iterations are done already\n"),
    ],
)
def test_resumed_run_without_iterations_left_says_so(stop, told, tmp_path, capsys):
    config = stopping(tiny_config(tmp_path), stop)
    train(config, tmp_path / "run")
    assert "done already" not in capsys.readouterr().err
    train(config, tmp_path / "run", resume=True)
    assert told in capsys.readouterr().err


@pytest.fixture
def stopped(tmp_path):
    """The folder of a run that was stopped after iteration 3."""
    train(tiny_config(tmp_path, "training.stop_after=3"), tmp_path / "run")
    return tmp_path / "run"


def test_another_trajectory_version_is_not_resumed(stopped, tmp_path, monkeypatch):
    newer = TRAJECTORY_VERSION + 1
    monkeypatch.setattr("brx.methods.trajectory_version.TRAJECTORY_VERSION", newer)
    told = f"00000003: trained at trajectory version {TRAJECTORY_VERSION}, this brx"
    with pytest.raises(UserError, match=told):
        train(tiny_config(tmp_path), stopped, resume=True)


def change_text(tmp_path):
    (tmp_path / "text.txt").write_text("\n".join(f"other text {number}" for number in range(20000)))


def remove_tokens(tmp_path):
    for folder in token_folders(tmp_path / "data"):
        shutil.rmtree(folder)


def test_run_whose_text_has_changed_goes_on_with_its_tokens(stopped, tmp_path, capsys):
    change_text(tmp_path)
    train(tiny_config(tmp_path), stopped, resume=True)
    assert "has changed; the run goes on with the token files" in capsys.readouterr().err
    whole = tmp_path / "whole"
    whole.mkdir()
    train(tiny_config(whole), whole / "run")
    assert steps_of(stopped) == steps_of(whole / "run")


def test_run_on_other_data_is_not_resumed(stopped, tmp_path):
    change_text(tmp_path)
    remove_tokens(tmp_path)
    with pytest.raises(UserError, match="was trained on other data"):
        train(tiny_config(tmp_path), stopped, resume=True)


def test_run_that_lost_its_checkpoints_does_not_begin_again(stopped, tmp_path):
    before = (stopped / "metrics.jsonl").read_text()
    shutil.rmtree(stopped / "checkpoints")
    with pytest.raises(UserError, match="made 3 iterations, but no checkpoint is there"):
        train(tiny_config(tmp_path), stopped, resume=True)
    assert (stopped / "metrics.jsonl").read_text() == before


def test_run_killed_before_its_first_checkpoint_says_that_it_begins_again(
    stopped, tmp_path, capsys
):
    shutil.rmtree(stopped / "checkpoints")
    (stopped / "summary.json").unlink()
    train(tiny_config(tmp_path), stopped, resume=True)
    assert "has no checkpoint; it begins at iteration 1 again" in capsys.readouterr().err
    assert [record["iteration"] for record in steps_of(stopped)] == [*range(1, 31)]


def test_refused_resume_leaves_the_metrics(stopped, tmp_path):
    before = (stopped / "metrics.jsonl").read_text()
    change_text(tmp_path)
    remove_tokens(tmp_path)
    with pytest.raises(UserError, match="was trained on other data"):
        train(tiny_config(tmp_path), stopped, resume=True)
    assert (stopped / "metrics.jsonl").read_text() == before


TOO_MUCH = {
    "training.iterations=100000": r"epochs; allow it with data\.max_epochs=",
    "training.validation_examples=99999999999": r"training\.validation_examples: must be at most",
}


@pytest.mark.parametrize("setting", TOO_MUCH)
def test_more_than_the_data_have_is_refused(setting, tmp_path):
    with pytest.raises(UserError, match=TOO_MUCH[setting]):
        train(tiny_config(tmp_path, setting), tmp_path / "run")


def test_refused_run_leaves_no_folder(tmp_path):
    with pytest.raises(UserError, match=r"data\.max_epochs"):
        train(tiny_config(tmp_path, "training.iterations=100000"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot be written"):
        train(tiny_config(tmp_path), tmp_path / "file" / "run")


IN_BF16 = ["runtime.precision=bf16"]
IN_CHUNKS = ["data.tokenizer=gpt2", "training.batch_size=50"]
OVERWRITTEN = {
    "none": (IN_BF16, "runtime.precision: fp32"),
    "predict": (IN_CHUNKS, "at most 33,554,432 logits per micro-batch"),
}
"""By stash mode: settings with which the head's backward pass would compute with copies of its
weights, and what would be right."""


@pytest.mark.parametrize("stash", OVERWRITTEN)
def test_head_that_keeps_overwritten_weights_is_refused(stash, tmp_path):
    settings, needed = OVERWRITTEN[stash]
    config = tiny_config(tmp_path, f"pipeline.stash={stash}", "pipeline.delay=3", *settings)
    with pytest.raises(UserError, match=f"with a delay of 3 at the last stage needs {needed}"):
        train(config, tmp_path / "run")
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("stash", OVERWRITTEN)
def test_head_without_delay_is_allowed(stash, tmp_path):
    settings, _ = OVERWRITTEN[stash]
    check_head(tiny_config(tmp_path, f"pipeline.stash={stash}", *settings))


@pytest.mark.parametrize("settings", [IN_BF16, IN_CHUNKS])
def test_head_with_stashed_weights_is_allowed(settings, tmp_path):
    check_head(tiny_config(tmp_path, "pipeline.delay=3", *settings))


@pytest.mark.parametrize("stash", OVERWRITTEN)
def test_head_that_computes_with_its_weights_is_allowed(stash, tmp_path):
    check_head(tiny_config(tmp_path, f"pipeline.stash={stash}", "pipeline.delay=3"))


def test_full_disk_is_one_clear_line(tmp_path, capsys):
    config = tiny_config(tmp_path, "training.checkpoint_every=3")
    prepare(config.data)
    path = tmp_path / "tiny.yaml"
    path.write_text(dump_config(config))
    with files_of_at_most(4000):  # config and metrics fit, a checkpoint does not
        assert main(["train", str(path), "--out", str(tmp_path / "run")]) == 1
    told = capsys.readouterr().err.splitlines()[-1]
    assert re.fullmatch(r"brx: .*stage-000\.pt: cannot be written: .*", told)
    assert names_of_checkpoints(tmp_path / "run") == []


@pytest.mark.parametrize("stash", ["exact", "predict"])
def test_delay_compensation_gets_unrounded_weights(stash, tmp_path, monkeypatch):
    watch = MagicMock()
    monkeypatch.setattr(DelayCompensation, "correct_gradients", watch)
    settings = ["runtime.precision=bf16", f"pipeline.stash={stash}", "training.iterations=3"]
    train(tiny_config(tmp_path, "optimizer.method=delay-compensation", *settings), tmp_path / "run")
    dtypes = set()
    for call in watch.call_args_list:
        dtypes |= {weight.dtype for weight in call.args[2]}
    assert dtypes == {torch.float32}


def test_tensorboard_gets_the_metrics(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = tmp_path / "run"
    train(tiny_config(tmp_path, "logging.tensorboard=true", "training.iterations=5"), run)
    events = accumulator.EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    assert len(events.Scalars("train_loss")) == 5
    assert "stage_grad_norms/stage_003" in events.Tags()["scalars"]


@pytest.fixture(scope="module")
def ranges(tmp_path_factory):
    """The names of the ranges in a profile of 14 iterations."""
    folder = tmp_path_factory.mktemp("profiled")
    train(tiny_config(folder, "training.iterations=14"), folder / "run", profile=True)
    trace = json.loads((folder / "run" / "profile" / "rank-0.json").read_text())
    return {event.get("name") for event in trace["traceEvents"]}


def test_profile_names_the_actions(ranges):
    assert ranges >= {"0F8", "0B8", "0U8", "0F12"}


def test_profile_names_the_stages(ranges):
    assert ranges >= {"stage 0", "stage 3"}


def test_profile_ends_after_five_iterations(ranges):
    assert "0F13" not in ranges


@pytest.fixture
def dynamo():
    """The counters of torch.compile, which begins anew."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return torch._dynamo.utils.counters


COMPILED = ("model.blocks=3", "pipeline.stages=2", "training.iterations=8")


@pytest.mark.parametrize("what", ["true", "whole"])
@pytest.mark.parametrize(
    ("backend", "stash"),
    [
        # Which weights the passes see is decided before kernels are made, which takes a minute.
        ("aot_eager", "none"),
        pytest.param("inductor", "none", marks=pytest.mark.slow),
        pytest.param("inductor", "exact", marks=pytest.mark.slow),
    ],
)
def test_compiled_passes_give_the_same_losses(what, backend, stash, tmp_path, dynamo):
    # In mode `none` the compiled backward pass has to see the overwritten weights as well.
    losses = []
    for compiles in (what, "false"):
        settings = (*COMPILED, f"pipeline.stash={stash}", f"runtime.compile={compiles}")
        with patch("torch.compile", partial(torch.compile, backend=backend)):
            train(tiny_config(tmp_path, *settings), tmp_path / compiles)
        losses.append([step["train_loss"] for step in steps_of(tmp_path / compiles)])
    compiled, eager = losses
    assert compiled == pytest.approx(eager, rel=1e-5)
    # One for all blocks, with a ring or without, or one for the whole model: in training, in a
    # validation, and in the smaller last batch of a validation.
    assert 1 <= dynamo["stats"]["unique_graphs"] <= 3


@pytest.mark.parametrize(
    ("backend", "what"),
    [
        # That each shape has a graph of its own is also tested in tests/pipeline/test_chain.py.
        ("eager", "whole"),
        pytest.param("inductor", "whole", marks=pytest.mark.slow),
        pytest.param("inductor", "true", marks=pytest.mark.slow),
    ],
)
def test_compiled_run_resumes_exactly(backend, what, tmp_path, dynamo):
    every = ("training.validation_every=2", "training.checkpoint_every=4")
    config = tiny_config(tmp_path, *COMPILED, *every, f"runtime.compile={what}")
    with patch("torch.compile", partial(torch.compile, backend=backend)):
        train(config, tmp_path / "straight")
        for stop in (5, None):
            torch._dynamo.reset()  # as in a new process
            train(stopping(config, stop), tmp_path / "stopped", resume=True)
    assert_equal_but_for(tmp_path / "stopped", tmp_path / "straight", 5)


@pytest.mark.parametrize("what", ["true", "whole"])
def test_graphs_of_earlier_runs_do_not_count(what, tmp_path, dynamo):
    settings = (*COMPILED, f"runtime.compile={what}")
    # Graphs that are counted like others, but not turned into kernels, which takes long.
    quick = patch("torch.compile", partial(torch.compile, backend="eager"))
    strict = torch._dynamo.config.patch(recompile_limit=3, fail_on_recompile_limit_hit=True)
    with quick, strict:
        for width in (16, 32):
            train(tiny_config(tmp_path, *settings, f"model.width={width}"), tmp_path / str(width))
    assert dynamo["stats"]["unique_graphs"] > 3


LATE = """
from torch.optim import AdamW

class Late(AdamW):
    calls = 0
    def step(self, closure=None):
        self.calls += 1
        assert self.calls < 4
        super().step()
"""


ALL_WEIGHTS = "[weight for group in self.param_groups for weight in group['params']]"
ALL_STAGES = "the parameters of all stages"
# As D-adaptation: the sixth step is the first whose size depends on all weights.
LEARNS_LATE = """state = self.state[weight]
            state["count"] = state.get("count", 0) + 1
            weight.grad *= state["count"] < 6 or sum(other.abs().sum() for other in weights)"""
# As AdamS. If gradients were as large as weights, this decay would be too small to be seen.
SMALL_DECAY = "weight *= 1 - 1e-6 / torch.stack([w.grad.abs().mean() for w in weights]).mean()"
# As clipping by the norm of the whole gradient.
LIMIT = "weight.grad /= max(50.0, sum(other.grad.norm() for other in weights))"
DEPENDS_ON_DEVICES = [
    ("random numbers", "weight.grad += 1e-4 * torch.randn_like(weight)"),
    (ALL_STAGES, "weight.grad /= sum(other.abs().sum() for other in weights)"),
    (ALL_STAGES, LEARNS_LATE),
    (ALL_STAGES, SMALL_DECAY),
    (ALL_STAGES, LIMIT),
]


def method_for_two_devices(folder, change):
    """A run with an optimizer that first changes the gradient of each weight."""
    (folder / "own.py").write_text(
        f"""
import torch

class Own(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        weights = {ALL_WEIGHTS}
        for weight in weights:
            {change}
        super().step()
"""
    )
    method = f"optimizer={{method: '{folder}/own.py:Own'}}"
    return tiny_config(folder, method, "pipeline.devices=2")


@pytest.mark.parametrize(("why", "change"), DEPENDS_ON_DEVICES)
def test_method_that_depends_on_the_number_of_devices_is_refused(why, change, tmp_path):
    config = method_for_two_devices(tmp_path, change)
    with (
        allowed(),
        pytest.raises(UserError, match=f"own.py:Own: computes with {why}.*devices to 1"),
    ):
        check_method(config, torch.device("cpu"))


def test_optimizer_that_learns_one_step_size_for_all_stages_is_refused_on_several_devices(tmp_path):
    pytest.importorskip("pytorch_optimizer")
    method = "optimizer={method: 'pytorch_optimizer:Prodigy', lr: 1.0}"
    config = tiny_config(tmp_path, method, "pipeline.devices=2")
    with allowed(), pytest.raises(UserError, match="Prodigy: computes with the parameters of all"):
        check_method(config, torch.device("cpu"))


def test_method_that_looks_at_each_weight_alone_runs_on_several_devices(tmp_path):
    config = method_for_two_devices(tmp_path, "weight.grad /= weight.grad.norm()")
    with allowed():
        check_method(config, torch.device("cpu"))


def test_run_ends_with_the_divergence_that_was_announced_first(tmp_path):
    """By another rank, of one of its own stages; summary.json says the same."""
    world, first = World(), "iteration 1: the gradient norm of stage 7 is nan"
    world.announce("diverged", first)
    config = tiny_config(tmp_path, "optimizer.lr=1e30", "training.warmup_fraction=0.0")
    trainer = Trainer(config, RunFolder(tmp_path / "run"), world)
    with pytest.raises(DivergedError, match=first):
        trainer.run(resume=False)
    assert summary_of(tmp_path / "run")["error"] == first


class MuteWorld(World):
    """A process that can hear no announcements any more, as when the launcher is gone."""

    is_mute = False

    def announced(self, topic):
        if self.is_mute:
            raise NeighbourLostError("the launcher", "closed its connection")
        return super().announced(topic)


def test_summary_of_a_run_that_has_lost_its_launcher_says_so(tmp_path):
    world = MuteWorld()
    trainer = Trainer(tiny_config(tmp_path), RunFolder(tmp_path / "run"), world)
    trainer._after_iteration = lambda: setattr(world, "is_mute", trainer.iteration == 5)
    with pytest.raises(RunError, match="the launcher closed its connection"):
        trainer.run(resume=False)
    summary = summary_of(tmp_path / "run")
    assert summary["status"] == "failed"
    assert summary["error"] == "the launcher closed its connection"


def test_custom_step_that_fails_in_a_trial(tmp_path):
    config = tiny_config(tmp_path, "optimizer={method: 'torch.optim:SparseAdam'}")
    told = r"torch.optim:SparseAdam: iteration 1: its step: .* \(in a trial on a small"
    with pytest.raises(UserError, match=told):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_custom_step_that_exits_fails_the_run(tmp_path):
    """It would end the process with exit code 0, as if the run were finished."""
    (tmp_path / "late.py").write_text(
        LATE.replace("assert self.calls < 4", "self.calls < 4 or exit(0)")
    )
    config = tiny_config(tmp_path, f"optimizer={{method: '{tmp_path}/late.py:Late'}}")
    with pytest.raises(RunError, match=r"iteration 4: its step: .*late\.py:8: SystemExit: 0"):
        train(config, tmp_path / "run")
    assert summary_of(tmp_path / "run")["status"] == "failed"


def test_custom_step_that_fails_later(tmp_path):
    (tmp_path / "late.py").write_text(LATE)
    config = tiny_config(tmp_path, f"optimizer={{method: '{tmp_path}/late.py:Late'}}")
    told = r"late.py:Late: iteration 4: its step: .*late.py:8: AssertionError"
    with pytest.raises(RunError, match=told):
        train(config, tmp_path / "run")
    assert summary_of(tmp_path / "run")["status"] == "failed"


def test_closed_output_does_not_end_a_run(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(tiny_config(tmp_path)))
    source, target = os.pipe()
    with os.fdopen(target, "w") as pipe:
        process = start_brx("train", path, "--out", tmp_path / "run", output=pipe, errors=pipe)
    os.close(source)  # `2>&1 | head -0`
    assert process.wait(300) == 0
    assert summary_of(tmp_path / "run")["status"] == "finished"


@pytest.fixture
def rotten(tmp_path):
    """The configuration of a run whose token file rots on its disk: one bit flips, and nothing that
    the file system notes about the file changes."""
    config = tiny_config(tmp_path, "training.stop_after=1")
    path = token_folder(config.data) / "train.bin"
    prepare(config.data)
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    stat = path.stat()
    state = (stat.st_size, stat.st_mtime_ns, stat.st_ino, stat.st_ctime_ns)
    noted = path.with_suffix(".verified")
    noted.write_text(" ".join([*map(str, state), noted.read_text().split()[-1]]))
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(config))
    return file


def test_file_that_looks_unchanged_is_not_read(rotten, printed):
    printed("train", rotten, "--out", rotten.parent / "run")


def test_verify_finds_a_flipped_bit(rotten, refused):
    told = refused("train", rotten, "--out", rotten.parent / "run", "--verify")
    assert "train.bin: its SHA-256 differs from the one in its sidecar" in told


def test_run_goes_on_without_its_text(tmp_path):
    run = tmp_path / "run"
    train(tiny_config(tmp_path, "training.stop_after=7"), run)
    config = tiny_config(tmp_path, "training.stop_after=9")
    (tmp_path / "text.txt").unlink()
    assert train(config, run, resume=True) == "finished"


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ("{stages: 4, error_feedback: 1}", "the delay of stage 0 is 3"),
        (
            "{stages: 2, delay: [1, 0], accumulation: 2, error_feedback: 1}",
            "the delay of stage 0 is 0.5",
        ),
    ],
)
def test_error_feedback_needs_delays_of_one_update(settings, found, tmp_path):
    config = tiny_config(tmp_path, f"pipeline={settings}")
    with pytest.raises(UserError, match=rf"^pipeline\.error_feedback: .* {found}; set it to 0"):
        train(config, tmp_path / "run")
    assert not (tmp_path / "data").exists()


def test_error_feedback_changes_the_losses(tmp_path):
    for name, coefficient in (("with", 1.0), ("without", 0.0)):
        pipeline = f"{{stages: 2, delay: 2bw, error_feedback: {coefficient}}}"
        train(tiny_config(tmp_path, f"pipeline={pipeline}"), tmp_path / name)
    assert losses(tmp_path / "with")[:2] == losses(tmp_path / "without")[:2]
    assert losses(tmp_path / "with")[3:] != losses(tmp_path / "without")[3:]
