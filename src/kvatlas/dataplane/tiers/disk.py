"""Units on a local disk: O_DIRECT, several in flight, nothing believed that was not verified.

A unit lies in one extent of a preallocated segment file: its whole pages straight from the arena,
then its last bytes and its label (`records.Label`) in a page or two of their own. The catalogue
says where. A read believes neither: label and checksum must both be right. What was never synced
can be lost or torn by a loss of power, and is then noticed; only a ``lasting`` piece waits for the
medium (fdatasync of what was written, then a synced commit).
"""

from __future__ import annotations

import errno
import logging
import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from kvatlas.core.records import Tier
from kvatlas.dataplane.codec import Codec, decode, encode
from kvatlas.dataplane.extents import GRAIN_BYTES, whole
from kvatlas.dataplane.keystore import KeyDropped, KeyMissing
from kvatlas.dataplane.records import (
    LABEL_BYTES_MAX,
    Label,
    SealedLabel,
    checksum_bytes,
    checksum_int,
    pack,
    unpack,
)
from kvatlas.dataplane.sealing import Sealer
from kvatlas.dataplane.tiers.base import Counts, Entry, Finish, Piece, checksum_of, let_go
from kvatlas.dataplane.tiers.disk_catalogue import Catalogue, Row
from kvatlas.dataplane.tiers.disk_commits import Commits
from kvatlas.dataplane.tiers.disk_files import Files
from kvatlas.dataplane.tiers.disk_room import Room
from kvatlas.dataplane.tiers.disk_units import Held, held_of, room_of, start_sealed, unfit
from kvatlas.dataplane.tiers.work import Batch, Why, Workers, check
from kvatlas.errors import ConfigError, StoreError

log = logging.getLogger(__name__)

_MASK = GRAIN_BYTES - 1
_FOOT_BYTES = whole(GRAIN_BYTES - 1 + LABEL_BYTES_MAX)  # a unit's last bytes and its label


class _Flight:
    """A write or a read under way, and those that want the same meanwhile."""

    def __init__(self, piece: Piece) -> None:
        self.piece = piece
        self.followers: list[tuple[Batch, Piece]] = []


