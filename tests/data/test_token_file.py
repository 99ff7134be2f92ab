"""Token files: written in one way, and every damage told."""

import json
import os

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from brx.data.token_file import Sidecar, TokenFile, sha256
from brx.errors import UserError

TOKENS = np.array([0, 1, 255, 256, 50256, 65535], "<u2")


def write(folder, tokens=TOKENS):
    path = folder / "train.bin"
    path.write_bytes(tokens.tobytes())
    Sidecar(source="test", tokenizer="gpt2", num_tokens=len(tokens), num_documents=2, sha256=sha256(path)).write(path)
    return path


def flip_a_bit(path):
    """Damage that changes neither size nor modification time."""
    stat = path.stat()
    content = bytearray(path.read_bytes())
    content[3] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_round_trip(tmp_path):
    path = write(tmp_path)
    assert path.read_bytes()[8:10] == bytes([0x50, 0xC4])  # 50256, low byte first on every machine
    file = TokenFile.load(path)
    assert np.array_equal(file.tokens, TOKENS)
    kept = {"source": "test", "tokenizer": "gpt2", "num_tokens": 6, "num_documents": 2, "sha256": sha256(path)}
    assert json.loads(path.with_suffix(".json").read_text()) == kept
    with pytest.raises(ValueError, match="read-only"):
        file.tokens[0] = 1
    assert TokenFile.load(write(tmp_path, TOKENS[:0])).num_tokens == 0


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.unlink(), r"train\.bin: cannot be read: No such file"),
        (lambda path: path.with_suffix(".json").unlink(), r"train\.json: cannot be read: No such file"),
        (lambda path: os.truncate(path, 10), r"train\.bin: holds 10 bytes, its sidecar says 12"),
        (lambda path: os.truncate(path, 14), r"train\.bin: holds 14 bytes, its sidecar says 12"),
        (flip_a_bit, r"train\.bin: its SHA-256 is not the sidecar's"),
        (lambda path: path.with_suffix(".json").write_text('{"source": "te'), r"train\.json: not the sidecar of"),
    ],
)
def test_damage_is_told_in_one_line_that_names_the_file(tmp_path, damage, message):
    path = write(tmp_path)
    damage(path)
    with pytest.raises(UserError, match=rf"^\S*{message}.*; remove \S+ to prepare it again$") as caught:
        TokenFile.load(path)
    assert "\n" not in str(caught.value)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(st.binary(max_size=60), st.sampled_from(["source", "num_tokens", "num_documents", "sha256"]), json_values)
def test_anything_else_in_a_sidecar_is_one_line(tmp_path, content, key, value):
    path = write(tmp_path)
    sidecar = json.loads(path.with_suffix(".json").read_text())
    wrong = [(content, ""), (json.dumps(value).encode(), "")]
    if type(value) is not type(sidecar[key]):
        wrong.append((json.dumps({**sidecar, key: value}).encode(), f" of a token file: {key}: "))
    for text, named in wrong:
        path.with_suffix(".json").write_bytes(text)
        with pytest.raises(UserError, match=rf"train\.json: not the sidecar{named}") as caught:
            TokenFile.load(path)
        assert len(str(caught.value).splitlines()) == 1


def test_the_hash_is_compared_again_only_when_the_file_or_its_sidecar_looks_changed(tmp_path):
    path = write(tmp_path)
    TokenFile.load(path)
    flip_a_bit(path)
    TokenFile.load(path)  # size and time are those of the last comparison
    with pytest.raises(UserError, match="SHA-256"):
        TokenFile.load(path, always_hash=True)
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 10**9))
    with pytest.raises(UserError, match="SHA-256"):
        TokenFile.load(path)
    TokenFile.load(write(tmp_path))
    sidecar = json.loads(path.with_suffix(".json").read_text())
    path.with_suffix(".json").write_text(json.dumps({**sidecar, "sha256": "0" * 64}))
    with pytest.raises(UserError, match="SHA-256"):
        TokenFile.load(path)


def test_a_note_that_cannot_be_written_or_read_only_costs_time(tmp_path):
    path = write(tmp_path)
    path.with_suffix(".verified").mkdir()
    assert TokenFile.load(path).num_tokens == 6
