"""One simulated cluster and its run: who is in it, what arrives, when it is over."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence

import msgspec

from kvatlas.core.directory import Directory, Limits
from kvatlas.core.dispatch import Dispatcher
from kvatlas.core.keys import Fingerprint, Keyring
from kvatlas.core.layout import Layout
from kvatlas.core.records import Publisher
from kvatlas.core.router import Params, Router
from kvatlas.errors import ConfigError
from kvatlas.report.latency import Slo
from kvatlas.sim.arrivals import Arrivals
from kvatlas.sim.cluster import Cluster, Member
from kvatlas.sim.engines import EngineWatcher, Outside, SimEngine
from kvatlas.sim.gateway import Gateway, GatewayWatcher, Inquiry, Outcome
from kvatlas.sim.links import Fabric, LinkSpec
from kvatlas.sim.network import Network
from kvatlas.sim.pairs import Pairs
from kvatlas.sim.prompts import prompt_tokens
from kvatlas.sim.report import Recorder, SimReport
from kvatlas.sim.tier_spec import TierSpec
from kvatlas.sim.tiers import Tiers
from kvatlas.sim.timeline import Timeline
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
        self.engines: dict[str, SimEngine] = {}
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
        """One agent per node of engines that do not share their work with others.

        Raises ConfigError where there is none.
        """
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
            if member.role == "combined":
                nodes.setdefault(member.node, []).append(member)
        if not nodes:
            raise ConfigError("tiers: only combined engines have them so far: leave them out")
        store = "store" if spec.object_bytes else ""
        for name, members in nodes.items():
            engines = [Publisher(member.name) for member in members]
            node = self.tiers.add_node(name, [m.name for m in members], members[0].link)
            self.gateway.add_agent(node.publisher, engines, store)

    def _outside(self, member: Member) -> Callable[[SimEngine], Outside] | None:
        """Where an engine's state may come from beside its own pool."""
        if member.role != "combined":
            return self.pairs.side
        return self.tiers.side if self.tiers is not None else None

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

            self.gateway.ask(_inquiry(request, trace.block_tokens, play), over)

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
        while not (arrivals.done and not self.gateway.in_flight) and step():
            pass
        self.gateway.stop()
        while step():
            pass


def _inquiry(request: TraceRequest, block_tokens: int, play: Play) -> Inquiry:
    output = max(1, request.output_tokens)
    if play.max_output_tokens is not None:
        output = min(output, play.max_output_tokens)
    tokens = prompt_tokens(request, block_tokens)
    return Inquiry(str(request.index), tokens, output, request.scope)


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
        links={name: link.bytes_moved for name, link in world.fabric.links.items()},
        pairs=world.pairs.counts,
        agents=world.tiers.use() if world.tiers is not None else {},
        fallbacks=recorder.fallbacks,
        faults=recorder.faults,
        retries=recorder.retries,
    )


def _dispatcher(cluster: Cluster, keyring: Keyring) -> Dispatcher:
    """The production core, configured as `kvatlas serve` would."""
    limits = Limits(
        holders_max=cluster.directory.blocks_max,
        holders_per_publisher_max=cluster.directory.blocks_per_publisher_max,
    )
    params = Params(
        policy=cluster.router.policy,
        prefill_tokens_per_s=cluster.router.prefill_tokens_per_s,
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
