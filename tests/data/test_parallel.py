import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from brx.config.schema import DataConfig
from brx.data import parallel
from brx.data.parallel import tokenized
from brx.errors import RunError
from tests.data.helpers import run_python, texts

needs_proc = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds processes in /proc")


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize("tokenizer", ["bytes", "gpt2"])
def test_processes_give_what_one_gives_in_order(monkeypatch, tokenizer):
    monkeypatch.setattr(parallel, "CHUNK_CHARACTERS", 500)
    config = DataConfig(tokenizer=tokenizer)
    documents = texts(200)
    alone, together = ([d for c in tokenized(config, documents, workers) for d in c] for workers in (0, 2))
    assert together == alone
    assert len(alone) == 200
    if tokenizer == "bytes":
        ids = [np.frombuffer(document.tokens, "<u2") for document in alone]
        assert [bytes(i.astype(np.uint8)) for i in ids] == [text.encode() + b"\0" for text in documents]


def test_few_documents_are_in_memory(monkeypatch):
    monkeypatch.setattr(parallel, "CHUNK_CHARACTERS", 10)
    read = 0

    def counted():
        nonlocal read
        for _ in range(1000):
            read += 1
            yield "0123456789"

    chunks = tokenized(DataConfig(), counted(), 2)
    for number in range(1, 20):
        next(chunks)
        assert read - number <= 2 * 2 + 1
    chunks.close()


@needs_proc
def test_a_killed_worker_is_told_in_one_line(monkeypatch):
    monkeypatch.setattr(parallel, "CHUNK_CHARACTERS", 10)
    chunks = tokenized(DataConfig(), ("0123456789" for _ in range(10_000)), 1)
    next(chunks)
    workers = [pid for pid in children(os.getpid()) if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text()]
    assert workers
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(RunError, match="a tokenizing process was killed"):
        list(chunks)


ENDLESS = """
from brx.config.schema import DataConfig
from brx.data.parallel import tokenized

for chunk in tokenized(DataConfig(), iter(lambda: "word " * 1000, None), 2):
    print("chunk", flush=True)
"""


@needs_proc
def test_workers_end_with_a_killed_parent():
    process = run_python(ENDLESS)
    assert process.stdout.readline() == "chunk\n"
    workers = children(process.pid)
    assert len(workers) >= 2
    process.kill()
    process.wait()
    deadline = time.monotonic() + 60
    while any(_is_running(pid) for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(_is_running(pid) for pid in workers)


def _is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
