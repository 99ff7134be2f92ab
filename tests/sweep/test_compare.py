"""`brx compare`: the same runs for every method, nothing twice, and a leaderboard that is plain
arithmetic."""

import re
import shutil
from pathlib import Path

import pandas as pd
import pytest
import yaml

from brx.cli.main import main
from brx.config.loading import dump_config, load_config
from brx.data.prepare import prepare
from brx.files import write_json
from brx.methods.trajectory_version import TRAJECTORY_VERSION
from brx.paper.scales import SCALES, Experiments
from brx.report.page import page_tables
from brx.runs.experiments import at_best_rates
from brx.runs.folder import RunFolder
from brx.runs.formats import terminal_text
from brx.runs.frames import load
from brx.runs.tables import leaderboard_table
from brx.sweep.compare import (
    DELAYS,
    RATES,
    parse_settings,
    protocol,
    read_board,
    take_committed,
    with_delays,
)
from brx.sweep.state import State, state_of
from tests.paper.helpers import write_experiment
from tests.runs.helpers import write_run
from tests.train.helpers import tiny_config

STALENESS = f"{Path(__file__).parents[2]}/examples/methods/staleness_aware_rate.py:StalenessAware"


def write_runs(
    folder, method, rates=(1e-3,), seeds=(0,), best=1e-3, settings=(), slowness=None, num_delays=3
):
    """Runs of a method, as if the rate `best` led to the lowest loss; `slowness` under delay."""
    for delay in [*DELAYS.values()][:num_delays]:
        for rate in rates:
            all_settings = {
                **delay,
                "optimizer.method": method,
                "optimizer.lr": rate,
                **dict(settings),
            }
            slower = slowness if delay["pipeline.stages"] > 1 else None
            val_loss = 2.0 + abs(rate - best)
            write_experiment(
                folder, "compare", all_settings, seeds=seeds, val_loss=val_loss, slowness=slower
            )
    for run in folder.iterdir():
        if "--" not in run.name:
            run = run.rename(folder / f"{run.name}--{run.name}")
        rate = load_config(run / "config.yaml").optimizer.lr
        ended = {
            "iteration": 4000,
            "final_val_loss": 2.0 + abs(rate - best),
            "trajectory_version": TRAJECTORY_VERSION,
        }
        write_json(run / "summary.json", RunFolder(run).read_summary() | ended)


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """All rates of PipeDream, and Muon at one; to be read only."""
    folder = tmp_path_factory.mktemp("comparison") / "kept"
    write_runs(folder, "pipedream", RATES)
    write_runs(folder, "muon")
    return folder


def board_of(*folders):
    """Rows of the leaderboard by method and delay."""
    return {
        (row["method"], row["delay"]): row for row in read_board(folders).rows.to_dict("records")
    }


def methods_of(*folders):
    return list(read_board(folders).rows["method"].unique())


def note_in_summaries(folder, **noted):
    for run in folder.iterdir():
        write_json(run / "summary.json", RunFolder(run).read_summary() | noted)


@pytest.fixture
def two_protocols(tmp_path):
    """The cells of two methods."""
    return [protocol(method, {}, 1, tmp_path).cells for method in ("pipedream", STALENESS)]


def test_every_method_has_the_same_cells(two_protocols):
    for one, other in zip(*two_protocols, strict=True):
        assert {**one.varied, "optimizer.method": 0} == {**other.varied, "optimizer.method": 0}
        assert one.config.model == other.config.model == load_config("compare").model
        assert one.config.training == other.config.training


def test_protocol_tries_every_rate_under_every_delay(two_protocols):
    assert [len(cells) for cells in two_protocols] == [len(RATES) * len(DELAYS)] * 2


def test_methods_have_folders_of_their_own(two_protocols):
    ours, others = ({cell.folder for cell in cells} for cells in two_protocols)
    assert not ours & others


def test_setting_may_be_a_list():
    settings = parse_settings(["optimizer.arguments.betas=[0.9, 0.95]"])
    assert settings == {"optimizer.arguments.betas": [0.9, 0.95]}


def test_further_seeds_are_repetitions(tmp_path):
    sweep = protocol("pipedream", {}, 3, tmp_path)
    seeds = [cell.config.training.seed for cell in sweep.repetitions(sweep.cells[:1])]
    assert seeds == [1, 2]


