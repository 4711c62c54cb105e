"""A real SGLang server, unmodified: its events lead to the cached tokens that it reports."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from feed_story import Story, conversation, eviction, forgotten, restart
from real_engines import MODEL, READY_S, complete, sglang_engine

from kvatlas.config import WorkerConfig
from kvatlas.connectors.sglang_cpu import SglangEngine

pytestmark = pytest.mark.engine

POOL_TOKENS = 8192


@pytest.fixture
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangEngine]:
    engine = sglang_engine(tmp_path_factory.mktemp("sglang"), pool_tokens=POOL_TOKENS)
    engine.start()
    try:
        engine.wait_ready(READY_S)
        yield engine
    finally:
        engine.stop()


async def test_sglang_reports_what_was_expected(engine: SglangEngine) -> None:
    early = list(range(3, 203))
    await asyncio.to_thread(complete, engine.url, early)  # before anybody listens
    async with Story(WorkerConfig("w", engine.url, engine="sglang")) as story:
        told = story.worker.description
        assert told is not None
        assert (told.models, told.block_tokens, told.version) == ((MODEL,), 16, "0.5.23")
        assert story.worker.loads[0].running == 0
        assert story.expected(early) == 192
        await conversation(story)
        await eviction(story, POOL_TOKENS)
        await forgotten(story, "/flush_cache?timeout=60")
        await restart(story, engine)
