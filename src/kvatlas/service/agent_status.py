"""What a node's own tiers hold and did, as the agent's status tells it."""

from __future__ import annotations

from kvatlas.core.agent import Agent
from kvatlas.core.records import Tier
from kvatlas.dataplane.tiers.disk import DiskStore
from kvatlas.dataplane.tiers.dram import DramStore


def own_tiers(core: Agent, dram: DramStore, disk: DiskStore | None) -> dict[str, object]:
    """By the tier's name."""
    tiers: dict[str, object] = {}
    for tier, store in ((Tier.DRAM, dram), (Tier.DISK, disk)):
        if store is None:
            continue
        usage = core.ledger(tier).usage()
        shown: dict[str, object] = {
            "transport": store.transport,
            "capacity_bytes": core.ledger(tier).limits.capacity_bytes,
            "held_bytes": usage.committed_bytes,
            "in_use_bytes": usage.in_use_bytes,
            "units": usage.entries,
            "counts": dict(sorted(store.counts.all().items())),
        }
        if isinstance(store, DiskStore):
            shown["quarantined_bytes"] = store.quarantined_bytes
            shown["sealed"] = store.sealed
        tiers[tier.name.lower()] = shown
    return tiers
