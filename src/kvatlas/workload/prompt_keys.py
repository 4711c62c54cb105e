"""The block keys of one prompt, computed once however many engines see it. Pure."""

from __future__ import annotations

from hashlib import blake2b
from math import gcd
from struct import unpack

import msgspec

from kvatlas.core.keys import Keyring
from kvatlas.core.layout import Layout

TOKEN_BYTES = 4
_KEYRING = Keyring(b"kvatlas.workload.prompt_keys")  # any: but the same in all engines


def key_step(layout: Layout) -> int:
    """Tokens between the positions at which keys are chained: every chain block ends on one."""
    chains = [g.block_tokens for g in layout.groups if g.window_tokens is None]
    return gcd(layout.grid_tokens, *chains)


class PromptKeys:
    """64-bit keys of prefixes of ``tokens`` (uint32 ids, little endian), each made when asked for.

    For engines of one layout, ``step`` being its `key_step`: they may share it, since all that
    they do is to read the same keys out of it. A key is the first half of a digest, and the
    digests are what is chained.
    """

    __slots__ = (
        *("_digests", "_keys", "_runs", "_subkeys", "adapter", "root", "salt", "step", "tokens"),
    )

    def __init__(self, tokens: bytes, step: int, *, salt: str = "", adapter: str = "") -> None:
        self.tokens = tokens
        self.step = step
        self.salt = salt
        self.adapter = adapter
        root = msgspec.json.encode([salt, adapter]) if salt or adapter else b""
        self.root = _KEYRING.root(root)
        self._digests: list[bytes] = []
        self._keys: list[int] = []
        self._subkeys: dict[int, int] = {}
        self._runs: dict[tuple[int, int, int], tuple[int, ...]] = {}

    def belong(self, tokens: bytes, step: int, salt: str, adapter: str) -> bool:
        """Whether these are the keys of such a prompt in an engine with that `key_step`."""
        return (self.step, self.salt, self.adapter) == (step, salt, adapter) and (
            self.tokens is tokens or self.tokens == tokens
        )

    def key(self, position: int) -> int:
        """The key of the first ``position`` tokens, at most all of them."""
        full, rest = divmod(position, self.step)
        keys = self._keys
        if len(keys) < full:
            self._extend(full)
        if not rest:
            return keys[full - 1]
        found = self._subkeys.get(position)
        if found is None:
            parent = self._digests[full - 1] if full else self.root
            part = self.tokens[full * self.step * TOKEN_BYTES : position * TOKEN_BYTES]
            found = self._subkeys[position] = rest_key(parent, part)
        return found

    def digest(self, count: int) -> bytes:
        """What the key behind ``count`` steps is chained to."""
        if len(self._keys) < count:
            self._extend(count)
        return self._digests[count - 1] if count else self.root

    def chain(self, count: int) -> list[int]:
        """Keys of the first ``count`` steps and perhaps more; not to be changed."""
        if len(self._keys) < count:
            self._extend(count)
        return self._keys

    def run(self, first: int, apart: int, count: int) -> tuple[int, ...]:
        """Keys of ``count`` prefixes, the shortest ``first`` tokens long, each ``apart`` longer."""
        found = self._runs.get((first, apart, count))
        if found is not None:
            return found
        step, tokens, keys = self.step, self.tokens, []
        hashed = None  # the tokens since ``full`` steps, up to ``end``
        full = end = 0
        for position in range(first, first + apart * count, apart):
            before, rest = divmod(position, step)
            if not rest:
                keys.append(self.chain(before)[before - 1])
                continue
            if hashed is None or before != full:
                full, end = before, before * step
                hashed = blake2b(digest_size=8, key=self.digest(full))
            hashed.update(tokens[end * TOKEN_BYTES : position * TOKEN_BYTES])
            end = position
            keys.append(int.from_bytes(hashed.digest(), "little"))
        found = self._runs[first, apart, count] = tuple(keys)
        return found

    def _extend(self, count: int) -> None:
        width, tokens = self.step * TOKEN_BYTES, self.tokens
        known = len(self._digests)
        parent = self._digests[-1] if known else self.root
        digests = _KEYRING.chain(parent, tokens[known * width : count * width], self.step)
        self._digests += digests
        self._keys += unpack(f"<{2 * len(digests)}Q", b"".join(digests))[::2]


def chain_key(parent: bytes, tokens: bytes) -> bytes:
    """The digest of a prefix from that of a step before and the tokens of one step more."""
    return _KEYRING.chain(parent, tokens, len(tokens) // TOKEN_BYTES)[0]


def rest_key(parent: bytes, tokens: bytes) -> int:
    """The key of a prefix that ends between two steps, from the digest of the step before."""
    return int.from_bytes(blake2b(tokens, digest_size=8, key=parent).digest(), "little")


def key_of(digest: bytes) -> int:
    """The key of a prefix of whole steps."""
    return int.from_bytes(digest[:8], "little")
