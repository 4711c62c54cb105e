"""What came of requests lately, for the page: in buckets of time, by tenant, and by prefix.

It is kept only while somebody looks (`service.page`), from the decision log's entries. Every book
has a limit, and nothing of a prompt is in any of them but keys and counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from kvatlas.core.router import Plan
from kvatlas.service.decision_log import Entry, taken_plan
from kvatlas.service.metrics import SOURCES, by_source

BUCKET_S = 5.0
BUCKETS = 120
TERMS = ("wait", "load", "recompute", "hand_off", "crowd", "charge")

PREFIXES_MAX = 256
PREFIXES_SHOWN = 10
CHAIN_MAX = 4096  # blocks of one prompt that are looked at
TENANTS_MAX = 1024
_WORKERS_MAX = 16  # per prefix


class Bucket(msgspec.Struct):
    """Requests that ended within one `BUCKET_S`. ``price_s``: of the plans taken, by `TERMS`,
    summed over ``priced`` requests; what follows: over ``judged`` ones, whose first token was
    seen."""

    index: int
    ended: int = 0
    refused: int = 0
    failed: int = 0
    tokens: list[int] = msgspec.field(default_factory=lambda: [0] * len(SOURCES))
    priced: int = 0
    price_s: list[float] = msgspec.field(default_factory=lambda: [0.0] * len(TERMS))
    judged: int = 0
    predicted_s: float = 0.0
    measured_s: float = 0.0
    error_s: float = 0.0
    regret_s: float = 0.0


class Share(msgspec.Struct):
    """One tenant's part of it."""

    requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0


class Prefix(msgspec.Struct):
    """A prefix at which requests resumed or that they passed, by the last key of it. ``engines``:
    those they were to resume at, the most frequent first."""

    key: str
    tokens: int
    requests: int
    engines: tuple[str, ...]


class _Seen(msgspec.Struct):
    tokens: int
    requests: int = 0
    engines: Counter[str] = msgspec.field(default_factory=Counter)


class History:
    """Of one time of looking. On the event loop."""

    def __init__(self) -> None:
        self.tenants: dict[str, Share] = {}  # by tag; "" for nobody's
        self._buckets: dict[int, Bucket] = {}
        self._prefixes: dict[bytes, _Seen] = {}

    def buckets(self) -> list[Bucket]:
        """In order of time, `BUCKETS` at most."""
        return [self._buckets[index] for index in sorted(self._buckets)]

    def prefixes(self) -> list[Prefix]:
        """Those over which most tokens were taken again, of two requests at least."""
        hot = [(key, seen) for key, seen in self._prefixes.items() if seen.requests > 1]
        hot.sort(key=lambda pair: -pair[1].tokens * pair[1].requests)
        return [
            Prefix(
                key.hex()[:12],
                seen.tokens,
                seen.requests,
                tuple(name for name, _ in seen.engines.most_common(3)),
            )
            for key, seen in hot[:PREFIXES_SHOWN]
        ]

    # -- taken in -------------------------------------------------------------------------------

    def refused(self, at: float) -> None:
        """A request that came to nothing."""
        bucket = self._bucket(at)
        if bucket is not None:
            bucket.refused += 1

    def resumes(self, worker: str, tokens: int, chain: Sequence[bytes]) -> None:
        """A request is to resume at ``tokens``, the end of the last block of ``chain``."""
        if not chain:
            return
        last = chain[-1]
        for key in self._prefixes.keys() & set(chain[:CHAIN_MAX]) - {last}:
            self._count(self._prefixes[key], worker)
        seen = self._prefixes.get(last)
        if seen is None:
            if len(self._prefixes) >= PREFIXES_MAX:  # the oldest of those least asked for
                del self._prefixes[min(self._prefixes, key=lambda k: self._prefixes[k].requests)]
            seen = self._prefixes[last] = _Seen(tokens)
        self._count(seen, worker)

    def ended(self, entry: Entry) -> None:
        """A request that is over."""
        outcome = entry.outcome
        if outcome is None:
            return
        bucket = self._bucket(entry.decision.at + max(0.0, outcome.e2e_s))
        if bucket is None:
            return
        tokens = sources(entry)
        bucket.ended += 1
        bucket.failed += outcome.status >= 400
        bucket.tokens = [a + b for a, b in zip(bucket.tokens, tokens, strict=True)]
        taken = taken_plan(entry)
        if taken is not None and not entry.decision.unkeyed:
            bucket.priced += 1
            bucket.price_s = [a + b for a, b in zip(bucket.price_s, terms(taken), strict=True)]
        if entry.error_s is not None and entry.regret_s is not None:
            bucket.judged += 1
            bucket.measured_s += outcome.ttft_s
            bucket.predicted_s += outcome.ttft_s - entry.error_s
            bucket.error_s += abs(entry.error_s)
            bucket.regret_s += entry.regret_s
        share = self._share(entry.owner.partition(".")[0])
        share.requests += 1
        share.prompt_tokens += sum(tokens)
        share.hit_tokens += sum(tokens[: SOURCES.index("computed")])

    def forget(self) -> None:
        """Somebody was purged: what is kept by tenant and by prefix begins anew for all."""
        self.tenants.clear()
        self._prefixes.clear()

    # -- inside ---------------------------------------------------------------------------------

    def _bucket(self, at: float) -> Bucket | None:
        """None where it is older than all that is kept."""
        index = int(at // BUCKET_S)
        bucket = self._buckets.get(index)
        if bucket is None:
            newest = max(self._buckets, default=index)
            if index <= newest - BUCKETS:
                return None
            bucket = self._buckets[index] = Bucket(index)
            oldest = max(newest, index) - BUCKETS
            self._buckets = {i: b for i, b in self._buckets.items() if i > oldest}
        return bucket

    def _share(self, tag: str) -> Share:
        if tag not in self.tenants and len(self.tenants) >= TENANTS_MAX:
            tag = "others"
        return self.tenants.setdefault(tag, Share())

    def _count(self, seen: _Seen, worker: str) -> None:
        seen.requests += 1
        if worker in seen.engines or len(seen.engines) < _WORKERS_MAX:
            seen.engines[worker] += 1


def terms(plan: Plan) -> list[float]:
    """A plan's price by `TERMS`, in seconds."""
    return [float(getattr(plan.price, f"{term}_s")) for term in TERMS]


def sources(entry: Entry) -> list[int]:
    """The tokens of an answered prompt by `SOURCES`, as `/metrics` counts them."""
    outcome, taken = entry.outcome, taken_plan(entry)
    if outcome is None:
        return [0] * len(SOURCES)
    tiers = taken.tier_tokens if taken is not None else ()
    found = dict(by_source(outcome.prompt_tokens, outcome.cached_tokens, tiers))
    return [found.get(source, 0) for source in SOURCES]
