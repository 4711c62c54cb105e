"""Overload through the public wire: who is refused, with what words, and that nothing stays."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from harness import Answer, FakeWorker, Product, fresh_tokens
from picker_kit import picking

from kvatlas.config import GatewayConfig, RouterConfig
from kvatlas.core.admission import Rules
from kvatlas.validate.replay import replay

LONG = 60_000  # tokens: by what short prompts teach, a quarter of a second and more
OBJECTIVE = {"x-slo-ttft-ms": "20"}


class Clock:
    """The router's: it stands still while engines are held up, so what it expects stays."""

    def __init__(self) -> None:
        self.stopped_at: float | None = None

    def __call__(self) -> float:
        return time.monotonic() if self.stopped_at is None else self.stopped_at


class Stage:
    """Two engines that are known well, and held up when ``gate`` is closed."""

    def __init__(self, product: Product, workers: list[FakeWorker], clock: Clock) -> None:
        self.product, self.workers, self.clock = product, workers, clock
        self.gate = asyncio.Event()
        self._asks = 0

    async def ask(self, tokens: int = 16, headers: dict[str, str] | None = None) -> Answer:
        """A prompt like no other, streamed."""
        self._asks += 1
        body = {"model": "m", "prompt": fresh_tokens(tokens, self._asks), "max_tokens": 4}
        return await self.product.post("/v1/completions", body | {"stream": True}, headers)

    @contextlib.asynccontextmanager
    async def busy(self, *tokens: int) -> AsyncIterator[None]:
        """Prompts so long are at the engines, until the end."""
        self.gate.clear()
        self.clock.stopped_at = time.monotonic()
        for worker in self.workers:
            worker.gate = self.gate
        tasks = [asyncio.create_task(self.ask(count)) for count in tokens]
        await self.there(len(tokens))
        yield
        self.clock.stopped_at = None
        self.gate.set()
        assert [answer.status for answer in await asyncio.gather(*tasks)] == [200] * len(tokens)
        await self.product.until_equal(self.product.in_flight, {})

    async def there(self, requests: int) -> None:
        """Wait until the engines have so many."""

        async def so() -> bool:
            return sum(worker.busy for worker in self.workers) == requests

        await self.product.until(so)

    async def refused(self, reason: str) -> float:
        return await self.product.metric("kvatlas_requests_refused_total", reason=reason)


@contextlib.asynccontextmanager
async def stage(
    rules: Rules | None = None,
    gateway: GatewayConfig | None = None,
    router: RouterConfig | None = None,
    known: int = 30,
) -> AsyncIterator[Stage]:
    async with contextlib.AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(FakeWorker(f"w{i}")) for i in range(2)]
        configs, clock = [worker.config() for worker in workers], Clock()
        product = Product(configs, admission=rules, gateway=gateway, router=router, clock=clock)
        made = Stage(await stack.enter_async_context(product), workers, clock)
        await product.settled()
        for _ in range(known):
            assert (await made.ask()).status == 200
        yield made


async def test_what_waiting_makes_late_is_refused_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "gateway.kvr"
    log = tmp_path / "decisions.jsonl"
    router = RouterConfig(recording=str(path), decision_log=str(log))
    async with stage(router=router) as s:
        async with s.busy(LONG, LONG):
            answer = await s.ask(headers=OBJECTIVE | {"x-request-id": "late"})
            error = answer.error
            assert (answer.status, error["code"]) == (429, "slo_unreachable")
            assert error["type"] == "invalid_request_error"
            assert "within 0.02 s: the soonest, w" in error["message"]
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.headers["x-request-id"] == "late"
            assert await s.refused("slo_unreachable") == 1
            text = (await s.product.get("/kvatlas/explain/late")).body.decode()
            assert "objective: the first token within 0.020 s" in text
            assert "refused: slo_unreachable: the soonest would be w" in text
            assert sum((await s.product.in_flight()).values()) == 2
        assert (await s.ask(headers={"x-slo-ttft-ms": "60000"})).status == 200
        for result, count in (("met", 1), ("missed", 0)):
            assert await s.product.metric("kvatlas_ttft_objectives_total", result=result) == count
        text = (await s.product.get("/kvatlas/explain/last")).body.decode()
        assert "objective: the first token within 60.000 s" in text
        assert "refused" not in text
        assert (await s.ask(headers={"x-slo-ttft-ms": "0.001"})).status == 200  # idle, and late
        assert await s.product.metric("kvatlas_ttft_objectives_total", result="missed") == 1
    told = [json.loads(line) for line in log.read_text().splitlines()]
    (refused,) = [row["decision"] for row in told if row["decision"]["refusal"]]
    assert refused["id"] == "late"
    assert refused["refusal"]["reason"] == "slo_unreachable"
    result = replay(path)
    assert (result.decisions, result.different) == (35, 0)


