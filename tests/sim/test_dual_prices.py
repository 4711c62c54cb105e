"""Loads over the decode nodes' cards too: the router's price, beside what they then took."""

from __future__ import annotations

import statistics

import msgspec
import pytest
from sim_kit import chats

from kvatlas.core.dispatch import Finished, Input, Sent
from kvatlas.core.records import Tier
from kvatlas.core.router import Decision, Plan
from kvatlas.sim import world as worlds
from kvatlas.sim.cluster import Cluster, ClusterFile, EngineTable, LinkTable, TiersTable, build
from kvatlas.sim.world import World


def cluster(prefill: int) -> Cluster:
    """Prefill nodes with small pools, and one decode node that reads the store for them too."""
    common = {"model": "deepseek-v3", "devices": 8, "link": "Mooncake-8x400G"}
    tables = (
        {"name": "prefill", "role": "prefill", "count": prefill, "blocks": 2000 // prefill}
        | common,
        {"name": "decode", "role": "decode"} | common,
    )
    return build(
        ClusterFile(
            engine=tuple(msgspec.convert(table, EngineTable) for table in tables),
            link=(LinkTable("card", like="storage-NIC", bytes_per_s=5e9),),
            tiers=TiersTable(dram="5GB", object="100TB", storage_link="card", load_path="dual"),
        ),
        lambda place: place,
    )


def loads(prefill: int) -> list[tuple[Plan, float]]:
    """Plans of requests that were to load from the store, and their time to the first token."""
    world, plans = World(cluster(prefill)), {}
    found: list[tuple[Plan, float]] = []

    def heard(now: float, event: Input, answer: Decision | None) -> None:
        if isinstance(event, Sent):
            plans[event.id] = world.dispatcher.plan(event.id, event.publisher)
        elif isinstance(event, Finished) and event.ttft_s >= 0 and event.id in plans:
            plan = plans.pop(event.id)
            if plan is not None and len(plan.tier_tokens) > Tier.OBJECT:
                found.append((plan, event.ttft_s))

    world.dispatcher.listen(heard)
    world.play(chats(150, sessions=30, rate_per_s=3.0, output=8))
    return found


@pytest.mark.parametrize("prefill", [1, 2])
def test_a_load_over_both_cards_takes_what_it_was_priced_at(prefill: int) -> None:
    found = loads(prefill)
    assert len(found) >= 10
    errors = [abs(plan.price.ttft_s - ttft_s) / ttft_s for plan, ttft_s in found]
    assert statistics.median(errors) < 0.15
    assert all(plan.price.load_s > 0 for plan, _ in found)


def test_the_second_card_is_in_the_price(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check above can fail: who knows the prefill node's card alone thinks them dearer."""
    both = [plan.price.load_s for plan, _ in loads(1)]
    ways = worlds._ways
    monkeypatch.setattr(worlds, "_ways", lambda *about: ways(*about)[:1])
    one = [plan.price.load_s for plan, _ in loads(1)]
    assert not one or statistics.median(one) > 1.5 * statistics.median(both)
    assert 2 * len(one) < len(both)  # most would be computed instead
