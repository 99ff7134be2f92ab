"""The paper's tables from made-up runs, against what these were made to be."""

from dataclasses import replace
from itertools import product

import pytest

from brx.cli.main import main
from brx.paper.scales import BASELINES_AND_STRATEGIES, ENDS, MAIN, SCALES, Experiments
from brx.paper.tables import TABLES
from brx.runs.formats import format_table
from brx.runs.frames import load
from tests.paper.helpers import LAPTOP, write_method


def test_tables_from_complete_results(complete, tmp_path):
    assert (
        main(
            ["tables", "all", "--scale", "laptop", "--runs", str(complete), "--out", str(tmp_path)]
        )
        == 0
    )
    without_runs = {"causes", "architectures", "architecture-verdicts"}  # not committed yet
    for name in TABLES.keys() - without_runs:
        lines = (tmp_path / f"{name}.csv").read_text().splitlines()
        assert len(lines) > 2, name
        assert (tmp_path / f"{name}.md").read_text().count("\n| ") >= len(lines)
    methods = [
        line.split(",")[0] for line in (tmp_path / "slowdown.csv").read_text().splitlines()[1:]
    ]
    assert methods == list(BASELINES_AND_STRATEGIES)


@pytest.mark.parametrize(("name", "row"), [("table 1", "LLaMA 1-65B"), ("memory", "bilateral")])
def test_formulas_need_no_runs(name, row, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["tables", name, "--format", "latex"]) == 0
    assert row in capsys.readouterr().out


def test_formulas_refuse_runs(complete, capsys):
    assert main(["tables", "stages", "--runs", str(complete)]) == 2
    assert "--runs: table stages is a formula" in capsys.readouterr().err


def test_table_of_stages_is_the_commands(experiments, capsys):
    assert main(["stages", "--format", "csv"]) == 0
    csv, warning = capsys.readouterr()
    assert csv == format_table(TABLES["stages"].make(experiments), "csv") + "\n"
    assert "the paper prints >= 512" in warning


def test_norms_are_in_both_coordinates(experiments):
    coordinates = set(TABLES["hessian-norm"].make(experiments)["coordinates"])
    assert {"original", "rotated, own basis"} <= coordinates


def test_table_that_was_not_measured_is_refused_alone_and_noted_among_others(
    complete, tmp_path, monkeypatch, capsys
):
    monkeypatch.setitem(SCALES, "laptop", replace(LAPTOP, curvature=tmp_path / "nothing"))
    monkeypatch.setattr(
        "brx.paper.tables.TABLES", {name: TABLES[name] for name in ("slowdown", "hessian-norm")}
    )
    assert main(["tables", "hessian-norm", "--scale", "laptop", "--runs", str(complete)]) == 2
    assert "nothing: no such folder" in capsys.readouterr().err
    assert (
        main(
            [
                "tables",
                "all",
                "--scale",
                "laptop",
                "--runs",
                str(complete),
                "--out",
                str(tmp_path / "tables"),
            ]
        )
        == 0
    )
    assert "note: table hessian-norm: " in capsys.readouterr().err
    assert (tmp_path / "tables" / "slowdown.csv").exists()


def test_slowdowns_are_those_of_the_made_up_curves_to_one_target_that_pipedream_does_not_set(
    experiments,
):
    tables = [TABLES[name].make(experiments.fresh()) for name in ("slowdown", "preconditioned")]
    # Every curve falls as 1 / (1 + t / (100 P)), so P = 32 takes 32 times as long (means of a
    # convex curve aside).
    for text in tables[0]["slowdown at P = 32"]:
        assert float(text.split()[0]) == pytest.approx(32, rel=0.05)
    assert set(tables[0]["seeds"]) == {"3"}
    slowest = experiments.find("nesterov")["last_quarter_loss"].max()
    assert {target for table in tables for target in table["target loss"]} == {f"{slowest:.3f}"}
    assert experiments.slowdown_target() == pytest.approx(slowest)


def test_slowdowns_of_both_sides_at_one_rate_stand_beside_those_at_the_best(experiments, tmp_path):
    for method, stages in product(MAIN, ENDS):
        write_method(tmp_path, method, stages, {"optimizer.lr": 3e-3}, val_loss=0.0, slowness=2)
    rows = (
        TABLES["slowdown"]
        .make(Experiments(LAPTOP, load([experiments.folder, tmp_path]), None))
        .head(3)
    )
    for column, expected in (("slowdown at P = 32", 1), ("both at 0.001", 32)):  # of the baselines
        assert [float(text.split()[0]) for text in rows[column]] == pytest.approx(
            [expected] * 3, rel=0.05
        )
