"""cluster.toml: a cluster to simulate, as frozen values. Impossible ones are refused."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from kvatlas.config import (
    BytesPerSecond,
    Count,
    Positive,
    Rate,
    Seconds,
    line_of,
    read,
    size_bytes,
)
from kvatlas.core.agent_values import Config
from kvatlas.core.ahead_copies import Params as AheadParams
from kvatlas.core.layout import Layout
from kvatlas.core.records import Tier
from kvatlas.core.rivals import Knobs
from kvatlas.core.router import Policy
from kvatlas.errors import ConfigError, LayoutError
from kvatlas.sim.gateway import GatewaySpec
from kvatlas.sim.links import PROFILES as LINKS
from kvatlas.sim.links import LinkSpec
from kvatlas.sim.pairs import PairSpec
from kvatlas.sim.tier_spec import DISK_READ, DISK_WRITE, LoadPath, TierSpec
from kvatlas.workload.device import Device
from kvatlas.workload.models import load_config, load_layout
from kvatlas.workload.pool import Pool, pool_blocks
from kvatlas.workload.profiles import DeviceTable, Where, with_own
from kvatlas.workload.shape import Shape, shape_of
from kvatlas.workload.spec import EngineSpec
from kvatlas.workload.step_time import StepTime

ENGINES_MAX = 1024
DEVICES_MAX = 4096  # of one engine
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
Role = Literal["combined", "prefill", "decode"]
Devices = Annotated[int, msgspec.Meta(ge=1, le=DEVICES_MAX)]


class RouterTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``policy`` as in kvatlas.toml; the rate is the prior of the first few requests; ``knobs``
    are those of other routers' rules."""

    policy: Policy = "price"
    prefill_tokens_per_s: Rate = 8000.0
    knobs: Knobs = Knobs()


class NetworkTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``latency_s`` of each message between gateway and engines, one way."""

    latency_s: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 0.0001


class DirectoryTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Caps in block-holders, as in kvatlas.toml."""

    blocks_max: Positive = 20_000_000
    blocks_per_publisher_max: Positive = 2_000_000


class GatewayTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How patient the gateway is; the same defaults as in kvatlas.toml."""

    connect_timeout_s: Seconds = 2.0
    engine_idle_timeout_s: Seconds = 600.0
    ttft_slo_s: Annotated[float, msgspec.Meta(ge=0, le=86_400)] = 0.0
    poll_s: Annotated[float, msgspec.Meta(ge=0.01, le=86_400)] = 1.0


class EngineTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``count`` equal engines, named ``name``-0 and so on.

    ``model`` is a known model, a config.json or its directory, or a plain block size as text; a
    plain one needs ``blocks``, ``prefill_tokens_per_s`` and ``decode_step_s``. ``device`` names a
    profile or a ``[[device]]``, ``link`` a link profile or a ``[[link]]``: the network card of each
    node, one way; ``per_node`` engines share a node. ``blocks`` 0: what ``memory_share`` of the
    devices' memory leaves beside the weights. ``retention_tokens`` -1 keeps every window on the
    grid; ``async_scheduling``: see `EngineSpec`.
    """

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=100)] = "engine"
    count: Annotated[int, msgspec.Meta(ge=1, le=ENGINES_MAX)] = 1
    role: Role = "combined"
    model: str = "deepseek-v4-flash"
    engine: Literal["vllm", "sglang"] = "vllm"
    kv_dtype: str = "auto"
    device: str = "H200"
    devices: Devices = 1
    link: str = "RDMA-400G"
    per_node: Devices = 1
    precision: str = "fp8"
    expert_precision: str = ""
    expert_ranks: Devices = 1
    memory_share: Share = 0.9
    blocks: Count = 0
    step_tokens: Positive = 8192
    max_running: Positive = 256
    max_waiting: Positive = 10_000
    context_tokens: Positive = 1 << 20
    retention_tokens: Annotated[int, msgspec.Meta(ge=-1)] = 0
    async_scheduling: bool = False
    prefill_tokens_per_s: float | None = None
    decode_step_s: float | None = None
    step_overhead_s: float | None = None


class LinkTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A link of your own: the fields of `kvatlas.sim.links.LinkSpec`. ``like`` names the profile
    whose figures stand where none is given."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=100)]
    like: str = ""
    bytes_per_s: float | None = None
    latency_s: float | None = None
    background_share: float | None = None
    background_period_s: float | None = None
    background_burst_share: float | None = None


class PairsTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long a prefill engine keeps state that nobody takes, and how long a read may take."""

    lease_s: Seconds = 480.0
    transfer_timeout_s: Seconds = 60.0


class TiersTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What every node has below its engines: sizes as text ("1.5TB"), "" for none. ``object`` is
    one store for all; ``peers``: nodes read from each other's dram. ``host_link`` names the link
    between engines and host memory, ``storage_link`` each node's card for the store alone ("": its
    network card), ``disk_read_bytes_per_s`` and its like what the disks reach. ``load_path``: see
    `TierSpec`.
    """

    dram: str = ""
    disk: str = ""
    object: str = ""
    peers: bool = False
    policy: str = "lru"
    exclusive: bool = False
    write_through: bool = False
    host_link: str = "PCIe-5-x16"
    storage_link: str = ""
    load_path: LoadPath = "own"
    disk_read_bytes_per_s: BytesPerSecond = DISK_READ.bytes_per_s
    disk_write_bytes_per_s: BytesPerSecond = DISK_WRITE.bytes_per_s


class ClusterFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file."""

    engine: tuple[EngineTable, ...]
    router: RouterTable = RouterTable()
    network: NetworkTable = NetworkTable()
    gateway: GatewayTable = GatewayTable()
    directory: DirectoryTable = DirectoryTable()
    device: tuple[DeviceTable, ...] = ()
    link: tuple[LinkTable, ...] = ()
    pairs: PairsTable = PairsTable()
    tiers: TiersTable | None = None
    ahead: AheadParams = AheadParams()


TABLES: dict[str, type[msgspec.Struct]] = {
    "": ClusterFile,
    "engine": EngineTable,
    "router": RouterTable,
    "router.knobs": Knobs,
    "network": NetworkTable,
    "gateway": GatewayTable,
    "directory": DirectoryTable,
    "device": DeviceTable,
    "link": LinkTable,
    "pairs": PairsTable,
    "tiers": TiersTable,
    "ahead": AheadParams,
}


class Member(msgspec.Struct, frozen=True):
    """One engine, ready to be built. ``link`` is the network card of its node."""

    name: str
    role: Role
    node: str
    link: LinkSpec
    layout: Layout
    spec: EngineSpec


class Cluster(msgspec.Struct, frozen=True):
    """A checked cluster."""

    members: tuple[Member, ...]
    router: RouterTable = RouterTable()
    network: NetworkTable = NetworkTable()
    gateway: GatewaySpec = GatewaySpec()
    directory: DirectoryTable = DirectoryTable()
    pairs: PairSpec = PairSpec()
    tiers: TierSpec | None = None
    ahead: AheadParams = AheadParams()

    def devices(self) -> int:
        """Accelerators in all."""
        return sum(member.spec.devices for member in self.members)


def load_cluster(path: Path) -> Cluster:
    """Raises ConfigError that names the file, the line and what is wrong with it."""
    text, file = read(path, ClusterFile, TABLES)

    def where(place: str) -> str:
        return f"{path}:{line_of(text, place)}"

    return build(file, where)


def default_cluster(
    *, engines: int = 8, policy: Policy = "price", model: str = "deepseek-v4-flash"
) -> Cluster:
    """``engines`` × two H200 with DeepSeek V4 Flash (experts in fp4, as they are published).
    Raises ConfigError for a number of engines that is not possible."""
    if not 1 <= engines <= ENGINES_MAX:
        raise ConfigError(f"--engines {engines}: 1 to {ENGINES_MAX} are possible")
    table = EngineTable(
        name="engine", count=engines, model=model, devices=2, expert_precision="fp4"
    )
    file = ClusterFile(engine=(table,), router=RouterTable(policy=policy))
    return build(file, lambda place: f"default cluster, {place}")


def build(file: ClusterFile, where: Where) -> Cluster:
    """Engines with layouts, pools and times. ``where(place)`` says what an error begins with.
    Raises ConfigError for what types alone cannot say."""
    if not file.engine:
        raise ConfigError(f"{where('engine')}: no [[engine]]: name at least one")
    if sum(table.count for table in file.engine) > ENGINES_MAX:
        raise ConfigError(f"{where('engine')}: more than {ENGINES_MAX} engines")
    profiles = with_own(file.device, where)
    links = _links(file, where)
    members: list[Member] = []
    names: set[str] = set()
    for index, table in enumerate(file.engine):
        place = f"engine[{index}]"
        if table.name in names:
            raise ConfigError(
                f"{where(f'{place}.name')}: two engines are named {table.name!r}: they must differ"
            )
        if not re.fullmatch(r"[\w.-]+", table.name):
            raise ConfigError(
                f"{where(f'{place}.name')}: {table.name!r}: use letters, digits, '.', '_' and '-'"
            )
        names.add(table.name)
        try:
            members.extend(_members(table, profiles, links))
        except (ConfigError, LayoutError) as error:
            raise ConfigError(f"{where(place)}: engine {table.name!r}: {error}") from error
    _check_roles(members, where)
    gateway = GatewaySpec(
        connect_timeout_s=file.gateway.connect_timeout_s,
        engine_idle_timeout_s=file.gateway.engine_idle_timeout_s,
        ttft_slo_s=file.gateway.ttft_slo_s or math.inf,
        poll_s=file.gateway.poll_s,
        poll_timeout_s=2 * file.gateway.poll_s,
    )
    pairs = PairSpec(file.pairs.lease_s, file.pairs.transfer_timeout_s)
    cluster = Cluster(
        tuple(members),
        file.router,
        file.network,
        gateway,
        file.directory,
        pairs,
        ahead=file.ahead,
    )
    tiers = _tiers(file.tiers, links, where)
    if file.ahead.on and (tiers is None or not tiers.dram_bytes or not tiers.peers):
        raise ConfigError(
            f"{where('ahead')}: copies go from one node's dram to another's: give [tiers] dram and "
            "peers = true"
        )
    return cluster if tiers is None else with_tiers(cluster, tiers, where)


def with_tiers(cluster: Cluster, tiers: TierSpec, where: Where) -> Cluster:
    """The same, with these tiers below its engines. Raises ConfigError where that cannot be."""
    if any(not member.layout.components for member in cluster.members):
        raise ConfigError(
            f"{where('tiers')}: a plain block size does not tell how many bytes are saved and "
            "loaded: name a model"
        )
    if tiers.load_path == "dual" and all(m.role == "combined" for m in cluster.members):
        raise ConfigError(
            f'{where("tiers.load_path")}: load_path "dual": it is decode engines that read for '
            "prefill engines, and there are none"
        )
    return msgspec.structs.replace(cluster, tiers=tiers)


def _tiers(table: TiersTable | None, links: dict[str, LinkSpec], where: Where) -> TierSpec | None:
    if table is None:
        return None
    for field, link in (("host_link", table.host_link), ("storage_link", table.storage_link)):
        if link not in links and (link or field == "host_link"):
            known = ", ".join(links)
            raise ConfigError(f"{where(f'tiers.{field}')}: unknown link {link!r}: {known}")
    sizes: dict[str, int] = {}
    for name, text in (("dram", table.dram), ("disk", table.disk), ("object", table.object)):
        try:
            sizes[name] = size_bytes(text) if text else 0
        except ConfigError as error:
            raise ConfigError(f"{where(f'tiers.{name}')}: {error}") from error
    shared = (Tier.OBJECT,) if table.object else ()
    through = (*((Tier.DISK,) if table.disk else ()), *shared) if table.write_through else shared
    try:
        return TierSpec(
            dram_bytes=sizes["dram"],
            disk_bytes=sizes["disk"],
            object_bytes=sizes["object"],
            peers=table.peers,
            policy=table.policy,
            host_link=links[table.host_link],
            storage_link=links.get(table.storage_link),
            load_path=table.load_path,
            disk_read_link=LinkSpec(table.disk_read_bytes_per_s, DISK_READ.latency_s),
            disk_write_link=LinkSpec(table.disk_write_bytes_per_s, DISK_WRITE.latency_s),
            agent=Config(exclusive=table.exclusive, write_through=through),
        )
    except ConfigError as error:
        raise ConfigError(f"{where('tiers')}: {error}") from error


def _check_roles(members: list[Member], where: Where) -> None:
    """Halves of pairs need each other, and the same state."""
    halves = [member for member in members if member.role != "combined"]
    roles = {member.role for member in halves}
    if len(roles) == 1:
        other = "decode" if "prefill" in roles else "prefill"
        raise ConfigError(f'{where("engine")}: role "{roles.pop()}" needs role "{other}" beside it')
    if len({member.layout.digest() for member in halves}) > 1:
        raise ConfigError(
            f"{where('engine')}: prefill and decode engines differ in their KV layout: state "
            "cannot change hands"
        )
    if halves and not halves[0].layout.components:
        raise ConfigError(
            f"{where('engine')}: a plain block size does not tell how many bytes change hands: "
            "name a model"
        )


def _links(file: ClusterFile, where: Where) -> dict[str, LinkSpec]:
    links = dict(LINKS)
    for index, table in enumerate(file.link):
        place = f"link[{index}]"
        if table.name in links:
            raise ConfigError(f"{where(f'{place}.name')}: there is a link {table.name!r} already")
        if table.like and table.like not in links:
            known = ", ".join(links)
            raise ConfigError(f"{where(f'{place}.like')}: unknown link {table.like!r}: {known}")
        values = {
            field: value
            for field in LinkSpec.__struct_fields__
            if (value := getattr(table, field)) is not None
        }
        base = msgspec.structs.asdict(links[table.like]) if table.like else {}
        if "bytes_per_s" not in base | values:
            raise ConfigError(f'{where(place)}: give bytes_per_s (or say like = "RDMA-400G")')
        try:
            links[table.name] = LinkSpec(**{**base, **values})
        except ConfigError as error:
            raise ConfigError(f"{where(place)}: link {table.name!r}: {error}") from error
    return links


def _members(
    table: EngineTable, profiles: dict[str, Device], links: dict[str, LinkSpec]
) -> Iterator[Member]:
    layout = load_layout(table.model, engine=table.engine, kv_dtype=table.kv_dtype)
    measured = table.prefill_tokens_per_s is not None or table.decode_step_s is not None
    profile = profiles.get(table.device)
    if profile is None:
        raise ConfigError(f"unknown device {table.device!r}: use one of {', '.join(profiles)}")
    link = links.get(table.link)
    if link is None:
        raise ConfigError(f"unknown link {table.link!r}: use one of {', '.join(links)}")
    plain = table.model.isdecimal()
    if plain and not measured:
        raise ConfigError(
            "a plain block size says nothing of time: give prefill_tokens_per_s and decode_step_s"
        )
    shape = None if plain else shape_of(load_config(table.model))
    spec = EngineSpec(
        blocks=table.blocks or _blocks(table, layout, profile, shape),
        max_running=table.max_running,
        max_waiting=table.max_waiting,
        step_tokens=table.step_tokens,
        context_tokens=table.context_tokens,
        retention_tokens=None if table.retention_tokens < 0 else table.retention_tokens,
        async_scheduling=table.async_scheduling,
        device=profile,
        devices=table.devices,
        precision=table.precision,
        shape=shape,
        expert_precision=table.expert_precision,
        expert_ranks=table.expert_ranks,
        prefill_tokens_per_s=table.prefill_tokens_per_s,
        decode_step_s=table.decode_step_s,
        step_overhead_s=table.step_overhead_s,
    )
    StepTime(spec, layout)  # raises where it cannot work
    Pool(layout, 1, retention=spec.retention_tokens, step_tokens=spec.step_tokens)
    for number in range(table.count):
        name, node = f"{table.name}-{number}", f"{table.name}-node{number // table.per_node}"
        yield Member(name, table.role, node, link, layout, spec)


def _blocks(table: EngineTable, layout: Layout, profile: Device, shape: Shape | None) -> int:
    """What the weights leave of the memory. Where every device holds all of the KV state, one
    device's share of it is all there is."""
    if shape is None or layout.compute is None:
        raise ConfigError("blocks: give the pool's size: nothing tells how large a block is")
    weights = (
        shape.weight_bytes(layout.compute, table.precision, table.expert_precision)
        + shape.head * 2.0
    )  # the embedding, in bf16
    each = weights / (table.devices * table.expert_ranks)
    room = table.memory_share * profile.memory_bytes - each
    if layout.tensor_parallel != "replicated":
        room *= table.devices
    blocks = pool_blocks(layout, int(room)) if room > 0 else 0
    if blocks < 1:
        raise ConfigError(
            f"weights of {weights / 1e9:.0f} GB on {table.devices} × {table.device} "
            f"({profile.memory_bytes / 1e9:.0f} GB) leave no room for KV: use more devices, "
            "or fewer bits (precision, expert_precision)"
        )
    return blocks
