"""Sealed values on a disk and in a store: damaged, moved, foreign and erased ones are misses, and
nothing is ever there in the clear."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from disk_kit import SEGMENT_BYTES, content, opened, piece_of, right, run, whole
from sealing_kit import flipped, sealer_of
from stores_kit import wait_until
from stores_rigs import ValkeyRig

from kvatlas.dataplane import keystore
from kvatlas.dataplane.arena import Arena
from kvatlas.dataplane.codec import Codec
from kvatlas.dataplane.keystore import FileKeys
from kvatlas.dataplane.records import Label, SealedLabel, checksum_bytes, pack, unpack
from kvatlas.dataplane.sealing import Sealer
from kvatlas.dataplane.tiers import valkey
from kvatlas.dataplane.tiers.base import Piece, Report, Store, checksum_of
from kvatlas.dataplane.tiers.disk import DiskStore
from kvatlas.dataplane.tiers.framing import HEADER_BYTES
from kvatlas.dataplane.tiers.opening import open_object

SIZE = 20_000
TAG = "a" * 24
TENANT, OTHER = TAG + ".7", "b" * 24 + ".1"  # owners: a tenant's tag, and an epoch


class Disk:
    """``raw``: what lies on the medium of a unit: its bytes, then its label."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "disk"
        self.label_at = SIZE

    def open(self, sealer: Sealer | None, codec: Codec = Codec.RAW) -> DiskStore:
        self.store = opened(self.directory, sealer=sealer, codec=codec)
        return self.store

    def raw(self, name: bytes, data: bytes | None = None) -> bytes:
        held = self.store._held[name]
        number, offset = divmod(held.place, SEGMENT_BYTES)
        with self.store._files.path(number).open("r+b") as file:
            file.seek(offset)
            found = file.read(held.room)
            if data is not None:
                file.seek(offset)
                file.write(data)
        return found

    def relabel(self, name: bytes, label: Label) -> None:
        """On the medium and in the catalogue, which is what is believed at the start."""
        found = self.raw(name)
        packed = pack(label)
        self.raw(name, (found[:SIZE] + packed).ljust(len(found), b"\0")[: len(found)])
        self.store._held[name].label = label

    def counts(self) -> dict[str, int]:
        return self.store.counts.all()

    def everything(self) -> bytes:
        return b"".join(p.read_bytes() for p in self.directory.rglob("*") if p.is_file())

    def close(self) -> None:
        pass


class Valkey:
    def __init__(self, directory: Path) -> None:
        self.rig = ValkeyRig(directory)
        self.label_at = 0

    def open(self, sealer: Sealer | None, codec: Codec = Codec.RAW) -> valkey.ValkeyStore:
        settings = valkey.Settings(port=self.rig.port, codec=codec, streams=2)
        self.store = valkey.ValkeyStore(settings, None, sealer)
        return self.store

    def raw(self, name: bytes, data: bytes | None = None) -> bytes:
        before = self.rig.stored(name)
        if data is not None:
            self.rig.stored(name, data)
        return before

    def relabel(self, name: bytes, label: Label) -> None:
        found = self.raw(name)
        self.raw(name, pack(label).ljust(HEADER_BYTES, b"\0") + found[HEADER_BYTES:])

    def counts(self) -> dict[str, int]:
        return self.store.counts

    def everything(self) -> bytes:
        found = b""
        for key in self.rig.ask(b"KEYS", b"*"):
            assert isinstance(key, bytes)
            (value,) = self.rig.ask(b"GET", key)
            found += key + (value if isinstance(value, bytes) else b"")
        return found

    def close(self) -> None:
        self.rig.close()


Place = Disk | Valkey


@pytest.fixture(params=[Disk, Valkey], ids=lambda kind: kind.__name__.lower())
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    made: Place = request.param(tmp_path)
    yield made
    made.close()


@pytest.fixture
def sealer(tmp_path: Path) -> Sealer:
    return sealer_of(tmp_path / "keys")


@pytest.fixture
def store(place: Place, sealer: Sealer) -> Iterator[Store]:
    made = place.open(sealer)
    yield made
    made.close()


def value(name: bytes, tenant: str = TENANT, size_bytes: int = SIZE) -> Piece:
    return Piece(name, content(name, size_bytes), tenant=tenant, fingerprint=b"print")


def read(store: Store, name: bytes, size_bytes: int = SIZE, checksum: int = 0) -> Report:
    """Right, or not there: wrong bytes are neither."""
    piece = Piece(name, memoryview(bytearray(size_bytes)), checksum)
    report = run(store.read, piece)
    if report == Report():
        assert piece.view == content(name, size_bytes)
        assert piece.checksum == checksum_of(piece.view)
    return report


