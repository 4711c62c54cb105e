"""Prefill and decode on two engines, by vLLM's Nixl protocol: one half after the other.

The engines are fakes that speak it; a pair of real ones is in tests/integration.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import COMPLETION, EMBEDDINGS, FakeWorker, Product, answer, fresh_tokens
from pairs_kit import (
    bodies,
    breaks,
    decode,
    fails,
    hangs,
    ids,
    nixl_prefill,
    params_of,
    prefill,
    prefills,
)

from kvatlas.config import GatewayConfig, RouterConfig
from kvatlas.validate.replay import replay

PROMPT = fresh_tokens(100)


async def test_the_state_of_one_half_goes_into_the_request_of_the_other() -> None:
    async with FakeWorker("p", nixl_prefill) as p, FakeWorker("d") as d:
        p.cached_tokens, d.cached_tokens = 32, 99
        async with Product([prefill(p), decode(d)]) as product:
            headers = {"x-request-id": "one"}
            sent = {"model": "m", "prompt": PROMPT, "max_tokens": 7, "min_tokens": 3}
            sent |= {"stream": True, "stream_options": {"include_usage": True}}
            got = await product.post(COMPLETION, sent, headers)
            assert (got.status, got.worker) == (200, "d")
            assert got.headers["x-kvatlas-prefilled-by"] == "p"
            assert b"[DONE]" in got.body
            (first,), (second,) = bodies(p), bodies(d)
            assert (first["max_tokens"], first["stream"]) == (1, False)
            assert not {"stream_options", "min_tokens"} & set(first)
            assert first["kv_transfer_params"]["do_remote_decode"] is True
            assert second == sent | {"kv_transfer_params": params_of(d.got[0])}
            assert second["kv_transfer_params"]["remote_request_id"] == "p/one"
            assert ids(p) == ids(d) == ["one"]
            # What was handed over is no hit: what the first half had is.
            assert await product.metric("kvatlas_cached_tokens_total", worker="d") == 32
            assert await product.metric("kvatlas_pairs_total", prefill="p", decode="d") == 1
            assert await product.metric("kvatlas_fallbacks_total") == 0
            assert await product.in_flight() == {}
            told = (await product.get("/kvatlas/explain/one")).body.decode()
            assert "prefilled by p, decoded by d" in told


async def test_a_figure_of_the_first_half_that_cannot_be_true_is_counted_and_not_believed() -> None:
    async with FakeWorker("p", nixl_prefill) as p, FakeWorker("d") as d:
        p.cached_tokens = 101
        async with Product([prefill(p), decode(d)]) as product:
            assert (await product.complete(PROMPT)).worker == "d"
            assert await product.metric("kvatlas_usage_violations_total", worker="p") == 1
            assert await product.metric("kvatlas_cached_tokens_total") == 0
            assert await product.metric("kvatlas_prompt_tokens_total", worker="d") > 0
            state = (await product.get("/health")).json()
            last = state["details"]["usage_violations"]["last"]
            assert last == "p: cached_tokens 101 > prompt_tokens 100"


async def test_a_chat_is_split_as_well() -> None:
    async with (
        FakeWorker("p", nixl_prefill) as p,
        FakeWorker("d") as d,
        Product([prefill(p), decode(d)]) as product,
    ):
        got = await product.chat([{"role": "user", "content": "hello"}])
        assert got.worker == "d"
        assert bodies(p)[0]["max_completion_tokens"] == 1
        assert "max_completion_tokens" not in bodies(d)[0]


async def test_what_a_client_says_of_pairing_is_not_passed_on() -> None:
    theirs: dict[str, Any] = {
        "kv_transfer_params": {"do_remote_prefill": True, "remote_host": "10.0.0.1"},
        "bootstrap_host": "10.0.0.1",
        "bootstrap_port": 1,
        "bootstrap_room": 2,
    }
    async with (
        FakeWorker("p", nixl_prefill) as p,
        FakeWorker("d") as d,
        FakeWorker("alone", models=["other"]) as alone,
        Product([prefill(p), decode(d), alone.config()]) as product,
    ):
        assert (await product.complete(PROMPT, **theirs)).worker == "d"
        assert (await product.complete(PROMPT, "other", **theirs)).worker == "alone"
        for worker in (p, d, alone):
            (body,) = bodies(worker)
            assert "10.0.0.1" not in str(body)
            assert not any(name.startswith("bootstrap") for name in body)
        assert await product.metric("kvatlas_pairing_fields_dropped_total") == 2


async def test_equal_ids_of_two_clients_do_not_mix() -> None:
    async with FakeWorker("p", nixl_prefill) as p, FakeWorker("d") as d:
        d.gate = asyncio.Event()
        async with Product([prefill(p), decode(d)]) as product:
            same = {"x-request-id": "same"}
            asked = [
                asyncio.create_task(
                    product.post(COMPLETION, {"model": "m", "prompt": fresh_tokens(50, n)}, same)
                )
                for n in (1, 2)
            ]
            async with asyncio.timeout(30):
                while len(d.got) < 2:
                    await asyncio.sleep(0.01)
            d.gate.set()
            assert [a.status for a in await asyncio.gather(*asked)] == [200, 200]
            assert len(set(ids(d))) == 2
            assert sorted(ids(p)) == sorted(ids(d))
            for request in d.got:
                name = params_of(request)["remote_request_id"]
                assert name == f"p/{request.header('x-request-id')}"
            prompts = {i: b["prompt"] for i, b in zip(ids(p), bodies(p), strict=True)}
            assert prompts == {i: b["prompt"] for i, b in zip(ids(d), bodies(d), strict=True)}


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"n": 2}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"prompt": [[1, 2], [3, 4]]}, "batch"),
        ({"prompt": ["a", "b"]}, "batch"),
        ({"echo": True}, "echo"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
async def test_what_cannot_be_split_goes_to_one_engine(more: dict[str, Any], reason: str) -> None:
    async with (
        FakeWorker("p", nixl_prefill) as p,
        FakeWorker("d") as d,
        FakeWorker("c") as c,
    ):
        async with Product([prefill(p), decode(d), c.config()]) as product:
            assert (await product.complete(more.pop("prompt", PROMPT), **more)).worker == "c"
            assert not p.got
            assert not d.got
            labels = {"rung": "pair", "reason": reason}
            assert await product.metric("kvatlas_fallbacks_total", **labels) == 1
        async with Product([prefill(p), decode(d)]) as product:  # there the decode half does it
            assert (await product.complete(PROMPT, **{"n": 2} | more)).worker == "d"
            assert "kv_transfer_params" not in bodies(d)[0]
            assert (await product.post(EMBEDDINGS, {"model": "m", "input": "x"})).worker == "d"


@pytest.mark.parametrize(
    ("behave", "reason"),
    [
        (fails(500), "failed"),
        (breaks, "failed"),
        (hangs, "timeout"),
        (prefills(finish="abort"), "failed"),
        (answer, "no_state"),
        # vLLM's decode half would compute all of it itself, and say nothing.
        (prefills("remote_engine_id"), "no_state"),
        (prefills("remote_request_id"), "no_state"),
        (prefills("remote_port"), "no_state"),
        (prefills(remote_host=None), "no_state"),
        (prefills(remote_block_ids=[]), "no_state"),
        (prefills(remote_num_tokens=64), "short"),
    ],
)
async def test_a_first_half_that_fails_is_replaced_by_one_engine(
    behave: Callable[..., Any], reason: str
) -> None:
    async with FakeWorker("p", behave) as p, FakeWorker("d") as d:
        gateway = GatewayConfig(port=0, prefill_timeout_s=0.3)
        async with Product([prefill(p), decode(d)], gateway=gateway) as product:
            got = await product.complete(PROMPT)
            assert (got.status, got.worker) == (200, "d")
            assert got.headers["x-kvatlas-fallback"] == f"prefill: {reason}"
            assert "kv_transfer_params" not in bodies(d)[0]
            assert len(p.got) == len(d.got) == 1
            labels = {"rung": "prefill", "reason": reason}
            assert await product.metric("kvatlas_fallbacks_total", **labels) == 1
            assert p.busy == 0  # it was told to stop
            assert await product.in_flight() == {}


async def test_what_it_falls_back_to_may_fail_too() -> None:
    """sgl-project/sglang#24159: one answer to the client, and nobody is asked twice."""
    async with (
        FakeWorker("p", breaks) as p,
        FakeWorker("d", fails(500)) as d,
        Product([prefill(p), decode(d)]) as product,
    ):
        got = await product.complete(PROMPT)
        assert (got.status, got.json()["error"]["message"]) == (500, "d fails")
        assert got.fallback == "prefill: failed"
        d.behave = fails(503)
        got = await product.complete(fresh_tokens(100, 1))
        assert (got.status, got.error["code"]) == (502, "engine_failed")
        assert got.fallback == "prefill: failed, engine: refused"
        assert (len(p.got), len(d.got)) == (3, 2)  # the last time as one engine
        assert await product.in_flight() == {}


