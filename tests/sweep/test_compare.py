"""`brx compare`: the same runs for every method, nothing twice, and a leaderboard that is plain
arithmetic."""

import re
import shutil
from pathlib import Path

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
from brx.runs.frames import load
from brx.sweep.compare import (
    DELAYS,
    RATES,
    parse_settings,
    protocol,
    read_board,
    take_committed,
    with_delays,
)
from brx.sweep.spec import State, state_of
from tests.paper.helpers import write_experiment
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


def test_the_protocol_is_the_same_for_every_method_and_further_seeds_are_of_the_best_rates_alone(
    tmp_path,
):
    grids = [protocol(method, {}, 1, tmp_path).cells for method in ("pipedream", STALENESS)]
    assert [len(cells) for cells in grids] == [len(RATES) * len(DELAYS)] * 2
    for one, other in zip(*grids, strict=True):
        assert {**one.varied, "optimizer.method": 0} == {**other.varied, "optimizer.method": 0}
        assert one.config.model == other.config.model == load_config("compare").model
        assert one.config.training == other.config.training
    assert len({cell.folder for cells in grids for cell in cells}) == 18
    assert parse_settings(["optimizer.arguments.betas=[0.9, 0.95]"]) == {
        "optimizer.arguments.betas": [0.9, 0.95]
    }
    sweep = protocol("pipedream", {}, 3, tmp_path)
    assert sweep.spec.repeat.set == {"training.seed": [1, 2]}
    assert len(sweep.repetitions(sweep.cells[:3])) == 6


def test_kept_runs_count_as_done_unless_their_numbers_are_another_versions_or_corpus(
    kept, tmp_path
):
    sweep = protocol("pipedream", {}, 1, tmp_path / "runs")
    assert take_committed([sweep], kept, "another") == 0
    assert take_committed([sweep], kept, "f") == 9
    assert {state_of(cell) for cell in protocol("pipedream", {}, 1, tmp_path / "runs").cells} == {
        State.DONE
    }
    assert take_committed([sweep], kept) == 0
    old = Path(shutil.copytree(kept, tmp_path / "old"))
    note_in_summaries(old, trajectory_version=0)
    assert take_committed([protocol("pipedream", {}, 1, tmp_path / "new")], old) == 0
    assert take_committed([sweep], tmp_path / "nowhere") == 0


def test_board_has_losses_slowdowns_and_savings(tmp_path):
    write_runs(tmp_path, "pipedream", (1e-3, 3e-3, 1e-2), seeds=(0, 1))
    write_runs(tmp_path, "basis-rotation", (1e-3,))
    assert sorted(with_delays(at_best_rates(load(tmp_path)))["delay"]) == sorted([*DELAYS] * 3)
    board = board_of(tmp_path)
    # write_experiment's losses are 3 / (1 + t / (100 P)), whatever the method: P times the
    # iterations under delay.
    assert board["pipedream", "8 stages"]["ratio"] == pytest.approx(8, rel=0.01)
    assert board["pipedream", "8 stages"]["low"] <= 8.01
    assert (board["pipedream", "none"]["lr"], board["pipedream", "none"]["num_seeds"]) == (1e-3, 2)
    rotated = board["basis-rotation", "8 stages"]
    assert (rotated["num_seeds"], rotated["milliseconds"]) == (1, pytest.approx(25.0, rel=0.05))


def test_variants_have_rows_and_savings_of_their_own_and_move_nobody_elses(kept, tmp_path):
    write_runs(tmp_path, "muon", settings={"optimizer.momentum": 0.5}, slowness=2)
    write_runs(tmp_path, "pipedream", settings={"optimizer.weight_decay": 0.0}, slowness=40)
    before, after = board_of(kept), board_of(kept, tmp_path)
    assert (
        methods_of(kept, tmp_path)[0] == "muon, momentum 0.5"
    )  # best under the longest delay first
    assert {*methods_of(kept, tmp_path)} == {
        "muon",
        "muon, momentum 0.5",
        "pipedream",
        "pipedream, weight_decay 0",
    }
    for row in before:
        assert all(
            str(after[row][key]) == str(before[row][key]) for key in ("target", "ratio", "saved")
        )
    assert after["muon, momentum 0.5", "8 stages"]["saved"]["share"] == pytest.approx(
        0.75, abs=0.05
    )


