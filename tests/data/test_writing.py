import json
from contextlib import closing

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from brx.data.prepare import SPLITS, TokenWriter
from brx.data.token_file import TokenFile

entries = st.lists(st.tuples(st.sampled_from(SPLITS), st.binary(max_size=6).map(lambda half: half + half)), max_size=30)


def ids(half):
    return np.frombuffer(half, "<u2")


def finished(folder, writer):
    writer.finish("test", "gpt2", folder)
    return {split: (folder / f"{split}.bin").read_bytes() for split in SPLITS}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
@given(entries=entries, commits=st.sets(st.integers(0, 30)), interruptions=st.sets(st.integers(0, 30)))
def test_interrupted_anywhere_it_gives_the_same_files(tmp_path_factory, entries, commits, interruptions):
    tmp_path = tmp_path_factory.mktemp("writing")
    expected = {split: b"".join(tokens for to, tokens in entries if to == split) for split in SPLITS}
    left = set(interruptions)
    while True:
        with closing(TokenWriter(tmp_path / "partial")) as writer:
            # The exit flushes what was not committed: the next writer has to cut that off.
            place = writer.written.documents_read
            for place in range(writer.written.documents_read, len(entries)):
                if place in left:
                    left.remove(place)
                    break
                writer.append(entries[place][0], ids(entries[place][1]))
                if place in commits:
                    writer.commit()
            else:
                assert finished(tmp_path / "done", writer) == expected
                break
    for split in SPLITS:
        file = TokenFile.load(tmp_path / "done" / f"{split}.bin")
        assert file.sidecar.num_documents == sum(to == split for to, _ in entries)
    assert not (tmp_path / "partial").exists()


@pytest.mark.parametrize(
    "note", ["", "[]", "{", '{"documents_read": 2}', '{"documents_read": 2, "splits": {"train": {"x": 1}}}', "\xff"]
)
def test_a_damaged_note_means_from_the_start(tmp_path, note):
    with closing(TokenWriter(tmp_path / "partial")) as writer:
        writer.append("train", ids(b"abcd"))
        writer.commit()
    (tmp_path / "partial" / "note.json").write_text(note, encoding="latin-1")
    with closing(TokenWriter(tmp_path / "partial")) as writer:
        assert writer.written.documents_read == 0
        writer.append("train", ids(b"ef"))
        assert finished(tmp_path / "done", writer) == {"train": b"ef", "validation": b""}


def test_a_file_shorter_than_the_note_promises_means_from_the_start(tmp_path):
    with closing(TokenWriter(tmp_path / "partial")) as writer:
        writer.append("validation", ids(b"abcd"))
        writer.commit()
    (tmp_path / "partial" / "validation.bin").write_bytes(b"ab")
    with closing(TokenWriter(tmp_path / "partial")) as writer:
        assert writer.written.documents_read == 0


def test_the_note_counts_what_is_on_disk(tmp_path):
    with closing(TokenWriter(tmp_path / "partial")) as writer:
        writer.append("train", ids(b"abcd"))
        writer.append("validation", ids(b"ef"))
        writer.commit()
        note = json.loads((tmp_path / "partial" / "note.json").read_text())
        assert note == {
            "documents_read": 2,
            "splits": {
                "train": {"num_tokens": 2, "num_documents": 1},
                "validation": {"num_tokens": 1, "num_documents": 1},
            },
        }
        assert (tmp_path / "partial" / "train.bin").read_bytes() == b"abcd"
