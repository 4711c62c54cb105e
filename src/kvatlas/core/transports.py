"""What moves between the halves of pairs: bytes, rates, and over what, as far as is known.

No engine says which transport its transfers go over. Three things are known instead, and kept
apart: how long a hand-off took (from the request to the decode half to its first token, its queue
in it); what the engines count (bytes and seconds of their transfers, per engine and not per pair);
and what the RDMA ports of a node received. Bytes that arrived while its ports received next to
nothing did not come over RDMA: that is certain. Bytes that the ports received as well came over
RDMA, or something else did at the same time: that is inferred.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Literal

import msgspec

from kvatlas.core.records import Publisher
from kvatlas.core.ways import Way

Transport = Literal["any", "rdma"]
Seen = Literal["", "rdma", "not rdma"]
State = Literal["ok", "degraded", "unknown"]
Pair = tuple[Publisher, Publisher]  # from, to

#: What is assumed of a pair that lost RDMA and of which nothing was measured: 10 Gbit/s.
TCP_BYTES_PER_S = 1.25e9
#: Where the engine timed a pair's transfers within so long before a hand-off, its word counts for
#: what the transport does: hand-offs may be slow for a queue.
TIMED_S = 60.0

_JUDGED_BYTES = 256 << 10  # below, what else passes the ports decides
_NONE_SHARE = 0.1
_ALL_SHARE = 0.75
_LONGEST = 4.0  # times the mean of those that ended with it: no transfer takes longer
_SAMPLES_MAX = 32
_SAMPLES_PER_MARGIN = 4
_MARGINS = 4  # what is too little to be judged is forgotten after so many
_ASSUMED_BYTES = 100e6


class Moved(msgspec.Struct, frozen=True):
    """An engine's own count since it started, of transfers that have ended."""

    size_bytes: float = 0.0
    seconds: float = 0.0
    transfers: float = 0.0
    failures: float = 0.0


class Status(msgspec.Struct, frozen=True):
    """One pair, for people and metrics. ``told_bytes``: as the engine counts, while this pair alone
    moved something there; ``split_bytes``: of its counts while several did, by what each was
    expected to move. ``rate_from``: who measured ``bytes_per_s``."""

    prefill: str
    decode: str
    state: State
    why: str
    expected: Transport
    seen: Seen
    told_bytes: float
    split_bytes: float
    transfers: int
    bytes_per_s: float
    rate_from: Literal["", "engine", "hand-offs"]
    hand_offs: int
    hand_off_error_s: float
    hand_off_spread_s: float
    slower_times: float
    falls: int


class _Path:
    """What is known of one pair."""

    def __init__(self) -> None:
        self.hand_off = Way()
        self.moved = Way()  # as the engine times it
        self.active = 0
        self.ended_at = 0.0
        self.timed = False
        self.told_at = self.observed_at = 0.0
        self.last: tuple[float, float] | None = None  # bytes and seconds, as last told
        self.told_bytes = self.split_bytes = 0.0
        self.seen: Seen = ""
        self.evidence = ""

    @property
    def engine_times(self) -> bool:
        """Whether the engine timed its transfers lately."""
        return self.moved.count > 0 and self.told_at >= self.observed_at - TIMED_S


class _Arrived(msgspec.Struct):
    """Of one pair: what is surely its own, and what was split among those that got theirs."""

    alone: float = 0.0
    arrived: float = 0.0


class _Arrivals:
    """Into one node, from others: what its engines counted and its ports have yet to show."""

    def __init__(self) -> None:
        self.samples: deque[tuple[float, float, float]] = deque(maxlen=_SAMPLES_MAX)
        self.total_bytes = 0.0
        self.clear()

    def clear(self) -> None:
        self.size_bytes = 0.0
        self.since = self.until = 0.0
        self.pairs: dict[Pair, _Arrived] = {}

    def add(self, pair: Pair, size_bytes: float, since: float, until: float) -> None:
        self.since = min(self.since, since) if self.pairs else since
        self.until = until
        self.size_bytes += size_bytes
        self.total_bytes += size_bytes
        self.pairs.setdefault(pair, _Arrived())

    def seen(self, pair: Pair, received: float, total: float) -> Seen:
        """Of what the ports received meanwhile, and all that had arrived before; "" where that
        does not tell."""
        found = self.pairs[pair]
        if found.alone >= _JUDGED_BYTES and received < _NONE_SHARE * found.alone:
            return "not rdma"
        if found.arrived >= _JUDGED_BYTES and received < _NONE_SHARE * _JUDGED_BYTES:
            return "not rdma"
        return "rdma" if received >= _ALL_SHARE * (self.total_bytes - total) else ""


