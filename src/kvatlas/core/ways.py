"""The way from one engine to another: what a transfer over it takes, and whether that is still so.

An estimate that only follows its observations would creep to a new truth over many transfers, and
each of them would pay for it. So a fall is looked for: a few transfers in a row that took several
times what they used to. From then on what they took is the estimate, at once, and what it was
before is remembered, to see whether it comes back.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from kvatlas.core.cost import PRIOR_BYTES_PER_S, PRIOR_LATENCY_S, Line
from kvatlas.core.records import Tier

KNOWN = 8  # transfers before one can be called slow
IN_A_ROW = 3  # slow ones that make a fall, good ones that end it
FALLEN = 3.0  # times what a transfer takes, and beyond its usual error: slow
BACK = 1.5  # times what it took before the fall: good again
#: Nobody goes a fallen way while there is another, and nobody would see it come back: after so
#: long one transfer has the old price again. Each that is slow doubles the time to the next.
TRIAL_S = 5.0
TRIAL_MAX_S = 900.0

_ERRORS = 3.0  # usual errors
_DECAY = 0.9
_TYPICAL_BYTES = 100e6


class Way:
    """From one engine to another. Times are seconds on one clock, given with every call."""

    def __init__(self) -> None:
        self.count = 0  # transfers that were observed
        self.falls = 0
        self.error_s = 0.0  # usual distance from the estimate, while nothing is suspected
        self._line = _prior()
        self._before: Line | None = None
        self._row: list[tuple[float, float]] = []  # slow ones, or after a fall good ones
        self._bytes = self._seconds = 0.0
        self._trial_at = 0.0
        self._pause_s = TRIAL_S

    @property
    def fallen(self) -> bool:
        """Whether a transfer takes far longer than it did."""
        return self._before is not None

    @property
    def fallen_by(self) -> float:
        """How many times as long as before the fall; 1 where there was none."""
        if self._before is None:
            return 1.0
        usual_s = self._before.at(_TYPICAL_BYTES)
        return max(1.0, self._line.at(_TYPICAL_BYTES) / usual_s) if usual_s > 0 else 1.0

    @property
    def spread_s(self) -> float:
        """Root mean square error of recent estimates."""
        return self._line.spread

    @property
    def bytes_per_s(self) -> float:
        """Of the last transfers, their latency in it; 0 before the first one."""
        return self._bytes / self._seconds if self._seconds else 0.0

    def seconds(self, size_bytes: float, now: float) -> float:
        """What a transfer should take."""
        if self._before is not None and now >= self._trial_at:
            return self._before.at(size_bytes)
        return self._line.at(size_bytes)

    def sent(self, now: float) -> None:
        """A transfer goes this way now. Where a trial was due, this is it."""
        if self._before is not None and now >= self._trial_at:
            self._wait(now)

    def observe(self, size_bytes: float, seconds: float, now: float) -> None:
        """One transfer; what is not a finite number ≥ 0 is ignored."""
        if not all(math.isfinite(v) and v >= 0 for v in (size_bytes, seconds)):
            return
        self.count += 1
        self._bytes = _DECAY * self._bytes + size_bytes
        self._seconds = _DECAY * self._seconds + seconds
        if self._before is None:
            self._watch(size_bytes, seconds, now)
        else:
            self._await(self._before, size_bytes, seconds, now)

    def fall(self, size_bytes: float, seconds: float, now: float) -> None:
        """It is known from elsewhere that so much takes at least so long from now on."""
        usual_s = (self._before or self._line).at(size_bytes)
        self._fall(seconds / usual_s if usual_s > 0 else 1.0, now)

    def recover(self) -> None:
        """It is known from elsewhere that it is what it was."""
        if self._before is not None:
            self._line, self._before, self._row = self._before, None, []

    def _fall(self, times: float, now: float) -> None:
        before = self._before
        if before is None:
            before = self._before = self._line
            self._pause_s = TRIAL_S
            self.falls += 1
        if self._row:
            self._bytes, self._seconds = (sum(values) for values in zip(*self._row, strict=True))
        self._line = _scaled(before, max(1.0, times))
        self._row = []
        self._wait(now)

    def _watch(self, size_bytes: float, seconds: float, now: float) -> None:
        """A slow one is not learnt from before it is known whether it is a fall."""
        expected = self._line.at(size_bytes)
        error = abs(seconds - expected)
        known = self.count > KNOWN
        if known and seconds > FALLEN * expected and error > _ERRORS * self.error_s:
            self._row.append((size_bytes, seconds))
            if len(self._row) >= IN_A_ROW:
                usual_s = sum(self._line.at(x) for x, _ in self._row)
                self._fall(sum(y for _, y in self._row) / usual_s if usual_s else 1.0, now)
            return
        self._row.append((size_bytes, seconds))
        if self.count <= IN_A_ROW:
            self._begin()
            return
        for x, y in self._row:
            self._line.observe(x, y)
        self._row = []
        self.error_s = _DECAY * self.error_s + (1 - _DECAY) * error

    def _begin(self) -> None:
        """The first few replace the prior, which may be far off; the first one has the engines'
        handshake in it, so the median counts."""
        prior = _prior()
        line = self._line = _scaled(prior, _median(y / prior.at(x) for x, y in self._row))
        self.error_s = _median(abs(y - line.at(x)) for x, y in self._row)
        if self.count == IN_A_ROW:
            self._row = []

    def _await(self, before: Line, size_bytes: float, seconds: float, now: float) -> None:
        self._line.observe(size_bytes, seconds)
        if seconds > BACK * before.at(size_bytes) + _ERRORS * self.error_s:
            self._row = []
            return
        self._row.append((size_bytes, seconds))
        if len(self._row) >= IN_A_ROW:
            self.recover()
        else:
            self._trial_at = now  # it looks well: more of them, now

    def _wait(self, now: float) -> None:
        self._trial_at = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, TRIAL_MAX_S)


def _median(values: Iterable[float]) -> float:
    """The lower one of two."""
    ranked = sorted(values)
    return ranked[(len(ranked) - 1) // 2]


def _prior() -> Line:
    return Line(PRIOR_LATENCY_S, 1 / PRIOR_BYTES_PER_S[Tier.PEER], _TYPICAL_BYTES)


def _scaled(line: Line, times: float) -> Line:
    return Line(times * line.intercept, times * line.slope, _TYPICAL_BYTES)
