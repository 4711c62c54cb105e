"""What lies below the engines of a simulated cluster: sizes, links, the agent's settings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import msgspec

from kvatlas.config import size_bytes
from kvatlas.core.agent_values import Config
from kvatlas.core.policy.registry import POLICIES
from kvatlas.core.records import Tier
from kvatlas.errors import ConfigError
from kvatlas.sim.links import PROFILES, LinkSpec

LoadPath = Literal["own", "dual"]

# Reached by one current data-centre SSD (PCIe 5.0: nominally 14 and 10 GB/s), an assumption.
DISK_READ = LinkSpec(12e9, 80e-6)
DISK_WRITE = LinkSpec(7e9, 20e-6)


class TierSpec(msgspec.Struct, frozen=True):
    """Per node ``dram_bytes`` and ``disk_bytes`` (0: none), for all together ``object_bytes``.

    ``host_link`` is each node's way between engines and host memory, one way. ``peers``: nodes
    read from each other's dram. ``storage_link``: a card of each node for the store alone (None:
    its network card). ``load_path`` "dual": nodes of decode engines read the store for those of
    prefill engines too, and pass it on over the network cards.
    ``load_deadline_s``: a load that is expected to take longer is not begun. Raises ConfigError
    on values that cannot work.
    """

    dram_bytes: int = 0
    disk_bytes: int = 0
    object_bytes: int = 0
    peers: bool = False
    policy: str = "lru"
    high: float = 0.95
    low: float = 0.90
    quotas: dict[str, int] = {}
    host_link: LinkSpec = PROFILES["PCIe-5-x16"]
    disk_read_link: LinkSpec = DISK_READ
    disk_write_link: LinkSpec = DISK_WRITE
    store_link: LinkSpec = PROFILES["Mooncake-8x400G"]
    storage_link: LinkSpec | None = None
    load_path: LoadPath = "own"
    record_s: float = 100e-6
    message_s: float = 100e-6
    load_deadline_s: float = math.inf
    agent: Config = Config()

    def __post_init__(self) -> None:
        sizes = (self.dram_bytes, self.disk_bytes, self.object_bytes)
        if min(sizes) < 0 or max(sizes) > 1 << 60:
            raise ConfigError("tiers: sizes are bytes from 0 up to an exbibyte")
        if not self.dram_bytes and not self.disk_bytes:
            raise ConfigError("tiers: a node needs dram or disk of its own: give dram=SIZE")
        if self.policy not in POLICIES or self.policy == "attention":
            known = ", ".join(name for name in POLICIES if name != "attention")
            raise ConfigError(f"tiers: policy {self.policy!r}: use one of {known}")
        if self.storage_link is not None and not self.object_bytes:
            raise ConfigError("tiers: a storage link leads to the store: give object=SIZE")
        if self.load_path == "dual" and self.storage_link is None:
            raise ConfigError(
                "tiers: load_path dual needs a storage_link: what others read and pass on comes in "
                "over the same network card as what a node reads itself"
            )

    def calibrated(self, link: LinkSpec, relays: Mapping[str, float] | None = None) -> Config:
        """The agent's settings with the rates of its node's ways; ``link``: its network card."""
        host, store = self.host_link.bytes_per_s, self.store_link.bytes_per_s
        read, write = self.disk_read_link.bytes_per_s, self.disk_write_link.bytes_per_s
        away = min(host, link.bytes_per_s)
        card = self.storage_link or link
        reads = {Tier.DRAM: host, Tier.DISK: min(read, host), Tier.PEER: away}
        writes = {Tier.DRAM: host, Tier.DISK: min(write, host), Tier.PEER: away}
        both = {Tier.OBJECT: min(store, host, card.bytes_per_s)}
        return msgspec.structs.replace(
            self.agent, reads=reads | both, writes=writes | both, relays=dict(relays or {})
        )

    def relay_bytes_per_s(self, relay: LinkSpec, link: LinkSpec) -> float:
        """How fast a node with the network card ``relay`` passes on to one with ``link``."""
        card = self.storage_link or relay
        rates = (self.store_link, card, relay, link)
        return min(rate.bytes_per_s for rate in rates)


def parse_tiers(text: str) -> TierSpec:
    """``dram=1TB,disk=8TB,object=100TB,policy=lru``. Raises ConfigError that says what is wrong."""
    given: dict[str, str] = {}
    for item in text.split(","):
        name, _, value = (part.strip() for part in item.partition("="))
        if name not in ("dram", "disk", "object", "policy"):
            raise ConfigError(
                f"--tiers {item.strip()!r}: write dram=SIZE, disk=SIZE or object=SIZE"
            )
        if name in given:
            raise ConfigError(f"--tiers: {name} is given twice")
        given[name] = value
    policy = given.pop("policy", "lru")
    sizes: dict[str, int] = {}
    for name, value in given.items():
        try:
            sizes[name] = size_bytes(value)
        except ConfigError as error:
            raise ConfigError(f"--tiers {name}: {error}") from error
    return TierSpec(
        dram_bytes=sizes.get("dram", 0),
        disk_bytes=sizes.get("disk", 0),
        object_bytes=sizes.get("object", 0),
        policy=policy,
        agent=Config(write_through=(Tier.OBJECT,) if "object" in sizes else ()),
    )
