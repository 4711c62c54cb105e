"""A chat request → what a chat template is given: messages, tools and variables.

The same clean-up as in vLLM 0.32 (`renderers/chat_utils.py`, `entrypoints/openai/chat_completion`
there). What cannot be copied surely raises `Unkeyable`; nothing is guessed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from kvatlas.errors import KvatlasError

Dialect = Literal["vllm", "sglang"]
Messages = list[dict[str, Any]]

# Why a prompt has no token ids here. Each is a counter's label, so the set is closed.
Reason = Literal[
    "no_tokenizer",  # nothing configured, or it could not be loaded
    "no_template",  # the model has none, or renders chats by a program of its own
    "engine_dialect",  # the engine rewrites this kind of chat in a way that is not copied here
    "template_error",  # the template refused the messages
    "own_template",  # the client sent a template
    "multimodal",  # images, audio, video: the text alone is not the key
    "prompt_embeds",
    "truncated",  # truncate_prompt_tokens: depends on the engine's limits
    "suffix",  # fill in the middle: rendered by the engine
    "malformed",  # not a request that the engine would accept
    "encode_failed",  # the tokenizer library gave up on the text
    "unknown_path",
    "engine_refuses",  # its endpoint called the request invalid, as the engine itself will
    "endpoint_failed",
    "endpoint_busy",
]
# The engine's tokenize endpoint answers these as the engine itself would.
ENDPOINT_KNOWS: frozenset[str] = frozenset({"no_tokenizer", "no_template", "engine_dialect"})


class Unkeyable(KvatlasError):
    """The token ids of this prompt cannot be known here: ``reason`` says why."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason: Reason = reason


_UNSET = (None, "auto")  # vLLM's marks of a variable that nobody set


def flag(body: Mapping[str, Any], name: str, default: bool) -> bool:
    """A yes-or-no member of the body. Raises `Unkeyable` for anything else."""
    value = body.get(name, default)
    if not isinstance(value, bool):
        raise Unkeyable("malformed", f"{name} must be true or false")
    return value


def template_kwargs(body: Mapping[str, Any]) -> dict[str, Any]:
    """The variables that a request sets: its chat_template_kwargs, overridden by its own fields."""
    given = body.get("chat_template_kwargs") or {}
    if not isinstance(given, dict):
        raise Unkeyable("malformed", "chat_template_kwargs must be an object")
    if given.get("chat_template") is not None:
        raise Unkeyable("own_template")
    if given.keys() & {"chat_template", "tokenize", "conversation", "messages", "return_dict"}:
        raise Unkeyable("malformed", "chat_template_kwargs sets a reserved name")
    effort = body.get("reasoning_effort")
    fields: dict[str, Any] = {
        "add_generation_prompt": flag(body, "add_generation_prompt", True),
        "continue_final_message": flag(body, "continue_final_message", False),
        "documents": body.get("documents"),
        "reasoning_effort": effort,
    }
    if effort is not None and "enable_thinking" not in given:
        fields["enable_thinking"] = effort != "none"
    chosen = given | {k: v for k, v in fields.items() if v not in _UNSET}
    return {"documents": None} | {k: v for k, v in chosen.items() if v not in _UNSET}


# Parts that are text, and the field that holds it.
_TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
# Other fields of a text part (cache_control …) reach the template; these never do.
_DROPPED = {"type", "text", "refusal", "thinking", "prompt_cache_breakpoint"}
# With one of these a part is more than text, whatever its type says.
_MEDIA = {"image_url", "image_pil", "image_embeds", "audio_url", "audio_embeds", "input_audio"}
_MEDIA |= {"video_url", "video_embeds", "prompt_embeds", "data", "file", "uuid"}
_BILLING_LINE = "x-anthropic-billing-header"  # changes on every request; vLLM drops it too


def clean_message(message: object, content_format: str) -> dict[str, Any]:
    """One message as the template is to see it; ``content_format`` is "string" or "openai".

    Raises `Unkeyable` for what the engine would refuse or rewrite in its own way.
    """
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise Unkeyable("malformed", "a message must be an object with a role")
    role, given = message["role"], message.get("content")
    as_text = content_format == "string" or role == "tool"
    content: str | list[dict[str, Any]]
    if isinstance(given, str) and as_text and role != "system":
        content = given  # the common case: nothing to clean
    else:
        content = list(_parts(given, role))
        if as_text:
            texts = [part["text"] for part in content]
            content = "\n".join(t for t in texts if t or content_format == "openai")
    result: dict[str, Any] = {"role": role, "content": content}
    if role == "assistant":
        _add_assistant_fields(message, result)
    elif role == "tool" and "tool_call_id" in message:
        result["tool_call_id"] = message["tool_call_id"]
    for key in ("name", "task"):
        if isinstance(message.get(key), str):
            result[key] = message[key]
    if role == "developer":
        if message.get("tools") is not None:
            raise Unkeyable("engine_dialect", "tools of a developer message")
        result["tools"] = None
    return result


