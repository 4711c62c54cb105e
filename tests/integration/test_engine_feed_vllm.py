"""A real vLLM server, unmodified: its events lead to the cached tokens that it reports."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from feed_story import Story, conversation, eviction, forgotten, restart
from real_engines import MODEL, READY_S, complete, vllm_engine

from kvatlas.config import WorkerConfig
from kvatlas.connectors.vllm_cpu import VllmEngine

pytestmark = pytest.mark.engine

POOL_TOKENS = 8192


@pytest.fixture
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    # 2 layers, K and V, 2 heads of 64, bfloat16: 1 KiB per token.
    engine = vllm_engine(tmp_path_factory.mktemp("vllm"), kv_cache_bytes=POOL_TOKENS << 10)
    engine.start()
    try:
        engine.wait_ready(READY_S)
        yield engine
    finally:
        engine.stop()


async def test_vllm_reports_what_was_expected(engine: VllmEngine) -> None:
    early = list(range(3, 203))
    await asyncio.to_thread(complete, engine.url, early)  # before anybody listens
    async with Story(WorkerConfig("w", engine.url)) as story:
        told = story.worker.description
        assert told is not None
        assert (told.models, told.block_tokens, told.version) == ((MODEL,), 32, "0.32.0")
        assert story.worker.loads[0].running == 0
        assert story.expected(early) == 192
        await conversation(story)
        await eviction(story, POOL_TOKENS)
        await forgotten(story, "/reset_prefix_cache")
        await restart(story, engine)
