"""`record`: run folders from any loop that every reader takes, and the examples that end in `brx
slowdown`."""

import runpy
import shutil
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
from brx.runs.aspects import differences
from brx.runs.comparison import with_reference
from brx.runs.folder import RunFolder
from brx.runs.frames import curves, load
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


@pytest.fixture(scope="module")
def four_runs(tmp_path_factory):
    """A folder with four recorded runs: 1 and 4 stages, seeds 0 and 1."""
    folder = tmp_path_factory.mktemp("recorded")
    settings = {"dtype": torch.bfloat16}
    for stages, seed in product((1, 4), (0, 1)):
        write(folder / f"p{stages}-s{seed}", "my-lion", stages, seed, settings=settings)
    return folder


@pytest.fixture
def configuration(four_runs):
    """What config.yaml says of one of them."""
    return yaml.safe_load((four_runs / "p4-s1" / "config.yaml").read_text())


def test_configuration_has_known_sections_alone(configuration):
    assert configuration.keys() == {"data", "pipeline", "optimizer", "training"}


def test_configuration_has_iterations_with_the_seed(configuration):
    assert configuration["training"] == {"iterations": 60, "seed": 1}


def test_settings_without_a_json_form_are_text(configuration):
    assert configuration["optimizer"]["arguments"] == {"dtype": "torch.bfloat16"}


@pytest.mark.parametrize("name", ["model.blocks", "training.batch_size", "examples_per_update"])
def test_unknown_settings_are_missing(four_runs, name):
    assert load(four_runs)[name].isna().all()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("status", ["finished"] * 4),
        ("method", ["my-lion"] * 4),
        ("depth", [1, 1, 4, 4]),
        ("largest_delay", [0, 0, 3, 3]),
    ],
)
def test_known_settings_are_read(four_runs, name, expected):
    assert list(load(four_runs)[name]) == expected


def test_every_logged_loss_is_in_the_curves(four_runs):
    assert len(curves(load(four_runs))) == 4 * 60


def test_validation_loss_is_read(four_runs):
    assert load(four_runs)["val_loss"].iloc[0] == pytest.approx(2.5)


@pytest.fixture(scope="module")
def mixed(four_runs, tmp_path_factory):
    """The recorded runs, and next to them one whose settings are known."""
    folder = tmp_path_factory.mktemp("mixed")
    for run in four_runs.iterdir():
        shutil.copytree(run, folder / run.name)
    train(tiny_config(folder, "training.iterations=3"), folder / "brx")
    return folder


@pytest.mark.parametrize(
    "command",
    ["slowdown", "plot curves --out figure", "report --out page.html --runs"],
)
def test_every_reader_takes_the_folders(mixed, command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*command.split(), str(mixed)]) == 0, capsys.readouterr().err


def test_method_is_in_the_slowdown(mixed, capsys):
    main(["slowdown", str(mixed)])
    assert "my-lion" in capsys.readouterr().out


def test_recorded_runs_are_exported(mixed, tmp_path):
    assert main(["export", "--to", str(tmp_path / "kept"), str(mixed)]) == 0
    assert len(load(tmp_path / "kept")) == 5


def test_recorded_run_is_not_trained(four_runs, capsys):
    assert main(["train", str(four_runs / "p1-s0"), "--resume"]) == 2
    assert "was recorded from a loop of your own" in capsys.readouterr().err


def test_time_to_loss_needs_the_batch_size(four_runs):
    with pytest.raises(UserError, match="record them with batch_size="):
        measure_largest_set(load(four_runs), "here")


