"""What stands before every value that is kept or sent beyond this node: its label, made up to a
fixed length, so that the place of the value's bytes is known before the label is read.

With it a value tells by itself whether it is whole, and whether it lies under the right name,
whatever a store did to it.
"""

from __future__ import annotations

from kvatlas.dataplane import records
from kvatlas.dataplane.records import Label
from kvatlas.dataplane.tiers.base import NAME_BYTES_MAX, Entry, Piece, checksum_of
from kvatlas.errors import StoreError

HEADER_BYTES = 512
LABEL_BYTES_MAX = 400  # name, tenant and fingerprint together


def fit(piece: Piece) -> bool:
    """Whether a store beyond the node takes it: bytes in a row, at least one, and a label that
    has room."""
    view = piece.view
    row = view.ndim == 1 and view.itemsize == 1 and view.c_contiguous and view.nbytes > 0
    label_bytes = len(piece.name) + len(piece.tenant.encode()) + len(piece.fingerprint)
    return row and 0 < len(piece.name) <= NAME_BYTES_MAX and label_bytes <= LABEL_BYTES_MAX


def pack(piece: Piece) -> bytes:
    """What goes before a piece; its checksum is computed where it has none."""
    checksum = piece.checksum or checksum_of(piece.view)
    found = Entry(
        piece.name, piece.view.nbytes, checksum, piece.index, piece.tenant, piece.fingerprint
    )
    return records.pack(labelled(found)).ljust(HEADER_BYTES, b"\0")


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


def right(label: Label | None, piece: Piece) -> bool:
    """Whether this label is of what the piece asks for."""
    return (
        label is not None
        and label.name == piece.name
        and label.size_bytes == label.stored_bytes == piece.view.nbytes
        and piece.checksum in (0, records.checksum_int(label.checksum))
        and piece.fingerprint in (b"", label.fingerprint)
    )


def verify(label: Label | None, piece: Piece) -> bool:
    """Whether the piece's bytes are what label and piece promise; puts the checksum there."""
    if label is None or not right(label, piece):
        return False
    found = checksum_of(piece.view)
    if found != records.checksum_int(label.checksum):
        return False
    piece.checksum = found
    return True
