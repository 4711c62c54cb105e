"""A gateway purges: who is asked, who is missing, and what its receipt is worth."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvatlas.config import AgentConfig
from kvatlas.config_tenants import TenantsConfig, digest_of
from kvatlas.core.agent_values import Forget
from kvatlas.core.forgetting import Floor
from kvatlas.core.keys import Keyring
from kvatlas.core.tenancy import epoch_at, session_of, tag_of
from kvatlas.core.units import Part, name_of
from kvatlas.dataplane import records
from kvatlas.dataplane.tiers.base import Report
from kvatlas.errors import ConfigError, EngineError, RequestError
from kvatlas.service.agent_front import AgentDescription
from kvatlas.service.agent_orders import PROOF
from kvatlas.service.agent_purge import PURGE, Gone, Order, Purged, Purges, _Meant
from kvatlas.service.agents import Agents, Node
from kvatlas.service.http_client import HttpClient
from kvatlas.service.purge import Purger, Wanted
from kvatlas.service.purge_parts import Here
from kvatlas.service.receipts import Receipt, Receipts, verify
from kvatlas.service.steer import Inbound
from kvatlas.service.tenants import Tenants

RING = Keyring(b"a secret of sixteen bytes or more")
RED = tag_of(RING, "red")
NOW = 1_000_000.0
FILE = '[[tenant]]\nname = "red"\nkeys = ["{key}"]\nepoch = {epoch}\nshare = "{share}"\n'


class FakeAgents:
    """Agents that have so many units of whatever is purged."""

    def __init__(self, *names: str, store: str = "") -> None:
        self.nodes: dict[str, Node] = {}
        self.orders: list[tuple[str, Order]] = []
        self.left = 0
        for name in names:
            node = Node(AgentConfig(name=name, url=f"http://{name}", workers=("w",), store=store))
            self.nodes[name] = node
            self.come(name)

    def come(self, name: str, life: str = "1") -> None:
        node = self.nodes[name]
        node.up, node.told = True, AgentDescription(f"{name} {life}", "", "")

    def go(self, name: str) -> None:
        self.nodes[name].up, self.nodes[name].told = False, None

    async def request(self, method: str, url: str, **more: Any) -> Any:
        name = url.split("/")[2]
        order = msgspec.msgpack.decode(more["body"], type=Order)
        told = self.nodes[name].told
        proof = RING.proof(PURGE.encode() + b"\0" + more["body"]).hex()
        assert (PROOF.encode(), proof.encode()) in more["headers"]
        assert told is not None
        assert told.life == order.life
        self.orders.append((name, order))
        gone = [Gone("dram", "deleted", 3, 300, self.left)]
        gone += [Gone("object", "deleted", 5, 500)] if order.store else []
        gone += [Gone("keys", "deleted", 1) for _ in order.erase]
        return Answered(200, msgspec.json.encode(Purged(tuple(gone))))


class Answered(msgspec.Struct):
    status: int
    body: bytes


class FakeEngine:
    """It is asked to be emptied, and does it where it is told to."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.able = True
        self.worker: Any = self
        self.client: Any = self
        self.headers: list[Any] = []
        self.config: Any = self
        self.description = None
        self.url = "http://engine"

    async def request(self, method: str, url: str, **_: Any) -> Any:
        self.asked.append(url)
        return Answered(200 if self.able else 404, b"")


class FakeHere:
    def __init__(self) -> None:
        self.log: Any = self
        self.forgotten: Callable[[str], bool] = lambda _: False
        self.engine = FakeEngine()
        self.broken = False
        self.meant: list[Callable[[str], bool]] = []

    def engines(self) -> dict[str, Any]:
        return {"e": self.engine}

    async def keys(self, body: Any, request: Inbound, salt: Any) -> tuple[str, ...]:
        return ("ab" * 16,)

    async def forget(self, meant: Callable[[str], bool]) -> tuple[Gone, ...]:
        if self.broken:
            raise OSError("the disk is full")
        self.meant.append(meant)
        return (Gone("decision log: memory", "deleted", 2),)


