"""A real agent is told to forget: what was there goes, from memory, disk and store, and is looked
for afterwards in the media themselves."""

from __future__ import annotations

import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from fake_engine import GRID, WAIT_S, FakeEngine, tokens_of
from stores_kit import Server, start_valkey

from kvatlas.connectors.child import free_ports
from kvatlas.core.forgetting import Floor
from kvatlas.core.keys import Keyring
from kvatlas.core.tenancy import TenantSalt, salt_of, tag_of
from kvatlas.dataplane.keystore import FileKeys
from kvatlas.dataplane.tiers import valkey
from kvatlas.service import agent_wire as wire
from kvatlas.service.agent_orders import PROOF, signed
from kvatlas.service.agent_purge import PURGE, Gone, Order, Purged
from kvatlas.validate.exactness_tiers import AgentProcess

SECRET = "ab" * 32
RING = Keyring(SECRET.encode())
RED, BLUE = tag_of(RING, "red"), tag_of(RING, "blue")
BLOCKS = 6
UNIT_BYTES = 65536


def salt(tag: str, epoch: int = 0, session: str = "") -> str:
    return salt_of(RING, TenantSalt(tag, epoch, session))


class Engine(FakeEngine):
    """One whose prompts are of a tenant."""

    scope = ""

    def want(self, request: str, tokens: bytes, local: int = 0) -> wire.Staged:
        assert self.client.want(request, tokens, local, WAIT_S, scope=self.scope)
        until = time.monotonic() + WAIT_S
        while (staged := self.client.staged(request)) is None:
            assert time.monotonic() < until, "no answer"
            time.sleep(0.005)
        return staged


class Node(AgentProcess):
    """An agent with pages."""

    def __init__(self, folder: Path, *options: str) -> None:
        folder.mkdir()
        (folder / "secret").write_text(SECRET)
        (folder / "kvatlas.toml").write_text(f'[keys]\nsecret_file = "{folder / "secret"}"\n')
        (port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{port}"
        config = f"--config={folder / 'kvatlas.toml'}"
        super().__init__(folder, [config, f"--listen={port}", "--dram=16MB", *options])

    def engine(self, scope: str) -> Engine:
        made = Engine(self.socket)
        made.scope = scope
        return made

    def save(self, scope: str, prompt: int = 1) -> None:
        with self.engine(scope) as engine:
            assert engine.save("saved", tokens_of(prompt, BLOCKS * GRID)) == BLOCKS
        self.idle()

    def load(self, scope: str, prompt: int = 1) -> int:
        with self.engine(scope) as engine:
            return engine.load("loaded", tokens_of(prompt, BLOCKS * GRID + 5))[0]

    def purge(
        self,
        *floors: Floor,
        store: bool = False,
        ring: Keyring = RING,
        life: str = "",
        erase: tuple[str, ...] = (),
    ) -> dict[str, Gone]:
        life = life or str(self.wait(lambda _: True)["arena"])
        body, proof = signed(ring, PURGE, Order(life, floors, store=store, erase=erase))
        ask = urllib.request.Request(self.url + PURGE, body, {PROOF: proof})
        with urllib.request.urlopen(ask, timeout=25) as answer:
            told = msgspec.json.decode(answer.read(), type=Purged)
        return {gone.part: gone for gone in told.gone}

    def on_disk(self, tag: str) -> int:
        """How often the tag stands in any file of the disk tier."""
        files = [path for path in self.disk.iterdir() if path.is_file()]
        return sum(path.read_bytes().count(tag.encode()) for path in files)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    made: list[Node] = []

    def make(*options: str) -> Node:
        made.append(Node(tmp_path / f"node-{len(made)}", *options))
        made[-1].start()
        return made[-1]

    yield make
    for each in made:
        each.end()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Server]:
    made = start_valkey(tmp_path)
    yield made
    made.kill()


def test_a_tenant_goes_from_memory_and_disk_and_others_stay(node: Callable[..., Node]) -> None:
    one = node()
    one.save(salt(RED))
    one.save(salt(BLUE))
    assert one.on_disk(RED) >= BLOCKS  # or nothing is shown by its absence
    told = one.purge(Floor(RED, 1))
    for part in ("dram", "disk"):
        gone = told[part]
        assert (gone.units, gone.size_bytes) == (BLOCKS, BLOCKS * UNIT_BYTES), part
        assert gone.done
    assert told["under way"].done
    assert one.on_disk(RED) == 0
    assert one.on_disk(BLUE) >= BLOCKS
    assert one.load(salt(RED)) == 0
    assert one.load(salt(BLUE)) == BLOCKS * GRID
    one.save(salt(RED, 1))
    again = one.purge(Floor(RED, 1))  # a replayed order finds nothing, and harms nobody
    assert not any(gone.units for part, gone in again.items() if part != "announced")
    assert one.load(salt(RED, 1)) == BLOCKS * GRID