def test_different_tasks_are_not_compared_silently(tmp_path, capsys):
    write(tmp_path / "one", "adam", 1, 0, task="digits")
    write(tmp_path / "two", "adam", 4, 0, task="letters")
    assert main(["slowdown", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert "2 sets of runs that differ in data" in told
    assert "nothing to compare" in told
    assert any("data fingerprint" in line for line in differences(load(tmp_path)))


@pytest.fixture
def interrupted(tmp_path):
    """A run that was recorded to iteration 33 of 60, and then 34."""
    write(tmp_path / "cut", "adam", 1, 0, num=33)
    # To iteration 60, as was said before.
    with record(tmp_path / "cut", "adam", stages=1, lr=1e-3, resume=True) as run:
        run.log(34, 2.7)
    return tmp_path / "cut"


def test_run_before_its_last_iteration_is_interrupted(interrupted):
    assert RunFolder(interrupted).read_summary()["status"] == "interrupted"


def test_run_is_written_anew_from_a_checkpoint(interrupted, tmp_path):
    write(tmp_path / "whole", "adam", 1, 0)
    write(interrupted, "adam", 1, 0, first=21, resume=True)
    whole, resumed = (
        curves([path]).drop(columns=["run", "seconds"])
        for path in (tmp_path / "whole", interrupted)
    )
    assert whole.equals(resumed)


def test_run_is_not_overwritten(interrupted):
    with pytest.raises(UserError, match="holds a run"):
        write(interrupted, "adam", 1, 0)


def test_run_does_not_resume_with_another_seed(interrupted):
    with pytest.raises(UserError, match=r"training\.seed was 0 and is now 1"):
        write(interrupted, "adam", 1, 1, resume=True)


def pipeline_of_four(accumulation=1, forecast=None):
    """Four layers under a delay of one update: the model, its optimizer and its pipeline."""
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    settings = {"accumulation": accumulation, "forecast": forecast}
    return model, optimizer, delayed(model, optimizer, 4, "2bw", **settings)


@pytest.fixture(scope="module")
def under_delay(tmp_path_factory):
    """The row of a run of five updates under `delayed`, recorded without more than `pipeline`; and
    its configuration after the first update."""
    folder = tmp_path_factory.mktemp("under_delay")
    model, optimizer, pipeline = pipeline_of_four(2, "last-update")
    configurations = []
    with record(folder / "run", "sgd", pipeline=pipeline, lr=0.01) as run:
        for t in range(1, 6):
            for _ in range(2):
                loss = model(torch.ones(2, 3)).square().mean()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.log(t, loss)
            configurations.append(yaml.safe_load((folder / "run" / "config.yaml").read_text()))
    return load(folder).iloc[0], configurations[0]


@pytest.mark.parametrize(
    ("key", "expected"),
    [("stages", 4), ("delay", "2bw"), ("accumulation", 2), ("forecast", "last-update")],
)
def test_what_delayed_knows_is_filled_in(key, expected, under_delay):
    row, _ = under_delay
    assert row[f"pipeline.{key}"] == expected


def test_unknown_iterations_are_those_logged(under_delay):
    row, _ = under_delay
    assert row["training.iterations"] == row["iteration"] == 5


def test_task_is_the_name_of_the_script(under_delay):
    row, _ = under_delay
    assert row["task"].startswith(Path(sys.argv[0]).name)


def test_configuration_is_whole_after_one_update(under_delay):
    _, configuration = under_delay  # the loop may be killed at any time
    assert configuration["pipeline"]["accumulation"] == 2


def test_other_stages_than_the_pipelines_are_refused(tmp_path):
    _, _, pipeline = pipeline_of_four()
    with pytest.raises(UserError, match="stages is 2, but the pipeline has 4"):
        record(tmp_path / "run", "sgd", stages=2, pipeline=pipeline, lr=0.01)


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


def status_of(folder):
    return RunFolder(folder).read_summary()["status"]


def test_infinite_loss_ends_the_block_quietly(tmp_path, capsys):
    with record(tmp_path / "run", "sgd", lr=1.0, iterations=9) as run:
        run.log(1, 3.0)
        run.log(2, torch.tensor(torch.nan))
        raise AssertionError("not reached")
    assert "iteration 2: the loss is nan" in capsys.readouterr().err
    assert status_of(tmp_path / "run") == "diverged"


def test_infinite_validation_loss_is_a_divergence(tmp_path):
    with record(tmp_path / "run", "sgd", lr=1.0, iterations=1) as run:
        run.log(1, 3.0)
        run.validate(1, torch.tensor(torch.inf))
    assert status_of(tmp_path / "run") == "diverged"


@pytest.mark.parametrize(
    ("error", "status"), [(KeyboardInterrupt, "interrupted"), (RunError, "failed")]
)
def test_error_of_the_loop_is_its_status(error, status, tmp_path):
    with pytest.raises(error):
        fail(tmp_path / "run", error)
    assert status_of(tmp_path / "run") == status


def fail(folder, error):
    with record(folder, "sgd", lr=1.0, iterations=9) as run:
        run.log(1, 3.0)
        raise error


@pytest.fixture
def under_way(tmp_path):
    """A recording in `with`, without any update."""
    with record(tmp_path / "run", "sgd", lr=1.0) as run:
        yield run


def test_validation_before_an_update_is_refused(under_way):
    with pytest.raises(UserError, match="log the first update before"):
        under_way.validate(1, 3.0)


def test_gap_between_updates_is_refused(under_way):
    under_way.log(1, 3.0)
    with pytest.raises(UserError, match="iteration 3, but 2 is next: log every update, counted"):
        under_way.log(3, 3.0)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (torch.ones(2, 3), r"the loss must be one number, got an array of shape \(2, 3\)"),
        ("3.0 nats", "the loss must be one number, got '3.0 nats'"),
        (None, "the loss must be one number, got None"),
    ],
)
def test_loss_that_is_no_number_is_refused(under_way, value, told):
    with pytest.raises(UserError, match=told):
        under_way.log(1, value)


