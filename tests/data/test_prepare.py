"""Preparation: right contents, the same after any interruption, and one clear line for each mistake."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from brx.config.schema import DataConfig
from brx.data import parallel
from brx.data.parallel import is_validation
from brx.data.prepare import prepare, token_folder
from brx.data.sources import documents
from brx.errors import UserError


def config_for(folder, source, **changes):
    return DataConfig(source=str(source), directory=str(folder / "data"), validation_fraction=0.3, **changes)


def write_jsonl(path, num, field="text"):
    path.write_text("".join(json.dumps({field: f"document {k} " + "x" * (k % 50), "id": k}) + "\n" for k in range(num)))


def numbered(text, num):
    """Lines that all differ, so that the pieces of a file hash apart."""
    return "".join(f"{k} {text}\n" for k in range(num))


def contents(data):
    return data.train.tokens.tobytes(), data.validation.tokens.tobytes()


def expected_bytes(texts, config):
    parts = {True: b"", False: b""}
    for text in texts:
        held_out = is_validation(text, config.validation_fraction, config.split_seed)
        parts[held_out] += np.frombuffer(text.encode() + b"\0", np.uint8).astype("<u2").tobytes()
    return parts[False], parts[True]


def test_stdlib_is_about_ten_megabytes_in_a_fixed_order():
    config = DataConfig()
    texts = list(documents(config))
    assert texts == list(documents(config))
    assert 5e6 < sum(map(len, texts)) < 2e7
    assert len(texts) > 300
    held_out = sum(is_validation(text, 0.1, 0) for text in texts) / len(texts)
    assert 0.05 < held_out < 0.15


def test_text_files_and_folders(tmp_path):
    (tmp_path / "corpus").mkdir()
    texts = [f"line {k} of a longer text\n" * 30 for k in range(40)]
    for k, text in enumerate(texts):
        (tmp_path / "corpus" / f"{k:02d}.txt").write_text(text)
    config = config_for(tmp_path, tmp_path / "corpus")
    data = prepare(config)
    assert contents(data) == expected_bytes(texts, config)
    assert data.train.sidecar.num_documents + data.validation.sidecar.num_documents == 40
    assert data.train.sidecar.sha256 == hashlib.sha256(contents(data)[0]).hexdigest()
    pattern = config_for(tmp_path, tmp_path / "corpus" / "*.txt")
    assert prepare(pattern).fingerprint == data.fingerprint


def test_a_big_text_file_is_cut_at_line_ends(tmp_path):
    text = "".join(f"{k}: some words on a line\n" for k in range(20000))
    (tmp_path / "big.txt").write_text(text)
    pieces = list(documents(config_for(tmp_path, tmp_path / "big.txt")))
    assert "".join(pieces) == text
    assert len(pieces) > 20
    assert all(piece.endswith("\n") for piece in pieces)


def test_jsonl_and_parquet_give_the_same(tmp_path):
    pytest.importorskip("datasets")
    import pyarrow as pa
    import pyarrow.parquet as pq

    write_jsonl(tmp_path / "a.jsonl", 200)
    rows = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    one, other = (prepare(config_for(tmp_path, tmp_path / name)) for name in ("a.jsonl", "a.parquet"))
    assert contents(one) == contents(other)
    assert contents(one) == expected_bytes([row["text"] for row in rows], config_for(tmp_path, ""))


def test_budget_stops_at_exactly_so_many_training_tokens(tmp_path):
    (tmp_path / "a.txt").write_text(numbered("some words", 30000))
    data = prepare(config_for(tmp_path, tmp_path / "a.txt", tokens=100_001))
    assert data.train.num_tokens == 100_001


def test_worker_processes_give_the_same(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("".join(f"{k} words, it's said\n" for k in range(8000)))
    monkeypatch.setattr(parallel, "CHUNK_CHARACTERS", 20_000)
    alone = prepare(config_for(tmp_path / "alone", tmp_path / "a.txt", tokenizer="gpt2"), workers=0)
    together = prepare(config_for(tmp_path / "together", tmp_path / "a.txt", tokenizer="gpt2"), workers=2)
    assert contents(alone) == contents(together)


INTERRUPTED = """
import sys
from brx.config.schema import DataConfig
from brx.data import parallel, prepare as module
parallel.CHUNK_CHARACTERS, module.CHUNKS_PER_COMMIT = 2000, 3
original = parallel.tokenize_chunk
def slow(*arguments):
    import time
    time.sleep(0.005)
    return original(*arguments)
