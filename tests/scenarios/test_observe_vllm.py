"""Before a real vLLM: what the core in shadow promised is what the engine then reported."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from harness import COMPLETION, Product, fresh_tokens
from observe_kit import Observed, until
from real_engines import MODEL, READY_S, vllm_engine

from kvatlas.config import Config, WorkerConfig

pytestmark = pytest.mark.engine

BLOCK = 32
LENGTHS = (70, 200, 333, 480)


async def test_a_real_engine_is_shadowed(tmp_path: Path) -> None:
    engine = vllm_engine(tmp_path)
    engine.start()
    try:
        await asyncio.to_thread(engine.wait_ready, READY_S)
        config = Config(worker=(WorkerConfig(name="v", url=engine.url),))
        port = int(engine.url.rpartition(":")[2])
        observed = Observed(port, tmp_path / "seen", config=config)
        async with observed.watching() as tunnel, Product([]).only_as_client(tunnel.port) as client:
            live = observed.observer.live
            assert live is not None
            feed = live.assembly.feed
            await until(lambda: bool(feed.status()) and all(s.connected for s in feed.status()))
            for seed, count in enumerate(LENGTHS):
                prompt = [token % 200 + 10 for token in fresh_tokens(count, seed)]
                for tokens in (prompt, [*prompt, 7, 8, 9]):
                    body = {"model": MODEL, "prompt": tokens, "max_tokens": 8, "stream": True}
                    body |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
                    before = observed.observer.recording.rows
                    answer = await client.post(COMPLETION, json.dumps(body).encode())
                    assert answer.status == 200
                    await until(lambda before=before: observed.observer.recording.rows > before)
    finally:
        engine.stop()
    rows = observed.recorded.rows
    assert [r.input_length for r in rows] == [n for count in LENGTHS for n in (count, count + 3)]
    assert {r.output_length for r in rows} == {8}
    for first, second in zip(rows[::2], rows[1::2], strict=True):
        assert first.observed.ttft_s > 0
        assert first.observed.cached_tokens == 0
        assert (first.observed.engine, first.observed.told) == ("v", "events")
        whole = first.input_length // BLOCK * BLOCK
        assert second.observed.cached_tokens == whole
        assert second.observed.decided is not None
        assert second.observed.decided.resume_tokens == whole
    assert not observed.summary.lost
