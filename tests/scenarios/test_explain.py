"""What `kvatlas explain` says, as a person reads it: a hit, a miss, a pair, what a request fell
back to."""

from __future__ import annotations

import re
from array import array
from pathlib import Path

import msgspec
import pytest
from harness import COMPLETION, FakeWorker, Held, Product, announce, fresh_tokens
from pairs_kit import decode, fails, nixl_prefill, prefill

from kvatlas.cli.main import main
from kvatlas.config import GatewayConfig, RouterConfig
from kvatlas.service.decision_log import Entry
from kvatlas.validate.replay import replay

PROMPT = fresh_tokens(100)
NUMBER = r"-?\d+\.\d{3}"


async def told(product: Product, name: str) -> str:
    """The page, all its seconds as they are written: S."""
    text = (await product.get(f"/kvatlas/explain/{name}")).body.decode()
    return re.sub(rf"[+-]?{NUMBER}", "S", re.sub(" +", " ", text))


async def ask(product: Product, name: str, prompt: list[int] = PROMPT) -> None:
    body = {"model": "m", "prompt": prompt, "max_tokens": 4, "stream": True}
    await product.post(COMPLETION, body, {"x-request-id": name})


PRICE = "S s = wait S + load S + recompute S + crowd S + charge S; resumes at"


async def test_a_hit_and_a_miss() -> None:
    async with (
        FakeWorker("w1") as w1,
        FakeWorker("w2") as w2,
        Product([w1.config(), w2.config()]) as product,
    ):
        await w1.heard()
        announce(w1.events, array("I", PROMPT).tobytes(), "a")
        held = {"w1": Held(100, {})}
        await product.until_equal(lambda: product.ask(PROMPT), held)
        w1.cached_tokens = 96
        await ask(product, "hit")
        lines = (await told(product, "hit")).splitlines()
        assert lines[:4] == [
            "request hit: 100 prompt tokens, policy price",
            f"→ w1 {PRICE} 96, 0 in flight",
            f" w2 {PRICE} 0, 0 in flight",
            " lost: S s",
        ]
        assert lines[4] == " ended with status 200 on w1; engine reused 96 tokens"
        assert lines[5].startswith(" first token after S s, predicted S s; regret S s")
        assert len(lines) == 6
        w1.cached_tokens = 0
        await ask(product, "miss", fresh_tokens(100, 1))
        miss = await told(product, "miss")
        assert miss.count(f"{PRICE} 0, 0 in flight") == 2
        assert re.search(r" ended with status 200 on w\d; engine reused 0 tokens", miss)


async def test_a_pair() -> None:
    async with (
        FakeWorker("p", nixl_prefill) as p,
        FakeWorker("d") as d,
        FakeWorker("c") as c,
    ):
        c.running = 1000  # by price the pair comes first
        p.cached_tokens = 32
        async with Product([prefill(p), decode(d), c.config()]) as product:
            await product.settled()
            await ask(product, "pair")
            lines = (await told(product, "pair")).splitlines()
            price = PRICE.replace(" + crowd", " + hand-off S + crowd")
            assert lines[:4] == [
                "request pair: 100 prompt tokens, policy price",
                f"→ p {price} 0, 0 in flight; prefills for a pair",
                f" c {PRICE} 0, 1000 in flight",
                " lost: over its fair share",
            ]
            assert lines[4] == " ended with status 200 on d; p reused 32 tokens"
            assert lines[5].startswith(" first token after S s, predicted S s; regret S s")
            assert lines[6] == " prefilled by p, decoded by d"


async def test_what_it_fell_back_to(tmp_path: Path) -> None:
    """On the page, in the decision log, and in what is decided again from a recording."""
    log, recording = tmp_path / "decisions.jsonl", tmp_path / "gateway.kvr"
    router = RouterConfig(decision_log=str(log), recording=str(recording))
    gateway = GatewayConfig(port=0, deadline_s=30.0)
    async with (
        FakeWorker("p", nixl_prefill) as p,
        FakeWorker("d", fails(500)) as d,
        FakeWorker("c") as c,
    ):
        c.running = 1000
        workers = [prefill(p), decode(d), c.config()]
        async with Product(workers, router=router, gateway=gateway) as product:
            await product.settled()
            await ask(product, "down")
            lines = (await told(product, "down")).splitlines()
            assert lines[4:6] == [
                " fell back from the decode half d after S s (failed) to one engine",
                " ended with status 200 on c; engine reused 0 tokens",
            ]
            assert lines[2].startswith("→ c ")
            body = {"model": "m", "prompt": PROMPT, "n": 2}
            await product.post(COMPLETION, body, {"x-request-id": "whole"})
            assert " fell back from a pair after S s (n) to one engine" in await told(
                product, "whole"
            )
    entries = {e.decision.id: e for e in map(_entry, log.read_text().splitlines())}
    (step,) = entries["down"].fallbacks
    assert (step.rung, step.reason, step.to, step.worker) == ("decode", "failed", "engine", "d")
    assert step.cost_s > 0
    assert [f.reason for f in entries["whole"].fallbacks] == ["n"]
    assert replay(recording).different == 0


def _entry(line: str) -> Entry:
    return msgspec.json.decode(line, type=Entry)


def test_the_command_prints_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    """That the gateway is not there is told."""
    assert main(["explain", "last", "--url", "http://127.0.0.1:1"]) != 0
    assert "127.0.0.1:1" in capsys.readouterr().err
