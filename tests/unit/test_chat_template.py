"""Rendering of chats: equal to what vLLM was recorded to render, and never a guess."""

from __future__ import annotations

import functools
import json
import lzma
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from chat_cases import SPECIAL_TOKENS, TEMPLATES

from kvatlas.errors import ConfigError
from kvatlas.service.chat_messages import Unkeyable
from kvatlas.service.chat_template import ChatTemplate

DEVELOPER = {"role": "developer", "content": "d", "tools": []}
RECORDED = Path(__file__).parent.parent / "fixtures" / "recorded" / "chats.json.xz"


@functools.cache
def template(name: str) -> ChatTemplate:
    return ChatTemplate({"default": TEMPLATES[name]}, SPECIAL_TOKENS)


def chat(*messages: tuple[str, object], **fields: object) -> dict[str, Any]:
    return {"messages": [{"role": r, "content": c} for r, c in messages], **fields}


def reason(name: str, body: dict[str, Any]) -> str:
    with pytest.raises(Unkeyable) as refused:
        template(name).render(body)
    return refused.value.reason


def test_renders_what_vllm_rendered() -> None:
    cases = json.loads(lzma.decompress(RECORDED.read_bytes()))
    same, left_to_the_engine = 0, Counter[str]()
    for case in cases:
        if case["text"] is None:
            continue  # vLLM answers with 400: no token was ever used
        try:
            text = template(case["template"]).render(case["body"])
        except Unkeyable as refusal:
            left_to_the_engine[refusal.reason] += 1
            continue
        assert text == case["text"], case
        same += 1
    assert same > 600
    assert set(left_to_the_engine) <= {"engine_dialect"}


def test_variables_of_a_request() -> None:
    body = chat(("user", "q"), documents=[{"title": "t"}], reasoning_effort="none")
    text = template("dump").render(body)
    assert text.endswith('|null|[{"title": "t"}]|True|False|none|||</s>')


def test_keys_keep_their_order_and_text_is_not_escaped() -> None:
    tool = {
        "type": "function",
        "function": {
            "name": "f",
            "description": "ü <b>",
            "parameters": {"z": 1.0, "a": 2**53 + 1, "nested": {"y": None, "b": [1, 1.50]}},
        },
    }
    body = chat(("user", "q"), tools=[tool])
    texts = {template("chatml").render(json.loads(json.dumps(body))) for _ in range(50)}
    assert len(texts) == 1
    assert (
        '{"name": "f", "description": "ü <b>", "parameters": '
        '{"z": 1.0, "a": 9007199254740993, "nested": {"y": null, "b": [1, 1.5]}}}'
    ) in texts.pop()


def test_continued_message_ends_inside_it() -> None:
    body = chat(("user", "q"), ("assistant", "Once upon "), continue_final_message=True)
    assert reason("chatml", body) == "malformed"  # the default asks for a new message as well
    body["add_generation_prompt"] = False
    assert template("chatml").render(body).endswith("assistant\nOnce upon ")
    assert template("strict").render(body).endswith("<assistant>Once upon")  # the template strips
    assert reason("macro", body | {"messages": body["messages"][1:]}) == "template_error"


@pytest.mark.parametrize(
    ("expected", "body"),
    [
        ("malformed", {}),
        ("malformed", {"messages": []}),
        ("malformed", {"messages": ["hi"]}),
        ("malformed", {"messages": [{"content": "no role"}]}),
        ("malformed", chat(("user", 5))),
        ("malformed", chat(("user", "q"), tools=[])),
        ("malformed", chat(("user", "q"), tools=[{"type": "function"}])),
        ("malformed", chat(("user", "q"), add_generation_prompt=None)),
        ("malformed", chat(("user", "q"), chat_template_kwargs={"messages": []})),
        ("own_template", chat(("user", "q"), chat_template="{{ 1 }}")),
        ("own_template", chat(("user", "q"), chat_template_kwargs={"chat_template": "x"})),
        ("multimodal", chat(("user", [{"type": "image_url", "image_url": {"url": "u"}}]))),
        ("multimodal", chat(("user", [{"type": "input_audio", "input_audio": {}}]))),
        ("multimodal", chat(("user", [{"image_url": "u"}]))),
        ("multimodal", chat(("user", [{"type": ["text"]}]))),
        ("multimodal", chat(("user", [{"type": "text", "text": "a", "uuid": "u"}]))),
        ("engine_dialect", {"messages": [DEVELOPER]}),
        ("template_error", chat(("tool", "no id"))),
    ],
)
def test_what_cannot_be_rendered_says_why(expected: str, body: dict[str, Any]) -> None:
    assert reason("strict", body) == expected


