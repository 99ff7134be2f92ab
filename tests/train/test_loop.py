"""A run: what it writes, that it resumes value for value after any interruption, and how it fails.
Also the test of `Assembly` (brx/train/build.py) and of `RunRecorder`."""

import json
import os
import re
import resource
import shutil
import signal
import time
from functools import partial
from unittest.mock import MagicMock

import pytest
import torch
import yaml

from brx.config.loading import dump_config, load_config
from brx.data.prepare import prepare, token_folder
from brx.errors import DivergedError, RunError, UserError
from brx.methods.table import DelayCompensation
from brx.methods.trajectory_version import TRAJECTORY_VERSION
from brx.methods.updater import lr_factor
from brx.runs import checkpoint
from brx.runs.metrics import read_metrics
from brx.train.build import check_head
from brx.train.loop import train
from tests.train.helpers import losses, start_brx, steps_of, tiny_config, wait_for_lines

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
    """A run that was stopped is the other, but for a validation at each stop that is none of the
    other's."""
    extra = [record for record in losses(found) if record not in losses(expected)]
    assert [record["iteration"] for record in extra if "val_loss" in record] == list(
        extra_validations
    )
    assert len(extra) == len(extra_validations)
    assert [record for record in losses(found) if record not in extra] == losses(expected)


def test_run_folder_holds_what_it_should(straight):
    records, steps = losses(straight), steps_of(straight)
    assert [record["iteration"] for record in steps] == list(range(1, 31))
    assert set(steps[0]) == {"iteration", "train_loss", "lr", "grad_norm", "tokens"}
    assert len(steps[4]["stage_grad_norms"]) == len(steps[9]["stage_update_norms"]) == 4
    assert ["stage_update_norms" in step for step in steps] == [
        step["iteration"] % 5 == 0 for step in steps
    ]
    assert steps[-1]["tokens"] == 30 * 2 * 16
    assert [record["iteration"] for record in records if "val_loss" in record] == [12, 24, 30]
    assert steps[-1]["train_loss"] < steps[0]["train_loss"] - 1
    summary = summary_of(straight)
    assert (summary["status"], summary["trajectory_version"]) == ("finished", TRAJECTORY_VERSION)
    assert summary["final_train_loss"] == steps[-1]["train_loss"]
    assert summary["best_val_loss"] == min(
        record["val_loss"] for record in records if "val_loss" in record
    )
    assert min(summary["tokens_per_second"], summary["model_flops_per_second"]) > 0
    assert summary["peak_memory_bytes"][0] > summary["planned_memory_bytes"][0] > 0
    assert summary["mfu"] is None  # the peak of a CPU is not known
    measured = list(read_metrics(straight / "metrics.jsonl"))[4]
    assert measured.keys() >= {"tokens_per_second", "update_seconds", "peak_memory_bytes"}
    assert "refresh_seconds" not in measured
    assert load_config(straight) == tiny_config(straight.parent)
    assert (
        yaml.safe_load((straight / "config.yaml").read_text())["optimizer"]["beta2"] == 0.999
    )  # with defaults
    assert names_of_checkpoints(straight) == [28, 30]


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
        *((method, "{stages: 4}") for method in ("muon", "scion", *CUSTOM)),
    ],
)
def test_stopped_and_resumed_equals_uninterrupted(method, mode, tmp_path):
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


def test_decompositions_that_fail_are_counted_in_the_metrics(tmp_path, monkeypatch):
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
    # At update 2 only: both sides of 6 matrices in each of 4 blocks; later refreshes need no
    #     decomposition.
    assert [counts[iteration] for iteration in (4, 5, 10)] == [None, 48, 48]


@pytest.mark.parametrize(
    ("kill_at", "accumulation"),
    [(28, []), (5, ["pipeline.accumulation=2", "pipeline.delay=3", "pipeline.stash=predict"])],
)
def test_killed_and_resumed_equals_uninterrupted(kill_at, accumulation, tmp_path):
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


