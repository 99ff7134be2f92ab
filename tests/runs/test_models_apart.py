"""What tells two models apart, in the identity of a run and in the name of its model."""

import pytest

from brx.config.schema import GPTConfig, LlamaConfig, MoEConfig, RopeScalingConfig
from brx.model.description import sections
from brx.runs.frames import load
from brx.sweep.cell import trajectory_id
from tests.runs.helpers import write_run
from tests.train.helpers import tiny_config

GPT = {
    "blocks": 8,
    "width": 16,
    "heads": 4,
    "sequence_length": 8,
    "moe": "{experts: 4}",
}
LLAMA = GPT | {
    "kv_heads": 1,
    "hidden": 24,
    "rope_theta": 5e5,
    "rope_scaling": "{factor: 2.0}",
    "norm_eps": 1e-6,
    "tied": True,
}
MOE = {
    "experts": 4,
    "top_k": 1,
    "every": 1,
    "load_balance_weight": 0.1,
    "router_z_weight": 0.1,
}
ROPE = {
    "factor": 4.0,
    "low_frequency": 0.5,
    "high_frequency": 8.0,
    "original_sequence_length": 64,
}
OWN = """
from torch import nn

class Mine(nn.Module):
    def __init__(self, vocabulary_size, sequence_length, blocks, width, kernel: int = 2):
        super().__init__()
"""
# From a model's settings to other values of each, one at a time.
SECTIONS = {
    "model={class: gpt}": (GPTConfig, GPT),
    "model={class: gpt, moe: {experts: 8}}": (MoEConfig, MOE),
    "model={class: llama}": (LlamaConfig, LLAMA),
    "model={class: llama, rope_scaling: {factor: 8.0}}": (RopeScalingConfig, ROPE),
}
PREFIXES = {MoEConfig: "model.moe.", RopeScalingConfig: "model.rope_scaling."}
# One stage, which `tied` needs.
ONE_STAGE = [
    "pipeline.stages=1",
    "model.blocks=4",
    "model.width=8",
    "model.heads=2",
    "model.sequence_length=16",
]


def _changes():
    for model, (section, values) in SECTIONS.items():
        prefix = PREFIXES.get(section, "model.")
        for key, value in values.items():
            yield model, f"{prefix}{key}={value}"


def test_every_model_is_tried():
    assert {section for section, _ in SECTIONS.values()} >= set(sections().values())


@pytest.mark.parametrize("section", [section for section, _ in SECTIONS.values()])
def test_every_setting_of_a_model_is_tried(section):
    (tried,) = (values for one, values in SECTIONS.values() if one is section)
    assert tried.keys() == section.model_fields.keys() - {"name"}


@pytest.mark.parametrize(("model", "change"), list(_changes()))
def test_setting_of_the_model_changes_the_identity(model, change, tmp_path):
    before = tiny_config(tmp_path, model, *ONE_STAGE)
    after = tiny_config(tmp_path, model, *ONE_STAGE, change)
    assert trajectory_id(before) != trajectory_id(after)


@pytest.mark.parametrize("model", SECTIONS)
def test_no_two_models_have_one_name(model, tmp_path):
    changes = [[]] + [[change] for of_model, change in _changes() if of_model == model]
    for number, change in enumerate(changes):
        write_run(tmp_path, f"run{number}", model, *ONE_STAGE, *change)
    names = load([tmp_path / "runs"])["architecture"]
    assert names.nunique() == len(changes)


def test_models_that_words_tell_apart_keep_their_words(tmp_path):
    write_run(tmp_path, "narrow", "model.width=8")
    write_run(tmp_path, "wide", "model.width=16", "model.heads=4")
    names = load([tmp_path / "runs"])["architecture"]
    assert sorted(names) == ["4 blocks, d 16", "4 blocks, d 8"]


def test_setting_that_differs_follows_the_words(tmp_path):
    write_run(tmp_path, "two", "model.heads=2")
    write_run(tmp_path, "four", "model.heads=4")
    names = load([tmp_path / "runs"])["architecture"]
    assert sorted(names) == ["4 blocks, d 8, heads 2", "4 blocks, d 8, heads 4"]


@pytest.mark.parametrize("change", ["an option", "the file"])
def test_own_model_that_changes_has_another_identity(change, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(OWN)
    model = f"model={{class: '{file}:Mine', blocks: 4, width: 8, sequence_length: 16}}"
    before = tiny_config(tmp_path, model)
    if change == "an option":
        after = tiny_config(tmp_path, model, "model.kernel=3")
    else:
        file.write_text(OWN + "        self.scale = 2.0\n")
        after = tiny_config(tmp_path, model)
    assert trajectory_id(before) != trajectory_id(after)