def pipedream(folder):
    return protocol("pipedream", {}, 1, folder)


def test_committed_run_counts_as_done(kept, tmp_path):
    sweep = pipedream(tmp_path)
    assert take_committed([sweep], kept, "f") == 9
    assert {state_of(cell) for cell in sweep.cells} == {State.DONE}


def test_committed_runs_are_taken_once(kept, tmp_path):
    take_committed([pipedream(tmp_path)], kept)
    assert take_committed([pipedream(tmp_path)], kept) == 0


def test_two_processes_may_take_committed_runs_at_once(kept, tmp_path, monkeypatch):
    """Another process takes each run while this one copies it."""
    copy = shutil.copytree

    def both_copy(source, target):
        monkeypatch.setattr(shutil, "copytree", copy)
        take_committed([pipedream(tmp_path)], kept)
        monkeypatch.setattr(shutil, "copytree", both_copy)
        return copy(source, target)

    monkeypatch.setattr(shutil, "copytree", both_copy)
    sweep = pipedream(tmp_path)
    take_committed([sweep], kept)
    assert [state_of(cell) for cell in sweep.cells] == [State.DONE] * 9
    assert {path.name for path in tmp_path.iterdir()} == {
        *(cell.folder.name for cell in sweep.cells),
        ".cells.lock",
    }


def test_committed_run_of_another_corpus_is_left(kept, tmp_path):
    assert take_committed([pipedream(tmp_path)], kept, "another") == 0


def test_committed_run_of_another_version_is_left(kept, tmp_path):
    old = Path(shutil.copytree(kept, tmp_path / "old"))
    note_in_summaries(old, trajectory_version=0)
    assert take_committed([pipedream(tmp_path / "runs")], old) == 0


def test_without_committed_runs_nothing_is_taken(tmp_path):
    assert take_committed([pipedream(tmp_path / "runs")], tmp_path / "nowhere") == 0


@pytest.fixture(scope="module")
def two_methods(tmp_path_factory):
    """PipeDream with two seeds, and basis rotation with one."""
    folder = tmp_path_factory.mktemp("two-methods")
    write_runs(folder, "pipedream", (1e-3, 3e-3, 1e-2), seeds=(0, 1))
    write_runs(folder, "basis-rotation", (1e-3,))
    return folder


def test_runs_are_sorted_by_the_protocols_delays(two_methods):
    delays = with_delays(at_best_rates(load(two_methods)))["delay"]
    assert sorted(delays) == sorted([*DELAYS] * 3)


def test_own_method_under_other_delays_leaves_the_board(kept, tmp_path):
    write_run(tmp_path, "mine", "optimizer.method=torch.optim:SGD", "pipeline.stages=4")
    assert methods_of(kept, tmp_path / "runs") == methods_of(kept)


def test_board_has_slowdowns(two_methods):
    # write_experiment's losses are 3 / (1 + t / (100 P)), whatever the method: P times the
    # iterations under delay.
    row = board_of(two_methods)["pipedream", "8 stages"]
    assert row["ratio"] == pytest.approx(8, rel=0.01)
    assert row["low"] <= 8.01


def test_board_has_the_chosen_rate(two_methods):
    assert board_of(two_methods)["pipedream", "none"]["lr"] == 1e-3


def test_board_has_the_number_of_seeds(two_methods):
    board = board_of(two_methods)
    assert board["pipedream", "none"]["num_seeds"] == 2
    assert board["basis-rotation", "8 stages"]["num_seeds"] == 1


def test_board_has_milliseconds_per_iteration(two_methods):
    row = board_of(two_methods)["basis-rotation", "8 stages"]
    assert row["milliseconds"] == pytest.approx(25.0, rel=0.05)


@pytest.fixture(scope="module")
def variants(tmp_path_factory):
    """A fast variant of Muon, and a slow one of PipeDream."""
    folder = tmp_path_factory.mktemp("variants")
    write_runs(folder, "muon", settings={"optimizer.momentum": 0.5}, slowness=2)
    write_runs(folder, "pipedream", settings={"optimizer.weight_decay": 0.0}, slowness=40)
    return folder


