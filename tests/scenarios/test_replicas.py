"""Several gateways of one cluster: who is there, who leads, what each must know of the others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from harness import FakeWorker, Product
from register_twin import Port, Twin
from tenants_kit import SECRET

from kvatlas.config import AgentConfig, Config, KeysConfig
from kvatlas.config_register import RegisterConfig
from kvatlas.config_tenants import TenantsConfig, digest_of
from kvatlas.core.forgetting import Floor
from kvatlas.core.keys import Keyring
from kvatlas.core.membership import Tenants
from kvatlas.core.register_values import Join, Member, Raise
from kvatlas.errors import ConfigError
from kvatlas.service.membership import Membership, identity_of
from kvatlas.service.replica import CONTROLLER, Replica, agent_told, fetch_tenants

NAME = "test"
BEAT_S, TTL_S = 0.05, 0.5


class Cluster:
    """Gateways in front of one engine that does nothing, over one register."""

    def __init__(self, folder: Path, worker: FakeWorker) -> None:
        self.twin = Twin()
        self.folder = folder
        self.worker = worker
        self.secret = folder / "secret"
        self.secret.write_bytes(SECRET)
        self.ports: dict[str, Port] = {}

    def product(self, name: str, *, tenants: Path | None = None, **more: Any) -> Product:
        self.ports[name] = self.twin.port()
        values = {"url": "unix:///nowhere", "name": NAME, "advertise": f"http://{name}:80"}
        register = RegisterConfig(**values | {"beat_s": BEAT_S, "ttl_s": TTL_S, "deadline_s": 0.2})
        if tenants is not None:
            receipts = str(self.folder / f"receipts {name}")
            more["tenants"] = TenantsConfig(file=str(tenants), receipts=receipts)
        return Product(
            [self.worker.config()],
            keys=KeysConfig(secret_file=str(self.secret)),
            register=register,
            port=self.ports[name],
            **more,
        )

    def ask(self, question: Any) -> Any:
        return self.twin.register.ask(question, _now_ms())

    def join_agent(self, name: str, told: bytes, url: str = "http://127.0.0.1:1") -> Any:
        agent = Member(name, "agent", "life", url, "1", told=told)
        identity = identity_of(Keyring(SECRET), NAME)
        return self.ask(Join(agent, identity, 60_000, _now_ms()))


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with FakeWorker("w") as worker:
        yield Cluster(tmp_path, worker)


async def members(product: Product) -> dict[str, Any]:
    return dict((await product.get("/kvatlas/members")).json())


async def leads(product: Product) -> bool:
    return (await members(product))["leads"] == [CONTROLLER]


def tenants_file(path: Path, *names: str) -> str:
    rows = [f'[[tenant]]\nname = "{name}"\nkeys = ["{digest_of("key " + name)}"]' for name in names]
    path.write_text("\n".join(rows) + "\n")
    return path.read_text()


async def test_one_leads_and_another_does_when_it_has_gone(cluster: Cluster) -> None:
    a, b = cluster.product("a"), cluster.product("b")
    async with a, b:
        for one, other in ((a, "b:80"), (b, "a:80")):
            await one.until_equal(lambda one=one: others(one), [other])
        await a.until(lambda: somebody(a, b))
        first, second = (a, b) if await leads(a) else (b, a)
        assert not await leads(second)
        await wait(first, lambda: first.assembly.ahead.core.leads)
        name = "a" if first is a else "b"
        cluster.ports[name].cut = True  # it does not hear that another one leads…
        await second.until(lambda: leads(second))
        assert not await leads(first)  # …and has stopped by its own clock
        assert any(flag.startswith("register") for flag in await first.flags())
        assert (await first.complete([1, 2, 3])).status == 200
        cluster.ports[name].cut = False
        await first.until_equal(lambda: others(first), ["b:80" if first is a else "a:80"])
        assert not await leads(first)


async def somebody(a: Product, b: Product) -> bool:
    return await leads(a) or await leads(b)


async def others(product: Product) -> list[str]:
    return [member["name"] for member in (await members(product))["others"]]


async def test_who_leaves_is_gone_at_once(cluster: Cluster) -> None:
    async with cluster.product("a") as a:
        async with cluster.product("b"):
            await a.until_equal(lambda: others(a), ["b:80"])
        assert cluster.ports["b"].closed
        await a.until_equal(lambda: others(a), [])


async def test_a_register_that_is_silent_or_lost_costs_no_request(cluster: Cluster) -> None:
    cluster.twin.silent = True
    async with cluster.product("a") as a:
        assert (await a.complete([1, 2, 3])).status == 200
        report = await members(a)
        assert report["standing"] == "alone"
        assert "does not answer" in report["problem"]
        cluster.twin.silent = False
        await a.until_equal(lambda: standing(a), "member")
        await a.until(lambda: leads(a))
        cluster.twin.lose()
        await a.until_equal(lambda: emptied(a), 1)
        assert (await a.complete([1, 2, 3])).status == 200
        await a.until(lambda: leads(a))
        assert not [flag for flag in await a.flags() if flag.startswith("register")]


async def standing(product: Product) -> str:
    return str((await members(product))["standing"])


async def emptied(product: Product) -> int:
    return int((await members(product))["emptied"])


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"identity": "another"}, "another cluster, with another secret"),
        ({"format": 99}, "format 99"),
    ],
)
async def test_strangers_are_told_why(cluster: Cluster, more: dict[str, Any], why: str) -> None:
    """Two clusters under one name; a version that keeps the register otherwise."""
    first = Member("x", "gateway", "life", "http://x", "1")
    values = {"identity": identity_of(Keyring(SECRET), NAME), "ttl_ms": 60_000} | more
    cluster.ask(Join(first, clock_ms=_now_ms(), **values))
    async with cluster.product("a") as a:
        await a.until_equal(lambda: standing(a), "refused")
        assert why in (await members(a))["problem"]
        assert not await leads(a)
        assert (await a.complete([1, 2, 3])).status == 200


async def test_agents_that_are_members_are_taken_up(cluster: Cluster) -> None:
    configured = [AgentConfig("fixed", "http://127.0.0.1:1", ("w",))]
    cluster.join_agent("n1", b'{"workers": ["w", "unknown"], "store": "s"}')
    cluster.join_agent("n2", b'{"workers": ["nobody"]}')
    cluster.join_agent("n3", b"[]")
    async with cluster.product("a") as a, cluster.product("b", agents=configured) as b:
        await a.until_equal(lambda: agents(a), {"n1": ["w"]})
        assert {f for f in await a.flags() if f.startswith("register")} == {
            "register:agent n2",
            "register:agent n3",
        }
        assert await agents(b) == {"fixed": ["w"]}  # what stands in the file counts


async def test_an_agent_that_shares_a_store_and_is_no_member_is_said(cluster: Cluster) -> None:
    configured = [AgentConfig("fixed", "http://127.0.0.1:1", ("w",), "s")]
    async with cluster.product("a", agents=configured) as a:
        await a.until_equal(lambda: standing(a), "member")
        assert "register:agent fixed" in await a.flags()
        cluster.join_agent("of another name", b'{"workers": ["w"], "store": "s"}')  # its URL
        await a.until_equal(lambda: others(a), ["of another name"])
        assert "register:agent fixed" not in await a.flags()


async def agents(product: Product) -> dict[str, list[str]]:
    told = (await product.get("/kvatlas/agents")).json()
    return {name: agent["workers"] for name, agent in told.items()}


async def test_a_floor_of_one_is_known_to_all_and_outlives_the_register(cluster: Cluster) -> None:
    paths = [cluster.folder / f"{name}.toml" for name in "ab"]
    for path in paths:
        tenants_file(path, "red")
    a, b = (cluster.product(n, tenants=p) for n, p in zip("ab", paths, strict=True))
    async with a, b:
        session = Floor("f" * 24, session="0" * 24)
        purger = a.assembly.tenancy.purger
        assert purger is not None
        purger._raise([session])

        def known() -> bool:
            other = b.assembly.tenancy.purger
            return other is not None and other.floors.has(session)

        await wait(b, known)
        cluster.twin.lose()
        await wait(b, lambda: any(isinstance(q, Raise) for q in cluster.twin.asked[-50:]))
        await wait(b, lambda: cluster.twin.register._floors.has(session))


async def wait(product: Product, met: Any) -> None:
    async def so() -> bool:
        return bool(met())

    await product.until(so)


async def test_tenants_are_the_same_everywhere(cluster: Cluster) -> None:
    first, second = cluster.folder / "a.toml", cluster.folder / "b.toml"
    text = tenants_file(first, "red")
    a = cluster.product("a", tenants=first)
    async with a:
        await wait(a, lambda: cluster.twin.register._tenants == text)
        b = cluster.product("b", tenants=second)
        await fetch_tenants(b.config, cluster.twin.port())
        assert second.read_text() == text
        async with b:
            changed = tenants_file(second, "red", "blue")
            b.assembly.tenancy.changed()
            await wait(a, lambda: first.read_text() == changed)
            # Both at once: the first counts, the other is kept beside its file, and said.
            cluster.ports["a"].cut = True
            late = tenants_file(first, "red", "green")
            a.assembly.tenancy.changed()
            early = tenants_file(second, "red", "yellow")
            b.assembly.tenancy.changed()
            await wait(b, lambda: cluster.twin.register._tenants == early)
            cluster.ports["a"].cut = False
            await wait(a, lambda: first.read_text() == early)
            aside = first.with_name("a.toml.overruled")
            assert aside.read_text() == late
            assert "register:tenants overruled" in await a.flags()
            aside.unlink()
            assert "register:tenants overruled" not in await a.flags()


async def test_who_has_the_same_tenants_already_overrules_nobody(cluster: Cluster) -> None:
    paths = [cluster.folder / f"{name}.toml" for name in "ab"]
    for path in paths:
        tenants_file(path, "red")
    a, b = (cluster.product(n, tenants=p) for n, p in zip("ab", paths, strict=True))
    async with a, b:
        for path in paths:
            await wait(b, path.with_name(path.name + ".register").exists)
        assert not list(cluster.folder.glob("*.overruled"))


async def test_who_begins_knows_what_was_forgotten_whatever_listeners_do() -> None:
    one, twin = alone()
    twin.register.ask(Raise((FLOOR,)), _now_ms())
    other = Member("b", "agent", "life", "http://b", "1", told=b"[" * 8000)
    join = Join(other, identity_of(Keyring(SECRET), NAME), 60_000, _now_ms())
    twin.register.ask(join, _now_ms())
    learnt: list[Floor] = []

    def at_fault(_: object) -> None:
        raise LookupError("a listener's")

    one.met, one.learnt = at_fault, learnt.extend
    await one.start(5.0)
    try:
        assert learnt == [FLOOR]
        (shown,) = one.report()["others"]
        assert "cannot be read" in shown["told"]
        with pytest.raises(ConfigError):
            agent_told(other, https=False)
    finally:
        await one.close()


async def test_a_fault_of_ours_in_asking_does_not_end_membership() -> None:
    one, twin = alone()
    answers = twin.register.ask
    twin.register.ask = None
    await one.start(5.0)
    try:
        assert "TypeError" in one.problems()["register"]
        twin.register.ask = answers
        one.change(one.core.me)
        for _ in range(10):
            await asyncio.sleep(0)
        assert not one.problems()
    finally:
        await one.close()


def test_a_change_that_nobody_has_looked_at_yet_is_not_written_over(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    red = tenants_file(path, "red")
    config = Config(
        worker=(),
        keys=KeysConfig(),
        register=RegisterConfig(url="unix:///nowhere", name=NAME),
        tenants=TenantsConfig(file=str(path)),
    )
    one = Replica(config, Twin().port(), Keyring(SECRET), met=lambda: None, learnt=lambda _: None)
    edits: list[str] = []
    one.members.edited = edits.append
    one.look()
    blue = tenants_file(path, "blue")
    one.members.tenants(Tenants(1, red))  # what was changed first is what all have now
    assert path.read_text() == blue
    one.look()
    assert edits == [red, blue]
    green = tenants_file(path, "green")
    one.members.tenants(Tenants(2, red))  # somebody else was first
    assert path.read_text() == red
    assert (tmp_path / "tenants.toml.overruled").read_text() == green
    one.look()
    assert edits == [red, blue]
    path.unlink()
    path.mkdir()  # where nothing can be written
    one.members.tenants(Tenants(3, blue))
    assert "tenants unwritten" in one.problems()
    path.rmdir()
    late = tenants_file(path, "late")  # it does not follow on what counts by now
    one.look()
    assert (path.read_text(), edits) == (blue, [red, blue])
    assert (tmp_path / "tenants.toml.overruled").read_text() == late
    assert "tenants unwritten" not in one.problems()


FLOOR = Floor("a" * 24, 3)


def alone() -> tuple[Membership, Twin]:
    """A member that has not begun, and its register."""
    twin = Twin()
    config = RegisterConfig(url="unix:///nowhere", name=NAME)
    me = Member("a", "agent", "life", "http://a", "1")
    return Membership(config, twin.port(), me, Keyring(SECRET)), twin


def _now_ms() -> int:
    return round(time.time() * 1000)
