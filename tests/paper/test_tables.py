"""The paper's tables from made-up runs with known slowdowns."""

from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import pandas as pd
import pytest

from brx.cli.main import main
from brx.paper.printed import SLOWDOWNS
from brx.paper.scales import BASELINES_AND_STRATEGIES, ENDS, MAIN, SCALES, Experiments
from brx.paper.tables import TABLES, StudyTable
from brx.runs.formats import format_table
from brx.runs.frames import load
from tests.paper.helpers import LAPTOP, write_method

ROOT = Path(__file__).resolve().parents[2]
COMMITTED = ROOT / "results" / "tables" / "similar"
# These studies have runs of their own.
WITHOUT_RUNS = {
    "causes",
    "causes-costs",
    "causes-differences",
    "causes-norms",
    "architectures",
    "architecture-verdicts",
    "precision",
    "little-momentum",
}
WITH_RUNS = sorted(TABLES.keys() - WITHOUT_RUNS)


@pytest.fixture(scope="module")
def written(complete, tmp_path_factory):
    """The folder with all tables from complete results."""
    folder = tmp_path_factory.mktemp("tables")
    options = ["--scale", "laptop", "--runs", str(complete), "--out", str(folder)]
    with pytest.MonkeyPatch.context() as patch:
        # Further tests make the others, from committed runs.
        patch.setattr("brx.paper.tables.TABLES", {name: TABLES[name] for name in WITH_RUNS})
        assert main(["tables", "all", *options]) == 0
    return folder


@pytest.mark.parametrize("name", WITH_RUNS)
def test_table_has_rows_in_both_formats(written, name):
    lines = (written / f"{name}.csv").read_text().splitlines()
    assert len(lines) > 2
    assert (written / f"{name}.md").read_text().count("\n| ") >= len(lines)


