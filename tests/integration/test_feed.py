"""The engine feed over real ZMQ into the real directory: field reports of class A, and more."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import msgspec
import pytest
import zmq.asyncio
from stub_publisher import (
    BLOCK,
    CLEARED,
    StubPublisher,
    block_tokens,
    location,
    removed,
    stored,
)

from kvatlas.core import layout, sequence
from kvatlas.core.claims import Applied
from kvatlas.core.directory import Directory, Limits
from kvatlas.core.events import Event
from kvatlas.core.keys import PUBLIC, Keyring, Scope
from kvatlas.core.records import Publisher, Resume
from kvatlas.service.feed import Feed, FeedStatus, Source

FINGERPRINT = b"f" * 32
QUICK = sequence.Limits(
    replay_timeout_s=0.3, retry_s=0.05, settle_s=0.02, orphan_replay_s=0.0, give_up_s=0.2
)


class Atlas:
    """A directory with its feed, and the questions of the field reports."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.keyring = Keyring(b"a test's own secret")
        self.directory = Directory(self.keyring, limits or Limits())
        self.feed = Feed(self.directory, limits=QUICK, slice_s=0.0)

    def follow(self, name: str, stub: StubPublisher, **more: Any) -> Publisher:
        publisher = Publisher(name)
        self.directory.register(publisher, layout.plain(BLOCK), FINGERPRINT)
        self.feed.add(publisher, Source(stub.endpoint, stub.replay, **more))
        return publisher

    def resumes(self, path: str, scope: Scope = PUBLIC, adapter: str = "") -> dict[str, Resume]:
        root = self.keyring.root(FINGERPRINT, scope, adapter)
        keys = self.keyring.chain(root, _pack(block_tokens(path)), BLOCK)
        found = self.directory.peek(keys, FINGERPRINT)
        return {str(resume.publisher): resume for resume in found}

    def ask(self, path: str, **more: Any) -> dict[str, int]:
        """Blocks that each worker is believed to hold of a prompt; none: not listed."""
        return {name: r.tokens // BLOCK for name, r in self.resumes(path, **more).items()}

    def status(self, name: str) -> FeedStatus:
        return next(s for s in self.feed.status() if s.publisher.worker == name)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0.005)

    async def answers(self, path: str, expected: dict[str, int], **more: Any) -> None:
        with contextlib.suppress(TimeoutError):
            await self.until(lambda: self.ask(path, **more) == expected)
        assert self.ask(path, **more) == expected

    async def settled(self, *names: str) -> None:
        await self.until(lambda: all(self.feed.idle(Publisher(name)) for name in names))


def _pack(tokens: list[int]) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in tokens)


@pytest.fixture
async def atlas() -> AsyncIterator[Atlas]:
    atlas = Atlas()
    yield atlas
    await atlas.feed.close()


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
        await atlas.answers("ABC", {"w1": 3}, scope=Scope("tenant", "x"))
        await atlas.answers("LMN", {"w1": 3}, adapter="sql")
        for path in ("ABC", "LMN", "IJK"):
            assert atlas.ask(path) == {}
        assert atlas.ask("ABC", scope=Scope("tenant", "y")) == {}
        assert atlas.ask("LMN", adapter="other") == {}


# -- the stream itself ----------------------------------------------------------------------------


async def test_a_late_subscriber_learns_what_an_idle_engine_holds(atlas: Atlas) -> None:
    async with StubPublisher() as w1:
        w1.publish(stored("AB", 2))
        w1.publish(stored("ABC"))
        atlas.follow("w1", w1)
        await atlas.answers("ABC", {"w1": 3})
        assert w1.requests[0] == 0


async def test_a_gap_is_replayed(atlas: Atlas) -> None:
    async with StubPublisher() as w1:
        atlas.follow("w1", w1)
        await w1.subscribed()
        w1.publish(stored("A"))
        await atlas.answers("A", {"w1": 1})
        await atlas.settled("w1")
        w1.publish(stored("AB"), lose=True)
        w1.publish(removed("A"), lose=True)
        w1.publish(stored("X"))
        await atlas.answers("X", {"w1": 1})
        assert atlas.ask("AB") == {}
        counters = atlas.status("w1").stream
        assert (counters.gaps, counters.resets, counters.applied) == (1, 0, 4)


