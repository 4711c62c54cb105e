"""S3-FIFO: three queues, and nothing moves on a hit.

Yang et al., "FIFO queues are all you need for cache eviction" (SOSP'23), algorithm 1. New blocks
enter the small queue, a tenth of the tier; those used more than once when they reach its end go on
to the main queue, the others leave and are remembered in a ghost queue, as many as the main queue
has room for. A block that the ghost remembers enters the main queue at once. The main queue gives
each block a further round per use, at most three.
"""

from __future__ import annotations

from collections import OrderedDict

from kvatlas.core.policy.base import Facts, Key, MayGo

_SMALL = 0.1  # share of the small queue
_USES_MAX = 3


class S3Fifo:
    """Static small, main and ghost queue. Does not know the tree."""

    tree = False

    def __init__(self) -> None:
        self._small: OrderedDict[Key, int] = OrderedDict()  # key -> size_bytes
        self._main: OrderedDict[Key, int] = OrderedDict()
        self._ghost: OrderedDict[Key, None] = OrderedDict()
        self._uses: dict[Key, int] = {}
        self._small_bytes = self._main_bytes = 0

    def __len__(self) -> int:
        return len(self._uses)

    def added(self, key: Key, facts: Facts, now: float) -> None:
        self._uses[key] = min(facts.uses, _USES_MAX)
        if key in self._ghost:
            del self._ghost[key]
            self._to_main(key, facts.size_bytes)
        else:
            self._small[key] = facts.size_bytes
            self._small_bytes += facts.size_bytes

    def touched(self, key: Key, now: float) -> None:
        uses = self._uses[key]
        if uses < _USES_MAX:
            self._uses[key] = uses + 1

    def removed(self, key: Key) -> None:
        del self._uses[key]
        if key in self._small:
            self._small_bytes -= self._small.pop(key)
        else:
            self._main_bytes -= self._main.pop(key)

    def evict(self, need_bytes: int, now: float, may_go: MayGo | None = None) -> list[Key]:
        found: list[Key] = []
        # Every block loses a use or a queue per visit, but those that may not go: they are passed
        # over once each, and put back at the end that they were taken from.
        passed: list[tuple[Key, int, bool]] = []
        while need_bytes > 0 and (self._small or self._main):
            total = self._small_bytes + self._main_bytes
            small = bool(self._small) and (self._small_bytes >= _SMALL * total or not self._main)
            queue = self._small if small else self._main
            key, size_bytes = queue.popitem(last=False)
            if small:
                self._small_bytes -= size_bytes
            else:
                self._main_bytes -= size_bytes
            if small and self._uses[key] > 1:
                self._uses[key] = 0
                self._to_main(key, size_bytes)
            elif not small and self._uses[key]:
                self._uses[key] -= 1
                self._to_main(key, size_bytes)
            elif may_go is not None and not may_go(key):
                passed.append((key, size_bytes, small))
            else:
                del self._uses[key]
                if small:
                    self._remember(key)
                found.append(key)
                need_bytes -= size_bytes
        for key, size_bytes, small in reversed(passed):
            self._put_back(key, size_bytes, small=small)
        return found

    def _to_main(self, key: Key, size_bytes: int) -> None:
        self._main[key] = size_bytes
        self._main_bytes += size_bytes

    def _put_back(self, key: Key, size_bytes: int, *, small: bool) -> None:
        queue = self._small if small else self._main
        queue[key] = size_bytes
        queue.move_to_end(key, last=False)
        if small:
            self._small_bytes += size_bytes
        else:
            self._main_bytes += size_bytes

    def _remember(self, key: Key) -> None:
        self._ghost[key] = None
        while len(self._ghost) > (1 - _SMALL) * len(self._uses):
            self._ghost.popitem(last=False)
