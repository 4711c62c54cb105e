"""What a trace is like: lengths, reuse, sharing, sessions, in one pass. Pure.

Reuse is that of an endless cache, and by the distance of each reuse that of LRU at any capacity.
For ids that mean prefixes the distance (distinct blocks touched since) is exact and cheap: blocks
of one request that were last touched by the same earlier request all have the same one, because
what one of them no longer waits for, another has just touched. So one query of a Fenwick tree over
*requests* serves a whole run of blocks (Mattson's stack algorithm, 1970, by runs).

Memory grows with distinct blocks (about 250 bytes each) and by 40 bytes per request.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from itertools import accumulate, groupby

import msgspec

from kvatlas.workload.trace import Trace, TraceRequest

SHARES = (0.01, 0.05, 0.10, 0.25, 0.50)  # of the distinct blocks, at which LRU is told


class Spread(msgspec.Struct, frozen=True):
    """A distribution. Percentiles are values that occur: the smallest with that share below."""

    total: float
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


class LruPoint(msgspec.Struct, frozen=True):
    """Plain LRU over blocks, touched in prefix order, at a capacity."""

    share_of_unique: float
    capacity_blocks: int
    block_hit_rate: float


class TraceStats(msgspec.Struct, frozen=True):
    """All figures of a trace. Hit rates are those of an endless cache; None: the trace cannot say.

    ``block_hit_rate`` counts blocks, cut ones included; ``token_hit_rate`` counts their tokens.
    ``hits_in_session`` is the share of hit blocks that an earlier request of the same session made.
    ``peak_live_blocks``: the most blocks that were, at one moment, still to be used again.
    """

    requests: int
    duration_s: float
    requests_per_s: float | None
    block_tokens: int
    prompt_tokens: Spread
    output_tokens: Spread
    blocks: int
    unique_blocks: int
    block_hit_rate: float
    token_hit_rate: float
    lru: tuple[LruPoint, ...]
    hits_in_session: float | None
    reuse_distance_blocks: Spread | None
    reuse_gap_s: Spread | None
    peak_live_blocks: int
    sessions: int | None
    turns_per_session: Spread | None
    turn_gap_s: Spread | None
    think_s: Spread | None
    scopes: int


def stats(trace: Trace, requests: Iterable[TraceRequest] | None = None) -> TraceStats | None:
    """Figures of a trace, or of some ``requests`` of it; None where there are none."""
    counting = Counting(trace.block_tokens)
    for request in trace if requests is None else requests:
        counting.add(request)
    return counting.result()


class Counting:
    """The pass over the requests, in order of arrival."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._prompts: Counter[float] = Counter()
        self._outputs: Counter[float] = Counter()
        self._thinks: Counter[float] = Counter()
        self._turn_gaps: Counter[float] = Counter()
        self._gaps: Counter[float] = Counter()
        self._distances: Counter[float] = Counter()
        self._arrivals = array("d")
        self._session_of = array("q")  # request → number of its session, or -1 - request
        self._sessions: dict[str, int] = {}
        self._turns = array("q")
        self._heard_s = array("d")
        self._scopes: set[str] = set()
        self._first: dict[Hashable, int] = {}  # block → the request that made it
        self._last: dict[Hashable, int] = {}  # block → the request that touched it last
        self._resting = _Sums()  # blocks by the request that touched them last
        self._blocks = self._hit_blocks = self._hit_tokens = self._hits_in_session = 0

    def add(self, request: TraceRequest) -> None:
        """Takes the next request in."""
        index = len(self._arrivals)
        self._arrivals.append(request.arrival_s)
        self._prompts[request.input_tokens] += 1
        self._outputs[request.output_tokens] += 1
        if request.think_s is not None:
            self._thinks[_three_digits(request.think_s)] += 1
        self._scopes.add(request.scope)
        self._session_of.append(self._session(request, index))
        ids: Sequence[Hashable] = request.hash_ids
        if request.scope:
            ids = [(request.scope, id) for id in ids]
        touched = dict.fromkeys(ids, index)
        if len(touched) != len(ids):  # a block twice in one prompt: the second is no reuse
            ids = list(touched)
        self._touch(request, ids, touched)

    def _session(self, request: TraceRequest, index: int) -> int:
        if not request.session:
            return -1 - index
        number = self._sessions.setdefault(request.session, len(self._sessions))
        if number == len(self._turns):
            self._turns.append(0)
            self._heard_s.append(request.arrival_s)
        else:
            self._turn_gaps[_three_digits(request.arrival_s - self._heard_s[number])] += 1
        self._turns[number] += 1
        self._heard_s[number] = request.arrival_s
        return number

    def _touch(
        self, request: TraceRequest, ids: Sequence[Hashable], touched: dict[Hashable, int]
    ) -> None:
        """Here time is spent: no Python code sees a single block."""
        index = len(self._arrivals) - 1
        position = hits = cut_hit = 0
        for before, run in groupby(map(self._last.get, ids)):
            length = len(list(run))
            part = ids[position : position + length]
            if before is None:
                self._first.update(dict.fromkeys(part, index))
            else:
                waiting = self._resting.since(before) - 1
                self._distances[waiting + position] += length
                gap_s = request.arrival_s - self._arrivals[before]
                self._gaps[_three_digits(gap_s)] += length
                self._resting.add(before, -length)
                hits += length
                if request.session:
                    makers = map(self._session_of.__getitem__, map(self._first.__getitem__, part))
                    self._hits_in_session += list(makers).count(self._session_of[index])
            position += length
            cut_hit = before is not None
        self._last.update(touched)
        self._resting.append(len(ids))
        self._blocks += len(request.hash_ids)
        self._hit_blocks += hits
        self._hit_tokens += hits * self._block_tokens
        if cut_hit:
            self._hit_tokens -= len(request.hash_ids) * self._block_tokens - request.input_tokens

    def result(self) -> TraceStats | None:
        """The figures so far; None before the first request."""
        requests = len(self._arrivals)
        if not requests:
            return None
        duration_s = self._arrivals[-1] - self._arrivals[0]
        prompts = spread(self._prompts)
        outputs = spread(self._outputs)
        assert prompts is not None
        assert outputs is not None
        sessions = len(self._sessions)
        known = bool(sessions and self._hit_blocks)
        return TraceStats(
            requests=requests,
            duration_s=duration_s,
            requests_per_s=requests / duration_s if duration_s else None,
            block_tokens=self._block_tokens,
            prompt_tokens=prompts,
            output_tokens=outputs,
            blocks=self._blocks,
            unique_blocks=len(self._last),
            block_hit_rate=self._hit_blocks / self._blocks,
            token_hit_rate=self._hit_tokens / prompts.total,
            lru=self._lru(),
            hits_in_session=self._hits_in_session / self._hit_blocks if known else None,
            reuse_distance_blocks=spread(self._distances),
            reuse_gap_s=spread(self._gaps),
            peak_live_blocks=self._peak(),
            sessions=sessions or None,
            turns_per_session=spread(Counter(self._turns)),
            turn_gap_s=spread(self._turn_gaps),
            think_s=spread(self._thinks),
            scopes=len(self._scopes - {""}),
        )

    def lru_hit_rate(self, capacity_blocks: int) -> float:
        """Share of blocks that plain LRU of this capacity would have held."""
        near = sum(n for distance, n in self._distances.items() if distance < capacity_blocks)
        return near / self._blocks

    def _lru(self) -> tuple[LruPoint, ...]:
        unique = len(self._last)
        points = [(share, max(1, round(unique * share))) for share in SHARES]
        return tuple(LruPoint(s, blocks, self.lru_hit_rate(blocks)) for s, blocks in points)

    def _peak(self) -> int:
        change = array("q", bytes(8 * (len(self._arrivals) + 1)))
        for block, first in self._first.items():
            last = self._last[block]
            if last > first:
                change[first] += 1
                change[last] -= 1
        return max(accumulate(change), default=0)


