"""The GPU suite in small, on the CPU: all its pieces run, what is done is not done again, and its
tables are there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SUITE = Path(__file__).parents[2] / "benchmarks" / "gpu_suite.sh"


def run_suite(folder, *options):
    command = [SUITE, "--tiny", "--out", folder / "gpu", "--source", folder / "text.txt", *options]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHON": sys.executable,
        "CUDA_VISIBLE_DEVICES": "",
    }
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=500, check=False
    )


def table(folder, name):
    content = json.loads((folder / "gpu" / f"{name}.json").read_text())
    return [dict(zip(content["columns"], row, strict=True)) for row in content["rows"]]


@pytest.mark.slow
def test_tiny_suite_goes_on_where_it_was(tmp_path):
    (tmp_path / "text.txt").write_text(
        "\n".join(f"{number}: the quick brown fox jumps" for number in range(20000))
    )
    first = run_suite(tmp_path, "--one-piece")
    assert first.returncode == 3, first.stderr
    assert "left to do: memory training" in first.stdout
    speed = (tmp_path / "gpu" / "speed.json").stat().st_mtime_ns
    rest = run_suite(tmp_path)
    assert rest.returncode == 0, rest.stderr
    assert (tmp_path / "gpu" / "speed.json").stat().st_mtime_ns == speed
    pairs = [
        (method, stages) for method in ("pipedream", "basis-rotation") for stages in ("1", "4")
    ]
    variants = ["plain loop", *(f"{method}, P = {stages}" for method, stages in pairs)]
    assert [row["variant"] for row in table(tmp_path, "speed")] == variants
    assert all(float(row["ms / iteration"]) > 0 for row in table(tmp_path, "speed"))
    assert all(0.9 <= float(row["planned / measured"]) <= 1.1 for row in table(tmp_path, "memory"))
    assert {(row["method"], row["P"]) for row in table(tmp_path, "training")} == set(pairs)
    assert (tmp_path / "gpu" / "curves.png").stat().st_size > 0
