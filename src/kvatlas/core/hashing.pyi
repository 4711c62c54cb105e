"""Chained SHA-256 over a whole prompt at once (hashing.cpp)."""

from typing_extensions import Buffer

accelerated: bool  # this processor has what `chain` needs

def chain(secret: bytes, parent: bytes, tokens: Buffer, block_bytes: int, /) -> list[bytes]:
    """key = SHA-256(secret + key + block)[:16] for each full block, from ``parent`` on.

    ``secret`` is 32 bytes, ``parent`` 16. ValueError for other sizes; RuntimeError where not
    ``accelerated``.
    """
