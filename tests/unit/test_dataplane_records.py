"""Labels, resume records and codecs: what was not written exactly so is noticed."""

from __future__ import annotations

import os
import random
from typing import Any

import msgspec
import pytest
import xxhash
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from kvatlas.core.units import Part, name_of
from kvatlas.dataplane import records
from kvatlas.dataplane.codec import Codec, decode, encode
from kvatlas.dataplane.records import (
    LABEL_BYTES_MAX,
    Component,
    Label,
    ResumeRecord,
    checksum_bytes,
    checksum_int,
    pack,
    record_name,
    unpack,
)
from kvatlas.errors import StoreError

LABEL = Label(b"name", 985_664, b"c" * 16, 7, 985_664, "", 3, "tenant", b"f" * 32)
RECORD = ResumeRecord(
    b"k" * 32,
    12,
    (
        Component(Part.BODY, name_of(b"k" * 32, Part.BODY), 985_664, b"b" * 16),
        Component(Part.POINT, name_of(b"k" * 32, Part.POINT), 4_100_000, b"p" * 16),
    ),
    generation=9,
    tenant="tenant",
    fingerprint=b"f" * 32,
)
BOTH = pytest.mark.parametrize("value", [LABEL, RECORD], ids=["label", "record"])


@BOTH
def test_there_and_back_whatever_follows(value: Label | ResumeRecord) -> None:
    packed = pack(value)
    assert unpack(packed, type(value)) == value
    assert unpack(memoryview(packed + os.urandom(500)), type(value)) == value


@BOTH
def test_every_flipped_bit_is_noticed(value: Label | ResumeRecord) -> None:
    packed = pack(value)
    for bit in range(len(packed) * 8):
        wrong = bytearray(packed)
        wrong[bit // 8] ^= 1 << bit % 8
        with pytest.raises(StoreError):
            unpack(bytes(wrong), type(value))


@BOTH
def test_every_cut_and_every_torn_end_is_noticed(value: Label | ResumeRecord) -> None:
    packed = pack(value)
    for length in range(len(packed)):
        with pytest.raises(StoreError):
            unpack(packed[:length], type(value))
        with pytest.raises(StoreError):
            unpack(packed[:length] + bytes(len(packed) - length), type(value))


@settings(max_examples=100)
@given(st.binary(max_size=300), st.sampled_from([Label, ResumeRecord]))
def test_foreign_bytes_are_none_of_ours(data: bytes, kind: Any) -> None:
    with pytest.raises(StoreError):
        unpack(data, kind)


def test_one_is_not_the_other() -> None:
    with pytest.raises(StoreError, match="no ResumeRecord"):
        unpack(pack(LABEL), ResumeRecord)
    with pytest.raises(StoreError, match="no Label"):
        unpack(pack(RECORD), Label)


def test_a_later_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "VERSION", 2)
    packed = pack(LABEL)
    monkeypatch.undo()
    with pytest.raises(StoreError, match="version 2"):
        unpack(packed, Label)


def test_another_form_under_a_right_checksum_is_refused() -> None:
    body = msgspec.msgpack.encode(["name", -1])
    made = b"KVAl" + (1).to_bytes(2, "little") + len(body).to_bytes(2, "little") + body
    made += xxhash.xxh3_64_intdigest(made).to_bytes(8, "little")
    with pytest.raises(StoreError, match="another form"):
        unpack(made, Label)


def test_what_would_not_fit_is_refused_when_it_is_written() -> None:
    with pytest.raises(StoreError, match="at most"):
        pack(msgspec.structs.replace(LABEL, tenant="t" * LABEL_BYTES_MAX))
    fits = msgspec.structs.replace(LABEL, name=b"n" * 255, tenant="t" * 500)
    assert unpack(pack(fits), Label) == fits


