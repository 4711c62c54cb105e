"""The directory's promises against vLLM's own cache manager, fed with its own events.

Random requests with shared prefixes, junctions, chunks, decoding, eviction and hits reported in
full, in the shape of DeepSeek V4's groups. A promise above what vLLM then finds is a false hit:
there must be none. With a draft vLLM looks one window block ahead, and no event says to which
tokens that block belongs: where the directory cannot tell it promises less.
"""

from __future__ import annotations

import itertools
from array import array
from typing import Any

import pytest
from vllm_kit import told_by_vllm

from kvatlas.core.directory import Directory
from kvatlas.core.keys import Keyring
from kvatlas.core.layout import Group, Layout
from kvatlas.core.records import Publisher
from kvatlas.service.wire import Decoder

pytestmark = pytest.mark.engine

W1, FP = Publisher("w1"), b"f" * 32


def layout(draft: bool) -> Layout:
    kind = "sliding_window_mla"
    groups = (
        Group("swa", kind, 64, 128, copies=2, lookahead=int(draft)),
        Group("global", "mla_attention", 256),
        Group("c4_state", kind, 4, 8),
        Group("c128_state", kind, 8, 128),
    )
    return Layout("v4", "vllm", "", 256, (), groups)


Steps = list[tuple[list[int], int, str]]


def asked(wishes: list[dict[str, Any]]) -> list[Steps]:
    base: dict[str, Any] = {
        "seed": 0,
        "requests": 0,
        "blocks": 20_000,
        "retention": 0,
        "chunk": 2048,
    }
    base["lengths"] = []
    return told_by_vllm("vllm_cache_child.py", [base | wish for wish in wishes], len(wishes))


def compared(steps: Steps, draft: bool) -> list[tuple[int, int, int]]:
    """Per question: its length, what the directory promised, what vLLM found."""
    keyring = Keyring(b"a test's own secret")
    directory = Directory(keyring)
    shape = layout(draft)
    directory.register(W1, shape, FP)
    decoder = Decoder()
    result = []
    for seq, (prompt, hit, frame) in enumerate(steps):
        batch = decoder.decode(seq, bytes.fromhex(frame))
        applied = directory.apply(W1, batch.events)
        assert (batch.malformed, applied.undeclared, applied.malformed, applied.orphans) == (0,) * 4
        asked_tokens = prompt[: shape.asked_blocks(len(prompt)) * 256]
        chain = keyring.chain(keyring.root(FP), array("I", asked_tokens).tobytes(), 256)
        found = directory.peek(chain, FP)
        promised = found[0].tokens if found else 0
        where = directory.positions(W1, chain)
        assert where is not None
        assert where.deepest() == promised
        result.append((len(prompt), promised, hit))
    return result


def test_what_a_draft_costs() -> None:
    """A prompt of 1,000, 1,024 and 1,025 tokens, asked again, and followed by 700 more."""
    lengths = [1000, 1024, 1025]
    plain, drafted = (
        compared(steps, draft)
        for draft, steps in zip(
            (False, True),
            asked([{"draft": draft, "lengths": lengths} for draft in (False, True)]),
            strict=True,
        )
    )
    assert [hit for _, _, hit in plain] == [0, 768, 768, 0, 768, 768, 0, 1024, 1024]
    assert [promised for _, promised, _ in plain] == [hit for _, _, hit in plain]
    assert [hit for _, _, hit in drafted] == [0, 512, 768, 0, 768, 768, 0, 768, 768]
    # The third went on at 768 by a block that ends at 832, inside a chain block of which the first
    # two prompts had only a part: no key of ours stands for it.
    assert [promised for _, promised, _ in drafted] == [0, 512, 512, 0, 768, 768, 0, 768, 768]


RETENTION = (0, 512, None)


def test_never_more_than_vllm_finds() -> None:
    wishes: list[dict[str, Any]] = [
        {"draft": d, "retention": r, "blocks": b, "chunk": c, "seed": seed, "requests": 60}
        for seed, (d, r, b, c) in enumerate(
            itertools.product((False, True), RETENTION, (700, 20_000), (700, 2048))
        )
    ]
    shares: dict[bool, list[float]] = {False: [], True: []}
    for wish, steps in zip(wishes, asked(wishes), strict=True):
        rows = compared(steps, wish["draft"])
        assert [row for row in rows if row[1] > row[2]] == [], wish
        found = sum(hit for _, _, hit in rows)
        assert found > 10 * 256, wish
        shares[wish["draft"]].append(sum(promised for _, promised, _ in rows) / found)
    assert min(shares[False]) > 0.9
    assert sum(shares[False]) / len(shares[False]) > 0.98
    assert sum(shares[True]) / len(shares[True]) > 0.4