class DiskStore:
    """The `disk` tier of one node."""

    tier = Tier.DISK

    def __init__(
        self,
        directory: Path,
        capacity_bytes: int,
        *,
        segment_bytes: int = 1 << 30,
        threads: int = 8,
        queue_max: int = 4096,
        deadline_s: float = 30.0,
        codec: Codec = Codec.RAW,
        files: Callable[[Path], Files] = Files,
        sealer: Sealer | None = None,
    ) -> None:
        """Opens what is in ``directory``, or makes it. Raises ConfigError when that cannot be.

        ``capacity_bytes`` counts in whole segments, which are no larger than it. With a ``sealer``
        all is sealed, and what was not is removed with the files that it lay in.
        """
        if not isinstance(capacity_bytes, int) or capacity_bytes < GRAIN_BYTES:
            raise ConfigError(f"disk: capacity of {capacity_bytes!r} bytes: at least {GRAIN_BYTES}")
        if segment_bytes < GRAIN_BYTES or threads < 1 or queue_max < 1 or not 0 < deadline_s < 1e6:
            raise ConfigError("disk: segment, threads, queue and deadline must be above zero")
        self.counts = Counts()
        self.wipes: Callable[[str], bool] = lambda _: False  # of an owner whose bytes must not stay
        self._codec = codec
        self._sealer = sealer
        segment = min(segment_bytes, capacity_bytes) // GRAIN_BYTES * GRAIN_BYTES
        self._room = Room(segment)
        self._held: dict[bytes, Held] = {}
        with ExitStack() as undo:
            self._files = files(directory)
            undo.callback(self._files.close)
            start_sealed(self._files, segment, self.counts, sealed=sealer is not None)
            catalogue = Catalogue(directory, segment)
            undo.callback(catalogue.close)
            self._commits = Commits(catalogue, self._files, self.counts)
            self._counter = catalogue.epoch << 32
            self._load(catalogue, capacity_bytes // segment)
            undo.pop_all()
        self.transport = "O_DIRECT" if self._files.direct else "buffered"
        self._lock = threading.Lock()
        self._writing: dict[bytes, _Flight] = {}
        self._reading: dict[bytes, _Flight] = {}
        self._local = threading.local()
        self._workers = Workers(
            "disk", self.counts, threads=threads, queue_max=queue_max, deadline_s=deadline_s
        )

    # -- the interface --------------------------------------------------------------------------

    def write(self, pieces: Sequence[Piece], done: Finish) -> None:
        """As `Store.write`. Other bytes under a name that is held are reported as damaged."""
        self._workers.run("write", pieces, self._write, done)

    def read(self, pieces: Sequence[Piece], done: Finish) -> None:
        """As `Store.read`. Several reads of one unit at once are one read of the disk."""
        self._workers.run("read", pieces, self._read, done)

    def delete(self, names: Sequence[bytes]) -> None:
        """As `Store.delete`; afterwards a restart does not find them either."""
        gone: list[Held] = []
        with self._lock:
            for name in dict.fromkeys(names):
                if (held := self._held.pop(name, None)) is not None:
                    held.wipe = self.wipes(held.label.tenant)
                    gone.append(held)
        if gone:
            self._commits.drop([held.label.name for held in gone])
            for held in gone:
                self._leave(held)
            if any(held.wipe for held in gone):
                self._commits.settle()

    def scan(self) -> Iterator[Entry]:
        """As `Store.scan`, out of memory."""
        with self._lock:
            there = list(self._held.values())
        for held in there:
            yield held.entry()

    def entry(self, name: bytes) -> Entry | None:
        """What is said of one name."""
        held = self._held.get(name)
        return None if held is None else held.entry()

    def has(self, names: Sequence[bytes]) -> int:
        """How many of them are held, up to the first that is not."""
        held = self._held
        for count, name in enumerate(names):
            if name not in held:
                return count
        return len(names)

    def close(self) -> None:
        """As `Store.close`. A thread that hangs in the kernel keeps its files until it returns."""
        if self._workers.close():
            self._commits.close()
            self._files.close()
        else:
            self.counts.add("hanging")

    # -- size -----------------------------------------------------------------------------------

    @property
    def sealed(self) -> bool:
        """Whether nothing on it lies in the clear."""
        return self._sealer is not None

    @property
    def size_bytes(self) -> int:
        """Of the segments that are written to."""
        return self._room.size_bytes

    @property
    def free_bytes(self) -> int:
        """In them; what was set aside is not free."""
        with self._lock:
            return self._room.free_bytes

    @property
    def quarantined_bytes(self) -> int:
        """In them, of places that the medium could not read or write."""
        with self._lock:
            return self._room.broken_bytes

    def resize(self, capacity_bytes: int) -> list[bytes]:
        """More segments or fewer; 0 drains the store. Says which units are in the way: they can
        be read until they are deleted, and a segment's file goes with the last of them.

        Raises ConfigError when there is no room for more.
        """
        if not isinstance(capacity_bytes, int):
            raise ConfigError(f"disk: capacity of {capacity_bytes!r} bytes: a whole number")
        segment = self._room.segment_bytes
        with self._lock:
            wanted = max(0, capacity_bytes) // segment
            there = self._room.numbers
            for number in range(wanted):
                if number not in there:
                    self._files.open(number, segment)
                self._room.add(number)
            for number in there:
                if number >= wanted:
                    self._room.close(number)
            self._drop_emptied()
            return [name for name, held in self._held.items() if held.place // segment >= wanted]

    def _drop_emptied(self) -> None:
        for number in self._room.emptied():
            self._commits.forget(number)
            self._files.remove(number)

    # -- the start ------------------------------------------------------------------------------

    def _load(self, catalogue: Catalogue, segments: int) -> None:
        """What the catalogue knows, as far as it can be; the rest is forgotten and counted."""
        size = self._room.segment_bytes
        if catalogue.lost:
            self.counts.add("catalogue_lost")
        self._files.look_for_room(segments, size)
        there = {n: self._files.open(n, size) for n in range(segments)}
        used: dict[int, list[tuple[int, int]]] = {n: [] for n in there}
        wrong: list[bytes] = []
        end = 0
        shared: dict[object, object] = {}
        while catalogue.found:  # from the first place on; nothing is kept twice on the way
            row = catalogue.found.pop()
            held = held_of(row, shared, self._sealer, self.counts)
            number, offset = divmod(row.place, size)
            fits = number in there and offset + row.room <= there[number]
            if held is None or not fits or row.place < end:
                wrong.append(row.name)
                continue
            end = row.place + row.room
            used[number].append((offset, row.room))
            self._held[held.label.name] = held
        if wrong or catalogue.unusable:
            self.counts.add("found_unusable", len(wrong) + catalogue.unusable)
            self._commits.drop(wrong)
        if locked := self.counts.all().get("found_locked"):
            log.warning(
                "%s: %d units were sealed with keys that are not here, and were removed",
                self._files.directory,
                locked,
            )
        for number, rooms in used.items():
            self._room.add(number, rooms)
        for number in self._files.there():
            if number >= segments:
                self._files.remove(number)

    # -- writes ---------------------------------------------------------------------------------

    def _write(self, batch: Batch, piece: Piece) -> bool:
        check(piece)
        # One that is given is believed: were it wrong, the first read would notice.
        checksum = piece.checksum = piece.checksum or checksum_of(piece.view)
        with self._lock:
            held, other = self._held.get(piece.name), self._writing.get(piece.name)
            if held is None and other is None:
                self._writing[piece.name] = flight = _Flight(piece)
            elif held is None and other is not None and other.piece.checksum == checksum:
                other.followers.append((batch, piece))
                return False  # its view is read no more
        if held is not None or other is not None:
            same = held is not None and held.checksum in (b"", checksum_bytes(checksum))
            batch.settle(piece, None if same else Why.CONFLICT)
            return False
        why: Why | None = Why.IO
        try:
            why = self._store(piece)
        except KeyMissing:
            why = Why.NO_KEY
        except StoreError:
            why = Why.INVALID  # a label that does not fit
        finally:
            with self._lock:
                del self._writing[piece.name]
            waiting = [batch.settle(piece, why)]
            waiting += [other.settle(each, why) for other, each in flight.followers]
        if why is None and not any(waiting):
            self.delete([piece.name])  # it came too late for everybody, who took it as failed
        return False

    def _store(self, piece: Piece) -> Why | None:
        codec, stored = encode(self._codec, piece.view)
        with self._lock:
            self._counter += 1
            generation = self._counter
        label = Label(
            piece.name,
            len(piece.view),
            checksum_bytes(piece.checksum),
            generation,
            len(stored),
            codec,
            piece.index,
            piece.tenant,
            piece.fingerprint,
        )
        if self._sealer is not None:
            into = self._sealer.room(len(stored))
            label, stored = self._sealer.seal(label, stored, into), into
        packed = pack(label)
        room = room_of(len(stored), len(packed))
        with self._lock:
            place = self._room.take(room)
        if place is None:
            return Why.FULL
        held = Held(label, place, room, checksum_bytes(piece.checksum))
        try:
            self._put(held, stored, packed)
        except OSError as error:
            self._leave(held, broken=error.errno == errno.EIO)
            return Why.FULL if error.errno == errno.ENOSPC else Why.IO
        row = Row(piece.name, place, room, packed)
        if not self._commits.put(row, lasting=piece.lasting, then=lambda: self._found(held)):
            self._leave(held)
            return Why.IO
        return None

    def _put(self, held: Held, stored: memoryview, packed: bytes) -> None:
        """Raises OSError."""
        head = len(stored) & ~_MASK
        rest = len(stored) - head
        foot = self._buffer("foot", _FOOT_BYTES)[: held.room - head]
        foot[:rest] = stored[head:]
        foot[rest : rest + len(packed)] = packed
        foot[rest + len(packed) :] = bytes(len(foot) - rest - len(packed))
        number, offset = divmod(held.place, self._room.segment_bytes)
        views = [stored[:head], foot] if head else [foot]
        try:
            count = self._files.write(number, views, offset)
        except OSError as error:
            if error.errno != errno.EINVAL or not head:
                raise
            self.counts.add("unaligned")  # bytes that O_DIRECT cannot take from where they are
            views[0] = self._buffer("head", head)
            views[0][:] = stored[:head]
            count = self._files.write(number, views, offset)
        if count != held.room:
            raise OSError(errno.ENOSPC, f"{count} of {held.room} bytes were written")
        self._commits.written(number)

    # -- reads ----------------------------------------------------------------------------------

    def _read(self, batch: Batch, piece: Piece) -> bool:
        check(piece, filled=True)
        with self._lock:
            held = self._held.get(piece.name)
            why = Why.MISSING if held is None else unfit(piece, held)
            if held is not None and why is None:
                if (leader := self._reading.get(piece.name)) is not None:
                    leader.followers.append((batch, piece))
                    return True  # its view is filled by whoever reads
                self._reading[piece.name] = flight = _Flight(piece)
                held.readers += 1
        if held is None or why is not None:
            batch.settle(piece, why)
            return False
        why, asked = Why.IO, piece.checksum
        try:
            why = self._fetch(held, piece)
        finally:
            with self._lock:
                del self._reading[piece.name]
            if why not in (None, Why.LOCKED):
                self._quarantine(held, why)
            for other, each in flight.followers:
                came = why or (Why.LATE if other.over else self._hand_on(held, batch, piece, each))
                other.settle(each, came)
                let_go(each, self.counts)
            self._let_go(held)
            batch.settle(piece, why or _other(asked, piece))
        return False

    def _hand_on(self, held: Held, batch: Batch, source: Piece, target: Piece) -> Why | None:
        target.view[:] = source.view
        asked, target.checksum = target.checksum, checksum_int(held.checksum)
        if batch.over and checksum_of(target.view) != target.checksum:
            return Why.LATE  # whose view that was took it as failed, and may have written to it
        return _other(asked, target)

    def _fetch(self, held: Held, piece: Piece) -> Why | None:
        label = held.label
        stored = piece.view
        if label.codec:
            stored = self._buffer("stored", whole(label.stored_bytes))[: label.stored_bytes]
        head = label.stored_bytes & ~_MASK
        foot = self._buffer("foot", _FOOT_BYTES)[: held.room - head]
        try:
            if self._get(held, stored[:head], foot) != held.room:
                return Why.DAMAGED  # the file is shorter than it was
        except OSError:
            return Why.IO
        rest = label.stored_bytes - head
        stored[head:] = foot[:rest]
        try:
            if unpack(foot[rest:], Label) != label:
                return Why.FOREIGN
            told = label.checksum
            if self._sealer is not None and isinstance(label, SealedLabel):
                told = self._sealer.open(label, stored, stored)
            if label.codec:
                decode(label.codec, stored, piece.view)
        except KeyDropped:
            return Why.ERASED
        except KeyMissing:
            return Why.LOCKED
        except StoreError:
            return Why.DAMAGED
        piece.checksum = checksum_of(piece.view)
        if checksum_bytes(piece.checksum) != told:
            return Why.DAMAGED
        held.checksum = told
        return None

    def _get(self, held: Held, head: memoryview, foot: memoryview) -> int:
        """Raises OSError."""
        number, offset = divmod(held.place, self._room.segment_bytes)
        views = [head, foot] if head else [foot]
        try:
            return self._files.read(number, views, offset)
        except OSError as error:
            if error.errno != errno.EINVAL or not head:
                raise
        self.counts.add("unaligned")
        views[0] = self._buffer("head", len(head))
        count = self._files.read(number, views, offset)
        head[:] = views[0]
        return count

    def _buffer(self, name: str, size_bytes: int) -> memoryview:
        """This thread's own pages for a purpose."""
        there: memoryview | None = getattr(self._local, name, None)
        if there is None or len(there) < size_bytes:
            there = memoryview(mmap.mmap(-1, whole(size_bytes)))
            setattr(self._local, name, there)
        return there[:size_bytes]

    def _found(self, held: Held) -> None:
        with self._lock:
            self._held[held.label.name] = held

    # -- ends -----------------------------------------------------------------------------------

    def _quarantine(self, held: Held, why: Why | None) -> None:
        """What failed is found by nobody; a place that the medium cannot read is not used again."""
        if why is not Why.ERASED:
            self.counts.add("quarantined")
        with self._lock:
            found = self._held.get(held.label.name) is held
            if found:
                del self._held[held.label.name]
        if found:
            self._commits.drop([held.label.name])
            self._leave(held, broken=why is Why.IO)

    def _leave(self, held: Held, *, broken: bool = False) -> None:
        with self._lock:
            held.gone, held.broken = True, broken
            last = not held.readers
        if last:
            self._free(held)

    def _let_go(self, held: Held) -> None:
        with self._lock:
            held.readers -= 1
            last = held.gone and not held.readers
        if last:
            self._free(held)

    def _free(self, held: Held) -> None:
        if held.wipe:
            self._wipe(held)
        with self._lock:
            if held.broken:
                self._room.set_aside(held.place, held.room)
            else:
                self._room.give(held.place, held.room)
            self._drop_emptied()

    def _wipe(self, held: Held) -> None:
        """Nobody finds it, and nobody else has its place yet."""
        number, offset = divmod(held.place, self._room.segment_bytes)
        nothing = memoryview(mmap.mmap(-1, held.room))
        try:
            if self._files.write(number, [nothing], offset) != held.room:
                self.counts.add("wipe_short")
        except OSError:
            self.counts.add("wipe_failed")


def _other(asked: int, piece: Piece) -> Why | None:
    """What a sealed value's checksum is may be known only now."""
    return Why.CONFLICT if asked not in (0, piece.checksum) else None
