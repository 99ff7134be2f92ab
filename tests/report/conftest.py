"""Runs and pages that all tests of the report share."""

import pytest

from brx.cli.main import main
from brx.paper.figures import FIGURES
from brx.paper.tables import TABLES
from tests.report.helpers import EVIL_NAME, write_run


@pytest.fixture(scope="package")
def runs(tmp_path_factory):
    """Two methods at P = 1 and 32, a run at a learning rate that is not chosen, one that diverged,
    and one with an evil name."""
    folder = tmp_path_factory.mktemp("results")
    for method, delayed in (("pipedream", 2.8), ("basis-rotation", 2.1)):
        for stages, final_loss in ((1, 2.0), (32, delayed)):
            settings = {"optimizer.method": method, "pipeline.stages": stages}
            write_run(folder / f"{method}-{stages}", final_loss, {**settings, "optimizer.lr": 1e-3})
    worse = {"optimizer.method": "pipedream", "pipeline.stages": 32}
    write_run(folder / "pipedream-32-worse", 2.9, {**worse, "optimizer.lr": 3e-4})
    write_run(
        folder / "pipedream-32-diverged",
        float("nan"),
        {**worse, "optimizer.lr": 1e-2},
        status="diverged",
    )
    other = {
        "optimizer.method": "nesterov",
        "pipeline.stages": 1,
        "optimizer.lr": 1e-3,
        "training.seed": 3,
    }
    write_run(folder / EVIL_NAME, 2.5, other)
    return folder


@pytest.fixture(scope="package", autouse=True)
def _few_figures_and_tables():
    """Limits the page to three figures and three tables, some with runs and some without. Other
    tests draw all of them, which takes a while."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "brx.report.page.FIGURES",
            {name: FIGURES[name] for name in ("teaser", "validation", "width")},
        )
        patch.setattr(
            "brx.report.page.TABLES",
            {name: TABLES[name] for name in ("claims", "final-loss", "ladder")},
        )
        yield


@pytest.fixture(scope="package")
def page(runs, tmp_path_factory):
    """The report of those runs."""
    path = tmp_path_factory.mktemp("report") / "report.html"
    assert (
        main(
            [
                "report",
                "--scale",
                "laptop",
                "--runs",
                str(runs),
                "--figures",
                str(runs),
                "--out",
                str(path),
            ]
        )
        == 0
    )
    return path


@pytest.fixture(scope="package")
def own_page(tmp_path_factory):
    """The report of two runs that do not belong to the paper's experiments."""
    folder = tmp_path_factory.mktemp("own")
    for stages, final_loss in ((1, 2.0), (2, 2.3)):
        settings = {"optimizer.method": "muon", "pipeline.stages": stages, "model.width": 24}
        write_run(folder / "runs" / f"p{stages}", final_loss, {**settings, "optimizer.lr": 2e-3})
    path = folder / "report.html"
    arguments = ["--runs", str(folder / "runs"), "--figures", str(folder), "--out", str(path)]
    assert main(["report", *arguments]) == 0
    return path