def test_what_is_copied_and_read_meanwhile_ends_as_nothing(node: Callable[..., Node]) -> None:
    one = node()
    one.save(salt(RED))
    prompt = tokens_of(1, BLOCKS * GRID + 5)
    with one.engine(salt(RED)) as reader, one.engine(salt(RED)) as writer:
        staged = reader.want("reads", prompt)
        assert staged.pieces
        (order,) = writer.orders("writes", tokens_of(2, BLOCKS * GRID))
        sums = writer.copy(order)
        told: list[dict[str, Gone]] = []
        purging = threading.Thread(target=lambda: told.append(one.purge(Floor(RED, 1))))
        purging.start()
        one.wait(lambda status: status["counts"].get("purges") == 1)
        purging.join(0.2)
        assert not told  # it waits for who reads, and says nothing before
        writer.client.saved(order.op, sums)
        reader.client.release("reads", used=True)
        purging.join(30)
        (answer,) = told
        assert all(gone.done for gone in answer.values()), answer
        assert not writer.orders("more", tokens_of(3, BLOCKS * GRID))  # nothing is saved of it
        assert reader.want("again", prompt).tokens == 0
    status = one.idle()
    assert status["tiers"]["dram"]["units"] == status["tiers"]["disk"]["units"] == 0
    assert one.on_disk(RED) == 0


def test_a_disk_that_was_away_is_purged_when_it_is_back(node: Callable[..., Node]) -> None:
    one = node()
    one.save(salt(RED))
    one.end(signal.SIGKILL)
    one.start()
    assert one.purge(Floor(RED, 1))["disk"].units == BLOCKS
    assert one.on_disk(RED) == 0


def test_a_store_is_purged_by_what_its_values_say(store: Server, node: Callable[..., Node]) -> None:
    by = f"--object=valkey://127.0.0.1:{store.port}"
    first, second = node(by), node(by)
    first.save(salt(RED))
    first.save(salt(BLUE))
    assert second.purge(Floor(RED, 1))["dram"].done  # who is not asked for the store leaves it
    kept = valkey.ValkeyStore(valkey.Settings(port=store.port))
    try:
        assert sum(entry.tenant.startswith(RED) for entry in kept.labels()) == BLOCKS
        gone = second.purge(Floor(RED, 1), store=True)["object"]  # by a node that put nothing there
        assert (gone.units, gone.size_bytes) == (BLOCKS, BLOCKS * UNIT_BYTES)
        assert gone.done
        assert sum(entry.tenant.startswith(RED) for entry in kept.labels()) == 0
    finally:
        kept.close()
    assert first.purge(Floor(RED, 1))["dram"].units == BLOCKS
    assert first.load(salt(RED)) == 0
    assert second.load(salt(BLUE)) == BLOCKS * GRID


def test_a_sealed_tenants_key_is_dropped_and_it_goes_on_with_another(
    node: Callable[..., Node], tmp_path: Path
) -> None:
    FileKeys.create(tmp_path / "keys")
    one = node(f"--seal-keys={tmp_path / 'keys'}")
    one.save(salt(RED))
    one.save(salt(BLUE))
    assert sorted({key.tenant for key in FileKeys(tmp_path / "keys").listed()}) == sorted(
        (RED, BLUE)
    )
    told = one.purge(Floor(RED, 1), erase=(RED,))
    assert told["keys"].units == 1  # one for all its epochs and sessions
    assert all(gone.done for gone in told.values())
    assert one.load(salt(BLUE)) == BLOCKS * GRID
    one.save(salt(RED, 1))
    one.end(signal.SIGKILL)
    one.start()
    assert one.load(salt(RED, 1)) == BLOCKS * GRID  # from disk, by its new key
    assert one.load(salt(RED)) == 0


def test_a_scan_finds_what_was_planted(node: Callable[..., Node], store: Server) -> None:
    """A store that does not delete: the second look says so."""
    one = node(f"--object=valkey://127.0.0.1:{store.port}")
    one.save(salt(RED))
    link = valkey.Server.connect(valkey.Address("127.0.0.1", store.port), time.monotonic() + 30)
    try:
        link.ask(b"ACL", b"SETUSER", b"default", b"-del")
        gone = one.purge(Floor(RED, 1), store=True)["object"]
        assert not gone.done
        link.ask(b"ACL", b"SETUSER", b"default", b"+del")
    finally:
        link.close()
    assert one.purge(Floor(RED, 1), store=True)["object"].done


def test_who_has_another_secret_or_means_another_life_is_refused(
    node: Callable[..., Node],
) -> None:
    one = node()
    one.save(salt(RED))
    for more, status in (
        ({"ring": Keyring(b"another secret, as long")}, 403),
        ({"life": "an older one"}, 409),
    ):
        with pytest.raises(urllib.error.HTTPError) as refused:
            one.purge(Floor(RED, 1), **more)  # type: ignore[arg-type]
        with refused.value as answer:
            assert answer.code == status
    assert one.load(salt(RED)) == BLOCKS * GRID
