"""One scenario in both worlds: the simulator, and stub engines behind the real gateway.

Both run the same core over the same engine model, so everything that is decided, cached, evicted
and answered must be equal, to the last digit. What differs is all that lies between: the gateway,
HTTP, ZMQ, the wire forms, the feeds and the drivers. Time is virtual on both sides
(`parity_loop`), messages take none, and no two requests arrive at one instant.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any
from zlib import crc32

import msgspec

from kvatlas.core.events import BlockRemoved, BlockStored, Event
from kvatlas.core.router import Decision
from kvatlas.validate.parity_served import served
from kvatlas.validate.parity_simulated import simulated
from kvatlas.validate.parity_values import Request, Scenario, Side

DIFFERENCES_MAX = 1000  # kept to be shown; all are counted


class Difference(msgspec.Struct, frozen=True):
    """``where`` names a request or an engine, ``cause`` what usually makes this field differ."""

    where: str
    field: str
    simulated: str
    served: str
    cause: str


class Engine(msgspec.Struct):
    """What one engine did, as the simulator tells it. Blocks are counted as they are announced."""

    requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    stored_blocks: int = 0
    evicted_blocks: int = 0
    preemptions: int = 0
    different: int = 0


class Comparison(msgspec.Struct, kw_only=True):
    """``compared`` fields, of which ``different`` are not equal; the first in ``differences``."""

    compared: int = 0
    different: int = 0
    differences: list[Difference] = []

    def note(self, where: str, field: str, one: object, other: object) -> bool:
        """Compare one field; True where it is equal."""
        self.compared += 1
        if one == other:
            return True
        self.different += 1
        if len(self.differences) < DIFFERENCES_MAX:
            told = Difference(where, field, _shown(one), _shown(other), self.cause(field))
            self.differences.append(told)
        return False

    def cause(self, field: str) -> str:
        """What usually makes this field differ."""
        return _CAUSES.get(field, "")


class Parity(Comparison):
    """One scenario in both worlds."""

    scenario: str
    policy: str
    requests: int = 0
    promised_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    failed: int = 0
    events: int = 0
    engines: dict[str, Engine] = {}


_CAUSES = {
    "order of decisions": "requests reached the two gateways in another order",
    "decided at": "an answer before it ended at another time, or its think time was another",
    "engine": "prices, loads or the rotation differ: see the plans of this request",
    "order of plans": "prices, loads or the rotation differ: see the plans of this request",
    "resume position": "the directories had heard other KV events, or at another time",
    "expected position": "what is being computed in flight is booked otherwise",
    "in flight": "an end or a first token was told at another time",
    "price": "the routers learnt from other times, loads or lengths",
    "question": "the gateways ask the router otherwise",
    "tried": "an engine refused what the other one took",
    "first token after": "the engines' steps took other times, or another batch",
    "ended at": "the engines' steps took other times, or another batch",
    "cached tokens": "the engines' pools hold other blocks, or the request went elsewhere",
    "answer": "the engines resumed from other bytes, or computed other tokens",
    "fault": "an engine or the gateway refused, or broke off",
    "KV event": "the engines stored or evicted other blocks, or at another step",
    "engine's state": "the pools hold other blocks, or the request queues differ",
    "preemptions": "the pools ran out at another moment",
    "block-holders": "the directories took other events in, or refused some",
    "directory": "other blocks are believed to be held",
}


def parity(scenario: Scenario) -> Parity:
    """Play it twice and compare. Raises ConfigError and EngineError as `served`."""
    return compare(scenario, simulated(scenario), served(scenario))


def compare(scenario: Scenario, one: Side, other: Side) -> Parity:
    """Everything in which the simulated side and the served side differ."""
    result = Parity(scenario.name, scenario.cluster.router.policy, requests=len(one.requests))
    asked = {str(request.index): request for request in scenario.requests}
    result.note("run", "order of decisions", list(one.requests), list(other.requests))
    result.engines = {name: Engine() for name in one.ends}
    for id, request in one.requests.items():
        before = result.different
        engine = result.engines.get(request.tried[-1]) if request.tried else None
        if id in other.requests:
            _compare_request(result, request, other.requests[id])
        result.failed += bool(request.fault)
        result.promised_tokens += _promised(request)
        result.cached_tokens += max(0, request.cached_tokens)
        result.output_tokens += 0 if request.fault else max(1, asked[id].output_tokens)
        if engine is not None:
            engine.requests += 1
            engine.prompt_tokens += asked[id].input_tokens
            engine.hit_tokens += max(0, request.cached_tokens)
            engine.different += result.different - before
    for name, engine in result.engines.items():
        _compare_engine(result, engine, name, one, other)
    result.note("directory", "directory", one.directory, other.directory)
    return result


def _promised(request: Request) -> int:
    last = request.tried[-1] if request.tried else ""
    plans = (p for p in request.decision.plans if p.publisher.worker == last)
    return next((plan.resume_tokens for plan in plans), 0)


def _compare_request(result: Parity, one: Request, other: Request) -> None:
    where = f"request {one.id}"
    for field, mine, theirs in _decided(one.decision, other.decision):
        result.note(where, field, mine, theirs)
    result.note(where, "tried", one.tried, other.tried)
    result.note(where, "cached tokens", one.cached_tokens, other.cached_tokens)
    result.note(where, "answer", one.answer, other.answer)
    result.note(where, "first token after", one.ttft_s, other.ttft_s)
    result.note(where, "ended at", one.ended_at, other.ended_at)
    result.note(where, "fault", bool(one.fault), bool(other.fault))


def _decided(one: Decision, other: Decision) -> Iterator[tuple[str, Any, Any]]:
    """Two decisions, field by field."""
    asked = ("prompt_tokens", "policy", "unkeyed", "considered")
    yield "decided at", one.at, other.at
    yield "question", [getattr(one, n) for n in asked], [getattr(other, n) for n in asked]
    mine = [plan.publisher.worker for plan in one.plans]
    theirs = [plan.publisher.worker for plan in other.plans]
    yield "engine", mine[:1], theirs[:1]
    yield "order of plans", mine, theirs
    found = {plan.publisher: plan for plan in other.plans}
    for plan in one.plans:
        twin = found.get(plan.publisher)
        if twin is None:
            continue
        name = plan.publisher.worker
        held, held_there = ((p.resume_tokens, p.chain_tokens, p.tier_tokens) for p in (plan, twin))
        yield "resume position", (name, *held), (name, *held_there)
        yield "expected position", (name, plan.expected_tokens), (name, twin.expected_tokens)
        loads, loads_there = ((p.in_flight, p.over_share) for p in (plan, twin))
        yield "in flight", (name, *loads), (name, *loads_there)
        yield "price", (name, plan.price), (name, twin.price)


def _compare_engine(result: Parity, engine: Engine, name: str, one: Side, other: Side) -> None:
    where, before = f"engine {name}", result.different
    events = one.events[name]
    for number, (mine, theirs) in enumerate(zip_longest(events, other.events.get(name, ()))):
        # After the first that differs all others are shifted: it alone says something.
        if not result.note(f"{where}, event {number}", "KV event", mine, theirs):
            break
    mine, theirs = one.ends[name], other.ends[name]
    result.note(where, "engine's state", mine.engine, theirs.engine)
    result.note(where, "preemptions", mine.preemptions, theirs.preemptions)
    result.note(where, "block-holders", mine.holders, theirs.holders)
    result.events += len(events)
    engine.stored_blocks = blocks(events, BlockStored)
    engine.evicted_blocks = blocks(events, BlockRemoved)
    engine.preemptions = mine.preemptions
    engine.different += result.different - before


def blocks(events: Sequence[Event], kind: type[BlockStored] | type[BlockRemoved]) -> int:
    """Blocks that events of one kind name."""
    return sum(len(event.hashes) for event in events if isinstance(event, kind))


def _shown(value: object) -> str:
    """A value for people, cut where it is long."""
    if isinstance(value, BlockStored):
        return (
            f"stored {len(value.hashes)} of group {value.group}, range of "
            f"{value.range_tokens or len(value.tokens) // 4} tokens after {value.parent} "
            f"(crc {crc32(value.tokens):08x})"
        )
    if isinstance(value, BlockRemoved):
        return f"removed {list(value.hashes)[:4]} of group {value.group}"
    text = "nothing" if value is None else str(value)
    return text if len(text) <= 300 else text[:297] + "…"
