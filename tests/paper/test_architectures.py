"""GPT's blocks against Llama's, from made-up final losses."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from scipy.stats import ttest_ind

from brx.errors import UserError
from brx.paper import architectures
from brx.paper.architectures import (
    GPT,
    LLAMA,
    METHODS,
    NOT_RUN,
    Study,
    _draw_losses,
    architecture_table,
    conjunction,
    draw_architectures,
    verdict_table,
)
from brx.paper.scales import SCALES, VARIANTS, Model
from brx.plot.style import new_figure
from tests.paper.helpers import write_experiment

SETTINGS = {GPT: {}, LLAMA: {"model.class": "llama", "model.kv_heads": 1}}
# Final validation losses without delay and under the delays of 32 stages, by method.
LOSSES = {
    "pipedream": (1.47, 1.80),
    "pipedream-lr": (1.47, 1.75),
    "nesterov": (1.43, 1.70),
    "muon": (1.34, 1.40),
    "basis-rotation": (1.31, 1.35),
}
NOISE = (0.0, 0.004, -0.003)  # nats, of the three seeds with delay


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Where the runs of each architecture go, both on the laptop's preset."""
    folders = {architecture: tmp_path / architecture for architecture in SETTINGS}
    of_study = {}
    for architecture, settings in SETTINGS.items():
        scale = architectures.SCALE_OF[architecture]
        models = {"main": Model("laptop", settings)}
        of_study[architecture] = replace(scale, runs=folders[architecture], models=models)
    monkeypatch.setattr(architectures, "SCALE_OF", of_study)
    return folders


def write_method(folders, architecture, method, losses, *, ends=(1, 32), num_seeds=3):
    for P, loss in zip((1, 32), losses, strict=True):
        if P not in ends:
            continue
        for seed, noise in enumerate(NOISE[:num_seeds]):
            settings = {"pipeline.stages": P, **VARIANTS[method], **SETTINGS[architecture]}
            write_experiment(
                folders[architecture],
                "laptop",
                settings,
                seeds=(seed,),
                val_loss=loss + noise * (P > 1),
                slowness=1.0 if P == 1 else 1.0 + 10.0 * (losses[1] - losses[0]),
            )


def write_all(folders, architecture, extra_cost=0.0):
    for method, (without, delayed) in LOSSES.items():
        write_method(folders, architecture, method, (without, delayed + extra_cost))


def row_of(folders, architecture, method):
    table = architecture_table(Study.load(folders[LLAMA])).set_index(["model", "method"])
    return table.loc[(architecture, method)]


def test_cost_is_a_difference_by_seed(folders):
    write_method(folders, LLAMA, "muon", (1.3, 1.5))
    costs = Study.load(folders[LLAMA]).cost(LLAMA, "muon")
    assert costs.tolist() == pytest.approx([0.2 + noise for noise in NOISE])


def test_table_has_the_interval_of_each_lead_of_basis_rotation(folders):
    write_all(folders, LLAMA)
    row = row_of(folders, LLAMA, "muon")
    # 1.40 minus 1.35 nats on every seed: the noise of a seed is the same for both methods.
    assert row["above basis-rotation, P = 32"] == "0.050 [0.050, 0.050]"
    assert row_of(folders, LLAMA, "basis-rotation")["above basis-rotation, P = 32"] == ""


def test_published_runs_of_gpt_are_beside_llamas():
    # tests/paper/test_tables.py compares this file with the committed runs.
    path = "results/tables/similar/architectures.csv"
    table = pd.read_csv(path, dtype=str, keep_default_na=False).set_index(["model", "method"])
    row = table.loc[(architectures.RATES_ALONE, "pipedream")]
    assert (row["seeds"], row["to run"]) == ("5", "")


def test_table_has_a_row_per_model_with_method(folders):
    write_all(folders, LLAMA)
    table = architecture_table(Study.load(folders[LLAMA]))
    assert len(table) == 2 * len(METHODS)


