"""In `core.ahead`, what a copy would have saved, had it been there: the past by which it is priced.

Both books count seconds to the first token. What was seen fades, so the sum of the past is what the
next while is expected to bring.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection

import msgspec

from kvatlas.core.records import Publisher

PREFIXES_MAX = 4096
ENDS_MAX = 16_384
_STEPS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)  # bounds of what a push looks to be worth at the end


class _Faded:
    """A sum and a count, both fading by e in ``horizon_s``."""

    __slots__ = ("at", "count", "sum_s")

    def __init__(self) -> None:
        self.sum_s = self.count = self.at = 0.0

    def fade(self, now: float, horizon_s: float) -> None:
        if now > self.at:
            share = math.exp((self.at - now) / horizon_s)
            self.sum_s *= share
            self.count *= share
            self.at = now


class Heats:
    """Prefixes that requests waited for, by their last key: the seconds that one more holder would
    have saved them."""

    def __init__(self, horizon_s: float) -> None:
        self._horizon_s = horizon_s
        self._heats: OrderedDict[bytes, _Faded] = OrderedDict()

    def __len__(self) -> int:
        return len(self._heats)

    def add(self, key: bytes, gain_s: float, now: float) -> float:
        """One request would have saved ``gain_s``. Returns what those to come are expected to: of
        one request alone nothing follows."""
        heat = self._heats.get(key)
        if heat is None:
            heat = self._heats[key] = _Faded()
            if len(self._heats) > PREFIXES_MAX:
                self._heats.popitem(last=False)
        self._heats.move_to_end(key)
        heat.fade(now, self._horizon_s)
        heat.sum_s += gain_s
        heat.count += 1
        return heat.sum_s * max(0.0, heat.count - 1) / heat.count

    def drop(self, key: bytes) -> None:
        """A copy was ordered: whether one more is wanted, what comes will tell."""
        self._heats.pop(key, None)


class End(msgspec.Struct, frozen=True):
    """A prompt whose answer is over: where its next turn would go now, and what is like it."""

    target: Publisher
    kind: int


class Turns:
    """Ends of requests, and of those that came back what a push at the end would have saved. What
    it is worth is learnt by what it looked to be worth at the end, and apart for prompts that were
    a next turn themselves: who came back once is likelier to come back."""

    def __init__(self, horizon_s: float) -> None:
        self._horizon_s = horizon_s
        self._ends: OrderedDict[bytes, End] = OrderedDict()
        self._kinds = [_Faded() for _ in range(2 * (len(_STEPS_S) + 1))]

    def __len__(self) -> int:
        return len(self._ends)

    def ended(
        self, key: bytes, target: Publisher, looks_s: float, now: float, *, again: bool
    ) -> float:
        """A prompt with this last key was answered; were its next turn to come now, ``target``
        would save it ``looks_s``. ``again``: it was a next turn itself. Returns what a push is
        expected to save."""
        kind = 2 * sum(looks_s > bound_s for bound_s in _STEPS_S) + again
        self._ends[key] = End(target, kind)
        self._ends.move_to_end(key)
        if len(self._ends) > ENDS_MAX:
            self._ends.popitem(last=False)
        seen = self._kinds[kind]
        seen.fade(now, self._horizon_s)
        expected_s = seen.sum_s / seen.count if seen.count >= 1 else 0.0
        seen.count += 1
        return expected_s

    def back(self, keys: Collection[bytes]) -> tuple[bytes, End] | None:
        """The end that this prompt goes on from, if it is known; asked once."""
        found = self._ends.keys() & keys if self._ends else ()
        if not found:
            return None
        ends = [(key, self._ends.pop(key)) for key in keys if key in found]
        return ends[-1]

    def saved(self, end: End, gain_s: float, now: float) -> None:
        """A push would have saved so much."""
        seen = self._kinds[end.kind]
        seen.fade(now, self._horizon_s)
        seen.sum_s += gain_s
