"""What the tests of the feed share: a directory with its feed, and the reports' questions."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from stub_publisher import (
    BLOCK,
    StubPublisher,
    block_tokens,
)

from kvatlas.core import layout, sequence
from kvatlas.core.directory import Directory, Limits
from kvatlas.core.keys import PUBLIC, Keyring, Scope
from kvatlas.core.records import Publisher, Resume
from kvatlas.service.feed import Feed, FeedStatus, Source

FINGERPRINT = b"f" * 32
QUICK = sequence.Limits(
    replay_timeout_s=0.3, retry_s=0.05, settle_s=0.02, orphan_replay_s=0.0, give_up_s=0.2
)


class Atlas:
    """A directory with its feed, and the questions of the field reports."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.keyring = Keyring(b"a test's own secret")
        self.directory = Directory(self.keyring, limits or Limits())
        self.feed = Feed(self.directory, limits=QUICK, slice_s=0.0)

    def follow(self, name: str, stub: StubPublisher, **more: Any) -> Publisher:
        publisher = Publisher(name)
        self.directory.register(publisher, layout.plain(BLOCK), FINGERPRINT)
        self.feed.add(publisher, Source(stub.endpoint, stub.replay, **more))
        return publisher

    def resumes(self, path: str, scope: Scope = PUBLIC, adapter: str = "") -> dict[str, Resume]:
        root = self.keyring.root(FINGERPRINT, scope, adapter)
        keys = self.keyring.chain(root, _pack(block_tokens(path)), BLOCK)
        found = self.directory.peek(keys, FINGERPRINT)
        return {str(resume.publisher): resume for resume in found}

    def ask(self, path: str, **more: Any) -> dict[str, int]:
        """Blocks that each worker is believed to hold of a prompt; none: not listed."""
        return {name: r.tokens // BLOCK for name, r in self.resumes(path, **more).items()}

    def status(self, name: str) -> FeedStatus:
        return next(s for s in self.feed.status() if s.publisher.worker == name)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0.005)

    async def answers(self, path: str, expected: dict[str, int], **more: Any) -> None:
        with contextlib.suppress(TimeoutError):
            await self.until(lambda: self.ask(path, **more) == expected)
        assert self.ask(path, **more) == expected

    async def settled(self, *names: str) -> None:
        await self.until(lambda: all(self.feed.idle(Publisher(name)) for name in names))


def _pack(tokens: list[int]) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in tokens)


@pytest.fixture
async def atlas() -> AsyncIterator[Atlas]:
    atlas = Atlas()
    yield atlas
    await atlas.feed.close()
