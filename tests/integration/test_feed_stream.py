"""The engine feed over real ZMQ: gaps, replays, restarts, garbage, faults of ours."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable

import pytest
import zmq.asyncio
from feed_kit import FINGERPRINT, Atlas
from stub_publisher import (
    BLOCK,
    StubPublisher,
    removed,
    stored,
)

from kvatlas.core import layout
from kvatlas.core.claims import Applied
from kvatlas.core.events import Event
from kvatlas.core.records import Publisher
from kvatlas.service.feed import Source

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
