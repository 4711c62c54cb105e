"""kvatlas never causes a wrong answer: whoever resumed a prompt, and from where, the text is one.

A stub engine's text is a digest over the bytes of every component that it resumed from.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator

import pytest
from harness import COMPLETION, Answer, Product, fresh_tokens, stub_workers

from kvatlas.connectors.stub_cluster import StubCluster, StubOptions
from kvatlas.core.layout import plain
from kvatlas.workload.models import load_layout
from kvatlas.workload.spec import EngineSpec

LAYOUT = "deepseek-v4-flash"
ENGINES = 3
# Room for a few prompts only: blocks are evicted all the time.
SPEC = EngineSpec(
    blocks=500, step_tokens=512, prefill_tokens_per_s=1e5, decode_step_s=0.0, step_overhead_s=0.0
)


class Chat:
    """Turns of one conversation; three share each system prompt."""

    def __init__(self, number: int) -> None:
        self.random = random.Random(number)
        shared = random.Random(number // 3)
        self.text = _words(shared, 700)

    def next_prompt(self) -> str:
        self.text += " " + _words(self.random, self.random.randrange(40, 400))
        return self.text

    def heard(self, answer: Answer) -> None:
        self.text += " " + answer.text


def _words(chance: random.Random, count: int) -> str:
    return " ".join(f"{chance.randrange(0x10000):05x}" for _ in range(count))


@contextlib.asynccontextmanager
async def world() -> AsyncIterator[tuple[Product, StubCluster, StubCluster]]:
    """The product, its engines, and one engine that kvatlas knows nothing of."""
    layout = load_layout(LAYOUT, engine="vllm")
    ours = StubOptions(layout, SPEC, model_name="m", count=ENGINES)
    async with (
        StubCluster(ours) as cluster,
        StubCluster(StubOptions(layout, SPEC, model_name="m")) as reference,
        Product(stub_workers(cluster, LAYOUT)) as product,
    ):
        await product.settled()
        yield product, cluster, reference


async def cold(product: Product, reference: StubCluster, prompt: str) -> str:
    """The text of an engine that computes all of it."""
    url = reference.addresses[0].url
    reset = await product.client.post_json(f"{url}/reset_prefix_cache", {})
    assert reset["success"]
    body = {"model": "m", "prompt": prompt, "max_tokens": 8}
    answer = await product.client.post_json(url + COMPLETION, body, timeout_s=30.0)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    return str(answer["choices"][0]["text"])


async def test_the_text_is_the_same_whoever_resumed_it() -> None:
    asked: list[tuple[str, Answer]] = []
    async with world() as (product, cluster, reference):
        chats = [Chat(number) for number in range(12)]

        async def turn(chat: Chat) -> None:
            prompt = chat.next_prompt()
            answer = await product.complete(prompt, max_tokens=8)
            assert answer.status == 200, answer
            asked.append((prompt, answer))
            chat.heard(answer)

        for round_ in range(6):
            await asyncio.gather(*(turn(chat) for chat in chats))
            if round_ == 3:
                await cluster.stop(0)
                await cluster.start(0)
        for prompt, answer in asked:
            assert answer.text == await cold(product, reference, prompt)
        # …and it was worth the while: many resumed, on every engine, from many positions.
        resumed = [answer for _, answer in asked if answer.cached]
        assert len(resumed) > len(asked) / 3
        assert sum(s.applied.removed for s in product.assembly.feed.status()) > 100
        assert {answer.worker for answer in resumed} == {f"stub-{i}" for i in range(ENGINES)}
        assert len({answer.cached for answer in resumed}) >= 4
        assert all(0 <= a.expected <= a.usage["prompt_tokens"] for _, a in asked)


async def test_the_last_token_is_always_computed() -> None:
    """A prompt of whole blocks, asked again: its last block is neither promised nor reused."""
    options = StubOptions(plain(16), SPEC, model_name="m")
    async with StubCluster(options) as cluster, Product(stub_workers(cluster, "16")) as product:
        await product.settled()
        prompt = fresh_tokens(48)

        async def told() -> bool:
            return (await product.complete(prompt)).expected > 0

        await product.until(told)
        again = await product.complete(prompt)
        assert (again.expected, again.cached) == (32, 32)


@pytest.mark.parametrize("group", range(5))
async def test_damage_to_any_component_would_show(group: int) -> None:
    """The negative control of the test above."""
    async with world() as (product, cluster, reference):
        prompt = Chat(0).next_prompt()
        first = await product.complete(prompt, max_tokens=8)

        async def told() -> bool:
            return (await product.complete(prompt, max_tokens=8)).expected >= 512

        await product.until(told)
        damaged = [cluster.engine(index).damage(group) for index in range(ENGINES)]
        assert sum(damaged) > 0
        again = await product.complete(prompt, max_tokens=8)
        right = await cold(product, reference, prompt)
        assert again.cached >= 512
        assert first.text == right
        assert again.text != right
