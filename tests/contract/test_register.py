"""The register in Valkey answers as its twin does."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Iterator
from itertools import count
from pathlib import Path

import pytest
from register_cluster import Cluster
from register_kit import DEADLINE_S, Both, join, member, opened, persistent
from stores_kit import Server, nothing_left, start_valkey

from kvatlas.core import register_values as words
from kvatlas.core.forgetting import Floor
from kvatlas.core.register_values import No, Record, Refused
from kvatlas.errors import RegisterError

NAMES = count()
TENANT = "a" * 24
OTHER = "b" * 24


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = start_valkey(tmp_path_factory.mktemp("valkey"))
    yield made
    made.kill()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("cluster"))
    yield made
    made.close()


@pytest.fixture(params=["single", "cluster", "embedded"])
def url(request: pytest.FixtureRequest) -> str:
    if request.param == "embedded":
        return "embedded"
    if request.param == "cluster":
        return str(request.getfixturevalue("cluster").url)
    return f"valkey://127.0.0.1:{request.getfixturevalue('server').port}"


@pytest.fixture
async def both(url: str, tmp_path: Path) -> AsyncIterator[Both]:
    """Each test has a name of its own, so another slot."""
    with nothing_left():
        real = opened(url, f"t{next(NAMES)}", folder=str(tmp_path / "register"))
        yield Both(real)
        await real.close()


async def generation(both: Both) -> int:
    """Of the store "st"."""
    told = await both.ask(words.AskUsage("st"))
    assert isinstance(told, words.ToldUsage)
    return told.generation


async def test_members_come_are_replaced_and_go(both: Both) -> None:
    told = await both.ask(join(member()))
    assert isinstance(told, words.Joined)
    assert told.members == (member(),)
    again = await both.ask(join(member(), known=told.members_rev))
    assert isinstance(again, words.Joined)
    assert again.members is None
    assert again.created == told.created
    assert await both.ask(join(member("b", told=b"\0\xff"))) != again
    assert await both.ask(join(member(life="2"))) != again  # who listens there has followed
    taken = Refused(No.NAME, "http://a")
    assert await both.ask(join(member(life="1"))) == taken  # and does not come back
    assert await both.ask(join(member(life="3", url="http://c"))) == taken
    assert await both.ask(words.Leave("a", "1")) == Refused(No.STRANGER)
    assert isinstance(await both.ask(words.Leave("a", "2")), words.Done)
    last = await both.ask(join(member("c"), ttl_ms=1))
    assert isinstance(last, words.Joined)
    await asyncio.sleep(0.01)  # its life of a millisecond, by the server's clock
    last = await both.ask(join(member("b", told=b"\0\xff")))
    assert isinstance(last, words.Joined)
    assert last.members == (member("b", told=b"\0\xff"),)


async def test_strangers_are_refused(both: Both) -> None:
    await both.ask(join(member()))
    ask = join(member("b"))
    apart = words.Join(ask.member, "another", ask.ttl_ms, ask.clock_ms)
    assert await both.ask(apart) == Refused(No.CLUSTER)
    assert await both.ask(join(member("b"), format=2)) == Refused(No.FORMAT, "1")
    for minutes in (5, -5):
        late = await both.ask(join(member("b"), clock_ms=ask.clock_ms + minutes * 60_000))
        assert isinstance(late, Refused)
        assert late.why is No.CLOCK
    assert await both.ask(words.Acquire("x", "b", "1", 10)) == Refused(No.STRANGER)


async def test_leases_have_one_holder_and_tokens_rise(both: Both) -> None:
    await both.ask(join(member()))
    await both.ask(join(member("b")))
    assert await both.ask(words.Acquire("x", "a", "1", 60_000)) == Refused(No.HELD)
    await asyncio.sleep(0.45)  # by the server's clock, so that no lease of before can be left
    first = await both.ask(words.Acquire("y", "a", "1", 400))
    assert await both.ask(words.Acquire("y", "b", "1", 400)) == Refused(No.HELD, "a")
    assert await both.ask(words.Acquire("y", "a", "1", 400)) == first
    assert isinstance(first, words.Held)
    risen = await both.ask(words.Acquire("y", "a", "1", 400, above=first.token + 7))
    assert risen == words.Held("y", first.token + 8)
    one = await both.ask(words.Acquire("x", "a", "1", 5))
    assert isinstance(one, words.Held)
    await asyncio.sleep(0.01)
    two = await both.ask(words.Acquire("x", "b", "1", 5, above=one.token + 10**6))
    assert isinstance(two, words.Held)
    assert two.token == one.token + 10**6 + 1
    assert await both.ask(words.Release("x", "a", "1")) == Refused(No.STRANGER)
    assert await both.ask(words.Release("x", "b", "1")) == words.Done()
    await both.ask(words.Acquire("x", "a", "1", 5))
    await both.ask(words.Leave("a", "1"))
    assert isinstance(await both.ask(words.Acquire("x", "b", "1", 5)), words.Held)


async def test_floors_only_rise(both: Both) -> None:
    await both.ask(words.Raise((Floor(TENANT, 3), Floor(TENANT, 0, "s"), Floor(OTHER, 2**53 - 1))))
    await both.ask(words.Raise((Floor(TENANT, 2), Floor(TENANT, 4), Floor(TENANT, 3))))
    told = await both.ask(words.AskFloors())
    assert isinstance(told, words.ToldFloors)
    assert told.floors == (
        Floor(TENANT, 4),
        Floor(TENANT, 0, "s"),
        Floor(OTHER, 2**53 - 1),
    )
    told = await both.ask(words.AskFloors(told.revision))
    assert isinstance(told, words.ToldFloors)
    assert told.floors is None


async def test_tenants_are_replaced_by_who_knows_them(both: Both) -> None:
    await both.ask(words.PutTenants("café\0 [a]", expected=0))
    told = await both.ask(words.AskTenants())
    assert isinstance(told, words.ToldTenants)
    assert told.text == "café\0 [a]"
    assert await both.ask(words.PutTenants("b", expected=1)) == Refused(
        No.STALE, str(told.revision)
    )
    await both.ask(words.PutTenants("b", expected=told.revision))
    await both.ask(words.PutTenants("older", offered=told.revision))
    await both.ask(words.PutTenants("newer", offered=told.revision + 10**9))
    await both.ask(words.AskTenants())


def records(count: int, owner: str, size: int = 10) -> tuple[Record, ...]:
    return tuple(
        Record(b"%s-%d\0\xff" % (owner.encode(), i), owner, size, b"\x80" * 300)
        for i in range(count)
    )


async def test_records_count_until_their_end_their_floor_or_their_generation(both: Both) -> None:
    known = await generation(both)
    mine, theirs = records(300, f"{TENANT}.1.s"), records(5, f"{OTHER}.10")
    for at in (0, 200):
        await both.ask(words.Commit("st", known, mine[at : at + 200], ttl_ms=60_000))
    await both.ask(words.Commit("st", known, theirs, 1))
    await both.ask(words.Commit("st", known + 1, theirs, 1))
    keys = (*(r.key for r in (*mine[:3], *theirs)), b"none")
    await asyncio.sleep(0.01)
    told = await both.ask(words.AskRecords("st", keys))
    assert isinstance(told, words.ToldRecords)
    assert told.data == (mine[0].data,) * 3 + (None,) * 6
    await both.ask(words.Commit("st", known, mine[1:2], ttl_ms=1))  # which it has for longer
    await asyncio.sleep(0.01)
    await both.ask(words.AskRecords("st", keys))
    await both.ask(words.Commit("st", known, theirs))
    await both.ask(words.Commit("st", known, mine[:1]))  # without an end from now on
    await both.ask(words.Raise((Floor(TENANT, 0, "s"),)))
    await both.ask(words.AskRecords("st", keys))
    await both.ask(words.Commit("st", known, records(1, f"{TENANT}.7.s")))
    for _ in range(3):
        await both.ask(words.ForgetOwner("st", Floor(TENANT, 0, "s")))
        await both.ask(words.AskUsage("st"))
    await both.ask(words.ForgetOwner("st", Floor(OTHER, 10)))
    await both.ask(words.ForgetOwner("st", Floor(OTHER, 11)))
    await both.ask(words.Withdraw("st", keys))
    assert await both.ask(words.Expire("st", known)) == words.Done(known + 1)
    assert await both.ask(words.Expire("st", known)) == words.Done(known + 1)
    assert await both.ask(words.Expire("st", known + 8)) == words.Done(known + 9)
    await both.ask(words.AskUsage("st"))
    await both.ask(words.AskUsage("another"))


async def test_quotas_are_of_tenants(both: Both) -> None:
    known = await generation(both)
    quota = {TENANT: 25}
    one, two, three = (records(1, f"{TENANT}.1.{s}") for s in "xyz")
    said = await both.ask(words.Commit("st", known, one + two + three + one, quota_bytes=quota))
    assert isinstance(said, words.Committed)
    assert said.refused == (None, None, No.QUOTA, None)
    await both.ask(words.Withdraw("st", (one[0].key,)))
    await both.ask(words.Commit("st", known, three, quota_bytes=quota))
    await both.ask(
        words.Commit("st", known, (Record(b"k", "plain", 0, b""), Record(b"l", "", 3, b"x")))
    )
    await both.ask(words.Withdraw("st", (b"k", b"l")))
    await both.ask(words.AskUsage("st"))


async def test_what_is_too_much_is_refused(both: Both) -> None:
    known = await generation(both)
    for question in (
        join(member("a" * 129)),
        words.AskRecords("st", (b"x",) * 1025),
        words.Commit("st", known, records(1, "a\0b")),
        words.Commit("st", known, records(257, "a")),
        words.Raise((Floor(TENANT, 2**53),)),
        words.Expire("st", -1),
        words.PutTenants("x" * (8 << 20) + "x"),
    ):
        said = await both.ask(question)
        assert isinstance(said, Refused)
        assert said.why is No.FULL
        assert said.about
    large = await both.ask(words.Commit("st", known, (Record(b"k", "o", 1, b"x" * 1025),)))
    assert isinstance(large, words.Committed)
    assert large.refused == (No.FULL,)


# -- a cluster that fails over --------------------------------------------------------------------

BACK_S = 8.0  # nodes here are given up after a second; measured: see docs/decisions/017-register.md


async def test_after_a_primary_was_killed_its_replica_answers(cluster: Cluster) -> None:
    cluster.whole()
    with nothing_left():
        both = Both(opened(cluster.url, "killed"))
        await both.ask(join(member()))
        await both.ask(words.Raise((Floor(TENANT, 3),)))
        known = await generation(both)
        await both.ask(words.Commit("st", known, records(20, f"{TENANT}.7")))
        primary = cluster.primary("killed")
        cluster.copied(primary)
        cluster.servers[primary].kill()
        began = time.monotonic()
        told = await persistent(both.real, words.AskFloors())
        assert time.monotonic() - began < BACK_S
        assert isinstance(told, words.ToldFloors)
        assert told.floors == (Floor(TENANT, 3),)
        await both.ask(words.AskUsage("st"))  # as the twin has it
        await both.ask(join(member("b")))
        assert cluster.primary("killed") != primary
        cluster.start(primary)
        cluster.whole()
        await both.ask(words.AskFloors())
        await both.real.close()


async def test_a_primary_that_stands_still_is_left(cluster: Cluster) -> None:
    cluster.whole()
    with nothing_left():
        both = Both(opened(cluster.url, "frozen"))
        await both.ask(words.Raise((Floor(TENANT, 3),)))
        primary = cluster.primary("frozen")
        cluster.copied(primary)
        process = cluster.servers[primary].process
        process.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(RegisterError) as caught:
            await both.real.ask(words.AskFloors(), 0.2)
        assert caught.value.reason == "late"
        await persistent(both.real, words.AskFloors())
        assert time.monotonic() - began < BACK_S
        await both.ask(words.Raise((Floor(OTHER, 4),)))
        process.send_signal(signal.SIGCONT)
        cluster.whole()
        await both.ask(words.AskFloors())
        await both.real.close()


async def test_a_planned_handover_is_followed(cluster: Cluster) -> None:
    cluster.whole()
    with nothing_left():
        both = Both(opened(cluster.url, "planned"))
        await both.ask(words.Raise((Floor(TENANT, 3),)))
        primary = cluster.primary("planned")
        cluster.ask(cluster.replica(primary), "CLUSTER FAILOVER")
        for before in range(4, 400):
            await both.ask(words.Raise((Floor(TENANT, before),)))
            if cluster.primary("planned") != primary:
                break
        assert cluster.primary("planned") != primary
        await both.ask(words.AskFloors())
        await both.real.close()


async def test_names_say_which_kind_of_server_is_meant(cluster: Cluster, server: Server) -> None:
    single = opened(f"valkey://127.0.0.1:{cluster.ports[0]}")
    with pytest.raises(RegisterError, match="write valkey-cluster://") as caught:
        await single.ask(words.AskFloors(), DEADLINE_S)
    assert caught.value.reason == "unfit"
    await single.close()
    many = opened(f"valkey-cluster://127.0.0.1:{server.port}")
    with pytest.raises(RegisterError, match="write valkey:// for a single") as caught:
        await many.ask(words.AskFloors(), DEADLINE_S)
    assert caught.value.reason == "unfit"
    await many.close()


async def test_a_cluster_of_which_nobody_is_there(unused_tcp_port: int) -> None:
    register = opened(f"valkey-cluster://127.0.0.1:{unused_tcp_port}")
    with nothing_left(), pytest.raises(RegisterError) as caught:
        await register.ask(words.AskFloors(), DEADLINE_S)
    assert caught.value.reason == "gone"
    await register.close()
