"""What a transfer takes on one way: learnt, fallen at once, and back again."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.core.ways import BACK, FALLEN, IN_A_ROW, KNOWN, TRIAL_MAX_S, TRIAL_S, Way

SIZES = (10_000_000, 100_000_000)


def taken(size_bytes: int, bytes_per_s: float = 1e9) -> float:
    return 0.02 + size_bytes / bytes_per_s


def known(transfers: int = 200, bytes_per_s: float = 1e9) -> Way:
    way = Way()
    for n in range(transfers):
        size = SIZES[n % 2]
        way.observe(size, taken(size, bytes_per_s), float(n))
    return way


def test_it_is_what_was_measured() -> None:
    new = Way()
    assert (new.bytes_per_s, new.error_s, new.count) == (0.0, 0.0, 0)
    assert 0.0 < new.seconds(SIZES[1], 0.0) < 0.1
    way = known()
    assert math.isclose(way.seconds(50_000_000, 0.0), 0.07, rel_tol=0.05)
    assert way.error_s < 0.005
    assert way.spread_s < 0.05
    assert not way.fallen
    assert math.isclose(way.bytes_per_s, sum(SIZES) / sum(taken(s) for s in SIZES), rel_tol=0.1)


def test_a_fall_is_the_price_at_once_and_not_before_it_is_sure() -> None:
    way = known()
    before = way.seconds(SIZES[1], 0.0)
    for n in range(IN_A_ROW - 1):
        way.observe(SIZES[1], taken(SIZES[1], 1e8), 300.0 + n)
        assert not way.fallen
        assert way.seconds(SIZES[1], 300.0) == before, "one slow one is no fall"
    way.observe(SIZES[1], taken(SIZES[1], 1e8), 303.0)
    assert (way.fallen, way.falls) == (True, 1)
    assert math.isclose(way.seconds(SIZES[1], 304.0), 1.02, rel_tol=0.01)
    assert math.isclose(way.bytes_per_s, 1e8, rel_tol=0.05), "what it moves now, not a mean"
    assert way.fallen_by > FALLEN


def test_hiccups_are_no_fall_and_are_learnt_from_once_they_are_known_as_such() -> None:
    way = known()
    for n in range(30):
        slow = n % IN_A_ROW != IN_A_ROW - 1
        way.observe(SIZES[1], 1.0 if slow else taken(SIZES[1]), 300.0 + n)
    assert way.falls == 0
    assert way.seconds(SIZES[1], 400.0) > taken(SIZES[1]) * 1.2


def test_a_way_that_is_not_known_yet_does_not_fall() -> None:
    """The first transfer of a pair has its handshake in it, and the prior may be far off."""
    way = Way()
    for n in range(KNOWN + 30):
        way.observe(SIZES[0], 2.0, float(n))
    assert way.falls == 0
    assert math.isclose(way.seconds(SIZES[0], 100.0), 2.0, rel_tol=0.2)


def test_a_fallen_way_is_tried_now_and_then_and_comes_back() -> None:
    way = known()
    good, bad = taken(SIZES[1]), taken(SIZES[1], 1e8)
    now = 1000.0
    for _ in range(IN_A_ROW):
        way.observe(SIZES[1], bad, now)
    pause = TRIAL_S
    for _ in range(8):  # it stays fallen: one trial each, and ever fewer
        assert way.seconds(SIZES[1], now + pause - 1) > 0.9
        now += pause
        assert way.seconds(SIZES[1], now) < 0.2, "as if it were what it was"
        way.sent(now)
        assert way.seconds(SIZES[1], now) > 0.9, "one only"
        way.observe(SIZES[1], bad, now + 1)
        pause = min(2 * pause, TRIAL_MAX_S)
    assert pause == TRIAL_MAX_S
    now += pause
    for _ in range(IN_A_ROW):
        assert way.fallen
        assert way.seconds(SIZES[1], now) < 0.2, "a good one asks for the next at once"
        way.sent(now)
        now += 1
        way.observe(SIZES[1], good, now)
    assert not way.fallen
    assert math.isclose(way.seconds(SIZES[1], now), good, rel_tol=0.1)
    assert (way.falls, way.fallen_by) == (1, 1.0)


def test_told_from_elsewhere() -> None:
    way = known()
    before = way.seconds(SIZES[1], 0.0)
    way.fall(SIZES[1], 10 * before, 500.0)
    assert math.isclose(way.seconds(SIZES[1], 501.0), 10 * before)
    way.fall(SIZES[1], 20 * before, 502.0)
    assert math.isclose(way.seconds(SIZES[1], 503.0), 20 * before)
    assert way.falls == 1, "the same fall, better known"
    way.recover()
    assert way.seconds(SIZES[1], 504.0) == before
    way.recover()
    way.fall(SIZES[1], before / 2, 505.0)
    assert math.isclose(way.seconds(SIZES[1], 506.0), before), "a fall makes nothing cheaper"


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_what_is_no_measurement_is_ignored(value: float) -> None:
    way = known()
    before = way.seconds(SIZES[1], 0.0)
    way.observe(SIZES[1], value, 0.0)
    way.observe(value, 1.0, 0.0)
    assert (way.seconds(SIZES[1], 0.0), way.count) == (before, 200)


@given(st.lists(st.tuples(st.floats(0, 1e12), st.floats(0, 1e6)), max_size=60))
def test_whatever_is_measured_the_estimate_is_a_time(rows: list[tuple[float, float]]) -> None:
    way = Way()
    for n, (size, seconds) in enumerate(rows):
        way.sent(float(n))
        way.observe(size, seconds, float(n))
        for x in (0.0, 1e6, 1e12):
            estimate = way.seconds(x, float(n))
            assert math.isfinite(estimate)
            assert estimate >= 0
        assert way.fallen_by >= 1


def test_the_thresholds_leave_no_gap_that_flaps() -> None:
    """What ends a fall is well below what makes one."""
    assert BACK < FALLEN / 1.5
