"""A directory's soft state for a peer that begins, and how that one takes it up.

A snapshot says per publisher up to where its stream was applied (`Place`), and all that was claimed
by then; what agents' shelves and stores hold; and what prices rest on. It is written and read in
pieces of some thousand rows: between two of them events may be applied, but not those of the
publisher that is being written.

`Restore` fills lives that are in no answer yet. All of them are adopted at once, when the last
piece is there, and are in doubt until their streams go on from their places (`core.sequence`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping

import msgspec

from kvatlas.core.directory import Directory, _Slot
from kvatlas.core.dispatch import Dispatcher
from kvatlas.core.keys import KEY_BYTES
from kvatlas.core.records import Place, Publisher, Tier
from kvatlas.core.shelves import Shelf, Shelves
from kvatlas.core.snapshot_claims import pieces_of, take_claimed, take_rows
from kvatlas.core.snapshot_prices import adopt_prices, checked
from kvatlas.core.snapshot_values import (
    FORMAT,
    ROWS_MAX,
    Agent,
    AnyPiece,
    Claimed,
    Closing,
    Engine,
    EnginePrices,
    Opening,
    Piece,
    PoolPrices,
    Shelved,
    Stored,
)
from kvatlas.core.units import Part
from kvatlas.errors import SnapshotError


def engine_pieces(directory: Directory, publisher: Publisher, place: Place) -> Iterator[Piece]:
    """One engine's rank. Raises SnapshotError where its life ends meanwhile."""
    life = directory.life(publisher)
    if life is None:
        raise SnapshotError(f"{publisher} is not here any more")
    pool = life.pool
    yield Engine(publisher, pool.fingerprint, len(pool.lanes), place)
    for piece in pieces_of(directory, life):
        if directory.life(publisher) is not life:
            raise SnapshotError(f"{publisher} began anew")
        yield piece


def shelf_pieces(shelves: Shelves, places: Mapping[Publisher, Place]) -> Iterator[Piece]:
    """All agents that have a place, and the stores of which no user lacks one. To be read while
    nobody of them says anything."""
    for agent, place in places.items():
        yield Agent(agent, place)
        for tier, shelf in shelves.own(agent).items():
            for part, keys in _shelf(shelf):
                yield Shelved(tier, part, keys)
    for name, (shelf, users) in shelves.stores().items():
        if all(user in places for user in users):
            for part, keys in _shelf(shelf):
                yield Stored(name, users, part, keys)


def _shelf(shelf: Shelf) -> Iterator[tuple[Part, bytes]]:
    for part in Part:
        walk = iter(shelf.keys[part])
        while keys := b"".join(itertools.islice(walk, ROWS_MAX)):
            yield part, keys


class Taken(msgspec.Struct, frozen=True):
    """What was taken up, by place; and of whom nothing was, and why."""

    places: dict[Publisher, Place]
    left_out: dict[Publisher, str]
    holders: int
    stores: tuple[str, ...]


