"""Two experiments never have one name."""

import pytest

from brx.runs.aspects import comparable, with_distinct_variants
from brx.runs.frames import load
from tests.pipeline.loops import STASHES
from tests.runs.helpers import write_run


def variants_of(folder):
    """The variants of comparable runs by the run's name."""
    (runs,) = comparable(load([folder / "runs"]))
    runs = with_distinct_variants(runs)
    return dict(zip(runs["name"], runs["variant"], strict=True))


def test_every_stash_mode_has_a_name_of_its_own(tmp_path):
    for stash in STASHES:
        write_run(tmp_path, stash, f"pipeline.stash={stash}")
    assert variants_of(tmp_path) == {
        "exact": "pipedream",
        "none": "pipedream, no stashing",
        "predict": "pipedream, weight prediction",
    }


@pytest.mark.parametrize(
    ("setting", "first", "second"),
    [
        ("training.clip=0.5", "clip 1.0", "clip 0.5"),
        ("training.warmup_fraction=0.5", "warmup_fraction 0.012", "warmup_fraction 0.5"),
        ("runtime.precision=bf16", "precision fp32", "precision bf16"),
    ],
)
def test_setting_that_differs_follows_the_method(setting, first, second, tmp_path):
    for stages in (1, 4):
        write_run(tmp_path, f"usual{stages}", f"pipeline.stages={stages}")
        write_run(tmp_path, f"other{stages}", f"pipeline.stages={stages}", setting)
    assert variants_of(tmp_path) == {
        "usual1": f"pipedream, {first}",
        "usual4": f"pipedream, {first}",
        "other1": f"pipedream, {second}",
        "other4": f"pipedream, {second}",
    }


def test_error_feedback_is_named(tmp_path):
    delay = ["pipeline.stages=4", "pipeline.delay=2bw"]
    write_run(tmp_path, "with", *delay, "pipeline.error_feedback=1")
    assert variants_of(tmp_path) == {"with": "pipedream, error feedback 1, delay 2bw"}


def test_setting_that_all_runs_share_is_in_no_name(tmp_path):
    for method in ("pipedream", "nesterov"):
        write_run(tmp_path, method, f"optimizer.method={method}", "training.clip=0.5")
    assert variants_of(tmp_path) == {"pipedream": "pipedream", "nesterov": "nesterov"}
