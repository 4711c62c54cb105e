"""The demo's small parts: its tokenizer, its pace, its progress."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console
from tokenizers import Tokenizer

from kvatlas.demo import real, scale
from kvatlas.demo.progress import Waiting
from kvatlas.demo.vocabulary import write_tokenizer
from kvatlas.service.chat_template import ChatTemplate
from kvatlas.workload.chats import generate


def test_its_tokenizer_knows_the_words_of_the_chats(tmp_path: Path):
    chats = generate(scale.SHAPE)
    write_tokenizer(tmp_path, [chat.system for chat in chats[:12]])
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = chats[0].system
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == text
    assert len(ids) < 1.4 * len(text.split())
    assert ChatTemplate.load(tmp_path).usable


def test_roles_are_single_tokens_in_its_chat_template(tmp_path: Path):
    write_tokenizer(tmp_path, ["some words to learn from"])
    body = {"messages": [{"role": "user", "content": "words"}]}
    rendered = ChatTemplate.load(tmp_path).render(body)
    assert rendered == "<|user|>words<|end|><|assistant|>"
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokens = tokenizer.encode(rendered, add_special_tokens=False).tokens
    assert tokens[0] == "<|user|>"
    assert tokens[-2:] == ["<|end|>", "<|assistant|>"]


@pytest.mark.parametrize(
    ("rate", "expected"), [(3000.0, 1.0), (275.0, 2.0), (22.0, 25.0), (1.0, 25.0)]
)
def test_slow_machines_are_given_time_within_bounds(rate: float, expected: float):
    assert real.pace(rate) == pytest.approx(expected)


def test_one_pool_holds_a_share_of_the_chats_but_not_all_of_them():
    """Otherwise the demo would show nothing, or only thrashing."""
    shape = real.SHAPE
    tokens = 1.35 * (shape.groups * shape.system_words)
    tokens += 1.35 * shape.sessions * shape.turns * (shape.turn_words + real.OUTPUT_TOKENS)
    assert tokens / real.ENGINES < real.POOL_TOKENS < tokens


def test_progress_is_plain_lines_where_there_is_no_terminal():
    console = Console(force_terminal=False, width=200)
    with console.capture() as captured, Waiting(console, "wait for it", 3) as waiting:
        waiting.say("first")
        waiting.step()
    lines = captured.get().splitlines()
    assert lines == ["  wait for it …", "  wait for it: done in 0 s"]