def label_of(place: Place, name: bytes) -> SealedLabel:
    label = unpack(place.raw(name)[place.label_at :], Label)
    assert isinstance(label, SealedLabel)
    return label


# -- what is damaged, or was moved ----------------------------------------------------------------


@pytest.mark.parametrize("where", ["first", "last", "label", "nonce", "sum", "tag"])
def test_a_flipped_bit_is_damage_once_and_then_nothing(
    place: Place, store: Store, where: str
) -> None:
    assert run(store.write, value(b"name"), value(b"other")) == Report()
    found, label = place.raw(b"name"), label_of(place, b"name")
    payload_at = HEADER_BYTES if place.label_at == 0 else 0
    at = {
        "first": payload_at,
        "last": payload_at + SIZE - 1,
        "label": place.label_at + 20,
        "nonce": found.index(label.nonce) + 3,
        "sum": found.index(label.closed) + 3,
        "tag": found.index(label.closed) + 20,
    }[where]
    place.raw(b"name", flipped(found, at))
    assert read(store, b"name").damaged == (b"name",)
    assert place.counts()["quarantined"] == 1
    assert read(store, b"name").failed == (b"name",)
    assert read(store, b"other") == Report()
    assert run(store.write, value(b"name")) == Report()
    assert read(store, b"name") == Report()


@pytest.mark.parametrize("field", ["nonce", "closed", "tenant", "index", "key", "fingerprint"])
def test_a_whole_label_with_another_field_opens_nothing(
    place: Place, store: Store, sealer: Sealer, field: str
) -> None:
    """As somebody writes it who can write to the medium, catalogue and sums included."""
    assert run(store.write, value(b"name"), value(b"other", OTHER)) == Report()
    other = msgspec.structs.asdict(label_of(place, b"other"))
    changed = {"index": 9, "fingerprint": b"another"}.get(field, other[field])
    place.relabel(b"name", msgspec.structs.replace(label_of(place, b"name"), **{field: changed}))
    report = read(store, b"name")
    assert b"name" in (*report.damaged, *report.failed)
    assert read(store, b"other") == Report()


@pytest.mark.parametrize("tenants", [(TENANT, TENANT), (TENANT, OTHER)])
@pytest.mark.parametrize("what", ["value", "label", "all"])
def test_values_that_were_exchanged_are_misses(
    place: Place, store: Store, what: str, tenants: tuple[str, str]
) -> None:
    assert run(store.write, value(b"one", tenants[0]), value(b"two", tenants[1])) == Report()
    one, two = place.raw(b"one"), place.raw(b"two")
    labels = label_of(place, b"one"), label_of(place, b"two")
    if what in ("value", "all"):
        place.raw(b"one", two)
        place.raw(b"two", one)
    if what == "value":  # the bytes of one under the label of the other
        place.relabel(b"one", labels[0])
        place.relabel(b"two", labels[1])
    elif what == "label":
        place.relabel(b"one", msgspec.structs.replace(labels[1], name=b"one"))
        place.relabel(b"two", msgspec.structs.replace(labels[0], name=b"two"))
    for name in (b"one", b"two"):
        assert read(store, name).damaged == (name,)
        assert read(store, name).failed == (name,)


def test_what_was_in_the_clear_is_no_way_round_the_seal(place: Place, store: Store) -> None:
    """Somebody puts a whole value under an unsealed label of ours, whose sums anybody can make."""
    assert run(store.write, value(b"name")) == Report()
    forged = content(b"forged", SIZE)
    fields = msgspec.structs.asdict(label_of(place, b"name"))
    plain = Label(
        **{name: fields[name] for name in Label.__struct_fields__}
        | {"checksum": checksum_bytes(checksum_of(forged))}
    )
    found = place.raw(b"name")
    at = HEADER_BYTES if place.label_at == 0 else 0
    place.raw(b"name", found[:at] + bytes(forged) + found[at + SIZE :])
    place.relabel(b"name", plain)
    if isinstance(place, Disk):  # its memory knows better; so does its next start
        place.store._held[b"name"].label = msgspec.convert(
            msgspec.to_builtins(SealedLabel(**fields)), SealedLabel
        )
    report = read(store, b"name")
    assert b"name" in (*report.damaged, *report.failed)
    assert read(store, b"name").failed == (b"name",)


# -- keys -----------------------------------------------------------------------------------------


