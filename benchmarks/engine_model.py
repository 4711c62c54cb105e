"""The engine model at the load that the simulator puts on it: eight engines, long shared prompts.

The load is our own, with the averages of Mooncake's conversation trace (12,000 prompt tokens, 343
output tokens, 3.3 requests a second): chats of a few turns, each turn the one before and more. Time
is the process's own, and that of making the prompts is left out.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table

from kvatlas.workload.device import device
from kvatlas.workload.engine import Engine
from kvatlas.workload.models import load_layout
from kvatlas.workload.pool import pool_blocks
from kvatlas.workload.prompt_keys import PromptKeys, key_step
from kvatlas.workload.protocol import Admitted, Arrive, Effect, Produced
from kvatlas.workload.spec import EngineSpec

ENGINES = 8
REQUESTS = 3_000
STEPPING_REQUESTS = 400
RATE_PER_S = 3.34
TURNS = 3.0
OUTPUT_TOKENS = 343
KV_BYTES = 60 << 30
LAYOUT = load_layout("deepseek-v4-flash", engine="vllm")
SPEC = EngineSpec(
    blocks=pool_blocks(LAYOUT, KV_BYTES),
    device=device("H200"),
    devices=2,
    weight_bytes=160 * 10**9,
)


def load(requests: int, seed: int) -> Iterator[tuple[float, int, Arrive]]:
    """(arrival, chat, request). A turn's prompt is the last one's and some 5,000 tokens more."""
    rng = random.Random(seed)
    chats: list[tuple[int, bytes]] = []
    now = 0.0
    for number in range(requests):
        now += rng.expovariate(RATE_PER_S)
        if chats and rng.random() < 1 - 1 / TURNS:
            place = rng.randrange(max(0, len(chats) - 60), len(chats))
            chat, text = chats.pop(place)
        else:
            chat, text = number, b""
        more = min(100_000, max(20, int(rng.lognormvariate(7.6, 1.35))))
        text += rng.randbytes(4 * more)
        chats.append((chat, text))
        output = min(2_000, max(1, int(rng.expovariate(1 / OUTPUT_TOKENS))))
        keys = PromptKeys(text, key_step(LAYOUT))
        yield now, chat, Arrive(str(number), text, output, keys=keys)


def play(requests: int, *, leap: bool, publish: bool = True) -> dict[str, float]:
    """All of it through ``ENGINES`` engines, each chat on one. Figures per request."""
    engines = [Engine(LAYOUT, SPEC, leap=leap, publish=publish) for _ in range(ENGINES)]
    spent = dict.fromkeys(("prompt", "hit", "output", "calls"), 0)

    def count(effects: tuple[Effect, ...]) -> None:
        spent["calls"] += 1
        for effect in effects:
            if isinstance(effect, Admitted):
                spent["hit"] += effect.cached_tokens
            elif isinstance(effect, Produced):
                spent["output"] += effect.count

    work = load(requests, seed=1)
    busy = 0.0
    for at, chat, arrive in work:
        started = time.process_time()
        engine = engines[chat % ENGINES]
        while (due := engine.next_deadline()) is not None and due <= at:
            count(engine.tick(due))
        count(engine.handle(arrive, at))
        busy += time.process_time() - started
        spent["prompt"] += len(arrive.tokens) // 4
    started = time.process_time()
    for engine in engines:
        while (due := engine.next_deadline()) is not None:
            count(engine.tick(due))
    busy += time.process_time() - started
    return {
        "us_per_request": 1e6 * busy / requests,
        "requests_per_s": requests / busy,
        "prompt_tokens": spent["prompt"] / requests,
        "output_tokens": spent["output"] / requests,
        "hit_share": spent["hit"] / spent["prompt"],
        "steps": sum(e.steps for e in engines) / requests,
        "calls": spent["calls"] / requests,
        "preemptions": float(sum(e.preemptions for e in engines)),
    }


def run() -> dict[str, Any]:
    """Steps one by one and leaps, on the same requests; then leaps on many."""
    figures = {
        "stepping": play(STEPPING_REQUESTS, leap=False),
        "leaping": play(STEPPING_REQUESTS, leap=True),
        "leaping, many": play(REQUESTS, leap=True),
        "leaping, no events": play(REQUESTS, leap=True, publish=False),
    }
    table = Table("", *figures["stepping"])
    for name, each in figures.items():
        table.add_row(name, *(f"{v:,.3f}" if v < 10 else f"{v:,.0f}" for v in each.values()))
    Console(width=160).print(table)
    ratio = figures["stepping"]["us_per_request"] / figures["leaping"]["us_per_request"]
    print(f"a leaping engine takes 1/{ratio:.1f} of the time of one that steps")
    return {**figures, "stepping_to_leaping": ratio}
