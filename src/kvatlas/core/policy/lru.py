"""LRU: what was used longest ago goes first.

The baseline of every paper, and vLLM's own order. It does not know the tree: the start of a
prompt is touched first and so goes first, and what is left behind it can no longer be reached.
"""

from __future__ import annotations

from collections import OrderedDict

from kvatlas.core.policy.base import Facts, Key, MayGo


def taken(queue: OrderedDict[Key, int], need_bytes: int, may_go: MayGo | None) -> list[Key]:
    """Takes blocks from the front of ``queue`` (key → size_bytes), passing over what may not go."""
    found: list[Key] = []
    if need_bytes > 0:
        for key, size_bytes in queue.items():
            if may_go is None or may_go(key):
                found.append(key)
                need_bytes -= size_bytes
                if need_bytes <= 0:
                    break
    for key in found:
        del queue[key]
    return found


class Lru:
    """Least recently used, over single blocks."""

    tree = False

    def __init__(self) -> None:
        self._queue: OrderedDict[Key, int] = OrderedDict()  # key -> size_bytes, oldest use first

    def __len__(self) -> int:
        return len(self._queue)

    def added(self, key: Key, facts: Facts, now: float) -> None:
        self._queue[key] = facts.size_bytes

    def touched(self, key: Key, now: float) -> None:
        self._queue.move_to_end(key)

    def removed(self, key: Key) -> None:
        del self._queue[key]

    def evict(self, need_bytes: int, now: float, may_go: MayGo | None = None) -> list[Key]:
        return taken(self._queue, need_bytes, may_go)
