"""Configurations: presets load and round-trip; each mistake is one line that names file, key and
what is right."""

import re
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from brx.config.loading import (
    PRESETS,
    apply_overrides,
    dump_config,
    load_config,
    load_yaml_as,
    parse_yaml,
)
from brx.config.schema import RunConfig
from brx.config.user_code import code_file
from brx.data.prepare import token_folder
from brx.errors import UserError
from brx.files import user_path
from brx.sweep.spec import SweepSpec


@pytest.mark.parametrize("preset", sorted(path.stem for path in PRESETS.glob("*.yaml")))
def test_preset_round_trips(preset, tmp_path):
    config = load_config(preset)
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(config))
    assert load_config(path) == config


def test_overrides_win():
    config = load_config(
        "quick", ["optimizer.method=basis-rotation", "optimizer.lr=3e-4", "model.moe.experts=4"]
    )
    assert config.optimizer.method == "basis-rotation"
    assert config.optimizer.lr == 3e-4
    assert config.model.moe.experts == 4


def test_override_may_be_a_section():
    section = "optimizer={method: 'torch.optim:SGD', arguments: {a: 0.9}}"
    assert load_config("quick", [section]).optimizer.arguments == {"a": 0.9}


def test_infinite_override_reads_back():
    config = load_config("quick", ["training.clip=.inf"])
    assert RunConfig.model_validate(parse_yaml(dump_config(config), "here")) == config


def test_misspelled_key_is_told_before_the_one_that_is_missing(tmp_path):
    sweep = tmp_path / "sweep.yaml"
    sweep.write_text("Base: quick\ngrid: {optimizer.lr: [1e-3]}\n")
    with pytest.raises(UserError, match="Base: unknown key, did you mean 'base'"):
        load_yaml_as(sweep, SweepSpec)


def test_section_may_come_before_one_of_its_keys():
    overrides = ["training={iterations: 5}", "training.seed=2"]
    training = load_config("quick", overrides).training
    assert (training.iterations, training.seed) == (5, 2)


def test_override_turns_a_value_into_a_section():
    content = {"pipeline": {"stages": 4, "delay": "pipeline"}}
    config = apply_overrides(content, ["pipeline.delay.like=8"], "file")
    assert config.pipeline.delay_text == "like 8"


def test_numbers_are_read_as_yaml_1_2():
    numbers = parse_yaml("[3e-4, 1e6, 12, 1_000, .5, -2.]", "here")
    assert repr(numbers) == "[0.0003, 1000000.0, 12, 1000, 0.5, -2.0]"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("model.bloks=3", "--set model.bloks=3: model.bloks: unknown key, did you mean 'blocks'?"),
        ("optimizer.method=mine.py", "method must name a class of the file, mine.py:CLASS"),
        (
            "optimizer.method=basis-rot",
            "unknown method 'basis-rot', did you mean 'basis-rotation'?",
        ),
        ("optimizer=pipedream", "--set optimizer=pipedream: optimizer: "),
        ("optimizer.lr=-1", "optimizer.lr: input should be greater than 0, got -1"),
        ("optimizer.eps=.inf", "optimizer.eps: input should be a finite number, got inf"),
        ("training.batch_size=a", "training.batch_size: input should be a valid integer, got 'a'"),
        (
            "pipeline.stash=foo",
            "pipeline.stash: input should be 'exact', 'none' or 'predict', got 'foo'",
        ),
        (
            "pipeline.stages=3 & pipeline.delay=[1, 0]",
            "delay must have one entry per stage (3), got 2",
        ),
        (
            "pipeline.stages=1 & pipeline.delay={like: 8}",
            "delay: like: 8 needs at least 2 stages, got 1",
        ),
        (
            "pipeline.forecast=last-update & pipeline.stash=none",
            "forecast needs stash: exact (got none)",
        ),
        ("pipeline.stages=9", "pipeline.stages must be at most model.blocks (8), got 9"),
        ("pipeline.devices=9", "devices must be at most stages (8), got 9"),
        ("model.heads=5", "heads must divide width (64), got 5"),
        ("training.keep_at=[750, 2000]", "keep_at must be at most iterations (1500), got 2000"),
        ("training.keep_at=[0]", "training.keep_at.0: input should be greater than or equal to 1"),
        ("model.blocks.x=3", "--set model.blocks.x: 'blocks' is a value, not a section"),
        (
            "training.seed=2 & training={iterations: 5}",
            "--set training={iterations: 5}: replaces the whole section, with what --set "
            "training.seed=2 sets in it; give --set training={iterations: 5} first",
        ),
        ("training=", "training: must be a section of keys and values, got nothing; without"),
        ("model=", "model: must be a section of keys and values, got nothing; without the key"),
        ("model.moe=true", "model.moe: must be a section of keys and values, got True"),
        (
            "optimizer=muon",
            "optimizer: must be a section of keys and values, such as optimizer.method, got",
        ),
        ("data.directory=''", "data.directory: must not be empty"),
        ("model.blocks", "write it as section.key=value"),
        ("model.blocks=[", "--set model.blocks=[: not valid YAML"),
    ],
)
def test_wrong_override_is_one_clear_line(override, expected):
    with pytest.raises(UserError, match=rf"\A.*{re.escape(expected)}.*\Z"):
        load_config("quick", override.split(" & "))


