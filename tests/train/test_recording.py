"""`record`: run folders from any loop that every reader takes, and the examples that end in `brx
slowdown`."""

import runpy
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from torch import nn

import brx
from brx import delayed, record
from brx.cli.main import main
from brx.errors import DivergedError, RunError, UserError
from brx.runs.comparison import with_reference
from brx.runs.folder import RunFolder
from brx.runs.frames import curves, differences, load
from brx.runs.time_to_loss import measure_largest_set
from brx.train.loop import train
from tests.train.helpers import tiny_config

EXAMPLES = Path(__file__).parents[2] / "examples" / "own_model"


def write(folder, method, stages, seed, num=60, first=1, **settings):
    with record(
        folder, method, stages=stages, seed=seed, lr=1e-3, iterations=60, **settings
    ) as run:
        for t in np.arange(first, num + 1):
            run.log(t, 3.0 - 0.01 * t / stages**0.5 + 0.001 * seed, lr=1e-3)
            if t % 20 == 0:
                run.validate(t, 3.1 - 0.01 * t)


def test_every_reader_takes_the_folders(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for stages, seed in product((1, 4), (0, 1)):
        write(
            tmp_path / f"p{stages}-s{seed}",
            "my-lion",
            stages,
            seed,
            settings={"dtype": torch.bfloat16},
        )
    known = yaml.safe_load((tmp_path / "p4-s1" / "config.yaml").read_text())
    assert known.keys() == {"data", "pipeline", "optimizer", "training"}
    assert known["training"] == {"iterations": 60, "seed": 1}
    assert known["optimizer"]["arguments"] == {"dtype": "torch.bfloat16"}
    runs = load(tmp_path)
    assert (
        runs[["model.blocks", "training.batch_size", "examples_per_update"]].isna().all(axis=None)
    )
    found = [list(runs[name]) for name in ("status", "method", "depth", "largest_delay")]
    assert found == [["finished"] * 4, ["my-lion"] * 4, [1, 1, 4, 4], [0, 0, 3, 3]]
    assert len(curves(runs)) == 4 * 60
    assert runs["val_loss"].iloc[0] == pytest.approx(2.5)
    train(tiny_config(tmp_path), tmp_path / "brx")  # beside one whose settings are known
    for command in (
        "slowdown",
        "plot curves --out figure",
        "report --out page.html --runs",
        "export --to kept",
    ):
        assert main([*command.split(), str(tmp_path)]) == 0, command
    assert main(["train", runs.index[0], "--resume"]) == 2
    out, error = capsys.readouterr()
    assert "my-lion" in out
    assert "was recorded from a loop of your own" in error
    with pytest.raises(UserError, match="record them with batch_size="):
        measure_largest_set(runs, "here")
    assert len(load(tmp_path / "kept")) == 5


def test_different_tasks_are_not_compared_silently(tmp_path, capsys):
    write(tmp_path / "one", "adam", 1, 0, task="digits")
    write(tmp_path / "two", "adam", 4, 0, task="letters")
    assert main(["slowdown", str(tmp_path)]) != 0 or "data fingerprint" in capsys.readouterr().err
    assert any("data fingerprint" in line for line in differences(load(tmp_path)))


def test_resumes_where_the_loop_does(tmp_path):
    write(tmp_path / "whole", "adam", 1, 0)
    write(tmp_path / "cut", "adam", 1, 0, num=33)
    with record(
        tmp_path / "cut", "adam", stages=1, lr=1e-3, resume=True
    ) as run:  # to 60, as was said before
        run.log(34, 2.7)
    assert RunFolder(tmp_path / "cut").read_summary()["status"] == "interrupted"
    write(
        tmp_path / "cut", "adam", 1, 0, first=21, resume=True
    )  # from a checkpoint of iteration 20
    frames = [
        curves([tmp_path / name]).drop(columns=["run", "seconds"]) for name in ("whole", "cut")
    ]
    assert frames[0].equals(frames[1])
    with pytest.raises(UserError, match="holds a run"):
        write(tmp_path / "cut", "adam", 1, 0)
    with pytest.raises(UserError, match=r"training\.seed was 0 and is now 1"):
        write(tmp_path / "cut", "adam", 1, 1, resume=True)


def test_what_delayed_knows_is_filled_in(tmp_path):
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    pipeline = delayed(model, optimizer, 4, "2bw", accumulation=2, forecast="last-update")
    with record(tmp_path / "run", "sgd", pipeline=pipeline, lr=0.01) as run:
        for t in range(1, 6):
            for _ in range(2):
                loss = model(torch.ones(2, 3)).square().mean()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.log(t, loss)
            assert (
                "accumulation: 2" in (tmp_path / "run" / "config.yaml").read_text()
            )  # it may be killed now
    row = load(tmp_path).iloc[0]
    found = [row[f"pipeline.{key}"] for key in ("stages", "delay", "accumulation", "forecast")]
    assert found == [4, "2bw", 2, "last-update"]
    assert row["training.iterations"] == row["iteration"] == 5
    assert row["task"].startswith(Path(sys.argv[0]).name)
    with pytest.raises(UserError, match="stages is 2, but the pipeline has 4"):
        record(
            tmp_path / "other", "sgd", stages=2, pipeline=pipeline, lr=0.01, settings={"lr": 0.01}
        )


def log_updates(run, num=3):
    for t in range(1, num + 1):
        run.log(t, 3.0)


def test_loop_without_a_with_block(tmp_path):
    run = record(tmp_path / "run", "sgd", lr=1.0, iterations=3)
    log_updates(run)
    run.close()
    run.close()  # nothing is left to do
    assert load(tmp_path)["status"].tolist() == ["finished"]


@pytest.mark.parametrize("resume", [False, True])
def test_log_after_the_end_is_refused(resume, tmp_path):
    run = record(tmp_path / "run", method="mine", lr=0.1, resume=resume)
    run.log(1, 2.0)
    run.close()
    with pytest.raises(UserError, match=r"this recording has ended.*resume=True"):
        run.log(2, 1.0)


def test_loop_without_a_with_block_diverges(tmp_path):
    run = record(tmp_path / "run", "sgd", lr=1.0, iterations=9)
    run.log(1, 3.0)
    with pytest.raises(DivergedError, match="iteration 2: the loss is nan"):
        run.log(2, torch.nan)
    assert load(tmp_path)["status"].tolist() == ["diverged"]


def test_block_within_a_recording_is_refused(tmp_path):
    run = record(tmp_path / "run", "sgd", lr=1.0)
    log_updates(run)
    with pytest.raises(UserError, match="recorded already"):
        run.__enter__()
    run.close()


def recorded(folder, stages, accumulation=1):
    """A run of four layers under `delayed`."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    pipeline = delayed(model, optimizer, stages, accumulation=accumulation)
    with record(folder, "sgd", pipeline=pipeline, lr=0.01, iterations=2) as run:
        for t in (1, 2):
            for _ in range(accumulation):
                loss = model(torch.ones(2, 3)).square().mean()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.log(t, loss)
    return folder


def test_cut_is_in_the_configuration(tmp_path):
    known = yaml.safe_load((recorded(tmp_path / "run", 2) / "config.yaml").read_text())
    assert known["pipeline"]["cut"] == ["0 1", "2 3"]


def test_runs_of_other_cuts_are_other_runs(tmp_path):
    recorded(tmp_path / "even", 2)
    recorded(tmp_path / "uneven", {"0": 0, "1": 1, "2": 1, "3": 1})
    recorded(tmp_path / "same", {"0": 0, "1": 0, "2": 1, "3": 1})
    found = load(tmp_path)["experiment"]
    even, same, uneven = (found[found.index.str.endswith(name)].iloc[0] for name in NAMES)
    assert even == same
    assert even != uneven


NAMES = ("/even", "/same", "/uneven")


def test_cut_is_no_other_setting_than_the_delay(tmp_path):
    for stages in (1, 2):
        recorded(tmp_path / f"p{stages}", stages)
    assert len(with_reference(load(tmp_path))) == 2


def test_micro_batches_are_in_the_name(tmp_path):
    recorded(tmp_path / "run", 2, accumulation=2)
    assert load(tmp_path)["variant"].tolist() == ["sgd, M = 2"]


def test_cut_is_of_recorded_runs_alone(tmp_path, capsys):
    assert main(["train", "quick", "--set", "pipeline.cut=[a]", "--out", str(tmp_path)]) == 2
    assert "brx cuts its own models by blocks" in capsys.readouterr().err


def test_ends_that_are_not_the_end(tmp_path, capsys):
    def stop_with(status, error=None):
        with record(tmp_path / status, "sgd", lr=1.0, iterations=9) as run:
            run.log(1, 3.0)
            run.log(2, 3.0 if error else torch.tensor(torch.nan))
            raise error or AssertionError("not reached")

    stop_with("diverged")
    assert "iteration 2: the loss is nan" in capsys.readouterr().err
    with record(tmp_path / "validated", "sgd", lr=1.0, iterations=1) as run:
        run.log(1, 3.0)
        run.validate(1, torch.tensor(torch.inf))
    for error, status in ((KeyboardInterrupt, "interrupted"), (RunError, "failed")):
        with pytest.raises(error):
            stop_with(status, error)
    for name, status in (
        ("validated", "diverged"),
        *((each, each) for each in ("diverged", "interrupted", "failed")),
    ):
        assert RunFolder(tmp_path / name).read_summary()["status"] == status
    with record(tmp_path / "gap", "sgd", lr=1.0) as run:
        with pytest.raises(UserError, match="log the first update before"):
            run.validate(1, 3.0)
        run.log(1, 3.0)
        with pytest.raises(UserError, match="iteration 3 after iteration 1"):
            run.log(3, 3.0)
        run.validate(1, 3.0)
        with pytest.raises(UserError, match="validation of iteration 1: validated already"):
            run.validate(1, 3.0)
        with pytest.raises(UserError, match="trains in this folder"):
            record(tmp_path / "gap", "s", lr=1.0, resume=True).__enter__()
    record(tmp_path / "gap", "sgd", lr=1.0, resume=True).__enter__().__exit__(
        None, None
    )  # nothing is left to do
    assert load(tmp_path / "gap")[["status", "iteration"]].to_numpy().tolist() == [["finished", 1]]


@pytest.mark.parametrize("name", ["mlp", "vision", "gpt2", "gan"])
def test_examples_end_in_their_slowdown(name, tmp_path, monkeypatch):
    if name == "gpt2":
        pytest.importorskip("transformers")
    pytest.importorskip("sklearn")
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 60
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "24"])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    runs = load(tmp_path / "runs" / name)
    assert runs["depth"].iloc[0] == 1
    first, second = (curves([path])["train_loss"] for path in runs.index)
    assert first[0] == second[0]
    assert not first.equals(second)
    assert brx.__version__ == runs["versions.brx"].iloc[0]