def test_table_names_the_missing_end(folders):
    write_method(folders, LLAMA, "muon", (1.3, 1.5), ends=(1,))
    assert row_of(folders, LLAMA, "muon")["to run"] == "P = 32"


def test_table_names_both_ends_of_an_absent_folder(folders):
    write_method(folders, LLAMA, "muon", (1.3, 1.5))
    assert row_of(folders, GPT, "muon")["to run"] == "P = 1, P = 32"


def test_difference_between_models_is_welchs(folders):
    write_method(folders, GPT, "muon", (1.3, 1.4))
    write_method(folders, LLAMA, "muon", (1.2, 1.5))
    of_gpt, of_llama = np.add(0.1, NOISE), np.add(0.3, NOISE)
    interval = ttest_ind(of_llama, of_gpt, equal_var=False).confidence_interval(0.95)
    expected = f"+0.200 [{interval.low:+.3f}, {interval.high:+.3f}], more"
    assert row_of(folders, LLAMA, "muon")["Llama's minus GPT's"] == expected


@pytest.mark.parametrize(
    ("at_ends", "expected"),
    [((0, 0), ""), ((2, 2), "2"), ((3, 2), "3 and 2"), ((0, 3), "0 and 3")],
)
def test_table_counts_the_seeds_at_each_end(at_ends, expected, folders):
    for P, num_seeds in zip((1, 32), at_ends, strict=True):
        write_method(folders, LLAMA, "muon", (1.3, 1.4), ends=(P,), num_seeds=num_seeds)
    write_method(folders, LLAMA, "nesterov", (1.3, 1.4))  # the table needs a run
    assert row_of(folders, LLAMA, "muon")["seeds"] == expected


def test_two_seeds_give_no_difference(folders):
    write_method(folders, GPT, "muon", (1.3, 1.4), num_seeds=2)
    write_method(folders, LLAMA, "muon", (1.2, 1.5), num_seeds=2)
    assert row_of(folders, LLAMA, "muon")["Llama's minus GPT's"] == ""


def test_conclusion_holds_where_all_statements_do(folders):
    write_all(folders, GPT)
    write_all(folders, LLAMA, extra_cost=0.01)
    table = verdict_table(Study.load(folders[LLAMA]))
    assert table[[GPT, LLAMA]].iloc[-1].tolist() == ["yes", "yes"]


def test_baseline_below_basis_rotation_refutes_the_conclusion(folders):
    write_all(folders, LLAMA)
    write_method(folders, LLAMA, "nesterov", (1.43, 1.30))
    assert verdict_table(Study.load(folders[LLAMA]))[LLAMA].iloc[-1] == "no"


def test_verdict_without_runs_names_the_sweep(folders):
    write_all(folders, LLAMA)
    table = verdict_table(Study.load(folders[LLAMA]))
    assert table[GPT].tolist() == [NOT_RUN] * len(table)
    assert table[f"{GPT}, here"].iloc[0] == "brx sweep configs/sweeps/tuned/main.yaml"


def test_verdict_names_the_missing_method(folders):
    write_method(folders, LLAMA, "basis-rotation", LOSSES["basis-rotation"])
    table = verdict_table(Study.load(folders[LLAMA]))
    assert "pipedream at P = 32" in table[f"{LLAMA}, here"].iloc[0]


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        (["yes", "yes"], "yes"),
        (["yes", "open"], "open"),
        (["yes", NOT_RUN], NOT_RUN),
        ([NOT_RUN, "no"], "no"),
    ],
)
def test_conjunction_of_verdicts(verdicts, expected):
    assert conjunction(verdicts) == expected


def test_no_runs_at_all_are_refused(folders):
    with pytest.raises(UserError, match=r"configs/sweeps/llama/main\.yaml"):
        architecture_table(Study.load(folders[LLAMA]))


def test_runs_for_tuning_alone_are_refused(folders):
    settings = {**VARIANTS["muon"], **SETTINGS[LLAMA], "training.for_tuning": True}
    write_experiment(folders[LLAMA], "laptop", settings, seeds=(100,))
    with pytest.raises(UserError, match="have reported runs yet"):
        architecture_table(Study.load(folders[LLAMA]))