async def test_who_states_no_objective_waits_and_the_default_is_one_for_all() -> None:
    async with stage() as s, s.busy(LONG, LONG, 16):
        pass
    async with stage(gateway=GatewayConfig(port=0, ttft_slo_s=0.02)) as s:
        async with s.busy(LONG, LONG):
            assert (await s.ask()).status == 429
            # Its own word counts before the default: ten minutes are long enough.
            task = asyncio.create_task(s.ask(headers={"x-slo-ttft-ms": "600000"}))
            await s.there(3)
        assert (await task).status == 200


async def test_what_is_late_on_an_idle_engine_is_answered() -> None:
    async with stage() as s:
        async with s.busy(LONG):  # on one of them
            task = asyncio.create_task(s.ask(LONG, OBJECTIVE))
            await s.there(2)
            assert all(worker.busy for worker in s.workers)
        assert (await task).status == 200
        assert await s.refused("slo_unreachable") == 0


@pytest.mark.parametrize("why", ["not known", "switched off"])
async def test_nobody_is_refused_for_slowness(why: str) -> None:
    rules = Rules(by_slo=why != "switched off")
    async with stage(rules, known=30 if why == "switched off" else 5) as s:
        async with s.busy(LONG, LONG):
            task = asyncio.create_task(s.ask(headers=OBJECTIVE))
            await s.there(3)
        assert (await task).status == 200
        assert await s.refused("slo_unreachable") == 0


async def test_over_the_limit_is_told_and_not_untracked() -> None:
    async with stage(Rules(in_flight_max=3)) as s:
        async with s.busy(16, 16, 16):
            again = set()
            for at in range(8):
                answer = await s.ask(headers={"x-request-id": f"over-{at}"})
                assert (answer.status, answer.error["code"]) == (503, "in_flight_max")
                assert "admission.in_flight_max" in answer.error["message"]
                again.add(answer.headers["retry-after"])
            assert again == {"1", "2"}  # who was refused together does not come back together
            assert sum((await s.product.in_flight()).values()) == 3
        assert await s.refused("in_flight_max") == 8
        assert (await s.ask()).status == 200


async def test_through_the_endpoint_picker_the_answer_is_the_same() -> None:
    async with stage(Rules(in_flight_max=3)) as s, picking(s.product) as proxy:
        body = {"model": "m", "prompt": fresh_tokens(16), "max_tokens": 4}
        async with s.busy(LONG, LONG):
            async with proxy.stream() as stream:
                told = await stream.ask(body, headers=OBJECTIVE)
            assert (told.status, told.error()["code"]) == (429, "slo_unreachable")
            assert int(told.headers["retry-after"]) >= 1
            async with proxy.stream() as stream:
                told = await stream.ask(body, headers={"x-slo-ttft-ms": "soon"})
            assert (told.status, told.error()["param"]) == (400, "x-slo-ttft-ms")
        async with s.busy(16, 16, 16), proxy.stream() as stream:
            told = await stream.ask(body)
            assert (told.status, told.error()["code"]) == (503, "in_flight_max")
            assert told.headers["retry-after"] in ("1", "2")
        assert await s.refused("slo_unreachable") == await s.refused("in_flight_max") == 1
        async with proxy.stream() as stream:
            assert (await stream.ask(body, headers=OBJECTIVE)).endpoints
