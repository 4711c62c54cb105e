"""A stream that goes on from a peer's place: its claims count once the engine confirmed them."""

from __future__ import annotations

from feed_kit import Atlas, atlas
from stub_publisher import StubPublisher, stored

from kvatlas.core.records import Place, Publisher

__all__ = ["atlas"]


async def told(atlas: Atlas, stub: StubPublisher) -> tuple[Publisher, Place]:
    """Two blocks at w1, and how far that is."""
    publisher = atlas.follow("w1", stub)
    await atlas.settled("w1")
    stub.publish(stored("AB", 2))
    await atlas.answers("AB", {"w1": 2})
    place = atlas.feed.place(publisher)
    assert place is not None
    return publisher, place


async def test_it_is_believed_once_the_engine_has_told_the_same_batch(atlas: Atlas) -> None:
    async with StubPublisher() as stub:
        publisher, place = await told(atlas, stub)
        atlas.feed.take_up(publisher, place)
        assert atlas.ask("AB") == {}
        stub.publish(stored("ABC"))
        await atlas.answers("ABC", {"w1": 3})
        assert stub.requests[-1] == place.next_seq - 1
        assert atlas.status("w1").stream.resets == 0


async def test_an_engine_that_answers_nothing_proves_nothing(atlas: Atlas) -> None:
    async with StubPublisher() as stub:
        publisher, place = await told(atlas, stub)
        stub.silent = True
        atlas.feed.take_up(publisher, place)
        await atlas.until(lambda: atlas.directory.holders_of(publisher) == 0)
        assert atlas.ask("AB") == {}
        stub.silent = False
        stub.publish(stored("X"))
        await atlas.answers("X", {"w1": 1})


async def test_what_is_not_proved_goes_with_its_stream(atlas: Atlas) -> None:
    async with StubPublisher() as stub:
        publisher, place = await told(atlas, stub)
        stub.silent = True
        atlas.feed.take_up(publisher, place)
        atlas.feed.remove(publisher)
        assert atlas.directory.holders_of(publisher) == 0
        stub.silent = False
        again = atlas.follow("w1", stub)
        assert again == publisher
        await atlas.answers("AB", {"w1": 2})


async def test_nothing_is_applied_while_it_is_held_and_others_go_on(atlas: Atlas) -> None:
    async with StubPublisher() as stub, StubPublisher() as beside:
        publisher, place = await told(atlas, stub)
        atlas.follow("w2", beside)
        await atlas.settled("w2")
        assert atlas.feed.hold(publisher)
        stub.publish(stored("ABC"))
        beside.publish(stored("ABC", 3))
        await atlas.answers("ABC", {"w1": 2, "w2": 3})
        assert atlas.feed.place(publisher) == place
        atlas.feed.release(publisher)
        await atlas.answers("ABC", {"w1": 3, "w2": 3})