def test_variants_have_rows_of_their_own(kept, variants):
    names = {"muon", "muon, momentum 0.5", "pipedream", "pipedream, weight_decay 0"}
    assert {*methods_of(kept, variants)} == names


def test_best_under_the_longest_delay_comes_first(kept, variants):
    assert methods_of(kept, variants)[0] == "muon, momentum 0.5"


def test_variants_change_nobody_elses_row(kept, variants):
    before = board_of(kept)
    after = board_of(kept, variants)
    for row in before:
        for key in ("target", "ratio", "saved"):
            assert str(after[row][key]) == str(before[row][key])


def test_variant_has_savings_of_its_own(kept, variants):
    saved = board_of(kept, variants)["muon, momentum 0.5", "8 stages"]["saved"]
    assert saved["share"] == pytest.approx(0.75, abs=0.05)


@pytest.fixture
def without_longest(tmp_path):
    """PipeDream under all delays with two stash modes; Muon and SOAP without the longest delay."""
    write_runs(tmp_path, "pipedream", settings={"pipeline.stash": "none"})
    for method, num_delays in (("pipedream", 3), ("muon", 2), ("soap", 2)):
        write_runs(tmp_path, method, num_delays=num_delays)
    return tmp_path


def test_methods_without_the_longest_delay_come_last(without_longest):
    first_two = methods_of(without_longest)[:2]
    assert sorted(first_two) == ["pipedream", "pipedream, no stashing"]


def test_every_method_has_a_rank(without_longest):
    ranks = read_board([without_longest]).rows.groupby("rank")["method"].nunique()
    assert ranks.tolist() == [1, 1, 1, 1]


def test_two_contents_of_one_file_are_told_apart(tmp_path):
    write_runs(tmp_path / "runs", "pipedream")
    for text in ("class Mine(Method):\n    pass\n", "class Mine(Method):\n    pass  # edited\n"):
        (tmp_path / "mine.py").write_text(f"from brx.methods.method import Method\n\n\n{text}")
        write_runs(tmp_path / "runs", f"{tmp_path}/mine.py:Mine")
    labels = methods_of(tmp_path / "runs")
    with_digits = {label for label in labels if re.search(r"\([0-9a-f]{6}\)$", label)}
    assert len(with_digits) == 2


@pytest.fixture
def other_corpus(tmp_path):
    """Three runs on another corpus than the kept ones."""
    write_runs(tmp_path, "soap")
    note_in_summaries(tmp_path, data_fingerprint="another")
    return tmp_path


def test_set_of_the_method_asked_for_is_shown(kept, other_corpus):
    board = read_board([other_corpus, kept], ["soap", "pipedream-lr"])
    assert set(board.rows["method"]) == {"soap"}
    told = "different from the rest in data fingerprint: 6 runs of muon, pipedream"
    assert told in board.notes[0]


def test_largest_set_is_shown_if_nothing_is_asked(kept, other_corpus):
    assert sorted(methods_of(other_corpus, kept)) == ["muon", "pipedream"]


@pytest.fixture
def shown(kept, tmp_path, capsys):
    """What `brx compare` prints without a method: the table, and the legend."""
    folders = ["--out", str(tmp_path / "runs"), "--committed", str(kept)]
    figure = ["--figure", str(tmp_path / "figure")]
    assert main(["compare", *folders, "--format", "markdown", *figure]) == 0
    return capsys.readouterr()


def line_of(method, output):
    return next(line for line in output.out.splitlines() if method in line)


def test_narrow_terminal_shows_the_longest_delay(kept, two_methods):
    table = leaderboard_table(read_board([kept]).rows, list(DELAYS))
    long = pd.concat([table] * len(table.columns))  # a shorter one would be turned on its side
    _, note, lacking = terminal_text(long, 60).partition("Too narrow for: ")
    assert note
    assert "slowdown, 8 stages" in lacking
    assert "32 stages" not in lacking


def test_board_without_a_method_has_its_legend(kept, shown):
    assert f"From 6 runs at the best rates in {kept}, seeds 0." in shown.err


def test_board_can_be_drawn(shown, tmp_path):
    assert (tmp_path / "figure.png").stat().st_size > 0