def test_methods_without_the_longest_delay_come_last_and_stash_modes_have_rows_of_their_own(
    tmp_path,
):
    write_runs(tmp_path, "pipedream", settings={"pipeline.stash": "none"})
    for method, num_delays in (("pipedream", 3), ("muon", 2), ("soap", 2)):
        write_runs(tmp_path, method, num_delays=num_delays)
    assert sorted(methods_of(tmp_path)[:2]) == ["pipedream", "pipedream, no stashing"]
    assert read_board([tmp_path]).rows.groupby("rank")["method"].nunique().tolist() == [1, 1, 1, 1]


def test_two_contents_of_one_file_are_told_apart(tmp_path):
    write_runs(tmp_path / "runs", "pipedream")
    for text in ("class Mine(Method):\n    pass\n", "class Mine(Method):\n    pass  # edited\n"):
        (tmp_path / "mine.py").write_text(f"from brx.methods.method import Method\n\n\n{text}")
        write_runs(tmp_path / "runs", f"{tmp_path}/mine.py:Mine")
    assert (
        len(
            {
                label
                for label in methods_of(tmp_path / "runs")
                if re.search(r"\([0-9a-f]{6}\)$", label)
            }
        )
        == 2
    )


def test_what_was_asked_for_is_shown_whatever_the_corpus_of_the_kept_runs(kept, tmp_path):
    write_runs(tmp_path, "soap")
    note_in_summaries(tmp_path, data_fingerprint="another")
    board = read_board([tmp_path, kept], ["soap", "pipedream-lr"])
    assert set(board.rows["method"]) == {"soap"}
    assert "differ from the rest in data fingerprint: 6 runs of muon, pipedream" in board.notes[0]
    assert sorted(methods_of(tmp_path, kept)) == ["muon", "pipedream"]


def test_without_a_method_it_shows_what_is_there_as_the_report_does(
    kept, tmp_path, capsys, monkeypatch
):
    folders = ["--out", str(tmp_path / "runs"), "--committed", str(kept)]
    assert (
        main(["compare", *folders, "--format", "markdown", "--figure", str(tmp_path / "figure")])
        == 0
    )
    table, legend = capsys.readouterr()
    assert f"From 6 runs at the best rates in {kept}, seeds 0." in legend
    assert (tmp_path / "figure.png").stat().st_size > 0
    muon, pipedream = (
        next(line for line in table.splitlines() if name in line) for name in ("muon", "pipedream")
    )
    assert (
        "| 0.0% |" in muon
    )  # write_experiment's losses are the same for all methods: it saves nothing
    assert "|  |" in pipedream  # a baseline is not compared with itself
    assert "| 7.97 (early) | 31.86 (early) |" in pipedream
    monkeypatch.setattr("brx.report.page.KEPT_COMPARISON", kept)
    tables = page_tables(Experiments.load(SCALES["laptop"], kept))
    (board,) = [table.texts for table in tables if table.name == "leaderboard"]
    assert sorted(board["method"]) == ["muon", "pipedream"]


def test_dry_run_lists_what_the_best_rates_ask_for_and_rates_of_the_rest_as_variants(
    tmp_path, printed
):
    def listed(*arguments):
        folders = ["--out", tmp_path / "runs", "--committed", tmp_path / "kept"]
        return printed("compare", *arguments, *folders, "--dry-run")

    rates = ["--rest-lr", "1e-3", "--rest-lr", "3e-4"]
    assert listed("muon", *rates).count("9 cells") == 4  # pipedream, muon, and muon twice more
    write_runs(tmp_path / "kept", "pipedream", RATES, best=3e-3)
    assert "9 cells" in listed("pipedream")  # the committed runs are of another corpus
    note_in_summaries(
        tmp_path / "kept", data_fingerprint=prepare(load_config("compare").data).fingerprint
    )
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
def test_a_broken_method_is_refused_before_anything_is_trained(
    command, body, message, tmp_path, refused, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(body)
    grid = {"optimizer.method": ["pipedream", "mine.py:Mine"]}
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump({"base": "quick", "grid": grid}))
    assert message in refused(command, "mine.py:Mine" if command == "compare" else "sweep.yaml")
    assert not {path.name for path in tmp_path.iterdir()} - {"mine.py", "sweep.yaml", "__pycache__"}


def test_own_method_gets_its_place_and_twice_costs_nothing(tmp_path, monkeypatch, printed):
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
    text = printed(*arguments)
    assert "staleness_aware" in text
    assert "pipedream" in text
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("metrics.jsonl")}
    assert len(before) == 4
    printed(*arguments)
    assert {path: path.stat().st_mtime_ns for path in before} == before
