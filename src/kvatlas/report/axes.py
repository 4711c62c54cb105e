"""Axes of plots: what they measure, where a value lies on them, ticks at round numbers. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

VALUE_MAX = 1e100  # beyond it nothing is drawn
TICKS_MAX = 12  # steps between them on a logarithmic axis


class Axis(msgspec.Struct, frozen=True):
    """What is measured along it, in which unit. ``low`` and ``high`` widen it if need be. A
    logarithmic one leaves out what is not above 0."""

    label: str
    unit: str = ""
    log: bool = False
    low: float | None = None
    high: float | None = None

    @property
    def title(self) -> str:
        return f"{self.label} ({self.unit})" if self.unit else self.label

    def shows(self, value: float) -> bool:
        """Whether the value has a place on it."""
        return abs(value) <= VALUE_MAX and (value >= 1 / VALUE_MAX or not self.log)


class Scale:
    """An axis that holds ``values``, drawn from pixel ``start`` to pixel ``end``."""

    def __init__(self, axis: Axis, values: Iterable[float], start: float, end: float) -> None:
        ends = [v for v in (axis.low, axis.high) if v is not None]
        known = [v for v in (*values, *ends) if axis.shows(v)] or [1.0]
        low, high = min(known), max(known)
        self.axis, self._start, self._end = axis, start, end
        if axis.log:
            self.ticks = _log_ticks(low, high)
            low, high = min(low, self.ticks[0]), max(high, self.ticks[-1])
            self._low, self._high = math.log10(low), math.log10(high)
        else:
            low = min(low, 0.0) if low < high - low else low
            self.ticks = _ticks(low, high)
            self._low, self._high = min(low, self.ticks[0]), max(high, self.ticks[-1])

    def at(self, value: float) -> float:
        """The pixel of a value that the axis shows."""
        place = math.log10(value) if self.axis.log else value
        return self._start + (place - self._low) / (self._high - self._low) * (
            self._end - self._start
        )


def _ticks(low: float, high: float) -> list[float]:
    # What differs by less than digits can show is one value.
    span = max(high - low, abs(high) * 1e-9, 0.0) or 1.0
    power = 10.0 ** math.floor(math.log10(span / 5))
    step = next(power * m for m in (1, 2, 5, 10) if span / (power * m) <= 6)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [count * step for count in range(first, max(last, first + 1) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    fine = (1, 2, 5) if last - first < 4 else (1,)
    # One power more than the logarithm says: it is rounded.
    ticks = [m * 10.0**p for p in range(first - 1, max(last, first + 1) + 2) for m in fine]
    below = sum(tick <= low for tick in ticks) - 1
    above = next(i for i, tick in enumerate(ticks) if tick >= high and i > below)
    return ticks[below : above + 1 : -(-(above - below) // TICKS_MAX)]


def number(value: float) -> str:
    """A number as axes and pointers show it: four digits that count."""
    if value == 0:
        return "0"
    if not 1e-4 <= abs(value) < 1e9:
        return f"{value:.3g}"
    digits = max(0, 3 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
