"""What moving bytes costs on a node's paths, and whether it pays: to save, to demote, to load.

Estimates begin with priors and follow what is measured (`core.cost`). A path's queue is counted:
what is on its way has to arrive first.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence

import msgspec

from kvatlas.core.agent_values import Ask, Config, Offer, Source
from kvatlas.core.cost import PRIOR_BYTES_PER_S, PRIOR_LATENCY_S, EngineCost, Line
from kvatlas.core.inventory import Place, Reach
from kvatlas.core.load_ways import split
from kvatlas.core.records import Tier
from kvatlas.core.units import Sizes

_FASTEST_S = 1e-15  # per byte: a way that proved to be faster is as good
_CHOICES_MAX = 64  # positions that are priced for one question, the deepest


class Paths:
    """Reads and writes of one node, by tier. The store may also be read through *relays*, nodes
    that read it for this one and pass it on, so that one load comes over several ways at once."""

    def __init__(self, config: Config) -> None:
        priors = PRIOR_BYTES_PER_S
        rates: dict[Place, float] = {(t, ""): config.reads.get(t, r) for t, r in priors.items()}
        rates |= {(Tier.OBJECT, relay): rate for relay, rate in config.relays.items()}
        self.reads = {way: _line(rate) for way, rate in rates.items()}
        self.writes = {tier: _line(config.writes.get(tier, rate)) for tier, rate in priors.items()}
        self._ways = {tier: [way for way in rates if way[0] is tier] for tier in priors}
        self.reading: Counter[Place] = Counter()  # bytes on their way
        self.writing: Counter[Tier] = Counter()
        self.resting: set[Tier] = set()  # shared ones that do not answer now

    def way(self, source: Source) -> Place:
        """Over which way it comes: that to all peers is one."""
        way = (source.tier, source.node)
        return way if way in self.reads else (source.tier, "")

    def read_s(self, tier: Tier, size_bytes: int) -> float:
        """Seconds until so many bytes more have come from a tier, over all ways to it."""
        if len(self._ways[tier]) == 1:
            return self.reads[tier, ""].at(size_bytes + self.reading[tier, ""])
        return self._split(tier, size_bytes)[0]

    def write_s(self, tier: Tier, size_bytes: int) -> float:
        """Seconds that so many bytes keep the way to a tier busy."""
        return self.writes[tier].slope * size_bytes

    def order(self) -> list[Tier]:
        """Tiers below hbm that can be read, the fastest first."""
        awake = (tier for tier in self.writes if tier not in self.resting)
        return sorted(awake, key=lambda tier: (self.reads[tier, ""].slope, tier))

    def spread(self, sources: Iterable[Source]) -> tuple[Source, ...]:
        """The same, cut up so that what comes over several ways is there at the same time."""
        parts: list[Source] = []
        for source in sources:
            if source.node or len(self._ways[source.tier]) == 1:
                parts.append(source)
                continue
            _, shares = self._split(source.tier, source.size_bytes)
            units, due, last = deque(source.units), 0.0, [*shares][-1]
            for way, share in shares.items():
                due, part = due + share, []
                while units and (due > 0 or way == last):
                    part.append(units.popleft())
                    due -= part[-1].size_bytes
                if part:
                    parts.append(Source(source.tier, tuple(part), way[1]))
        return tuple(parts)

    def _split(self, tier: Tier, size_bytes: int) -> tuple[float, dict[Place, float]]:
        """How so many bytes go over the ways to a tier so that all of them end together: after
        how many seconds, and the bytes of each. A way that is busy for longer gets none."""
        begins = {way: self.reads[way].at(self.reading[way]) for way in self._ways[tier]}
        slopes = {way: max(self.reads[way].slope, _FASTEST_S) for way in begins}
        return split(begins, slopes, size_bytes)


def _line(bytes_per_s: float) -> Line:
    return Line(PRIOR_LATENCY_S, 1 / bytes_per_s, 100e6)


def saved_s(cost: EngineCost, start: int, end: int) -> float:
    """Engine time that computing tokens start…end-1 takes, without what each request costs."""
    return max(0.0, cost.recompute_s(start, end) - cost.recompute_s(end, end))


def best_offer(ask: Ask, sizes: Sizes, cost: EngineCost, reach: Reach, paths: Paths) -> Offer:
    """The cheapest position to load up to, or the local one where loading does not pay.

    Compared is the time to the first token: loading up to p and computing the rest, against
    computing all from the local hit on.
    """
    local = ask.local_tokens
    if not reach.positions:
        return Offer(local, local, why=reach.why)
    whole_s = cost.recompute_s(local, ask.prompt_tokens)
    best, best_s, why = Offer(local, local), whole_s, "computing it is cheaper"
    found = 0
    for position, by_tier in reach.loads(_choices(reach, sizes)):
        tokens = position * sizes.grid_tokens
        if tokens >= ask.prompt_tokens:
            break  # one token must be computed
        load_s = sum(paths.read_s(tier, size_bytes) for tier, size_bytes in by_tier.items())
        rest_s = cost.recompute_s(tokens, ask.prompt_tokens)
        if load_s > ask.deadline_s:
            why = "the load would take too long"
        elif load_s + rest_s < best_s:
            best_s = load_s + rest_s
            best, found = Offer(tokens, local, (), load_s, whole_s - rest_s), position
    if not found:
        return Offer(local, local, why=why)
    return msgspec.structs.replace(best, sources=reach.sources(found))


def _choices(reach: Reach, sizes: Sizes) -> Sequence[int]:
    """Positions worth pricing: of many alike only those where the tier changes."""
    positions = reach.positions
    if sizes.has_points:
        return positions[-_CHOICES_MAX:]
    ends = {at for at in reach.changes() if at >= positions[0]}
    return sorted(ends | {positions[-1]})[-_CHOICES_MAX:]
