"""What stands before every value that is kept or sent beyond this node: its label, made up to a
fixed length, so that the place of the value's bytes is known before the label is read.

With it a value tells by itself whether it is whole, and whether it lies under the right name,
whatever a store did to it.
"""

from __future__ import annotations

import enum

from kvatlas.dataplane import records
from kvatlas.dataplane.codec import Codec, decode, encode
from kvatlas.dataplane.keystore import KeyDropped, KeyMissing
from kvatlas.dataplane.records import Label, SealedLabel
from kvatlas.dataplane.sealing import Sealer
from kvatlas.dataplane.tiers.base import Counts, Entry, Piece, checksum_of, well_formed
from kvatlas.errors import StoreError

HEADER_BYTES = 512
LABEL_BYTES_MAX = 340  # name, tenant and fingerprint together


def fit(piece: Piece, *, into: bool = False) -> bool:
    """Whether a store beyond the node takes it: well formed, and its label has room."""
    label_bytes = len(piece.name) + len(piece.tenant.encode()) + len(piece.fingerprint)
    return well_formed(piece, into=into) and label_bytes <= LABEL_BYTES_MAX


def pack(piece: Piece) -> bytes | None:
    """What goes before a piece; None where its bytes are not those of its checksum."""
    made = coded(piece, Codec.RAW)
    return None if made is None else made[0]


def coded(
    piece: Piece, codec: Codec, sealer: Sealer | None = None, room: memoryview | None = None
) -> tuple[bytes, memoryview] | None:
    """The same with the bytes to store after it, in a code where that makes them fewer, and sealed
    where there is a ``sealer``: into ``room``, or else room of the calling thread. Raises
    KeyMissing."""
    checksum = checksum_of(piece.view)
    if piece.checksum not in (0, checksum):
        return None
    piece.checksum = checksum
    used, stored = encode(codec, piece.view)
    label = Label(
        name=piece.name,
        size_bytes=piece.view.nbytes,
        checksum=records.checksum_bytes(checksum),
        stored_bytes=len(stored),
        codec=used,
        index=piece.index,
        tenant=piece.tenant,
        fingerprint=piece.fingerprint,
    )
    if sealer is not None:
        into = (sealer.room(len(stored)) if room is None else room)[: len(stored)]
        label, stored = sealer.seal(label, stored, into), into
    return _padded(label), stored


def header_of(found: Entry) -> bytes:
    """The same for bytes whose checksum is known and believed."""
    return _padded(labelled(found))


def unpack(data: memoryview | bytes | bytearray) -> Label | None:
    """None where these are not the bytes that `pack` made."""
    try:
        return records.unpack(bytes(data), Label)
    except StoreError:
        return None


def entry(label: Label) -> Entry:
    """The same for a catalogue."""
    checksum = records.checksum_int(label.checksum)
    return Entry(
        label.name, label.size_bytes, checksum, label.index, label.tenant, label.fingerprint
    )


def labelled(found: Entry) -> Label:
    """The way back."""
    return Label(
        name=found.name,
        size_bytes=found.size_bytes,
        checksum=records.checksum_bytes(found.checksum),
        stored_bytes=found.size_bytes,
        index=found.index,
        tenant=found.tenant,
        fingerprint=found.fingerprint,
    )


def _padded(label: Label) -> bytes:
    packed = records.pack(label)
    if len(packed) > HEADER_BYTES:
        raise StoreError(f"a label of {len(packed)} bytes: {HEADER_BYTES} are kept for it")
    return packed.ljust(HEADER_BYTES, b"\0")


class Verdict(enum.Enum):
    """What a value turned out to be. Those after `BROKEN` count as not there: nothing is wrong with
    them, and nobody here can or may read them."""

    RIGHT = enum.auto()
    OTHER = enum.auto()  # whole, as far as one can see, and not what was asked for
    BROKEN = enum.auto()  # not even what it says of itself: it should go
    LOCKED = enum.auto()  # sealed, with a key that is not known here
    ERASED = enum.auto()  # sealed, with a key that was dropped: it should go
    UNSEALED = enum.auto()  # in the clear, where values have to be sealed: it should go

    @property
    def missing(self) -> bool:
        """It counts as not there."""
        return self in (Verdict.LOCKED, Verdict.ERASED, Verdict.UNSEALED)

    def count(self, counts: Counts) -> None:
        """What became of it, but for what is right, and what its asker is told of."""
        if self is Verdict.BROKEN:
            counts.add("quarantined")
        elif self.missing:
            counts.add(f"read_{self.name.lower()}")

    @property
    def goes(self) -> bool:
        """It is removed by whoever read it: its room is of use to others, its name as well."""
        return self in (Verdict.BROKEN, Verdict.ERASED, Verdict.UNSEALED)


def judge(
    label: Label | None,
    piece: Piece,
    stored_bytes: int,
    checksum: int | None = None,
    stored: memoryview | None = None,
    *,
    sealer: Sealer | None = None,
) -> Verdict:
    """``stored_bytes`` lie after the label; where they are as many as the piece has, they are in
    its view, and ``checksum`` is what they were summed to, if they were; ``stored``: where they
    are, for those in a code. Where they are right the piece gets it, and what else the label
    says. With a ``sealer`` only what is sealed is read."""
    if label is None or label.name != piece.name or label.stored_bytes != stored_bytes:
        return Verdict.BROKEN
    if isinstance(label, SealedLabel) is not (sealer is not None):
        return Verdict.LOCKED if sealer is None else Verdict.UNSEALED
    if label.size_bytes != piece.view.nbytes:
        return Verdict.OTHER
    try:
        told = label.checksum
        if sealer is not None and isinstance(label, SealedLabel):
            checksum = None
            told, stored = opened(sealer, label, piece.view if stored is None else stored, piece)
        if label.codec:
            checksum = None
            decode(label.codec, memoryview(b"") if stored is None else stored, piece.view)
        elif stored_bytes != piece.view.nbytes:
            return Verdict.BROKEN
    except KeyDropped:
        return Verdict.ERASED
    except KeyMissing:
        return Verdict.LOCKED
    except StoreError:
        return Verdict.BROKEN
    found = checksum_of(piece.view) if checksum is None else checksum or 1
    if found != records.checksum_int(told):
        return Verdict.BROKEN
    if piece.checksum not in (0, found) or piece.fingerprint not in (b"", label.fingerprint):
        return Verdict.OTHER
    piece.checksum = found
    piece.index, piece.tenant, piece.fingerprint = label.index, label.tenant, label.fingerprint
    return Verdict.RIGHT


def opened(
    sealer: Sealer, label: SealedLabel, stored: memoryview, piece: Piece
) -> tuple[bytes, memoryview]:
    """The checksum of a value, and its bytes as they were before they were sealed: in the piece's
    view where they have no code, else where they were, or beside. Raises KeyMissing, StoreError."""
    if not label.codec:
        if len(stored) != piece.view.nbytes:
            raise StoreError(f"{len(stored)} bytes are stored of {piece.view.nbytes}")
        into = piece.view
    else:
        into = memoryview(bytearray(len(stored))) if stored.readonly else stored
    return sealer.open(label, stored, into), into
