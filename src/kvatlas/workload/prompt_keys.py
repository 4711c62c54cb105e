"""The block keys of one prompt, computed once however many engines see it. Pure."""

from __future__ import annotations

from hashlib import blake2b
from math import gcd
from struct import unpack

import msgspec

from kvatlas.core.layout import Layout

TOKEN_BYTES = 4


def key_step(layout: Layout) -> int:
    """Tokens between the positions at which keys are chained: every chain block ends on one."""
    chains = [g.block_tokens for g in layout.groups if g.window_tokens is None]
    return gcd(layout.grid_tokens, *chains)


class PromptKeys:
    """64-bit keys of prefixes of ``tokens`` (uint32 ids, little endian), each made when asked for.

    For engines of one layout, ``step`` being its `key_step`: they may share it, since all that
    they do is to read the same keys out of it.
    """

    __slots__ = ("_keys", "_runs", "_subkeys", "adapter", "root", "salt", "step", "tokens")

    def __init__(self, tokens: bytes, step: int, *, salt: str = "", adapter: str = "") -> None:
        self.tokens = tokens
        self.step = step
        self.salt = salt
        self.adapter = adapter
        root = msgspec.json.encode([salt, adapter]) if salt or adapter else b""
        self.root = int.from_bytes(blake2b(root, digest_size=8).digest(), "little")
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
            parent = keys[full - 1] if full else self.root
            part = self.tokens[full * self.step * TOKEN_BYTES : position * TOKEN_BYTES]
            found = self._subkeys[position] = chain_key(parent, part)
        return found

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
        digest = None  # of the tokens since ``full`` steps, up to ``hashed``
        full = hashed = 0
        for position in range(first, first + apart * count, apart):
            before, rest = divmod(position, step)
            if not rest:
                keys.append(self.chain(before)[before - 1])
                continue
            if digest is None or before != full:
                full, hashed = before, before * step
                parent = self.chain(full)[full - 1] if full else self.root
                digest = blake2b(digest_size=8, key=parent.to_bytes(8, "little"))
            digest.update(tokens[hashed * TOKEN_BYTES : position * TOKEN_BYTES])
            hashed = position
            keys.append(int.from_bytes(digest.digest(), "little"))
        found = self._runs[first, apart, count] = tuple(keys)
        return found

    def _extend(self, count: int) -> None:
        width = self.step * TOKEN_BYTES
        keys, tokens = self._keys, self.tokens
        parent = (keys[-1] if keys else self.root).to_bytes(8, "little")
        digests = []
        for start in range(len(keys) * width, count * width, width):
            parent = blake2b(tokens[start : start + width], digest_size=8, key=parent).digest()
            digests.append(parent)
        keys += unpack(f"<{len(digests)}Q", b"".join(digests))


def chain_key(parent: int, tokens: bytes | bytearray) -> int:
    """The key of a prefix from the key of a shorter one and the tokens between."""
    digest = blake2b(tokens, digest_size=8, key=parent.to_bytes(8, "little")).digest()
    return int.from_bytes(digest, "little")
