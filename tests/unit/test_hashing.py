"""The compiled hash chain is SHA-256, and keys are the same with and without it."""

from __future__ import annotations

import hashlib
import random

import pytest

from kvatlas.core import native
from kvatlas.core.keys import PUBLIC, Keyring, Scope, salt_scope

needs_sha = pytest.mark.skipif(
    not native.accelerated, reason="this processor has no SHA instructions: hashlib does it all"
)


def by_hashlib(secret: bytes, parent: bytes, tokens: bytes, size: int) -> list[bytes]:
    keys: list[bytes] = []
    for start in range(0, len(tokens) - size + 1, size):
        parent = hashlib.sha256(secret + parent + tokens[start : start + size]).digest()[:16]
        keys.append(parent)
    return keys


@needs_sha
def test_every_block_size_up_to_five_chunks_and_some_large_ones() -> None:
    source = random.Random(1)
    for size in (*range(1, 320), 1024, 1023, 4096, 65536):
        secret, parent = source.randbytes(32), source.randbytes(16)
        tokens = source.randbytes(3 * size + source.randrange(size))
        assert native.chain(secret, parent, tokens, size) == by_hashlib(
            secret, parent, tokens, size
        )
    assert native.chain(bytes(32), bytes(16), b"", 4) == []


@needs_sha
def test_wrong_sizes_are_refused() -> None:
    for secret, parent, size in ((31, 16, 4), (32, 15, 4), (32, 16, 0), (32, 16, -4)):
        with pytest.raises(ValueError, match="secret of 32"):
            native.chain(bytes(secret), bytes(parent), bytes(64), size)
    with pytest.raises(TypeError):
        native.chain(bytes(32), bytes(16), "text", 4)  # type: ignore[arg-type]


def test_keys_do_not_depend_on_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = Keyring(b"a secret for the tests")
    tokens = random.Random(2).randbytes(4 * 1000)
    parent = ring.root(b"\1" * 32)
    fast = ring.chain(parent, memoryview(tokens), 16)
    assert fast == ring.chain(parent, memoryview(tokens).cast("I"), 16)
    with_extra = ring.chain(parent, tokens, 16, (b"", b"image"))
    monkeypatch.setattr(native, "accelerated", False)
    assert ring.chain(parent, memoryview(tokens), 16) == fast
    assert len(fast) == 62
    assert with_extra == ring.chain(parent, tokens, 16, (b"", b"image"))
    assert with_extra[0] == fast[0]
    assert with_extra[1] != fast[1]


def test_no_name_is_no_tenant() -> None:
    assert salt_scope("") == PUBLIC
    assert salt_scope("a") == Scope("salt", "a") != salt_scope("b")
