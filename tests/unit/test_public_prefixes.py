"""Policies of public prefixes: what is public of a prompt, and which policies are refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokens_kit import local, model_dir

from kvatlas.core.tenancy import prefix_digest
from kvatlas.errors import ConfigError
from kvatlas.service import public_prefixes
from kvatlas.service.public_prefixes import STEP_TOKENS, Public, PublicPrefixes, of_all
from kvatlas.service.tokens import Prompt, Tokenizer
from kvatlas.service.verify import CHAT, COMPLETION

__all__ = ["local", "model_dir"]  # fixtures
LONG = "the quick brown fox jumps over the lazy dog and runs on " * 20
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SYSTEM = {"role": "system", "content": LONG}


def pack(ids: list[int]) -> bytes:
    return b"".join(i.to_bytes(4, "little") for i in ids)


def policy(folder: Path, text: str, **files: object) -> Path:
    for name, content in files.items():
        written = content if isinstance(content, str) else json.dumps(content)
        (folder / name).write_text(written)
    path = folder / "public.toml"
    path.write_text(text)
    return path


async def as_letters(_: str, body: Mapping[str, Any]) -> Prompt:
    """A token per character, and one in front of each prompt."""
    return Prompt(tokens=pack([1, *map(ord, body["prompt"])]), source="local")


async def test_a_text_is_public_up_to_where_prompts_begin_to_differ(tmp_path: Path) -> None:
    path = policy(tmp_path, '[[public]]\nname = "a"\ntext = "a"\n', a="x" * 40)
    prefixes = PublicPrefixes(path, as_letters)
    await prefixes.refresh()
    assert prefixes.problems == {}
    for text, tokens in (
        ("x" * 40, 32),  # whole steps of 16, the first token included
        ("x" * 39 + "y", 32),
        ("x" * 31 + "y" * 30, 32),
        ("x" * 30 + "y" * 30, 16),
        ("x" * 14, 0),
        ("y" + "x" * 50, 0),
        ("", 0),
    ):
        ids = (await as_letters("", {"prompt": text})).tokens
        found = prefixes.longest(ids)
        assert found.tokens == tokens, text
        if tokens:
            assert found.digest == prefix_digest(ids[: 4 * tokens])


@given(st.lists(st.lists(st.integers(0, 2), max_size=70), max_size=4), st.data())
def test_longest_is_what_a_look_at_each_says(entries: list[list[int]], data: st.DataObject) -> None:
    prefixes = PublicPrefixes.__new__(PublicPrefixes)
    prefixes._closed, prefixes._single = {}, {}
    single = data.draw(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=70), max_size=3))
    for ids in entries:
        public_prefixes._add(prefixes._closed, pack(ids))
    for ids in single:
        prefixes._single.setdefault(len(ids), set()).add(prefix_digest(pack(ids)))
    begin = data.draw(st.sampled_from([[], *entries, *single]))
    prompt = begin[: data.draw(st.integers(0, 70))] + data.draw(st.lists(st.integers(0, 2)))
    steps = [ids[:n] for ids in entries for n in range(STEP_TOKENS, len(ids) + 1, STEP_TOKENS)]
    fits = [ids for ids in (*steps, *single) if prompt[: len(ids)] == ids]
    best = max(fits, key=len, default=[])
    strides = data.draw(st.sampled_from([(16,), (32, 16), (48, 16), (512, 16)]))
    with patch.object(public_prefixes, "_STRIDES", strides):
        found = prefixes.longest(pack(prompt))
    assert found == (Public(len(best), prefix_digest(pack(best))) if best else Public())


async def test_messages_and_tools_go_through_the_models_own_template(
    tmp_path: Path, local: Tokenizer
) -> None:
    text = (
        '[[public]]\nname = "s"\nmessages = "s.json"\nmodel = "m"\n'
        '[[public]]\nname = "t"\ntext = "t.txt"\n'
    )
    path = policy(tmp_path, text, **{"s.json": {"messages": [SYSTEM]}, "t.txt": LONG})
    prefixes = PublicPrefixes(path, local.prompt)
    await prefixes.refresh()
    assert prefixes.problems == {}

    async def public(path: str, **body: Any) -> tuple[int, int]:
        prompt = await local.prompt(path, {"model": "m", **body})
        assert not prompt.reason
        return prefixes.longest(prompt.tokens).tokens, prompt.count

    user = {"role": "user", "content": "what is it about?"}
    tokens, count = await public(CHAT, messages=[SYSTEM, user])
    assert count - 60 < tokens < count
    other = {"role": "system", "content": LONG[:400] + "idle"}
    short, _ = await public(CHAT, messages=[other, user])
    assert 0 < short < tokens  # up to where it differs
    assert (await public(CHAT, messages=[user]))[0] == 0
    tokens, count = await public(COMPLETION, prompt=LONG + "and then")
    assert count - 30 < tokens < count
    assert (await public(COMPLETION, prompt="No: " + LONG))[0] == 0


async def test_what_every_prompt_begins_with_is_no_prefix(tmp_path: Path, local: Tokenizer) -> None:
    bare = (await local.prompt(CHAT, {"messages": [{"role": "user", "content": "hi"}]})).tokens
    digest = prefix_digest(bare[:4]).hex()
    text = (
        f'[[public]]\nname = "d"\ntokens = 1\ndigest = "{digest}"\n'
        '[[public]]\nname = "empty"\nmessages = "s.json"\n'
    )
    path = policy(tmp_path, text, **{"s.json": {"messages": [], "tools": [TOOL]}})
    prefixes = PublicPrefixes(path, local.prompt)
    await prefixes.refresh()
    assert prefixes.longest(bare).tokens == 0
    assert "every prompt begins with it" in prefixes.problems["empty"]
    assert prefixes._closed == {}


async def test_what_cannot_be_made_into_tokens_is_not_public_and_flagged(tmp_path: Path) -> None:
    answers = [Prompt(reason="endpoint_failed")]

    async def failing(path: str, body: Mapping[str, Any]) -> Prompt:
        return answers[0] if answers else await as_letters(path, body)

    path = policy(tmp_path, '[[public]]\nname = "a"\ntext = "a"\n', a="x" * 40)
    prefixes = PublicPrefixes(path, failing)
    await prefixes.refresh()
    ids = (await as_letters("", {"prompt": "x" * 40})).tokens
    assert "endpoint_failed" in prefixes.problems["a"]
    assert prefixes.longest(ids) == Public()
    answers.clear()
    await prefixes.refresh()
    assert prefixes.problems == {}
    assert prefixes.longest(ids).tokens == 32
    path.write_text("[[public]]\nname = 1\n")
    await prefixes.refresh()
    assert "name" in prefixes.problems["file"]
    assert prefixes.longest(ids).tokens == 32
    path.write_text("")
    await prefixes.refresh()
    assert prefixes.longest(ids) == Public()


async def test_what_is_at_fault_for_good_is_not_tokenized_again(tmp_path: Path) -> None:
    asked = []

    async def counted(path: str, body: Mapping[str, Any]) -> Prompt:
        asked.append(path)
        return Prompt(tokens=bytes(64))  # whatever it is asked: all prompts begin so

    path = policy(tmp_path, '[[public]]\nname = "a"\ntext = "a"\n', a="x" * 40)
    prefixes = PublicPrefixes(path, counted)
    await prefixes.refresh()
    assert "every prompt begins with it" in prefixes.problems["a"]
    count = len(asked)
    await prefixes.refresh()
    assert len(asked) == count
    assert "every prompt begins with it" in prefixes.problems["a"]


async def test_prompts_of_a_batch_are_public_as_far_as_all_of_them(tmp_path: Path) -> None:
    path = policy(
        tmp_path,
        '[[public]]\nname = "a"\ntext = "a"\n[[public]]\nname = "b"\ntext = "b"\n',
        a="x" * 40,
        b="y" * 40,
    )
    prefixes = PublicPrefixes(path, as_letters)
    await prefixes.refresh()
    one, two = (pack([1, *map(ord, text)]) for text in ("x" * 60, "y" * 60))
    assert of_all(prefixes, (one, one)).tokens == 32
    assert of_all(prefixes, (one, one[: 4 * 20])).tokens == 16
    assert of_all(prefixes, (one, two)) == Public()  # each is public, and not the same tokens
    assert of_all(prefixes, (one, pack([5]))) == Public()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('[[public]]\nname = "a"\n', "one way"),
        ('[[public]]\nname = "a"\ntext = "a"\nmessages = "a"\n', "one way"),
        ('[[public]]\nname = "a"\ntext = "empty"\n', "is empty"),
        ('[[public]]\nname = "a"\ntext = "none"\n', "cannot be read"),
        ('[[public]]\nname = "a"\nmessages = "a"\n', "no JSON object"),
        ('[[public]]\nname = "a"\nmessages = "nothing"\n', "no message and no tool"),
        ('[[public]]\nname = ""\ntext = "a"\n', "name"),
        ('[[public]]\nname = "a"\ntext = "a"\n[[public]]\nname = "a"\ntext = "a"\n', "two entries"),
        (f'[[public]]\nname = "a"\ndigest = "{"0" * 64}"\n', "count of tokens"),
        ('[[public]]\nname = "a"\ntext = "a"\ntokens = 5\n', "count of tokens"),
        (f'[[public]]\nname = "a"\ntokens = 5\ndigest = "{"0" * 63}"\n', "digest"),
        (
            f'[[public]]\nname = "a"\ntokens = 5\ndigest = "{prefix_digest(b"").hex()}"\n',
            "all would be public",
        ),
        ('[[public]]\nname = "a"\nall = true\n', "unknown key"),
    ],
)
def test_policies_that_are_refused(tmp_path: Path, text: str, why: str) -> None:
    path = policy(tmp_path, text, a="some text", empty=" \n", nothing={"messages": []})
    with pytest.raises(ConfigError, match=why):
        PublicPrefixes(path, as_letters)


def test_a_policy_has_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(public_prefixes, "PREFIXES_MAX", 1)
    path = policy(tmp_path, '[[public]]\nname = "a"\ntext = "a"\n' * 2, a="text")
    with pytest.raises(ConfigError, match="at most 1"):
        PublicPrefixes(path, as_letters)
    monkeypatch.setattr(public_prefixes, "FILE_BYTES_MAX", 3)
    path = policy(tmp_path, '[[public]]\nname = "a"\ntext = "a"\n')
    with pytest.raises(ConfigError, match="larger than 3"):
        PublicPrefixes(path, as_letters)
