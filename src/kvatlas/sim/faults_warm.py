"""What a gateway of a scenario tells one that begins, and how that one takes it up.

It does what `service.snapshots` and `service.warm_start` do over HTTP: by the same frames, but read
in one moment; what may happen meanwhile happens between that moment and when it is taken up.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvatlas.core.keys import Keyring
from kvatlas.core.records import Place, Publisher
from kvatlas.core.snapshot import Restore, Taken, engine_pieces, shelf_pieces
from kvatlas.core.snapshot_frames import NONCE_BYTES, Reader, Writer, encoded
from kvatlas.core.snapshot_prices import prices_of
from kvatlas.core.snapshot_values import Piece
from kvatlas.errors import SnapshotError
from kvatlas.sim.gateway import Gateway

_NONCE = bytes(NONCE_BYTES)


def snapshot(gateway: Gateway, ring: Keyring) -> bytes:
    """All that it knows of those whose streams have a place."""
    writer = Writer(ring, _NONCE)
    frames = [writer.opening()]
    frames += [writer.frame(encoded(piece)) for piece in _told(gateway)]
    return b"".join((*frames, writer.closing()))


def _told(gateway: Gateway) -> Iterator[Piece]:
    directory = gateway.dispatcher.directory
    for publisher, place in _places(gateway, directory.publishers()).items():
        yield from engine_pieces(directory, publisher, place)
    yield from shelf_pieces(directory.shelves, _places(gateway, directory.shelves.agents()))
    yield from prices_of(gateway.dispatcher)


def _places(gateway: Gateway, publishers: list[Publisher]) -> dict[Publisher, Place]:
    places = {each: gateway.feed(each.worker).sequencer.place() for each in publishers}
    return {publisher: place for publisher, place in places.items() if place is not None}


def take(gateway: Gateway, ring: Keyring, told: bytes) -> Taken | None:
    """Take it up; None, and nothing has changed, where it is not whole."""
    reader, dispatcher = Reader(ring, _NONCE), gateway.dispatcher

    def outdone(publisher: Publisher, place: Place) -> str:
        return gateway.feed(publisher.worker).sequencer.outdone(place)

    restore = Restore(dispatcher, outdone)
    reader.feed(told)
    try:
        for piece in reader.pieces():
            restore.take(piece)
        taken = restore.commit()
    except SnapshotError:
        restore.give_up()
        return None
    for publisher, place in taken.places.items():
        gateway.feed(publisher.worker).take_up(place)
    return taken
