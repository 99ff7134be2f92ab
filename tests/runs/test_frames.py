"""Runs as frames: what `brx.runs` says of a folder, which runs count as alike, and the page for
notebook users."""

import re
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest

import brx.runs
from brx.methods.trajectory_version import TRAJECTORY_VERSION
from brx.runs.aspects import comparable, differences, same_but_for
from tests.runs.helpers import ITERATIONS, write_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("frames")
    write_run(folder, "a", "optimizer.method=nesterov", versions={"torch": "2.13"}, val_loss=3.0)
    write_run(folder, "b", "optimizer.method=basis-rotation", "optimizer.source=1st", status=None)
    write_run(folder, "c")
    write_run(folder, "d", "training.seed=1", "training.log_every=1", trajectory_version=1)
    write_run(folder, "e", "pipeline.stages=2")
    write_run(
        folder,
        "f",
        "optimizer.method=torch.optim:SGD",
        "optimizer.arguments={momentum: 0.9, betas: [1, 2]}",
    )
    write_run(folder, "g", "model.width=16")
    write_run(folder, "h", trajectory_version=TRAJECTORY_VERSION + 1)
    return brx.runs.load(folder / "runs").reset_index().set_index("name")


def test_row_has_settings_next_to_outcomes(runs):
    expected = {
        "pipeline.stages": [4, 4],
        "optimizer.method": ["nesterov", "basis-rotation"],
        "method": ["nesterov", "basis-rotation 1st/bilateral"],
        "status": ["finished", "unfinished"],
        "val_loss": [3.0, 1.0],
        "train_loss": [pytest.approx(4 - (ITERATIONS - 3) / 50)] * 2,  # the mean of the last 7
    }
    assert {key: runs.loc[["a", "b"], key].tolist() for key in expected} == expected


def test_row_has_what_the_summary_says(runs):
    assert runs["versions.torch"].dropna().to_dict() == {"a": "2.13"}


def test_validation_loss_is_the_final_one(tmp_path):
    metrics = write_run(tmp_path, "rises", val_loss=2.5).path / "metrics.jsonl"
    lines = metrics.read_text().splitlines()
    lines.insert(200, '{"iteration": 200, "val_loss": 2.0}')
    metrics.write_text("\n".join([*lines, ""]))
    assert brx.runs.load(tmp_path / "runs")["val_loss"].tolist() == [2.5]


def test_rows_are_in_order_of_folders(runs):
    assert [path.rpartition("/")[2] for path in runs["run"]] == list("abcdefgh")


@pytest.fixture
def run(tmp_path):
    """The folder of a run with one validation, of loss 3."""
    return write_run(tmp_path, "a", val_loss=3.0).path


def test_curves_have_a_row_per_iteration(run):
    curves = brx.runs.curves(run)
    assert curves["iteration"].tolist() == list(range(1, ITERATIONS + 1))
    assert curves["run"].unique().tolist() == [str(run)]
    np.testing.assert_allclose(curves["train_loss"], 4.0 - curves["iteration"] / 50)


def test_curves_have_validations_where_they_were(run):
    curves = brx.runs.curves(run).set_index("iteration")
    assert curves["val_loss"].dropna().to_dict() == {ITERATIONS: 3.0}


@pytest.mark.parametrize(
    ("left_out", "labels"),
    [
        (["training.seed"], [0, 0, 1, 2]),
        (["training.seed", "pipeline.stages"], [0, 0, 0, 1]),
        (["training.seed", "optimizer"], [0, 0, 1, 0]),
    ],
)
def test_runs_are_alike_but_for_what_is_named(left_out, labels, runs):
    # d has another seed than c, e other stages, f another optimizer.
    assert same_but_for(runs.loc[["c", "d", "e", "f"]], *left_out).tolist() == labels


def test_seeds_are_one_experiment(runs):
    alike = runs.loc[["c", "d", "e", "f"]]
    assert alike["experiment"].duplicated().tolist() == [False, True, False, False]


def test_differences_name_the_aspect(runs):
    assert differences(runs.loc[["c", "g"]]) == [
        "g and c differ in model: their losses do not compare"
    ]


