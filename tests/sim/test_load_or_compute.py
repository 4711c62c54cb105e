"""Where loading loses it is computed, where it wins it is loaded: beside doing always the one or
always the other, on the same arrivals."""

from __future__ import annotations

from statistics import mean

import msgspec
import pytest
from sim_kit import chats, cluster_of

from kvatlas.core.agent_values import Config
from kvatlas.core.cost import EngineCost
from kvatlas.core.placement import Paths
from kvatlas.core.records import Tier
from kvatlas.sim.cluster import Cluster
from kvatlas.sim.gateway import Outcome
from kvatlas.sim.links import LinkSpec
from kvatlas.sim.tier_spec import TierSpec
from kvatlas.sim.world import simulate
from kvatlas.workload.trace import Trace

#: More sessions than two engines have blocks for: who comes back finds its prompt in the store.
TRACE = chats(120, rate_per_s=0.4)
WARM = 40  # requests from which prices are learnt


def engines(device: str, store_bytes_per_s: float = 0.0) -> Cluster:
    """Two engines, each a node, over one store; 0 bytes/s: no store."""
    cluster = cluster_of(count=2, model="llama-3.1-70b", devices=4, device=device, blocks=2500)
    if not store_bytes_per_s:
        return cluster
    link = LinkSpec(store_bytes_per_s, 1e-4)
    tiers = TierSpec(
        dram_bytes=10**9,  # holds nothing for long
        object_bytes=10**14,
        store_link=link,
        storage_link=link,
        agent=Config(write_through=(Tier.OBJECT,)),
    )
    return msgspec.structs.replace(cluster, tiers=tiers)


def mean_ttft_s(cluster: Cluster, trace: Trace = TRACE) -> tuple[float, int]:
    """After the first ones; and the tokens that came from the store."""
    times: dict[int, float] = {}

    def ended(outcome: Outcome) -> None:
        times[int(outcome.id)] = outcome.ttft_s

    report = simulate(cluster, trace, export=ended)
    assert min(times.values()) > 0  # all were answered
    return mean(times[id] for id in times if id >= WARM), report.tokens.hits["object"]


def always_load(patch: pytest.MonkeyPatch) -> None:
    """For router and agent a load takes no time, whatever it takes."""
    patch.setattr(EngineCost, "load_s", lambda *_: 1e-9)
    patch.setattr(Paths, "read_s", lambda *_: 0.0)


@pytest.mark.parametrize(
    ("device", "store_bytes_per_s", "best"), [("H200", 1e9, "compute"), ("H20", 50e9, "load")]
)
def test_the_better_one_within_a_twentieth(
    device: str, store_bytes_per_s: float, best: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_store = engines(device, store_bytes_per_s)
    ours_s, loaded = mean_ttft_s(with_store)
    compute_s, none = mean_ttft_s(engines(device))
    with monkeypatch.context() as patch:
        always_load(patch)
        load_s, all_loaded = mean_ttft_s(with_store)
    print(f"{device}: ours {ours_s:.4f} s, always load {load_s:.4f}, compute {compute_s:.4f}")
    assert not none
    assert all_loaded
    better_s, worse_s = (compute_s, load_s) if best == "compute" else (load_s, compute_s)
    assert worse_s > 1.1 * better_s  # else the case says nothing
    assert ours_s <= 1.05 * better_s
    assert bool(loaded) == (best == "load")
