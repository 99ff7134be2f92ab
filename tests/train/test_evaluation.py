"""`brx evaluate` against the training's own validations, and against a loss computed in float64."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from torch.func import functional_call

from brx.curvature.checkpoints import load_checkpoint
from brx.data.prepare import prepare
from brx.errors import UserError
from brx.runs.run import Run
from brx.train import evaluation
from brx.train.evaluation import Evaluation, evaluate_run, mean_and_error
from brx.train.loop import train
from tests.train.helpers import tiny_config


def trained(folder, *overrides):
    config = tiny_config(folder, "training.keep_at=[14]", *overrides)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        assert train(config, folder / "run") == "finished"
    return folder / "run"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run. Read only."""
    return trained(tmp_path_factory.mktemp("evaluation"))


@pytest.fixture
def run(finished, tmp_path):
    """A copy of it, to write results into."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def recorded(run):
    """The loss of the training's last validation."""
    return json.loads((run / "summary.json").read_text())["final_val_loss"]


def test_it_repeats_the_validation_of_the_training(run):
    assert evaluate_run(run, examples=5).loss == recorded(run)


@pytest.mark.parametrize(
    "overrides",
    [
        ("optimizer={method: pytorch_optimizer:ScheduleFreeAdamW, lr: 0.01}",),
        ("model.moe={experts: 2, top_k: 1, every: 2}",),
        ("pipeline.stash=predict",),
        ("logging.staleness_every=10",),
    ],
    ids=["schedule-free", "mixture", "predicted", "staleness"],
)
def test_it_does_so_for_every_kind_of_run(tmp_path, own_code, overrides):
    run = trained(tmp_path, *overrides)
    assert evaluate_run(run, examples=5).loss == recorded(run)


def test_it_needs_one_device_for_a_run_of_several(run):
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["pipeline"]["devices"] = 4
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    assert evaluate_run(run, examples=5).loss == recorded(run)


def test_loss_is_that_of_the_model_in_float64(run):
    loaded = load_checkpoint(run, dtype=torch.float64)
    tokens = np.asarray(prepare(loaded.run.config.data).validation.tokens).astype(np.int64)
    losses = []
    for start in np.linspace(0, len(tokens) - 17, 40).astype(int):
        window = torch.from_numpy(tokens[start : start + 17])
        inputs, targets = window[None, :-1], window[None, 1:]
        output = functional_call(loaded.model, loaded.parameters, (inputs, targets))
        losses.append(output.loss.item())
    assert evaluate_run(run, examples=40).loss == pytest.approx(np.mean(losses), rel=1e-5)


def test_every_example_counts_alike_in_an_uneven_batch(run):
    # 3 examples in batches of 2: the last batch has one.
    first, second, third = (one_example(run, place) for place in (0.0, 0.5, 1.0))
    expected = (first + second + third) / 3
    assert evaluate_run(run, examples=3).loss == pytest.approx(expected, rel=1e-5)


def one_example(run, place):
    """The loss of the window at a place from 0 to 1 in the validation data."""
    loaded = load_checkpoint(run)
    tokens = np.asarray(prepare(loaded.run.config.data).validation.tokens).astype(np.int64)
    start = int(place * (len(tokens) - 17))
    window = torch.from_numpy(tokens[start : start + 17])
    output = functional_call(loaded.model, loaded.parameters, (window[None, :-1], window[None, 1:]))
    return output.loss.item()


def test_standard_error_is_that_of_equal_batches():
    losses = [1.0, 2.0, 4.0, 1.5]
    mean, error = mean_and_error(losses, [3, 3, 3, 3])
    assert mean == pytest.approx(np.mean(losses))
    assert error == pytest.approx(np.std(losses, ddof=1) / math.sqrt(4))