async def test_a_gap_beyond_the_engines_buffer_resets_that_worker_only(atlas: Atlas) -> None:
    async with StubPublisher(buffer=2) as w1, StubPublisher() as w2:
        for name, stub in (("w1", w1), ("w2", w2)):
            atlas.follow(name, stub)
            await stub.subscribed()
            stub.publish(stored("AB", 2))
        await atlas.answers("AB", {"w1": 2, "w2": 2})
        await atlas.settled("w1")
        for path in "PQRS":
            w1.publish(stored(path), lose=True)
        w1.publish(stored("T"))
        await atlas.answers("T", {"w1": 1})
        assert atlas.ask("AB") == {"w2": 2}
        assert atlas.ask("S") == {"w1": 1}
        assert atlas.ask("P") == {}
        assert atlas.status("w1").stream.resets == 1
        assert atlas.status("w2").stream.resets == 0


@pytest.mark.parametrize("replay", [True, False])
async def test_an_engine_that_starts_anew_is_forgotten(atlas: Atlas, replay: bool) -> None:
    async with StubPublisher(replay=replay) as w1:
        atlas.follow("w1", w1)
        await w1.subscribed()
        w1.publish(stored("AB", 2))
        w1.publish(stored("ABC"))
        await atlas.answers("ABC", {"w1": 3})
        await w1.restart()
        await w1.subscribed()
        w1.publish(stored("X"))
        await atlas.answers("X", {"w1": 1})
        assert atlas.ask("ABC") == {}
        assert atlas.status("w1").epoch >= 1


async def test_a_restart_of_an_idle_engine_shows_in_its_replay(atlas: Atlas) -> None:
    async with StubPublisher() as w1:
        atlas.follow("w1", w1)
        await w1.subscribed()
        w1.publish(stored("AB", 2))
        await atlas.answers("AB", {"w1": 2})
        await w1.restart()
        await atlas.answers("AB", {})


async def test_an_engine_that_leaves_replays_unanswered_still_counts(atlas: Atlas) -> None:
    async with StubPublisher() as w1:
        w1.silent = True
        w1.publish(stored("A"))
        atlas.follow("w1", w1)
        await w1.subscribed()
        w1.publish(stored("B"))
        await atlas.answers("B", {"w1": 1})
        assert atlas.status("w1").stream.replays_failed == 1


async def test_an_engine_that_connects_to_us(atlas: Atlas) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    async with StubPublisher(connect=endpoint) as w1:
        w1.publish(stored("AB", 2))  # before anybody listens
        atlas.follow("w1", w1, bind=None)
        await atlas.answers("AB", {"w1": 2})
        assert atlas.status("w1").bound
        w1.publish(stored("ABC"))
        await atlas.answers("ABC", {"w1": 3})
        atlas.follow("w2", w1, bind=None)
        assert "the events of w1 already" in atlas.status("w2").error


async def test_an_engine_that_bound_the_address_it_reports(atlas: Atlas) -> None:
    async with StubPublisher() as w1:
        atlas.follow("w1", w1, bind=None)
        await w1.subscribed()
        w1.publish(stored("A"))
        await atlas.answers("A", {"w1": 1})
        assert not atlas.status("w1").bound


async def test_an_engine_that_is_not_there_yet(atlas: Atlas) -> None:
    stub = StubPublisher()
    async with stub:
        endpoint, replay = stub.endpoint, stub.replay
        await stub.stop()
        publisher = Publisher("w1")
        atlas.directory.register(publisher, layout.plain(BLOCK), FINGERPRINT)
        atlas.feed.add(publisher, Source(endpoint, replay))
        await asyncio.sleep(0.05)
        assert not atlas.status("w1").connected
        await stub.start()
        await stub.subscribed()
        stub.publish(stored("A"))
        await atlas.answers("A", {"w1": 1})


async def test_a_bad_endpoint_is_said_and_harms_nobody(atlas: Atlas) -> None:
    async with StubPublisher() as w1:
        atlas.follow("w1", w1)
        atlas.feed.add(Publisher("bad"), Source("tcp://nowhere:notaport"))
        assert "tcp://nowhere:notaport" in atlas.status("bad").error
        await w1.subscribed()
        w1.publish(stored("A"))
        await atlas.answers("A", {"w1": 1})


async def test_garbage_frames_are_counted(atlas: Atlas) -> None:
    async with StubPublisher() as w1:
        atlas.follow("w1", w1)
        await w1.subscribed()
        w1._pub.send(b"one frame")
        w1._pub.send_multipart([b"kv", b"short", b""])
        w1.publish(stored("A"))
        await atlas.answers("A", {"w1": 1})
        assert atlas.status("w1").malformed == 2


