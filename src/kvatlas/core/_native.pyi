"""The compiled part of core: the hash chain (hashing.cpp), two hash tables (tables.cpp), and token
ids as engines write them (token_ids.cpp)."""

from collections.abc import Sequence
from typing import final

from typing_extensions import Buffer

accelerated: bool  # this processor has what `chain` needs

def chain(secret: bytes, parent: bytes, tokens: Buffer, block_bytes: int, /) -> list[bytes]:
    """key = SHA-256(secret + key + block)[:16] for each full block, from ``parent`` on.

    ``secret`` is 32 bytes, ``parent`` 16. ValueError for other sizes; RuntimeError where not
    ``accelerated``.
    """

def token_ids(ids: Buffer, /) -> bytes:
    """A MessagePack list of token ids as uint32, little endian.

    ValueError for what is no such list, or no id from 0 to 2**32 - 1.
    """

@final
class KeyTable:
    """16-byte block keys → holder sets, as the bits of an integer; 24 bytes an entry.

    TypeError for keys that are not 16 bytes; KeyError when a key to delete is not there.
    """

    def get(self, key: bytes, default: int, /) -> int: ...
    def add(self, keys: Sequence[bytes], bit: int, shared: dict[int, int], /) -> list[int]:
        """Set one bit in the value of each key; returns the places of those that had it.

        Equal values become one object, that of ``shared``, which learns those that are new.
        """

    def runs(self, keys: Sequence[bytes], /) -> list[tuple[int, int]]:
        """(index, value) wherever the value differs, as an object, from that of the key before.

        The first key that is not there has the value 0 and ends the list.
        """

    def __setitem__(self, key: bytes, value: int, /) -> None: ...
    def __delitem__(self, key: bytes, /) -> None: ...
    def __len__(self) -> int: ...
    def __sizeof__(self) -> int: ...

@final
class NameTable:
    """An engine's own block hashes (modulo 2**64) → 16-byte block keys, which are not zero.

    24 bytes an entry. ValueError for a key of zeros; KeyError when a name to delete is not there.
    """

    def get(self, name: int, /) -> bytes | None: ...
    def add(self, names: Sequence[int], keys: Sequence[bytes], /) -> None:
        """Set each name to the key in its place. ValueError for numbers that differ."""

    def slots(self) -> int:
        """Places in the table, taken or not."""

    def values(self, start: int, end: int, /) -> list[bytes]:
        """Keys in the places ``start`` to ``end``: a walk in parts, while nothing is changed."""

    def entries(self, start: int, end: int, /) -> list[tuple[int, bytes]]:
        """The same, with their names."""

    def __setitem__(self, name: int, key: bytes, /) -> None: ...
    def __delitem__(self, name: int, /) -> None: ...
    def __contains__(self, name: int, /) -> bool: ...
    def __len__(self) -> int: ...
    def __sizeof__(self) -> int: ...