def test_a_dropped_key_is_a_miss_and_gives_the_room_back(
    place: Place, store: Store, sealer: Sealer
) -> None:
    mine = [value(b"unit-%d" % n) for n in range(4)]
    assert run(store.write, *mine, value(b"other", OTHER)) == Report()
    assert sealer.keys.drop(TAG) == 1
    for piece in mine:
        assert read(store, piece.name).failed == (piece.name,)
    assert place.counts()["read_erased"] == 4
    assert place.counts().get("quarantined", 0) == 0
    assert [entry.name for entry in store.scan()] == [b"other"]
    assert read(store, b"other") == Report()
    assert run(store.write, *map(value, (piece.name for piece in mine))) == Report()
    assert read(store, b"unit-0") == Report()
    if isinstance(place, Disk):
        whole(place.store)


def test_an_unknown_key_is_a_miss_and_the_value_stays(
    place: Place, store: Store, sealer: Sealer
) -> None:
    """As where a copy of the keys lags behind: whoever has it goes on reading."""
    assert isinstance(sealer.keys, FileKeys)
    assert run(store.write, value(b"name")) == Report()
    folder = sealer.keys.directory / "tenants" / TAG
    aside = folder.with_name("elsewhere")
    folder.rename(aside)
    assert read(store, b"name").failed == (b"name",)
    assert read(store, b"name").failed == (b"name",)
    assert place.counts()["read_locked"] == 2
    aside.rename(folder)
    assert read(store, b"name") == Report()


def test_values_of_older_keys_are_read_and_new_ones_use_the_newest(
    place: Place, store: Store, sealer: Sealer
) -> None:
    assert isinstance(sealer.keys, FileKeys)
    assert run(store.write, value(b"old")) == Report()
    sealer.keys.rotate(TAG)
    assert run(store.write, value(b"new")) == Report()
    assert label_of(place, b"old").key != label_of(place, b"new").key
    assert read(store, b"old") == read(store, b"new") == Report()