def test_checkpoints_at_chosen_iterations_are_kept_and_change_nothing(tmp_path, straight):
    config = tiny_config(tmp_path, "training.keep_checkpoints=1", "training.keep_at=[3, 14, 25]")
    run = tmp_path / "run"
    for stop_after in (10, 23):
        train(stopping(config, stop_after), run, resume=True)
    assert names_of_checkpoints(run) == [3, 14, 23]
    fewer = config.training.model_copy(
        update={"keep_at": [14, 25]}
    )  # 3 is dropped once it is no longer asked for
    train(config.model_copy(update={"training": fewer}), run, resume=True)
    assert names_of_checkpoints(run) == [14, 25, 30]  # 25 is no multiple of checkpoint_every
    assert_equal_but_for(run, straight, 10, 23)


def cut(run, num_lines):
    """Keep the first lines of the metrics, as a power cut may."""
    path = run / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:num_lines]))


@pytest.mark.parametrize(
    ("overrides", "num_lines", "expected"),
    [
        (["training.keep_checkpoints=9"], 8, "00000007"),  # iterations 1-8
        (
            ["training.checkpoint_every=12", "training.stop_after=24"],
            25,
            "00000012",
        ),  # all but the last validation
    ],
)
def test_metrics_cut_short_are_written_again(
    overrides, num_lines, expected, tmp_path, capsys, straight
):
    run = tmp_path / "run"
    train(tiny_config(tmp_path, *overrides), run)
    cut(run, num_lines)
    # With room for one checkpoint: later ones, of no use before their metrics, must not drive out
    #     the one that counts.
    train(
        tiny_config(tmp_path, "training.keep_checkpoints=1", "training.stop_after=13"),
        run,
        resume=True,
    )
    assert f"continuing from {run}/checkpoints/{expected} instead of" in capsys.readouterr().err
    train(tiny_config(tmp_path), run, resume=True)
    assert_equal_but_for(run, straight, 13)
    cut(run, 2)
    with pytest.raises(
        UserError, match=r"metrics\.jsonl: lacks records after iteration 2, before the first"
    ):
        train(tiny_config(tmp_path), run, resume=True)


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


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_second_signal_ends_at_once_and_says_what_is_saved(devices, tmp_path):
    (tmp_path / "sleeps.py").write_text(SLEEPS_IN_UPDATE_12)
    config = tiny_config(tmp_path, f"optimizer={{method: '{tmp_path}/sleeps.py:Sleeps', lr: 0.01}}")
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(config))
    process = start_brx("train", path, "--devices", devices, "--out", tmp_path / "run")
    wait_for_lines(tmp_path / "asleep", 1, process)
    process.send_signal(signal.SIGINT)  # asks for a stop after this iteration, which takes its time
    time.sleep(1)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert "cut off at iteration 11" in stderr
    assert "the newest checkpoint is from iteration 7" in stderr
    assert stderr.splitlines()[-1] == "brx: interrupted"
    train(config, tmp_path / "run", resume=True)
    train(config, tmp_path / "uninterrupted")
    assert losses(tmp_path / "run") == losses(tmp_path / "uninterrupted")


def test_a_finished_run_is_not_overwritten_and_stays_unless_its_last_checkpoint_is_gone(finished):
    config = load_config(finished)
    before = {path: path.read_text() for path in finished.glob("[!.]*.*")}
    with pytest.raises(UserError, match="holds a run; continue it"):
        train(config, finished)
    other = config.optimizer.model_copy(update={"lr": 0.5})
    with pytest.raises(UserError, match=r"optimizer\.lr was 0\.01 and is now 0\.5"):
        train(config.model_copy(update={"optimizer": other}), finished, resume=True)
    assert train(config, finished, resume=True) == "finished"
    assert {path: path.read_text() for path in before} == before
    shutil.rmtree(finished / "checkpoints" / "00000030")
    train(config, finished, resume=True)
    summaries = [json.loads(before[finished / "summary.json"]), summary_of(finished)]
    assert summaries[1]["tokens_per_second"] not in (0, summaries[0]["tokens_per_second"])
    assert summaries[1]["final_val_loss"] == summaries[0]["final_val_loss"]


