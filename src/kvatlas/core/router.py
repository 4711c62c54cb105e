"""The router: a priced plan per candidate engine, the cheapest first, with its reasons.

`peek` reads and decides; `begin`, `first_token` and `end` tell it what then happened. Nothing
else changes its state, and time is always an argument.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from kvatlas.core.cost import EngineCost, PoolCost, Price
from kvatlas.core.layout import Layout
from kvatlas.core.load_ways import Load, LoadWays
from kvatlas.core.measured import Answer, Measured
from kvatlas.core.plans import Ask, Decision, Plan, holder_first
from kvatlas.core.records import Publisher, Resume
from kvatlas.core.rivals import RIVALS, Knobs, Rival, Standing

__all__ = ["Ask", "Decision", "Params", "Plan", "Policy", "Router"]

#: Ours, two that do not look at prompts, and those of `rivals`.
Policy = Literal[
    "price", "round_robin", "least_load", "longest_prefix", "power_of_two", "block_cost"
]
BLIND = ("round_robin", "least_load")

HOLDERS_MAX = 8  # candidates that hold the longest prefixes
IDLE_MAX = 4  # and the least loaded ones
FEW = HOLDERS_MAX + IDLE_MAX  # up to so many engines each gets a plan: any may be the way out
CHARGE = 1.0  # price of a second of engine time taken from others, in seconds of one's own
CROWD = 0.02  # price of a second by which decoding is slowed: it comes after the first token
FAIR_SHARE = 2  # no engine holds more than this times its fair share of what is in flight…
FAIR_SHARE_FLOOR = 16  # …once it has more than this many, nor more while another has none
EXPECTED_MAX = 1_000_000
_NOTHING_S = 1e-9  # what is left of a sum when all of it was taken away again
EXPECTED_GRACE_S = 2.0  # between a first token and the events that announce its blocks


class Params(msgspec.Struct, frozen=True):
    """The rates are the prior of the first few requests: operations, where that is above 0 and they
    are known, else tokens. ``knobs`` are those of a rival's policy."""

    policy: Policy = "price"
    prefill_tokens_per_s: float = 8000.0
    prefill_flops_per_s: float = 0.0
    knobs: Knobs = Knobs()


class _Engine:
    """The router's own books of one publisher."""

    def __init__(
        self, publisher: Publisher, bit: int, fingerprint: bytes, cost: EngineCost
    ) -> None:
        self.publisher = publisher
        self.bit = bit
        self.fingerprint = fingerprint
        self.cost = cost
        self.measured = Measured(cost)
        self.up = True
        self.in_flight = 0
        self.answering = 0  # of those: whose answer has begun
        self.foreign = 0  # requests that the engine reports beyond our own
        self.chosen = 0  # sequence number of the last choice: breaks ties by rotation
        self.free_at = 0.0  # when its prefill queue, as we know it, will have drained
        self.queued_s = 0.0  # service time of what was sent and has not answered yet
        self.windowed = False

    def beside(self) -> int:
        """Requests that decode in the step that a new one would have to wait for; none where it
        waits for a prefill, after which it is next."""
        return 0 if self.in_flight > self.answering else self.answering + self.foreign

    def wait_s(self, now: float) -> float:
        """Until it can begin. One that is late is expected to be late by as much again."""
        left_s = self.free_at - now
        return abs(left_s) if self.queued_s > _NOTHING_S else max(0.0, left_s)

    def queue(self, service_s: float, now: float) -> None:
        """One more: who is late stays late, and by so much more."""
        late = self.queued_s > _NOTHING_S and self.free_at < now
        self.free_at += -service_s if late else max(0.0, now - self.free_at) + service_s
        self.queued_s += service_s

    def load(self) -> int:
        return self.in_flight + self.foreign


class _Flight(msgspec.Struct):
    """One request between `begin` and `end`."""

    engine: _Engine
    plan: Plan
    prompt_tokens: int
    sent_at: float
    keys: Sequence[bytes]
    sure: bool
    beside: int
    answered_at: float = -1.0
    answer: Answer | None = None
    load: Load | None = None  # from a store, where there are several ways to it