class Rig:
    def __init__(self, folder: Path, agents: FakeAgents, share: str = "tenant") -> None:
        self.folder, self.agents, self.share = folder, agents, share
        self.file = folder / "tenants.toml"
        self.here = FakeHere()
        self.now = NOW
        self.write(1)
        self.restart()

    def write(self, epoch: int) -> None:
        text = FILE.format(key=digest_of("key"), epoch=epoch, share=self.share)
        self.file.write_text(text + "\n" * epoch)  # another size, whatever the clock says

    def restart(self) -> None:
        self.tenants = Tenants(TenantsConfig(str(self.file), session_header=True), RING)
        agents, here, client = self.agents, self.here, self.agents
        typed: tuple[Agents, Here, HttpClient] = (agents, here, client)  # type: ignore[assignment]
        self.purger = Purger(
            self.folder / "receipts",
            RING,
            tenants=self.tenants,
            agents=lambda: typed[0],
            here=typed[1],
            client=typed[2],
            poll_s=0.01,
            clock=lambda: self.now,
        )

    def purge(self, id: str = "p1", **more: Any) -> Receipt:
        wanted = Wanted(**({"id": id, "at": self.now, "tenant": "red", "epoch": 1} | more))
        body = msgspec.to_builtins(wanted)
        answer = asyncio.run(self.purger.question(Inbound("r", "/", body, {})))
        return verify(RING, msgspec.json.encode(answer))

    def look(self) -> None:
        asyncio.run(self.purger.look())


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path, FakeAgents("one", "two"))


def test_everybody_is_asked_and_the_receipt_is_kept(rig: Rig) -> None:
    receipt = rig.purge()
    assert receipt.complete
    assert receipt.floors == (Floor(RED, 1 << 32),)
    assert [answer.who for answer in receipt.answers] == [
        "gateway",
        "agent one",
        "agent two",
        "engine e",
    ]
    assert [order.erase for _, order in rig.agents.orders] == [(RED,), (RED,)]
    assert rig.here.meant[0](f"{RED}.0")
    assert not rig.here.meant[0](f"{RED}.{1 << 32}")
    file = rig.folder / "receipts" / "p1.json"
    assert verify(RING, file.read_bytes()) == receipt
    assert rig.here.engine.asked == []  # unreachable, and said so
    assert receipt.answers[-1].gone[0].how == "unreachable"


def test_a_purge_that_is_ordered_again_asks_nobody(rig: Rig) -> None:
    first = rig.purge()
    rig.now += 9999.0
    assert rig.purge(at=NOW) == first
    assert len(rig.agents.orders) == 2
    rig.restart()
    assert rig.purge(at=NOW) == first
    assert len(rig.agents.orders) == 2


def test_who_asks_after_a_purge_orders_none(rig: Rig) -> None:
    """A mistyped id would else get a receipt for an epoch that nobody raised."""
    with pytest.raises(RequestError, match="no purge 'p1' was ordered"):
        rig.purge(again=True)
    assert rig.agents.orders == []
    assert list((rig.folder / "receipts").iterdir()) == []
    first = rig.purge()
    assert rig.purge(again=True) == first
    with pytest.raises(RequestError, match="is one of tenant 'red'"):
        rig.purge(again=True, tenant="blue")


def test_a_node_that_is_away_is_missing_and_purged_when_it_is_back(rig: Rig) -> None:
    rig.agents.go("two")
    receipt = rig.purge()
    assert not receipt.complete
    assert set(receipt.missing()) == {"agent two"}
    assert "agent two" in rig.purger.problems()["purge p1"]
    rig.look()
    assert len([name for name, _ in rig.agents.orders if name == "two"]) == 0
    rig.restart()  # the order outlives the gateway
    rig.agents.come("two", life="2")
    rig.look()
    done = rig.purger.receipts.get("p1")
    assert done is not None
    assert done.complete
    assert rig.purger.problems() == {}
    assert next(order.floors for name, order in rig.agents.orders if name == "two") == done.floors


def test_a_node_that_was_taken_out_of_the_configuration_is_not_forgotten(rig: Rig) -> None:
    rig.agents.go("two")
    rig.purge()
    two = rig.agents.nodes.pop("two")
    rig.restart()
    rig.look()
    missing = rig.purge().missing()
    assert set(missing) == {"agent two"}
    assert "not configured any more" in missing["agent two"]
    rig.agents.nodes["two"] = two
    rig.agents.come("two", life="2")
    assert rig.purge().complete


def test_new_lives_of_agents_are_told_all_floors_once(rig: Rig) -> None:
    rig.purge()
    rig.look()
    told = len(rig.agents.orders)
    rig.look()
    assert len(rig.agents.orders) == told
    rig.agents.come("one", life="2")
    rig.look()
    ((name, order),) = rig.agents.orders[told:]
    assert (name, order.floors, order.erase) == ("one", (Floor(RED, 1 << 32),), ())
    rig.write(2)  # the operator raises the epoch, and purges nothing
    rig.tenants.refresh()
    rig.look()
    assert rig.agents.orders[-1][1].floors == (Floor(RED, 2 << 32),)


