"""`brx verdict` through the command: from the committed runs, from a user's own, and mistakes."""

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.runs.helpers import write_run

ROOT = Path(__file__).parents[2]
ASKED = ["--stages", "8", "--micro-batches", "8"]


def test_the_committed_runs_answer(printed, monkeypatch):
    monkeypatch.chdir(ROOT)
    text = printed("verdict", "--stages", "32", "--micro-batches", "8", "--verbose")
    assert "wins: " in text.splitlines()[0]
    assert "zero-bubble H1" in text
    assert "No run measures these at delays up to 3.88 updates" in text


def test_own_runs_are_kept_drawn_and_asked_again(printed, tmp_path):
    kept = str(tmp_path / "kept.json")
    arguments = ["--stages", "8", "--micro-batches", "2"]
    figure = str(tmp_path / "figure")
    first = printed(
        "verdict", str(ROOT / "results" / "demo"), *arguments, "--save", kept, "--figure", figure
    )
    assert (tmp_path / "figure.png").stat().st_size > 0
    assert printed("verdict", kept, *arguments) == first[: first.index(kept)]
    assert "basis-rotation 50%" in printed(
        "verdict", kept, *arguments, "--verbose", "--cost", "basis-rotation=0.5"
    )


def test_costs_come_from_own_runs_or_a_benchmark(printed, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    question = ["--stages", "8", "--micro-batches", "2", "results/demo", "--verbose"]
    own_pace = printed("verdict", *question)
    given = printed("verdict", *question, "--cost-from", "results/demo")
    assert given.count("% (given)") == 2
    assert given.replace(" (given)", "") == own_pace  # the same runs say the same
    table = tmp_path / "methods.json"
    rows = [["pipedream", "20.0"], ["basis-rotation", "35.0"], ["muon", "90.0"]]
    table.write_text(json.dumps({"columns": ["method", "ms / iteration (median)"], "rows": rows}))
    assert "basis-rotation 75%" in printed("verdict", *question, "--cost-from", str(table))
    both = [*question, "--cost-from", str(table), "--cost", "basis-rotation=0.5"]
    assert "basis-rotation 50%" in printed("verdict", *both)
    assert (
        printed("verdict", *question, "--cost-from", "results/similar-curvature").count("% (given)")
        == 2
    )
    text = printed("verdict", *question, "--cost-from", "results/demo/pipedream-p1")
    assert "pipedream 0% (given)" in text
    assert text.count("(given)") == 1


def test_a_model_gives_memory_updates_and_transfers(printed, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    model = [
        "--config",
        "paper-95m",
        "--device-memory",
        "1.6GB",
        "--bandwidth",
        "1GB",
        "--throughput",
        "100T",
    ]
    figure = ["--figure", str(tmp_path / "figure")]
    monkeypatch.setattr("brx.plot.planning.STAGES", (8, 64))
    monkeypatch.setattr("brx.plot.planning.MICRO_BATCHES", (4, 8))
    text = printed("verdict", *ASKED, *model, *figure, "--verbose")
    assert re.search(r"Too large for 1\.6 GB: .*basis-rotation", text)
    assert "8 examples per update, 8 micro-batches of 1." in text
    assert "s / update" in text
    assert "what is not given by its FLOPs" in text
    caption = (tmp_path / "figure.json").read_text()
    assert "transfers beside the computation" in caption
    assert "Without what needs more memory" in caption
    assert "Blank: the model has fewer than P blocks" in caption
    text = printed("verdict", *ASKED, "--config", "paper-95m", "--device-memory", "0.01GB", *figure)
    assert text.startswith("No verdict: no schedule fits")


def test_it_prints_the_equal_plan_and_what_would_make_methods_fit(printed, monkeypatch):
    monkeypatch.chdir(ROOT)
    question = [
        "--stages",
        "16",
        "--micro-batches",
        "4",
        "--config",
        "paper-1b",
        "--device-memory",
        "7.1GB",
    ]
    text = printed("verdict", *question, "--throughput", "A100", "--loss", "2.4")
    command = shlex.split(re.search(r"To check: brx (.*)", text)[1])
    planned = printed(*command)
    assert "Fits into 7.1 GB per device with 5% to spare" in planned
    assert "At 124.8 TFLOP/s per device" in planned
    assert "examples, zero-bubble H1 with 8 micro-batches" in planned
    remedy = re.search(r"Too large for 7\.1 GB: (.*) \(fits with --set (.*)\)", text)
    method = remedy[1].split("; ")[-1]
    changed = [f"optimizer={{method: {method}}}", *remedy[2].split()]
    position = command.index("--set") + 1
    for settings, does in ((changed[:1], "Does not fit"), (changed, "Fits")):
        assert f"{does} into 7.1 GB" in printed(
            *command[:position], *settings, *command[position + 1 :]
        )


@pytest.mark.parametrize(
    ("setting", "crosses_3_at", "status", "message"),
    [
        (
            "pipeline.stages=4",
            -500,
            "finished",
            "runs: no run falls to a training loss of 4 nats, where measurements",
        ),
        (
            "pipeline.delay=3",
            100,
            "finished",
            "runs: no run has a pipeline's delays (pipeline.delay: pipeline",
        ),
        ("pipeline.stages=4", 100, "interrupted", "runs: no run is finished"),
    ],
)
def test_runs_that_say_nothing_are_refused(
    setting, crosses_3_at, status, message, refused, tmp_path, monkeypatch
):
    write_run(tmp_path, "run", setting, crosses_3_at=crosses_3_at, status=status)
    monkeypatch.chdir(tmp_path)
    assert message in refused("verdict", "runs", *ASKED)
    assert "RUNS: needed" in refused("verdict", *ASKED)
