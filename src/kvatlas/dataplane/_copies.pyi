"""The compiled part of the data plane: copies that sum what they copy (copies.cpp)."""

from collections.abc import Sequence
from typing import final

from typing_extensions import Buffer

@final
class Rows:
    """Pages that a block has in some layers, in each of them at equal distances.

    ``layers``: memory, bytes of a page, and from one page to the next. ValueError where pages
    overlap. A part (rows, block) of a copy is all its pages; IndexError where there are none.
    """

    def __init__(self, layers: Sequence[tuple[Buffer, int, int]], /) -> None: ...
    @property
    def size_bytes(self) -> int:
        """Of one block."""

def gather(target: Buffer, parts: Sequence[Buffer | tuple[Rows, int]], /) -> int:
    """Copy parts one after the other to the start of ``target``; says their checksum.

    XXH3, 128 bits, of all bytes as they were stored; 1 where that is 0. Other threads run
    meanwhile. ValueError where they do not fit, and nothing is touched then.
    """

def scatter(source: Buffer, parts: Sequence[Buffer | tuple[Rows, int]], /) -> int:
    """The way back: parts are filled one after the other from the start of ``source``."""

def receive(fd: int, ahead: Buffer, targets: Sequence[Buffer], until: float, /) -> list[int]:
    """Fill targets one after the other from a stream socket; says the checksum of each.

    ``ahead``: what was read of it before, and comes first. ``until``: on time.monotonic. Other
    threads run meanwhile. TimeoutError, ConnectionResetError where the other side has closed, else
    OSError; what has been filled by then is of no use.
    """

def gather_plain(target: Buffer, parts: Sequence[Buffer | tuple[Rows, int]], /) -> int:
    """As `gather`, on any processor."""

def scatter_plain(source: Buffer, parts: Sequence[Buffer | tuple[Rows, int]], /) -> int:
    """As `scatter`, on any processor."""
