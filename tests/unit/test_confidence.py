"""Promises of engines that do not announce their windows, and what is counted of them."""

from __future__ import annotations

from array import array

from kvatlas.core.directory import Directory
from kvatlas.core.dispatch import Dispatcher
from kvatlas.core.events import BlockStored
from kvatlas.core.keys import Keyring
from kvatlas.core.layout import Layout, drafted, plain
from kvatlas.core.promises import HitGap
from kvatlas.core.records import Publisher
from kvatlas.core.router import Params, Router
from kvatlas.service.decision_log import DecisionLog, explain
from kvatlas.service.steer import Inbound, Outcome, Route
from kvatlas.service.steering import Rank, Steering
from kvatlas.service.tokens import Prompt
from kvatlas.workload.models import load_layout

IDS = array("I", range(2049)).tobytes()
FP = b"\1" * 32


class Tokens:
    async def prompt(self, path: str, body: object) -> Prompt:
        return Prompt(tokens=IDS)


class Bench:
    """One engine that holds 2,048 tokens of the only prompt."""

    def __init__(self, layout: Layout) -> None:
        ring = Keyring(b"a secret for the tests")
        self.directory = Directory(ring)
        self.log = DecisionLog(10)
        self.steering = Steering(
            dispatcher=Dispatcher(self.directory, Router(Params(prefill_tokens_per_s=1000)), ring),
            log=self.log,
            tokens=Tokens(),
            clock=lambda: 0.0,
        )
        self.engine = Publisher("e")
        self.steering.add(Rank(self.engine, "http://e", {"m": ""}, layout, FP))
        chain = BlockStored(tuple(range(8)), None, IDS[: 2048 * 4], 256)
        assert self.directory.apply(self.engine, [chain]).stored == 8

    async def ask(self, cached: int) -> Route:
        route = await self.steering.choose(Inbound("r", "/v1/completions", {"model": "m"}, {}))
        self.steering.finished(route, Outcome(route.targets[0], 200, 2049, cached, 5))
        return route


SGLANG = load_layout("deepseek-v4-flash", engine="sglang", kv_dtype="fp8")


async def test_what_an_engine_keeps_is_what_is_counted() -> None:
    bench = Bench(SGLANG)
    first = await bench.ask(cached=512)
    assert first.targets[0].expected_hit_tokens == 2048  # nothing is known yet
    hits = [(await bench.ask(cached=512)).targets[0].expected_hit_tokens for _ in range(60)]
    assert hits == sorted(hits, reverse=True)
    assert 512 <= hits[-1] < 768  # a quarter of 2,048, and a little of the first belief
    text = explain(bench.log.get("r"))  # type: ignore[arg-type]
    assert "believed: its events do not tell of its windows" in text
    recovered = [(await bench.ask(cached=2048)).targets[0].expected_hit_tokens for _ in range(90)]
    assert recovered[-1] > 1900  # measured against the whole promise, not against what was counted


async def test_an_engine_that_announces_everything_is_taken_at_its_word() -> None:
    plain = Layout("m", "vllm", "", 256, (), SGLANG.groups)
    bench = Bench(plain)
    for _ in range(30):
        assert (await bench.ask(cached=512)).targets[0].expected_hit_tokens == 2048
    assert "believed" not in explain(bench.log.get("r"))  # type: ignore[arg-type]
    assert bench.steering.gaps[bench.engine].flag  # its flag says so instead


async def test_a_draft_head_resumes_a_block_earlier() -> None:
    """The block that ends the prompt is asked for, though nothing can resume at its end."""
    bench = Bench(drafted(plain(256, engine="vllm")))
    assert (await bench.ask(cached=1792)).targets[0].expected_hit_tokens == 1792
    decision = bench.log.last()
    assert decision is not None
    assert decision.decision.plans[0].chain_tokens == 2048


def test_confidence_begins_with_belief() -> None:
    gap = HitGap()
    assert gap.confidence() == 1
    gap.observe(expected=1024, reported=0)
    assert 0.7 < gap.confidence() < 0.9
    for _ in range(200):
        gap.observe(expected=1024, reported=0)
    assert gap.confidence() < 0.2
