"""A pair whose hand-offs become slow without any counter that says so: the next decision avoids it,
and it is chosen again once it is well. The whole deciding side, in virtual time."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Mapping
from typing import Any

import pytest

from kvatlas.config import Role
from kvatlas.core.compat import Member
from kvatlas.core.directory import Directory
from kvatlas.core.dispatch import Dispatcher
from kvatlas.core.keys import Fingerprint, Keyring
from kvatlas.core.layout import plain
from kvatlas.core.records import Publisher
from kvatlas.core.router import Params, Router
from kvatlas.core.ways import IN_A_ROW, KNOWN, TRIAL_S
from kvatlas.service.decision_log import DecisionLog, explain
from kvatlas.service.steer import Inbound, Outcome
from kvatlas.service.steering import Rank, Steering
from kvatlas.service.tokens import Prompt

BLOCK = 16
GOOD_S, BAD_S = 0.03, 2.0
ROLES: dict[str, Role] = {"p": "prefill", "d": "decode", "e": "decode", "c": "combined"}


class Tokens:
    """Of a prompt that is the same each time, and cached nowhere."""

    async def prompt(self, path: str, body: Mapping[str, Any]) -> Prompt:
        return Prompt(tokens=array("I", range(100)).tobytes())


@dataclasses.dataclass
class Stand:
    """One prefill half, two decode halves, and whoever of ``names`` else."""

    names: str = "pde"
    now: float = 0.0
    requests: int = 0
    takes_s: dict[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        ring = Keyring(b"a secret for the tests")
        self.log = DecisionLog(100)
        router = Router(Params(prefill_tokens_per_s=1000))
        self.steering = Steering(
            dispatcher=Dispatcher(Directory(ring), router, ring),
            log=self.log,
            tokens=Tokens(),
            clock=lambda: self.now,
        )
        member = Member(("m",), Fingerprint("m"), plain(BLOCK))
        fingerprint = member.fingerprint.digest()
        for name in self.names:
            publisher = Publisher(name)
            self.steering.add(
                Rank(
                    publisher,
                    f"http://{name}",
                    {"m": ""},
                    member.layout,
                    fingerprint,
                    member=member,
                    role=ROLES[name],
                )
            )
            self.steering.set_up(publisher, True)

    async def ask(self) -> str:
        """One request through both halves, or one engine: who decoded it."""
        self.requests += 1
        self.now += 0.1
        request = Inbound(f"r{self.requests}", "/v1/completions", {"model": "m", "prompt": "x"}, {})
        route = await self.steering.choose(request)
        first = route.targets[0]
        self.steering.sent(route, first)
        if first.half != "prefill":
            self.steering.first_token(route, 0.1)
            self.steering.finished(route, Outcome(first, 200))
            return first.worker
        self.steering.prefilled(route, first, 0, 0.05)
        second = self.steering.decoders(route, first)[0]
        self.steering.sent(route, second)
        took_s = self.takes_s.get(second.worker, GOOD_S)
        self.now += took_s
        self.steering.first_token(route, took_s)
        self.steering.finished(route, Outcome(second, 200, prefilled_by=first.worker, ttft_s=1.0))
        return second.worker

    def degraded(self) -> set[str]:
        return set(self.steering.transports.degraded())


async def test_the_next_decision_avoids_a_pair_that_fell_until_it_is_well_again() -> None:
    stand = Stand(takes_s={"e": 2 * GOOD_S})
    for _ in range(4 * KNOWN):
        last_one = await stand.ask()
    favourite, other = "d", "e"
    assert last_one == favourite
    rows = {row.decode: row for row in stand.steering.transports.statuses()}
    assert rows[favourite].hand_offs > KNOWN
    assert rows[favourite].state == "ok"

    stand.takes_s[favourite] = BAD_S
    for _ in range(IN_A_ROW):
        assert stand.degraded() == set()
        assert await stand.ask() == favourite
    assert stand.degraded() == {f"p>{favourite}"}
    for _ in range(20):
        assert await stand.ask() == other

    stand.now += TRIAL_S
    assert await stand.ask() == favourite, "once, to see"
    assert await stand.ask() == other
    last = stand.log.last()
    assert last is not None
    assert f"MB handed over by p: first token {2 * GOOD_S:.3f} s later, foreseen" in explain(last)

    del stand.takes_s[favourite]
    stand.now += 2 * TRIAL_S
    for _ in range(IN_A_ROW):
        assert stand.degraded() == {f"p>{favourite}"}
        assert await stand.ask() == favourite
    assert stand.degraded() == set()
    assert await stand.ask() == favourite


async def test_where_all_pairs_are_bad_one_engine_does_it_all() -> None:
    stand = Stand("pdc")
    stand.steering.set_up(Publisher("c"), False)
    for _ in range(2 * KNOWN):
        assert await stand.ask() == "d"
    stand.takes_s["d"] = BAD_S
    for _ in range(IN_A_ROW):
        assert await stand.ask() == "d"
    stand.steering.set_up(Publisher("c"), True)
    assert await stand.ask() == "c"
    last = stand.log.last()
    assert last is not None
    (line,) = [text for text in explain(last).splitlines() if text.startswith("  p ")]
    assert float(line.partition("hand-off ")[2].split(" ")[0]) > BAD_S / 2


async def test_a_half_that_is_no_longer_configured_is_forgotten_in_the_middle_of_it() -> None:
    stand = Stand()
    request = Inbound("r", "/v1/completions", {"model": "m", "prompt": "x"}, {})
    route = await stand.steering.choose(request)
    stand.steering.sent(route, route.targets[0])
    stand.steering.prefilled(route, route.targets[0], 0, 0.05)
    second = stand.steering.decoders(route, route.targets[0])[0]
    stand.steering.sent(route, second)
    stand.steering.remove(Publisher(second.worker))
    stand.steering.first_token(route, 0.1)
    stand.steering.finished(route, Outcome(second, 200, prefilled_by="p"))
    assert list(stand.steering.transports.statuses()) == []


async def test_a_decode_half_that_refuses_is_no_hand_off() -> None:
    stand = Stand()
    request = Inbound("r", "/v1/completions", {"model": "m", "prompt": "x"}, {})
    route = await stand.steering.choose(request)
    stand.steering.sent(route, route.targets[0])
    stand.steering.prefilled(route, route.targets[0], 0, 0.05)
    one, two = stand.steering.decoders(route, route.targets[0])
    stand.steering.sent(route, one)
    stand.now += BAD_S
    stand.steering.sent(route, two)
    stand.now += GOOD_S
    stand.steering.first_token(route, 0.1)
    stand.steering.finished(route, Outcome(two, 200, prefilled_by="p"))
    rows = {row.decode: row for row in stand.steering.transports.statuses()}
    assert (rows[one.worker].hand_offs, rows[two.worker].hand_offs) == (0, 1)
    entry = stand.log.get("r")
    assert entry is not None
    assert entry.hand_off is not None
    assert entry.hand_off.took_s == pytest.approx(GOOD_S)


async def test_the_ladder_goes_by_measured_prices_only() -> None:
    """Until then a plan has its price, by which it is compared, and nobody is left for it."""
    stand = Stand("pdc")

    async def routed() -> tuple[list[float], list[float], float]:
        stand.requests += 1
        id = f"r{stand.requests}"
        body: dict[str, object] = {"model": "m", "prompt": "x"}
        request = Inbound(id, "/v1/completions", body, {}, deadline_s=4.0)
        route = await stand.steering.choose(request)
        entry = stand.log.get(id)
        assert entry is not None
        first = route.targets[0]
        stand.steering.sent(route, first)
        stand.now += 0.2
        if first.half:
            stand.steering.prefilled(route, first, 0, 0.2)
            (second,) = stand.steering.decoders(route, first)
            assert bool(second.ttft_s) == bool(first.ttft_s)
            first = second
        else:
            stand.steering.first_token(route, 0.2)
        stand.steering.finished(route, Outcome(first, 200, ttft_s=0.2))
        prices = [plan.price.ttft_s for plan in entry.decision.plans]
        return [target.ttft_s for target in route.targets], prices, route.alone_s

    told, prices, alone_s = await routed()
    assert all(prices)
    assert (told, alone_s) == ([0.0, 0.0], 0.0)
    for _ in range(30):
        told, prices, alone_s = await routed()
    assert told == prices
    assert 0 < alone_s < 4.0
