"""Token ids beside a real vLLM's: a real vocabulary, every form of request, and a broken worker."""

from __future__ import annotations

import json
import lzma
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from chat_cases import TEMPLATES
from real_engines import MODEL, READY_S, require
from token_story import counts_are_equal, endpoint, starts, tokenizer, write_model

from kvatlas.connectors.child import free_ports
from kvatlas.connectors.vllm_cpu import VllmEngine
from kvatlas.service.http_client import HttpClient
from kvatlas.service.tokens import Tokenizer
from kvatlas.service.verify import CHAT, GOLDEN, difference

pytestmark = pytest.mark.engine

RECORDED = Path(__file__).parent.parent / "fixtures" / "recorded" / "chats.json.xz"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), TEMPLATES["chatml"])


@pytest.fixture(scope="module")
def engine(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = VllmEngine(
        require("vllm"),
        model_dir,
        name="vllm",
        port=free_ports(1)[0],
        log=tmp_path_factory.mktemp("log") / "vllm.log",
        model_name=MODEL,
        kv_cache_bytes=64 << 20,
        args=[
            "--load-format",
            "dummy",
            "--enable-auto-tool-choice",
            "--tool-call-parser",
            "hermes",
        ],
    )
    server.start()
    try:
        server.wait_ready(READY_S)
        yield server.url
    finally:
        server.stop()


@pytest.fixture
async def client() -> AsyncIterator[HttpClient]:
    client = HttpClient()
    yield client
    await client.close()


async def test_equal_for_the_golden_set(model_dir: Path, engine: str, client: HttpClient) -> None:
    ours = tokenizer(model_dir, client, engine)
    assert await ours.verify(MODEL) == len(GOLDEN)
    state = ours.state()
    assert (state.last_mismatch, state.chat, state.completion) == ("", "local", "local")
    for name, path, fields in GOLDEN:
        prompt = await ours.prompt(path, {"model": MODEL, **fields})
        assert prompt.source == "local"
        assert starts(prompt.tokens) == (0 if name == "plain text, no start token" else 1), name
    await ours.close()


async def test_equal_for_recorded_chats(model_dir: Path, engine: str, client: HttpClient) -> None:
    ours = tokenizer(model_dir, client, engine)
    theirs = endpoint(client, engine)
    cases = [c["body"] for c in json.loads(lzma.decompress(RECORDED.read_bytes())) if c["text"]]
    compared = 0
    for body in cases[::8]:
        body["model"] = MODEL
        prompt = await ours.prompt(CHAT, body)
        if prompt.source == "local":
            (expected,) = await theirs.tokens(CHAT, body, [])
            assert difference(prompt.tokens, expected) == "", body
            compared += 1
    assert compared > 60
    await ours.close()


async def test_the_engine_counts_the_same_tokens(
    model_dir: Path, engine: str, client: HttpClient
) -> None:
    ours = tokenizer(model_dir, client, engine)
    await counts_are_equal(ours, client, engine)
    await ours.close()


async def test_another_template_version_is_noticed_and_healed(
    tmp_path: Path, engine: str, client: HttpClient
) -> None:
    """Broken on purpose: our copy of the template is not the one that the worker has."""
    changed = TEMPLATES["chatml"].replace("You are helpful.", "You are a helpful assistant.")
    assert changed != TEMPLATES["chatml"]
    ours = tokenizer(write_model(tmp_path, changed), client, engine)
    await ours.verify(MODEL)
    state = ours.state()
    assert (state.chat, state.completion) == ("endpoint", "local")
    assert "first difference at token" in state.last_mismatch
    body = {"model": MODEL, "messages": [{"role": "user", "content": "q"}], "max_tokens": 1}
    prompt = await ours.prompt(CHAT, body)
    answer = await client.post_json(engine + CHAT, body, timeout_s=60.0)
    assert prompt.source == "endpoint"
    assert answer["usage"]["prompt_tokens"] == prompt.count
    await ours.close()


async def test_without_a_local_tokenizer(engine: str, client: HttpClient, model_dir: Path) -> None:
    remote = Tokenizer(None, None, endpoint=endpoint(client, engine))
    local = tokenizer(model_dir, client, engine)
    for _, path, fields in GOLDEN:
        body = {"model": MODEL, **fields}
        prompt = await remote.prompt(path, body)
        assert prompt.source == "endpoint"
        assert prompt.tokens == (await local.prompt(path, body)).tokens
    wrong = await remote.prompt(CHAT, {"model": "other", "messages": [{"role": "user"}]})
    assert wrong.reason in ("endpoint_failed", "engine_refuses")
    await remote.close()
    await local.close()
