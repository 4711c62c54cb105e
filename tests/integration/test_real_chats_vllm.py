"""Chats of several turns through the gateway onto two real vLLM servers."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "scenarios"))
from harness import CHAT, Answer, Product
from real_engines import MODEL, READY_S, running, tiny_model, vllm_engine

from kvatlas.config import RouterConfig, TokenizerConfig, WorkerConfig
from kvatlas.connectors.vllm_cpu import VllmEngine
from kvatlas.service.engines import Timing

pytestmark = pytest.mark.engine

BLOCK = 32
SYSTEMS = [f"You answer briefly, and you are number {n}. " * 8 for n in range(2)]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, VllmEngine]]:
    directory = tmp_path_factory.mktemp("engines")
    found = {name: vllm_engine(directory, name=name) for name in ("a", "b")}
    with running(found):
        yield found


@pytest.fixture
async def product(engines: dict[str, VllmEngine]) -> AsyncIterator[Product]:
    workers = [WorkerConfig(name=name, url=engine.url) for name, engine in engines.items()]
    settings = TokenizerConfig(path=str(tiny_model()), engine_timeout_s=20.0)
    # Slow enough for a prefix of a few hundred tokens to matter.
    router = RouterConfig(prefill_tokens_per_s=1000.0)
    timing = Timing(poll_s=0.3, timeout_s=10.0, retry_max_s=0.5)
    product = Product(workers, tokenizer=settings, router=router, timing=timing)
    async with product:
        await product.settled()
        yield product


class Chat:
    """One conversation, and what its last turn left in its engine's cache."""

    def __init__(self, product: Product, name: str, system: str) -> None:
        self.product = product
        self.name = name
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": system}]
        self.turns: list[Answer] = []
        self.held: list[int] = []

    async def turn(self) -> Answer:
        """The engine must have used the tokens that the gateway counted on, and hit as expected."""
        product, number = self.product, len(self.turns)
        text = f"Question {number} of {self.name}: what is {number} plus {len(self.name)}?"
        self.messages.append({"role": "user", "content": text})
        more = {"temperature": 0.0, "return_token_ids": True, "max_tokens": 12}
        answer = await product.chat(self.messages, MODEL, **more)
        assert answer.status == 200, answer
        assert answer.fallback == ""
        tokenizer = product.assembly.tokenizer
        assert tokenizer is not None
        ours = await tokenizer.prompt(CHAT, {"model": MODEL, "messages": self.messages, **more})
        assert ours.source == "local"
        told = answer.json()
        assert memoryview(ours.tokens).cast("I").tolist() == told["prompt_token_ids"]
        choice = told["choices"][0]
        self.messages.append({"role": "assistant", "content": choice["message"]["content"] or ""})
        self.turns.append(answer)
        whole = [*told["prompt_token_ids"], *choice["token_ids"]]
        self.held = whole[: (len(whole) - 1) // BLOCK * BLOCK]
        await product.until_equal(self.known, len(self.held))
        return answer

    async def known(self) -> int:
        """Tokens of this chat that its engine is believed to hold."""
        found = await self.product.ask(self.held, MODEL)
        worker = self.turns[-1].worker
        return found[worker].tokens if worker in found else 0


async def test_turns_go_back_to_their_holder_and_hit_as_expected(product: Product) -> None:
    chats = [Chat(product, name, SYSTEMS[i % 2]) for i, name in enumerate(("x", "yy", "zzz", "ä"))]
    for _ in range(4):
        for chat in chats:
            await chat.turn()
    for chat in chats:
        first, *later = chat.turns
        assert {turn.worker for turn in later} == {first.worker}
        assert min(turn.cached for turn in later) > 300
        assert [turn.expected for turn in chat.turns] == [turn.cached for turn in chat.turns]
    explained = (await product.get("/kvatlas/explain/last")).body.decode()
    assert "resumes at" in explained
    assert "hit_gap" not in str(await product.flags())
    assert "tokenizer:mismatch" not in await product.flags()


async def test_chats_at_once(product: Product) -> None:
    """Turns of many chats together: what was promised is always there."""
    chats = [Chat(product, f"many {n}", SYSTEMS[n % 2]) for n in range(8)]
    for _ in range(3):
        answers = await asyncio.gather(*(chat.turn() for chat in chats))
        assert all(0 <= a.expected <= a.cached <= a.usage["prompt_tokens"] for a in answers)
    assert await product.in_flight() == {}


async def test_a_restarted_engine_is_believed_nothing(
    product: Product, engines: dict[str, VllmEngine]
) -> None:
    chats = [Chat(product, f"restart {n}", f"{n} " * 300) for n in range(4)]
    for chat in chats:
        await chat.turn()
        await chat.turn()
    before = [await product.ask(chat.held, MODEL) for chat in chats]
    victim = chats[0].turns[-1].worker
    await asyncio.to_thread(engines[victim].stop)
    # Meanwhile everybody is served, by the other one.
    for chat in chats:
        assert (await chat.turn()).worker != victim
    engines[victim].start()  # from this thread: it dies with it
    await asyncio.to_thread(engines[victim].wait_ready, READY_S)

    async def back() -> bool:
        row = (await product.workers())[victim]
        return row["up"] and row["feed"]["connected"] and not row["feed"]["behind"]

    async with asyncio.timeout(READY_S):
        while not await back():
            await asyncio.sleep(0.1)
    for chat, had in zip(chats, before, strict=True):
        found = await product.ask(chat.held, MODEL)
        assert victim not in found
        kept = {name: held for name, held in had.items() if name != victim}
        assert kept.keys() <= found.keys()
    for chat in chats:
        answer = await chat.turn()
        assert answer.expected == answer.cached