def test_where_no_key_can_be_had_nothing_is_written(
    place: Place, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(path: Path, data: bytes) -> None:
        raise OSError(30, "read-only")

    monkeypatch.setattr(keystore, "_write", none)
    report = run(store.write, value(b"name"))
    assert (report.failed, report.silent) == ((b"name",), False)
    assert report.error
    counts = place.counts()
    assert counts.get("failed_no_key", 0) + counts.get("write_no_key", 0) == 1
    monkeypatch.undo()
    assert run(store.write, value(b"name")) == Report()
    assert read(store, b"name") == Report()


def test_nobodys_values_are_sealed_too(place: Place, store: Store) -> None:
    assert run(store.write, value(b"name", "")) == Report()
    assert label_of(place, b"name").tenant == ""
    assert read(store, b"name") == Report()


# -- what can be seen -----------------------------------------------------------------------------


@pytest.mark.parametrize("codec", list(Codec))
def test_nothing_lies_there_in_the_clear(place: Place, sealer: Sealer, codec: Codec) -> None:
    """Nor do sums: whoever guesses a prompt could compute its state, and compare."""
    store = place.open(sealer, codec)
    name, text = b"name", b"the user's own words, again and again. "
    view = memoryview(bytearray(text * (SIZE // len(text) + 1)))[:SIZE]
    piece = Piece(name, view, tenant=TENANT)
    assert run(store.write, piece) == Report()
    again = Piece(name, memoryview(bytearray(SIZE)), piece.checksum)
    assert run(store.read, again) == Report()
    assert again.view == view
    store.close()
    found = place.everything()
    assert name in found  # it was looked for in the right place
    assert text not in found
    assert b"the user" not in found
    assert checksum_bytes(checksum_of(view)) not in found
    assert checksum_bytes(checksum_of(bytes(view))) not in found


# -- beside others --------------------------------------------------------------------------------


def test_agents_with_the_same_keys_read_what_the_others_wrote(tmp_path: Path) -> None:
    place = Valkey(tmp_path)
    one, two = (place.open(sealer_of(tmp_path / "keys")) for _ in range(2))
    for n, (writer, reader) in enumerate(((one, two), (two, one))):
        assert run(writer.write, value(b"%d" % n)) == Report()
        assert read(reader, b"%d" % n) == Report()
    for each in (one, two):
        each.close()
    place.close()


def test_beside_agents_that_do_not_seal(tmp_path: Path, sealer: Sealer) -> None:
    """They do not read what is sealed, nor remove it; theirs is not read, and goes."""
    place = Valkey(tmp_path)
    plain, ours = place.open(None), place.open(sealer)
    assert run(ours.write, value(b"ours")) == Report()
    assert run(plain.write, value(b"theirs")) == Report()
    assert read(plain, b"ours").failed == (b"ours",)
    assert plain.counts["read_locked"] == 1
    assert read(ours, b"ours") == Report()
    assert read(ours, b"theirs").failed == (b"theirs",)
    assert ours.counts["read_unsealed"] == 1
    assert read(plain, b"theirs").failed == (b"theirs",)
    assert run(ours.write, value(b"theirs")) == Report()
    assert read(ours, b"theirs") == Report()
    for each in (plain, ours):
        each.close()
    place.close()


@pytest.mark.parametrize("codec", [Codec.RAW, Codec.ZSTD])
def test_a_value_of_many_chunks_is_mended_by_whoever_writes_next(
    tmp_path: Path, sealer: Sealer, codec: Codec
) -> None:
    """An end that another writer left does not stay: it would be no end for any other head."""
    rig = ValkeyRig(tmp_path)
    settings = valkey.Settings(port=rig.port, chunk_bytes=4096, codec=codec, streams=1)
    store = valkey.ValkeyStore(settings, None, sealer)
    assert run(store.write, value(b"name")) == Report()
    assert read(store, b"name") == Report()
    rig.ask(b"DEL", b"kvatlas:v:name")
    assert run(store.write, value(b"name")) == Report()
    assert read(store, b"name") == Report()
    rig.ask(b"SET", b"kvatlas:c:\x02\0\0\0name", b"x" * 4096)
    assert read(store, b"name").damaged == (b"name",)
    assert rig.ask(b"DBSIZE") == [0]
    assert run(store.write, value(b"name")) == Report()
    assert read(store, b"name") == Report()
    store.close()
    rig.close()


def test_stores_are_opened_sealed(tmp_path: Path, sealer: Sealer) -> None:
    place = Valkey(tmp_path)
    arena = Arena.create(1 << 20, directory=None)
    made = open_object(f"valkey://127.0.0.1:{place.rig.port}", arena, print, sealer)
    assert run(made.write, value(b"name")) == Report()
    place.store = made  # type: ignore[assignment]
    assert label_of(place, b"name").tenant == TENANT
    made.close()
    arena.close()
    place.close()


# -- a disk over its restarts ---------------------------------------------------------------------


def test_after_a_restart_all_is_there_and_a_sum_is_known_once_it_was_read(
    tmp_path: Path, sealer: Sealer
) -> None:
    place = Disk(tmp_path)
    place.open(sealer)
    pieces = [value(b"unit-%d" % n) for n in range(6)]
    assert run(place.store.write, *pieces) == Report()
    place.store.close()
    store = place.open(sealer_of(tmp_path / "keys"))
    assert {entry.checksum for entry in store.scan()} == {0}
    wrong = read(store, b"unit-0", checksum=pieces[0].checksum ^ 1)
    assert wrong.damaged == (b"unit-0",)
    assert read(store, b"unit-0", checksum=pieces[0].checksum) == Report()  # it stayed
    entry = store.entry(b"unit-0")
    assert entry is not None
    assert entry.checksum == pieces[0].checksum
    for piece in pieces:
        assert read(store, piece.name, checksum=piece.checksum) == Report()
    whole(store)
    store.close()


def test_a_disk_that_was_in_the_clear_begins_anew(
    tmp_path: Path, sealer: Sealer, caplog: pytest.LogCaptureFixture
) -> None:
    place = Disk(tmp_path)
    plain = place.open(None)
    pieces = [value(b"unit-%d" % n) for n in range(6)]
    assert run(plain.write, *pieces) == Report()
    plain.delete([b"unit-5"])  # whose bytes stay in a room that is free
    plain.close()
    assert bytes(pieces[5].view[:64]) in place.everything()
    (place.directory / "catalogue.damaged").write_bytes(b"unit-0")
    with caplog.at_level(logging.WARNING):
        store = place.open(sealer)
    assert "5 units" in caplog.text
    assert store.counts.all()["found_unsealed"] == 5
    assert store.free_bytes == store.size_bytes
    found = place.everything()
    for piece in pieces:
        assert bytes(piece.view[:64]) not in found
        assert piece.name not in found
        assert read(store, piece.name).failed == (piece.name,)
    assert run(store.write, *pieces) == Report()
    store.close()
    again = place.open(sealer)  # and only once
    assert "found_unsealed" not in again.counts.all()
    assert all(read(again, piece.name) == Report() for piece in pieces)
    again.close()


def test_a_start_anew_that_was_interrupted_begins_again(tmp_path: Path, sealer: Sealer) -> None:
    place = Disk(tmp_path)
    plain = place.open(None)
    piece = value(b"name")
    assert run(plain.write, piece) == Report()
    plain.close()
    for path in place.directory.glob("catalogue.*"):
        path.unlink()  # it came so far
    assert bytes(piece.view[:64]) in place.everything()
    store = place.open(sealer)
    assert bytes(piece.view[:64]) not in place.everything()
    store.close()


@pytest.mark.parametrize("how", ["no keys", "other keys", "dropped"])
def test_a_disk_whose_keys_are_gone_is_empty(
    tmp_path: Path, sealer: Sealer, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    place = Disk(tmp_path)
    place.open(sealer)
    assert run(place.store.write, value(b"name"), value(b"other")) == Report()
    place.store.close()
    if how == "dropped":
        sealer.keys.drop(TAG)
    others = {
        "no keys": None,
        "other keys": sealer_of(tmp_path / "others"),
        "dropped": sealer_of(tmp_path / "keys"),
    }
    with caplog.at_level(logging.WARNING):
        store = place.open(others[how])
    assert "2 units were sealed with keys that are not here" in caplog.text
    assert store.counts.all()["found_locked"] == 2
    assert list(store.scan()) == []
    assert store.free_bytes == store.size_bytes
    assert run(store.write, value(b"name")) == Report()
    assert read(store, b"name") == Report()
    store.close()
    again = place.open(sealer_of(tmp_path / "keys"))
    assert again.counts.all().get("found_unsealed", 0) == (how == "no keys")
    again.close()


def test_without_keys_all_is_as_it_was(tmp_path: Path) -> None:
    place = Disk(tmp_path)
    store = place.open(None)
    assert run(store.write, value(b"name")) == Report()
    assert place.raw(b"name")[:SIZE] == bytes(content(b"name", SIZE))
    label = unpack(place.raw(b"name")[SIZE:], Label)
    assert type(label) is Label
    store.close()
    assert sorted(path.name for path in place.directory.glob("[!s]*")) == ["catalogue.db", "lock"]


CHILD = """
import sys
from pathlib import Path
from disk_kit import opened, piece_of, run
from sealing_kit import sealer_of
directory = Path(sys.argv[1])
store = opened(directory / "disk", sealer=sealer_of(directory / "keys"))
print("open", flush=True)
for n in range(10**9):
    name = b"%s-%d" % (sys.argv[2].encode(), n)
    piece = piece_of(name, lasting=n % 5 == 4)
    piece.tenant = "t%d" % (n % 3)
    if name not in run(store.write, piece).failed:
        print("put", name.decode(), flush=True)
    if n % 4 == 3:
        gone = b"%s-%d" % (sys.argv[2].encode(), n - 3)
        print("drop", gone.decode(), flush=True)
        store.delete([gone])
"""


def test_a_killed_process_loses_nothing_that_was_reported(tmp_path: Path) -> None:
    sealer_of(tmp_path / "keys")
    promised: set[bytes] = set()
    doubtful: set[bytes] = set()
    for turn in range(3):
        log = tmp_path / f"said-{turn}"
        with log.open("wb") as out:
            path = os.pathsep.join(sys.path)
            child = subprocess.Popen(
                [sys.executable, "-c", CHILD, str(tmp_path), f"run{turn}"],
                stdout=out,
                env=os.environ | {"PYTHONPATH": path},
            )
        wait_until(lambda log=log: log.read_bytes().count(b"\n") > 40)  # type: ignore[misc]
        child.send_signal(signal.SIGKILL)
        child.wait()
        for line in log.read_bytes().splitlines():
            what, _, name = line.partition(b" ")
            if what == b"put":
                promised.add(name)
            elif what == b"drop":
                doubtful.add(name)
        store = opened(tmp_path / "disk", sealer=sealer_of(tmp_path / "keys"))
        held = {entry.name for entry in store.scan()}
        assert promised - doubtful <= held
        assert all(right(store, name) for name in promised - doubtful)
        assert "quarantined" not in store.counts.all()
        store.delete([*held][: len(held) // 2])
        promised &= {entry.name for entry in store.scan()}
        store.close()
    store = opened(tmp_path / "disk", sealer=sealer_of(tmp_path / "keys"))
    assert run(store.write, piece_of(b"last")) == Report()
    whole(store)
    store.close()
