"""Loads from a store that come over several ways at once: how they are split, and what that takes.

A node may read the store over its own card and over those of other nodes, which pass on what they
read (DualPath, arXiv 2602.21548). Its agent splits each load (`core.placement`); the router prices
it by the same rule, from the rates that it was told and from what it sent over the same cards.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import TypeVar

import msgspec

from kvatlas.core.cost import PRIOR_LATENCY_S, EngineCost
from kvatlas.core.records import Publisher, Tier

K = TypeVar("K", bound=Hashable)
_DECAY = 0.96
_FACTOR_PRIOR_S = 2.0  # seconds of agreement with what was told that a node starts with
_FACTOR_MAX = 8.0


def split(
    begins: Mapping[K, float], slopes: Mapping[K, float], size_bytes: float
) -> tuple[float, dict[K, float]]:
    """How so many bytes go over ways so that all of them end together: after how many seconds, and
    the bytes of each. ``begins``: seconds after which a way is free; ``slopes``: seconds per byte,
    above 0. A way that is busy for longer than all takes gets none."""
    end_s, rate, ahead = float("inf"), 0.0, 0.0
    for way in sorted(begins, key=begins.__getitem__):
        if begins[way] >= end_s:
            break
        rate += 1 / slopes[way]
        ahead += begins[way] / slopes[way]
        end_s = (size_bytes + ahead) / rate
    used = (way for way in begins if begins[way] <= end_s)
    return end_s, {way: (end_s - begins[way]) / slopes[way] for way in used}


class StoreWay(msgspec.Struct, frozen=True):
    """One way to the store: over the card of the node with this agent, and how fast."""

    card: Publisher
    bytes_per_s: float


class Load(msgspec.Struct, frozen=True):
    """A load on its way: bytes by card. ``alone``: nobody else used these cards when it began."""

    engine: Publisher
    seconds: float
    parts: tuple[tuple[Publisher, float], ...]
    alone: bool


class LoadWays:
    """Engines whose node has more than one way to the store, and what is on its way over whose
    card. An engine's own loads are in its queue already: counted are those of others."""

    def __init__(self) -> None:
        self._ways: dict[
            Publisher, tuple[Publisher, tuple[StoreWay, ...]]
        ] = {}  # engine → agent, ways
        self._busy: dict[Publisher, dict[Publisher, float]] = {}  # card → engine → bytes
        self._seen: dict[Publisher, tuple[float, float]] = {}  # agent → measured, predicted seconds

    def settle(
        self, agent: Publisher, engines: Iterable[Publisher], ways: tuple[StoreWay, ...]
    ) -> None:
        """The ways of a node, from now on; none: it is priced by what its loads took."""
        self.remove(agent)
        if ways:
            self._ways |= dict.fromkeys(engines, (agent, ways))
            self._seen[agent] = _FACTOR_PRIOR_S, _FACTOR_PRIOR_S

    def remove(self, agent: Publisher) -> None:
        """The agent is gone; loads under way end by themselves."""
        self._ways = {e: at for e, at in self._ways.items() if at[0] != agent}
        self._seen.pop(agent, None)

    def load_s(self, engine: Publisher, cost: EngineCost, tiers: tuple[int, ...]) -> float:
        """As `EngineCost.load_s`, over all ways to the store where there are several."""
        size_bytes = self._stored_bytes(engine, cost, tiers)
        if not size_bytes:
            return cost.load_s(tiers)
        rest = (*tiers[: Tier.OBJECT], 0, *tiers[Tier.OBJECT + 1 :])
        return cost.load_s(rest) + self._split(engine, size_bytes)[0]

    def _stored_bytes(self, engine: Publisher, cost: EngineCost, tiers: tuple[int, ...]) -> int:
        """What comes from a store to which there are several ways."""
        if len(tiers) <= Tier.OBJECT or engine not in self._ways:
            return 0
        return cost.pool.load_bytes(tiers[Tier.OBJECT])

    def begin(self, engine: Publisher, cost: EngineCost, tiers: tuple[int, ...]) -> Load | None:
        """It is on its way, until `end`; None where it does not come over several ways."""
        size_bytes = self._stored_bytes(engine, cost, tiers)
        if not size_bytes:
            return None
        alone = not any(self._others(way.card, engine) for way in self._ways[engine][1])
        seconds, parts = self._split(engine, size_bytes)
        for card, part in parts.items():
            busy = self._busy.setdefault(card, {})
            busy[engine] = busy.get(engine, 0.0) + part
        return Load(engine, seconds, tuple(parts.items()), alone)

    def end(self, load: Load | None, took_s: float = -1.0) -> None:
        """It is over. ``took_s``: where that was measured, what it took."""
        if load is None:
            return
        for card, part in load.parts:
            busy = self._busy[card]
            busy[load.engine] -= part
            if busy[load.engine] <= 1e-3:
                del busy[load.engine]
            if not busy:
                del self._busy[card]
        agent, _ = self._ways.get(load.engine, (None, ()))
        if agent is not None and load.alone and took_s >= 0 and load.seconds > 0:
            measured, predicted = self._seen[agent]
            factor = self._factor(agent)
            believed_s = min(took_s, _FACTOR_MAX * load.seconds)
            self._seen[agent] = (
                _DECAY * measured + believed_s,
                _DECAY * predicted + load.seconds / factor,
            )

    def _factor(self, agent: Publisher) -> float:
        """Seconds that loads of this node take per second that the rates promise."""
        measured, predicted = self._seen[agent]
        return min(_FACTOR_MAX, max(1 / _FACTOR_MAX, measured / predicted))

    def _others(self, card: Publisher, engine: Publisher) -> float:
        """Bytes of other engines that are on their way over a card."""
        busy = self._busy.get(card)
        return sum(busy.values()) - busy.get(engine, 0.0) if busy else 0.0

    def _split(self, engine: Publisher, size_bytes: int) -> tuple[float, dict[Publisher, float]]:
        agent, ways = self._ways[engine]
        factor = self._factor(agent)
        slopes = {way.card: factor / way.bytes_per_s for way in ways}
        begins = {
            card: PRIOR_LATENCY_S + slope * self._others(card, engine)
            for card, slope in slopes.items()
        }
        return split(begins, slopes, size_bytes)
