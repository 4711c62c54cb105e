"""The suite of all stores on those beyond the node, each with a real server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from nixl_kit import NixlRig, Placed, use_nixl
from sealing_kit import flipped, sealer_of
from stores_kit import finished
from stores_rigs import (
    MooncakeRig,
    PeerRig,
    Rig,
    S3Rig,
    ValkeyRig,
    mooncake_package,
    s3_packages,
)
from test_tiers import *  # noqa: F403  the tests themselves
from test_tiers import CAPACITY_BYTES, Kit, value

from kvatlas.core.records import Tier
from kvatlas.dataplane.tiers import mooncake
from kvatlas.dataplane.tiers.base import (
    Counts,
    Entry,
    Finish,
    Life,
    Piece,
    Report,
    Shared,
    Store,
)
from kvatlas.dataplane.tiers.peer import PeerStore


class Remote(Kit):
    """What a rig serves."""

    limited = False
    lasts = True
    tier = Tier.OBJECT
    rig: Rig

    def open(self) -> Store:
        return self.rig.store(self.rig.port)

    def damage(self, store: Any, name: bytes) -> None:
        (size,) = (entry.size_bytes for entry in store.scan() if entry.name == name)
        piece = Piece(name, memoryview(bytearray(size)))
        finished(lambda done: store.read([piece], done))
        good = bytes(piece.view)
        store.delete([name])
        self.rig.put(name, good, good[:-1] + bytes([good[-1] ^ 1]))

    def close(self) -> None:
        self.rig.close()
        super().close()


class Valkey(Remote):
    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.rig = ValkeyRig(directory)


class PeerThere:
    """A peer's dram as its own agent writes it, and as others read it."""

    tier = Tier.PEER

    def __init__(self, rig: PeerRig, reader: PeerStore) -> None:
        self.rig = rig
        self.reader = reader
        self.transport = reader.transport
        self.closed = False

    @property
    def counts(self) -> dict[str, int]:
        return self.reader.counts

    def find(self, names: Sequence[bytes], done: Finish) -> None:
        self.reader.find(names, done)

    def write(self, pieces: Sequence[Piece], done: Finish) -> None:
        if self.closed:
            self.reader.write(pieces, done)
        else:
            self.rig.dram.write(pieces, done)

    def read(self, pieces: Sequence[Piece], done: Finish) -> None:
        self.reader.read(pieces, done)

    def labels(self) -> Iterator[Entry]:
        return self.reader.labels()

    def delete(self, names: Sequence[bytes]) -> None:
        self.rig.dram.delete(names)

    def scan(self) -> Iterator[Entry]:
        return self.reader.scan()

    def close(self) -> None:
        self.closed = True
        self.reader.close()


class Peer(Remote):
    tier = Tier.PEER
    limited = True

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.rig = PeerRig(directory, CAPACITY_BYTES, verify=True)

    def open(self) -> Store:
        reader = self.rig.store(self.rig.port)
        assert isinstance(reader, PeerStore)
        assert isinstance(self.rig, PeerRig)
        return PeerThere(self.rig, reader)

    def damage(self, store: Any, name: bytes) -> None:
        assert isinstance(self.rig, PeerRig)
        self.rig.arena.view(self.rig.dram._units[name].slot)[-1] ^= 1


class NixlThere(PeerThere):
    """The same, read by NIXL into an arena."""

    def __init__(self, rig: NixlRig) -> None:
        reader, arena, _ = rig.reader(rig.port)
        super().__init__(rig, reader)
        self._placed = Placed(reader, arena)

    def read(self, pieces: Sequence[Piece], done: Finish) -> None:
        self._placed.read(pieces, done)

    def close(self) -> None:
        moved = self.reader.moved.status()["moved"]
        assert "tcp" not in moved, moved  # type: ignore[operator]
        super().close()


