"""An engine is taken out of service: nothing new, what runs ends, and what it holds is not lost."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
from harness import WAIT_S, FakeWorker, Product, process, shares
from pairs_kit import decode, nixl_prefill, prefill
from stub_publisher import BLOCK, block_tokens, stored

from kvatlas.connectors.child import free_ports


async def drain(product: Product, *names: str) -> None:
    """As SIGHUP would, with this said of these workers in the file, and of no others."""
    workers = tuple(
        msgspec.structs.replace(worker, draining=worker.name in names)
        for worker in product.config.worker
    )
    await product.assembly.reload(msgspec.structs.replace(product.config, worker=workers))


@contextlib.asynccontextmanager
async def two() -> AsyncIterator[tuple[Product, FakeWorker, FakeWorker]]:
    """w1 holds two blocks."""
    async with (
        FakeWorker("w1") as w1,
        FakeWorker("w2") as w2,
        Product([w1.config(), w2.config()]) as product,
    ):
        await product.settled()
        w1.events.publish(stored("AB", 2))
        await product.answers("AB", {"w1": 2})
        yield product, w1, w2


PROMPT = [*block_tokens("AB"), 1]


async def test_what_runs_ends_and_what_is_new_goes_elsewhere() -> None:
    async with two() as (product, w1, _):
        w1.gate = asyncio.Event()
        running = asyncio.create_task(product.complete(PROMPT, stream=True))

        async def there() -> bool:
            return w1.busy == 1

        await product.until(there)
        await drain(product, "w1")
        answers = [await product.complete(PROMPT) for _ in range(4)]
        assert shares(answers) == {"w2": 4}
        assert w1.busy == 1
        rows = await product.workers()
        assert (rows["w1"]["draining"], rows["w1"]["in_flight"]) == (True, 1)
        assert (rows["w2"]["draining"], rows["w2"]["in_flight"]) == (False, 0)
        health = (await product.get("/health")).json()
        assert health["details"]["worker_draining"] == {"w1": "1 requests in flight"}
        assert (health["status"], health["ready"]) == ("ok", True)
        assert await product.metric("kvatlas_worker_draining", worker="w1") == 1
        w1.gate.set()
        answer = await running
        assert (answer.status, answer.worker) == (200, "w1")
        await product.until_equal(product.in_flight, {})


async def test_what_it_holds_is_known_when_it_is_taken_back() -> None:
    async with two() as (product, _, w2):
        await drain(product, "w1")
        assert (await product.directory())["publishers"]["w1"] == 2
        assert await product.chosen(block_tokens("AB")) == "w2"
        await drain(product)
        answer = await product.complete(PROMPT)
        assert (answer.worker, answer.expected) == ("w1", 2 * BLOCK)
        assert not w2.got


async def test_where_all_drain_nobody_is_asked() -> None:
    async with two() as (product, w1, w2):
        await drain(product, "w1", "w2")
        answer = await product.complete(PROMPT)
        assert (answer.status, answer.error["code"]) == (503, "no_engine")
        assert "draining: w1, w2" in answer.error["message"]
        assert answer.headers["retry-after"] == "1"
        assert (await product.get("/ready")).status == 503
        assert not w1.got + w2.got
        await drain(product, "w2")
        assert (await product.get("/ready")).status == 200
        assert (await product.complete(PROMPT)).worker == "w1"


async def test_halves_of_pairs_drain_as_well() -> None:
    names = ("p1", "p2", "d1", "d2")
    async with contextlib.AsyncExitStack() as stack:
        p1, p2, d1, d2 = [await stack.enter_async_context(FakeWorker(name)) for name in names]
        p1.behave = p2.behave = nixl_prefill
        workers = [prefill(p1), prefill(p2), decode(d1), decode(d2)]
        product = await stack.enter_async_context(Product(workers))
        await product.settled()
        await drain(product, "p1", "d2")
        for number in range(6):
            answer = await product.complete([number] * 100)
            assert (answer.status, answer.worker) == (200, "d1")
        assert len(p2.got) == len(d1.got) == 6
        assert not p1.got + d2.got


async def test_an_operators_file_and_a_hangup(tmp_path: Path) -> None:
    async with FakeWorker("w1") as w1, FakeWorker("w2") as w2:
        port, file = free_ports(1)[0], tmp_path / "kvatlas.toml"

        def write(draining: str) -> None:
            tables = [
                f'[[worker]]\nname = "{w.name}"\nurl = "{w.config().url}"\nlayout = "{BLOCK}"\n'
                f"draining = {draining if w is w1 else 'false'}\n"
                for w in (w1, w2)
            ]
            file.write_text(f"[gateway]\nport = {port}\n{''.join(tables)}")

        write("false")
        client = Product([])
        child = process(tmp_path, "serve", "--config", str(file), url=f"http://127.0.0.1:{port}")
        try:
            await asyncio.to_thread(child.wait_ready, WAIT_S)
            async with client.only_as_client(port):
                await client.settled()
                for said, told in (('"yes"', "not reloaded"), ("true", "kvatlas: reloaded")):
                    write(said)
                    os.kill(child.pid, signal.SIGHUP)

                    async def heard(told: str = told) -> bool:
                        return told in child.log.read_text()

                    await client.until(heard)
                    assert (await client.workers())["w1"]["draining"] is (said == "true")
                answers = [await client.complete([number]) for number in range(4)]
                assert shares(answers) == {"w2": 4}
        finally:
            child.stop()
