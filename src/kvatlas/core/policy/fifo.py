"""FIFO: what came first goes first, used or not."""

from __future__ import annotations

from kvatlas.core.policy.base import Key
from kvatlas.core.policy.lru import Lru


class Fifo(Lru):
    """First in, first out. Does not know the tree."""

    def touched(self, key: Key, now: float) -> None:
        if key not in self._queue:
            raise KeyError(key)
