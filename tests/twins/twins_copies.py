"""The compiled part of the data plane in plain Python: what it means, without regard to speed."""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Sequence
from typing import final

import xxhash
from typing_extensions import Buffer


@final
class Rows:
    """Pages that a block has in some layers, in each of them at equal distances.

    ``layers``: memory, bytes of a page, and from one page to the next. ValueError where pages
    overlap. A part (rows, block) of a copy is all its pages; IndexError where there are none.
    """

    def __init__(self, layers: Sequence[tuple[Buffer, int, int]], /) -> None:
        self._layers = [(memoryview(memory).cast("B"), page, step) for memory, page, step in layers]
        if any(not 0 < page <= step for _, page, step in self._layers):
            raise ValueError("pages of a row do not overlap")

    @property
    def size_bytes(self) -> int:
        """Of one block."""
        return sum(page for _, page, _ in self._layers)

    def _pages(self, block: int) -> list[memoryview]:
        pages = [view[block * step :][:page] for view, page, step in self._layers]
        if [len(page) for page in pages] != [page for _, page, _ in self._layers]:
            raise IndexError("no such block")
        return pages


def gather(target: Buffer, parts: Sequence[Buffer | tuple[Rows, int]], /) -> int:
    """Copy parts one after the other to the start of ``target``; says their checksum.

    XXH3, 128 bits, of all bytes as they were stored; 1 where that is 0. Other threads run
    meanwhile. ValueError where they do not fit, and nothing is touched then.
    """
    row = memoryview(target).cast("B")
    joined = b"".join(_views(parts, row))
    row[: len(joined)] = joined
    return xxhash.xxh3_128_intdigest(joined) or 1


def scatter(source: Buffer, parts: Sequence[Buffer | tuple[Rows, int]], /) -> int:
    """The way back: parts are filled one after the other from the start of ``source``."""
    row = memoryview(source).cast("B")
    at = 0
    for view in _views(parts, row):
        view[:] = row[at : at + len(view)]
        at += len(view)
    return xxhash.xxh3_128_intdigest(row[:at]) or 1


def receive(fd: int, ahead: Buffer, targets: Sequence[Buffer], until: float, /) -> list[int]:
    """Fill targets one after the other from a stream socket; says the checksum of each.

    ``ahead``: what was read of it before, and comes first. ``until``: on time.monotonic. Other
    threads run meanwhile. TimeoutError, ConnectionResetError where the other side has closed, else
    OSError; what has been filled by then is of no use.
    """
    before, sums = memoryview(ahead).cast("B"), []
    with socket.socket(fileno=os.dup(fd)) as sock:
        for target in targets:
            view = memoryview(target).cast("B")
            at = min(len(view), len(before))
            view[:at], before = before[:at], before[at:]
            while at < len(view):
                if (left_s := until - time.monotonic()) <= 0:
                    raise TimeoutError("the deadline has passed")
                if not select.select([sock], [], [], left_s)[0]:
                    continue
                if not (got := sock.recv_into(view[at:])):
                    raise ConnectionResetError("the other side closed the connection")
                at += got
            sums.append(xxhash.xxh3_128_intdigest(view) or 1)
    return sums


def _views(parts: Sequence[Buffer | tuple[Rows, int]], row: memoryview) -> list[memoryview]:
    views: list[memoryview] = []
    for part in parts:
        if isinstance(part, tuple):
            rows, block = part
            views += rows._pages(block)
        else:
            views.append(memoryview(part).cast("B"))
    total = sum(map(len, views))
    if total > len(row):
        raise ValueError(f"parts of {total} bytes where {len(row)} are")
    return views
