"""The compiled part of core in plain Python: what it means, without regard to speed or memory."""

from __future__ import annotations

import hashlib
import itertools
import struct
from collections.abc import Sequence

import msgspec
from typing_extensions import Buffer

accelerated = True
_NAME = 2**64 - 1


def chain(secret: bytes, parent: bytes, tokens: Buffer, block_bytes: int, /) -> list[bytes]:
    """key = SHA-256(secret + key + block)[:16] for each full block, from ``parent`` on.

    ``secret`` is 32 bytes, ``parent`` 16. ValueError for other sizes; RuntimeError where not
    ``accelerated``.
    """
    if len(secret) != 32 or len(parent) != 16 or block_bytes < 1:
        raise ValueError("a secret of 32, a parent of 16 and blocks of > 0 bytes")
    view = memoryview(tokens).cast("B")
    keys = []
    key = parent
    for end in range(block_bytes, len(view) + 1, block_bytes):
        key = hashlib.sha256(secret + key + view[end - block_bytes : end]).digest()[:16]
        keys.append(key)
    return keys


def token_ids(ids: Buffer, /) -> bytes:
    """A MessagePack list of token ids as uint32, little endian.

    ValueError for what is no such list, or no id from 0 to 2**32 - 1.
    """
    try:
        found = msgspec.msgpack.decode(ids, type=list[int])
        return struct.pack(f"<{len(found)}I", *found)
    except (msgspec.DecodeError, struct.error) as error:
        raise ValueError(str(error)) from None


class KeyTable:
    """16-byte block keys → holder sets, as the bits of an integer; 24 bytes an entry.

    TypeError for keys that are not 16 bytes; KeyError when a key to delete is not there.
    """

    def __init__(self) -> None:
        self._held: dict[bytes, int] = {}

    def get(self, key: bytes, default: int, /) -> int:
        return self._held.get(_checked(key), default)

    def add(self, keys: Sequence[bytes], bit: int, shared: dict[int, int], /) -> list[int]:
        """Set one bit in the value of each key; returns the places of those that had it.

        Equal values become one object, that of ``shared``, which learns those that are new.
        """
        places = []
        shared.setdefault(bit, bit)
        for place, key in enumerate(list(map(_checked, keys))):
            value = self._held.get(key, 0)
            if value | bit == value:
                places.append(place)
            else:
                self._held[key] = shared.setdefault(value | bit, value | bit)
        return places

    def runs(self, keys: Sequence[bytes], /) -> list[tuple[int, int]]:
        """(index, value) wherever the value differs, as an object, from that of the key before.

        The first key that is not there has the value 0 and ends the list.
        """
        runs: list[tuple[int, int]] = []
        for index, key in enumerate(list(map(_checked, keys))):
            value = self._held.get(key, 0)
            if not runs or value is not runs[-1][1]:
                runs.append((index, value))
            if key not in self._held:
                break
        return runs

    def __setitem__(self, key: bytes, value: int, /) -> None:
        _checked(key)
        if not isinstance(value, int):
            raise TypeError("a KeyTable holds integers")
        self._held[key] = value

    def __delitem__(self, key: bytes, /) -> None:
        del self._held[_checked(key)]

    def __len__(self) -> int:
        return len(self._held)

    def __sizeof__(self) -> int:
        return 24 * len(self)


class NameTable:
    """An engine's own block hashes (modulo 2**64) → 16-byte block keys, which are not zero.

    24 bytes an entry. ValueError for a key of zeros; KeyError when a name to delete is not there.
    """

    def __init__(self) -> None:
        self._keys: dict[int, bytes] = {}

    def get(self, name: int, /) -> bytes | None:
        return self._keys.get(name & _NAME)

    def add(self, names: Sequence[int], keys: Sequence[bytes], /) -> None:
        """Set each name to the key in its place. ValueError for numbers that differ."""
        checked = list(map(_checked, keys))
        if len(names) != len(checked):
            raise ValueError("as many names as keys")
        if not all(map(any, checked)):
            raise ValueError("a block key of zeros means none")
        self._keys.update((name & _NAME, key) for name, key in zip(names, checked, strict=True))

    def slots(self) -> int:
        """Places in the table, taken or not."""
        return len(self)

    def values(self, start: int, end: int, /) -> list[bytes]:
        """Keys in the places ``start`` to ``end``: a walk in parts, while nothing is changed."""
        if not 0 <= start <= end:
            raise ValueError("values(start, end) takes 0 <= start <= end")
        return list(itertools.islice(self._keys.values(), start, end))

    def entries(self, start: int, end: int, /) -> list[tuple[int, bytes]]:
        """The same, with their names."""
        if not 0 <= start <= end:
            raise ValueError("entries(start, end) takes 0 <= start <= end")
        return list(itertools.islice(self._keys.items(), start, end))

    def __setitem__(self, name: int, key: bytes, /) -> None:
        if not any(_checked(key)):
            raise ValueError("a block key of zeros means none")
        self._keys[name & _NAME] = key

    def __delitem__(self, name: int, /) -> None:
        if name & _NAME not in self._keys:
            raise KeyError(name)
        del self._keys[name & _NAME]

    def __contains__(self, name: int, /) -> bool:
        return name & _NAME in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def __sizeof__(self) -> int:
        return 24 * len(self)


def _checked(key: bytes) -> bytes:
    if not isinstance(key, bytes) or len(key) != 16:
        raise TypeError(f"a block key is 16 bytes, not {key!r}")
    return key