def test_a_new_life_that_has_not_taken_the_floors_is_told_of(rig: Rig) -> None:
    rig.purge()
    rig.agents.come("one", life="2")
    rig.agents.left = 1
    rig.look()
    assert "something is left: dram" in rig.purger.problems()["purges at one"]
    rig.agents.left = 0
    rig.look()
    assert rig.purger.problems() == {}


def test_what_is_left_somewhere_keeps_it_open(rig: Rig) -> None:
    rig.agents.left = 1
    receipt = rig.purge()
    assert set(receipt.missing()) == {"agent one", "agent two"}
    rig.agents.left = 0
    assert rig.purge().complete


def test_keys_are_dropped_once_for_a_purge(tmp_path: Path) -> None:
    """What is sealed while it goes on is under a key of the new epoch: that has to stay."""
    rig = Rig(tmp_path, FakeAgents("one", "two", store="s"))
    rig.agents.go("two")
    rig.agents.left = 1
    receipts = [rig.purge() for _ in range(3)]
    rig.agents.come("two")
    rig.agents.left = 0
    receipts.append(rig.purge())
    assert [r.complete for r in receipts] == [False, False, False, True]
    assert [name for name, order in rig.agents.orders if order.erase] == ["one", "two"]
    for receipt in receipts:
        parts = {a.who: [g.part for g in a.gone] for a in receipt.answers}
        assert parts["agent one"].count("keys") == 1


def test_what_fails_again_and_again_is_tried_less_and_less(rig: Rig) -> None:
    rig.agents.left = 1
    rig.purge()

    async def looked() -> list[int]:
        counts = []
        for _ in range(3):
            before = len([order for _, order in rig.agents.orders if order.store])
            await rig.purger.look()
            counts.append(len([order for _, order in rig.agents.orders if order.store]) - before)
        return counts

    assert asyncio.run(looked()) == [2, 0, 0]
    assert rig.purger._again["p1"][1] == 2.0


def test_the_gateways_own_part_can_fail_too(rig: Rig) -> None:
    rig.here.broken = True
    assert rig.purge().missing() == {"gateway": "OSError: the disk is full"}
    rig.here.broken = False
    assert rig.purge().complete


def test_a_store_is_asked_of_one_and_not_before_its_writers(tmp_path: Path) -> None:
    rig = Rig(tmp_path, FakeAgents("one", "two", store="s"))
    receipt = rig.purge()
    assert [name for name, order in rig.agents.orders if order.store] == ["one"]
    assert [g.part for a in receipt.answers if a.who == "store s" for g in a.gone] == ["object"]
    rig.agents.go("two")
    rig.write(2)
    missing = rig.purge("p2").missing()
    assert "two may write there still" in missing["store s"]
    rig.agents.come("two")
    assert rig.purge("p2").complete


def test_engines_are_emptied_where_that_is_wanted(rig: Rig) -> None:
    rig.here.engine.able = False
    receipt = rig.purge(reset=True)
    assert "status 404" in receipt.missing()["engine e"]
    rig.here.engine.able = True
    receipt = rig.purge()
    assert receipt.complete
    assert receipt.answers[-1].gone[0].how == "reset"
    assert rig.here.engine.asked == ["http://engine/reset_prefix_cache"] * 2


def test_a_purged_session_has_another_tag_from_then_on(tmp_path: Path) -> None:
    rig = Rig(tmp_path, FakeAgents("one"), share="session")
    headers = [(b"authorization", b"Bearer key"), (b"x-kvatlas-session", b"tuesday")]
    before = rig.tenants.admit(headers).salt
    assert before.session == session_of(RING, RED, "tuesday")
    rig.purge("whole")  # a tenant's own purge takes no session's name away
    assert rig.tenants.admit(headers).salt == before
    for n in range(3):
        receipt = rig.purge(f"s{n}", session="tuesday")
        assert receipt.floors == (Floor(RED, session=before.session),)
        assert rig.agents.orders[-1][1].erase == ()  # others of the tenant keep what they have
        after = rig.tenants.admit(headers).salt
        assert after.session != before.session
        assert (after.tag, after.epoch) == (before.tag, before.epoch)
        before = after
    other = [headers[0], (b"x-kvatlas-session", b"monday")]
    assert rig.tenants.admit(other).salt.session == session_of(RING, RED, "monday")
    rig.restart()
    assert rig.tenants.admit(headers).salt == before


