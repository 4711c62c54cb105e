"""The page behind the gateway: who may see it, what it costs, and who is dropped."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "scenarios"))
from harness import FakeWorker, Product, fresh_tokens

from kvatlas.cli.certs import make_token
from kvatlas.config import GatewayConfig
from kvatlas.config_tls import AdminConfig
from kvatlas.service import page as page_module
from kvatlas.service.admin import TOKEN_HEADER, Guard
from kvatlas.service.gateway import Gateway
from kvatlas.service.http_client import HttpClient
from kvatlas.service.page import VIEWERS_MAX, LivePage

WAIT_S = 20.0
DATA = ("/kvatlas/page/stream", "/kvatlas/page/explain/last")
FILES = sorted(f.name for f in resources.files("kvatlas").joinpath("page").iterdir())


@pytest.fixture
async def product() -> AsyncIterator[Product]:
    async with (
        FakeWorker("W1") as one,
        FakeWorker("W2") as two,
        Product([one.config(), two.config()]) as product,
    ):
        await product.settled()
        product.assembly.page.period_s = 0.005
        yield product


class Viewer:
    """A browser as the socket sees it."""

    def __init__(self, port: int, headers: str = "", receive_bytes: int = 0) -> None:
        self.socket = socket.socket()
        if receive_bytes:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self.socket.connect(("127.0.0.1", port))
        self.socket.setblocking(False)
        self.said = b""
        ask = f"GET /kvatlas/page/stream HTTP/1.1\r\nhost: x\r\n{headers}\r\n"
        self.socket.send(ask.encode())

    async def read(self, until: Callable[[bytes], bool]) -> bytes:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(WAIT_S):
            while not until(self.said):
                piece = await loop.sock_recv(self.socket, 1 << 16)
                self.said += piece
                if not piece:
                    break
        return self.said

    async def state(self, met: Callable[[Any], bool] = bool) -> Any:
        """The first whole state of which that is so."""
        found: list[Any] = []

        def told(said: bytes) -> bool:
            lines = [line for line in said.split(b"\n")[:-1] if line.startswith(b"data: ")]
            found[:] = [state for line in lines if met(state := json.loads(line[6:]))]
            return bool(found)

        await self.read(told)
        return found[0]

    def leave(self) -> None:
        self.socket.close()


def ended(state: Any) -> int:
    return sum(bucket["ended"] for bucket in state["buckets"])


Look = Callable[..., Viewer]


@pytest.fixture
def look() -> Iterator[Look]:
    viewers: list[Viewer] = []

    def open_(*args: Any, **more: Any) -> Viewer:
        viewers.append(Viewer(*args, **more))
        return viewers[-1]

    yield open_
    for viewer in viewers:
        viewer.leave()


async def until(met: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not met():
            await asyncio.sleep(0.002)


Guarded = Callable[[Guard], Awaitable[int]]


@pytest.fixture
async def guarded(product: Product) -> AsyncIterator[Guarded]:
    """The same product behind another door, whose port this gives."""
    async with AsyncExitStack() as stack:

        async def make(guard: Guard) -> int:
            steering, pages = product.assembly.steering, product.assembly.pages()
            gateway = Gateway(GatewayConfig(port=0), steering, pages=pages, guard=guard)
            await gateway.start()
            stack.push_async_callback(gateway.close)
            return gateway.port

        yield make


def guard_of(folder: Path, *rights: str) -> tuple[Guard, list[str], list[float]]:
    """Who has one of these tokens may come in; the clock by which the file is looked at."""
    made = [make_token(f"t{i}", right) for i, right in enumerate(rights)]
    path, now = folder / "tokens", [0.0]
    path.write_text("\n".join(line for _, line in made))
    guard = Guard(AdminConfig(str(path)), closed=True, clock=lambda: now[0])
    return guard, [token for token, _ in made], now


async def ask(port: int, path: str, token: str = "", method: str = "GET") -> Any:
    headers = [(TOKEN_HEADER.encode(), token.encode())] if token else []
    client = HttpClient()
    try:
        return await client.request(
            method, f"http://127.0.0.1:{port}{path}", headers=headers, timeout_s=WAIT_S
        )
    finally:
        await client.close()


# -- who may see it -------------------------------------------------------------------------------


async def test_what_it_shows_is_behind_admin(
    product: Product, guarded: Guarded, tmp_path: Path
) -> None:
    await product.complete(fresh_tokens(20))
    guard, (metrics, read), _ = guard_of(tmp_path, "metrics", "read")
    port = await guarded(guard)
    for path in DATA:
        assert (await ask(port, path)).status == 401
        assert (await ask(port, path, "kva_no_such_token")).status == 401
        assert (await ask(port, path, metrics)).status == 403
        assert (await ask(port, path, read, method="HEAD")).status == 200
        assert (await ask(port, path, read, method="POST")).status == 405
    told = json.loads((await ask(port, DATA[1], read)).body)
    assert told["candidates"][0]["worker"] in ("W1", "W2")


async def test_a_stranger_gets_the_shell_with_a_refusal(guarded: Guarded, tmp_path: Path) -> None:
    """So a browser, which can send no token with an address, can ask for one."""
    guard, (read,), _ = guard_of(tmp_path, "read")
    port = await guarded(guard)
    strange, known = await ask(port, "/kvatlas/"), await ask(port, "/kvatlas/", read)
    assert (strange.status, known.status) == (401, 200)
    assert strange.body == known.body
    assert b"W1" not in strange.body
    assert (b"www-authenticate", b"Bearer") in strange.headers
    assert (await ask(port, "/kvatlas")).status == 308
    for name in FILES:
        assert (await ask(port, f"/kvatlas/page/files/{name}")).status == 200
    for path in ("/kvatlas/other", "/kvatlas/page/files/..%2fpage.css", "/kvatlas/page/files/x"):
        assert (await ask(port, path, read)).status == 404


async def test_a_token_that_ends_ends_the_stream(
    guarded: Guarded, look: Look, tmp_path: Path
) -> None:
    guard, (read,), now = guard_of(tmp_path, "read")
    viewer = look(await guarded(guard), f"{TOKEN_HEADER}: {read}\r\n")
    await viewer.state()
    (tmp_path / "tokens").write_text("# nobody\n")
    now[0] += 2
    assert (await viewer.read(lambda said: said.endswith(b"0\r\n\r\n"))).endswith(b"0\r\n\r\n")


async def test_everything_is_sent_under_a_strict_policy(product: Product) -> None:
    await product.complete(fresh_tokens(20))
    for path in ("/kvatlas/", "/kvatlas", *(f"/kvatlas/page/files/{name}" for name in FILES)):
        headers = (await product.get(path)).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "require-trusted-types-for 'script'" in policy
        assert headers["x-content-type-options"] == "nosniff"


# -- what it costs --------------------------------------------------------------------------------


async def test_nothing_is_kept_while_nobody_looks(product: Product, look: Look) -> None:
    page, log = product.assembly.page, product.assembly.log
    await product.complete(fresh_tokens(20))
    assert (page.viewers, log.watcher, page._history, page._state) == (0, None, None, b"")
    viewer = look(product.port)
    state = await viewer.state()
    assert state["viewers"] == 1
    assert ended(state) == 1  # the log still knew of it
    viewer.leave()
    await until(lambda: page.viewers == 0)
    assert (log.watcher, page._history, page._state) == (None, None, b"")


async def test_requests_are_counted_once(product: Product, look: Look) -> None:
    for number in range(5):
        await product.complete(fresh_tokens(40, number))
    viewer = look(product.port)
    await viewer.state()
    for number in range(3):
        await product.complete(fresh_tokens(40, 10 + number))
    state = await viewer.state(lambda state: ended(state) >= 8)
    assert (ended(state), state["decisions"]) == (8, 8)


async def test_many_viewers_are_told_one_state_and_one_more_is_refused(
    product: Product, look: Look
) -> None:
    product.assembly.page.period_s = 5.0
    viewers = [look(product.port) for _ in range(VIEWERS_MAX)]
    first = [await viewer.state() for viewer in viewers]
    assert len({state["at"] for state in first}) == 1
    refused = await product.get("/kvatlas/page/stream")
    assert refused.status == 503
    assert refused.error["code"] == "too_many_viewers"
    viewers[0].leave()
    await until(lambda: product.assembly.page.viewers == VIEWERS_MAX - 1)
    late = look(product.port)
    await late.state()
    for viewer in (*viewers[1:], late):
        viewer.leave()
    await until(lambda: product.assembly.page.viewers == 0)


async def test_a_browser_that_reads_nothing_is_dropped_and_no_request_feels_it(
    product: Product, look: Look
) -> None:
    page = product.assembly.page
    page.period_s, page.stall_s = 0.0, 0.05
    for _ in range(3):
        look(product.port, receive_bytes=4096)
    await until(lambda: page.viewers == 3)
    answers = []
    async with asyncio.timeout(WAIT_S):
        while page.dropped < 3:
            answers.append(await product.complete(fresh_tokens(40, len(answers))))
    assert {answer.status for answer in answers} == {200}
    assert page.viewers == 0


async def test_a_gateway_that_shuts_down_waits_for_no_viewer(product: Product, look: Look) -> None:
    viewer = look(product.port)
    await viewer.state()
    async with asyncio.timeout(5):
        assert await product.gateway.drain()
    assert product.assembly.page.viewers == 0


async def test_a_fault_of_the_page_is_no_fault_of_a_request(
    product: Product, look: Look, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    viewer = look(product.port)
    await viewer.state()

    def broken(*_: object) -> None:
        raise RuntimeError("planted")

    for name in ("resumes", "ended"):
        monkeypatch.setattr(page_module.History, name, broken)
    assert (await product.complete(fresh_tokens(40))).status == 200
    assert "could not take in request" in caplog.text


async def test_a_large_log_is_taken_in_by_slices(
    product: Product, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a first look takes of the log is bounded, and others get their turn in between."""
    for number in range(7):
        await product.complete(fresh_tokens(20, number))
    monkeypatch.setattr(page_module, "SEED_MAX", 5)
    monkeypatch.setattr(page_module, "_SLICE", 2)
    page = LivePage(product.assembly, product.clock)
    await page._begin()
    assert page._history is not None
    assert sum(bucket.ended for bucket in page._history.buckets()) == 5
    page._leave()
