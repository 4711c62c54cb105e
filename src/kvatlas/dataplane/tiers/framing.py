"""What stands before every value that is kept or sent beyond this node: 48 bytes, little-endian.

magic 4 · version 2 · flags 2 · size of the value 8 · checksum of the value 16 · digest of the
name 8 · digest of these 40 bytes 8. With it a value tells by itself whether it is whole, and
whether it lies under the right name, whatever a store did to it.
"""

from __future__ import annotations

import struct

import msgspec
import xxhash

from kvatlas.dataplane.tiers.base import Piece, checksum_of

HEADER_BYTES = 48
MAGIC = b"KVA1"
VERSION = 1
_FORM = struct.Struct("<4sHHQ16s8s")


class Header(msgspec.Struct, frozen=True):
    """What one says. ``name_digest`` is that of the name under which it was written."""

    size_bytes: int
    checksum: int
    name_digest: bytes


def name_digest(name: bytes) -> bytes:
    """Eight bytes that tell names apart."""
    return xxhash.xxh3_64_digest(name)


def pack(piece: Piece) -> bytes:
    """The header of a piece that is to be written; its checksum is computed where it has none."""
    checksum = piece.checksum or checksum_of(piece.view)
    body = _FORM.pack(
        MAGIC,
        VERSION,
        0,
        piece.view.nbytes,
        checksum.to_bytes(16, "little"),
        name_digest(piece.name),
    )
    return body + xxhash.xxh3_64_digest(body)


def unpack(data: memoryview | bytes | bytearray) -> Header | None:
    """None where these are not the bytes that `pack` made."""
    view = memoryview(data)
    if len(view) != HEADER_BYTES or xxhash.xxh3_64_digest(view[:40]) != view[40:]:
        return None
    magic, version, _, size_bytes, checksum, digest = _FORM.unpack(view[:40])
    if magic != MAGIC or version != VERSION:
        return None
    return Header(size_bytes, int.from_bytes(checksum, "little"), digest)


def right(header: Header | None, piece: Piece) -> bool:
    """Whether this header belongs to what the piece asks for, size and checksum included."""
    return (
        header is not None
        and header.size_bytes == piece.view.nbytes
        and header.name_digest == name_digest(piece.name)
        and piece.checksum in (0, header.checksum)
    )


def verify(header: Header | None, piece: Piece) -> bool:
    """Whether the piece's bytes are what header and piece promise; puts the checksum there."""
    if not right(header, piece) or header is None or checksum_of(piece.view) != header.checksum:
        return False
    piece.checksum = header.checksum
    return True
