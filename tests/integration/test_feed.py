"""The engine feed over real ZMQ into the real directory: field reports of class A, and more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from feed_kit import QUICK, Atlas
from stub_publisher import (
    BLOCK,
    CLEARED,
    StubPublisher,
    location,
    removed,
    stored,
)

from kvatlas.core.directory import Limits
from kvatlas.core.keys import salt_scope
from kvatlas.core.records import Publisher

# -- llm-d-kv-cache#372 ---------------------------------------------------------------------------


async def test_372_a_wiped_directory_recovers_by_replay(atlas: Atlas) -> None:
    async with StubPublisher() as w1:
        w1.silent = True
        publisher = atlas.follow("w1", w1)
        await w1.subscribed()
        w1.publish(stored("AB", 2))
        await atlas.answers("AB", {"w1": 2})
        atlas.directory.reset(publisher)
        assert atlas.ask("AB") == {}
        w1.publish(stored("ABC"), stored("ABCD"))
        await atlas.until(lambda: atlas.status("w1").applied.orphans >= 2)
        assert atlas.ask("CD") == {}  # an orphan never becomes a root
        assert atlas.ask("ABCD") == {}
        w1.silent = False
        await atlas.answers("ABCD", {"w1": 4})
        w1.publish(removed("ABCD"))
        await atlas.answers("ABCD", {"w1": 3})


async def test_372_orphans_do_not_become_a_storm_of_replays() -> None:
    atlas = Atlas()
    atlas.feed._limits = msgspec.structs.replace(QUICK, orphan_replay_s=60.0)
    try:
        async with StubPublisher(buffer=1) as w1:
            atlas.follow("w1", w1)
            await w1.subscribed()
            await atlas.settled("w1")
            for _ in range(50):
                w1.publish(stored("ABC"))
            await atlas.until(lambda: atlas.status("w1").stream.orphans_put_off > 0)
            for _ in range(50):
                w1.publish(stored("ABC"))
            await atlas.until(lambda: atlas.status("w1").applied.orphans >= 50)
            assert len(w1.requests) <= 4  # after the connect, and for the first orphan
    finally:
        await atlas.feed.close()


# -- aibrix#2723 ----------------------------------------------------------------------------------


async def test_2723_a_removal_concerns_its_sender_only() -> None:
    atlas = Atlas(Limits(holders_max=5))
    try:
        async with StubPublisher() as w1, StubPublisher() as w2:
            for name, stub in (("w1", w1), ("w2", w2)):
                atlas.follow(name, stub)
                await stub.subscribed()
                stub.publish(stored("AB", 2))
            await atlas.answers("AB", {"w1": 2, "w2": 2})
            w1.publish(removed("AB"))
            await atlas.answers("AB", {"w1": 1, "w2": 2})
            w1.publish(removed("AB"), removed("XYZ"))
            w2.publish(removed("XYZ"))
            await atlas.until(lambda: atlas.status("w1").applied.unknown_removals == 2)
            await atlas.until(lambda: atlas.status("w2").applied.unknown_removals == 1)
            assert atlas.directory.apply(Publisher("w3"), []).unregistered == 1
            assert atlas.ask("AB") == {"w1": 1, "w2": 2}
            assert atlas.directory.holders == 3
            w1.publish(*[stored(name) for name in "PQR"])  # one more than the cap
            await atlas.until(lambda: atlas.status("w1").applied.refused == 1)
            assert atlas.directory.holders == 5
            assert atlas.ask("AB") == {"w1": 1, "w2": 2}
    finally:
        await atlas.feed.close()


# -- aibrix#2287 ----------------------------------------------------------------------------------


async def test_2287a_all_blocks_cleared_concerns_every_tier_of_its_sender(atlas: Atlas) -> None:
    async with StubPublisher() as w1, StubPublisher() as w2:
        for name, stub in (("w1", w1), ("w2", w2)):
            atlas.follow(name, stub)
            await stub.subscribed()
            stub.publish(stored("AB", 2))
        w1.publish(stored("A", medium="CPU"))
        await atlas.until(lambda: atlas.status("w1").applied.stored == 3)
        await atlas.answers("AB", {"w1": 2, "w2": 2})
        w1.publish(CLEARED)
        await atlas.answers("AB", {"w2": 2})
        w1.publish(stored("A"))
        await atlas.answers("AB", {"w1": 1, "w2": 2})


async def test_2287b_a_reset_seen_without_an_event(atlas: Atlas) -> None:
    async with StubPublisher() as w1, StubPublisher() as w2:
        for name, stub in (("w1", w1), ("w2", w2)):
            atlas.follow(name, stub)
            await stub.subscribed()
            stub.publish(stored("AB", 2))
        await atlas.answers("AB", {"w1": 2, "w2": 2})
        await atlas.settled("w1", "w2")
        atlas.feed.dropped(Publisher("w1"), "it is sleeping")
        assert atlas.ask("AB") == {"w2": 2}
        w1.publish(stored("XY"))  # an orphan now: the replay must not bring the old claims back
        w1.publish(stored("A"))
        await atlas.answers("AB", {"w1": 1, "w2": 2})
        await atlas.settled("w1")
        assert atlas.ask("AB") == {"w1": 1, "w2": 2}
        assert atlas.ask("XY") == {}


@pytest.mark.parametrize("replay", [True, False])
async def test_2287c_a_late_store_does_not_survive_the_clear(atlas: Atlas, replay: bool) -> None:
    async with StubPublisher(replay=replay) as w1:
        atlas.follow("w1", w1)
        await w1.subscribed()
        w1.publish(stored("A"))
        await atlas.answers("A", {"w1": 1})
        late = w1.publish(stored("AB"), lose=True)
        w1.publish(CLEARED)
        w1.again(late)
        w1.publish(stored("X"))
        await atlas.answers("X", {"w1": 1})
        assert atlas.ask("AB") == {}
        w1.again(late)
        w1.publish(stored("Y"))
        await atlas.answers("Y", {"w1": 1})
        assert atlas.ask("AB") == {}
        assert atlas.status("w1").stream.duplicates + atlas.status("w1").stream.stale >= 1


# -- sglang#39108 ---------------------------------------------------------------------------------

GPU_FIRST = [
    [stored("AB", 2)],
    [stored("AB", 2, medium="CPU_PINNED")],
    [removed("A"), removed("AB")],
]
CPU_FIRST = [GPU_FIRST[1], GPU_FIRST[0], GPU_FIRST[2]]
LOCATION_ONLY = [
    GPU_FIRST[0],
    [location("A", medium="CPU"), location("AB", medium="CPU")],
    GPU_FIRST[2],
]


@pytest.mark.parametrize("history", [GPU_FIRST, CPU_FIRST, LOCATION_ONLY])
async def test_39108_a_removal_concerns_one_tier(atlas: Atlas, history: list[list[Any]]) -> None:
    cpu = history[1 if history is not CPU_FIRST else 0][0]["medium"]
    async with StubPublisher() as w1:
        atlas.follow("w1", w1)
        await w1.subscribed()
        for events in history:
            w1.publish(*events)
        await atlas.until(lambda: atlas.status("w1").applied.removed == 2)
        resume = atlas.resumes("AB")["w1"]
        assert resume.tokens == 2 * BLOCK
        assert resume.tier_tokens[0] == 0  # none of it in hbm
        assert sum(resume.tier_tokens) == 2 * BLOCK
        w1.publish(removed("AB", medium=cpu))
        await atlas.answers("AB", {"w1": 1})


@pytest.mark.parametrize("medium", ["DISK", "STORAGE"])
async def test_39108_the_disk_tier_of_a_worker_is_its_own(atlas: Atlas, medium: str) -> None:
    async with StubPublisher() as w1, StubPublisher() as w2:
        for name, stub in (("w1", w1), ("w2", w2)):
            atlas.follow(name, stub)
            await stub.subscribed()
            stub.publish(stored("Z"))
        w1.publish(stored("AB", 2), stored("AB", 2, medium=medium), removed("A"), removed("AB"))
        await atlas.answers("AB", {"w1": 2})
        assert atlas.resumes("AB")["w1"].tier_tokens[0] == 0


async def test_39108_shared_storage_serves_every_worker_that_uses_it(atlas: Atlas) -> None:
    async with StubPublisher() as w1, StubPublisher() as w2, StubPublisher() as w3:
        for name, stub in (("w1", w1), ("w2", w2), ("w3", w3)):
            atlas.follow(name, stub)
            await stub.subscribed()
        w2.publish(stored("Z", medium="EXTERNAL"))
        w3.publish(stored("Z"))
        w1.publish(
            stored("AB", 2),
            location("A", medium="EXTERNAL"),
            location("AB", medium="EXTERNAL"),
            removed("A"),
            removed("AB"),
        )
        await atlas.answers("AB", {"w1": 2, "w2": 2})


# -- vllm#26264 -----------------------------------------------------------------------------------


def _as_array(event: dict[str, Any], tail: list[Any]) -> list[Any]:
    if event["type"] == "BlockRemoved":
        return ["BlockRemoved", event["block_hashes"], *tail]
    names = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id")
    return ["BlockStored", *[event[name] for name in names], *tail]


def _with_hashes(event: dict[str, Any], form: Callable[[int], Any]) -> dict[str, Any]:
    changed = event | {"block_hashes": [form(h) for h in event["block_hashes"]]}
    if event.get("parent_block_hash") is not None:
        changed["parent_block_hash"] = form(event["parent_block_hash"])
    return changed


def _digest(value: int) -> bytes:
    return b"\x5a" * 24 + value.to_bytes(8, "big")


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


ENCODINGS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "array+integer": lambda e: _as_array(e, ["GPU"]),
    "array+bytes": lambda e: _as_array(_with_hashes(e, _digest), ["GPU"]),
    "map+integer": lambda e: e,
    "map+bytes": lambda e: _with_hashes(e, _digest),
    "signed integer": lambda e: _with_hashes(e, _signed),
    "array, two extra fields": lambda e: _as_array(e, ["GPU", "later", 7]),
    "array, no optional tail": lambda e: _as_array(e, []),
}


@pytest.mark.parametrize("encoding", ENCODINGS)
async def test_26264_seven_encodings_one_answer(atlas: Atlas, encoding: str) -> None:
    encode = ENCODINGS[encoding]
    async with StubPublisher() as w1:
        atlas.follow("w1", w1)
        await w1.subscribed()
        for event in (stored("AB", 2), removed("AB"), stored("AC")):
            w1.publish(encode(event))
        await atlas.answers("AC", {"w1": 2})
        assert atlas.ask("AB") == {"w1": 1}
        assert atlas.directory.holders == 2
        assert atlas.status("w1").malformed == 0


async def test_26264_large_ids_stay_distinct_and_bad_events_stay_alone(atlas: Atlas) -> None:
    async with StubPublisher() as w1:
        atlas.follow("w1", w1)
        await w1.subscribed()
        p, q = stored("P"), stored("Q")
        p["block_hashes"], q["block_hashes"] = [2**63 + 1], [2**63 + 2]
        w1.publish(p, stored("A") | {"token_ids": "garbage"}, q, {"type": "BlockMoved", "n": 1})
        await atlas.answers("P", {"w1": 1})
        await atlas.answers("Q", {"w1": 1})
        w1.publish({"type": "BlockRemoved", "block_hashes": [2**63 + 1], "medium": "GPU"})
        await atlas.answers("P", {})
        assert atlas.ask("Q") == {"w1": 1}
        w1.publish(raw=b"\xc1 no batch at all")
        w1.publish(stored("R"))
        await atlas.answers("R", {"w1": 1})
        status = atlas.status("w1")
        assert (status.malformed, status.unknown) == (2, 1)
        assert status.stream.resets == 0


async def test_a_batch_that_cannot_be_read_leaves_no_claim_behind(atlas: Atlas) -> None:
    """Removals may be in it: what was announced before it is not promised any more."""
    async with StubPublisher() as w1:
        atlas.follow("w1", w1)
        await w1.subscribed()
        w1.publish(stored("AB", 2))
        await atlas.answers("AB", {"w1": 2})
        w1.publish(raw=b"\xc1 no batch at all")
        await atlas.answers("AB", {})
        w1.publish(stored("C"))
        await atlas.answers("C", {"w1": 1})
        assert atlas.ask("AB") == {}


# -- vllm#53495, the part that the feed decides ---------------------------------------------------


async def test_53495_salt_adapter_and_images_partition_the_claims(atlas: Atlas) -> None:
    async with StubPublisher() as w1:
        atlas.follow("w1", w1)
        await w1.subscribed()
        w1.publish(
            stored("ABC", 3, group_idx=0, extra_keys=[["x"], None, None]),
            stored("LMN", 3, lora_id=1, extra_keys=[["sql"]] * 3) | {"lora_name": "sql"},
            stored("IJK", 3, extra_keys=[[["image", 0]], [["image", -4]], None]),
        )
        await atlas.answers("ABC", {"w1": 3}, scope=salt_scope("x"))
        await atlas.answers("LMN", {"w1": 3}, adapter="sql")
        for path in ("ABC", "LMN", "IJK"):
            assert atlas.ask(path) == {}
        assert atlas.ask("ABC", scope=salt_scope("y")) == {}
        assert atlas.ask("LMN", adapter="other") == {}
