"""Drawing documents at random in such a way that nothing but a seed and the document decides."""

from __future__ import annotations

import hashlib


def is_validation(document: str, fraction: float, seed: int) -> bool:
    """Whether a document is held out."""
    return _chosen(f"{seed}/{document}", fraction)


def is_sampled(document: str, fraction: float, seed: int) -> bool:
    """Whether a document is used at all; independent of whether it is held out."""
    return _chosen(f"sample/{seed}/{document}", fraction)


def _chosen(text: str, fraction: float) -> bool:
    digest = hashlib.sha256(text.encode("utf-8", "replace")).digest()
    return int.from_bytes(digest[:8], "little") < fraction * 2**64
