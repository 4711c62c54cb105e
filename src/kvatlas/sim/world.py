"""One simulated cluster and its run: who is in it, what arrives, when it is over."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from kvatlas.core.agent_values import RELAYS_MAX
from kvatlas.core.directory import Directory, Limits
from kvatlas.core.dispatch import Dispatcher, Settle
from kvatlas.core.keys import Fingerprint, Keyring
from kvatlas.core.layout import Layout
from kvatlas.core.load_ways import StoreWay
from kvatlas.core.records import Publisher, Tier
from kvatlas.core.router import Params, Router
from kvatlas.report.latency import Slo
from kvatlas.sim.ahead import SimAhead
from kvatlas.sim.arrivals import Arrivals
from kvatlas.sim.cluster import Cluster, Member
from kvatlas.sim.engines import EngineWatcher, Outside, SimEngine
from kvatlas.sim.gateway import Gateway, GatewayWatcher, Inquiry, Outcome
from kvatlas.sim.links import Fabric, LinkSpec
from kvatlas.sim.network import Network
from kvatlas.sim.pairs import PairedTiers, Pairs
from kvatlas.sim.prompts import prompt_tokens
from kvatlas.sim.report import LinkUse, Recorder, SimReport
from kvatlas.sim.tier_node import agent_of
from kvatlas.sim.tier_spec import TierSpec
from kvatlas.sim.tiers import Tiers
from kvatlas.sim.timeline import Timeline
from kvatlas.workload.prompt_keys import Origin
from kvatlas.workload.protocol import Model
from kvatlas.workload.trace import Trace, TraceRequest


class Play(msgspec.Struct, frozen=True):
    """How a trace is played: only its first ``limit`` requests, its times multiplied by
    ``time_scale``, answers cut at ``max_output_tokens``; ``closed_loop``: see `Arrivals`."""

    limit: int | None = None
    closed_loop: bool = False
    time_scale: float = 1.0
    max_output_tokens: int | None = None


PLAY = Play()


def _nothing() -> None:
    pass


class World:
    """Everything of one run. The same cluster, trace and seed give the same run, event by event.

    Faults act on what is public here: `network.interpose`, `fabric.set_speed`, and each engine's
    ``stop``, ``start``, ``pause``, ``resume`` and ``clock_offset_s``. Watchers see what happens.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        seed: int = 0,
        engine_watchers: Sequence[EngineWatcher] = (),
        gateway_watchers: Sequence[GatewayWatcher] = (),
        make_model: Callable[[Layout], Model] | None = None,
    ) -> None:
        """``make_model`` gives each engine what it computes with (default: nothing).

        Raises ConfigError where an engine of the cluster cannot work."""
        self.cluster = cluster
        self.timeline = Timeline()
        self.network = Network(self.timeline, latency_s=cluster.network.latency_s)
        self.fabric = Fabric(self.timeline)
        secret = hashlib.sha256(b"kvatlas.sim.1\0%d" % seed).digest()
        keyring = Keyring(secret)
        self.dispatcher = _dispatcher(cluster, keyring)
        self.gateway = Gateway(
            self.timeline,
            self.network,
            self.dispatcher,
            spec=cluster.gateway,
            watchers=gateway_watchers,
        )
        self.ahead: SimAhead | None = None
        if cluster.ahead.on:
            self.ahead = SimAhead(cluster.ahead, self.dispatcher, self.timeline, self.network)
            self.gateway.pulled = self.ahead.pulled
        self.engines: dict[str, SimEngine] = {}
        self._by_origin = make_model is None  # else somebody looks at what engines name blocks
        self._nodes = {member.name: member.node for member in cluster.members}
        self.pairs = Pairs(self.timeline, self.network, self.fabric, self._path, spec=cluster.pairs)
        self.tiers: Tiers | None = None
        if cluster.tiers is not None:
            self._add_tiers(cluster.tiers, keyring)
        for member in cluster.members:
            self._add_engine(member, engine_watchers, make_model)

    def _add_engine(
        self,
        member: Member,
        watchers: Sequence[EngineWatcher],
        make_model: Callable[[Layout], Model] | None,
    ) -> None:
        engine = SimEngine(
            member.name,
            member.layout,
            member.spec,
            timeline=self.timeline,
            network=self.network,
            watchers=watchers,
            role=member.role,
            make_model=make_model,
            make_outside=self._outside(member),
        )
        self.engines[member.name] = engine
        self.gateway.add_engine(
            engine.publisher, member.layout, fingerprint(member.layout), role=member.role
        )
        if member.role != "combined":
            self._wire(member)

    def _add_tiers(self, spec: TierSpec, keyring: Keyring) -> None:
        """One agent per node."""
        self.tiers = Tiers(
            self.timeline,
            self.network,
            self.fabric,
            spec,
            keyring=keyring,
            fingerprint=lambda engine: fingerprint(engine.layout),
        )
        nodes: dict[str, list[Member]] = {}
        for member in self.cluster.members:
            nodes.setdefault(member.node, []).append(member)
        relays = _relays(nodes, spec)
        store = "store" if spec.object_bytes else ""
        for name, members in nodes.items():
            engines = tuple(Publisher(member.name) for member in members)
            names, link = [m.name for m in members], members[0].link
            node = self.tiers.add_node(name, names, link, relays.get(name))
            ways = _ways(name, nodes, spec, relays.get(name, {}))
            self.gateway.add_agent(Settle(node.publisher, engines, store, ways))

    def _outside(self, member: Member) -> Callable[[SimEngine], Outside] | None:
        """Where an engine's state may come from beside its own pool."""
        pairs, tiers = self.pairs, self.tiers
        if member.role == "combined":
            return tiers.side if tiers is not None else None
        if tiers is None:
            return pairs.side
        return lambda engine: PairedTiers(pairs.side(engine), tiers.side(engine))

    def _wire(self, member: Member) -> None:
        """The network card of an engine's node, both ways, and the node's own interconnect."""
        device = member.spec.device
        assert device is not None
        self.fabric.add(f"{member.node} out", member.link)
        self.fabric.add(f"{member.node} in", member.link)
        inside = LinkSpec(device.link_bytes_per_s, device.link_latency_s)
        self.fabric.add(f"{member.node} inside", inside)

    def _path(self, source: str, destination: str) -> tuple[str, ...]:
        """Links between two engines."""
        one, other = self._nodes[source], self._nodes[destination]
        return (f"{one} inside",) if one == other else (f"{one} out", f"{other} in")

    def play(
        self, trace: Trace, play: Play = PLAY, *, on_end: Callable[[], None] = _nothing
    ) -> None:
        """Play ``trace`` to its end; ``on_end`` is called as each request is over. Raises
        TraceError where the trace is at fault."""
        for engine in self.engines.values():
            engine.start()
        self.gateway.start()

        def ask(request: TraceRequest, told: Callable[[], None]) -> None:
            def over(_: Outcome) -> None:
                on_end()
                told()

            origin = Origin(request.hash_ids, trace.block_tokens) if self._by_origin else None
            self.gateway.ask(_inquiry(request, trace.block_tokens, play, origin), over)

        requests = itertools.islice(trace, play.limit)
        arrivals = Arrivals(
            self.timeline,
            requests,
            ask,
            closed_loop=play.closed_loop,
            time_scale=play.time_scale,
        )
        arrivals.start()
        step = self.timeline.step
        while not arrivals.done and step():
            pass
        while self.gateway.in_flight and step():
            pass
        self.gateway.stop()
        while step():
            pass


