"""What moving bytes costs on a node's paths, and whether it pays: to save, to demote, to load.

Estimates begin with priors and follow what is measured (`core.cost`). A path's queue is counted:
what is on its way has to arrive first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from kvatlas.core.agent_values import Ask, Config, Offer
from kvatlas.core.cost import PRIOR_BYTES_PER_S, PRIOR_LATENCY_S, EngineCost, Line
from kvatlas.core.inventory import Reach
from kvatlas.core.records import Tier
from kvatlas.core.units import Sizes

_CHOICES_MAX = 64  # positions that are priced for one question, the deepest


class Paths:
    """Reads and writes of one node, by tier."""

    def __init__(self, config: Config) -> None:
        priors = PRIOR_BYTES_PER_S
        self.reads = {tier: _line(config.reads.get(tier, rate)) for tier, rate in priors.items()}
        self.writes = {tier: _line(config.writes.get(tier, rate)) for tier, rate in priors.items()}
        self.reading: Counter[Tier] = Counter()  # bytes on their way
        self.writing: Counter[Tier] = Counter()

    def read_s(self, tier: Tier, size_bytes: int) -> float:
        """Seconds until so many bytes more have come from a tier."""
        return self.reads[tier].at(size_bytes + self.reading[tier])

    def write_s(self, tier: Tier, size_bytes: int) -> float:
        """Seconds that so many bytes keep the way to a tier busy."""
        return self.writes[tier].slope * size_bytes

    def order(self) -> list[Tier]:
        """Tiers below hbm, the fastest to read first."""
        return sorted(self.reads, key=lambda tier: (self.reads[tier].slope, tier))


def _line(bytes_per_s: float) -> Line:
    return Line(PRIOR_LATENCY_S, 1 / bytes_per_s, 100e6)


def saved_s(cost: EngineCost, start: int, end: int) -> float:
    """Engine time that computing tokens start…end-1 takes, without what each request costs."""
    return cost.pool.prefill.slope * cost.pool.prefill_flops(start, end) * cost.factor


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