def test_standard_error_of_uneven_batches_is_the_spread_of_the_mean():
    # The mean of a batch has a variance of 1 / size.
    sizes = [8] * 9 + [2]
    generator = np.random.default_rng(0)
    drawn = generator.standard_normal((3000, len(sizes))) / np.sqrt(sizes)
    means, errors = np.transpose([mean_and_error(losses.tolist(), sizes) for losses in drawn])
    assert np.sqrt(np.square(errors).mean()) == pytest.approx(means.std(), rel=0.05)


def test_one_batch_has_no_standard_error():
    assert mean_and_error([2.0], [4]) == (2.0, None)


def test_standard_error_covers_the_loss_of_all_examples(run):
    """The whole validation data lie within four standard errors of a part."""
    part = evaluate_run(run, examples=400)
    whole = evaluate_run(run)
    data = prepare(Run.load(run).config.data)
    assert whole.examples == data.validation.num_tokens // 16  # so they do not overlap
    assert whole.examples > 5 * part.examples
    assert abs(part.loss - whole.loss) < 4 * part.standard_error
    assert whole.standard_error < part.standard_error


def test_by_default_examples_are_no_more_than_suffice(run, monkeypatch):
    monkeypatch.setattr(evaluation, "USUAL_EXAMPLES", 30)
    assert evaluate_run(run).examples == 30


def test_an_earlier_checkpoint_can_be_measured(run):
    early = evaluate_run(run, iteration=14, examples=40)
    late = evaluate_run(run, examples=40)
    assert (early.iteration, late.iteration) == (14, 30)
    assert early.loss > late.loss


def test_results_with_other_numbers_of_examples_are_kept(run):
    evaluate_run(run, examples=5)
    evaluate_run(run, examples=40)
    assert [result.examples for result in Evaluation.all_of(run)] == [40, 5]


def test_the_run_stays_as_it_is(run):
    def content():
        files = [path for path in run.rglob("*") if path.is_file() and "analysis" not in path.parts]
        return {path: path.read_bytes() for path in files}

    before = content()
    evaluate_run(run, examples=5)
    assert content() == before


def test_the_command_prints_what_it_measures_and_what_it_has_measured(run, printed):
    now = printed("evaluate", run, "--examples", 40, "--format", "csv")
    assert printed("evaluate", run, "--measured", "--format", "csv") == now
    header, row = now.splitlines()
    values = dict(zip(header.split(","), row.split(","), strict=True))
    result = Evaluation.all_of(run)[0]
    assert float(values["loss"]) == pytest.approx(result.loss, abs=1e-4)
    assert float(values["perplexity"]) == pytest.approx(math.exp(result.loss), rel=1e-3)


def test_exported_runs_keep_their_results(run, tmp_path, printed):
    evaluate_run(run, examples=40)
    printed("export", run, "--to", tmp_path / "exported")
    assert "40" in printed("evaluate", tmp_path / "exported", "--measured")


def test_more_examples_than_the_data_have_are_refused(run, refused):
    error = refused("evaluate", run, "--examples", 10**8)
    assert "--examples: must be at most" in error


def test_an_exported_run_has_nothing_to_evaluate(run, tmp_path, printed, refused):
    printed("export", run, "--to", tmp_path / "exported")
    assert "has no checkpoint" in refused("evaluate", *(tmp_path / "exported").iterdir())


def test_examples_and_measured_are_refused_together(run, refused):
    assert "--measured" in refused("evaluate", run, "--examples", 40, "--measured")


def test_a_damaged_checkpoint_is_refused(run, refused):
    stage = sorted((run / "checkpoints").glob("*30/*"))[-1]
    stage.write_bytes(stage.read_bytes()[:-10])
    assert str(run) in refused("evaluate", run, "--examples", 5)


def test_other_data_are_refused(run):
    config = yaml.safe_load((run / "config.yaml").read_text())
    text = run.parent / "other.txt"
    text.write_text("another text, of which there is enough\n" * 5000)
    config["data"]["source"] = str(text)
    config["data"]["directory"] = str(run.parent / "other")
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(UserError, match="data"):
        evaluate_run(run, examples=5)
