"""What the disk store holds of a unit, and which rows of a catalogue mean one."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

import msgspec

from kvatlas.dataplane.extents import whole
from kvatlas.dataplane.keystore import KeyMissing
from kvatlas.dataplane.records import Label, SealedLabel, checksum_int, unpack
from kvatlas.dataplane.sealing import Sealer
from kvatlas.dataplane.tiers import framing, work
from kvatlas.dataplane.tiers.base import Counts, Entry, Piece
from kvatlas.dataplane.tiers.disk_catalogue import Catalogue, Row
from kvatlas.dataplane.tiers.disk_files import Files
from kvatlas.errors import ConfigError, StoreError
from kvatlas.lasting import sync_folder

log = logging.getLogger(__name__)

_MARK = "sealed"  # a file that is there while nothing in the directory lies in the clear


class Held(msgspec.Struct, eq=False, gc=False):
    """A unit that can be found. ``checksum``: b"" while it is not known, of a sealed one that was
    found at the start. ``gone``: not any more; its room is free with its last reader, and its
    bytes are written over then, where they are to be wiped."""

    label: Label
    place: int
    room: int
    checksum: bytes
    readers: int = 0
    gone: bool = False
    broken: bool = False
    wipe: bool = False

    def entry(self) -> Entry:
        """As `Store.scan` tells of it."""
        told = framing.entry(self.label)
        return msgspec.structs.replace(told, checksum=checksum_int(self.checksum))


def room_of(stored_bytes: int, label_bytes: int) -> int:
    """What a unit takes of a segment."""
    return whole(stored_bytes + label_bytes)


def unfit(piece: Piece, held: Held) -> work.Why | None:
    """Why it is not what a read asks for, as far as is known."""
    label = held.label
    return work.unfit(piece, label.size_bytes, checksum_int(held.checksum), label.fingerprint)


def held_of(
    row: Row, shared: dict[object, object], sealer: Sealer | None, counts: Counts
) -> Held | None:
    """None: not what was written, or not to be read here, which is counted. ``shared``: values
    that many labels have."""
    try:
        label = unpack(row.label, Label)
    except StoreError:
        return None
    right = label.name == row.name and label.size_bytes > 0 and label.stored_bytes > 0
    right = right and row.room == room_of(label.stored_bytes, len(row.label))
    if not right or row.place < 0 or not _readable(label, sealer, counts):
        return None
    names = ["tenant", "fingerprint", "size_bytes", "stored_bytes"]
    if isinstance(label, SealedLabel):
        names.append("key")
    same = {name: shared.setdefault(getattr(label, name), getattr(label, name)) for name in names}
    label = msgspec.structs.replace(label, **same)
    return Held(label, row.place, row.room, label.checksum)


def _readable(label: Label, sealer: Sealer | None, counts: Counts) -> bool:
    if not isinstance(label, SealedLabel):
        if sealer is not None:
            counts.add("found_unsealed")
        return sealer is None
    if sealer is not None:
        with contextlib.suppress(KeyMissing):
            sealer.key_of(label)
            return True
    counts.add("found_locked")
    return False


def start_sealed(files: Files, segment_bytes: int, counts: Counts, *, sealed: bool) -> None:
    """A directory that is used sealed for the first time begins anew: nothing stays of what was
    written in the clear, in rooms in use or free. Counts the units that this costs. Raises
    ConfigError."""
    mark = files.directory / _MARK
    try:
        if not sealed:
            mark.unlink(missing_ok=True)
        elif not mark.exists():
            lost = _units(files.directory, segment_bytes)
            for path in files.directory.glob("catalogue.*"):
                path.unlink()
            for number in files.there():
                files.remove(number)
            mark.touch(0o600)
            if lost:
                counts.add("found_unsealed", lost)
                log.warning(
                    "%s: %d units lay there in the clear and were removed with their files: from"
                    " now on all is sealed",
                    files.directory,
                    lost,
                )
        sync_folder(files.directory)
    except OSError as error:
        raise ConfigError(f"disk: {files.directory} cannot be begun anew: {error}") from error


def _units(directory: Path, segment_bytes: int) -> int:
    if not (directory / "catalogue.db").exists():
        return 0
    catalogue = Catalogue(directory, segment_bytes)
    try:
        return len(catalogue.found) + catalogue.unusable
    finally:
        catalogue.close()
