"""Engines join, leave, die, come back and drain while requests run: who is asked, and who never."""

from __future__ import annotations

import asyncio
import math
from array import array
from collections import Counter

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvatlas.core.admission import Rules
from kvatlas.core.directory import Directory
from kvatlas.core.dispatch import Dispatcher
from kvatlas.core.events import BlockStored
from kvatlas.core.keys import Keyring
from kvatlas.core.layout import plain
from kvatlas.core.records import Publisher
from kvatlas.core.router import Params, Router
from kvatlas.errors import RequestError
from kvatlas.service.decision_log import DecisionLog
from kvatlas.service.steer import Inbound, Outcome, Route
from kvatlas.service.steering import Rank, Steering
from kvatlas.service.tokens import Prompt

BLOCK = 16
IDS = array("I", range(200)).tobytes()
NAMES = tuple(f"e{i}" for i in range(4))
IN_FLIGHT_MAX = 6
names = st.sampled_from(NAMES)


class OnePrompt:
    async def prompt(self, path: str, body: object) -> Prompt:
        return Prompt(tokens=IDS)


class Membership(RuleBasedStateMachine):
    """The twin: which engines there are, which of them are up and which drain, who runs where."""

    def __init__(self) -> None:
        super().__init__()
        ring = Keyring(b"a secret for the tests")
        self.now = 0.0
        self.loop = asyncio.new_event_loop()
        self.directory = Directory(ring)
        self.dispatcher = Dispatcher(
            self.directory,
            Router(Params(prefill_tokens_per_s=100.0)),
            ring,
            rules=Rules(in_flight_max=IN_FLIGHT_MAX),
        )
        self.steering = Steering(
            dispatcher=self.dispatcher,
            log=DecisionLog(100),
            tokens=OnePrompt(),
            clock=lambda: self.now,
        )
        self.there: dict[str, int] = {}  # name → which life of it
        self.up: set[str] = set()
        self.lives = self.asked = 0
        self.running: dict[str, tuple[Route, str, int]] = {}

    @rule(name=names)
    def join(self, name: str) -> None:
        if name in self.there:
            return
        self.lives += 1
        self.there[name] = self.lives
        self.up.add(name)
        rank = Rank(Publisher(name), f"http://{name}", {"m": ""}, plain(BLOCK), b"1" * 32)
        self.steering.add(rank)

    @rule(name=names)
    def leave(self, name: str) -> None:
        self.there.pop(name, None)
        self.up.discard(name)
        self.steering.remove(Publisher(name))

    @rule(name=names, up=st.booleans())
    def health(self, name: str, up: bool) -> None:
        self.steering.set_up(Publisher(name), up)
        if name in self.there:
            (self.up.add if up else self.up.discard)(name)

    @rule(which=st.sets(names))
    def drain(self, which: set[str]) -> None:
        self.steering.draining = frozenset(which)

    @rule(name=names)
    def holds_the_prompt(self, name: str) -> None:
        if name in self.there:
            stored = BlockStored(tuple(range(12)), None, IDS[: 12 * BLOCK * 4], BLOCK)
            self.directory.apply(Publisher(name), [stored])

    @rule(seconds=st.floats(0.01, 5.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    def _chosen(self, request: Inbound) -> Route | RequestError:
        try:
            return self.loop.run_until_complete(self.steering.choose(request))
        except RequestError as error:
            return error

    def teardown(self) -> None:
        self.loop.close()

    @rule(slo_s=st.sampled_from([0.5, 5.0, math.inf]))
    def ask(self, slo_s: float) -> None:
        self.asked += 1
        request = Inbound(f"r{self.asked}", "/v1/completions", {"model": "m"}, {}, ttft_slo_s=slo_s)
        open_to = set(self.there) - self.steering.draining
        route = self._chosen(request)
        if isinstance(route, RequestError):
            expected = {
                "slo_unreachable": slo_s < math.inf,
                "in_flight_max": len(self.running) == IN_FLIGHT_MAX,
                "no_engine": not open_to,
            }
            assert expected[route.code]
            return
        targets = [target.worker for target in route.targets]
        assert set(targets) == (open_to & self.up or open_to)
        assert len(self.running) < IN_FLIGHT_MAX
        self.steering.sent(route, route.targets[0])
        self.running[route.id] = route, targets[0], self.there[targets[0]]

    @precondition(lambda self: self.running)
    @rule(data=st.data(), ok=st.booleans())
    def finish(self, data: st.DataObject, ok: bool) -> None:
        id = data.draw(st.sampled_from(sorted(self.running)))
        route, _, _ = self.running.pop(id)
        if ok:
            self.steering.first_token(route, 0.1)
        status = 200 if ok else 502
        self.steering.finished(route, Outcome(route.targets[0], status, 200, 0, 5, 0.1, 0.2))

    @invariant()
    def every_request_is_in_flight_where_it_runs(self) -> None:
        lives = {(name, life) for name, life in self.there.items()}
        counts = Counter(name for _, name, life in self.running.values() if (name, life) in lives)
        found = {p.worker: count for p, count in self.steering.in_flight().items() if count}
        assert found == dict(counts)

    @invariant()
    def ready_is_that_somebody_may_be_asked(self) -> None:
        assert self.steering.health().ready == bool(self.up - self.steering.draining)


TestMembership = Membership.TestCase
