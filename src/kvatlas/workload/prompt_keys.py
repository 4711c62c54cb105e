"""The block keys of one prompt, computed once however many engines see it. Pure."""

from __future__ import annotations

from array import array
from functools import lru_cache
from hashlib import blake2b
from math import gcd
from struct import pack

import msgspec

from kvatlas.core.keys import KEY_BYTES, Keyring
from kvatlas.core.layout import Layout

TOKEN_BYTES = 4
ID_BYTES = 8  # of a trace's hash id, which is below 2**63
_KEY_END = 1 << 64
_BIG_ENDIAN = not array("H", [1]).tobytes()[0]
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
        self.root = _root(salt, adapter)
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
        self._keys += _numbers(digests)


class Origin(msgspec.Struct, frozen=True):
    """What the prompt of a trace was made of: hash ids, each for so many tokens."""

    hash_ids: tuple[int, ...]
    block_tokens: int


class TraceKeys(PromptKeys):
    """The keys of such a prompt, by its hash ids.

    Prefixes are equal where the ids up to their ends are, so hashing the ids says as much as
    hashing the tokens that were made from them, a hundred times as many bytes: the key of a
    prefix is that of the trace's block in which it ends, plus how far that is into it.
    """

    __slots__ = ("_blocks", "_size")

    def __init__(
        self, origin: Origin, tokens: bytes, step: int, *, salt: str = "", adapter: str = ""
    ) -> None:
        super().__init__(tokens, step, salt=salt, adapter=adapter)
        self._size = origin.block_tokens
        self._blocks = _block_keys(self.root, origin.hash_ids)

    def key(self, position: int) -> int:
        """As `PromptKeys.key`."""
        block, into = divmod(position - 1, self._size)
        return (self._blocks[block] + into) % _KEY_END

    def digest(self, count: int) -> bytes:
        """As `PromptKeys.digest`."""
        return self.key(count * self.step).to_bytes(KEY_BYTES, "little") if count else self.root

    def run(self, first: int, apart: int, count: int) -> tuple[int, ...]:
        """As `PromptKeys.run`."""
        return tuple(self._each(range(first, first + apart * count, apart)))

    def _extend(self, count: int) -> None:
        step = self.step
        self._keys += self._each(range((len(self._keys) + 1) * step, count * step + 1, step))

    def _each(self, positions: range) -> list[int]:
        """`key` of each: a call less for a million of them."""
        blocks, size = self._blocks, self._size
        return [(blocks[(at - 1) // size] + (at - 1) % size) % _KEY_END for at in positions]


def keys_of(
    tokens: bytes, step: int, *, salt: str = "", adapter: str = "", origin: Origin | None = None
) -> PromptKeys:
    """The keys of a prompt; of one whose ``origin`` is told never beside those of others."""
    if origin is None:
        return PromptKeys(tokens, step, salt=salt, adapter=adapter)
    return TraceKeys(origin, tokens, step, salt=salt, adapter=adapter)


@lru_cache(maxsize=1024)
def _root(salt: str, adapter: str) -> bytes:
    return _KEYRING.root(msgspec.json.encode([salt, adapter]) if salt or adapter else b"")


@lru_cache(maxsize=64)
def _block_keys(root: bytes, hash_ids: tuple[int, ...]) -> list[int]:
    """The keys of a trace's blocks, not to be changed. The halves of a pair, and who is asked again
    after a failure, want the same ones soon after each other."""
    ids = pack(f"<{len(hash_ids)}Q", *hash_ids)
    return _numbers(_KEYRING.chain(root, ids, ID_BYTES // TOKEN_BYTES))


def _numbers(digests: list[bytes]) -> list[int]:
    """The first half of each digest."""
    halves = array("Q", b"".join(digests))[::2]
    if _BIG_ENDIAN:
        halves.byteswap()
    return halves.tolist()


def chain_key(parent: bytes, tokens: bytes) -> bytes:
    """The digest of a prefix from that of a step before and the tokens of one step more."""
    return _KEYRING.chain(parent, tokens, len(tokens) // TOKEN_BYTES)[0]


def rest_key(parent: bytes, tokens: bytes) -> int:
    """The key of a prefix that ends between two steps, from the digest of the step before."""
    return int.from_bytes(blake2b(tokens, digest_size=8, key=parent).digest(), "little")


def key_of(digest: bytes) -> int:
    """The key of a prefix of whole steps."""
    return int.from_bytes(digest[:8], "little")
