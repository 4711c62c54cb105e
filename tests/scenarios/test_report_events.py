"""Field reports of class A, event stream and directory, on the assembled product.

The stream's own protocol is tested in tests/integration/test_feed.py; here a client asks.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from harness import COMPLETION, FakeWorker, Product
from stub_publisher import BLOCK, CLEARED, StubPublisher, block_tokens, location, removed, stored
from test_feed import ENCODINGS

from kvatlas.config import DirectoryConfig, RouterConfig


@contextlib.asynccontextmanager
async def world(*names: str, **settings: Any) -> AsyncIterator[tuple[Any, ...]]:
    """A product in front of workers of these names: (product, worker, worker, …)."""
    async with contextlib.AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(FakeWorker(name)) for name in names]
        product = Product([w.config() for w in workers], **settings)
        await stack.enter_async_context(product)
        await product.settled()
        yield (product, *workers)


async def test_llm_d_kv_cache_372_orphans_after_a_directory_restart() -> None:
    async with world("w1") as (product, w1):
        w1.events.publish(stored("AB", 2))
        await product.answers("AB", {"w1": 2})
        history = list(w1.events.sent)
        w1.events.sent.clear()  # too old for the engine to replay
        await product.restart()
        await product.settled()
        w1.events.publish(stored("ABC"))
        w1.events.publish(stored("ABCD"))

        async def counted() -> bool:
            return bool(await product.feed("w1", "orphans") >= 2)

        await product.until(counted)
        assert await product.blocks("CD") == {}  # an orphan never becomes a root
        assert await product.blocks("ABCD") == {}
        served = await product.complete(block_tokens("ABCD"))
        assert (served.status, served.expected) == (200, 0)
        assert "feed:w1" in await product.flags()  # blind there, and it says so
        w1.events.sent.extendleft(reversed(history))  # the engine can tell it again
        w1.events.publish(stored("ABCDE"))
        await product.answers("ABCD", {"w1": 4})
        assert "feed:w1" not in await product.flags()


async def test_llm_d_kv_cache_372_a_restart_with_its_history_at_hand() -> None:
    async with world("w1") as (product, w1):
        for path in ("A", "AB", "ABC"):
            w1.events.publish(stored(path))
        w1.events.publish(removed("ABC"))
        await product.answers("ABC", {"w1": 2})
        await product.restart()
        await product.answers("ABC", {"w1": 2})


async def test_llm_d_kv_cache_372_history_is_not_taken_for_the_present() -> None:
    """While a long replay is under way, what it tells was true once."""
    async with FakeWorker("w1", events=StubPublisher(buffer=5000)) as w1:
        w1.events.publish(stored("AB", 2))
        for _ in range(4000):
            w1.events.publish(stored("XY", 2), removed("XY"), removed("X"))
        w1.events.publish(removed("AB"), removed("A"), stored("P"))
        async with Product([w1.config()]) as product:
            seen, behind = 0, True
            while behind:
                assert await product.blocks("AB") == {}
                row = (await product.workers())["w1"]["feed"]
                behind = row is None or row["behind"]
                seen += bool(row and row["behind"] and row["events"])
            assert seen > 0  # it was looked at in the middle
            await product.answers("P", {"w1": 1})


async def test_aibrix_2723_a_removal_concerns_its_sender_only() -> None:
    async with world("w1", "w2", "w3", directory=DirectoryConfig(blocks_max=5)) as (
        product,
        w1,
        w2,
        w3,
    ):
        workers = product.config.worker
        await product.assembly.reload(msgspec.structs.replace(product.config, worker=workers[:2]))
        for worker in (w1, w2):
            worker.events.publish(stored("AB", 2))
        await product.answers("AB", {"w1": 2, "w2": 2})
        for worker in (w1, w1, w3):  # w3 is no longer ours
            worker.events.publish(removed("AB"))
        for worker in (w1, w2, w3):
            worker.events.publish(removed("XYZ"), stored("P"))
        await product.answers("P", {"w1": 1, "w2": 1})
        assert await product.blocks("AB") == {"w1": 1, "w2": 2}
        assert (await product.directory())["publishers"] == {"w1": 2, "w2": 3}
        w1.events.publish(stored("Q"))  # one more than the cap
        w1.events.publish(removed("P"))
        await product.answers("P", {"w2": 1})
        assert await product.blocks("Q") == {}
        assert (await product.directory())["holders"] == 4


async def test_aibrix_2287a_cleared_blocks_of_one_worker() -> None:
    async with world("w1", "w2") as (product, w1, w2):
        for worker in (w1, w2):
            worker.events.publish(stored("AB", 2))
        w1.events.publish(stored("A", medium="CPU"))
        await product.answers("AB", {"w1": 2, "w2": 2})
        w1.events.publish(CLEARED)
        await product.answers("AB", {"w2": 2})
        w1.events.publish(stored("A"))
        await product.answers("AB", {"w1": 1, "w2": 2})


@pytest.mark.parametrize("sign", ["asleep", "started"])
async def test_aibrix_2287b_a_reset_that_only_the_status_shows(sign: str) -> None:
    async with world("w1", "w2") as (product, w1, w2):
        for worker in (w1, w2):
            worker.events.publish(stored("AB", 2))
        await product.answers("AB", {"w1": 2, "w2": 2})
        if sign == "started":
            w1.events.sent.clear()
            w1.started += 10  # its new life has said nothing yet
        else:
            w1.asleep = True
        await product.answers("AB", {"w2": 2})
        w1.asleep = False  # its cache does not come back with it

        async def new_claim() -> dict[str, int]:
            w1.events.publish(stored("X"))  # until it is known to be awake, claims do not count
            return await product.blocks("X")

        await product.until_equal(new_claim, {"w1": 1})
        assert await product.blocks("AB") == {"w2": 2}


async def test_aibrix_2287c_a_late_store_does_not_survive_the_clear() -> None:
    async with world("w1") as (product, w1):
        w1.events.publish(stored("A"))
        await product.answers("A", {"w1": 1})
        late = w1.events.publish(stored("AB"), lose=True)
        w1.events.publish(CLEARED)
        w1.events.again(late)
        w1.events.publish(stored("X"))
        await product.answers("X", {"w1": 1})
        w1.events.again(late)
        w1.events.publish(stored("Y"))
        await product.answers("Y", {"w1": 1})
        assert await product.blocks("AB") == {}


GPU, CPU = [stored("AB", 2)], [stored("AB", 2, medium="CPU")]
GONE = [removed("A"), removed("AB")]
WHERE = [location("A", medium="CPU"), location("AB", medium="CPU")]
DISK = [stored("AB", 2, medium="DISK")]


@pytest.mark.parametrize(
    ("tier", "history"),
    [
        ("dram", [GPU, CPU, GONE]),
        ("dram", [CPU, GPU, GONE]),
        ("dram", [GPU, WHERE, GONE]),
        ("disk", [GPU, DISK, GONE]),
    ],
    ids=["gpu first", "cpu first", "location only", "disk"],
)
async def test_sglang_39108_a_removal_concerns_one_tier(tier: str, history: list[Any]) -> None:
    # At 20 tokens/s a block is dear: what is held, and where, decides.
    async with world("w1", "w2", "w3", router=RouterConfig(prefill_tokens_per_s=20.0)) as (
        product,
        w1,
        _,
        w3,
    ):
        for events in history:
            w1.events.publish(*events)
        w1.events.publish(stored("Z"))
        await product.answers("Z", {"w1": 1})
        found = (await product.ask(block_tokens("AB")))["w1"]
        assert (found.tokens, found.lower) == (2 * BLOCK, {tier: 2 * BLOCK})
        assert await product.chosen(block_tokens("AB")) == "w1"
        w3.events.publish(stored("AB", 2))
        await product.answers("AB", {"w1": 2, "w3": 2})
        assert await product.chosen(block_tokens("AB")) == "w3"
        w3.running = 200
        await product.until_equal(lambda: product.chosen(block_tokens("AB")), "w1")
        w1.events.publish(removed("AB", medium="DISK" if tier == "disk" else "CPU"))
        await product.answers("AB", {"w1": 1, "w3": 2})


async def test_sglang_39108_shared_storage_is_not_bound_to_a_worker() -> None:
    async with world("w1", "w2", "w3") as (product, w1, w2, w3):
        w2.events.publish(stored("Z", medium="EXTERNAL"))
        w3.events.publish(stored("Y"))
        w1.events.publish(*GPU, *[location(p, medium="EXTERNAL") for p in ("A", "AB")], *GONE)
        await product.answers("AB", {"w1": 2, "w2": 2})


async def test_vllm_26264_seven_encodings_one_answer() -> None:
    names = [f"w{i}" for i in range(len(ENCODINGS))]
    async with world(*names) as (product, *workers):
        for worker, encode in zip(workers, ENCODINGS.values(), strict=True):
            for event in (stored("AB", 2), removed("AB"), stored("AC")):
                worker.events.publish(encode(event))
        await product.answers("AC", dict.fromkeys(names, 2))
        await product.answers("AB", dict.fromkeys(names, 1))
        assert (await product.directory())["holders"] == 2 * len(names)
        assert {await product.feed(name, "malformed") for name in names} == {0}


async def test_vllm_26264_large_ids_and_malformed_events() -> None:
    async with world("w1", "w2") as (product, w1, w2):
        p, q = stored("P"), stored("Q")
        p["block_hashes"], q["block_hashes"] = [2**63 + 1], [2**63 + 2]
        w2.events.publish(stored("AB", 2))
        w1.events.publish(stored("AB", 2))
        bad = stored("A") | {"token_ids": "garbage"}
        w1.events.publish(p, bad, q, {"type": "BlockMoved", "n": 1})
        w1.events.publish({"type": "BlockRemoved", "block_hashes": [2**63 + 1], "medium": "GPU"})
        w1.events.publish(stored("R"))
        await product.answers("R", {"w1": 1})
        assert await product.blocks("P") == {}
        assert await product.blocks("Q") == {"w1": 1}
        assert await product.blocks("AB") == {"w1": 2, "w2": 2}
        w1.events.publish(raw=b"\xc1 no batch at all")  # removals may have been in it
        await product.answers("AB", {"w2": 2})
        w1.events.publish(stored("R"))
        await product.answers("R", {"w1": 1})
        assert await product.blocks("Q") == {}
        assert await product.feed("w1", "malformed") == 2
        assert await product.feed("w1", "unknown") == 1


async def test_event_garbage_is_counted_and_nobody_else_is_touched() -> None:
    async with world("w1", "w2") as (product, w1, w2):
        w2.events.publish(stored("AB", 2))
        w1.events.publish(stored("AB", 2))
        await product.answers("AB", {"w1": 2, "w2": 2})
        garbage = [
            [b""],
            [b"kv", b"short", b"x"],
            [b"kv", (99).to_bytes(8, "big")],
            [b"kv", bytes(range(256)) * 4, b"\xdd\xff\xff\xff\xff"],
            [b"kv", b"1234567", b"", b"", b""],
        ]
        for frames in garbage:
            w1.events.send_frames(frames)
        huge = [b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\x91" * 2000, b"\x00" * 4096]
        for payload in huge:  # lengths that are not there, nesting without end
            w1.events.publish(raw=payload)
        w1.events.publish(stored("Y"))
        await product.answers("Y", {"w1": 1})
        assert await product.feed("w1", "malformed") >= len(huge)
        assert await product.blocks("AB") == {"w2": 2}  # w1's own removals may have been lost
        assert await product.feed("w2", "malformed") == 0
        answer = await product.post(COMPLETION, {"model": "m", "prompt": [*block_tokens("AB"), 1]})
        assert (answer.status, answer.expected) == (200, 2 * BLOCK)


async def test_events_at_an_address_that_the_operator_gave() -> None:
    async with FakeWorker("w1", publishes=False) as w1:
        config = w1.config(events=w1.events.endpoint, replay=w1.events.replay)
        async with Product([config]) as product:
            await product.settled()
            w1.events.publish(stored("A"))
            await product.answers("A", {"w1": 1})