class Transports:
    """All pairs that were ever priced; `forget` engines that are no longer configured."""

    def __init__(self, margin_s: float = 5.0) -> None:
        """``margin_s``: what a transfer may take beyond what the engine says that they take."""
        self.margin_s = margin_s
        self.engines: dict[Publisher, Moved] = {}  # as last told
        self._asked_at: dict[Publisher, float] = {}
        self._paths: dict[Pair, _Path] = {}
        self._rdma: set[Publisher] = set()
        self._node: dict[Publisher, str] = {}
        self._window: dict[Publisher, dict[Pair, float]] = {}  # since it was last told
        self._arrivals: dict[str, _Arrivals] = {}

    def expect(self, publisher: Publisher, transport: Transport, node: str = "") -> None:
        """What its hand-offs should go over, and on which node it runs ("": not known)."""
        (self._rdma.add if transport == "rdma" else self._rdma.discard)(publisher)
        self._node[publisher] = node

    def forget(self, publisher: Publisher) -> None:
        """It is no longer configured: so there are never more than there are pairs."""
        self._rdma.discard(publisher)
        self.engines.pop(publisher, None)
        self._asked_at.pop(publisher, None)
        self._node.pop(publisher, None)
        self._window.pop(publisher, None)
        self._paths = {pair: path for pair, path in self._paths.items() if publisher not in pair}
        for window in self._window.values():
            for pair in [pair for pair in window if publisher in pair]:
                del window[pair]
        nodes = set(self._node.values())
        self._arrivals = {node: found for node, found in self._arrivals.items() if node in nodes}
        for arrivals in self._arrivals.values():
            arrivals.pairs = {p: size for p, size in arrivals.pairs.items() if publisher not in p}

    # -- hand-offs ------------------------------------------------------------------------------

    def seconds(self, prefill: Publisher, decode: Publisher, size_bytes: int, now: float) -> float:
        """What a hand-off of so much should take. Changes nothing."""
        path = self._paths.get((prefill, decode))
        return (path.hand_off if path is not None else _NEW).seconds(float(size_bytes), now)

    def error_s(self, prefill: Publisher, decode: Publisher) -> float:
        """How far from that it usually is; 0 where nothing was measured."""
        path = self._paths.get((prefill, decode))
        return path.hand_off.error_s if path is not None else 0.0

    def sent(self, prefill: Publisher, decode: Publisher, size_bytes: int, now: float) -> None:
        """A decode half is asked to take over so much; `arrived` or `lost` follows."""
        pair = prefill, decode
        path = self._path(pair)
        path.active += 1
        path.hand_off.sent(now)
        for engine in pair:
            self._window.setdefault(engine, {}).setdefault(pair, 0.0)

    def arrived(
        self,
        prefill: Publisher,
        decode: Publisher,
        size_bytes: int,
        seconds: float | None,
        now: float,
    ) -> None:
        """Its first token came ``seconds`` after that. None where that says nothing of the
        hand-off: of halves that ran at once."""
        pair = prefill, decode
        path = self._ended(pair, now)
        if path is None:
            return
        for engine in pair:
            window = self._window.setdefault(engine, {})
            window[pair] = window.get(pair, 0.0) + size_bytes
        if seconds is not None:
            path.timed = True
            self._observe(path, float(size_bytes), seconds, now)

    def lost(self, prefill: Publisher, decode: Publisher, now: float) -> None:
        """It never came."""
        self._ended((prefill, decode), now)

    # -- what engines and ports count -----------------------------------------------------------

    def told(self, engine: Publisher, moved: Moved, asked: float, now: float) -> None:
        """An engine's count of a moment between ``asked`` and ``now``."""
        last, since = self.engines.get(engine), self._asked_at.get(engine, 0.0)
        self.engines[engine], self._asked_at[engine] = moved, asked
        window = self._window.get(engine, {})
        self._window[engine] = {
            pair: size for pair, size in window.items() if self._moves(pair, asked)
        }
        if last is None:
            return
        size_bytes = moved.size_bytes - last.size_bytes
        count = moved.transfers - last.transfers
        seconds = moved.seconds - last.seconds
        if size_bytes <= 0 or count <= 0 or seconds < 0:  # nothing, or it started anew
            return
        shares = {pair: size for pair, size in window.items() if self._counts(engine, pair)}
        whole, alone = sum(shares.values()), len(shares) == 1
        for pair, size in shares.items():
            path = self._path(pair)
            if alone:
                path.told_bytes += size_bytes
                path.told_at = now
                if seconds:  # else it does not time them
                    self._timed(path, size_bytes / count, seconds / count, now)
                share = size_bytes
            else:
                share = size_bytes * (size / whole if whole else 1 / len(shares))
                path.split_bytes += share
            node, other = self._node.get(pair[1], ""), self._node.get(pair[0], "")
            if node and other and node != other:
                arrivals = self._arrivals.setdefault(node, _Arrivals())
                began = since - _LONGEST * seconds / count
                arrivals.add(pair, share, began, now)
                arrivals.pairs[pair].alone += share if alone else 0.0
                arrivals.pairs[pair].arrived += share if whole else 0.0

    def ports(self, node: str, received_bytes: float, asked: float, now: float) -> None:
        """What the RDMA ports of a node had received, all together, at a moment between ``asked``
        and ``now``."""
        arrivals = self._arrivals.setdefault(node, _Arrivals())
        samples = arrivals.samples
        if samples and received_bytes < samples[-1][1]:
            samples.clear()  # a driver or a node that started anew
        if arrivals.size_bytes >= _JUDGED_BYTES and asked >= arrivals.until:
            early = [sample for sample in samples if sample[0] <= arrivals.since - self.margin_s]
            if early:
                _, received, total = early[-1]
                self._judge(node, arrivals, received_bytes - received, total, now)
            arrivals.clear()  # without an early one it can never be judged
        elif now > arrivals.since + _MARGINS * self.margin_s:
            arrivals.clear()  # so little in so long a time
        if not samples or now >= samples[-1][0] + self.margin_s / _SAMPLES_PER_MARGIN:
            samples.append((now, received_bytes, arrivals.total_bytes))

    # -- for people -----------------------------------------------------------------------------

    def statuses(self) -> Iterator[Status]:
        """All pairs that had a hand-off, by name."""
        for pair in sorted(self._paths):
            yield self._status(pair, self._paths[pair])

    def degraded(self) -> dict[str, str]:
        """Pair → what was expected and what is seen."""
        found = {}
        for pair, path in self._paths.items():  # there may be thousands, and few that look bad
            if path.seen == "not rdma" or path.moved.fallen or path.hand_off.fallen:
                state, why = self._verdict(pair, path)
                if state == "degraded":
                    found[f"{pair[0]}>{pair[1]}"] = why
        return dict(sorted(found.items()))

    # -- inside ---------------------------------------------------------------------------------

    def _path(self, pair: Pair) -> _Path:
        path = self._paths.get(pair)
        if path is None:
            path = self._paths[pair] = _Path()
        return path

    def _ended(self, pair: Pair, now: float) -> _Path | None:
        """None where one of the two was forgotten meanwhile."""
        path = self._paths.get(pair)
        if path is not None:
            path.active = max(0, path.active - 1)
            path.ended_at = now
        return path

    def _moves(self, pair: Pair, asked: float) -> bool:
        """Whether a count that was asked for then may not have all of it."""
        path = self._paths.get(pair)
        return path is not None and (path.active > 0 or path.ended_at >= asked)

    def _counts(self, engine: Publisher, pair: Pair) -> bool:
        """Whether this end's count is the one that is used: that of the end that takes over, where
        it counts at all, so that nothing counts twice."""
        taker = self.engines.get(pair[1])
        return engine == pair[1] or taker is None or not taker.transfers

    def _observe(self, path: _Path, size_bytes: float, seconds: float, now: float) -> None:
        path.hand_off.observe(size_bytes, seconds, now)
        path.observed_at = now
        if not path.engine_times and not path.hand_off.fallen:
            path.moved.recover()  # the engine does not say so any more, but it is well

    def _timed(self, path: _Path, size_bytes: float, seconds: float, now: float) -> None:
        """By the engine itself, so without the queue there."""
        falls, usual_s = path.moved.falls, path.moved.seconds(size_bytes, now)
        path.moved.observe(size_bytes, seconds, now)
        path.last = size_bytes, seconds
        if not path.timed:  # nothing else tells what a hand-off takes
            self._observe(path, size_bytes, seconds, now)
        elif path.moved.falls > falls and not path.hand_off.fallen:
            self._fall(path, size_bytes, seconds - usual_s, now)

    def _fall(self, path: _Path, size_bytes: float, slower_s: float, now: float) -> None:
        before_s = path.hand_off.seconds(size_bytes, now)
        path.hand_off.fall(size_bytes, before_s + slower_s, now)

    def _judge(
        self, node: str, arrivals: _Arrivals, received: float, total: float, now: float
    ) -> None:
        size_mb, received_mb = arrivals.size_bytes / 1e6, received / 1e6
        text = f"{size_mb:.1f} MB arrived while the RDMA ports of {node} received"
        text = f"{text} {received_mb:.1f} MB"
        for pair in arrivals.pairs:
            seen, path = arrivals.seen(pair, received, total), self._path(pair)
            if not seen:
                continue
            before, path.seen, path.evidence = path.seen, seen, text
            if seen == before or not self._expects(pair):
                continue
            if seen == "rdma":
                path.hand_off.recover()
            elif not path.hand_off.fallen:
                self._lost_rdma(path, now)

    def _lost_rdma(self, path: _Path, now: float) -> None:
        """At once the price of what is seen; where nothing was measured, of TCP."""
        if path.last is not None:
            size_bytes, seconds = path.last
            slower_s = seconds - path.moved.seconds(size_bytes, now)
        else:
            size_bytes = _ASSUMED_BYTES
            slower_s = size_bytes / TCP_BYTES_PER_S - path.hand_off.seconds(size_bytes, now)
        self._fall(path, size_bytes, max(0.0, slower_s), now)

    def _expects(self, pair: Iterable[Publisher]) -> bool:
        return self._rdma.issuperset(pair)

    def _status(self, pair: Pair, path: _Path) -> Status:
        state, why = self._verdict(pair, path)
        way = path.moved if path.moved.count else path.hand_off
        rate_from: Literal["engine", "hand-offs"] = "engine" if path.moved.count else "hand-offs"
        return Status(
            prefill=str(pair[0]),
            decode=str(pair[1]),
            state=state,
            why=why,
            expected="rdma" if self._expects(pair) else "any",
            seen=path.seen,
            told_bytes=path.told_bytes,
            split_bytes=path.split_bytes,
            transfers=path.moved.count,
            bytes_per_s=way.bytes_per_s,
            rate_from=rate_from if way.count else "",
            hand_offs=path.hand_off.count,
            hand_off_error_s=path.hand_off.error_s,
            hand_off_spread_s=path.hand_off.spread_s,
            slower_times=max(path.moved.fallen_by, path.hand_off.fallen_by),
            falls=path.moved.falls + path.hand_off.falls,
        )

    def _verdict(self, pair: Pair, path: _Path) -> tuple[State, str]:
        expected = self._expects(pair)
        if expected and path.seen == "not rdma":
            return "degraded", f"expected rdma, seen not rdma: {path.evidence}"
        seen = path.seen or "a transport that nobody tells"
        way = path.moved if path.moved.fallen else path.hand_off
        if way.fallen:
            text = f"{way.fallen_by:.1f} times what they took, {way.bytes_per_s / 1e9:.3f} GB/s now"
            if path.moved.fallen:
                return "degraded", f"transfers take {text} as the engine counts, over {seen}"
            if not path.engine_times:
                return "degraded", f"hand-offs take {text}, over {seen}"
            return "ok", f"hand-offs take {text}, but its transfers do not: the engine is busy"
        if expected and not path.seen:
            return "unknown", "expected rdma; nothing tells yet what it is"
        if not path.hand_off.count and not path.moved.count:
            return "unknown", "nothing was measured yet"
        return "ok", f"inferred: {path.evidence}" if path.seen else ""


_NEW = Way()