def test_a_prefix_goes_by_its_keys(rig: Rig) -> None:
    receipt = rig.purge(prefix={"prompt": "hello"})
    assert receipt.floors == ()
    assert receipt.keys == ("ab" * 16,)
    assert receipt.answers[-1].gone[0].how == "untouched"  # its salt reaches it in engines
    assert {order.keys for _, order in rig.agents.orders} == {(bytes.fromhex("ab" * 16),)}


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"tenant": "blue"}, "no tenant"),
        ({"tenant": "a/../red"}, "the tenant's name"),
        ({"tenant": ""}, "the tenant's name"),
        ({"epoch": 9}, "epoch 1, not 9"),
        ({"at": NOW - 9999}, "too long ago"),
        ({"at": NOW + 9999}, "too long ago"),
        ({"id": "../../etc/passwd"}, "no purge's name"),
        ({"id": ""}, "no purge's name"),
        ({"session": "tuesday"}, "share what they cache"),
    ],
)
def test_what_cannot_be_meant_is_refused_and_purges_nothing(
    rig: Rig, more: dict[str, Any], why: str
) -> None:
    with pytest.raises(RequestError, match=why):
        rig.purge(**more)
    assert rig.agents.orders == []
    assert list((rig.folder / "receipts").iterdir()) == []


def test_an_epoch_that_was_never_raised_hides_nothing(rig: Rig) -> None:
    rig.write(0)
    with pytest.raises(RequestError, match="raise the tenant's epoch"):
        rig.purge(epoch=0)


def test_an_epoch_that_was_purged_before_is_raised_first(rig: Rig) -> None:
    rig.purge()
    with pytest.raises(RequestError, match="purge 'p1' was of this epoch"):
        rig.purge("p2")
    rig.write(2)
    assert rig.purge("p2").complete


def test_a_receipt_that_was_changed_is_none(tmp_path: Path) -> None:
    kept = Receipts(tmp_path, RING)
    made = kept.put(Receipt("p", "red", floors=(Floor(RED, 1),), completed_at=5.0))
    data = (tmp_path / "p.json").read_bytes()
    assert verify(RING, data) == made
    for bad in (
        data.replace(b'"red"', b'"blue"'),
        data.replace(b"5.0", b"6.0"),
        data.replace(b'"id"', b'"more": 1, "id"'),
        data.replace(b'"tenant": "red"', b'"tenant": "blue", "tenant": "red"', 1),
        data[:-20],
        b"{}",
    ):
        assert bad != data
        with pytest.raises(ConfigError):
            verify(RING, bad)
    with pytest.raises(ConfigError, match="another"):
        verify(Keyring(b"another secret of sixteen bytes"), data)
    (tmp_path / "p.json").write_bytes(data.replace(b'"red"', b'"blue"'))
    with pytest.raises(ConfigError, match="not as it was signed"):
        Receipts(tmp_path, RING)


def test_an_epoch_is_above_all_periods_of_the_one_before() -> None:
    assert epoch_at(0, 1.0, 4e9) < epoch_at(1, 0.0, 0.0)


def test_an_agent_that_breaks_off_is_missing(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: Any, **__: Any) -> Any:
        raise EngineError("it broke off")

    monkeypatch.setattr(rig.agents, "request", broken)
    assert rig.purge().missing()["agent one"] == "it broke off"


class FakeStore:
    """One that cannot say what its values are, as Mooncake."""

    def __init__(self, *names: bytes) -> None:
        self.names = set(names)
        self.stubborn: set[bytes] = set()

    def labels(self) -> None:
        return None

    def find(self, names: list[bytes], done: Callable[[Report], None]) -> None:
        done(Report(failed=tuple(name for name in names if name not in self.names)))

    def delete(self, names: list[bytes]) -> None:
        self.names -= set(names) - self.stubborn


def test_a_store_without_labels_is_purged_by_the_names_that_are_known() -> None:
    body, point = (name_of(b"k" * 16, part) for part in Part)
    record = records.record_name(b"k" * 16)
    others = name_of(b"o" * 16, Part.BODY)
    told: list[Any] = []
    driver = SimpleNamespace(arena=SimpleNamespace(path=None), tell=told.append)
    teller = SimpleNamespace(announce=told.append, rewrite=lambda: 0)
    untyped: Any = driver, teller
    purges = Purges(RING, untyped[0], untyped[0], untyped[1], None)
    store: Any = FakeStore(body, point, record, others)
    meant = _Meant(Forget(), ())
    gone = asyncio.run(purges._from_store(store, meant, frozenset((body, point))))
    assert (gone.units, gone.left) == (3, 0)
    assert store.names == {others}
    assert "not listed" in gone.note
    words, ((event,),) = told[0], told[1:]
    assert set(words.gone) == {body, point}
    assert (event.bodies, event.points) == ((b"k" * 16,), (b"k" * 16,))
    store.names |= {body}
    store.stubborn = {body}
    gone = asyncio.run(purges._from_store(store, meant, frozenset((body,))))
    assert (gone.units, gone.left) == (1, 1)
    assert not gone.done
