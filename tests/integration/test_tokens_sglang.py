"""Token ids beside a real SGLang's: plain chats are made here, the rest by its own endpoint."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from chat_cases import TEMPLATES
from real_engines import MODEL, READY_S, sglang_engine
from token_story import counts_are_equal, starts, tokenizer, write_model

from kvatlas.service.http_client import HttpClient
from kvatlas.service.verify import GOLDEN

pytestmark = pytest.mark.engine


async def test_every_form_is_keyed_as_sglang_keys_it(tmp_path: Path) -> None:
    model_dir = write_model(tmp_path / "model", TEMPLATES["chatml"])
    args = ["--model-path", str(model_dir), "--load-format", "dummy"]
    server = sglang_engine(tmp_path, args=args)
    client = HttpClient()
    server.start()
    try:
        server.wait_ready(READY_S)
        ours = tokenizer(model_dir, client, server.url, "sglang")
        assert await ours.verify(MODEL) > 5
        state = ours.state()
        assert (state.last_mismatch, state.chat, state.completion) == ("", "local", "local")
        sources: Counter[str] = Counter()
        for _, path, fields in GOLDEN:
            prompt = await ours.prompt(path, {"model": MODEL, **fields})
            sources[prompt.source] += 1
            assert starts(prompt.tokens) == 1
        assert sources == {"local": 7, "endpoint": 6}
        await counts_are_equal(ours, client, server.url)
        await ours.close()
    finally:
        server.stop()
        await client.close()
