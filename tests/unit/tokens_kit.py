"""What the tests of token ids share: a tiny tokenizer, an engine that answers as told."""

from __future__ import annotations

import json
from array import array
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_bpe import END, START, train

from kvatlas.config import TokenizerConfig
from kvatlas.service.chat_messages import Dialect
from kvatlas.service.http_client import StatusError
from kvatlas.service.tokens import Prompt, Tokenizer
from kvatlas.service.verify import (
    CHAT,
    COMPLETION,
    Endpoint,
)

URL = "http://engine:8000"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|user|>{{ m.role }}\n{{ m.content }}<|end|>"
    "{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}<|user|>assistant\n"
    "{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}"
)
Answer = Callable[[dict[str, Any]], Awaitable[object]]


def ids(prompt: Prompt | bytes) -> list[int]:
    return array("I", prompt if isinstance(prompt, bytes) else prompt.tokens).tolist()


def user(text: str = "the quick brown fox", **fields: object) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}], **fields}


class FakeEngine:
    """What an engine's /tokenize would say: by another Tokenizer, or as told."""

    def __init__(self, tokenizer: Tokenizer | None = None) -> None:
        self.tokenizer = tokenizer
        self.asked: list[dict[str, Any]] = []
        self.asked_urls: list[str] = []
        self.now = 0.0
        self.override: Answer | None = None
        self.urls = [URL]

    async def post_json(self, url: str, obj: object, *, timeout_s: float) -> Any:
        assert url.removesuffix("/tokenize") in self.urls
        assert 0 < timeout_s <= 1.0
        question = json.loads(json.dumps(obj))
        self.asked.append(question)
        self.asked_urls.append(url.removesuffix("/tokenize"))
        if self.override is not None:
            return await self.override(question)
        assert self.tokenizer is not None
        path = CHAT if "messages" in question else COMPLETION
        prompt = await self.tokenizer.prompt(path, question)
        if prompt.reason:
            raise StatusError(prompt.reason, status=400)
        return {"tokens": ids(prompt), "count": prompt.count}

    def endpoint(self, dialect: Dialect = "vllm") -> Endpoint:
        return Endpoint(self.post_json, lambda: self.urls, dialect=dialect, clock=lambda: self.now)


async def answers(tokens: object) -> object:
    return {"tokens": tokens}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The template renders the start token itself; plain text gets it from the tokenizer."""
    directory = train(tmp_path_factory.mktemp("model"), split=True, start=True)
    config = {"bos_token": START, "eos_token": END}
    (directory / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    (directory / "chat_template.jinja").write_text(TEMPLATE, "utf-8")
    return directory


@pytest.fixture(scope="module")
def other_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same vocabulary with another version of the template."""
    directory = tmp_path_factory.mktemp("other")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_bytes((model_dir / name).read_bytes())
    changed = TEMPLATE.replace("{{ m.role }}\n", "{{ m.role }}:\n")
    (directory / "chat_template.jinja").write_text(changed, "utf-8")
    return directory


def load(directory: Path | str, endpoint: Endpoint | None = None, **fields: Any) -> Tokenizer:
    dialect = endpoint.dialect if endpoint else "vllm"
    config = TokenizerConfig(path=str(directory), **fields)
    return Tokenizer.load(config, endpoint=endpoint, dialect=dialect)


@pytest.fixture(scope="module")
def local(model_dir: Path) -> Tokenizer:
    return load(model_dir)
