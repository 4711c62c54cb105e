"""Chat messages → the text that the engine tokenizes.

Rendered as vLLM 0.32 with transformers 5 does it (`renderers/hf.py`, `renderers/chat_utils.py`,
`utils/chat_template_utils.py` there): the same Jinja environment, the same clean-up of messages
before the template sees them. What cannot be rendered surely raises `Unkeyable`; nothing is
guessed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvatlas.errors import ConfigError
from kvatlas.service.chat_messages import (
    Dialect,
    Messages,
    Unkeyable,
    check_sglang,
    clean_message,
    developers_to_system,
    dump_tools,
    template_kwargs,
)
from kvatlas.service.model_files import read_json, read_text, special_tokens


class ChatTemplate:
    """The templates of one model, by name: "default", "tool_use" and "processor".

    ``special_tokens`` (bos_token, eos_token …) are variables of the template. With ``refusal`` no
    chat is rendered here and the text says why (the model's chats are no Jinja templates).
    """

    def __init__(
        self,
        templates: Mapping[str, str],
        special_tokens: Mapping[str, str],
        refusal: str = "",
    ) -> None:
        self._templates = {name: _Compiled(text) for name, text in templates.items()}
        self._special_tokens = dict(special_tokens)
        self._refusal = refusal

    @classmethod
    def load(cls, model_dir: Path, override: str = "") -> ChatTemplate:
        """``override``: a Jinja file that stands in for the model's own templates.

        Raises ConfigError when a file is there but cannot be read or parsed.
        """
        config = read_json(model_dir / "tokenizer_config.json")
        tokens = special_tokens(model_dir)
        if override:
            return cls({"default": read_text(Path(override))}, tokens)
        refusal = _not_by_template(model_dir)
        return cls({} if refusal else _find_templates(model_dir, config), tokens, refusal)

    @property
    def usable(self) -> bool:
        """Whether chats without tools can be rendered at all."""
        return bool(self._templates.keys() & {"processor", "default"})

    def render(self, body: Mapping[str, Any], dialect: Dialect = "vllm") -> str:
        """The prompt text of a /v1/chat/completions body. Raises `Unkeyable`."""
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise Unkeyable("malformed", "messages must be a list with at least one message")
        if body.get("chat_template") is not None:
            raise Unkeyable("own_template")
        tools = dump_tools(body.get("tools"))
        params: dict[str, Any] = {"tools": tools} | template_kwargs(body)
        template = self._choose(params["tools"])
        if dialect == "sglang":
            check_sglang(body, messages)
        chat = [clean_message(message, template.content_format) for message in messages]
        if not template.knows_developer and any(m["role"] == "developer" for m in chat):
            chat = developers_to_system(chat)
        continue_final = params.pop("continue_final_message")
        if continue_final and params["add_generation_prompt"]:
            raise Unkeyable("malformed", "continue_final_message excludes add_generation_prompt")
        try:
            return template.render(chat, self._special_tokens | params, continue_final)
        except Unkeyable:
            raise
        except Exception as error:  # a template is a program: any error of it refuses the chat
            raise Unkeyable("template_error", f"{type(error).__name__}: {error}") from error

    def _choose(self, tools: object) -> _Compiled:
        names = ("processor", "default") if tools is None else ("tool_use", "default")
        for name in names:
            if name in self._templates:
                return self._templates[name]
        raise Unkeyable("no_template", self._refusal or "the model has no chat template")


class _Compiled:
    """One template. ``content_format``: what it expects as content, text or a list of parts."""

    def __init__(self, text: str) -> None:
        self._text = text
        try:
            environment = _environment()
            self._template = environment.from_string(text)
            self.content_format = _content_format(environment.parse(text))
        except jinja2.TemplateError as error:
            raise ConfigError(f"chat template: cannot be parsed: {error}") from error
        self.knows_developer = "'developer'" in text or '"developer"' in text

    def render(self, chat: Messages, params: dict[str, Any], continue_final: bool) -> str:
        if not continue_final:
            return self._template.render(messages=chat, **params)
        return self._render_open(chat, params)

    def _render_open(self, chat: Messages, params: dict[str, Any]) -> str:
        """Ends inside the last message, so that the model continues it: a mark is put behind its
        text and everything from the mark on is cut off."""
        mark = "CONTINUE_FINAL_MESSAGE_TAG "
        last = dict(chat[-1])
        content = last["content"]
        if "content" not in self._text:
            raise Unkeyable("template_error", "the template renders no content to continue")
        if isinstance(content, list):
            parts = [dict(part) for part in content]
            texts = [part for part in parts if "text" in part]
            if not texts:
                raise Unkeyable("malformed", "the last message has no text to continue")
            final = texts[-1]["text"]
            texts[-1]["text"] = final + mark
            last["content"] = parts
        else:
            final = content
            last["content"] = content + mark
        text = self._template.render(messages=[*chat[:-1], last], **params)
        if final.strip() not in text or mark.strip() not in text:
            raise Unkeyable("template_error", "the template drops the message to continue")
        cut = text.rindex(mark.strip())
        return text[:cut] if text[cut : cut + len(mark)] == mark else text[:cut].rstrip()


# --- Jinja ---------------------------------------------------------------------------------------


class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` marks what the model wrote: for training masks; here it is passed by."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own interface

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        block = nodes.CallBlock(self.call_method("_pass_by"), [], [], body)
        return block.set_lineno(line)

    def _pass_by(self, caller: Callable[[], str]) -> str:
        return caller()


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes for HTML; templates for models must not."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _content_format(tree: nodes.Template) -> Literal["string", "openai"]:
    """ "openai" when the template loops over the parts of a message's content (vLLM's rule)."""
    try:
        message_names = _message_names(tree)
        passed = _macro_content_params(tree, message_names)
        in_macro = {id(loop) for m in tree.find_all(nodes.Macro) for loop in m.find_all(nodes.For)}
        for loop in tree.find_all(nodes.For):
            over = loop.iter
            if any(_reads(over, name, "content") for name in message_names):
                return "openai"
            if isinstance(over, nodes.Name):
                if over.name in passed.get(id(loop), ()):
                    return "openai"
                if over.name == "content" and id(loop) not in in_macro:
                    return "openai"
    except TypeError:  # a loop or assignment with several targets: vLLM's detection gives up too
        return "string"
    return "string"


def _message_names(tree: nodes.Template) -> list[str]:
    """Names that a loop over the messages (or an alias or slice of them) gives to one message."""
    aliases = ["messages"]
    for alias in aliases:  # grows while it is walked
        for assign in tree.find_all(nodes.Assign):
            if _reads(assign.node, alias):
                name = _name_of(assign.target)
                if name not in aliases:
                    aliases.append(name)
    return [
        _name_of(loop.target)
        for loop in tree.find_all(nodes.For)
        if any(_reads(loop.iter, alias) for alias in aliases)
    ]


def _macro_content_params(tree: nodes.Template, message_names: list[str]) -> dict[int, set[str]]:
    """By loop (its id) inside a macro: the macro's parameters that receive a message's content."""
    found: dict[int, set[str]] = {}
    for macro in tree.find_all(nodes.Macro):
        names = [argument.name for argument in macro.args]
        params: set[str] = set()
        for call in tree.find_all(nodes.Call):
            if not (isinstance(call.node, nodes.Name) and call.node.name == macro.name):
                continue
            given = list(zip(names, call.args, strict=False))
            given += [(pair.key, pair.value) for pair in call.kwargs if pair.key in names]
            for name, value in given:
                if any(_reads(value, message, "content") for message in message_names):
                    params.add(name)
        if params:
            found |= {id(loop): params for loop in macro.find_all(nodes.For)}
    return found


def _reads(node: nodes.Node, name: str, key: str = "") -> bool:
    """Whether ``node`` is the variable (or its ``key``), possibly filtered, tested or sliced."""
    while True:
        wrapped = isinstance(node, (nodes.Filter, nodes.Test)) or (
            isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
        )
        inner: nodes.Node | None = getattr(node, "node", None) if wrapped else None
        if inner is None:
            break
        node = inner
    if key:
        by_item = isinstance(node, nodes.Getitem) and (
            isinstance(node.arg, nodes.Const) and node.arg.value == key
        )
        by_attribute = isinstance(node, nodes.Getattr) and node.attr == key
        if not (by_item or by_attribute):
            return False
        node = node.node  # type: ignore[attr-defined]  # both kinds have it
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name


def _name_of(target: nodes.Node) -> str:
    if not isinstance(target, nodes.Name):
        raise TypeError("not a plain name")
    return target.name


# --- files ---------------------------------------------------------------------------------------

# Model types whose chats vLLM and SGLang render by a program, not by the repository's template.
_OWN_PROGRAM = ("deepseek_v32", "deepseek_v4", "gpt_oss", "kimi_k3", "kimi_audio", "inkling")


def _not_by_template(model_dir: Path) -> str:
    model_type = read_json(model_dir / "config.json").get("model_type")
    if isinstance(model_type, str) and model_type.startswith(_OWN_PROGRAM):
        return f"{model_type} chats are rendered by a program of the engine"
    if (model_dir / "tekken.json").exists():
        return "the chats of mistral-common models are rendered by that library"
    return ""


def _find_templates(model_dir: Path, config: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    inside = config.get("chat_template")
    if isinstance(inside, str):
        found["default"] = inside
    elif isinstance(inside, list):
        found |= {entry["name"]: entry["template"] for entry in inside}
    files = {"default": model_dir / "chat_template.jinja"}
    files |= {path.stem: path for path in model_dir.glob("additional_chat_templates/*.jinja")}
    found |= {name: read_text(path) for name, path in files.items() if path.exists()}
    processor = read_json(model_dir / "chat_template.json").get("chat_template")
    if isinstance(processor, str) and not files["default"].exists():
        found["processor"] = processor
        found.setdefault("default", processor)
    return found
