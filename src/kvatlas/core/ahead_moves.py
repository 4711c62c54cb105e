"""In `core.ahead`, what a node that drains has of prompts that were served lately: to be moved on.

Such a node ends, and what only its dram has ends with it. Prompts that were asked for last are
likeliest to be asked for again, so they go first; what nobody asked for lately is left behind.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator
from typing import Generic, TypeVar

from kvatlas.core.records import Publisher

SERVED_MAX = 4096
LOOK_MAX = 256  # in one go
AGAIN_S = 0.1  # where copies must wait for each other, or for their share of a node

T = TypeVar("T")


class Moves(Generic[T]):
    """Prompts by their last key, with the agent whose node served them last."""

    def __init__(self) -> None:
        self.draining: frozenset[Publisher] = frozenset()
        self.due = -1.0  # when to look again; -1: there is nothing to move
        self._served: OrderedDict[bytes, tuple[Publisher, T]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._served)

    def served(self, key: bytes, home: Publisher, prompt: T) -> None:
        """It was answered there."""
        self._served[key] = home, prompt
        self._served.move_to_end(key)
        if len(self._served) > SERVED_MAX:
            self._served.popitem(last=False)

    def drain(self, agents: Collection[Publisher], now: float) -> None:
        """These drain now, and no others."""
        draining = frozenset(agents)
        if draining != self.draining:
            self.draining = draining
            self.due = now if draining else -1.0

    def waiting(self) -> Iterator[tuple[bytes, Publisher, T]]:
        """What they have to hand on, the last first; take out what is done."""
        found = 0
        for key, (home, prompt) in reversed(list(self._served.items())):
            if home in self.draining:
                found += 1
                yield key, home, prompt
                if found >= LOOK_MAX:
                    return

    def done(self, key: bytes) -> None:
        """It is on its way, or need not be."""
        self._served.pop(key, None)