def _parts(content: object, role: str) -> Iterator[dict[str, Any]]:
    """The text parts of a message. Raises `Unkeyable` when there is more than text."""
    if content is None:
        return
    if not isinstance(content, (str, list)):
        raise Unkeyable("malformed", "content must be text or a list of parts")
    for part in [content] if isinstance(content, str) else content:
        whole = {"type": "text", "text": part} if isinstance(part, str) else part
        kind = str(whole.get("type")) if isinstance(whole, dict) else ""
        if kind not in _TEXT_PARTS or whole.keys() & _MEDIA:
            raise Unkeyable("multimodal", f"content part {kind!r}")
        text = whole.get(_TEXT_PARTS[kind])
        if text is None and kind in ("text", "refusal"):
            continue
        if not isinstance(text, str):
            raise Unkeyable("malformed", "the text of a content part must be a string")
        if role == "system" and kind == "text" and text.startswith(_BILLING_LINE):
            text = text.partition("\n")[2]
            if not text:
                continue
        rest = {key: value for key, value in whole.items() if key not in _DROPPED}
        yield {"type": "text", "text": text, **rest}


def _add_assistant_fields(message: dict[str, Any], result: dict[str, Any]) -> None:
    calls = message.get("tool_calls")
    if calls:
        if not isinstance(calls, list):
            raise Unkeyable("malformed", "tool_calls must be a list")
        result["tool_calls"] = [_tool_call(call) for call in calls]
    reasoning = message.get("reasoning")
    if reasoning is None:
        reasoning = message.get("reasoning_content")
    if reasoning is not None:
        result["reasoning"] = result["reasoning_content"] = reasoning


def _tool_call(call: object) -> dict[str, Any]:
    """In the field order of the engine's own types, arguments as an object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise Unkeyable("malformed", "a tool call must have a function")
    if call.get("type") != "function" or not {"name", "arguments"} <= function.keys():
        raise Unkeyable("malformed", "a tool call needs type, function.name and .arguments")
    arguments = function["arguments"]
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments else {}
        except ValueError:
            arguments = {}
    return {
        "id": call.get("id"),
        "function": {
            "arguments": arguments if isinstance(arguments, dict) else {},
            "name": function["name"],
        },
        "type": "function",
    }


def dump_tools(tools: object) -> list[dict[str, Any]] | None:
    """As the engine dumps its own tool type: known fields only, in its order, nulls included."""
    if tools is None:
        return None
    if not isinstance(tools, list) or not tools:
        raise Unkeyable("malformed", "tools must be a list with at least one tool")
    return [_tool(tool) for tool in tools]


def _tool(tool: object) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(tool, dict) or not isinstance(function, dict) or "name" not in function:
        raise Unkeyable("malformed", "a tool must have a function with a name")
    defer = tool.get("defer_loading")
    dump: dict[str, Any] = {
        "name": function["name"],
        "description": function.get("description"),
        "parameters": function.get("parameters"),
    }
    if function.get("strict") is not None:
        dump["strict"] = function["strict"]
    inner = function.get("defer_loading")
    if defer is not None or inner is not None:
        dump["defer_loading"] = defer if inner is None else inner
    result: dict[str, Any] = {"type": "function", "function": dump}
    if defer is not None:
        result["defer_loading"] = defer
    return result


def developers_to_system(chat: Messages) -> Messages:
    """For templates without a developer role: they become system messages, all merged in front."""
    chat = [
        {k: v for k, v in m.items() if k != "tools"} | {"role": "system"}
        if m["role"] == "developer"
        else m
        for m in chat
    ]
    systems = [m for m in chat if m["role"] == "system"]
    if chat[: len(systems)] == systems and len(systems) == 1:
        return chat
    texts = [
        m["content"]
        if isinstance(m["content"], str)
        else "\n".join(p["text"] for p in m["content"])
        for m in systems
    ]
    merged = {"role": "system", "content": "\n\n".join(text for text in texts if text)}
    return [merged, *(m for m in chat if m["role"] != "system")]


def check_sglang(body: Mapping[str, Any], messages: list[Any]) -> None:
    """SGLang 0.5.23 renders plain chats alike; the rest of its rewriting is left to its endpoint
    (`serving_chat.py` there: joins parts by spaces, turns a last assistant message into a user's,
    filters and re-dumps tools)."""
    plain = (
        not body.keys() & {"tools", "documents", "reasoning", "reasoning_effort"}
        and not body.get("continue_final_message")
        and body.get("add_generation_prompt", True) is True
        and all(isinstance(m, dict) and isinstance(m.get("content"), str) for m in messages)
        and all(m.keys() <= {"role", "content"} for m in messages)
        and all(m["role"] in ("system", "user", "assistant") for m in messages)
        and not any(m["content"].startswith(_BILLING_LINE) for m in messages)
        and messages[-1]["role"] != "assistant"
    )
    if not plain:
        raise Unkeyable("engine_dialect", "more than plain text messages on SGLang")
