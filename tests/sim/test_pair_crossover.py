"""From which length on a pair is better than one engine, and from which the router says so."""

from __future__ import annotations

import random
from collections.abc import Iterator

import msgspec
import pytest
from sim_kit import BLOCK, trace_of

from kvatlas.sim.cluster import Cluster, ClusterFile, EngineTable, LinkTable, build
from kvatlas.sim.gateway import Outcome
from kvatlas.sim.world import simulate
from kvatlas.workload.trace import Trace, TraceRequest

#: A fast half prefills for a slow one: it pays for what takes longer than to hand it over.
DEVICES = {"combined": "H20", "prefill": "H200", "decode": "H20"}
LENGTHS = [int(200 * 1.04**i) for i in range(118)]  # to 19,700 tokens
BUSY, CALM = 100, 200  # requests that queue up, so that all engines are met; and that do not


def cluster(link_bytes_per_s: float, *roles: str) -> Cluster:
    tables = tuple(
        msgspec.convert(
            {
                **{"name": role, "role": role, "device": DEVICES[role], "link": "card"},
                **{"devices": 2, "expert_precision": "fp4"},
            },
            EngineTable,
        )
        for role in roles
    )
    link = LinkTable(name="card", bytes_per_s=link_bytes_per_s, latency_s=1e-4)
    return build(ClusterFile(engine=tables, link=(link,)), lambda place: place)


def apart(lengths: list[int], busy: int = 0, seed: int = 0) -> Trace:
    """Prompts that share nothing, so far apart that none waits; the first ``busy`` are not."""
    draw = random.Random(seed)

    def requests() -> Iterator[TraceRequest]:
        fresh, at = 0, 0.0
        for index, tokens in enumerate(lengths):
            blocks = -(-tokens // BLOCK)
            yield TraceRequest(index, at, tokens, 8, tuple(range(fresh, fresh + blocks)))
            fresh += blocks
            at += draw.expovariate(3.0) if index < busy - 1 else 4.0

    return trace_of(requests())


def outcomes(of: Cluster, trace: Trace) -> list[Outcome]:
    found: list[Outcome] = []
    simulate(of, trace, export=found.append)
    return sorted(found, key=lambda outcome: int(outcome.id))


def best(link_bytes_per_s: float) -> int:
    """The first length at which the pair, forced, is faster than the one engine, forced."""
    one = outcomes(cluster(link_bytes_per_s, "combined"), apart(LENGTHS))
    two = outcomes(cluster(link_bytes_per_s, "prefill", "decode"), apart(LENGTHS))
    return next(a.prompt_tokens for a, b in zip(one, two, strict=True) if b.ttft_s < a.ttft_s)


def found(link_bytes_per_s: float, seed: int) -> tuple[int, int]:
    """The shortest prompt that the router gives to the pair, the longest that it does not."""
    draw = random.Random(seed)
    before = [int(200 * 2 ** draw.uniform(0, 6)) for _ in range(BUSY + CALM)]
    asked = draw.sample(LENGTHS, len(LENGTHS))
    trace = apart([*before, *asked], BUSY, seed)
    ends = outcomes(cluster(link_bytes_per_s, *DEVICES), trace)[BUSY + CALM :]
    paired = [end.prompt_tokens for end in ends if end.prefilled_by]
    return min(paired), max(end.prompt_tokens for end in ends if not end.prefilled_by)


@pytest.mark.parametrize("link_bytes_per_s", [0.125e9, 0.25e9, 0.5e9])
def test_the_router_crosses_over_where_it_pays(link_bytes_per_s: float) -> None:
    at = best(link_bytes_per_s)
    assert LENGTHS[0] < at < LENGTHS[-1]
    shortest, longest = found(link_bytes_per_s, 1)
    print(f"{link_bytes_per_s / 1e9} GB/s: best {at}, pairs from {shortest}, alone to {longest}")
    assert shortest == pytest.approx(at, rel=0.1)
    assert longest == pytest.approx(at, rel=0.1)