async def test_numbers_beyond_all_counting_are_garbage(atlas: Atlas) -> None:
    async with StubPublisher() as w1:
        publisher = atlas.follow("w1", w1)
        await w1.subscribed()
        w1.publish(stored("A"))
        await atlas.answers("A", {"w1": 1})
        for seq in (2**63, 2**64 - 1):
            w1.send(seq, dict(w1.sent)[0])
        await atlas.until(lambda: atlas.status("w1").malformed == 2)
        atlas.feed.dropped(publisher, "it slept")
        w1.publish(stored("B"), lose=True)
        w1.publish(stored("C"))
        await atlas.answers("B", {"w1": 1})
        assert atlas.ask("A") == {}


async def test_a_fault_of_ours_stays_with_its_stream(
    atlas: Atlas, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvatlas.service.feed._REOPEN_S", 0.05)
    apply = atlas.directory.apply
    broken = True

    def faulty(publisher: Publisher, events: Iterable[Event]) -> Applied:
        if publisher.worker == "w1" and broken:
            raise RuntimeError("a fault of ours")
        return apply(publisher, events)

    monkeypatch.setattr(atlas.directory, "apply", faulty)
    async with StubPublisher() as w1, StubPublisher() as w2:
        for name, stub in (("w1", w1), ("w2", w2)):
            atlas.follow(name, stub)
            await stub.subscribed()
        w1.publish(stored("A"))
        await atlas.until(lambda: "RuntimeError" in atlas.status("w1").error)
        w2.publish(stored("A"))
        await atlas.answers("A", {"w2": 1})
        broken = False
        await atlas.answers("A", {"w1": 1, "w2": 1})
        assert atlas.status("w1").error == ""


async def test_a_replay_without_end_does_not_hold_up_removals(atlas: Atlas) -> None:
    class Babbling(StubPublisher):
        async def _serve(self, router: zmq.asyncio.Socket) -> None:
            client, empty, start = await router.recv_multipart()
            self.requests.append(int.from_bytes(start, "big"))
            while True:  # the same batch, again and again
                frames = [client, empty, b"kv", *(start, dict(self.sent)[0])]
                await router.send_multipart(frames)
                await asyncio.sleep(0.001)

    async with Babbling() as w1:
        atlas.follow("w1", w1)
        await w1.subscribed()
        w1.publish(stored("A"))
        w1.publish(stored("B"))
        await atlas.answers("B", {"w1": 1})
        await atlas.until(lambda: bool(w1.requests))
        w1.publish(removed("B"))
        await atlas.answers("B", {})


async def test_one_address_is_not_two_engines_events(
    atlas: Atlas, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvatlas.service.feed._REOPEN_S", 0.05)
    async with StubPublisher() as w1:
        first = atlas.follow("w1", w1)
        atlas.follow("w2", w1)
        assert "these are the events of w1 already" in atlas.status("w2").error
        await w1.subscribed()
        w1.publish(stored("A"))
        await atlas.answers("A", {"w1": 1})
        atlas.feed.remove(first)
        atlas.directory.unregister(first)
        await atlas.answers("A", {"w2": 1})


async def test_removing_and_adding_a_worker_at_run_time(atlas: Atlas) -> None:
    async with StubPublisher() as w1:
        publisher = atlas.follow("w1", w1)
        await w1.subscribed()
        w1.publish(stored("AB", 2))
        await atlas.answers("AB", {"w1": 2})
        atlas.feed.remove(publisher)
        atlas.directory.unregister(publisher)
        assert atlas.ask("AB") == {}
        assert atlas.feed.status() == []
        w1.publish(stored("ABC"))
        atlas.follow("w1", w1)
        await atlas.answers("ABC", {"w1": 3})


async def test_a_long_replay_goes_slice_by_slice(atlas: Atlas) -> None:
    async with StubPublisher(buffer=5000) as w1:
        for number in range(3000):
            w1.publish(stored(chr(1000 + number)))
        atlas.follow("w1", w1)
        await atlas.until(lambda: atlas.status("w1").applied.stored > 0)
        turns = 0
        async with asyncio.timeout(20):
            while atlas.status("w1").applied.stored < 3000:
                await asyncio.sleep(0)
                turns += 1
        assert turns >= 100  # others had their turn that often meanwhile


async def test_history_is_not_believed_before_it_has_caught_up(atlas: Atlas) -> None:
    async with StubPublisher(buffer=5000) as w1:
        w1.publish(stored("A"))
        for number in range(500):
            w1.publish(stored(chr(1000 + number)))
        w1.publish(removed("A"))
        atlas.follow("w1", w1)
        async with asyncio.timeout(20):
            while not atlas.ask(chr(1000)):
                assert atlas.ask("A") == {}
                await asyncio.sleep(0)
        assert atlas.status("w1").applied.removed == 1
        assert not atlas.status("w1").replaying