async def test_the_next_first_half_where_one_refuses() -> None:
    async with (
        FakeWorker("p1", fails(503)) as p1,
        FakeWorker("p2", nixl_prefill) as p2,
        FakeWorker("d") as d,
        Product([prefill(p1), prefill(p2), decode(d)]) as product,
    ):
        for n in range(4):
            got = await product.complete(fresh_tokens(100, n))
            assert got.worker == "d"
            assert got.headers["x-kvatlas-prefilled-by"] == "p2"
        assert p1.got
        labels = {"rung": "prefill", "reason": "refused", "to": "pair", "worker": "p1"}
        assert await product.metric("kvatlas_fallbacks_total", **labels) == len(p1.got)
        assert await product.metric("kvatlas_fallbacks_total") == len(p1.got)


async def test_a_clients_own_fault_is_told_by_the_first_half() -> None:
    async with (
        FakeWorker("p", fails(400)) as p,
        FakeWorker("d") as d,
        Product([prefill(p), decode(d)]) as product,
    ):
        got = await product.complete(PROMPT)
        assert (got.status, got.json()["error"]["message"]) == (400, "p fails")
        assert (len(p.got), len(d.got)) == (1, 0)


@pytest.mark.parametrize(
    ("behave", "reason"), [(fails(500), "failed"), (breaks, "failed"), (fails(503), "refused")]
)
async def test_a_second_half_that_fails_before_a_byte(
    behave: Callable[..., Any], reason: str
) -> None:
    async with (
        FakeWorker("p", nixl_prefill) as p,
        FakeWorker("d", behave) as d,
        Product([prefill(p), decode(d)]) as product,
    ):
        got = await product.complete(PROMPT)
        assert got.headers["x-kvatlas-fallback"] == f"decode: {reason}"
        assert (got.status, got.worker) == (200, "p")  # it can do all of it
        assert (len(p.got), len(d.got)) == (2, 1)
        labels = {"rung": "decode", "reason": reason}
        assert await product.metric("kvatlas_fallbacks_total", **labels) == 1
        assert await product.in_flight() == {}