@pytest.mark.parametrize(
    "delay",
    [
        "-1",
        "1.5",
        "true",
        "[]",
        "[3, -1, 0]",
        "deep",
        "{like: 0}",
        "{like: true}",
        "{lik: 3}",
        "null",
    ],
)
def test_no_delay_profile_is_one_clear_line(delay):
    message = r"^--set pipeline.delay=.*: pipeline.delay: must be pipeline, 2bw, a whole"
    with pytest.raises(UserError, match=message):
        load_config("quick", ["pipeline.stages=3", f"pipeline.delay={delay}"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model: {blocks: 2", "not valid YAML"),
        ("- 1\n- 2\n", "must hold a mapping of keys to values, got list"),
        ("training: {seed: 1}\ntraining: {seed: 2}\n", "key 'training' appears twice (line 2)"),
        ("training: {lr: 1}\n", "training.lr: unknown key"),
        ("optimizer: {method: 3}\n", "unknown method '3'"),
        (b"\xff\xfe\x00", "not UTF-8"),
        ("lr: 1\n", "lr: unknown key, did you mean 'optimizer.lr'?"),
        ("", "is empty; restore it, or name a preset (compare, laptop, "),  # not a run of defaults
        (f"training: {list(range(10_000))}", "training: "),  # a large value is shown in short
    ],
)
def test_wrong_file_is_one_clear_line(text, expected, tmp_path):
    path = tmp_path / "wrong.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(
        UserError, match=rf"\A{re.escape(str(path))}.*{re.escape(expected)}.*\Z"
    ) as caught:
        load_config(path)
    assert len(str(caught.value)) < 300 + len(str(path))


@given(st.text(max_size=30))
@example("\n=")
@example("optimizer.lr=\n:")
def test_any_override_is_refused_in_one_line(text):
    message = ""
    try:
        load_config("quick", [text])
    except UserError as error:
        message = str(error)
    assert "\n" not in message


@pytest.mark.parametrize(
    ("text", "seconds"), [("11h50m", 42_600), ("90m", 5_400), ("1d12h", 129_600), ("45s", 45)]
)
def test_stop_after_takes_a_time(text, seconds):
    training = load_config("quick", [f"training.stop_after={text}"]).training
    assert training.session_seconds == seconds


def test_time_does_not_move_the_last_iteration():
    training = load_config("quick", ["training.stop_after=2h"]).training
    assert training.last_iteration == training.iterations


@pytest.mark.parametrize(
    "text", ["0m", "soon", "11h50", "1.5", "0", "-3", "true", "50m11h", "9" * 400 + "h"]
)
def test_other_stops_are_refused(text):
    with pytest.raises(UserError, match=r"training\.stop_after: must be an iteration"):
        load_config("quick", [f"training.stop_after={text}"])


def test_tilde_is_the_home_folder_in_every_path(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.py").write_text("def mine(*_):\n    return 0\n")
    (tmp_path / "mine.yaml").write_text("pipeline: {delay: '~/mine.py:mine'}\n")
    config = load_config("~/mine.yaml", ["data.directory=~/tokens", "data.source=~/mine.txt"])
    assert code_file(config.pipeline.delay.function) == tmp_path / "mine.py"
    (tmp_path / "mine.txt").write_text("text")
    assert token_folder(config.data).parent == tmp_path / "tokens"


def test_own_classes_of_brx_have_no_file(monkeypatch):
    # As `python -m brx` in the checkout has it.
    monkeypatch.syspath_prepend(Path(__file__).parents[2])
    assert code_file("brx.methods.causes:RotatedLion") is None


def test_home_that_nobody_knows_is_refused():
    with pytest.raises(UserError, match=r"^~nobody-of-this-name/x: unknown user; write the whole"):
        user_path("~nobody-of-this-name/x")


def test_message_names_a_preset_as_given():
    with pytest.raises(UserError, match=r"^quick with --set optimizer.method=no/m.py:Mine: "):
        load_config("quick", ["optimizer.method=no/m.py:Mine"])


def test_unknown_key_of_a_run_may_be_of_a_newer_brx(tmp_path):
    (tmp_path / "config.yaml").write_text("training: {newer: 1}\nlogging: {}\n")
    with pytest.raises(UserError) as of_file:
        load_config(tmp_path / "config.yaml")
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(UserError) as of_run:
        load_config(tmp_path)
    assert str(of_run.value) == f"{of_file.value}; a newer brx may have written this run"