def test_empty_folder_counts_as_no_runs(folders):
    write_method(folders, LLAMA, "muon", (1.3, 1.5))
    folders[GPT].mkdir()
    assert row_of(folders, GPT, "muon")["to run"] == "P = 1, P = 32"


def test_least_cost_is_by_seed(folders):
    """A run that diverged makes its method's cost infinite; its other seeds alone decide
    nothing."""
    write_method(folders, LLAMA, "muon", (1.3, 1.31))
    write_method(folders, LLAMA, "basis-rotation", (1.3, 1.35))
    settings = {"pipeline.stages": 32, **VARIANTS["muon"], **SETTINGS[LLAMA]}
    write_experiment(folders[LLAMA], "laptop", settings, seeds=(2,), status="diverged")
    with new_figure() as figure:
        axes = figure.subplots()
        _draw_losses(Study.load(folders[LLAMA]), LLAMA, axes)
    assert "lowest mean cost of delay: Basis rotation, 0.05 nats" in axes.get_title()


def test_seed_that_diverged_without_delay_has_no_cost(folders):
    write_method(folders, LLAMA, "muon", (1.3, 1.31))
    settings = {"pipeline.stages": 1, **VARIANTS["muon"], **SETTINGS[LLAMA]}
    write_experiment(folders[LLAMA], "laptop", settings, seeds=(2,), status="diverged")
    cost = Study.load(folders[LLAMA]).cost(LLAMA, "muon")
    assert cost.index.tolist() == [0, 1]


def test_title_says_least_only_beyond_chance(folders):
    def title():
        with new_figure() as figure:
            axes = figure.subplots()
            _draw_losses(Study.load(folders[LLAMA]), LLAMA, axes)
            return axes.get_title()

    write_method(folders, LLAMA, "muon", (1.3, 1.35))
    write_method(folders, LLAMA, "pipedream", (1.4, 1.5))
    assert "delay costs Muon least: 0.05 nats" in title()
    # Basis rotation's mean cost is 0.06 nats, but it is lower than Muon's on one seed of three.
    for seed, delayed in enumerate((1.30, 1.40, 1.38)):
        for P, loss in ((1, 1.30), (32, delayed)):
            settings = {"pipeline.stages": P, **VARIANTS["basis-rotation"], **SETTINGS[LLAMA]}
            write_experiment(folders[LLAMA], "laptop", settings, seeds=(seed,), val_loss=loss)
    assert "lowest mean cost of delay: Muon, 0.05 nats" in title()


@pytest.fixture
def drawn(folders, tmp_path):
    """The files of a figure from Llama's runs alone, without Muon's under delay."""
    write_all(folders, LLAMA)
    for run in folders[LLAMA].iterdir():
        config = (run / "config.yaml").read_text()
        if "muon" in config and "stages: 1\n" not in config:
            (run / "summary.json").unlink()
            (run / "curves.npz").unlink()
            (run / "config.yaml").unlink()
            run.rmdir()
    return draw_architectures(folders[LLAMA], tmp_path / "figure")


def test_caption_names_what_has_no_runs(drawn):
    caption = drawn[3].read_text()
    assert "Llama muon at P = 32" in caption
    assert "GPT, whose runs brx sweep configs/sweeps/tuned/main.yaml makes" in caption


def test_figure_keeps_the_losses_by_seed(drawn):
    records = json.loads(drawn[4].read_text())["losses"]
    (record,) = [each for each in records if each["method"] == "nesterov" and each["P"] == 1]
    assert record["loss by seed"] == {"0": 1.43, "1": 1.43, "2": 1.43}


def test_scale_of_llama_has_no_depths_between(tmp_path):
    assert SCALES["llama"].maker("main", 4) == ""


def test_scale_of_llama_makes_its_ends(tmp_path):
    assert SCALES["llama"].maker("main", 32) == "configs/sweeps/llama/main.yaml"
