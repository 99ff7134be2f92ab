"""`brx methods`, `memory`, `schedule` and `stages`: what they print, and what they refuse in one
line."""

import contextlib
import io
import re

import pytest

from brx.cli.main import main
from brx.methods.table import METHODS


@pytest.fixture(autouse=True)
def _wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


def rows_of(table):
    return [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in table.splitlines()
        if line.startswith("│")
    ]


@pytest.fixture(scope="module")
def listed():
    """`brx methods`, without line ends, by method."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        assert main(["methods"]) == 0
    flat = {}
    for name, method in METHODS.items():
        own = output.getvalue().partition(f"{name}: {method.summary}\n")[2]
        flat[name] = " ".join(own.partition("\n\n")[0].split())
    return flat


@pytest.mark.parametrize("name", METHODS)
def test_methods_are_listed(name, listed):
    method = METHODS[name]
    assert f"equation {method.equation}" in listed[name]
    assert f"source {method.source}" in listed[name]
    assert all(optimizer in listed[name] for optimizer in method.gets)
    assert "defaults lr=0.001" in listed[name]


def test_method_explains_every_option(printed):
    text = printed("methods", "basis-rotation")
    assert METHODS["basis-rotation"].why[:40] in text
    for key in METHODS["basis-rotation"].section.model_fields:
        # Each has a default and an explanation.
        assert key == "method" or re.search(rf"^  {key} = \S+ +\S", text, flags=re.M), key


def test_method_shows_its_refreshes(printed):
    text = printed("methods", "basis-rotation", "--stages", "32")
    assert re.search(r"sum of 1/f +3\.2000 +3\.4302", text)


def test_optimizer_lists_its_arguments(printed):
    assert "  momentum: float = 0" in printed("methods", "torch.optim:SGD")


def test_memory_alone_is_the_papers_table(printed):
    """2nd/bilateral keeps 2 (m^2 + n^2) numbers of 4 bytes: U and V, and both covariances."""
    text = printed("memory")
    row = next(row for row in rows_of(text) if row[:2] == ["2nd", "bilateral"])
    attention = 2 * 4 * (4096**2 + 4096**2) / 2**30
    mlp = 2 * 4 * (4096**2 + 14336**2) / 2**30
    assert row[4:6] == [f"{attention:.2f}", f"{mlp:.2f}"]


def test_memory_of_a_model_counts_every_matrix(printed):
    text = printed("memory", "paper-moe-100m")
    # 16 of 32 blocks are mixtures of 8 experts: 4 x 32 attention matrices, 16 + 16 x 8 of each kind
    #     in MLPs.
    assert "240x240 (128 of them)" in text
    assert "960x240 (144 of them)" in text
    assert "MiB" in text
    row = next(row for row in rows_of(text) if row[:2] == ["1st", "unilateral"])
    assert float(row[7]) == pytest.approx(4 * 240**2 * (128 + 2 * 144) / 2**20, abs=0.01)


def test_memory_of_a_run_by_stage(printed):
    deep = ["model.blocks=32", "pipeline.stages=32", "pipeline.devices=2"]
    text = printed("memory", "laptop", "--set", *deep, "optimizer.method=basis-rotation")
    _, by_stage, by_rank = text.split("P = 32, R = 2")
    rows = rows_of(by_stage)
    assert [tuple(map(int, row[:3])) for row in rows] == [(k, k // 16, 31 - k) for k in range(32)]
    # A block of width 32 has 12 d^2 + 2 d weights, twice: the newest, and those in use under delay.
    # Its six matrices have U, V, L and R: four of (32, 32) and two of (128, 32).
    assert [float(rows[1][4]), float(rows[1][7])] == [
        pytest.approx(2 * 4 * (12 * 32**2 + 10 * 32) / 1e3, abs=2),
        pytest.approx(4 * 2 * (4 * 2 * 32**2 + 2 * (128**2 + 32**2)) / 1e3, abs=0.1),
    ]
    assert len(rows_of(by_rank)) == 2


def test_plan_itemises_the_peak(printed):
    text = printed("plan", "laptop", "--set", "optimizer.method=basis-rotation")
    line = next(line for line in text.splitlines() if line.startswith("Peak: "))
    total, items = re.fullmatch(r"Peak: ([\d.]+) MB on rank 0, at [a-z ]+: (.*)\.", line).groups()
    sizes = [float(item.rpartition(" ")[2]) for item in items.split(", ")]
    assert sum(sizes) == pytest.approx(float(total), abs=0.01 * len(sizes))


def test_plan_says_what_it_assumes(printed):
    settings = ["pipeline.devices=2", "runtime.graphs=true", "optimizer.method=basis-rotation"]
    text = printed("plan", "laptop", "--set", *settings)
    for assumption in ("Communicators: 2 of NCCL", "Graphs: all CUDA graphs share", "Checkpoint:"):
        assert assumption in text


def test_plan_names_a_method_that_cannot_be_tried(printed):
    text = printed("plan", "laptop", "--set", "optimizer.method=examples/methods/xpipe.py:XPipe")
    assert "Moments of examples/methods/xpipe.py:XPipe: nothing is counted for its" in text


@pytest.fixture
def four_stages(printed):
    """The lines of a schedule of four stages on two devices."""
    options = ["--stages", "4", "--devices", "2", "--micro-batches", "3"]
    return printed("schedule", *options).splitlines()


def test_synchronous_schedules_are_shown(four_stages):
    assert "GPipe, one step: idle 25.0% of the time shown" in four_stages
    assert "  0F1 0F2 0F3 0B1 0B2 0B3 0U1" in four_stages
    assert "  1F1 1B1 1F2 1B2 1F3 1B3 1U1" in four_stages


def test_engines_actions_are_shown(four_stages):
    assert any(line.startswith("  0F1 0F2 0B1 0U1 0F3 0B2 0U2") for line in four_stages)
    assert any(line.endswith("0.0% once the pipeline is full") for line in four_stages)


def test_delays_of_stages_are_shown(four_stages):
    assert four_stages[-7:-5] == ["  0: 3 2", "  1: 1 0"]
    assert four_stages[-4] == "    0:   0   0   0   0   1   2   3   4 kept"


@pytest.mark.usefixtures("own_code")
def test_realised_delays_of_a_function_are_shown(printed):
    delay = "examples/delays/internet.py:jitter"
    options = ["--stages", "2", "--devices", "1", "--delay", delay, "--micro-batches", "2"]
    lines = printed("schedule", *options).splitlines()
    asked = lines.index("largest delay asked of the stages, by device:")
    assert lines[asked + 1] == "  0: 5 4"
    assert lines[asked + 2].startswith("mean delay realised")


def test_long_constant_delay_has_one_table(printed):
    options = ["--stages", "1", "--delay", "12345", "--accumulation", "49"]
    lines = printed("schedule", *options, "--micro-batches", "1").splitlines()
    delays = lines.index("delay of the stages, by device:")
    assert lines[delays + 1] == "  0: 12345"


def test_constant_delays_are_shown(printed):
    options = ["--stages", "3", "--delay", "2bw", "--accumulation", "2", "--micro-batches", "2"]
    lines = printed("schedule", *options).splitlines()
    assert lines[-1] == "    2:   0   0|  0   0|  1   1|  2   2   2 kept"
    assert any(line.startswith("  0F1 0F2 0F3 0B1 0F4 0B2 0U1 0F5") for line in lines)


def test_schedules_are_wrapped_at_the_terminals_width(printed, monkeypatch):
    texts = {}
    options = ["--stages", "8", "--devices", "4", "--micro-batches", "9"]
    for width in (60, 500):
        monkeypatch.setenv("COLUMNS", str(width))
        texts[width] = printed("schedule", *options)
        assert max(map(len, texts[width].splitlines())) <= width
    assert "".join(texts[60].split()) == "".join(texts[500].split())


def test_schedule_is_drawn(printed, tmp_path):
    printed("schedule", "--stages", "3", "--figure", tmp_path / "schedule")
    assert (tmp_path / "schedule.png").stat().st_size > 0
    assert "3 devices" in (tmp_path / "schedule.txt").read_text()


@pytest.mark.parametrize("name", ["schedule.png", "schedule.SVG"])
def test_figure_named_with_a_suffix_has_it_once(name, printed, tmp_path):
    printed("schedule", "--stages", "3", "--figure", tmp_path / name)
    written = {path.name for path in tmp_path.iterdir()}
    assert written == {f"schedule.{form}" for form in ("png", "pdf", "svg", "txt")}


def test_stages_of_an_own_model_on_own_devices(printed):
    own = [
        "stages",
        "--hidden",
        "4096",
        "--heads",
        "32",
        "--params-per-block",
        "202e6",
        "--blocks",
        "32",
    ]
    table = printed(*own, "--memory", "16", "80", "--format", "markdown").splitlines()
    assert table[2] == "| model | 4096 | 32 | 202M | 32 | 16 | 3 |"
    table = printed(
        *own, "--memory", "8", "80GB", "--sequence-length", "8192", "--format", "csv"
    ).splitlines()
    assert table[1].endswith(",>= 64,7")


SEVEN_B = ["pipeline.rings=host", "model.kv_heads=32", "model.hidden=11008", "data.tokenizer=bytes"]


@pytest.mark.parametrize("memory", ["24", "80"])
def test_stages_of_a_configuration_are_those_of_plan(memory, printed):
    table = printed("stages", "llama-8b", "--memory", memory, "--set", *SEVEN_B, "--format", "csv")
    count = table.splitlines()[1].rpartition(",")[2]
    plan = printed("plan", "llama-8b", "--device-memory", f"{memory}GB", "--set", *SEVEN_B)
    if count == "does not fit":
        assert "; even R = " in plan
    else:
        assert f"; the smallest R that fits is {count}." in plan


def test_stages_print_what_they_assume(capsys):
    main(["stages"])
    notes = " ".join(capsys.readouterr().err.split())
    assert "assumed, as in the paper: 16 bytes per parameter" in notes
    assert "brx stages CONFIG` prints its numbers of devices" in notes