class Restore:
    """One snapshot on its way in. `take` each piece in order, then `commit`; else `give_up`."""

    def __init__(self, dispatcher: Dispatcher, outdone: Callable[[Publisher, Place], str]) -> None:
        """``outdone``: why a place of a publisher is worth nothing here, "" where it is
        (`Sequencer.outdone`)."""
        self._dispatcher = dispatcher
        self._directory = dispatcher.directory
        self._outdone = outdone
        self._lives: dict[Publisher, tuple[_Slot, Place]] = {}
        self._houses: dict[Publisher, tuple[dict[Tier, Shelf], Place]] = {}
        self._stores: dict[str, tuple[Shelf, list[Publisher]]] = {}
        self._prices: list[PoolPrices | EnginePrices] = []
        self._left_out: dict[Publisher, str] = {}
        self._life: _Slot | None = None  # of whom rows come now; None: of one that is left out
        self._house: dict[Tier, Shelf] | None = None
        self._pieces = 0
        self.whole = False

    def take(self, piece: AnyPiece) -> None:
        """Raises SnapshotError where it cannot be; then the whole must be given up."""
        if self.whole or isinstance(piece, Opening) != (self._pieces == 0):
            raise SnapshotError("its pieces are out of order")
        self._pieces += 1
        match piece:
            case Opening(number):
                check_format(number)
            case Closing(pieces):
                if pieces != self._pieces - 1:
                    raise SnapshotError("pieces of it are missing")
                self.whole = True
            case Engine():
                self._begin_engine(piece)
            case Agent():
                self._begin_agent(piece)
            case Shelved(tier, part, keys):
                if self._house is not None:
                    shelf = self._house.get(tier)
                    self._put(shelf, part, keys)
            case Stored(store, users, part, keys):
                if store in self._directory.shelves.stores():
                    shelf, _ = self._stores.setdefault(store, (Shelf(Tier.OBJECT), users))
                    self._put(shelf, part, keys)
            case PoolPrices() | EnginePrices():
                checked(piece)
                self._prices.append(piece)
            case Claimed():
                if self._life is not None:
                    take_claimed(self._life, piece)
            case _:
                if self._life is not None:
                    take_rows(self._directory, self._life, piece)

    def commit(self) -> Taken:
        """All of it counts from now on, in doubt. Raises SnapshotError where it is not whole."""
        if not self.whole:
            raise SnapshotError("it ends before its end")
        places: dict[Publisher, Place] = {}
        holders = 0
        for publisher in list(self._lives):
            life, place = self._lives.pop(publisher)
            why = self._outdone(publisher, place)
            if why:
                self._directory.discard(life)
            elif not self._directory.adopt(life):
                why = "it is not what it was when this began"
            if why:
                self._left_out[publisher] = why
                continue
            places[publisher] = place
            holders += life.holders
        shelves = self._directory.shelves
        for agent, (own, place) in self._houses.items():
            why = self._outdone(agent, place) if agent in shelves else "it is not known here"
            if why:
                self._left_out[agent] = why
                continue
            shelves.adopt(agent, own)
            places[agent] = place
        adopt_prices(self._dispatcher, self._prices)
        return Taken(places, self._left_out, holders, self._stock(shelves, places))

    def _stock(self, shelves: Shelves, places: Mapping[Publisher, Place]) -> tuple[str, ...]:
        """Of a store only where the words of all who use it here go on from this snapshot: what
        left it since must still come."""
        users = {name: agents for name, (_, agents) in shelves.stores().items()}
        stocked = []
        for name, (shelf, told) in self._stores.items():
            if all(agent in places and agent in told for agent in users.get(name, [])):
                shelves.stock(name, shelf)
                stocked.append(name)
        return tuple(stocked)

    def give_up(self) -> None:
        """Nothing of it was ever in an answer; its room is given back."""
        for life, _ in self._lives.values():
            self._directory.discard(life)
        self._lives = {}
        self._life = None

    def _begin_engine(self, piece: Engine) -> None:
        self._life = self._house = None
        publisher = piece.publisher
        self._only_once(publisher)
        pool = self._directory.pool_of(publisher)
        if pool is None:
            why = "it is not known here"
        elif pool.fingerprint != piece.fingerprint:
            why = "it has another fingerprint here"
        elif len(pool.lanes) != piece.lanes:
            raise SnapshotError(f"{publisher}: it files other groups under one fingerprint")
        else:
            why = self._outdone(publisher, piece.place)
            if not why:
                self._life = self._directory.stage(publisher, pool)
                self._lives[publisher] = self._life, piece.place
        if why:
            self._left_out[publisher] = why

    def _begin_agent(self, piece: Agent) -> None:
        self._life = self._house = None
        self._only_once(piece.agent)
        known = piece.agent in self._directory.shelves
        why = self._outdone(piece.agent, piece.place) if known else "it is not known here"
        if why:
            self._left_out[piece.agent] = why
            return
        own = self._directory.shelves.own(piece.agent)
        self._house = {tier: Shelf(tier) for tier in own}
        self._houses[piece.agent] = self._house, piece.place

    def _only_once(self, publisher: Publisher) -> None:
        if publisher in self._lives or publisher in self._houses or publisher in self._left_out:
            raise SnapshotError(f"it tells of {publisher} twice")
        if len(self._left_out) >= self._directory.limits.publishers_max:
            raise SnapshotError("it tells of more publishers than there may be")

    def _put(self, shelf: Shelf | None, part: Part, keys: bytes) -> None:
        if shelf is None or len(keys) % KEY_BYTES:
            raise SnapshotError("it tells of a shelf that no agent has, or of half a key")
        shelf.keys[part].update(keys[i : i + KEY_BYTES] for i in range(0, len(keys), KEY_BYTES))
        if len(shelf) > self._directory.limits.holders_per_publisher_max:
            raise SnapshotError("it tells of more on one shelf than there may be")


def check_format(number: int) -> None:
    """Raises SnapshotError where it is not ours."""
    if number != FORMAT:
        raise SnapshotError(
            f"it has format {number}, this kvatlas reads {FORMAT}: start gateways of one version"
        )
