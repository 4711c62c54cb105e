"""Delta coding of KV along the tokens, bit-exact: the frames of seed document 003, chapter 11.

A unit is rows of floats, one row per token. Every ``distance`` tokens a row is kept whole (I); the
others are replaced by what is left after a prediction: the token before (P), the I row before
(key), or the mean of the nearest known rows on both sides (B, halving the span as video does). The
residual is XOR of the bytes, or the difference of the floats' ranks. Residuals take as many bytes
as the rows did: only an entropy coder behind them (`kvatlas.dataplane.codec`) makes them smaller.

A difference of floats cannot be undone exactly, that of their *ranks* can: a float's bits, turned
so that they count upward from the least to the greatest float. All floats of a unit are handled
at once, as the lanes of one long integer.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from functools import lru_cache

import msgspec

from kvatlas.errors import ConfigError

UNIT_BYTES_MAX = 16 << 20
DISTANCE_MAX = 1024


class Predictor(enum.StrEnum):
    """What a row is predicted from."""

    PREVIOUS = "P"
    KEY = "key"
    BOTH = "B"


class Difference(enum.StrEnum):
    """How the prediction is taken away."""

    XOR = "xor"
    ARITHMETIC = "difference"


class Delta(msgspec.Struct, frozen=True):
    """One way to code; ``distance`` tokens from one I row to the next, a power of two."""

    predictor: Predictor
    difference: Difference
    distance: int

    def __post_init__(self) -> None:
        if not 1 <= self.distance <= DISTANCE_MAX or self.distance & (self.distance - 1):
            raise ConfigError(
                f"I rows every {self.distance} tokens: a power of two up to {DISTANCE_MAX}"
            )


class _Lanes:
    """Arithmetic on all floats of one unit, each ``width`` bytes wide, without carries between."""

    def __init__(self, width: int, row_bytes: int, rows: int) -> None:
        count = row_bytes * rows // width
        self.bits, self.row_bits, self.rows = 8 * width, 8 * row_bytes, rows
        self.full = (1 << 8 * row_bytes * rows) - 1
        self.low = int.from_bytes((b"\1" + bytes(width - 1)) * count, "little")
        self.high = self.low << (self.bits - 1)
        self.rest = self.full ^ self.high
        self.even = self.full ^ self.low
        self._row = b"\xff" * row_bytes

    def rows_where(self, wanted: Iterable[bool]) -> int:
        """A mask of whole rows."""
        nothing = bytes(len(self._row))
        return int.from_bytes(b"".join(self._row if w else nothing for w in wanted), "little")

    def later(self, x: int, rows: int) -> int:
        """Every row at the place of the one so many rows later."""
        return (x << rows * self.row_bits) & self.full

    def earlier(self, x: int, rows: int) -> int:
        return x >> rows * self.row_bits

    def spread(self, ones: int) -> int:
        """Lanes of all ones where the lane is 1."""
        return (ones << self.bits) - ones

    def rank(self, x: int) -> int:
        """Sign and magnitude as an order: the least float is 0."""
        return x ^ (self.spread((x & self.high) >> (self.bits - 1)) | self.high)

    def unrank(self, x: int) -> int:
        negative = (x & self.high) ^ self.high
        return x ^ (self.spread(negative >> (self.bits - 1)) | self.high)

    def minus(self, x: int, y: int) -> int:
        return ((x | self.high) - (y & self.rest)) ^ ((x ^ y ^ self.high) & self.high)

    def plus(self, x: int, y: int) -> int:
        return ((x & self.rest) + (y & self.rest)) ^ ((x ^ y) & self.high)

    def mean(self, x: int, y: int) -> int:
        return (x & y) + (((x ^ y) & self.even) >> 1)

    def fold(self, x: int) -> int:
        """0, -1, 1, -2 … as 0, 1, 2, 3 …: what is small has empty upper bits on both sides of 0."""
        return ((x & self.rest) << 1) ^ self.spread((x & self.high) >> (self.bits - 1))

    def unfold(self, x: int) -> int:
        odd = x & self.low
        return ((x ^ odd) >> 1) ^ self.spread(odd)


class _Masks:
    """The rows of each kind: I rows; those so many behind theirs; those half way, by the step to
    their neighbours on both sides, and where the unit ends before the second."""

    def __init__(self, lanes: _Lanes, distance: int) -> None:
        rows, where = range(lanes.rows), lanes.rows_where
        self.whole = where(t % distance == 0 for t in rows)
        self.steps = [1 << n for n in range(distance.bit_length() - 1)]
        self.behind = {s: where(t % distance >= s for t in rows) for s in self.steps}
        self.halved = {}
        for s in reversed(self.steps):
            half = [t % (2 * s) == s for t in rows]
            inside = where(h and t + s < lanes.rows for t, h in enumerate(half))
            self.halved[s] = inside, where(half) ^ inside


@lru_cache(maxsize=8)
def _lanes(width: int, row_bytes: int, rows: int) -> _Lanes:
    return _Lanes(width, row_bytes, rows)


@lru_cache(maxsize=32)
def _masks(width: int, row_bytes: int, rows: int, distance: int) -> _Masks:
    return _Masks(_lanes(width, row_bytes, rows), distance)


def coded(unit: bytes, width: int, row_bytes: int, how: Delta) -> bytes:
    """I rows as they are, residuals elsewhere. Raises ConfigError where this is no such unit."""
    lanes, masks = _shape(unit, width, row_bytes, how)
    x = int.from_bytes(unit, "little")
    ranks = lanes.rank(x)
    if how.predictor is Predictor.PREVIOUS:
        predicted = lanes.later(ranks, 1)
    elif how.predictor is Predictor.KEY:
        predicted = _keys(lanes, masks, ranks)
    else:
        predicted = 0
        for step in masks.halved:
            predicted |= _between(lanes, masks, ranks, step)
    left = _residual(lanes, how, x, ranks, predicted)
    whole = masks.whole
    return ((x & whole) | (left & (lanes.full ^ whole))).to_bytes(len(unit), "little")


def decoded(made: bytes, width: int, row_bytes: int, how: Delta) -> bytes:
    """The unit again, bit by bit."""
    lanes, masks = _shape(made, width, row_bytes, how)
    x = int.from_bytes(made, "little")
    if how.predictor is Predictor.PREVIOUS:
        ranks = _summed(lanes, masks, x, how)
    else:
        ranks = lanes.rank(x & masks.whole) & masks.whole
        if how.predictor is Predictor.KEY:
            others = lanes.full ^ masks.whole
            ranks |= _undone(lanes, how, x, _keys(lanes, masks, ranks)) & others
        else:
            for step, (inside, last) in masks.halved.items():
                predicted = _between(lanes, masks, ranks, step)
                ranks |= _undone(lanes, how, x, predicted) & (inside | last)
    return lanes.unrank(ranks).to_bytes(len(made), "little")


def _shape(unit: bytes, width: int, row_bytes: int, how: Delta) -> tuple[_Lanes, _Masks]:
    if width not in (1, 2) or row_bytes < 1 or row_bytes % width:
        raise ConfigError(f"rows of {row_bytes} bytes, {width} each: floats are 1 or 2 bytes wide")
    rows, rest = divmod(len(unit), row_bytes)
    if not rows or rest or len(unit) > UNIT_BYTES_MAX:
        raise ConfigError(
            f"{len(unit)} bytes in rows of {row_bytes}: whole rows, up to {UNIT_BYTES_MAX} bytes"
        )
    return _lanes(width, row_bytes, rows), _masks(width, row_bytes, rows, how.distance)


def _residual(lanes: _Lanes, how: Delta, x: int, ranks: int, predicted: int) -> int:
    if how.difference is Difference.XOR:
        return x ^ lanes.unrank(predicted)
    return lanes.fold(lanes.minus(ranks, predicted))


def _undone(lanes: _Lanes, how: Delta, left: int, predicted: int) -> int:
    """Ranks from residuals."""
    if how.difference is Difference.XOR:
        return lanes.rank(left ^ lanes.unrank(predicted))
    return lanes.plus(lanes.unfold(left), predicted)


def _keys(lanes: _Lanes, masks: _Masks, ranks: int) -> int:
    """Each row's I row."""
    keys = ranks & masks.whole
    for step in masks.steps:
        keys |= lanes.later(keys, step)
    return keys


def _between(lanes: _Lanes, masks: _Masks, ranks: int, step: int) -> int:
    """The rows ``step`` from known ones on both sides; on one only where the unit ends before."""
    inside, last = masks.halved[step]
    before = lanes.later(ranks, step)
    both = lanes.mean(before, lanes.earlier(ranks, step))
    return (both & inside) | (before & last)


def _summed(lanes: _Lanes, masks: _Masks, x: int, how: Delta) -> int:
    """Every row plus all before it up to its I row, in as many passes as the distance has bits."""
    if how.difference is Difference.XOR:
        for step in masks.steps:
            x ^= lanes.later(x, step) & masks.behind[step]
        return lanes.rank(x)
    whole = masks.whole
    total = (lanes.rank(x) & whole) | (lanes.unfold(x) & (lanes.full ^ whole))
    for step in masks.steps:
        total = lanes.plus(total, lanes.later(total, step) & masks.behind[step])
    return total