async def test_another_second_half_where_one_cannot_be_reached() -> None:
    async with (
        FakeWorker("p", nixl_prefill) as p,
        FakeWorker("d1") as d1,
        FakeWorker("d2") as d2,
        Product([prefill(p), decode(d1), decode(d2)]) as product,
    ):
        await product.settled()
        await d1.close()
        for n in range(3):
            assert (await product.complete(fresh_tokens(100, n))).worker == "d2"
        assert await product.metric("kvatlas_fallbacks_total", to="engine") == 0
        await d2.close()
        got = await product.complete(PROMPT)
        assert (got.worker, got.status) == ("p", 200)
        assert got.headers["x-kvatlas-fallback"].startswith("decode: ")
        assert await product.metric("kvatlas_fallbacks_total", rung="decode", to="engine") == 1


async def test_who_is_left_does_it_all() -> None:
    """One half refuses, the combined engine is gone: the other half is an engine, too."""
    async with (
        FakeWorker("p", fails(503)) as p,
        FakeWorker("d") as d,
        FakeWorker("c") as c,
        Product([prefill(p), decode(d), c.config()]) as product,
    ):
        await product.settled()
        await c.close()
        for n in range(3):
            got = await product.complete(fresh_tokens(100, n))
            assert (got.status, got.worker) == (200, "d")
            left = got.headers["x-kvatlas-fallback"].split(", ")
            assert "prefill: refused" in left
            assert set(left) <= {"prefill: refused", "engine: connect"}