def _inquiry(
    request: TraceRequest, block_tokens: int, play: Play, origin: Origin | None
) -> Inquiry:
    output = max(1, request.output_tokens)
    if play.max_output_tokens is not None:
        output = min(output, play.max_output_tokens)
    tokens = prompt_tokens(request, block_tokens)
    return Inquiry(str(request.index), tokens, output, request.scope, origin=origin)


@contextlib.contextmanager
def no_collector() -> Iterator[None]:
    """For one run: it leaves no reference cycles behind (a test looks), so looking for them is in
    vain: it takes a tenth of the time. Nor is its world, which is one in the end, taken apart
    before the next run or with the process: a twentieth."""
    if gc.get_freeze_count():
        gc.unfreeze()
        gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def simulate(
    cluster: Cluster,
    trace: Trace,
    play: Play = PLAY,
    *,
    seed: int = 0,
    slo: Slo | None = None,
    export: Callable[[Outcome], None] | None = None,
    on_end: Callable[[], None] = _nothing,
) -> SimReport:
    """One whole run. ``export`` gets each request's `Outcome` as it ends. Raises ConfigError for
    an engine that cannot work, TraceError for a trace at fault."""
    recorder = Recorder(slo=slo, export=export)
    world = World(cluster, seed=seed, engine_watchers=[recorder], gateway_watchers=[recorder])
    world.play(trace, play, on_end=on_end)
    latency = recorder.latency()
    loads = recorder.engine_loads(list(world.engines.values()), latency.duration_s)
    return SimReport(
        trace=trace.name,
        seed=seed,
        policy=cluster.router.policy,
        devices=cluster.devices(),
        latency=latency,
        tokens=recorder.token_use(),
        seconds=recorder.seconds_use(),
        preemptions=sum(load.preemptions for load in loads),
        evicted_blocks=sum(load.evicted_blocks for load in loads),
        engines=tuple(loads),
        links={
            name: LinkUse(link.bytes_moved, link.busy_s, link.spec.bytes_per_s)
            for name, link in world.fabric.links.items()
        },
        pairs=world.pairs.counts,
        agents=world.tiers.use() if world.tiers is not None else {},
        fallbacks=recorder.fallbacks,
        faults=recorder.faults,
        retries=recorder.retries,
        ahead=world.ahead.core.tallies if world.ahead is not None else {},
    )


