"""A gateway that begins after the engines have forgotten how their history began."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from harness import FakeWorker, Product
from stub_publisher import StubPublisher, block_tokens, removed, stored

from kvatlas.config import GatewayConfig, KeysConfig, RouterConfig
from kvatlas.core.keys import Keyring
from kvatlas.core.records import Publisher
from kvatlas.core.snapshot_frames import Writer
from kvatlas.core.snapshot_values import FORMAT
from kvatlas.errors import SnapshotError
from kvatlas.service.agent_orders import PROOF, signed
from kvatlas.service.http import Request
from kvatlas.service.http_reply import Reply
from kvatlas.service.http_server import HttpServer
from kvatlas.service.snapshots import SNAPSHOT, Offer, Slices, Wanted

PATH = "ABCDEF"
SECRET = b"one secret of all gateways here!"


@pytest.fixture
def keys(tmp_path: Path) -> KeysConfig:
    file = tmp_path / "secret"
    file.write_bytes(SECRET)
    return KeysConfig(secret_file=str(file))


def engine(name: str) -> FakeWorker:
    """It keeps no more than its last two steps for replays."""
    return FakeWorker(name, events=StubPublisher(buffer=2))


def forget(worker: FakeWorker) -> None:
    """Its buffer holds nothing any more of what came before."""
    for last in "XYZ":
        worker.events.publish(stored(last))


def gateway(workers: tuple[FakeWorker, ...], keys: KeysConfig, *peers: str, **more: Any) -> Product:
    settings = GatewayConfig(port=0, peers=peers, warm_start_s=more.pop("warm_start_s", 20.0))
    return Product([w.config() for w in workers], gateway=settings, keys=keys, **more)


@contextlib.asynccontextmanager
async def one_that_knows(
    workers: tuple[FakeWorker, ...], keys: KeysConfig
) -> AsyncIterator[Product]:
    """A gateway that heard of PATH at the first engine, which then forgot that it had said so."""
    async with gateway(workers, keys) as old:
        for worker in workers:
            await worker.heard()
        await old.settled()
        workers[0].events.publish(stored(PATH, len(PATH)))
        await old.answers(PATH, {workers[0].name: len(PATH)})
        for worker in workers:
            forget(worker)
        await old.answers("Z", {worker.name: 1 for worker in workers})
        yield old


async def begun(product: Product) -> dict[str, Any]:
    return dict((await product.directory())["start"])


async def test_it_routes_to_the_holder_at_once(keys: KeysConfig) -> None:
    async with engine("w1") as w1, engine("w2") as w2, one_that_knows((w1, w2), keys) as old:
        async with gateway((w1, w2), keys) as cold:
            await cold.settled()
            assert await cold.blocks(PATH) == {}, "the engines alone do not tell it"
            assert (await begun(cold))["kind"] == "alone"
        async with gateway((w1, w2), keys, old.url) as new:
            assert await new.blocks(PATH) == {"w1": len(PATH)}
            assert await new.chosen(block_tokens(PATH)) == "w1"
            start = await begun(new)
            assert (start["kind"], start["peer"]) == ("warm", old.url)
            assert start["taken"] == ["w1", "w2"]
            assert start["unproved"] == []
            assert start["holders"] == len(PATH) + 6
            assert await new.metric("kvatlas_warm_start", kind="warm") == 1
            assert await new.metric("kvatlas_warm_start_holders") == len(PATH) + 6
            assert new.assembly.directory.digest() == old.assembly.directory.digest()
            w1.events.publish(removed(PATH))
            await new.answers(PATH, {"w1": len(PATH) - 1})
        assert await old.metric("kvatlas_snapshots_total", outcome="told") == 1


@pytest.mark.parametrize("sent", [0, 1, 4, 9])
async def test_an_engine_that_began_anew_unseen_is_promised_nothing_of_before(
    keys: KeysConfig, sent: int
) -> None:
    """The peer has not heard of it; the engine has sent less, as much and more than before."""
    async with engine("w1") as w1, engine("w2") as w2, one_that_knows((w1, w2), keys) as old:
        assert old.assembly.feed.hold(Publisher("w1")), "it hears nothing more"
        await w1.events.restart()
        for _ in range(sent):
            w1.events.publish(stored("Q"))
        async with gateway((w1, w2), keys, old.url) as new:
            start = await begun(new)
            assert start["taken"] == ["w1", "w2"]
            await new.settled()
            assert await new.blocks(PATH) == {}
            assert await new.blocks("Q") == ({"w1": 1} if sent else {})
            assert await new.blocks("Z") == {"w2": 1}


async def test_another_secret_is_a_cold_start_with_the_reason(
    keys: KeysConfig, tmp_path: Path
) -> None:
    file = tmp_path / "other"
    file.write_bytes(b"some other secret of other gateways")
    other = KeysConfig(secret_file=str(file))
    async with engine("w1") as w1, one_that_knows((w1,), keys) as old:
        async with gateway((w1,), other, old.url) as new:
            start = await begun(new)
            assert start["kind"] == "cold"
            assert "another secret" in start["refusals"][old.url]
            assert await new.metric("kvatlas_warm_start", kind="cold") == 1
            health = (await new.get("/health")).json()
            assert "another secret" in health["details"]["cold_start"][old.url]
            assert not any(flag.startswith("cold_start") for flag in health["flags"])
        assert await old.metric("kvatlas_snapshots_total", outcome="refused") == 1


async def test_nobody_there_is_a_cold_start_and_the_next_is_asked(keys: KeysConfig) -> None:
    async with engine("w1") as w1, one_that_knows((w1,), keys) as old:
        nobody = "http://127.0.0.1:1"
        async with gateway((w1,), keys, nobody, old.url) as new:
            start = await begun(new)
            assert (start["kind"], start["peer"]) == ("warm", old.url)
            assert list(start["refusals"]) == [nobody]


class Peer:
    """A gateway that tells ``frames`` of a snapshot and then does as ``ends`` says."""

    def __init__(self, old: Product, ends: str, format: int = FORMAT) -> None:
        self.url = ""
        self._old, self._ends, self._format = old, ends, format
        self._server = HttpServer(self._answer)
        self.asked = asyncio.Event()

    async def __aenter__(self) -> Peer:
        await self._server.start("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.close()

    async def _answer(self, request: Request, reply: Reply) -> None:
        if request.method == "GET":
            reply.send_json(200, msgspec.to_builtins(Offer("a life", self._format, "0")))
            return
        wanted = msgspec.msgpack.decode(request.body, type=Wanted)
        snapshots = self._old.assembly.snapshots
        writer = Writer(Keyring(SECRET), wanted.nonce)
        reply.start(200, [])
        reply.write(writer.opening())
        async for bodies in snapshots._parts(Slices()):
            for body in bodies:
                reply.write(writer.frame(body))
        self.asked.set()
        if self._ends == "dies":
            reply.abort()
        elif self._ends == "is silent":
            await asyncio.Event().wait()
        elif self._ends == "stops short":
            reply.end()
        else:
            reply.end(bytes(100))


@pytest.mark.parametrize(
    ("ends", "why"),
    [
        ("dies", "closed"),
        ("is silent", "was over before"),
        ("stops short", "ends before its end"),
        ("tells nonsense", "another secret"),
    ],
)
async def test_a_peer_that_fails_in_the_middle_leaves_a_cold_start(
    keys: KeysConfig, ends: str, why: str
) -> None:
    async with (
        engine("w1") as w1,
        one_that_knows((w1,), keys) as old,
        Peer(old, ends) as peer,
        gateway((w1,), keys, peer.url, warm_start_s=0.5 if ends == "is silent" else 20.0) as new,
    ):
        assert peer.asked.is_set()
        start = await begun(new)
        assert start["kind"] == "cold"
        assert why in start["refusals"][peer.url]
        await new.settled()
        assert await new.blocks(PATH) == {}
        assert await new.blocks("Z") == {"w1": 1}
        assert (await new.complete(block_tokens("QR"))).status == 200


async def test_a_gateway_of_another_format_is_not_asked(keys: KeysConfig) -> None:
    async with (
        engine("w1") as w1,
        one_that_knows((w1,), keys) as old,
        Peer(old, "dies", FORMAT + 1) as peer,
        gateway((w1,), keys, peer.url) as new,
    ):
        assert f"format {FORMAT + 1}" in (await begun(new))["refusals"][peer.url]
        assert not peer.asked.is_set()


def _wanted(old: Product, life: str = "", nonce: bytes = b"n" * 16) -> tuple[bytes, dict[str, str]]:
    body, proof = signed(
        Keyring(SECRET), SNAPSHOT, Wanted(life or old.assembly.snapshots._life, nonce)
    )
    return body, {PROOF: proof}


async def test_who_may_ask_and_how_many(keys: KeysConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    async with engine("w1") as w1, one_that_knows((w1,), keys) as old:
        body, proved = _wanted(old)
        assert (await old.send("POST", SNAPSHOT, body)).status == 403
        assert (await old.send("POST", SNAPSHOT, *_wanted(old, "an old life"))).status == 409
        assert (await old.send("POST", SNAPSHOT, *_wanted(old, nonce=b"short"))).status == 400
        assert (await old.send("PUT", SNAPSHOT, body, proved)).status == 405
        monkeypatch.setattr("kvatlas.service.snapshots.AT_ONCE_MAX", 0)
        busy = await old.send("POST", SNAPSHOT, body, proved)
        assert busy.status == 503
        assert busy.headers["retry-after"] == "1"
        monkeypatch.undo()
        assert (await old.send("POST", SNAPSHOT, body, proved)).status == 200


async def test_a_life_that_ends_while_it_is_told_is_left_out(
    keys: KeysConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> Iterator[object]:
        raise SnapshotError("w1 began anew")
        yield

    async with engine("w1") as w1, one_that_knows((w1,), keys) as old:
        monkeypatch.setattr("kvatlas.service.snapshots.engine_pieces", broken)
        async with gateway((w1,), keys, old.url) as new:
            start = await begun(new)
            assert start["kind"] == "cold"
            assert "knows nobody" in start["refusals"][old.url]
        assert await old.metric("kvatlas_snapshots_total", outcome="left_out") == 1
        await old.answers(PATH, {"w1": len(PATH)})
        w1.events.publish(removed(PATH))
        await old.answers(PATH, {"w1": len(PATH) - 1})


async def test_a_recorded_run_begins_with_nothing(keys: KeysConfig, tmp_path: Path) -> None:
    """Else it could not be decided again."""
    recording = RouterConfig(recording=str(tmp_path / "run"))
    async with (
        engine("w1") as w1,
        one_that_knows((w1,), keys) as old,
        gateway((w1,), keys, old.url, router=recording) as new,
    ):
        assert (await begun(new))["kind"] == "alone"
