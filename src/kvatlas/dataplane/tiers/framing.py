"""What stands before every value that is kept or sent beyond this node: its label, made up to a
fixed length, so that the place of the value's bytes is known before the label is read.

With it a value tells by itself whether it is whole, and whether it lies under the right name,
whatever a store did to it.
"""

from __future__ import annotations

import enum

from kvatlas.dataplane import records
from kvatlas.dataplane.codec import Codec, decode, encode
from kvatlas.dataplane.records import Label
from kvatlas.dataplane.tiers.base import Entry, Piece, checksum_of, well_formed
from kvatlas.errors import StoreError

HEADER_BYTES = 512
LABEL_BYTES_MAX = 400  # name, tenant and fingerprint together


def fit(piece: Piece, *, into: bool = False) -> bool:
    """Whether a store beyond the node takes it: well formed, and its label has room."""
    label_bytes = len(piece.name) + len(piece.tenant.encode()) + len(piece.fingerprint)
    return well_formed(piece, into=into) and label_bytes <= LABEL_BYTES_MAX


def pack(piece: Piece) -> bytes | None:
    """What goes before a piece; None where its bytes are not those of its checksum."""
    made = coded(piece, Codec.RAW)
    return None if made is None else made[0]


def coded(piece: Piece, codec: Codec) -> tuple[bytes, memoryview] | None:
    """The same with the bytes to store after it, in a code where that makes them fewer."""
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
    return records.pack(label).ljust(HEADER_BYTES, b"\0")


class Verdict(enum.Enum):
    """What a value turned out to be."""

    RIGHT = enum.auto()
    OTHER = enum.auto()  # whole, as far as one can see, and not what was asked for
    BROKEN = enum.auto()  # not even what it says of itself: it should go


def judge(
    label: Label | None,
    piece: Piece,
    stored_bytes: int,
    checksum: int | None = None,
    stored: memoryview | None = None,
) -> Verdict:
    """``stored_bytes`` lie after the label; where they are as many as the piece has, they are in
    its view, and ``checksum`` is what they were summed to, if they were; ``stored``: where they
    are, for those in a code. Where they are right the piece gets it, and what else the label
    says."""
    if label is None or label.name != piece.name or label.stored_bytes != stored_bytes:
        return Verdict.BROKEN
    if label.size_bytes != piece.view.nbytes:
        return Verdict.OTHER
    try:
        if label.codec:
            checksum = None
            decode(label.codec, memoryview(b"") if stored is None else stored, piece.view)
        elif stored_bytes != piece.view.nbytes:
            return Verdict.BROKEN
    except StoreError:
        return Verdict.BROKEN
    found = checksum_of(piece.view) if checksum is None else checksum or 1
    if found != records.checksum_int(label.checksum):
        return Verdict.BROKEN
    if piece.checksum not in (0, found) or piece.fingerprint not in (b"", label.fingerprint):
        return Verdict.OTHER
    piece.checksum = found
    piece.index, piece.tenant, piece.fingerprint = label.index, label.tenant, label.fingerprint
    return Verdict.RIGHT
