"""The gateway's side of copies ahead of need, before an agent that answers as it is told to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import msgspec
import pytest
from ahead_kit import AGENTS, ENGINES, FINGERPRINT, Stand, tokens

from kvatlas.core.ahead_copies import Params, Why
from kvatlas.core.dispatch import Reset, Settle
from kvatlas.core.keys import Keyring
from kvatlas.core.records import Publisher
from kvatlas.errors import EngineError
from kvatlas.service.agent_orders import PROOF
from kvatlas.service.agent_pulls import PULL, Brought, Wanted
from kvatlas.service.agents import Agents
from kvatlas.service.ahead import CopiesAhead
from kvatlas.service.http import Request
from kvatlas.service.http_client import HttpClient
from kvatlas.service.http_reply import Reply
from kvatlas.service.http_server import HttpServer

BLOCKS = 1000


class FakeAgents(Agents):
    """They all are one, at ``url``."""

    def __init__(self) -> None:
        self.url = ""
        self.asked: list[tuple[Publisher, str]] = []

    def serving(self, agent: Publisher, root: str) -> tuple[str, str, str]:
        self.asked.append((agent, root))
        if not self.url:
            raise EngineError(f"{agent}: it does not answer")
        return self.url, "life", "m"


class Desk:
    """A gateway's copies, and the agent that they are asked of."""

    def __init__(self) -> None:
        self.stand = Stand(replicate=False)  # whose own core orders nothing
        self.ring = Keyring(b"s" * 32)
        self.client = HttpClient()
        self.agents = FakeAgents()
        self.got: list[Wanted] = []
        self.left = 0  # requests whose client went away
        self.answer: Callable[[Wanted], Brought | bytes | int | None] = lambda wanted: None
        self.ahead = CopiesAhead(
            Params(replicate=True),
            self.stand.dispatcher,
            self.ring,
            self.client,
            lambda: self.stand.now,
        )
        self.ahead.agents = self.agents
        for engine, agent in zip(ENGINES, AGENTS, strict=True):
            self.stand.tell(Settle(agent, (engine,)))  # once more: now it hears it
        self.server = HttpServer(self._serve)

    async def start(self) -> None:
        await self.server.start("127.0.0.1", 0)
        self.agents.url = f"http://127.0.0.1:{self.server.port}"

    async def _serve(self, request: Request, reply: Reply) -> None:
        assert (request.method, request.path) == ("POST", PULL)
        said = PULL.encode() + b"\0" + request.body
        assert request.header(PROOF) == self.ring.proof(said).hex()
        wanted = msgspec.msgpack.decode(request.body, type=Wanted)
        self.got.append(wanted)
        answer = self.answer(wanted)
        if answer is None:
            try:
                await asyncio.Event().wait()
            finally:
                self.left += 1
        status = answer if isinstance(answer, int) else 200
        body = msgspec.json.encode(answer) if isinstance(answer, Brought) else b"no"
        reply.send(status, [], body)

    def crowd(self) -> None:
        self.stand.hold(AGENTS[0], self.stand.keys(tokens((1, BLOCKS))))
        self.stand.crowd(6)

    @property
    def tally(self) -> dict[str, int]:
        return dict(self.ahead.core.tallies[Why.REPLICATE].ended)

    async def until(self, met: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not met():
                await asyncio.sleep(0.005)


@pytest.fixture
async def desk() -> AsyncIterator[Desk]:
    made = Desk()
    await made.start()
    yield made
    await made.ahead.close()
    await made.server.close()
    await made.client.close()


async def test_a_copy_is_asked_of_the_agent_that_is_to_have_it(desk: Desk) -> None:
    tokens_in_all = BLOCKS * 16
    desk.answer = lambda wanted: Brought(tokens_in_all, 123)
    desk.crowd()
    await desk.until(lambda: bool(desk.tally))
    assert desk.tally == {"arrived": 1}
    (wanted,) = desk.got
    assert list(wanted.keys) == desk.stand.keys(tokens((1, BLOCKS)))
    assert (wanted.life, wanted.model, wanted.scope) == ("life", "m", "")
    assert desk.agents.asked == [(AGENTS[1], desk.ring.root(FINGERPRINT).hex())]
    assert desk.ahead.core.tallies[Why.REPLICATE].moved_bytes == 123
    page = await desk.ahead.page("")
    assert isinstance(page, dict)
    assert (page["under_way"], page["watched"], page["last_error"]) == (0, 1, "")


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (Brought(16, 5), "16 of 16000 tokens arrived"),
        (409, "status 409: no"),
        (b"no", "no answer of an agent"),
    ],
)
async def test_what_does_not_come_is_counted_and_told(
    desk: Desk, answer: Brought | bytes | int, why: str
) -> None:
    desk.answer = lambda wanted: answer
    desk.crowd()
    await desk.until(lambda: bool(desk.tally))
    assert desk.tally == {"failed": 1}
    assert why in desk.ahead.error


async def test_an_agent_that_is_down_fails_a_copy_and_nothing_else(desk: Desk) -> None:
    desk.agents.url = ""
    desk.crowd()
    await desk.until(lambda: bool(desk.tally))
    assert desk.tally == {"failed": 1}
    assert "does not answer" in desk.ahead.error


async def test_a_copy_whose_reason_is_gone_is_called_off_by_leaving(desk: Desk) -> None:
    desk.crowd()
    await desk.until(lambda: len(desk.got) == 1)
    desk.stand.tell(Reset(AGENTS[1]))
    assert desk.tally == {"recalled": 1}
    await desk.until(lambda: desk.left == 1)


async def test_the_end_of_the_gateway_calls_all_copies_off(desk: Desk) -> None:
    desk.crowd()
    await desk.until(lambda: len(desk.got) == 1)
    await desk.ahead.close()
    await desk.until(lambda: desk.left == 1)


async def test_switched_off_it_hears_nothing() -> None:
    stand = Stand(replicate=False)
    client = HttpClient()
    ahead = CopiesAhead(Params(), stand.dispatcher, Keyring(b"s" * 32), client, lambda: stand.now)
    stand.hold(AGENTS[0], stand.keys(tokens((1, BLOCKS))))
    stand.crowd(6)
    assert not ahead.core.remembered()
    await client.close()