class Nixl(Peer):
    def __init__(self, directory: Path) -> None:
        self._patch = pytest.MonkeyPatch()
        use_nixl(self._patch, directory)
        Remote.__init__(self, directory)
        self.rig = NixlRig(directory, CAPACITY_BYTES, verify=True)

    def open(self) -> Store:
        assert isinstance(self.rig, NixlRig)
        return NixlThere(self.rig)

    def close(self) -> None:
        super().close()
        self._patch.undo()


class Mooncake(Remote):
    tells = False  # sizes only

    def __init__(self, directory: Path) -> None:
        if not mooncake_package():
            pytest.skip(mooncake.missing())
        super().__init__(directory)
        self.rig = MooncakeRig(directory)


class S3(Remote):
    tells = False  # sizes only

    def __init__(self, directory: Path) -> None:
        if not s3_packages():
            pytest.skip("obstore or moto is not installed: make engines")
        super().__init__(directory)
        self.rig = S3Rig(directory)


class Sealed(Remote):
    """In front of a kit: all that its rig opens is sealed."""

    rig: ValkeyRig | S3Rig | MooncakeRig

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.rig.sealer = sealer_of(directory / "keys")

    def damage(self, store: Any, name: bytes) -> None:
        found = self.rig.stored(name)
        store.delete([name])  # Mooncake writes over nothing
        self.rig.stored(name, flipped(found))


class SealedValkey(Sealed, Valkey):
    pass


class SealedS3(Sealed, S3):
    pass


class SealedMooncake(Sealed, Mooncake):
    pass


KITS = (
    *(Valkey, SealedValkey, Peer),
    pytest.param(S3, marks=pytest.mark.engine),
    pytest.param(SealedS3, marks=pytest.mark.engine),
    pytest.param(Mooncake, marks=pytest.mark.engine),
    pytest.param(SealedMooncake, marks=pytest.mark.engine),
    pytest.param(Nixl, marks=pytest.mark.engine),
)


@pytest.fixture(params=KITS, ids=lambda kit: kit.__name__.lower())
def kit(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Kit]:
    made: Kit = request.param(tmp_path)
    yield made
    made.close()


def test_it_says_what_is_there_without_reading_it(store: Shared) -> None:
    pieces = [value(b"unit-%d" % n, 5000) for n in range(300)]
    assert finished(lambda done: store.write(pieces, done)) == Report()
    store.delete([b"unit-7"])
    names = [piece.name for piece in pieces] + [b"never there"]
    report = finished(lambda done: store.find(names, done))
    assert (sorted(report.failed), report.damaged) == ([b"never there", b"unit-7"], ())
    assert finished(lambda done: store.find([], done)) == Report()
    nothing = finished(lambda done: store.find([b"no", b"such"], done))
    assert set(nothing.failed) == {b"no", b"such"}
    assert not nothing.silent
    store.close()
    assert finished(lambda done: store.find([b"unit-1"], done)).failed == (b"unit-1",)


def test_labels_say_whose_values_are_or_that_nobody_can(store: Shared) -> None:
    pieces = [value(b"unit-%d" % n, 5000) for n in range(30)]
    for n, piece in enumerate(pieces):
        piece.tenant = f"owner {n % 3}"
    assert finished(lambda done: store.write(pieces, done)) == Report()
    labels = store.labels()
    if isinstance(store, mooncake.MooncakeStore):
        assert labels is None  # it is purged by name
        return
    assert labels is not None
    found = {entry.name: (entry.tenant, entry.size_bytes) for entry in labels}
    assert found == {piece.name: (piece.tenant, 5000) for piece in pieces}


def test_another_life_is_noticed_even_after_one_that_could_not_be_told() -> None:
    counts, told = Counts(), list[str]()
    life = Life(counts, told.append)
    for said in (b"", b"one", b"one", b"", b"two", b"two"):
        life.seen(said, f"now it is {said.decode()}")
    assert told == ["now it is two"]
    assert counts.all() == {"restarts": 1}