class _Sums:
    """A Fenwick tree that grows at its end: numbers by index, sums in logarithmic time."""

    def __init__(self) -> None:
        self._tree = array("q", [0])  # from index 1

    def append(self, amount: int) -> None:
        at = len(self._tree)
        below = at - 1
        while below > at - (at & -at):
            amount += self._tree[below]
            below -= below & -below
        self._tree.append(amount)

    def add(self, index: int, amount: int) -> None:
        at = index + 1
        while at < len(self._tree):
            self._tree[at] += amount
            at += at & -at

    def since(self, index: int) -> int:
        """The sum from ``index`` to the end."""
        return self._below(len(self._tree) - 1) - self._below(index)

    def _below(self, count: int) -> int:
        total = 0
        while count:
            total += self._tree[count]
            count -= count & -count
        return total


def spread(values: Counter[float]) -> Spread | None:
    """The distribution of counted values, by nearest rank; None where there are none."""
    count = values.total()
    if not count:
        return None
    ordered = sorted(values.items())
    total = sum(value * n for value, n in ordered)
    found: list[float] = []
    seen = 0
    for value, n in ordered:
        seen += n
        while len(found) < 3 and seen >= (0.5, 0.9, 0.99)[len(found)] * count:
            found.append(value)
    p50, p90, p99 = found
    return Spread(total, total / count, p50, p90, p99, ordered[-1][0])


def _three_digits(seconds: float) -> float:
    """Times to three digits, so that few distinct ones are kept."""
    return float(f"{seconds:.3g}")
