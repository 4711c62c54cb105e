"""What is kept with a unit, so that bytes can be trusted by themselves: labels and resume records.

A *label* stands beside the stored bytes and says what they are. A *resume record* says that a
position is whole; it is written last. Both carry their own checksum: torn, truncated, flipped and
foreign bytes are always noticed, a stale unit by its name and its generation.

Form: magic "KVA" and one byte for the kind · version · length of the body, both little-endian
16 bits · body (msgpack) · XXH3 of all that, 64 bits.
"""

from __future__ import annotations

import struct
from typing import TypeVar

import msgspec
import xxhash

from kvatlas.core.units import Part
from kvatlas.errors import StoreError

VERSION = 1
LABEL_BYTES_MAX = 1024
RECORD_BYTES = 1024  # of every resume record, filled up: who looks for one knows its size
_HEAD = struct.Struct("<4sHH")
_TAIL = struct.Struct("<Q")
SUM_BYTES = 16
_SEALED = b"KVAs"


class Label(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """What some stored bytes are.

    ``checksum``: `checksum_of` the unit's own ``size_bytes``, before any codec; ``stored_bytes``
    is what lies there. ``generation`` differs whenever the same place is written again.
    """

    name: bytes
    size_bytes: int
    checksum: bytes
    generation: int = 0
    stored_bytes: int = 0
    codec: str = ""
    index: int = 0
    tenant: str = ""
    fingerprint: bytes = b""


class SealedLabel(Label, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """The label of bytes that are sealed (`sealing`). Of their ``checksum`` nothing is said in the
    clear: it lies in ``closed``, sealed with them, before their tag. ``key`` names one of the
    tenant's."""

    key: bytes = b""
    nonce: bytes = b""
    closed: bytes = b""


class Component(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A unit that a position needs, beside the bodies before it."""

    part: Part
    name: bytes
    size_bytes: int
    checksum: bytes


class ResumeRecord(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A prompt can be resumed at the end of the grid block ``index`` with ``key``.

    ``components`` are the body and the point that end there; those before it follow from the keys,
    which are chained.
    """

    key: bytes
    index: int
    components: tuple[Component, ...]
    generation: int = 0
    tenant: str = ""
    fingerprint: bytes = b""


_T = TypeVar("_T", Label, ResumeRecord)


def record_name(key: bytes) -> bytes:
    """Under what the resume record of a position is stored, beside `core.units.name_of`."""
    return key + b"\2"


def checksum_bytes(checksum: int) -> bytes:
    """A checksum as labels have it; b"" for 0, unknown."""
    return checksum.to_bytes(SUM_BYTES, "big") if checksum else b""


def checksum_int(checksum: bytes) -> int:
    """The same as a number."""
    return int.from_bytes(checksum, "big")


def pack(value: Label | ResumeRecord) -> bytes:
    """Raises StoreError when it does not fit in `LABEL_BYTES_MAX` or `RECORD_BYTES`."""
    magic, limit = _kind(type(value))
    body = msgspec.msgpack.encode(value)
    if _HEAD.size + len(body) + _TAIL.size > limit:
        raise StoreError(f"{type(value).__name__} of {len(body)} bytes: at most {limit} fit")
    made = _HEAD.pack(magic, VERSION, len(body)) + body
    return made + _TAIL.pack(xxhash.xxh3_64_intdigest(made))


def unpack(data: memoryview | bytes, kind: type[_T]) -> _T:
    """What begins at the start of ``data``; more may follow it. Who asks for a label may get a
    sealed one.

    Raises StoreError for anything that `pack` did not write whole, and for other versions.
    """
    if len(data) < _HEAD.size + _TAIL.size:
        raise StoreError(f"{len(data)} bytes are too few for a {kind.__name__}")
    found, version, length = _HEAD.unpack_from(data)
    if kind is Label and found == _SEALED:
        kind = SealedLabel  # type: ignore[assignment]  # which is a label
    magic, limit = _kind(kind)
    if found != magic:
        raise StoreError(f"these bytes are no {kind.__name__} of ours")
    if version != VERSION:
        raise StoreError(f"a {kind.__name__} of version {version}: this is version {VERSION}")
    end = _HEAD.size + length
    if end + _TAIL.size > min(len(data), limit):
        raise StoreError(f"a {kind.__name__} is cut short")
    if _TAIL.unpack_from(data, end)[0] != xxhash.xxh3_64_intdigest(data[:end]):
        raise StoreError(f"a {kind.__name__} is damaged")
    try:
        return msgspec.msgpack.decode(data[_HEAD.size : end], type=kind)
    except msgspec.MsgspecError as error:
        raise StoreError(f"a {kind.__name__} has another form: {error}") from error


def _kind(kind: type[Label] | type[ResumeRecord]) -> tuple[bytes, int]:
    if kind is Label:
        return b"KVAl", LABEL_BYTES_MAX
    if kind is SealedLabel:
        return _SEALED, LABEL_BYTES_MAX
    return b"KVAr", RECORD_BYTES
