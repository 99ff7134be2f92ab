"""What an export keeps, and where it rounds."""

import numpy as np
import pytest

from brx.errors import UserError
from brx.runs.export import block_means, export, export_runs
from brx.runs.metrics import read_curves
from tests.runs.helpers import write_run


@pytest.mark.parametrize("length", [1, 3, 4, 9])
def test_blocks_have_their_means(length):
    values = np.array([5.0, 1.0, 2.0, 6.0, 4.0, 3.0, 7.0])
    expected = []
    for place in range(len(values)):
        last = len(values) - (len(values) - 1 - place) // length * length
        block = values[max(0, last - length) : last]
        expected.append(sum(block) / len(block))
    assert block_means(values, length).tolist() == pytest.approx(expected)


def test_no_values_have_no_blocks():
    assert block_means(np.array([]), 4).tolist() == []


@pytest.mark.parametrize("unfinished", [False, True])
def test_run_with_a_damaged_summary_is_named(unfinished, tmp_path, capsys):
    summary = write_run(tmp_path, "a").path / "summary.json"
    write_run(tmp_path, "b")
    summary.write_text(summary.read_text()[:-9])
    counts = export_runs([tmp_path / "runs"], tmp_path / "out", unfinished=unfinished)
    assert counts == (1, 0)
    assert f"{summary}: not readable" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ({"overrides": ["optimizer.lr=0.5"]}, {}, "optimizer.lr was 0.5 and is now 0.01"),
        ({"corpus": "a"}, {"corpus": "b"}, "the fingerprint of its data was a and is now b"),
        ({}, {"status": None}, "is an export of the whole run"),
    ],
)
def test_export_of_another_run_is_not_replaced(first, second, expected, tmp_path):
    out = tmp_path / "out"
    for name, options in (("first", first), ("second", second)):
        folder = tmp_path / name
        folder.mkdir()
        write_run(folder, "p1", *options.pop("overrides", ()), **options)
    export_runs([tmp_path / "first" / "runs"], out)
    before = (out / "p1" / "config.yaml").read_text(), read_curves(out / "p1").train_loss.tolist()
    with pytest.raises(UserError) as refused:
        export_runs([tmp_path / "second" / "runs"], out, unfinished=True)
    assert expected in str(refused.value)
    after = (out / "p1" / "config.yaml").read_text(), read_curves(out / "p1").train_loss.tolist()
    assert after == before


def test_export_of_the_same_run_is_renewed(tmp_path):
    write_run(tmp_path, "p1")
    for _ in range(2):
        assert export_runs([tmp_path / "runs"], tmp_path / "out") == (1, 0)


@pytest.fixture
def exported(tmp_path):
    """The curves of a tuning run of 400 iterations, before and after an export."""
    write_run(tmp_path, "p1", "training.for_tuning=true")
    run = tmp_path / "runs" / "p1"
    export(run, tmp_path / "out" / "p1")
    return read_curves(run), read_curves(tmp_path / "out" / "p1")


def test_exported_tuning_run_has_means_of_losses(exported):
    whole, compact = exported
    for block in range(4):
        own = slice(100 * block, 100 * (block + 1))
        assert compact.train_loss[own] == pytest.approx(whole.train_loss[own].mean(), abs=1e-3)


def test_exported_tuning_run_has_every_iteration(exported):
    whole, compact = exported
    assert compact.iterations.tolist() == whole.iterations.tolist()


def test_exported_tuning_run_keeps_the_validation_loss(exported):
    whole, compact = exported
    assert compact.val_loss.tolist() == whole.val_loss.tolist()
