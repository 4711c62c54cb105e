"""Small traces and clusters for the simulator's tests."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from kvatlas.core.events import Batch
from kvatlas.core.router import Decision
from kvatlas.sim.cluster import (
    Cluster,
    ClusterFile,
    EngineTable,
    LinkTable,
    RouterTable,
    TiersTable,
    build,
)
from kvatlas.sim.engines import SimEngine
from kvatlas.sim.gateway import Inquiry, Outcome
from kvatlas.workload.protocol import Admitted, Arrive
from kvatlas.workload.trace import Trace, TraceRequest

BLOCK = 512


def trace_of(requests: Iterable[TraceRequest], name: str = "made") -> Trace:
    """A trace that can be read again and again."""
    kept = tuple(requests)
    return Trace(name, "made", BLOCK, lambda: iter(kept))


def chats(
    count: int, *, seed: int = 1, sessions: int = 12, rate_per_s: float = 4.0, output: int = 40
) -> Trace:
    """Multi-turn chats: each turn repeats the session's prompt and adds to it."""
    draw = random.Random(seed)

    def requests() -> Iterator[TraceRequest]:
        fresh = iter(range(10_000_000))
        held: list[list[int]] = [[next(fresh) for _ in range(4)] for _ in range(sessions)]
        at = 0.0
        for index in range(count):
            ids = held[draw.randrange(sessions)]
            ids += [next(fresh) for _ in range(draw.randrange(1, 4))]
            tokens = (len(ids) - 1) * BLOCK + draw.randrange(1, BLOCK + 1)
            yield TraceRequest(index, at, tokens, draw.randrange(1, output), tuple(ids))
            at += draw.expovariate(rate_per_s)

    return trace_of(requests())


def random_prompts(count: int, *, seed: int = 1, rate_per_s: float = 4.0) -> Trace:
    """Nothing is shared."""
    draw = random.Random(seed)

    def requests() -> Iterator[TraceRequest]:
        at, next_id = 0.0, 0
        for index in range(count):
            blocks = draw.randrange(1, 16)
            ids = tuple(range(next_id, next_id + blocks))
            next_id += blocks
            yield TraceRequest(index, at, blocks * BLOCK, draw.randrange(1, 60), ids)
            at += draw.expovariate(rate_per_s)

    return trace_of(requests())


def cluster_of(policy: str = "price", **fields: object) -> Cluster:
    """Four engines of V4 Flash on two H200 each; ``fields`` are those of `EngineTable`."""
    values = {"name": "e", "count": 4, "devices": 2, "expert_precision": "fp4", **fields}
    table = msgspec.convert(values, EngineTable)
    router = msgspec.convert({"policy": policy}, RouterTable)
    return build(ClusterFile(engine=(table,), router=router), lambda place: place)


def pairs_of(
    prefill: int = 2,
    decode: int = 2,
    *,
    tiers: TiersTable | None = None,
    links: tuple[LinkTable, ...] = (),
    **fields: object,
) -> Cluster:
    """Prefill and decode engines as `cluster_of`; the first link of each is RDMA at 400 Gbit/s."""
    values = {"devices": 2, "expert_precision": "fp4", **fields}
    tables = tuple(
        msgspec.convert({"name": role, "role": role, "count": count, **values}, EngineTable)
        for role, count in (("prefill", prefill), ("decode", decode))
    )
    return build(ClusterFile(engine=tables, link=links, tiers=tiers), lambda place: place)


class Log:
    """Watches everything and keeps it."""

    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []
        self.decisions: list[Decision] = []
        self.admitted_ids: list[str] = []
        self.batches: list[tuple[str, Batch]] = []

    def decided(self, inquiry: Inquiry, decision: Decision) -> None:
        self.decisions.append(decision)

    def waited(self, gaps_s: Sequence[float], count: int) -> None:
        assert min(gaps_s, default=0.0) >= 0

    def ended(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)

    def admitted(
        self, engine: SimEngine, arrive: Arrive, admitted: Admitted, waited_s: float
    ) -> None:
        assert waited_s >= 0
        self.admitted_ids.append(arrive.id)

    def published(self, engine: SimEngine, batch: Batch) -> None:
        self.batches.append((engine.name, batch))


def ids(outcomes: Sequence[Outcome]) -> list[int]:
    """Request ids in order."""
    return sorted(int(outcome.id) for outcome in outcomes)