def _relays(nodes: Mapping[str, Sequence[Member]], spec: TierSpec) -> dict[str, dict[str, float]]:
    """Who reads the store for which node of prefill engines, and how fast: nodes of decode
    engines, each for as few as possible. One that does it for several is counted in parts."""
    if spec.load_path == "own":
        return {}
    readers = [name for name, (first, *_) in nodes.items() if first.role == "decode"]
    each = min(len(readers), RELAYS_MAX)
    chosen: dict[str, list[str]] = {}
    for name, (first, *_) in nodes.items():
        if first.role == "prefill":
            start = len(chosen) * each
            chosen[name] = [readers[(start + i) % len(readers)] for i in range(each)]
    shared = Counter(itertools.chain.from_iterable(chosen.values()))
    return {
        name: {
            relay: spec.relay_bytes_per_s(nodes[relay][0].link, nodes[name][0].link) / shared[relay]
            for relay in relays
        }
        for name, relays in chosen.items()
    }


def _ways(
    name: str, nodes: Mapping[str, Sequence[Member]], spec: TierSpec, relays: Mapping[str, float]
) -> tuple[StoreWay, ...]:
    """The ways to the store of a node that has several, each with all of its rate: the router
    counts what is on its way over it."""
    if not relays:
        return ()
    link = nodes[name][0].link
    rates = {name: spec.calibrated(link).reads[Tier.OBJECT]}
    rates |= {relay: spec.relay_bytes_per_s(nodes[relay][0].link, link) for relay in relays}
    return tuple(StoreWay(agent_of(node), rate) for node, rate in rates.items())


def _dispatcher(cluster: Cluster, keyring: Keyring) -> Dispatcher:
    """The production core, configured as `kvatlas serve` would."""
    limits = Limits(
        holders_max=cluster.directory.blocks_max,
        holders_per_publisher_max=cluster.directory.blocks_per_publisher_max,
    )
    params = Params(
        policy=cluster.router.policy,
        prefill_tokens_per_s=cluster.router.prefill_tokens_per_s,
        knobs=cluster.router.knobs,
    )
    return Dispatcher(Directory(keyring, limits), Router(params), keyring)


def fingerprint(layout: Layout) -> bytes:
    """Engines of one layout may share: the simulator knows no other difference."""
    return Fingerprint(
        model=layout.model or "plain",
        engine=layout.engine,
        layout_digest=layout.digest(),
        block_tokens=layout.grid_tokens,
        kv_dtype=layout.kv_dtype,
    ).digest()
