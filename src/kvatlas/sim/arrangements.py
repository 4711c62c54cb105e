"""How the same devices are arranged: engines that do it all or pairs, and what lies below them."""

from __future__ import annotations

from collections import Counter
from typing import Literal, NamedTuple

import msgspec

from kvatlas.core.ahead_copies import Params as AheadParams
from kvatlas.core.records import Tier
from kvatlas.core.router import Policy
from kvatlas.errors import ConfigError
from kvatlas.sim.cluster import Cluster
from kvatlas.sim.tier_spec import TierSpec

Name = Literal[
    "combined-round-robin",
    "combined",
    "combined-dram",
    "combined-store",
    "pd",
    "pd-dram",
    "pd-store",
]


class Arrangement(NamedTuple):
    """How devices are used. ``tiers``: what lies below the engines: nothing, dram, or that and a
    store for all."""

    title: str
    policy: Policy
    pairs: bool
    tiers: Literal["", "dram", "store"]


ARRANGEMENTS: dict[Name, Arrangement] = {
    "combined-round-robin": Arrangement("Combined, round robin", "round_robin", False, ""),
    "combined": Arrangement("Combined, KV-aware", "price", False, ""),
    "combined-dram": Arrangement("Combined, host DRAM", "price", False, "dram"),
    "combined-store": Arrangement("Combined, distributed store", "price", False, "store"),
    "pd": Arrangement("P/D, no shared cache", "price", True, ""),
    "pd-dram": Arrangement("P/D, host DRAM", "price", True, "dram"),
    "pd-store": Arrangement("P/D, distributed store", "price", True, "store"),
}
#: The five that seed document 000 compares.
DEFAULT: tuple[Name, ...] = ("combined-round-robin", "combined", "pd", "pd-dram", "pd-store")


def unpaired(cluster: Cluster) -> tuple[Cluster, int]:
    """The same engines without halves of pairs, those that prefilled first, and how many these are
    (0: there were no halves). Raises ConfigError where some were, and others not."""
    roles = Counter(member.role for member in cluster.members)
    if roles["combined"] == len(cluster.members):
        return cluster, 0
    if roles["combined"]:
        raise ConfigError(
            "the matrix arranges all engines, as pairs or not: give all of them a role, or none"
        )
    ordered = sorted(cluster.members, key=lambda member: member.role != "prefill")
    members = tuple(msgspec.structs.replace(member, role="combined") for member in ordered)
    return msgspec.structs.replace(cluster, members=members), roles["prefill"]


def arranged(cluster: Cluster, name: Name, prefill: int) -> Cluster:
    """A cluster of combined engines with all tiers in one of the arrangements, the first
    ``prefill`` of them for that half."""
    arrangement = ARRANGEMENTS[name]
    members = tuple(
        msgspec.structs.replace(member, role="prefill" if index < prefill else "decode")
        if arrangement.pairs
        else member
        for index, member in enumerate(cluster.members)
    )
    assert cluster.tiers is not None
    return msgspec.structs.replace(
        cluster,
        members=members,
        router=msgspec.structs.replace(cluster.router, policy=arrangement.policy),
        tiers=_tiers(cluster.tiers, arrangement),
        # Copies ahead of need go from one node's dram to another's.
        ahead=cluster.ahead if arrangement.tiers else AheadParams(),
    )


def _tiers(every: TierSpec, arrangement: Arrangement) -> TierSpec | None:
    """What of all tiers an arrangement has."""
    if not arrangement.tiers:
        return None
    store = arrangement.tiers == "store"
    others = tuple(tier for tier in every.agent.write_through if tier != Tier.OBJECT)
    through = (*others, Tier.OBJECT) if store else others
    dual = store and arrangement.pairs  # it is decode engines that read for prefill engines
    return msgspec.structs.replace(
        every,
        object_bytes=every.object_bytes if store else 0,
        storage_link=every.storage_link if store else None,
        load_path=every.load_path if dual else "own",
        agent=msgspec.structs.replace(every.agent, write_through=through),
    )