class Router:
    """One per gateway. Publishers come and go; `admission` bounds the requests in flight."""

    def __init__(self, params: Params | None = None) -> None:
        self.params = params or Params()
        self._engines: dict[Publisher, _Engine] = {}
        self._pools: dict[bytes, PoolCost] = {}
        self._free_bits: list[int] = []
        self._flights: dict[str, _Flight] = {}
        self._sequence = 0
        self._expected: dict[bytes, int] = {}  # block key → engines computing it right now
        self._ends: dict[bytes, int] = {}  # the same for the last block of each prompt
        self._fading: deque[tuple[float, int, Sequence[bytes]]] = deque()
        self.ways = LoadWays()
        policy = self.params.policy
        self._rival = Rival(policy, self.params.knobs) if policy in RIVALS else None

    # -- engines --------------------------------------------------------------------------------

    def add(self, publisher: Publisher, layout: Layout, fingerprint: bytes) -> None:
        """A publisher that requests may be sent to. Known already: nothing happens."""
        if publisher in self._engines:
            return
        pool = self._pools.get(fingerprint)
        if pool is None:
            rates = self.params.prefill_tokens_per_s, self.params.prefill_flops_per_s
            pool = self._pools[fingerprint] = PoolCost(layout, *rates)
        bit = self._free_bits.pop() if self._free_bits else 1 << len(self._engines)
        engine = _Engine(publisher, bit, fingerprint, EngineCost(pool))
        engine.windowed = any(g.required and g.window_tokens for g in layout.groups)
        self._engines[publisher] = engine

    def remove(self, publisher: Publisher) -> None:
        """No new request goes there; those in flight end by themselves."""
        engine = self._engines.pop(publisher, None)
        if engine is not None:
            for table in (self._expected, self._ends):
                self._forget_in(table, engine.bit, list(table))
            self._fading = deque(f for f in self._fading if f[1] != engine.bit)
            for flight in self._flights.values():
                if flight.engine is engine:
                    flight.keys = ()
            self._free_bits.append(engine.bit)
            if self._rival is not None:
                self._rival.removed(publisher)
            if all(e.fingerprint != engine.fingerprint for e in self._engines.values()):
                del self._pools[engine.fingerprint]

    def set_up(self, publisher: Publisher, up: bool) -> None:
        """Health as polled: an engine that is down is no candidate."""
        engine = self._engines.get(publisher)
        if engine is not None:
            engine.up = up

    def up(self) -> set[Publisher]:
        """Publishers that are candidates now."""
        return {p for p, e in self._engines.items() if e.up}

    def set_load(self, publisher: Publisher, requests: int) -> None:
        """What the engine itself reports as running and waiting: others may use it too."""
        engine = self._engines.get(publisher)
        if engine is not None:
            engine.foreign = max(0, requests - engine.in_flight)

    def in_flight(self) -> dict[Publisher, int]:
        """Requests between `begin` and `end`, per engine."""
        return {p: e.in_flight for p, e in self._engines.items()}

    def cost(self, publisher: Publisher) -> EngineCost | None:
        """What time is worth on an engine, to read."""
        engine = self._engines.get(publisher)
        return engine.cost if engine is not None else None

    def pool(self, fingerprint: bytes) -> PoolCost | None:
        """The same over all engines of a fingerprint."""
        return self._pools.get(fingerprint)

    def foreseen(self, plan: Plan) -> Price | None:
        """What may be relied on of a plan's price: nothing before engines like that were measured,
        for a prior may be wrong by any factor."""
        cost = self.cost(plan.publisher)
        return plan.price if cost is not None and cost.pool.known else None

    def waits(self, now: float) -> dict[Publisher, float]:
        """Seconds until each candidate could begin with a request."""
        return {p: e.wait_s(now) for p, e in self._engines.items() if e.up}

    # -- the decision ---------------------------------------------------------------------------

    def peek(self, ask: Ask, now: float, among: Collection[Publisher] | None = None) -> Decision:
        """Plans for a request, cheapest first; none when there is no engine. Changes nothing.

        ``among`` limits the candidates (engines that serve the model, not tried yet). When every
        one of them looks down they are all tried all the same: a health check that is late on a
        busy cluster must not turn into an outage.
        """
        found = map(self._engines.get, self._engines if among is None else among)
        candidates = [engine for engine in found if engine is not None]
        engines = [engine for engine in candidates if engine.up] or candidates
        policy = self.params.policy
        if not engines:
            plans: list[Plan] = []
        elif policy == "round_robin":
            plans = [self._plan(ask, e, now) for e in self._rotation(engines)]
        elif policy == "least_load" or ask.unkeyed:
            plans = [self._plan(ask, e, now) for e in _idlest(engines, now)]
        elif self._rival is not None:
            plans = self._by_rival(self._rival, ask, engines, now)
        else:
            plans = self._priced(ask, engines, now)
        return Decision(
            ask.id, now, ask.prompt_tokens, policy, ask.unkeyed, tuple(plans), len(engines)
        )

    def _rotation(self, engines: list[_Engine]) -> list[_Engine]:
        return sorted(engines, key=lambda e: e.chosen)[: _plans(engines)]

    def _by_rival(self, rival: Rival, ask: Ask, engines: list[_Engine], now: float) -> list[Plan]:
        resumes = {r.publisher: r for r in ask.resumes}
        held = {p: r.tokens for p, r in resumes.items()}
        standings = [_standing(ask, e, held.get(e.publisher, 0)) for e in engines]
        order = rival.order(ask.id, ask.prompt_tokens, standings)[: _plans(engines)]
        known = self._engines
        return [self._plan(ask, known[p], now, resume=resumes.get(p)) for p in order]

    def _priced(self, ask: Ask, engines: list[_Engine], now: float) -> list[Plan]:
        resumes = {r.publisher: r for r in ask.resumes}
        expected = self._expected_tokens(ask, resumes) if self._expected else {}
        allowed = {e.publisher: e for e in engines}
        loads = [e.in_flight + e.foreign for e in engines]
        share = max(FAIR_SHARE_FLOOR, math.ceil(FAIR_SHARE * (sum(loads) + 1) / len(engines)))
        if not min(loads):  # else half of the engines could serve all
            share = FAIR_SHARE_FLOOR
        held = (r.publisher for r in ask.resumes if r.tokens)
        coming = sorted(expected, key=lambda p: -expected[p])
        candidates: dict[Publisher, _Engine] = {}
        for deepest_first in (held, coming):
            for engine in _with_room(deepest_first, allowed, share):
                candidates[engine.publisher] = engine
        for engine in _idlest(engines, now):
            candidates[engine.publisher] = engine
        plans = [
            self._plan(
                ask,
                engine,
                now,
                resume=resumes.get(publisher),
                expected=expected.get(publisher, 0),
                share=share,
            )
            for publisher, engine in candidates.items()
        ]
        plans.sort(key=self._order)
        return holder_first(plans)

    def _order(self, plan: Plan) -> tuple[bool, float, int, int, Publisher]:
        chosen, price = self._engines[plan.publisher].chosen, round(plan.price.total_s, 6)
        return plan.over_share, price, plan.in_flight, chosen, plan.publisher

    def _plan(
        self,
        ask: Ask,
        engine: _Engine,
        now: float,
        *,
        resume: Resume | None = None,
        expected: int = 0,
        share: int = 0,
    ) -> Plan:
        held = resume.tokens if resume else 0
        tiers = resume.tier_tokens if resume else ()
        cost = engine.cost
        tokens = max(ask.prompt_tokens, 0)
        beside = engine.beside()
        recompute = cost.recompute_s(min(max(held, expected), tokens), tokens, beside)
        load_s = self.ways.load_s(engine.publisher, cost, tiers) if len(tiers) > 1 else 0.0
        own = resume.own_tokens if resume else -1
        if load_s and own >= 0:
            # An agent does not load what is sooner computed: nor is it promised.
            all_s = cost.recompute_s(min(max(own, expected), tokens), tokens, beside)
            if all_s <= load_s + recompute:
                held, tiers, load_s, recompute = own, (own,), 0.0, all_s
        load, start = engine.load(), min(max(held, expected), tokens)
        price = Price(
            wait_s=engine.wait_s(now),
            load_s=load_s,
            recompute_s=recompute,
            crowd_s=CROWD * cost.crowd_s(load),
            charge_s=CHARGE * cost.pool.recompute_s(start, tokens),  # it is taken from all
        )
        return Plan(
            publisher=engine.publisher,
            resume_tokens=held,
            expected_tokens=max(held, expected),
            chain_tokens=resume.chain_tokens if resume else 0,
            tier_tokens=tiers,
            in_flight=load,
            over_share=bool(share) and load + 1 > share,
            price=price,
        )

    def _expected_tokens(self, ask: Ask, resumes: dict[Publisher, Resume]) -> dict[Publisher, int]:
        """Tokens that engines will hold once what they compute right now is done.

        Walks on from what the directory knows of each engine. Where the layout has windowed
        groups only the end of a prompt becomes a resume point, so only that counts.
        """
        result: dict[Publisher, int] = {}
        for fingerprint, keys in ask.keys.items():
            coming = 0  # engines that compute any of it right now: mostly none
            for mask in filter(None, map(self._expected.get, keys)):
                coming |= mask
            if not coming:
                continue
            for engine in self._engines.values():
                if not coming & engine.bit or engine.fingerprint != fingerprint:
                    continue
                grid = engine.cost.grid_tokens
                resume = resumes.get(engine.publisher)
                at = resume.chain_tokens // grid if resume else 0
                best = 0
                while at < len(keys) and self._expected.get(keys[at], 0) & engine.bit:
                    at += 1
                    if not engine.windowed or self._ends.get(keys[at - 1], 0) & engine.bit:
                        best = at
                if best:
                    result[engine.publisher] = best * grid
        return result

    # -- what then happened ---------------------------------------------------------------------

    def begin(self, ask: Ask, plan: Plan, now: float) -> None:
        """The request is sent by ``plan``. A request that was begun before moves over."""
        if ask.id in self._flights:
            self.end(ask.id, now, ok=False)
        engine = self._engines.get(plan.publisher)
        if engine is None:
            return
        self._sequence += 1
        engine.chosen = self._sequence
        beside = engine.beside()
        engine.in_flight += 1
        engine.queue(plan.price.service_s, now)
        keys = list(ask.keys.get(engine.fingerprint, ()))
        new = keys[plan.resume_tokens // engine.cost.grid_tokens :]
        sure = bool(ask.keys) and plan.expected_tokens == plan.resume_tokens
        flight = _Flight(engine, plan, ask.prompt_tokens, now, new, sure, beside)
        self._flights[ask.id] = flight
        flight.load = self.ways.begin(plan.publisher, engine.cost, plan.tier_tokens)
        if self._rival is not None:
            to = _standing(ask, engine, plan.resume_tokens)
            self._rival.began(ask.id, to, ask.prompt_tokens)
        if new and len(self._expected) < EXPECTED_MAX:
            bit, expected = engine.bit, self._expected
            for key in new:
                expected[key] = expected.get(key, 0) | bit
            self._ends[new[-1]] = self._ends.get(new[-1], 0) | bit
        self._fade(now)

    def first_token(self, request_id: str, now: float) -> None:
        """The answer began: the engine's prefill queue moved on."""
        flight = self._flights.get(request_id)
        if flight is None or flight.answered_at >= 0:
            return
        if self._rival is not None:
            self._rival.first_token(request_id)
        engine = flight.engine
        flight.answered_at = now
        flight.answer = Answer(
            flight.sent_at,
            flight.prompt_tokens,
            min(flight.plan.expected_tokens, max(0, flight.prompt_tokens)),
            flight.sure,
            flight.plan.tier_tokens,
            flight.beside,
        )
        engine.measured.began(flight.answer, now)
        engine.answering += 1
        engine.queued_s = max(0.0, engine.queued_s - flight.plan.price.service_s)
        engine.free_at = now + engine.queued_s
        self.ways.end(flight.load, flight.answer.seconds - flight.plan.price.recompute_s)
        flight.load = None
        self._fading.append((now + EXPECTED_GRACE_S, engine.bit, flight.keys))
        flight.keys = ()

    def end(self, request_id: str, now: float, *, ok: bool, cached_tokens: int = -1) -> None:
        """The request is over, however it ended; unknown ids are ignored.

        ``cached_tokens`` is what the engine reported as resumed, -1 where it did not.
        """
        flight = self._flights.pop(request_id, None)
        if flight is None:
            return
        if self._rival is not None:
            self._rival.ended(request_id)
        engine = flight.engine
        engine.in_flight -= 1
        self.ways.end(flight.load)
        if flight.answer is None:
            service_s = flight.plan.price.service_s
            engine.queued_s = max(0.0, engine.queued_s - service_s)
            engine.free_at = max(now, engine.free_at - service_s)
            self._forget(engine.bit, flight.keys)
        else:
            engine.answering -= 1
            if ok and now > flight.answered_at:  # else nothing is decoded: half of a pair
                engine.cost.observe_decode(engine.in_flight, now - flight.answered_at)
            engine.measured.ended(flight.answer, ok=ok, cached_tokens=cached_tokens)
        self._fade(now)

    def _fade(self, now: float) -> None:
        while self._fading and self._fading[0][0] <= now:
            _, bit, keys = self._fading.popleft()
            self._forget(bit, keys)

    def _forget(self, bit: int, keys: Sequence[bytes]) -> None:
        self._forget_in(self._expected, bit, keys)
        self._forget_in(self._ends, bit, keys[-1:])

    def _forget_in(self, table: dict[bytes, int], bit: int, keys: Sequence[bytes]) -> None:
        for key in keys:
            if mask := table.get(key, 0) & ~bit:
                table[key] = mask
            else:
                table.pop(key, None)


def _standing(ask: Ask, engine: _Engine, held_tokens: int) -> Standing:
    keys = ask.keys.get(engine.fingerprint, ())
    grid = engine.cost.grid_tokens
    return Standing(engine.publisher, keys, grid, held_tokens, engine.load(), engine.chosen)


def _idlest(engines: Sequence[_Engine], now: float) -> list[_Engine]:
    """The least loaded first: the shortest queue, then the fewest requests, then by rotation."""
    # Of what cannot be looked up it is not known what it takes, nor so whether anybody is late.
    count = _plans(engines)
    idle = [e for e in engines if e.free_at <= now]
    if len(idle) >= count:  # the others come after them: no rank is made of a thousand
        ranks = heapq.nsmallest(
            count, [(e.in_flight + e.foreign, e.chosen, i) for i, e in enumerate(idle)]
        )
        return [idle[rank[-1]] for rank in ranks]
    waits = [(max(0.0, e.free_at - now), e.load(), e.chosen, i) for i, e in enumerate(engines)]
    return [engines[wait[-1]] for wait in heapq.nsmallest(count, waits)]


def _plans(engines: Sequence[_Engine]) -> int:
    return IDLE_MAX if len(engines) > FEW else len(engines)


def _with_room(
    deepest_first: Iterable[Publisher], allowed: Mapping[Publisher, _Engine], share: int
) -> list[_Engine]:
    """The first few engines, those at their fair share only where there is room for them: a
    crowd on the first ones must not hide the others."""
    room: list[_Engine] = []
    full: list[_Engine] = []
    for publisher in deepest_first:
        engine = allowed.get(publisher)
        if engine is not None:
            (room if engine.load() < share else full).append(engine)
            if len(room) == HOLDERS_MAX:
                break
    return (room + full)[:HOLDERS_MAX]
