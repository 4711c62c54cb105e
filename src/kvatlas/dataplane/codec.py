"""How a unit's bytes are written: as they are, zstd, or byte planes and then zstd. All bit-exact.

Planes: in a row of 2-byte floats the high bytes (sign, exponent) are much alike and the low ones
are noise; apart they shrink better (ZipNN, arXiv 2411.05239, does the same to weights). Each plane
begins a zstd block: at its lowest level zstd gives one table of symbol lengths to a block of up to
128 KiB, and where both planes share one the low bytes spoil the high ones'. What would not become
smaller is written raw, so that no unit takes more room than its bytes.
"""

from __future__ import annotations

import enum

import zstandard

from kvatlas.errors import StoreError

_LEVEL = 1


class Codec(enum.StrEnum):
    """As labels name it."""

    RAW = ""
    ZSTD = "zstd"
    PLANES = "planes"


def encode(codec: Codec, view: memoryview) -> tuple[Codec, memoryview]:
    """The bytes to store, and how they are really coded; raw ones are ``view`` itself."""
    if codec is Codec.RAW:
        return codec, view
    packer = zstandard.ZstdCompressor(level=_LEVEL)
    if codec is Codec.PLANES:
        plain, into = bytearray(view), packer.compressobj(size=len(view))
        made = into.compress(plain[0::2]) + into.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
        made += into.compress(plain[1::2]) + into.flush()
    else:
        made = packer.compress(view)
    return (codec, memoryview(made)) if len(made) < len(view) else (Codec.RAW, view)


def decode(codec: str, stored: memoryview, target: memoryview) -> None:
    """Fill ``target``, as long as the unit. No more than that is ever unpacked.

    Raises StoreError when ``stored`` is not exactly that unit in this code, or the code unknown.
    """
    if codec == Codec.RAW:
        if len(stored) != len(target):
            raise StoreError(f"{len(stored)} bytes are stored of {len(target)}")
        target[:] = stored
    elif codec == Codec.ZSTD:
        _unpack(stored, target)
    elif codec == Codec.PLANES:
        planes = bytearray(len(target))
        _unpack(stored, memoryview(planes))
        joined = bytearray(len(target))
        half = (len(target) + 1) // 2
        joined[0::2], joined[1::2] = planes[:half], planes[half:]
        target[:] = joined
    else:
        raise StoreError(f"codec {codec!r} is unknown here: written by a later version?")


def _unpack(stored: memoryview, target: memoryview) -> None:
    try:
        with zstandard.ZstdDecompressor().stream_reader(stored) as reader:
            at = 0
            while at < len(target):
                if not (count := reader.readinto(target[at:])):
                    raise StoreError(f"only {at} of {len(target)} bytes came out")
                at += count
            if reader.read(1):
                raise StoreError(f"more than {len(target)} bytes came out")
    except zstandard.ZstdError as error:
        raise StoreError(f"not what zstd wrote: {error}") from error
