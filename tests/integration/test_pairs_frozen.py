"""A leg that freezes, and clients that leave: no request outlives its budget, and no block is held
past its lease. A hundred requests each; the clock jumps where nothing is to be read."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "scenarios"))
import warp
from harness import COMPLETION, Answer, Product, fresh_tokens
from test_pairs_stub import SPEC, halves

from kvatlas.config import RouterConfig
from kvatlas.connectors.stub_cluster import StubCluster, StubOptions
from kvatlas.service.engines import Timing
from kvatlas.workload.models import load_layout

REQUESTS = 100
DEADLINE_S = 4.0
LEASE_S = 6.0
SLACK_S = 0.1
AS_THEY_ARE = 1e6  # tokens/s
LAYOUTS = pytest.mark.parametrize("layout", ["32", "deepseek-v4-flash"])


def cluster_of(layout: str, count: int) -> StubCluster:
    spec = msgspec.structs.replace(SPEC, blocks=40_000, decode_step_s=0.01)
    options = StubOptions(
        load_layout(layout, engine="vllm"),
        spec,
        model_name="m",
        count=count,
        events=False,
        lease_s=LEASE_S,
    )
    return StubCluster(options)


class Stand:
    """A pair, whatever else the test wants, and a gateway before them."""

    def __init__(self, layout: str, roles: str, prior: float = AS_THEY_ARE) -> None:
        self.layout, self.roles, self.prior = layout, roles, prior
        self.cluster = cluster_of(layout, len(roles))

    async def __aenter__(self) -> Stand:
        await self.cluster.__aenter__()
        workers = halves(self.cluster, self.layout, self.roles)
        self.product = Product(
            workers,
            router=RouterConfig(prefill_tokens_per_s=self.prior),
            timing=Timing(poll_s=1.0, timeout_s=5.0, retry_max_s=1.0),
        )
        await self.product.__aenter__()
        await self.product.settled()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.product.__aexit__()
        await self.cluster.__aexit__()

    def fault(self, index: int, **what: object) -> None:
        engine = self.cluster.engine(index)
        engine.faults = engine.faults.changed(what)

    async def ask(self, number: int, **more: Any) -> Answer:
        """One request; it must end within its budget, whatever became of it."""
        body = {"model": "m", "prompt": fresh_tokens(600 + number, number), "max_tokens": 8}
        headers = {"x-kvatlas-deadline-ms": str(int(DEADLINE_S * 1000))}
        began_s = time.perf_counter()
        got = await self.product.post(COMPLETION, body | more, headers)
        took_s = time.perf_counter() - began_s
        assert took_s <= DEADLINE_S + SLACK_S, (took_s, got)
        return got

    async def ask_all(self, **more: Any) -> list[Answer]:
        return list(await asyncio.gather(*(self.ask(n, **more) for n in range(REQUESTS))))

    async def nothing_held(self) -> None:
        """Once all leases are over: no request anywhere, no state kept, no block in use."""
        await asyncio.sleep(LEASE_S + SLACK_S)
        for index in range(len(self.roles)):
            self.fault(index, frozen="")
        assert await self.product.in_flight() == {}
        await asyncio.sleep(1.0)  # those that were frozen take note of who has left
        for index in range(len(self.roles)):
            engine = self.cluster.engine(index)
            numbers = engine.numbers()
            assert (numbers.running, numbers.waiting, engine.pairs.kept) == (0, 0, 0), index
            assert numbers.usage == 0, index


class Fault(NamedTuple):
    roles: str
    worker: int
    frozen: str
    rung: str  # the one that is left for it


FAULTS = [
    Fault("pd", 0, "engine", "prefill"),
    Fault("pdd", 0, "engine", "prefill"),
    Fault("pd", 1, "engine", "decode"),
    Fault("pd", 1, "load", "decode"),  # what was prefilled does not arrive
    Fault("cc", 0, "engine", "engine"),  # as one whose load from a store hangs
]


@LAYOUTS
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "fault", FAULTS, ids=lambda fault: f"{fault.roles}-{fault.rung}-{fault.frozen}"
)
def test_a_hundred_requests_with_a_frozen_leg(layout: str, stream: bool, fault: Fault) -> None:
    rung = fault.rung

    async def main() -> Counter[str]:
        async with Stand(layout, fault.roles) as stand:
            stand.fault(fault.worker, frozen=fault.frozen)
            answers = await stand.ask_all(stream=stream)
            for got in answers:
                if stream:
                    assert b"[DONE]" in got.body
            touched = [got for got in answers if f"{rung}: " in got.fallback]
            assert touched, "nobody met the fault"
            assert all(got.status == 200 for got in answers)  # there is always another rung
            count = await stand.product.metric("kvatlas_fallbacks_total", rung=rung)
            assert count == len(touched)
            await stand.nothing_held()
            return Counter(got.fallback for got in answers)

    assert sum(warp.run(main()).values()) == REQUESTS


@pytest.mark.parametrize("prior", [AS_THEY_ARE / 125, 1000 * AS_THEY_ARE])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.roles}-{fault.frozen}")
def test_a_price_that_nobody_measured_decides_nothing(fault: Fault, prior: float) -> None:
    """By the slow prior no rung fits below the one that is frozen, nor in what is left."""

    async def main() -> None:
        async with Stand("32", fault.roles, prior) as stand:
            stand.fault(fault.worker, frozen=fault.frozen)
            answers = await stand.ask_all(stream=True)
            assert {got.status for got in answers} == {200}
            met = Counter(got.fallback for got in answers if got.fallback)
            assert met
            assert all(f"{fault.rung}: timeout" in left for left in met), met
            await stand.nothing_held()

    warp.run(main())


@LAYOUTS
@pytest.mark.parametrize(("frozen", "what"), [(0, "engine"), (1, "engine"), (1, "load"), (1, "")])
def test_a_hundred_clients_that_leave(layout: str, frozen: int, what: str) -> None:
    """In the queue, in the hand-off, and while the answer streams."""

    async def main() -> None:
        async with Stand(layout, "pd") as stand:
            stand.fault(frozen, frozen=what)

            async def leave(number: int) -> None:
                asked = asyncio.create_task(stand.ask(number, stream=True, max_tokens=64))
                await asyncio.sleep(0.005 * number)
                asked.cancel()
                await asyncio.gather(asked, return_exceptions=True)

            await asyncio.gather(*(leave(n) for n in range(REQUESTS)))
            await stand.product.until_equal(stand.product.in_flight, {})
            await stand.nothing_held()

    warp.run(main())


@LAYOUTS
def test_what_nobody_takes_over_goes_with_its_lease(layout: str) -> None:
    """The control: until then it is held."""

    async def main() -> None:
        async with Stand(layout, "pd") as stand:
            stand.fault(1, fail_next=1)
            assert (await stand.ask(1)).fallback == "decode: failed"
            first = stand.cluster.engine(0)
            assert first.pairs.kept == 1
            assert first.numbers().usage > 0
            await asyncio.sleep(LEASE_S - SLACK_S)
            assert first.pairs.kept == 1
            await asyncio.sleep(2 * SLACK_S)
            assert (first.pairs.kept, first.pairs.expired) == (0, 1)
            assert first.numbers().usage == 0

    warp.run(main())