def test_checksums_and_names() -> None:
    assert checksum_bytes(0) == b""
    assert checksum_int(checksum_bytes((1 << 128) - 1)) == (1 << 128) - 1
    assert checksum_int(b"") == 0
    key = b"k" * 32
    assert len({record_name(key), name_of(key, Part.BODY), name_of(key, Part.POINT)}) == 3


# -- codecs ---------------------------------------------------------------------------------------


def values(kind: str, size_bytes: int) -> bytes:
    draw = random.Random(size_bytes)
    if kind == "noise":
        return draw.randbytes(size_bytes)
    if kind == "zeros":
        return bytes(size_bytes)
    # bfloat16 of about one size: the high bytes are few, the low ones noise
    pairs = bytes(
        b for _ in range(size_bytes) for b in (draw.randrange(256), 60 + draw.randrange(4))
    )
    return pairs[:size_bytes]


@pytest.mark.parametrize("size_bytes", [3000, 37_376, 100_001])
def test_planes_do_not_share_a_table_and_those_that_did_are_read(size_bytes: int) -> None:
    """A zstd block has one, and up to 128 KiB: the low bytes spoil the high ones'."""
    floats = values("floats", size_bytes)
    together = zstandard.ZstdCompressor(level=1).compress(floats[0::2] + floats[1::2])
    used, stored = encode(Codec.PLANES, memoryview(floats))
    assert used is Codec.PLANES
    assert len(stored) < 0.95 * len(together)
    target = memoryview(bytearray(size_bytes))
    decode(Codec.PLANES, memoryview(together), target)  # as it was written before
    assert target == floats


@pytest.mark.parametrize("codec", list(Codec))
@pytest.mark.parametrize("kind", ["noise", "zeros", "floats"])
@pytest.mark.parametrize("size_bytes", [1, 2, 3, 4097, 100_001])
def test_every_codec_gives_the_same_bytes_back(codec: Codec, kind: str, size_bytes: int) -> None:
    data = values(kind, size_bytes)
    used, stored = encode(codec, memoryview(data))
    assert len(stored) <= len(data)
    assert used in (codec, Codec.RAW)
    target = memoryview(bytearray(size_bytes))
    decode(used, stored, target)
    assert target == data


def test_planes_do_better_on_floats_and_noise_is_kept_as_it_is() -> None:
    floats, noise = values("floats", 100_000), values("noise", 100_000)
    sizes = {codec: len(encode(codec, memoryview(floats))[1]) for codec in Codec}
    assert sizes[Codec.PLANES] < 0.75 * sizes[Codec.RAW]
    assert sizes[Codec.PLANES] < sizes[Codec.ZSTD]
    assert encode(Codec.ZSTD, memoryview(noise))[0] is Codec.RAW
    assert encode(Codec.PLANES, memoryview(noise))[0] is Codec.RAW


@pytest.mark.parametrize("codec", list(Codec))
def test_another_length_cut_or_foreign_bytes_are_noticed(codec: Codec) -> None:
    data = values("floats", 10_000)
    used, stored = encode(codec, memoryview(data))
    assert used is codec
    for size_bytes in (9_999, 10_001, 1, 20_000):
        with pytest.raises(StoreError):
            decode(codec, stored, memoryview(bytearray(size_bytes)))
    if codec is not Codec.RAW:
        for wrong in (stored[: len(stored) // 2], memoryview(b"not zstd" * 100), stored[1:]):
            with pytest.raises(StoreError):
                decode(codec, wrong, memoryview(bytearray(10_000)))


def test_a_bomb_is_not_unpacked_further_than_the_unit() -> None:
    _, stored = encode(Codec.ZSTD, memoryview(bytes(64 << 20)))
    assert len(stored) < 1 << 16
    with pytest.raises(StoreError, match="more than"):
        decode(Codec.ZSTD, stored, memoryview(bytearray(1000)))


def test_an_unknown_codec_is_refused() -> None:
    with pytest.raises(StoreError, match="unknown"):
        decode("lz77", memoryview(b"a"), memoryview(bytearray(1)))