def test_equal_losses_save_nothing(shown):
    assert "| 0.0% |" in line_of("muon", shown)


def test_baseline_is_not_compared_with_itself(shown):
    assert "|  |" in line_of("pipedream", shown)


def test_early_slowdowns_are_marked(shown):
    assert "| 7.97 (early) | 31.86 (early) |" in line_of("pipedream", shown)


def test_report_has_the_same_board(kept, monkeypatch):
    monkeypatch.setattr("brx.report.page.KEPT_COMPARISON", kept)
    # The paper's tables are not looked at here, and some read all committed runs.
    monkeypatch.setattr("brx.report.page.TABLES", {})
    tables = page_tables(Experiments.load(SCALES["laptop"], kept))
    (board,) = [table.texts for table in tables if table.name == "leaderboard"]
    assert sorted(board["method"]) == ["muon", "pipedream"]


@pytest.fixture
def listed(tmp_path, printed):
    """Lists the runs that are missing, where tmp_path/kept has the committed ones."""

    def list_missing(*arguments):
        folders = ["--out", tmp_path / "runs", "--committed", tmp_path / "kept"]
        return printed("compare", *arguments, *folders, "--dry-run")

    return list_missing


def test_rates_of_the_rest_are_variants(listed):
    rates = ["--rest-lr", "1e-3", "--rest-lr", "3e-4"]
    assert listed("muon", *rates).count("9 cells") == 4  # pipedream, muon, and muon twice more


def test_dry_run_ignores_runs_of_another_corpus(listed, tmp_path):
    write_runs(tmp_path / "kept", "pipedream", RATES, best=3e-3)
    assert "9 cells" in listed("pipedream")


def test_dry_run_lists_rates_beyond_the_grid(listed, tmp_path):
    write_runs(tmp_path / "kept", "pipedream", RATES, best=3e-3)
    corpus = prepare(load_config("compare").data).fingerprint
    note_in_summaries(tmp_path / "kept", data_fingerprint=corpus)
    assert "12 cells" in listed("pipedream")


@pytest.mark.parametrize("command", ["compare", "sweep"])
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("import nothing_of_this_name\n", "mine.py:1: ModuleNotFoundError"),
        (
            "from brx.methods.method import Method\n\n\nclass Mine(Method):\n    rest = None\n",
            "its optimizers: ",
        ),
    ],
)
def test_broken_method_is_refused_before_any_run(
    command, body, message, tmp_path, refused, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(body)
    grid = {"optimizer.method": ["pipedream", "mine.py:Mine"]}
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump({"base": "quick", "grid": grid}))
    assert message in refused(command, "mine.py:Mine" if command == "compare" else "sweep.yaml")
    assert not {path.name for path in tmp_path.iterdir()} - {"mine.py", "sweep.yaml", "__pycache__"}


@pytest.fixture
def compared(tmp_path, monkeypatch, printed):
    """`brx compare` of a method in a file, with a tiny model, one rate and two delays."""
    base = tmp_path / "tiny.yaml"
    content = yaml.safe_load(dump_config(tiny_config(tmp_path, "training.iterations=8")))
    base.write_text(yaml.safe_dump({**content, "pipeline": {"stages": 1}}))
    monkeypatch.setattr("brx.sweep.compare.PRESET", str(base))
    monkeypatch.setattr("brx.sweep.compare.RATES", (1e-3,))
    monkeypatch.setattr("brx.sweep.compare.FURTHER_RATES", ())
    delays = {
        "none": {"pipeline.stages": 1},
        "32 stages": {"pipeline.stages": 4, "pipeline.delay.like": 32},
    }
    monkeypatch.setattr("brx.sweep.compare.DELAYS", delays)
    arguments = ["compare", STALENESS, "--out", tmp_path / "runs", "--committed", tmp_path / "none"]
    return lambda: printed(*arguments)


def test_own_method_gets_its_place_once(compared, tmp_path):
    text = compared()
    assert "staleness_aware" in text
    assert "pipedream" in text
    files = [*(tmp_path / "runs").rglob("metrics.jsonl")]
    assert len(files) == 4
    before = [path.stat().st_mtime_ns for path in files]
    compared()  # shows it again, and trains nothing
    assert [path.stat().st_mtime_ns for path in files] == before