@pytest.fixture
def explode(monkeypatch):
    """Let the learning rate of one update be absurd; of none: as it should be."""
    name = "brx.methods.updater.lr_factor"
    return lambda at: monkeypatch.setattr(
        name, lambda t, training: 1e30 if t == at else lr_factor(t, training)
    )


def test_loss_that_is_not_finite_stops_the_run(tmp_path, explode, straight):
    config, run = tiny_config(tmp_path), tmp_path / "run"
    explode(17)
    with pytest.raises(
        RunError, match=r"iteration 1[89]: the (loss is|gradient norm of stage \d is) (nan|inf)"
    ):
        train(config, run)
    assert names_of_checkpoints(run) == [7, 14]
    summary = summary_of(run)
    assert summary["status"] == "diverged"
    assert "iteration 1" in summary["error"]
    seconds = [
        record["seconds"] for record in read_metrics(run / "metrics.jsonl") if "seconds" in record
    ]
    assert summary["training_seconds"] >= max(seconds)
    explode(None)  # it resumes from before the failure, as if there had been none
    assert train(config, run, resume=True) == "finished"
    assert losses(run) == losses(straight)


def test_bad_gradient_that_basis_rotation_finds_first_is_a_divergence(
    tmp_path, monkeypatch, explode
):
    """On a GPU, where the engine does not look at every update's losses and norms."""
    monkeypatch.setattr("brx.optim.gradient_guard.ASYNCHRONOUS", ("cpu",))
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


def test_losses_before_a_failure_are_written_although_no_log_point_was_reached(tmp_path, explode):
    explode(4)
    with pytest.raises(
        RunError, match=r"iteration [5-7]:"
    ) as failure:  # before the first checkpoint, too
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


def test_run_on_other_data_is_not_resumed(stopped, tmp_path):
    (tmp_path / "text.txt").write_text("\n".join(f"other text {number}" for number in range(20000)))
    with pytest.raises(UserError, match="was trained on other data"):
        train(tiny_config(tmp_path), stopped, resume=True)


