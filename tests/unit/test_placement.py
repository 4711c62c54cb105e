"""Loads over several ways at once: how they are split, and what that costs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.core.agent_values import Config, Source
from kvatlas.core.placement import Paths
from kvatlas.core.records import Tier
from kvatlas.core.units import Part, Unit
from kvatlas.errors import ConfigError

OWN = (Tier.OBJECT, "")
RATES = st.floats(1e8, 1e11)
QUEUES = st.integers(0, 10**11)


def units(count: int, size_bytes: int) -> tuple[Unit, ...]:
    return tuple(Unit(bytes([i, i]), Part.BODY, i, size_bytes) for i in range(count))


def paths(own: float, *relays: float) -> Paths:
    names = {f"relay-{i}": rate for i, rate in enumerate(relays)}
    return Paths(Config(reads={Tier.OBJECT: own}, relays=names))


def test_an_equal_relay_takes_half_and_halves_the_time() -> None:
    source = Source(Tier.OBJECT, units(100, 10**8))
    alone, both = paths(1e10), paths(1e10, 1e10)
    assert alone.spread([source]) == (source,)
    assert alone.read_s(Tier.OBJECT, 10**10) == pytest.approx(1.005)
    assert both.read_s(Tier.OBJECT, 10**10) == pytest.approx(0.505)
    mine, relayed = both.spread([source])
    assert (mine.node, relayed.node) == ("", "relay-0")
    assert (len(mine.units), len(relayed.units)) == (50, 50)


def test_a_way_that_is_busy_for_longer_gets_nothing() -> None:
    source = Source(Tier.OBJECT, units(10, 10**8))
    both = paths(1e10, 1e10)
    both.reading[OWN] = 10**10  # another second
    (all_of_it,) = both.spread([source])
    assert (all_of_it.node, all_of_it.units) == ("relay-0", source.units)
    assert both.read_s(Tier.OBJECT, 10**9) == pytest.approx(0.105)


def test_only_what_comes_from_the_store_is_split() -> None:
    both = paths(1e10, 1e10)
    for source in (Source(Tier.DISK, units(9, 10**8)), Source(Tier.PEER, units(9, 10**8), "x")):
        assert both.spread([source]) == (source,)
    assert both.way(Source(Tier.PEER, (), "x")) == (Tier.PEER, "")
    assert both.way(Source(Tier.OBJECT, (), "relay-0")) == (Tier.OBJECT, "relay-0")


@given(
    own=RATES,
    relays=st.lists(RATES, min_size=1, max_size=8),
    busy=st.lists(QUEUES, min_size=9, max_size=9),
    count=st.integers(1, 60),
    size_bytes=st.integers(1, 10**8),
)
def test_all_ways_end_together_and_no_unit_is_lost(
    own: float, relays: list[float], busy: list[int], count: int, size_bytes: int
) -> None:
    made = paths(own, *relays)
    ways = [OWN, *((Tier.OBJECT, f"relay-{i}") for i in range(len(relays)))]
    made.reading.update(dict(zip(ways, busy, strict=False)))
    source = Source(Tier.OBJECT, units(count, size_bytes))
    end_s = made.read_s(Tier.OBJECT, source.size_bytes)
    assert end_s <= min(made.reads[w].at(source.size_bytes + made.reading[w]) for w in ways) * 1.001
    parts = made.spread([source])
    assert tuple(unit for part in parts for unit in part.units) == source.units
    for part in parts:
        way = made.way(part)
        took_s = made.reads[way].at(made.reading[way] + part.size_bytes)
        whole_s = made.reads[way].slope * 2 * size_bytes  # units are not cut
        assert took_s <= end_s * 1.001 + whole_s
    for way in set(ways) - {made.way(part) for part in parts}:
        one_s = made.reads[way].slope * 2 * size_bytes
        assert made.reads[way].at(made.reading[way]) >= end_s * 0.999 - one_s


@pytest.mark.parametrize("relays", [{"": 1e9}, {"n": 0.0}, {str(i): 1e9 for i in range(9)}])
def test_relays_that_cannot_be(relays: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="relays"):
        Config(relays=relays)
