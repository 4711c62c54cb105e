"""State from outside the pool, against vLLM's own cache manager: the same room asked for, the same
blocks found, announced and evicted, in the shape of DeepSeek V4's groups."""

from __future__ import annotations

import random
import struct
from typing import Any

import pytest
from vllm_kit import told_by_vllm

from kvatlas.core.events import BlockRemoved, BlockStored, Event
from kvatlas.core.layout import Group, Layout
from kvatlas.service.wire import Decoder
from kvatlas.workload.holding import Holding
from kvatlas.workload.pool import Pool

pytestmark = pytest.mark.engine

_KIND = "sliding_window_mla"
V4 = Layout(
    "v4",
    "vllm",
    "",
    256,
    (),
    (
        Group("swa", _KIND, 64, 128, copies=2),
        Group("global", "mla_attention", 256),
        Group("c4_state", _KIND, 4, 8),
        Group("c128_state", _KIND, 8, 128),
    ),
)
CHUNK = 700


class Ours:
    """The same calls on our pool, one request's own state beside it."""

    def __init__(self, wish: dict[str, Any]) -> None:
        self.pool = Pool(V4, wish["blocks"], retention=wish["retention"], step_tokens=CHUNK)
        self.holdings: list[Holding] = [
            self.pool.open(struct.pack(f"<{len(p)}I", *p)) for p in wish["requests"]
        ]
        self.computed = [0] * len(self.holdings)

    def call(self, name: str, number: int, argument: int, reserved: int) -> tuple[bool, int]:
        pool, holding = self.pool, self.holdings[number]
        if name == "begin":
            hit = pool.lookup(holding)
            if argument > hit.tokens:
                done = pool.admit_load(holding, hit, argument, reserved) is not None
                upto = argument
            else:
                upto = min(holding.size, hit.tokens + CHUNK)
                done = pool.admit(holding, hit, upto)
            self.computed[number] = upto
            return done, hit.tokens
        if name == "land" and argument:
            pool.land(holding, self.computed[number])
            self.computed[number] = min(self.computed[number], holding.size - 1)
        elif name == "step":
            if self.computed[number] >= holding.size:
                holding.append(7)
            start = self.computed[number]
            upto = min(holding.size, start + CHUNK)
            self.computed[number] = upto
            act = pool.resume if argument else pool.grow
            return act(holding, start, upto), 0
        else:
            pool.release(holding)
        return True, 0


def script(seed: int) -> dict[str, Any]:
    """Requests that share prefixes, in flight together; loads that come and that fail."""
    draw = random.Random(seed)
    prompts: list[list[int]] = []
    calls: list[tuple[str, int, int, int]] = []
    flying: dict[int, str] = {}
    for number in range(30):
        old = draw.choice(prompts[-6:]) if prompts and draw.random() < 0.7 else []
        head = old[: draw.choice([len(old), draw.randrange(len(old) + 1)])]
        prompts.append(head + [draw.randrange(50) for _ in range(draw.randrange(1, 900))])
        size = len(prompts[-1])
        outside = draw.choice([0, size, size // 256 * 256, draw.randrange(size) // 256 * 256])
        calls.append(("begin", number, outside, draw.choice([0, 0, 20])))
        flying[number] = "load"
        for _ in range(draw.randrange(12)):
            one = draw.choice(sorted(flying))
            if flying[one] == "load":
                came = int(draw.random() < 0.8)
                calls.append(("land", one, came, 0))
                flying[one] = "first"
                if not came:
                    del flying[one]
            elif draw.random() < 0.12:
                calls.append(("end", one, 0, 0))
                del flying[one]
            else:
                calls.append(("step", one, int(flying[one] == "first"), 0))
                flying[one] = "on"
            if not flying:
                break
    return {"requests": prompts, "calls": calls, "chunk": CHUNK}


def theirs(wishes: list[dict[str, Any]]) -> list[list[list[Any]]]:
    return told_by_vllm("vllm_loads_child.py", wishes, len(wishes))


def named(event: Event, names: dict[int, int]) -> tuple[Any, ...]:
    """An event with its hashes by order of appearance."""

    def name(value: int) -> int:
        return names.setdefault(value, len(names))

    if isinstance(event, BlockStored):
        parent = None if event.parent is None else name(event.parent)
        hashes = [name(h) for h in event.hashes]
        count = event.range_tokens or len(event.tokens) // 4  # windows' tokens are not decoded
        return (event.group, event.block_tokens, parent, hashes, count)
    assert isinstance(event, BlockRemoved)
    return (event.group, [name(h) for h in event.hashes])


def test_loads_take_find_and_announce_what_vllm_does() -> None:
    wishes = [
        script(seed) | {"blocks": blocks, "retention": retention}
        for seed, (blocks, retention) in enumerate(
            [(4000, 0), (4000, None), (400, 0), (400, 512), (250, None), (250, 0)] * 4
        )
    ]
    decoder = Decoder()
    counts = {"loads": 0, "landed": 0, "removed": 0, "refused": 0}
    for wish, told in zip(wishes, theirs(wishes), strict=True):
        ours = Ours(wish)
        our_names: dict[int, int] = {}
        their_names: dict[int, int] = {}
        for at, (call, (done, hit, free, frame)) in enumerate(
            zip(wish["calls"], told, strict=False)
        ):
            assert ours.call(*call) == (done, hit), (at, call)
            batch = decoder.decode(0, bytes.fromhex(frame))
            events = [named(e, our_names) for e in ours.pool.take_events()]
            assert events == [named(e, their_names) for e in batch.events], (at, call)
            assert ours.pool.free == free, (at, call)
            counts["loads"] += call[0] == "begin" and call[2] > hit
            counts["landed"] += call[0] == "land" and call[2]
            counts["removed"] += any(isinstance(e, BlockRemoved) for e in batch.events)
            counts["refused"] += not done
    assert min(counts.values()) > 5, counts
