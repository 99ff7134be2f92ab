"""The packets for a GPU in small, on the CPU: each ends, and its table says what it should."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.correctness import failed_tests
from benchmarks.gpu.step import COMPILED, VARIANTS

ROOT = Path(__file__).parents[2]
TINY_MODEL = ["model.width=16", "model.heads=2", "model.sequence_length=16"]
TINY_DATA = ["training.batch_size=2", "training.validation_examples=4", "data.tokenizer=bytes"]

pytestmark = pytest.mark.slow


def run_packet(module, *arguments):
    command = [sys.executable, "-m", f"benchmarks.gpu.{module}", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def rows(folder, name):
    content = json.loads((folder / f"{name}.json").read_text())
    return [dict(zip(content["columns"], row, strict=True)) for row in content["rows"]]


def test_correctness_holds_on_the_cpu(tmp_path):
    run_packet("correctness", "--out", tmp_path, "--tiny", "--only", "base", "again", "2 ranks")
    found = {row["check"]: row["holds"] for row in rows(tmp_path, "correctness")}
    assert found == {
        "_foreach_copy_ into bf16 and fp32 in one call": "-",
        "rings hold the versions": "yes",
        "base against again": "yes",
        "base against 2 ranks": "yes",
    }


def test_failed_tests_have_names_even_if_the_time_was_up():
    ran = [
        "tests/a.py::test_good PASSED [ 30%]",
        "tests/a.py::test_bad[cuda] FAILED [ 60%]",
        "tests/a.py::test_ugly ERROR [ 90%]",
    ]
    summary = [
        "FAILED tests/a.py::test_bad[cuda] - ValueError: no",
        "ERROR tests/a.py::test_ugly - OSError",
    ]
    assert failed_tests("\n".join([*ran, *summary, "1 passed"])) == summary
    assert failed_tests("\n".join(ran)) == ran[1:]


def test_table_judges_its_goals(tmp_path):
    output = run_packet("table", "quick", "--stages", 1, 4, "--out", tmp_path, "--tiny")
    variants = {(row["variant"], row["P"]) for row in rows(tmp_path, "iterations")}
    assert ("pipedream", "4") in variants
    assert "basis-rotation, TF32 rotations, P = 4: times AdamW: " in output


def test_training_names_the_iterations_to_the_target(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"{number}: the quick brown fox jumps" for number in range(20000)))
    settings = [*TINY_MODEL, *TINY_DATA, "data.validation_fraction=0.3"]
    run = ["training", "quick", "--stages", 4, "--iterations", 20, "--jobs", 1, "--data", text]
    run_packet(*run, "--out", tmp_path / "out", "--set", *settings)
    found = rows(tmp_path / "out", "training")
    trained = [(row["method"], row["P"]) for row in found]
    assert trained == [("pipedream", "1"), ("pipedream", "4"), ("basis-rotation", "4")]


SMALL_STEPS = ["--blocks", 1, "--width", 16, "--steps", 10, "--device", "cpu"]


def test_step_measures_every_variant(tmp_path):
    run_packet("step", *SMALL_STEPS, "--out", tmp_path)
    found = rows(tmp_path, "step")
    assert [row["variant"] for row in found] == [name for name in VARIANTS if name != COMPILED]
    assert all(float(row["error"]) < 1 for row in found)


def test_step_begins_no_variant_after_its_time(tmp_path):
    output = run_packet("step", *SMALL_STEPS, "--seconds", 0, "--out", tmp_path)
    assert "fp32: no time left" in output
    assert rows(tmp_path, "step") == []


def test_step_takes_the_gradients_of_a_training(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"{number}: the quick brown fox jumps" for number in range(2000)))
    data = [f"data.source={text}", "data.validation_fraction=0.3", f"data.directory={tmp_path}"]
    settings = [*TINY_MODEL, *TINY_DATA, *data, "pipeline.stages=2", "model.blocks=2"]
    file = tmp_path / "gradients.pt"
    run = ["gradients", "quick", "--iterations", 6, "--to", file]
    assert "4 steps of 12 matrices" in run_packet(*run, "--set", *settings)
    steps = ["--steps", 10, "--device", "cpu", "--seconds", 1, "--gradients", file]
    output = run_packet("step", *steps, "--out", tmp_path)
    assert "Steps of basis rotation on 12 matrices" in output
