"""One story that every real engine must agree with: what kvatlas expects is what it reports.

Registry, feed and directory are the real ones; the engine is told nothing about them. Before each
request the directory is asked how far the engine can resume; afterwards the engine's own
``cached_tokens`` must say the same.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterable
from typing import Any

from real_engines import READY_S, cached_tokens, complete, post

from kvatlas.config import WorkerConfig
from kvatlas.connectors.child import Child
from kvatlas.core import layout
from kvatlas.core.directory import Directory
from kvatlas.core.keys import PUBLIC, Keyring, Scope, salt_scope
from kvatlas.core.records import Publisher
from kvatlas.service.engines import Engines, Timing, Worker
from kvatlas.service.feed import Feed, FeedStatus
from kvatlas.service.http_client import HttpClient

FINGERPRINT = b"f" * 32
VOCABULARY = 256


class Story:
    """kvatlas's own side, in front of one engine. Use ``async with``."""

    def __init__(self, config: WorkerConfig) -> None:
        self.config = config
        self.random = random.Random(11)
        self.keyring = Keyring(b"a test's own secret")

    async def __aenter__(self) -> Story:
        self.directory = Directory(self.keyring)
        self.feed = Feed(self.directory)
        self.client = HttpClient()
        self.engines = Engines(self.feed, self, self.client, Timing(poll_s=0.2))
        self.worker = self.engines.add(self.config)
        await self.until(lambda: self.worker.up and self.feed.idle(self.publisher))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.engines.close()
        await self.feed.close()
        await self.client.close()

    # the registry's listener

    def described(self, worker: Worker) -> None:
        told = worker.description
        assert told is not None
        self.block = told.block_tokens
        for publisher in worker.publishers():
            self.directory.register(publisher, layout.plain(self.block), FINGERPRINT)

    def gone(self, worker: Worker, publishers: Iterable[Publisher]) -> None:
        for publisher in publishers:
            self.directory.unregister(publisher)

    # questions

    @property
    def publisher(self) -> Publisher:
        return Publisher(self.config.name)

    @property
    def status(self) -> FeedStatus:
        return self.feed.status()[0]

    def prompt(self, tokens: int) -> list[int]:
        """Token ids that nobody used before."""
        return [self.random.randrange(3, VOCABULARY) for _ in range(tokens)]

    def expected(self, prompt: list[int], scope: Scope = PUBLIC) -> int:
        """Tokens that the engine will find in its cache; the last one is always computed."""
        usable = (len(prompt) - 1) // self.block * self.block
        packed = b"".join(token.to_bytes(4, "little") for token in prompt[:usable])
        root = self.keyring.root(FINGERPRINT, scope)
        keys = self.keyring.chain(root, packed, self.block)
        found = self.directory.peek(keys, FINGERPRINT)
        return found[0].tokens if found else 0

    async def ask(self, prompt: list[int], *, salt: str = "", tokens: int = 8) -> list[int]:
        """Send it, compare, wait for the events; returns the prompt with its answer's tokens."""
        scope = salt_scope(salt)
        expected = self.expected(prompt, scope)
        more: dict[str, Any] = {"cache_salt": salt} if salt else {}
        answer = await asyncio.to_thread(
            complete, self.config.url, prompt, tokens=tokens, ignore_eos=True, **more
        )
        assert cached_tokens(answer) == expected
        whole = [*prompt, *answer["choices"][0]["token_ids"]]
        held = (len(whole) - 1) // self.block * self.block  # its last token was never computed
        await self.until(lambda: self.expected(whole, scope) == held)
        return whole

    async def until(self, condition: Callable[[], bool], deadline_s: float = 60.0) -> None:
        deadline = time.monotonic() + deadline_s
        while not condition():
            assert time.monotonic() < deadline, (self.worker, self.feed.status())
            await asyncio.sleep(0.02)


async def conversation(story: Story) -> None:
    """Cold, repeated, continued, branched, salted: expected and reported agree each time."""
    first = story.prompt(200)
    assert story.expected(first) == 0
    await story.ask(first)
    await story.ask(first)  # the same again
    second = await story.ask([*first, *story.prompt(150)], tokens=40)
    await story.ask([*second, *story.prompt(60)])  # the next turn: its answer is held too
    branch = [*first[:130], *story.prompt(90)]
    assert 0 < story.expected(branch) <= 130
    await story.ask(branch)
    await story.ask(story.prompt(3))  # shorter than a block
    salted = story.prompt(100)
    await story.ask(salted, salt="tenant-a")
    assert story.expected(salted) == 0
    assert story.expected(salted, salt_scope("tenant-b")) == 0
    assert story.expected(salted, salt_scope("tenant-a")) > 0
    await story.ask(salted, salt="tenant-a")
    await story.ask(salted)
    status = story.status
    assert (status.malformed, status.unknown, status.applied.orphans) == (0, 0, 0)
    assert (status.applied.malformed, status.applied.undeclared) == (0, 0)
    assert (status.stream.gaps, status.stream.resets) == (0, 0)


async def eviction(story: Story, pool_tokens: int) -> None:
    """More than the pool holds: what the engine evicted, the directory no longer promises."""
    old = story.prompt(300)
    await story.ask(old)
    removed = story.status.applied.removed
    for _ in range(pool_tokens // 1500 + 1):
        await story.ask(story.prompt(1500))
    await story.until(lambda: story.status.applied.removed > removed)
    await story.until(lambda: story.feed.idle(story.publisher))
    assert story.expected(old) == 0
    await story.ask(old)
    assert story.status.applied.unknown_removals == 0


async def forgotten(story: Story, path: str) -> None:
    """A POST to ``path`` drops the engine's prefix cache; its next step tells the directory."""
    old = story.prompt(100)
    await story.ask(old)
    await asyncio.to_thread(post, story.config.url, path, {})
    await story.ask(story.prompt(50))  # vLLM tells with its next step
    await story.until(lambda: story.expected(old) == 0)
    assert story.status.applied.cleared >= 1
    await story.ask(old)


async def restart(story: Story, engine: Child) -> None:
    """The engine ends and starts anew: nothing that it held before is promised any more."""
    old = story.prompt(100)
    await story.ask(old)
    await asyncio.to_thread(engine.stop)
    await story.until(lambda: not story.worker.up)
    engine.start()  # from this thread: it dies with it
    await asyncio.to_thread(engine.wait_ready, READY_S)
    await story.until(lambda: story.worker.up and story.feed.idle(story.publisher))
    assert story.expected(old) == 0
    assert story.status.epoch >= 1
    await story.ask(old)
    await story.ask(old)
