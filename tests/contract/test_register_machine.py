"""Whatever is asked in whatever order: the register in Valkey and its twin say the same."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from itertools import count

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)
from register_kit import Both, join, member, opened
from stores_kit import start_valkey

from kvatlas.core import register, register_values
from kvatlas.core import register_values as words
from kvatlas.core.forgetting import Floor
from kvatlas.core.register_values import Answer, Member, Question, Record
from kvatlas.service import register_calls

CLUSTERS = count()
TENANTS = ("a" * 24, "b" * 24, "é" * 24)
SESSIONS = ("s", "t", "s.t")
ENDS = ("", ".", ".1-2.s", ".x.s", ".01.s", "..s")
names = st.sampled_from("abcd")
lives = st.sampled_from("112")
rarely = st.sampled_from([False] * 5 + [True])
stores = st.sampled_from("xxxyz")
tenants = st.sampled_from(TENANTS)
epochs = st.sampled_from([0, 1, 2, 9, 10, 11])
back = st.integers(0, 5)  # how long ago a revision or generation was told
keys = st.sampled_from([b"key-%d\0\xff" % i for i in range(12)])
ttls = st.sampled_from([2, 60_000, 60_000, 60_000])
lease_ttls = st.sampled_from([1, 3, 10, 60_000])
floors = st.one_of(
    st.builds(Floor, tenants, epochs),
    st.builds(Floor, tenants, epochs, st.sampled_from(SESSIONS)),
    st.sampled_from([Floor("short", 5), Floor(TENANTS[0] + ".1", 20), Floor("", 3, "s")]),
)
owners = st.one_of(
    st.builds("{}.{}".format, tenants, epochs),
    st.builds("{}.{}.{}".format, tenants, epochs, st.sampled_from(SESSIONS)),
    st.sampled_from(
        ["", "plain", "short.1.s", "a" * 25 + ".1.s", *(TENANTS[0] + end for end in ENDS)]
    ),
)
records = st.builds(
    Record,
    keys,
    owners,
    st.integers(0, 4),
    st.sampled_from([b"", b"\0\xff\x80", b"x" * 30, b"x" * 31]),
)


def told(numbers: list[int], back: int) -> int:
    """One of those that were told."""
    return numbers[-1 - back % len(numbers)]


class Machine(RuleBasedStateMachine):
    """Small limits, so that all of them are met."""

    port = 0

    @initialize()
    def begin(self) -> None:
        """A cluster of its own."""
        self.loop = asyncio.new_event_loop()
        self.both = Both(opened(f"valkey://127.0.0.1:{self.port}", f"c{next(CLUSTERS)}"))
        self.revisions = [0, 1]  # that were told, of whatever
        self.generations: dict[str, int] = {}
        self.there: dict[str, str] = {}  # names, and which life of each has joined last
        self.holders: dict[str, str] = {}  # what, and who
        for store in "xyz":
            self.ask(words.AskUsage(store))
        for name in "ab":
            self.ask(join(member(name)))

    def teardown(self) -> None:
        """At last, all that is there."""
        if hasattr(self, "loop"):
            for store in "xyz":
                self.ask(words.AskUsage(store))
            self.ask(words.AskFloors())
            self.ask(join(member("last")))
            self.loop.run_until_complete(self.both.real.close())
            self.loop.close()

    def ask(self, question: Question) -> Answer:
        said = self.loop.run_until_complete(self.both.ask(question))
        match said:
            case words.Joined() if isinstance(question, words.Join):
                self.there[question.member.name] = question.member.life
                self.revisions += [said.members_rev, said.floors_rev, said.tenants_rev]
            case words.Held() if isinstance(question, words.Acquire):
                self.holders[question.what] = question.name
                self.revisions.append(said.token)
            case words.ToldUsage() if isinstance(question, words.AskUsage):
                self.generations[question.store] = said.generation
            case words.Done() if isinstance(question, words.Expire):
                self.generations[question.store] = said.revision
        return said

    @rule(
        one=st.builds(member, names, lives, url=st.sampled_from("uv"), draining=st.booleans()),
        ttl_ms=ttls,
        known=back,
        odd=st.sampled_from([{}, {}, {}, {"clock_ms": 10**12}, {"format": 2}]),
    )
    def join(self, one: Member, ttl_ms: int, known: int, odd: dict[str, int]) -> None:
        self.ask(join(one, ttl_ms=ttl_ms, known=told(self.revisions, known), **odd))

    def life(self, name: str, other: bool) -> str:
        """Of a member that has joined, or not."""
        return "other" if other else self.there.get(name, "1")

    @rule(name=names, other=rarely, sure=rarely)
    def leave(self, name: str, other: bool, sure: bool) -> None:
        if sure:
            self.ask(words.Leave(name, self.life(name, other)))

    @rule(what=st.sampled_from("lmmn"), name=names, other=rarely, ttl_ms=lease_ttls, above=back)
    def acquire(self, what: str, name: str, other: bool, ttl_ms: int, above: int) -> None:
        life = self.life(name, other)
        self.ask(words.Acquire(what, name, life, ttl_ms, told(self.revisions, above)))

    @rule(what=st.sampled_from("lmn"), other=rarely)
    def release(self, what: str, other: bool) -> None:
        name = self.holders.get(what, "a")
        self.ask(words.Release(what, name, self.life(name, other)))

    @rule(some=st.lists(floors, max_size=3), sure=rarely)
    def floors_rise(self, some: list[Floor], sure: bool) -> None:
        if sure:
            self.ask(words.Raise(tuple(some)))

    @rule(known=back)
    def floors_are_told(self, known: int) -> None:
        self.ask(words.AskFloors(told(self.revisions, known)))

    @rule(text=st.sampled_from(["", "[a]", "ü\0"]), expected=back, more=st.integers(-1, 1))
    def tenants(self, text: str, expected: int, more: int) -> None:
        revision = told(self.revisions, expected)
        self.ask(words.PutTenants(text, revision, max(0, revision + more) * abs(more)))
        self.ask(words.AskTenants(revision))

    @rule(
        store=stores,
        some=st.lists(records, min_size=1, max_size=4),
        ttl_ms=st.sampled_from([0, 1, 60_000]),
    )
    def commit(self, store: str, some: list[Record], ttl_ms: int) -> None:
        quota = {TENANTS[0]: 12, "plain": 4}
        generation = self.generations.get(store, 1)
        self.ask(words.Commit(store, generation, tuple(some), ttl_ms, quota))
        self.ask(words.AskRecords(store, tuple(record.key for record in some)))

    @rule(store=stores, some=st.lists(keys, max_size=6))
    def look(self, store: str, some: list[bytes]) -> None:
        self.ask(words.AskRecords(store, tuple(some)))
        self.ask(words.AskUsage(store))

    @rule(store=stores, some=st.lists(keys, max_size=3))
    def withdraw(self, store: str, some: list[bytes]) -> None:
        self.ask(words.Withdraw(store, tuple(some)))

    @rule(store=stores, more=st.sampled_from([-1, 0, 3]), sure=rarely)
    def expire(self, store: str, more: int, sure: bool) -> None:
        if sure:
            self.ask(words.Expire(store, self.generations.get(store, 1) + more))

    @rule(store=stores, floor=floors)
    def forget(self, store: str, floor: Floor) -> None:
        self.ask(words.ForgetOwner(store, floor))
        self.ask(words.AskUsage(store))

    @rule()
    def time_passes(self) -> None:
        time.sleep(0.003)  # by the server's clock, which is not ours to turn


@pytest.fixture
def port(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[int]:
    """Of a server; limits are small."""
    small = {"MEMBERS_MAX": 3, "LEASES_MAX": 2, "STORES_MAX": 2, "RECORDS_MAX": 8}
    for name, value in (small | {"COMMITS_MAX": 4, "RECORD_BYTES_MAX": 30}).items():
        monkeypatch.setattr(register_values, name, value)
    monkeypatch.setattr(register, "COMMITS_MAX", 4)
    for module in (register, register_calls):
        monkeypatch.setattr(module, "FLOORS_MAX", 5)
    made = start_valkey(tmp_path_factory.mktemp("valkey"))
    yield made.port
    made.kill()


def play(port: int, examples: int, steps: int) -> None:
    """So many worlds, each with so many questions."""
    chosen = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(type("Machine", (Machine,), {"port": port}), settings=chosen)


def test_both_say_the_same(port: int) -> None:
    play(port, examples=20, steps=50)


@pytest.mark.long
def test_both_say_the_same_for_long(port: int) -> None:
    play(port, examples=1500, steps=100)