def test_refused_resume_leaves_the_metrics(stopped, tmp_path):
    before = (stopped / "metrics.jsonl").read_text()
    (tmp_path / "text.txt").write_text("\n".join(f"other text {number}" for number in range(20000)))
    with pytest.raises(UserError):
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
    with pytest.raises(UserError):
        train(tiny_config(tmp_path, "training.iterations=100000"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot be written"):
        train(tiny_config(tmp_path), tmp_path / "file" / "run")


@pytest.mark.parametrize(
    ("stash", "settings", "needs"),
    [
        ("none", ["runtime.precision=bf16"], "runtime.precision: fp32"),
        (
            "predict",
            ["data.tokenizer=gpt2", "training.batch_size=50"],
            "at most 33,554,432 logits per micro-batch",
        ),
    ],
)
def test_a_head_that_would_not_see_its_overwritten_weights_is_refused(
    stash, settings, needs, tmp_path
):
    stash, delay = f"pipeline.stash={stash}", "pipeline.delay=3"
    with pytest.raises(UserError, match=f"with a delay of 3 at the last stage needs {needs}"):
        train(tiny_config(tmp_path, stash, delay, *settings), tmp_path / "run")
    assert not (tmp_path / "data").exists()
    check_head(tiny_config(tmp_path, stash, *settings))  # a pipeline's last stage has no delay
    check_head(tiny_config(tmp_path, delay, *settings))  # exact
    check_head(tiny_config(tmp_path, stash, delay))


def test_full_disk_is_one_clear_line(tmp_path, monkeypatch):
    # A limit on the size of files stands in for a full disk: config and metrics fit, a checkpoint
    #     does not.
    config = tiny_config(tmp_path, "training.checkpoint_every=3")
    prepare(config.data)
    path = tmp_path / "tiny.yaml"
    path.write_text(dump_config(config))
    monkeypatch.setenv(
        "PYTHONDONTWRITEBYTECODE", "1"
    )  # or Python caches modules cut to that size, for all to load
    limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (4000, 4000))
    process = start_brx("train", path, "--out", tmp_path / "run", preexec_fn=limit)
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == 1
    assert re.fullmatch(r"brx: .*stage-000\.pt: cannot be written: .*", stderr.splitlines()[-1])
    assert names_of_checkpoints(tmp_path / "run") == []


@pytest.mark.parametrize("stash", ["exact", "predict"])
def test_delay_compensation_takes_no_difference_of_rounded_weights(stash, tmp_path, monkeypatch):
    watch = MagicMock()
    monkeypatch.setattr(DelayCompensation, "correct_gradients", watch)
    settings = ["runtime.precision=bf16", f"pipeline.stash={stash}", "training.iterations=3"]
    train(tiny_config(tmp_path, "optimizer.method=delay-compensation", *settings), tmp_path / "run")
    assert {weight.dtype for call in watch.call_args_list for weight in call.args[2]} == {
        torch.float32
    }


def test_tensorboard_gets_the_metrics_and_a_profile_names_the_actions_and_the_stages(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    train(
        tiny_config(tmp_path, "logging.tensorboard=true", "training.iterations=14"),
        tmp_path / "run",
        profile=True,
    )
    events = accumulator.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert len(events.Scalars("train_loss")) == 14
    assert "stage_grad_norms/stage_003" in events.Tags()["scalars"]
    trace = json.loads((tmp_path / "run" / "profile" / "rank-0.json").read_text())
    names = {event.get("name") for event in trace["traceEvents"]}
    assert {"0F8", "0B8", "0U8", "0F12", "stage 0", "stage 3"} <= names
    assert "0F13" not in names


@pytest.mark.parametrize("stash", [pytest.param("exact", marks=pytest.mark.slow), "none"])
def test_compiled_blocks_give_the_same_losses_from_one_graph_for_all(stash, tmp_path):
    # In mode `none` the compiled backward pass has to see the overwritten weights as well.
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    small = [
        "model.blocks=3",
        "pipeline.stages=2",
        f"pipeline.stash={stash}",
        "training.iterations=8",
    ]
    for compile_blocks in ("true", "false"):
        train(
            tiny_config(tmp_path, *small, f"runtime.compile={compile_blocks}"),
            tmp_path / compile_blocks,
        )
    compiled, eager = (
        [step["train_loss"] for step in steps_of(tmp_path / name)] for name in ("true", "false")
    )
    assert compiled == pytest.approx(eager, rel=1e-5)
    # Of all blocks, with a ring or without: in training, in a validation, in the smaller last batch
    #     of that.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 3


LATE = """
from torch.optim import AdamW

class Late(AdamW):
    calls = 0
    def step(self, closure=None):
        self.calls += 1
        assert self.calls < 4
        super().step()
"""


def test_a_custom_optimizer_whose_step_fails_is_refused_in_a_trial_or_a_failed_run(tmp_path):
    config = tiny_config(tmp_path, "optimizer={method: 'torch.optim:SparseAdam'}")
    with pytest.raises(
        UserError,
        match=r"torch.optim:SparseAdam: iteration 1: its step: .* \(in a trial on a small",
    ):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    (tmp_path / "late.py").write_text(LATE)
    config = tiny_config(tmp_path, f"optimizer={{method: '{tmp_path}/late.py:Late'}}")
    with pytest.raises(
        RunError, match=r"late.py:Late: iteration 4: its step: .*late.py:8: AssertionError"
    ):
        train(config, tmp_path / "run", resume=False)
    assert summary_of(tmp_path / "run")["status"] == "failed"


def test_run_goes_on_without_a_reader_of_its_progress(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(tiny_config(tmp_path)))
    process = start_brx("train", path, "--out", tmp_path / "run")
    process.stdout.close()
    process.stderr.close()  # `2>&1 | head -0`
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