def test_runs_that_differ_alike_share_a_line(tmp_path):
    write_run(tmp_path, "a")
    for seed in range(5):
        write_run(tmp_path, f"wide{seed}", "model.width=16", f"training.seed={seed}")
    (line,) = differences(brx.runs.load(tmp_path / "runs"))
    assert "wide2 and 2 more and " in line
    assert line.endswith("/a differ in model: their losses do not compare")


def test_data_of_a_run_that_has_not_ended_are_unknown_not_different(tmp_path):
    write_run(tmp_path, "a-training", status=None)
    write_run(tmp_path, "ended")
    write_run(tmp_path, "other-data", corpus="g")
    unknown, different = sorted(differences(brx.runs.load(tmp_path / "runs")))
    assert "/a-training: without a summary.json" in unknown
    assert "/ended, their losses compare" in unknown
    assert "/other-data and " in different
    assert different.endswith("/ended differ in data fingerprint: their losses do not compare")


def test_runs_that_have_not_ended_differ_in_nothing(tmp_path):
    for seed in range(2):
        write_run(tmp_path, f"s{seed}", f"training.seed={seed}", status=None)
    assert differences(brx.runs.load(tmp_path / "runs")) == []


def test_unrecorded_trajectory_version_is_the_first(runs):
    assert differences(runs.loc[["c", "d", "e", "h"]]) == [
        "h and c differ in trajectory version: their losses do not compare"
    ]


ROOT = Path(__file__).parents[2]


def test_snippets_of_the_page_run(monkeypatch):
    monkeypatch.chdir(ROOT)
    mpl.use("Agg")
    page = (ROOT / "docs" / "notebook.md").read_text(encoding="utf-8")
    snippets = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert len(snippets) == 5
    names = {}
    for snippet in snippets:
        exec(snippet, names)
    assert len(snippets[0].splitlines()) <= 5
    assert names["losses"].shape == (2, 2)
    assert len(names["axes"].lines) == 4
    assert sorted(names["costs"]["method"]) == ["basis-rotation", "pipedream"]


def test_shared_settings_leave_names_of_variants(tmp_path):
    write_run(tmp_path, "a", "optimizer.method=pipedream", "optimizer.beta2=0.99")
    write_run(
        tmp_path,
        "b",
        "optimizer.method=nesterov",
        "optimizer.beta2=0.99",
        "optimizer.weight_decay=0.3",
    )
    write_run(tmp_path, "c", "optimizer.method=torch.optim:SGD")  # which has none of them
    (alike,) = comparable(brx.runs.load(tmp_path / "runs"))
    assert set(alike["variant"]) == {"pipedream", "nesterov, weight_decay 0.3", "torch.optim:SGD"}
    write_run(tmp_path, "d", "optimizer.method=pipedream")
    (alike,) = comparable(brx.runs.load(tmp_path / "runs"))
    assert {"pipedream, beta2 0.99", "pipedream"} < set(alike["variant"])


def versions(tmp_path, **recorded):
    """The versions by which runs of two methods compare, by the versions that they recorded."""
    for name, version in recorded.items():
        method = name.rstrip("12").replace("_", "-")
        write_run(tmp_path, name, f"optimizer.method={method}", trajectory_version=version)
    return brx.runs.load(tmp_path / "runs").set_index("name")["trajectory_version"].to_dict()


def test_unchanged_method_compares_with_the_new_version(tmp_path):
    assert len(set(versions(tmp_path, pipedream=4, basis_rotation=5).values())) == 1


def test_unchanged_method_compares_with_the_old_version(tmp_path):
    assert len(set(versions(tmp_path, pipedream=5, basis_rotation=4).values())) == 1


def test_both_versions_of_a_changed_method_differ(tmp_path):
    found = versions(tmp_path, pipedream=4, basis_rotation1=4, basis_rotation2=5)
    assert found == {"pipedream": 5, "basis_rotation1": 4, "basis_rotation2": 5}


def test_seeds_of_an_unchanged_method_are_one_experiment(tmp_path):
    versions(tmp_path, pipedream1=4, pipedream2=5)
    assert brx.runs.load(tmp_path / "runs")["experiment"].nunique() == 1
