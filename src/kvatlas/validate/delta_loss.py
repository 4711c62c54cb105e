"""What the token before says of the next one, and what quantised residuals lose: plain numbers.

Lossy coding stores an I row as bf16 and of the others the residual, rounded to ``bits``. The
prediction is made from what a reader will have, not from the truth (a closed loop), so that errors
do not add up. Beside it stands plain quantisation: the values themselves, rounded likewise. Both
round evenly between the least and the greatest of a group: one channel over one I distance,
with these two as 16 bits each.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from kvatlas.validate.delta_code import Delta, Predictor

KEPT_BITS = 16  # of a value in an I row, and of each end of a group's range

#: row, and the two rows whose mean predicts it.
Step = tuple[int, int, int]


class Kinship(msgspec.Struct, frozen=True):
    """Residuals against values, over channels.

    ``variance_ratio``: of all residuals' variance over all values'; below 1 where prediction helps.
    ``bits_saved``: per predicted value, what an ideal coder would save at the same error (mean over
    channels of half the logarithm); negative where residuals cost more than values.
    ``helped``: the share of channels with a ratio below 1.
    """

    variance_ratio: float
    bits_saved: float
    helped: float


def steps(predictor: Predictor, distance: int, rows: int) -> list[Step]:
    """The predicted rows in an order in which their references are known."""
    if predictor is Predictor.PREVIOUS:
        return [(t, t - 1, t - 1) for t in range(rows) if t % distance]
    if predictor is Predictor.KEY:
        return [(t, t - t % distance, t - t % distance) for t in range(rows) if t % distance]
    found, step = [], distance // 2
    while step:
        for t in range(step, rows, 2 * step):
            found.append((t, t - step, t + step if t + step < rows else t - step))
        step //= 2
    return found


def channels(unit: bytes, row_bytes: int) -> list[list[float]]:
    """The bf16 floats of a unit, channel by channel."""
    wide = bytearray(2 * len(unit))
    wide[2::4], wide[3::4] = unit[0::2], unit[1::2]
    values = array("f", bytes(wide)).tolist()
    width = row_bytes // 2
    return [values[channel::width] for channel in range(width)]


def kinship(every: Iterable[Sequence[float]], how: Delta) -> Kinship:
    """Over channels of one length each; constant ones say nothing and are left out."""
    whole = left = saved = 0.0
    count = helped = 0
    for values in every:
        plan = steps(how.predictor, how.distance, len(values))
        of_values = _variance(values)
        if not plan or of_values <= 0:
            continue
        residuals = [values[t] - (values[a] + values[b]) / 2 for t, a, b in plan]
        of_residuals = _variance(residuals)
        whole, left, count = whole + of_values, left + of_residuals, count + 1
        helped += of_residuals < of_values
        saved += 0.5 * math.log2(of_values / max(of_residuals, of_values * 1e-12))
    if not count:
        return Kinship(1.0, 0.0, 0.0)
    return Kinship(left / whole, saved / count, helped / count)


def _variance(values: Sequence[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.fsum((x - mean) ** 2 for x in values) / len(values)


def bits_per_value(predictor: Predictor | None, distance: int, bits: int) -> float:
    """All that is stored, I rows and ranges too; ``None`` is plain quantisation."""
    kept, coded = (0, distance) if predictor is None else (1, distance - 1)
    return ((kept + 2) * KEPT_BITS + coded * bits) / distance


def restored(values: Sequence[float], how: Delta | None, distance: int, bits: int) -> list[float]:
    """One channel as a reader gets it back; ``None`` is plain quantisation in the same groups."""
    found = list(values)
    for group in _groups(how, distance, len(values)):
        if how is None:
            open_loop = [values[t] for t, _, _ in group]
        else:
            open_loop = [values[t] - (values[a] + values[b]) / 2 for t, a, b in group]
        low = min(open_loop)
        step = (max(open_loop) - low) / ((1 << bits) - 1)
        for t, a, b in group:
            base = 0.0 if how is None else (found[a] + found[b]) / 2
            left = values[t] - base - low
            code = min(max(round(left / step), 0), (1 << bits) - 1) if step else 0
            found[t] = base + low + code * step
    return found


def _groups(how: Delta | None, distance: int, rows: int) -> Iterator[list[Step]]:
    if how is None:
        for first in range(0, rows, distance):
            yield [(t, t, t) for t in range(first, min(first + distance, rows))]
        return
    plan = steps(how.predictor, distance, rows)
    groups: dict[int, list[Step]] = {}
    for each in plan:
        groups.setdefault(each[0] // distance, []).append(each)
    yield from groups.values()


def errors(values: Sequence[float], found: Sequence[float]) -> tuple[float, float]:
    """Sum of squared errors, and what they are measured by: the values' own, around their mean."""
    wrong = math.fsum((x - y) ** 2 for x, y in zip(values, found, strict=True))
    return wrong, _variance(values) * len(values)
