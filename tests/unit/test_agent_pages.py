"""Engines that name their own pages, at an agent: what they tell of their pools, and ask."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from kvatlas.core.layout import Rule
from kvatlas.errors import EngineError
from kvatlas.service import agent_wire as wire
from kvatlas.service.agent import NodeAgent, Settings
from kvatlas.service.agent_loads import Engine
from kvatlas.service.agent_member import POOLS_MAX, member_of

HELLO = wire.Hello(
    wire.VERSION,
    "model",
    ("model",),
    b"{}",
    "sglang",
    "0.5.23",
    "torch.bfloat16",
    16,
    pools=(wire.PoolInfo("kv", "a", 4096, False), wire.PoolInfo("swa", "b", 512, True)),
)


def told(**changed: object) -> wire.Hello:
    return msgspec.structs.replace(HELLO, **changed)


def pool(**changed: object) -> tuple[wire.PoolInfo, ...]:
    return (msgspec.structs.replace(HELLO.pools[0], **changed),)


def test_pools_become_parts_of_a_layout() -> None:
    layout = member_of(HELLO).layout
    assert [(c.name, c.rule, c.stored_block_bytes) for c in layout.components] == [
        ("kv", Rule.CHAIN, 4096),
        ("swa", Rule.WINDOW, 512),
    ]
    assert layout.grid_tokens == 16
    assert layout.resume_point_bytes() == 512


def test_whoever_keeps_other_bytes_has_another_fingerprint() -> None:
    ours = member_of(HELLO).fingerprint.digest()
    for other in (
        told(model="another"),
        told(weights_digest="x"),
        told(engine_version="0.5.24"),
        told(kv_dtype="torch.float16"),
        told(block_tokens=32),
        told(pools=HELLO.pools[:1]),
        told(pools=pool(form="other layout") + HELLO.pools[1:]),
        told(pools=pool(page_bytes=8192) + HELLO.pools[1:]),
    ):
        assert member_of(other).fingerprint.digest() != ours


@pytest.mark.parametrize(
    ("hello", "why"),
    [
        (told(block_tokens=0), "a page has 1 to 65536 tokens, not 0"),
        (told(pools=pool(page_bytes=0)), "a page has 1 to 4294967296 bytes: kv"),
        (told(pools=pool(trailing=True)), "prefixes cannot be told apart"),
        (told(pools=pool() * 2), "pools have names of their own"),
        (
            told(pools=tuple(wire.PoolInfo(str(i), "", 1, False) for i in range(POOLS_MAX + 1))),
            "64 at most",
        ),
    ],
)
def test_pools_that_cannot_be_booked_are_refused(hello: wire.Hello, why: str) -> None:
    with pytest.raises(EngineError, match=why):
        member_of(hello)


def test_questions_that_are_none_are_refused(tmp_path: Path) -> None:
    async def ask() -> None:
        settings = Settings(tmp_path / "s", 1 << 20, secret=b"k" * 32)
        async with NodeAgent(settings) as agent:
            member = member_of(HELLO)
            known = Engine(member.fingerprint.digest(), member.layout.grid_tokens)
            agent.driver.loads.engines["nobody"] = known
            for message, why in (
                (wire.Look("q", b"x" * 31, 0), "32 bytes each"),
                (wire.Look("q", b"x" * 32, 2), "page 2 of 1"),
                (wire.Take("q", b"", -1, False, 1.0), "page -1 of 0"),
            ):
                with pytest.raises(EngineError, match=why):
                    agent._pages.answer("nobody", member, message)
            answer = agent._pages.answer("nobody", member, wire.Look("q", b"x" * 32, 0))
            assert answer == wire.Present("q", 0, ())

    asyncio.run(ask())


def test_keys_are_of_one_fingerprint_and_secret(tmp_path: Path) -> None:
    async def keys(secret: bytes, hello: wire.Hello) -> tuple[bytes, ...]:
        async with NodeAgent(Settings(tmp_path / "s", 1 << 20, secret=secret)) as agent:
            return agent._pages._keys(member_of(hello).fingerprint.digest(), b"a" * 32 + b"b" * 32)

    ours = asyncio.run(keys(b"k" * 32, HELLO))
    assert ours == asyncio.run(keys(b"k" * 32, HELLO))
    assert len(set(ours)) == 2
    for other in (
        asyncio.run(keys(b"l" * 32, HELLO)),
        asyncio.run(keys(b"k" * 32, told(model="another"))),
    ):
        assert not set(ours) & set(other)
