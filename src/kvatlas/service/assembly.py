"""Everything that `kvatlas serve` runs, put together: engines and feed → directory → steering.

One event loop owns it all. This file decides nothing: it tells each part what the others learnt.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

import msgspec

from kvatlas.config import Config, RouterConfig, WorkerConfig, read_secret
from kvatlas.core import sequence
from kvatlas.core.admission import Rules
from kvatlas.core.compat import Member
from kvatlas.core.directory import Directory, Limits
from kvatlas.core.dispatch import Dispatcher, Sweep
from kvatlas.core.keys import Keyring
from kvatlas.core.layout import Layout
from kvatlas.core.records import Publisher
from kvatlas.core.router import BLIND, Params, Router
from kvatlas.dataplane.tls import Trust
from kvatlas.errors import ConfigError, LayoutError
from kvatlas.service.agents import Agents
from kvatlas.service.ahead import CopiesAhead
from kvatlas.service.assembly_report import Report
from kvatlas.service.chat_messages import Dialect
from kvatlas.service.decision_log import DecisionLog
from kvatlas.service.engines import TIMING, Engines, Timing, Worker
from kvatlas.service.feed import Feed
from kvatlas.service.feed_socket import new_curve
from kvatlas.service.http import Request
from kvatlas.service.http_client import HttpClient
from kvatlas.service.http_reply import Reply
from kvatlas.service.identity import (
    UNKNOWN,
    configured_layout,
    entries,
    fingerprint_of,
    told_layout,
)
from kvatlas.service.inspection import Inspector
from kvatlas.service.page import LivePage
from kvatlas.service.purge import purger_of
from kvatlas.service.recording import Recorder
from kvatlas.service.register import RegisterPort, open_register
from kvatlas.service.replica import Replica, registered
from kvatlas.service.snapshots import SNAPSHOT, Snapshots
from kvatlas.service.steer import Inbound
from kvatlas.service.steering import Rank, Steering
from kvatlas.service.tenancy import Tenancy
from kvatlas.service.tls import to_agents, to_engines, to_gateways
from kvatlas.service.tokens import Tokenizer
from kvatlas.service.transport_watch import TransportWatch
from kvatlas.service.verify import Endpoint
from kvatlas.service.warm_start import WarmStart
from kvatlas.workload.profiles import prefill_flops_per_s
from kvatlas.workload.proofs import Runtime, all_proofs, settled

log = logging.getLogger(__name__)

RANK_HEADER = "x-data-parallel-rank"
_FIRST_LOOK_S = 5.0


class Assembly:
    """`start` it on a running loop, `close` it. ``steering`` is what the gateway asks."""

    feed: Feed
    engines: Engines
    agents: Agents

    def __init__(
        self,
        config: Config,
        *,
        timing: Timing | None = None,
        feed_limits: sequence.Limits = sequence.LIMITS,
        clock: Callable[[], float] = time.monotonic,
        register: RegisterPort | None = None,
    ) -> None:
        """``clock`` times the decisions; ``timing`` and ``register``: instead of the file's. Raises
        ConfigError for a secret, a tokenizer, a layout, proofs or a device that cannot be used."""
        self.config = config
        self.timing = timing or _timing(config)
        self._feed_limits = feed_limits
        limits = _limits(config)
        keyring = Keyring(_secret(config.keys.secret_file))
        self._proofs = all_proofs(config.directory.proofs)
        for worker in config.worker:
            configured_layout(worker)
        self.trust = trust = Trust(config.tls, "gateway") if config.tls.on else None
        self.client = HttpClient(outgoing=to_engines(trust) if trust is not None else None)
        self.agents_client = HttpClient(outgoing=to_agents(trust) if trust is not None else None)
        self._keyring = keyring
        self.directory = Directory(keyring, limits)
        self.log = DecisionLog(config.router.explain_max, config.router.decision_log)
        self.tokenizer = self._load_tokenizer()
        params = _params(config.router)
        rules = config.admission
        self.recorder = _recorder(config, params, limits, rules)
        self.dispatcher = Dispatcher(
            self.directory, Router(params), keyring, rules=rules, tap=self.recorder
        )
        if self.recorder is not None:
            self.recorder.keys_of = self.dispatcher.keys_below
        self._clock = clock
        self.tenancy = Tenancy(config, keyring, self.tokenizer, self.agents_client)
        tokens, salts = self.tokenizer, self.tenancy.salts
        self.steering = Steering(
            dispatcher=self.dispatcher, log=self.log, tokens=tokens, salts=salts, clock=clock
        )
        self.report = Report(self)
        self.steering.health_parts.append(self.report.problems)
        self.steering.health_notes.append(self.report.notes)
        self.inspector = Inspector(self.steering, self.directory)
        self.ahead = CopiesAhead(config.ahead, self.dispatcher, keyring, self.agents_client, clock)
        self.transports = TransportWatch(self.steering.transports, self.timing)
        self.page = LivePage(self, clock)
        self.snapshots = Snapshots(keyring, self.dispatcher, lambda: self.feed)
        self.peers_client = HttpClient(outgoing=to_gateways(trust) if trust is not None else None)
        self.warm = WarmStart(keyring, self.dispatcher, lambda: self.feed, self.peers_client)
        self.steering.health_notes.append(self.warm.notes)
        self.layout_errors: dict[str, str] = {}
        self.members: dict[str, Member] = {}  # worker → what it computes with
        self.replica: Replica | None = None  # where there is a register
        self._register = register
        self._agents_wanted = config.agent
        self._taking = asyncio.Lock()
        self._taken: set[asyncio.Task[None]] = set()
        self._sync: asyncio.Task[None] | None = None
        self._verify: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to watch the engines, and wait a moment for the first answers."""
        self.steering.draining = _draining(self.config)
        curve = new_curve() if self.trust is not None else None
        self.feed = Feed(self.dispatcher, limits=self._feed_limits, curve=curve)
        self.engines = Engines(self.feed, self, self.client, self.timing)
        self.steering.quiet = self.engines.quiet_s
        for worker in self.config.worker:
            self.engines.add(worker)
        self.agents = Agents(
            self.feed,
            self.agents_client,
            tell=self.steering.tell,
            ranks=self._ranks,
            timing=self.timing,
            curve=curve,
        )
        self.ahead.agents = self.tenancy.agents = self.agents
        self.tenancy.purger = purger_of(self)
        if self.config.register.on:
            self.replica = self._new_replica()
            await self.replica.start()
        await self.tenancy.start()
        await self._take_agents()
        await self.engines.first_look(_FIRST_LOOK_S)
        self._copy_state()
        self._sync = asyncio.create_task(self._keep_in_step(), name="health to router")
        await self.warm.run(self._peers(), self.config.gateway.warm_start_s)

    def _peers(self) -> tuple[str, ...]:
        """Gateways to ask at the start; none where a recorded run has to begin with nothing."""
        members = self.replica.peers() if self.replica is not None else ()
        return (*self.config.gateway.peers, *members) if self.recorder is None else ()

    async def reload(self, config: Config) -> None:
        """Take up workers and agents of another file: new ones are watched, missing ones forgotten.

        One whose settings changed is removed and added again; one that drains now, or no more,
        stays. Other settings stay.
        """
        wanted = {worker.name: worker for worker in config.worker}
        for worker in wanted.values():
            configured_layout(worker)
        self.steering.draining = _draining(config)
        for name, known in list(self.engines.workers.items()):
            asked = wanted.get(name)
            if asked is None or not _same_engine(asked, known.config):
                await self.engines.remove(name)
        for name, worker in wanted.items():
            if name not in self.engines.workers:
                self.engines.add(worker)
        self._agents_wanted = config.agent
        await self._take_agents()

    async def _take_agents(self) -> None:
        """Those of the file, and those that are members."""
        found = self._agents_wanted
        if self.replica is not None:
            found = self.replica.agents(found, self.engines.workers)
        async with self._taking:
            await self.agents.take(found)

    def _new_replica(self) -> Replica:
        """Raises ConfigError."""

        def met() -> None:
            task = asyncio.create_task(self._take_agents(), name="agents that are members")
            self._taken.add(task)
            task.add_done_callback(self._taken.discard)

        purger = self.tenancy.purger
        replica = Replica(
            self.config,
            self._register or open_register(registered(self.config)),
            self._keyring,
            met=met,
            learnt=purger.learn if purger is not None else lambda _: None,
            floors=purger.floors.all() if purger is not None else (),
        )
        if purger is not None:
            purger.raised = replica.members.raised
        self.tenancy.changed = replica.look
        return replica

    async def close(self) -> None:
        """Ends every task and socket."""
        if self.replica is not None:
            await self.replica.close()
        for task in (self._sync, self._verify, *self._taken):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        await self.tenancy.close()
        await self.ahead.close()
        await self.agents.close()
        await self.engines.close()
        await self.feed.close()
        if self.tokenizer is not None:
            await self.tokenizer.close()
        await self.client.close()
        await self.agents_client.close()
        await self.peers_client.close()
        self.log.close()
        if self.recorder is not None:
            self.recorder.close()

    # -- what the engines tell (service.engines.Listener) -----------------------------------------

    def described(self, worker: Worker) -> None:
        """An engine told what it is: make it known to the directory and the router."""
        told = worker.description
        assert told is not None
        runtime = Runtime(told.engine, told.version, worker.config.device)
        layout, point = settled(self._layout_of(worker), runtime, self._proofs)
        member = Member(told.models, fingerprint_of(worker.config, told, layout), layout)
        self.members[worker.name] = member
        fingerprint = member.fingerprint.digest()
        served = dict.fromkeys(told.models, "")
        served.update({adapter.name: adapter.name for adapter in told.adapters})
        publishers = worker.publishers()
        for publisher in publishers:
            header = ((RANK_HEADER, str(publisher.dp_rank)),) if len(publishers) > 1 else ()
            self.steering.add(
                Rank(
                    publisher=publisher,
                    url=worker.config.url.rstrip("/"),
                    models=served,
                    layout=layout,
                    fingerprint=fingerprint,
                    headers=header,
                    entries=entries(told),
                    resume_point=point,
                    member=member,
                    role=worker.config.role,
                    pairing=worker.config.pairing,
                    bootstrap=worker.config.bootstrap.rstrip("/"),
                )
            )
            self.steering.set_up(publisher, True)
        self.agents.settle()
        self._verify_tokenizer()

    def gone(self, worker: Worker, publishers: Iterable[Publisher]) -> None:
        """Ranks that are no more."""
        for publisher in publishers:
            self.steering.remove(publisher)
        self.layout_errors.pop(worker.name, None)
        if worker.name not in self.engines.workers:
            self.members.pop(worker.name, None)

    def _ranks(self, name: str) -> list[Publisher]:
        worker = self.engines.workers.get(name)
        return worker.publishers() if worker is not None else []

    async def _keep_in_step(self) -> None:
        while True:
            try:
                self._copy_state()
                self.ahead.look(leads=self.replica is None or self.replica.leads)
                self.dispatcher.handle(Sweep(50_000), self._clock())
            except Exception:  # ours: what was known before goes on to count
                log.exception("health, load and who leads were not passed on")
            await asyncio.sleep(self.timing.poll_s / 2)

    def _copy_state(self) -> None:
        """Health, load and transfers as polled, to the router."""
        self.transports.copy(self.engines.workers.values(), self.agents.nodes.values())
        for worker in self.engines.workers.values():
            for publisher in worker.publishers():
                reached = self.steering.reached(publisher, worker.polled_s)
                self.steering.set_up(publisher, worker.up and not worker.asleep and reached)
                load = worker.loads.get(publisher.dp_rank)
                if load is not None and load.running >= 0:
                    self.steering.set_load(publisher, load.running + max(0, load.waiting))

    def _layout_of(self, worker: Worker) -> Layout:
        """Configured, else from the model's own config where it can be read, else refused."""
        self.layout_errors.pop(worker.name, None)
        told = worker.description
        assert told is not None
        draft = worker.config.draft or told.draft
        configured = configured_layout(worker.config, draft)
        if configured is not None:
            return configured
        try:
            return told_layout(worker.config, told, draft)
        except LayoutError as error:
            self.layout_errors[worker.name] = (
                f"its KV layout is not known, so nothing is believed to be cached there: {error}; "
                "set the worker's layout to a config.json or, for a plain model, its block size"
            )
            return UNKNOWN

    # -- tokenizer ------------------------------------------------------------------------------

    def _load_tokenizer(self) -> Tokenizer | None:
        config = self.config
        if config.router.policy in BLIND:
            return None
        sglang = all(worker.engine == "sglang" for worker in config.worker)
        dialect: Dialect = "sglang" if sglang else "vllm"
        endpoint = Endpoint(
            self.client.post_json,
            lambda: [w.config.url.rstrip("/") for w in self.engines.up()],
            dialect=dialect,
            timeout_s=config.tokenizer.engine_timeout_s,
        )
        settings = config.tokenizer
        if config.tenants.on:  # how fast a text is tokenized would tell who sent it before
            settings = msgspec.structs.replace(settings, cache_bytes=0)
        return Tokenizer.load(settings, endpoint=endpoint, dialect=dialect)

    def _verify_tokenizer(self) -> None:
        """Set our token ids beside the engines', now that one of them answers."""
        if self.tokenizer is None or (self._verify is not None and not self._verify.done()):
            return
        self._verify = asyncio.create_task(self._verify_soon(), name="verify tokenizer")

    async def _verify_soon(self) -> None:
        assert self.tokenizer is not None
        while not self.engines.up():  # noqa: ASYNC110 - `described` comes just before `up`
            await asyncio.sleep(self.timing.poll_s / 2)
        for name in self.steering.names()[:1]:
            began = time.monotonic()
            count = await self.tokenizer.verify(name)
            log.info("tokenizer: %d cases compared in %.2f s", count, time.monotonic() - began)

    # -- pages ----------------------------------------------------------------------------------

    def pages(self) -> dict[str, Callable[[str], Awaitable[object]]]:
        """The gateway's further GET paths."""
        replica = {} if self.replica is None else {"/kvatlas/members": self.replica.page}
        return replica | {
            "/kvatlas/explain/": self.page.explain,
            "/kvatlas/workers": self.report.workers,
            "/kvatlas/agents": self.report.agents,
            "/kvatlas/ahead": self.ahead.page,
            "/kvatlas/directory": self.report.directory,
            "/kvatlas/transports": self.transports.page,
            "/kvatlas/page/stream": self.page.stream,
            "/kvatlas/page/explain/": self.page.explain_picture,
            "/kvatlas/page/files/": self.page.file,
            "/kvatlas": self.page.moved,
            "/kvatlas/": self.page.document,
        }

    def questions(self) -> dict[str, Callable[[Inbound], Awaitable[object]]]:
        """The gateway's POST paths beside the API."""
        return {"/kvatlas/inspect": self.inspector.inspect} | self.tenancy.questions()

    def talks(self) -> dict[str, Callable[[Request, Reply], Awaitable[None]]]:
        """Its paths for other gateways."""
        return {SNAPSHOT: self.snapshots.answer}