def test_templates_cannot_reach_out() -> None:
    evil = ChatTemplate({"default": "{{ ''.__class__.__mro__ }}{{ messages.append(1) }}"}, {})
    with pytest.raises(Unkeyable, match="template_error"):
        evil.render(chat(("user", "q")))


def test_sglang_keeps_only_plain_chats_here() -> None:
    plain = chat(("system", "s"), ("user", "q"))
    assert template("chatml").render(plain, "sglang") == template("chatml").render(plain)
    for other in (
        chat(("user", "q"), ("assistant", "a")),
        chat(("system", "x-anthropic-billing-header: 1\nrest"), ("user", "q")),
        chat(("user", "q"), reasoning_effort="low"),
        chat(("user", [{"type": "text", "text": "q"}])),
        chat(("user", "q"), tools=[{"type": "function", "function": {"name": "f"}}]),
    ):
        with pytest.raises(Unkeyable, match="engine_dialect"):
            template("chatml").render(other, "sglang")


class TestLoad:
    def write(self, directory: Path, name: str, value: object) -> None:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(value if isinstance(value, str) else json.dumps(value), "utf-8")

    def test_file_before_config_and_tool_use_for_tools(self, tmp_path: Path) -> None:
        self.write(tmp_path, "tokenizer_config.json", {"chat_template": "old", "bos_token": "<s>"})
        self.write(tmp_path, "chat_template.jinja", "new {{ bos_token }}")
        self.write(tmp_path, "additional_chat_templates/tool_use.jinja", "tools")
        loaded = ChatTemplate.load(tmp_path)
        assert loaded.render(chat(("user", "q"))) == "new <s>"
        tools = [{"type": "function", "function": {"name": "f"}}]
        assert loaded.render(chat(("user", "q"), tools=tools)) == "tools"

    def test_named_templates_inside_the_config(self, tmp_path: Path) -> None:
        named = [{"name": "default", "template": "d{{ eos_token }}"}]
        eos = {"content": "</s>", "lstrip": False}
        self.write(tmp_path, "tokenizer_config.json", {"chat_template": named, "eos_token": eos})
        assert ChatTemplate.load(tmp_path).render(chat(("user", "q"))) == "d</s>"

    def test_processor_template_unless_tools(self, tmp_path: Path) -> None:
        self.write(tmp_path, "chat_template.json", {"chat_template": "processor"})
        self.write(tmp_path, "tokenizer_config.json", {"chat_template": "tokenizer"})
        loaded = ChatTemplate.load(tmp_path)
        tools = [{"type": "function", "function": {"name": "f"}}]
        assert loaded.render(chat(("user", "q"))) == "processor"
        assert loaded.render(chat(("user", "q"), tools=tools)) == "tokenizer"

    def test_override(self, tmp_path: Path) -> None:
        self.write(tmp_path, "chat_template.jinja", "model's")
        self.write(tmp_path, "mine.jinja", "mine")
        loaded = ChatTemplate.load(tmp_path, str(tmp_path / "mine.jinja"))
        assert loaded.render(chat(("user", "q"))) == "mine"

    @pytest.mark.parametrize("model_type", ["deepseek_v4", "deepseek_v32", "gpt_oss"])
    def test_models_that_are_rendered_by_a_program(self, tmp_path: Path, model_type: str) -> None:
        self.write(tmp_path, "config.json", {"model_type": model_type})
        self.write(tmp_path, "chat_template.jinja", "not what the engine uses")
        loaded = ChatTemplate.load(tmp_path)
        assert not loaded.usable
        with pytest.raises(Unkeyable, match="no_template"):
            loaded.render(chat(("user", "q")))

    def test_no_template(self, tmp_path: Path) -> None:
        assert not ChatTemplate.load(tmp_path).usable

    @pytest.mark.parametrize("text", ["{% for %}", "{{ x | nofilter }}"])
    def test_broken_template_is_the_operators_fault(self, tmp_path: Path, text: str) -> None:
        self.write(tmp_path, "chat_template.jinja", text)
        with pytest.raises(ConfigError, match="chat template"):
            ChatTemplate.load(tmp_path)

    def test_broken_files_are_named(self, tmp_path: Path) -> None:
        self.write(tmp_path, "tokenizer_config.json", "{not json")
        with pytest.raises(ConfigError, match=r"tokenizer_config\.json"):
            ChatTemplate.load(tmp_path)
        with pytest.raises(ConfigError, match="missing"):
            ChatTemplate.load(tmp_path / "other", str(tmp_path / "missing.jinja"))
