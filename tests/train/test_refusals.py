"""Requests that cannot be carried out: one line, at once, and nothing half-written."""

import pytest
import yaml

from brx.cli.main import main
from brx.config.loading import dump_config
from brx.train.loop import train
from tests.train.helpers import tiny_config


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["runtime.threads=99999999999"], "runtime.threads: input should be less than or equal to 4096"),
        (["training.validation_examples=99999999999"], "training.validation_examples: must be at most"),
        (["pipeline.stages=1000000000000", "model.blocks=1000000000000"], "model.blocks: input should be less than"),
        (["optimizer.eps=.inf"], "optimizer.eps: input should be a finite number, got inf"),
        (["pipeline.timeout_s=1e300"], "pipeline.timeout_s: input should be less than or equal to"),
        (["training.seed=99999999999999999999"], "training.seed: input should be less than"),
        (["model=" + "[" * 10_000], "not valid YAML: nested too deeply"),
    ],
)
def test_absurd_settings_are_one_line(settings, expected, tmp_path, capsys):
    path = tmp_path / "tiny.yaml"
    path.write_text(dump_config(tiny_config(tmp_path)))
    assert main(["train", str(path), "--out", str(tmp_path / "run"), "--set", *settings]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("prepared")]
    assert len(lines) == 1
    assert expected in lines[0]
    assert len(lines[0]) < 600
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("text", ["", "model: &a [*a]", "{}"])
def test_a_configuration_that_says_nothing_or_never_ends_is_refused(text, tmp_path, capsys):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    assert main(["train", str(path), "--out", str(tmp_path / "run")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_no_limit_on_the_gradient_is_a_setting(tmp_path):
    config = tiny_config(tmp_path, "training.clip=.inf", "training.iterations=3")
    assert train(config, tmp_path / "run") == "finished"
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["training"]["clip"] == float("inf")
