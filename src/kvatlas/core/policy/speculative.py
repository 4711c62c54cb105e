"""Speculative: seed document 003's strategy 4. What to bring up, or push ahead, before it is asked.

Of the seed's three signals this uses the first, the structure of the prompt: a conversation that
took a turn will likely take another, which begins with all of the last. The other two, stable CSA
selections and batches alike, need statistics that no engine reports. Two questions are answered
from what happened so far: how likely a conversation of so many turns comes back, and after how
long; and, for P/D and for pushing ahead, how likely it goes to the same place again.

It evicts nothing and is not a `Policy`: it stands beside one and spends a budget.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from kvatlas.core.deadlines import Deadlines
from kvatlas.core.policy.base import Key

_GAPS = 64  # buckets of a quarter of an octave each, from a quarter of a second on
_QUARTERS = (1.0, 1.189207, 1.414214, 1.681793)


class Prediction(msgspec.Struct, frozen=True):
    """Blocks that should be near when the next turn comes.

    ``to`` is where it is expected ("" where no place was ever named), ``confidence`` the chance
    that it comes at all, and there.
    """

    keys: tuple[Key, ...]
    confidence: float
    to: str = ""


class _Rate:
    """How often something came true, from even odds on."""

    def __init__(self) -> None:
        self.yes = self.seen = 0

    def note(self, yes: bool) -> None:
        self.seen += 1
        self.yes += yes
        if self.seen >= 1 << 16:  # so that it can still change its mind
            self.seen //= 2
            self.yes //= 2

    def chance(self) -> float:
        return (self.yes + 1) / (self.seen + 2)


class _End(msgspec.Struct):
    """Where a conversation stands."""

    keys: tuple[Key, ...]
    at: float
    turns: int
    place: str


class Speculative:
    """Predicts next turns. Remembers at most ``ends_max`` conversations, each ``horizon_s``."""

    def __init__(
        self,
        *,
        confidence_min: float = 0.5,
        early: float = 0.25,
        horizon_s: float = 900.0,
        ends_max: int = 65_536,
    ) -> None:
        """``confidence_min``: below it nothing is predicted. ``early``: the share of next turns
        that may come before their blocks were brought up. Raises ValueError on shares outside
        0…1, or limits below 1.
        """
        if not (0 <= confidence_min <= 1 and 0 < early < 1 and horizon_s > 0 and ends_max >= 1):
            raise ValueError("needs shares of 0 to 1, a horizon above 0 and room for one end")
        self._confidence_min, self._early = confidence_min, early
        self._horizon_s, self._ends_max = horizon_s, ends_max
        self._ends: OrderedDict[Key, _End] = OrderedDict()  # last key of a chain -> its end
        self._due: Deadlines[Key] = Deadlines(self._counts)
        self._waits: dict[Key, float] = {}  # last key -> when to bring its chain up
        self._returns = [_Rate() for _ in range(5)]
        self._stays = _Rate()
        self._gaps = [0] * _GAPS
        self.predicted = 0
        self.came_true = 0

    def __len__(self) -> int:
        return len(self._ends)

    def arrived(self, keys: Sequence[Key], now: float, *, place: str = "") -> int:
        """A prompt came in: learn from it. Returns which turn of its conversation this is."""
        self._forget(now)
        for key in reversed(keys):
            end = self._ends.pop(key, None)
            if end is not None:
                self._returns[_bucket(end.turns)].note(True)
                self._gaps[_gap(now - end.at)] += 1
                if end.place and place:
                    self._stays.note(end.place == place)
                if self._waits.pop(key, math.inf) == -math.inf:
                    self.came_true += 1
                return end.turns + 1
        return 1

    def ended(self, keys: Sequence[Key], turn: int, now: float, *, place: str = "") -> None:
        """A turn ended, with these full blocks held; ``turn`` as `arrived` returned it."""
        if not keys:
            return
        self._forget(now)
        last = keys[-1]
        self._ends[last] = _End(tuple(keys), now, turn, place)
        self._ends.move_to_end(last)
        while len(self._ends) > self._ends_max:
            self._lose(next(iter(self._ends)))
        if self._returns[_bucket(turn)].chance() >= self._confidence_min:
            at = now + self._quantile(self._early)
            self._waits[last] = at
            self._due.set(at, last)

    def due(self, now: float, *, blocks_max: int = 1 << 30) -> list[Prediction]:
        """What should be brought up now, at most ``blocks_max`` blocks; the rest is for later."""
        found: list[Prediction] = []
        while blocks_max > 0 and (last := self._due.pop(now)) is not None:
            end = self._ends[last]
            confidence = self._returns[_bucket(end.turns)].chance()
            if end.place:
                confidence *= self._stays.chance()
            self._waits[last] = -math.inf  # told: it now comes true or not
            if confidence >= self._confidence_min:
                found.append(Prediction(end.keys, confidence, end.place))
                blocks_max -= len(end.keys)
                self.predicted += 1
        return found

    def next_due(self) -> float | None:
        """When `due` has something to say."""
        return self._due.next()

    def _counts(self, at: float, last: Key) -> bool:
        return self._waits.get(last) == at and last in self._ends

    def _forget(self, now: float) -> None:
        while self._ends:
            last, end = next(iter(self._ends.items()))
            if end.at + self._horizon_s > now:
                break
            self._lose(last)

    def _lose(self, last: Key) -> None:
        end = self._ends.pop(last)
        self._waits.pop(last, None)
        self._returns[_bucket(end.turns)].note(False)

    def _quantile(self, share: float) -> float:
        """The gap below which ``share`` of the next turns came; 0 where none was seen."""
        rest = share * sum(self._gaps)
        for bucket, count in enumerate(self._gaps):
            rest -= count
            if rest < 0:
                return math.ldexp(0.25, bucket // 4) * _QUARTERS[bucket % 4]
        return 0.0


def _bucket(turns: int) -> int:
    """1, 2, 3 to 4, 5 to 8, more."""
    return min(4, max(0, turns - 1).bit_length())


def _gap(seconds: float) -> int:
    return min(_GAPS - 1, max(0, math.floor(4 * math.log2(max(seconds, 0.25) / 0.25))))
