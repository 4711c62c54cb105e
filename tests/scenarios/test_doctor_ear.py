"""The doctor's ear: what it keeps of a stream, and what it says of one that is not well."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import zmq.asyncio

from kvatlas.connectors.child import free_ports
from kvatlas.connectors.stub_wire import EventPublisher
from kvatlas.core.events import BlockStored
from kvatlas.service.feed import Source
from kvatlas.validate.doctor import ear as module
from kvatlas.validate.doctor.canaries import packed
from kvatlas.validate.doctor.ear import Ear

WAIT_S = 20.0


@pytest.fixture
async def publisher() -> AsyncIterator[EventPublisher]:
    context = zmq.asyncio.Context()
    publisher = EventPublisher(context, "127.0.0.1")
    publisher.start()
    yield publisher
    await publisher.close()
    context.destroy(linger=0)


@pytest.fixture
async def ear(publisher: EventPublisher) -> AsyncIterator[Ear]:
    context = zmq.asyncio.Context()
    ear = Ear(context, Source(publisher.endpoint, publisher.replay_endpoint))
    await ear.open(WAIT_S)
    assert not ear.error
    await heard(ear, publisher, 0)  # a subscription takes a moment longer than a connection
    yield ear
    await ear.close()
    context.destroy(linger=0)


async def heard(ear: Ear, publisher: EventPublisher, first: int) -> None:
    """Publish a block that starts with ``first`` until it is heard."""
    for _ in range(200):
        publisher.publish([stored(first)], 0.0)
        if await ear.until_stored(prompt(first), WAIT_S / 200):
            return
    raise AssertionError("nothing was heard")


def prompt(first: int) -> bytes:
    return packed(tuple(range(first, first + 16)))


def stored(first: int) -> BlockStored:
    return BlockStored((first,), None, prompt(first), 16)


async def test_a_prompt_is_told_by_its_first_block(ear: Ear, publisher: EventPublisher) -> None:
    publisher.publish([stored(7)], 0.0)
    longer = prompt(7) + packed((1, 2, 3))
    assert await ear.until_stored(longer, WAIT_S)
    assert [event.hashes for event in ear.stored(longer)] == [(7,)]
    assert not ear.stored(prompt(8))
    assert not await ear.until_stored(prompt(8), 0.05)
    assert not ear.gap
    assert await ear.replayed(WAIT_S) == ""


async def test_an_event_for_each_page_of_one_token(ear: Ear, publisher: EventPublisher) -> None:
    ids = tuple(range(50, 70))
    pages = [
        BlockStored((100 + i,), 99 + i if i else 5, packed((token,)), 1)  # its first is known
        for i, token in enumerate(ids)
    ]
    publisher.publish(pages, 0.0)
    longer = packed((49, *ids))
    assert await ear.until_stored(longer, WAIT_S)
    (run,) = ear.stored(longer)
    assert (run.block_tokens, run.hashes[:2], run.parent) == (1, (100, 101), 5)
    assert not ear.stored(packed((49, *ids[:7])))
    assert not ear.stored(packed(ids[:4] + ids[5:]))


async def test_lost_batches_are_told(ear: Ear, publisher: EventPublisher) -> None:
    publisher.skip(2)
    publisher.publish([stored(7)], 0.0)
    assert await ear.until_stored(prompt(7), WAIT_S)
    assert ear.gap.endswith("came")


async def test_what_comes_again_must_be_the_same(ear: Ear, publisher: EventPublisher) -> None:
    publisher.publish([stored(7)], 0.0)
    assert await ear.until_stored(prompt(7), WAIT_S)
    seq, _ = publisher._buffer[-1]
    other = publisher._encoder.payload([stored(9)], 0.0)
    publisher._buffer[-1] = (seq, other)
    assert await ear.replayed(WAIT_S) == f"batch {seq} came again with other events"
    publisher._buffer.pop()
    assert await ear.replayed(WAIT_S) == f"batch {seq} did not come again"


async def test_a_busy_stream_is_heard_on_and_not_kept(
    ear: Ear, publisher: EventPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_KEPT_MAX", len(ear.batches) + 1)
    kept = len(ear.batches)
    for first in (7, 8, 9):
        publisher.publish([stored(first)], 0.0)
    assert await ear.until_stored(prompt(7), WAIT_S)
    assert not await ear.until_stored(prompt(9), 0.05)
    assert (len(ear.batches), ear.gap) == (kept + 1, "")


@pytest.mark.parametrize(
    ("source", "told"),
    [
        (Source("tcp://*:5557", bind=True), "connects to the gateway there"),
        (Source("nothing of the kind"), "nothing of the kind: "),
    ],
)
async def test_streams_that_cannot_be_heard(source: Source, told: str) -> None:
    context = zmq.asyncio.Context()
    deaf = Ear(context, source)
    try:
        await deaf.open(WAIT_S)
        assert told in deaf.error
        assert not await deaf.until_stored(prompt(0), WAIT_S)
        assert await deaf.replayed(WAIT_S) == "nothing was heard that could be asked for again"
    finally:
        await deaf.close()
        context.destroy(linger=0)


async def test_nobody_publishes_there() -> None:
    context = zmq.asyncio.Context()
    port = free_ports(1)[0]
    deaf = Ear(context, Source(f"tcp://127.0.0.1:{port}"))
    try:
        await deaf.open(0.1)
        assert "nobody there publishes" in deaf.error
    finally:
        await deaf.close()
        context.destroy(linger=0)