async def test_a_recorded_gateway_with_pairs_decides_the_same_again(tmp_path: Path) -> None:
    router = RouterConfig(recording=str(tmp_path / "gateway.kvr"))
    async with (
        FakeWorker("p", nixl_prefill) as p,
        FakeWorker("d") as d,
        FakeWorker("c") as c,
        Product([prefill(p), decode(d), c.config()], router=router) as product,
    ):
        for n in range(10):
            c.running = 1000 * (n % 2)
            assert (await product.complete(fresh_tokens(100, n % 3))).status == 200
        await p.close()
        assert (await product.complete(PROMPT)).status == 200
    result = replay(tmp_path / "gateway.kvr")
    assert result.decisions >= 11
    assert result.different == 0


async def test_nothing_is_tried_twice_after_the_first_byte() -> None:
    async def cut(worker: FakeWorker, request: Any, reply: Any) -> None:
        reply.start(200, [(b"content-type", b"text/event-stream")])
        reply.write(b'data: {"choices": [{"text": "a"}]}\n\n')
        await asyncio.sleep(0.05)
        reply.abort()

    async with (
        FakeWorker("p", nixl_prefill) as p,
        FakeWorker("d", cut) as d,
        Product([prefill(p), decode(d)]) as product,
    ):
        got = await product.complete(PROMPT, stream=True)
        assert got.broken
        assert (len(p.got), len(d.got)) == (1, 1)


@pytest.mark.parametrize("half", ["p", "d"])
async def test_a_client_that_leaves_ends_both_halves(half: str) -> None:
    async with FakeWorker("p", nixl_prefill) as p, FakeWorker("d") as d:
        asked = p if half == "p" else d
        asked.gate = asyncio.Event()
        async with Product([prefill(p), decode(d)]) as product:
            request = asyncio.create_task(product.complete(PROMPT))
            async with asyncio.timeout(30):
                while not asked.busy:
                    await asyncio.sleep(0.01)
                request.cancel()
                while p.busy or d.busy or await product.in_flight():
                    await asyncio.sleep(0.01)


async def test_halves_that_compute_differently_are_refused_by_the_field() -> None:
    async with (
        FakeWorker("p", nixl_prefill) as p,
        FakeWorker("d") as d,
        FakeWorker("c") as c,
    ):
        workers = [prefill(p), decode(d, weights_digest="other"), c.config()]
        async with Product(workers) as product:
            got = await product.complete(PROMPT)
            assert got.worker == "c"
            assert not p.got
            health = (await product.get("/health")).json()
            assert "pair_refused:p" in health["flags"]
            assert "weights_digest unknown, other" in health["details"]["pair_refused"]["p"]
            labels = {"rung": "pair", "reason": "no_pair"}
            assert await product.metric("kvatlas_fallbacks_total", **labels) == 1


async def test_a_short_prompt_goes_to_one_engine_by_price() -> None:
    """A hand-off costs something whatever the prompt: all else being equal, that decides."""
    async with (
        FakeWorker("p", nixl_prefill) as p,
        FakeWorker("d") as d,
        FakeWorker("c") as c,
        Product([prefill(p), decode(d), c.config()]) as product,
    ):
        assert (await product.complete(fresh_tokens(20))).worker == "c"
        c.running = 200  # decoding there is a crowd
        await product.until_equal(lambda: _worker_of(product), "d")


async def _worker_of(product: Product) -> str:
    return (await product.complete(fresh_tokens(20))).worker