parallel.tokenize_chunk = slow
module.prepare(DataConfig.model_validate_json(sys.argv[1]))
"""


def test_killed_preparation_goes_on_to_the_same_bytes(tmp_path):
    source = tmp_path / "corpus"
    source.mkdir()
    for k in range(400):
        (source / f"{k:03d}.txt").write_text(f"document {k}\n" * 100)
    straight = prepare(config_for(tmp_path / "straight", source))
    config = config_for(tmp_path, source)
    partial = token_folder(config).with_name(f".{token_folder(config).name}.partial")
    for _ in range(2):
        process = subprocess.Popen([sys.executable, "-c", INTERRUPTED, config.model_dump_json()])
        end = time.monotonic() + 60
        before = _note(partial)
        while _note(partial) in (before, 0) and time.monotonic() < end:
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert 0 < _note(partial) < 400
    assert contents(prepare(config)) == contents(straight)
    assert not partial.exists()


def _note(partial):
    try:
        return json.loads((partial / "note.json").read_text())["documents_read"]
    except (OSError, ValueError):
        return 0


def test_two_processes_at_once_make_it_once(tmp_path):
    (tmp_path / "a.txt").write_text(numbered("some words", 200_000))
    config = config_for(tmp_path, tmp_path / "a.txt")
    code = "import sys; from brx.config.schema import DataConfig; from brx.data.prepare import prepare;"
    code += "print(prepare(DataConfig.model_validate_json(sys.argv[1])).fingerprint)"
    command = [sys.executable, "-c", code, config.model_dump_json()]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    found = {process.communicate(timeout=60)[0] for process in both}
    assert found == {prepare(config).fingerprint + "\n"}


@pytest.mark.parametrize("damage", ["content", "length", "sidecar", "missing"])
def test_damaged_files_are_refused(damage, tmp_path):
    (tmp_path / "a.txt").write_text("".join(f"{k} words\n" for k in range(20000)))
    config = config_for(tmp_path, tmp_path / "a.txt")
    prepare(config)
    path = token_folder(config) / "train.bin"
    if damage == "content":
        content = bytearray(path.read_bytes())
        content[100] ^= 1
        path.write_bytes(content)
    elif damage == "length":
        path.write_bytes(path.read_bytes()[:-2])
    elif damage == "sidecar":
        path.with_suffix(".json").write_text("{")
    else:
        path.unlink()
    with pytest.raises(UserError, match=r"train\.(bin|json): .*to prepare it again"):
        prepare(config)


def test_changed_source_or_settings_are_prepared_anew(tmp_path):
    (tmp_path / "a.txt").write_text(numbered("some words", 30000))
    config = config_for(tmp_path, tmp_path / "a.txt")
    first = prepare(config).fingerprint
    assert prepare(config.model_copy(update={"split_seed": 1})).fingerprint != first
    (tmp_path / "a.txt").write_text(numbered("other words", 30000))
    assert prepare(config).fingerprint != first


def broken(tmp_path, kind):
    """A data configuration with one mistake."""
    if kind == "missing":
        return config_for(tmp_path, tmp_path / "nowhere.txt")
    if kind == "empty":
        (tmp_path / "empty.txt").write_text("")
        return config_for(tmp_path, tmp_path / "empty.txt")
    if kind == "binary":
        (tmp_path / "binary.txt").write_bytes(bytes(range(256)))
        return config_for(tmp_path, tmp_path / "binary.txt")
    if kind == "extension":
        (tmp_path / "a.pdf").write_text("x")
        return config_for(tmp_path, tmp_path / "a.pdf")
    if kind == "folder":
        (tmp_path / "none").mkdir()
        return config_for(tmp_path, tmp_path / "none")
    if kind == "pattern":
        return config_for(tmp_path, tmp_path / "*.txt")
    if kind == "field":
        write_jsonl(tmp_path / "a.jsonl", 5, field="body")
        return config_for(tmp_path, tmp_path / "a.jsonl")
    if kind == "json":
        (tmp_path / "b.jsonl").write_text('{"text": "a"}\nnot json\n')
        return config_for(tmp_path, tmp_path / "b.jsonl")
    (tmp_path / "a.txt").write_text(numbered("some words", 30000))
    tokens = 10**6 if kind == "tokens" else 10**15
    return config_for(tmp_path, tmp_path / "a.txt", tokens=tokens)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("missing", "nowhere.txt: no such file"),
        ("empty", "empty.txt: holds no text"),
        ("binary", "binary.txt: not UTF-8 text"),
        ("extension", "a.pdf: unknown kind of file; known are .txt, .jsonl, .parquet"),
        ("folder", "the folder holds no .txt, .jsonl, .parquet file"),
        ("pattern", "the pattern matches no file"),
        ("field", "a.jsonl has no field 'text'; its fields are body, id"),
        ("json", "b.jsonl: cannot be read"),
        ("tokens", "1,000,000 training tokens were asked for"),
        ("disk", "tokens need"),
    ],
)
def test_mistakes_are_one_clear_line(kind, expected, tmp_path):
    with pytest.raises(UserError) as caught:
        prepare(broken(tmp_path, kind))
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_dataset_that_cannot_be_reached_is_one_clear_line(tmp_path, monkeypatch):
    pytest.importorskip("datasets")

    def unreachable(*arguments, **options):
        raise ConnectionError("no network\nat all")

    monkeypatch.setattr("brx.data.sources._open_on_hub", unreachable)
    with pytest.raises(UserError, match=r"openwebtext.* cannot be reached: .*no network at all"):
        prepare(config_for(tmp_path, "openwebtext", tokens=10))