def _draining(config: Config) -> frozenset[str]:
    return frozenset(worker.name for worker in config.worker if worker.draining)


def _same_engine(one: WorkerConfig, other: WorkerConfig) -> bool:
    return msgspec.structs.replace(one, draining=other.draining) == other


def _recorder(config: Config, params: Params, limits: Limits, rules: Rules) -> Recorder | None:
    path, max_bytes = config.router.recording, config.router.recording_max_bytes
    return Recorder(path, max_bytes, params, limits, rules) if path else None


def _timing(config: Config) -> Timing:
    return msgspec.structs.replace(TIMING, timeout_s=config.gateway.health_timeout_s)


def _limits(config: Config) -> Limits:
    directory = config.directory
    return Limits(
        holders_max=directory.blocks_max,
        holders_per_publisher_max=directory.blocks_per_publisher_max,
    )


def _params(router: RouterConfig) -> Params:
    return Params(
        policy=router.policy,
        prefill_tokens_per_s=router.prefill_tokens_per_s,
        prefill_flops_per_s=_prior(router),
    )


def _prior(router: RouterConfig) -> float:
    """FLOP/s of the configured device; 0 where none is named."""
    if router.device:
        return prefill_flops_per_s(
            router.device, router.device_file, router.precision, router.devices
        )
    if router.device_file:
        raise ConfigError("router.device_file is given, but no router.device of it")
    return 0.0


def _secret(path: str) -> bytes:
    """The deployment's key secret; a fresh one where none is configured."""
    return read_secret(Path(path), "keys.secret_file") if path else secrets.token_bytes(32)
