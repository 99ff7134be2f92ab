"""Corpora for the tests of data."""

import os
import random
import subprocess
import sys

import datasets

from brx.config.schema import DataConfig


def texts(count, seed=0):
    """Documents of different lengths, with words that are hard on tokenizers."""
    rng = random.Random(seed)
    words = ["delay", "stage", "'s", "naïve", "中文", "\n\n", "x = 1", "\U0001f600", "3.14", "   "]
    return [
        f"document {number}: " + " ".join(rng.choices(words, k=rng.randrange(60)))
        for number in range(count)
    ]


def write_rows(path, documents, field="text"):
    """Write a .jsonl or .parquet file with one document per row, which also has a field `id`."""
    rows = datasets.Dataset.from_dict({"id": list(range(len(documents))), field: documents})
    rows.to_json(path) if path.suffix == ".jsonl" else rows.to_parquet(path)
    return path


def local_config(tmp_path, documents, **settings):
    """A configuration whose source is these documents."""
    path = tmp_path / "corpus.parquet"
    if not path.exists():
        write_rows(path, documents)
    return DataConfig(source=str(path), directory=str(tmp_path / "data"), **settings)


def run_python(code, *arguments, **variables):
    """Start Python with a piece of code, and with pipes to its standard streams."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **variables},
    )
