"""`brx verdict` through the command: from the committed runs, from a user's own, and mistakes."""

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.runs.helpers import write_run

ROOT = Path(__file__).parents[2]
DEMO = str(ROOT / "results" / "demo")
EIGHT_BY_TWO = ["--stages", "8", "--micro-batches", "2"]
ASKED = ["--stages", "8", "--micro-batches", "8"]


@pytest.fixture(autouse=True)
def _in_the_checkout(monkeypatch):
    """Where the committed runs are found."""
    monkeypatch.chdir(ROOT)


def test_committed_runs_answer(printed):
    text = printed("verdict", "--stages", "32", "--micro-batches", "8", "--verbose")
    assert "wins: " in text.splitlines()[0]
    assert "No run measures these at delays up to 3.88 updates" in text


def test_kept_measurements_answer_alike(printed, tmp_path):
    kept = str(tmp_path / "kept.json")
    first = printed("verdict", DEMO, *EIGHT_BY_TWO, "--save", kept)
    assert printed("verdict", kept, *EIGHT_BY_TWO) == first[: first.index(kept)]


def test_figure_is_drawn(printed, tmp_path):
    printed("verdict", DEMO, *EIGHT_BY_TWO, "--figure", str(tmp_path / "figure"))
    assert (tmp_path / "figure.png").stat().st_size > 0


@pytest.fixture
def cost_table(tmp_path):
    """As `benchmarks.lab` writes it. The machine's speed has changed between its turns, so the
    ratios are not those of the median times."""
    table = tmp_path / "methods.json"
    columns = ["method", "ms / iteration (median)", "ratio to pipedream"]
    rows = [["pipedream", "20.0", "1.0"], ["basis-rotation", "30.0", "1.75"]]
    table.write_text(json.dumps({"columns": columns, "rows": rows}))
    return str(table)


def with_costs(printed, *options):
    return printed("verdict", "results/demo", *EIGHT_BY_TWO, "--verbose", *options)


def test_costs_from_the_same_runs_say_the_same(printed):
    given = with_costs(printed, "--cost-from", "results/demo")
    assert given.count("% (given)") == 2
    said = given.replace(" (given)", "").replace(" (where no cost is given)", "")
    assert said == with_costs(printed)


def test_costs_come_from_a_benchmark(printed, cost_table):
    assert "basis-rotation 75%" in with_costs(printed, "--cost-from", cost_table)


def test_stated_cost_comes_first(printed, cost_table):
    options = ["--cost-from", cost_table, "--cost", "basis-rotation=0.5"]
    assert "basis-rotation 50%" in with_costs(printed, *options)


def test_costs_come_from_runs_of_another_model(printed):
    given = with_costs(printed, "--cost-from", "results/similar-curvature")
    assert given.count("% (given)") == 2


def test_one_run_gives_one_cost(printed):
    text = with_costs(printed, "--cost-from", "results/demo/pipedream-p1")
    assert "pipedream 0% (given)" in text
    assert text.count("(given)") == 1


MODEL = ["--config", "paper-95m", "--bandwidth", "1GB", "--throughput", "100T"]


@pytest.fixture
def with_model(printed, tmp_path, monkeypatch):
    """The text of a verdict on a model, and the caption of its figure."""
    monkeypatch.setattr("brx.plot.planning.STAGES", (8, 64))
    monkeypatch.setattr("brx.plot.planning.MICRO_BATCHES", (8,))
    figure = ["--figure", str(tmp_path / "figure")]
    text = printed("verdict", *ASKED, *MODEL, "--device-memory", "1.6GB", *figure, "--verbose")
    return text, (tmp_path / "figure.json").read_text()


def test_a_model_gives_memory_updates_transfers(with_model):
    text, _ = with_model
    assert re.search(r"Too large for 1\.6 GB: .*basis-rotation", text)
    for told in (
        "8 examples per update, 8 micro-batches of 1.",
        "s / update",
        "what is not given by its FLOPs",
    ):
        assert told in text


def test_caption_names_the_models_limits(with_model):
    _, caption = with_model
    for told in (
        "transfers that overlap with computation",
        "Without what needs more memory",
        "Blank: the model has fewer than P blocks",
    ):
        assert told in caption


def test_tiny_devices_hold_no_schedule(printed):
    text = printed("verdict", *ASKED, "--config", "paper-95m", "--device-memory", "0.01GB")
    assert text.startswith("No verdict: no schedule fits")


def test_balance_by_time_is_read(printed):
    balanced = ["--set", "pipeline.balance=time"]
    model = ["--stages", "6", "--micro-batches", "8", "--config", "paper-1b", "--loss", "2.4"]
    text = printed("verdict", *model, *balanced, "--verbose")
    assert "Blocks per device, by the operations of their passes: 2, 5, 5, 5, 5, 2." in text
    assert "pipeline.balance=time" in re.search(r"To check: (.*)", text)[1]


SEVEN_GB = ["--config", "paper-1b", "--device-memory", "7.1GB", "--throughput", "A100"]


@pytest.fixture
def limited(printed):
    """A verdict on a model whose methods do not all fit."""
    question = ["--stages", "16", "--micro-batches", "4", "--loss", "2.4"]
    return printed("verdict", *question, *SEVEN_GB)


def plan_command(text):
    """The `brx plan` that a verdict names."""
    return shlex.split(re.search(r"To check: brx (.*)", text)[1])


def test_named_plan_is_the_verdicts(limited, printed):
    planned = printed(*plan_command(limited))
    assert "Fits into 7.1 GB per device with 5% to spare" in planned
    assert "At 124.8 TFLOP/s per device" in planned
    assert "examples, zero-bubble H1 with 8 micro-batches" in planned


def test_remedy_makes_a_method_fit(limited, printed):
    remedy = re.search(r"Too large for 7\.1 GB: (.*) \(fits with --set (.*)\)", limited)
    method = remedy[1].split("; ")[-1]
    changed = [f"optimizer={{method: {method}}}", *remedy[2].split()]
    command = plan_command(limited)
    position = command.index("--set") + 1
    for settings, does in ((changed[:1], "Does not fit"), (changed, "Fits")):
        planned = printed(*command[:position], *settings, *command[position + 1 :])
        assert f"{does} into 7.1 GB" in planned


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


def test_without_committed_runs_some_are_needed(refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "RUNS: needed" in refused("verdict", *ASKED)