def test_settings_may_be_numpys_integers(tmp_path):
    given = {"seed": 3, "stages": 2, "batch_size": 8, "iterations": 5}
    numbers = {name: np.int64(value) for name, value in given.items()}
    with record(tmp_path / "run", "sgd", lr=np.float32(0.5), **numbers) as run:
        run.log(1, 3.0)
    settings = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    training = settings["training"]
    assert (training["seed"], training["batch_size"], training["iterations"]) == (3, 8, 5)
    assert settings["pipeline"]["stages"] == 2


def test_second_validation_is_refused(under_way):
    under_way.log(1, 3.0)
    under_way.validate(1, 3.0)
    with pytest.raises(UserError, match="validation of iteration 1: validated already"):
        under_way.validate(1, 3.0)


def test_second_recording_of_a_folder_is_refused(under_way, tmp_path):
    under_way.log(1, 3.0)
    with pytest.raises(UserError, match="trains in this folder"):
        record(tmp_path / "run", "s", lr=1.0, resume=True).__enter__()


def test_resuming_a_finished_run_changes_nothing(tmp_path):
    with record(tmp_path / "run", "sgd", lr=1.0) as run:
        run.log(1, 3.0)
    with record(tmp_path / "run", "sgd", lr=1.0, resume=True):
        pass
    row = load(tmp_path / "run").iloc[0]
    assert (row["status"], row["iteration"]) == ("finished", 1)


NAMES_OF_EXAMPLES = ["mlp", "vision", "gpt2", "gan"]


@pytest.mark.parametrize("name", NAMES_OF_EXAMPLES)
def test_example_is_short(name):
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 60


@pytest.mark.parametrize("name", [*NAMES_OF_EXAMPLES, "methods"])
def test_example_has_a_help_text(name, capsys, monkeypatch):
    if name == "gpt2":
        pytest.importorskip("transformers")
    pytest.importorskip("sklearn")
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit, match=r"^0$"):
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert f"usage: {name}.py [-h] [iterations]" in capsys.readouterr().out


@pytest.fixture(scope="module", params=NAMES_OF_EXAMPLES)
def example(request, tmp_path_factory):
    """The two runs of an example, without delay and with it."""
    name = request.param
    if name == "gpt2":
        pytest.importorskip("transformers")
    pytest.importorskip("sklearn")
    folder = tmp_path_factory.mktemp(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "argv", [f"{name}.py", "24"])
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    return load(folder / "runs" / name)


def test_example_begins_without_delay(example):
    assert example["depth"].iloc[0] == 1


def test_runs_of_an_example_begin_alike(example):
    first, second = (curves([path])["train_loss"] for path in example.index)
    assert first[0] == second[0]


def test_delay_changes_the_losses_of_an_example(example):
    first, second = (curves([path])["train_loss"] for path in example.index)
    assert not first.equals(second)


def test_runs_of_an_example_have_our_version(example):
    assert example["versions.brx"].iloc[0] == brx.__version__


def test_run_longer_than_announced_has_its_own_length(tmp_path, capsys):
    with record(tmp_path / "run", "sgd", lr=1.0, iterations=2) as run:
        for t in (1, 2, 3):
            run.log(t, 1.0)
    assert load(tmp_path / "run")["last_iteration"].tolist() == [3]
    assert "3 updates were logged, more than iterations=2" in capsys.readouterr().err