def test_slowdowns_are_in_the_papers_order(written):
    _, *rows = (written / "slowdown.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows] == list(BASELINES_AND_STRATEGIES)


@pytest.fixture(scope="module")
def _studies_are_read_once():
    """The committed runs of a study do not change between the tests of its tables."""
    cached = {}
    with pytest.MonkeyPatch.context() as patch:
        for name, table in TABLES.items():
            if isinstance(table, StudyTable):
                load_once = cached.setdefault(table.load, cache(table.load))
                patch.setitem(TABLES, name, replace(table, load=load_once))
        yield


@pytest.mark.usefixtures("_studies_are_read_once")
@pytest.mark.parametrize(
    "name", [name for name in sorted(WITHOUT_RUNS) if (COMMITTED / f"{name}.csv").is_file()]
)
def test_committed_tables_of_studies_are_up_to_date(name, tmp_path, monkeypatch):
    """Measurements that come to committed runs later change verdicts; pages quote the tables."""
    monkeypatch.chdir(ROOT)
    assert main(["tables", name, "--out", str(tmp_path)]) == 0
    assert (tmp_path / f"{name}.csv").read_text() == (COMMITTED / f"{name}.csv").read_text()


@pytest.mark.parametrize("name", ["leads", "leads-by-training-loss"])
def test_committed_leads_with_llamas_blocks_are_up_to_date(name, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert main(["tables", name, "--scale", "llama", "--out", str(tmp_path)]) == 0
    committed = ROOT / "results" / "tables" / "llama" / f"{name}.csv"
    assert (tmp_path / f"{name}.csv").read_text() == committed.read_text()


@pytest.mark.parametrize(
    "name", ["leads", "leads-by-training-loss", "learning-rates", "reduction", "slowdown"]
)
def test_committed_tables_of_the_fairer_search_are_up_to_date(name, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert main(["tables", name, "--scale", "tuned", "--out", str(tmp_path)]) == 0
    committed = ROOT / "results" / "tables" / "tuned" / f"{name}.csv"
    assert (tmp_path / f"{name}.csv").read_text() == committed.read_text()


@pytest.mark.parametrize(("name", "row"), [("table 1", "LLaMA 1-65B"), ("memory", "bilateral")])
def test_formulas_need_no_runs(name, row, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["tables", name, "--format", "latex"]) == 0
    assert row in capsys.readouterr().out


@pytest.mark.parametrize("form", ["json", "latex"])
def test_asked_format_has_a_file(form, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["tables", "memory", "--format", form, "--out", "tables"]) == 0
    suffix = {"json": ".json", "latex": ".tex"}[form]
    assert "bilateral" in (tmp_path / "tables" / f"memory{suffix}").read_text()


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


def test_final_losses_say_where_they_have_how_many_seeds(tmp_path):
    for method, stages, seeds in (
        ("pipedream", 1, (0, 1, 2)),
        ("pipedream", 8, (0, 1)),
        ("pipedream", 32, (0, 1, 2)),
        ("nesterov", 1, (0, 1)),
        ("nesterov", 32, (0, 1)),
    ):
        write_method(tmp_path, method, stages, seeds=seeds)
    table = TABLES["final-loss"].make(Experiments.load(LAPTOP, tmp_path))
    counts = dict(zip(table["method"], table["seeds"], strict=True))
    assert counts == {"pipedream": "3 at P = 1, 32; 2 at P = 8", "nesterov": "2"}


def test_final_loss_tells_seeds_that_diverged(tmp_path):
    write_method(tmp_path, "nesterov", 32, seeds=(0, 1))
    write_method(tmp_path, "nesterov", 32, seeds=(2,), status="diverged")
    table = TABLES["final-loss"].make(Experiments.load(LAPTOP, tmp_path))
    assert table["P = 32"].str.endswith(", 1 diverged").tolist() == [True]


def test_saving_needs_every_baseline(tmp_path):
    """Without one of them, the best of the others may not be the best."""
    for method in ("basis-rotation", "pipedream", "pipedream-lr"):
        write_method(tmp_path, method)
    assert TABLES["reduction"].make(Experiments.load(LAPTOP, tmp_path)).empty
    write_method(tmp_path, "nesterov")
    complete = TABLES["reduction"].make(Experiments.load(LAPTOP, tmp_path))
    assert complete["model"].tolist() == ["main"]


def test_tables_of_one_study_read_it_once(tmp_path):
    write_method(tmp_path, "pipedream")
    experiments = Experiments.load(LAPTOP, tmp_path)
    loaded = []

    def load_study(folder):
        loaded.append(folder)
        return pd.DataFrame({"runs": ["1"]})

    for name in ("one", "other"):
        table = StudyTable(name, "", "A table", tmp_path, load_study, lambda study: study)
        assert len(table.make(experiments.fresh())) == 1
    assert loaded == [tmp_path]


@pytest.fixture
def unmeasured(complete, tmp_path, monkeypatch):
    """Options for a scale with runs and without measurements; there are two tables."""
    tables = {name: TABLES[name] for name in ("slowdown", "hessian-norm")}
    monkeypatch.setattr("brx.paper.tables.TABLES", tables)
    monkeypatch.setitem(SCALES, "laptop", replace(LAPTOP, curvature=tmp_path / "nothing"))
    return ["--scale", "laptop", "--runs", str(complete)]


def test_unmeasured_table_is_refused_alone(unmeasured, capsys):
    assert main(["tables", "hessian-norm", *unmeasured]) == 2
    assert "nothing: no such folder" in capsys.readouterr().err


def test_unmeasured_table_is_noted_among_others(unmeasured, tmp_path, capsys):
    assert main(["tables", "all", *unmeasured, "--out", str(tmp_path / "tables")]) == 0
    assert "note: table hessian-norm: " in capsys.readouterr().err


def test_other_tables_than_the_unmeasured_are_made(unmeasured, tmp_path):
    assert main(["tables", "all", *unmeasured, "--out", str(tmp_path / "tables")]) == 0
    assert (tmp_path / "tables" / "slowdown.csv").exists()


def first_numbers(texts):
    return [float(text.split()[0]) for text in texts]


def test_slowdowns_are_those_of_the_curves(experiments):
    table = TABLES["slowdown"].make(experiments.fresh())
    # Every curve falls as 1 / (1 + t / (100 P)), so P = 32 takes 32 times as long, apart from the
    # smoothing of a convex curve.
    numbers = first_numbers(table["slowdown at P = 32"])
    assert numbers == pytest.approx([32] * len(numbers), rel=0.05)


def test_method_outside_the_paper_has_a_row(experiments, monkeypatch):
    monkeypatch.delitem(SLOWDOWNS, "nesterov")
    table = TABLES["slowdown"].make(experiments.fresh()).set_index("method")
    assert table.loc["nesterov", "the paper's"] == ""


def test_slowdowns_count_their_seeds(experiments):
    assert set(TABLES["slowdown"].make(experiments.fresh())["seeds"]) == {"3"}


def test_pipedream_does_not_set_the_target(experiments):
    slowest = experiments.find("nesterov")["last_quarter_loss"].max()
    assert experiments.slowdown_target() == pytest.approx(slowest)


@pytest.mark.parametrize("name", ["slowdown", "preconditioned"])
def test_all_slowdowns_have_one_target(name, experiments):
    target = experiments.slowdown_target()
    assert set(TABLES[name].make(experiments.fresh())["target loss"]) == {f"{target:.3f}"}


@pytest.fixture
def baselines_at_two_rates(experiments, tmp_path):
    """The rows of the baselines, which have another rate at which delay costs nothing."""
    for method, stages in product(MAIN, ENDS):
        write_method(tmp_path, method, stages, {"optimizer.lr": 3e-3}, val_loss=0.0, slowness=2)
    runs = load([experiments.folder, tmp_path])
    return TABLES["slowdown"].make(Experiments(LAPTOP, runs, None)).head(3)


def test_slowdown_is_at_the_best_rates(baselines_at_two_rates):
    numbers = first_numbers(baselines_at_two_rates["slowdown at P = 32"])
    assert numbers == pytest.approx([1] * 3, rel=0.05)


def test_slowdown_at_the_presets_rate_stands_apart(baselines_at_two_rates):
    numbers = first_numbers(baselines_at_two_rates["both at 0.001"])
    assert numbers == pytest.approx([32] * 3, rel=0.05)
