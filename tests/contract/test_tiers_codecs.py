"""Codecs in the data path of real stores: bit-exact, summed as raw bytes, and smaller."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from stores_rigs import S3Rig, ValkeyRig, s3_packages
from test_tiers import blank, room, run, same

from kvatlas.dataplane.codec import Codec
from kvatlas.dataplane.tiers import s3, valkey
from kvatlas.dataplane.tiers.base import Piece, Report, Store, checksum_of
from kvatlas.dataplane.tiers.disk import DiskStore
from kvatlas.dataplane.tiers.framing import HEADER_BYTES

CODED = (Codec.ZSTD, Codec.PLANES)
CHUNK = 100_000


def state(name: bytes, size_bytes: int) -> Piece:
    """Bytes like those of state in half precision: exponents much alike."""
    draw = random.Random(name)
    numbers = [draw.gauss(0.0, 0.02) for _ in range(size_bytes // 2)]
    view = room(size_bytes)
    view[: size_bytes // 2 * 2] = struct.pack(f"<{len(numbers)}e", *numbers)
    return Piece(name, view)


class Disk:
    def __init__(self, directory: Path) -> None:
        self._directory = directory / "disk"

    def open(self, codec: Codec) -> Store:
        return DiskStore(self._directory, 16 << 20, segment_bytes=4 << 20, codec=codec)

    def flip(self, name: bytes) -> None:
        """A bit of what is stored, while nobody has it open."""
        for path in self._directory.glob("*"):
            data = bytearray(path.read_bytes())
            if path.stat().st_size == 4 << 20 and any(data):
                data[40] ^= 1
                path.write_bytes(data)

    def close(self) -> None:
        pass


class Valkey:
    def __init__(self, directory: Path) -> None:
        self._rig = ValkeyRig(directory)

    def open(self, codec: Codec) -> Store:
        settings = valkey.Settings(port=self._rig.port, codec=codec, chunk_bytes=CHUNK)
        return valkey.ValkeyStore(settings)

    def flip(self, name: bytes) -> None:
        key, at = b"kvatlas:v:" + name, str(HEADER_BYTES + 40).encode()
        (byte,) = self._rig.ask(b"GETRANGE", key, at, at)
        assert isinstance(byte, bytes)
        self._rig.ask(b"SETRANGE", key, at, bytes([byte[0] ^ 1]))

    def size(self, name: bytes) -> int:
        found = 0
        for key in self._rig.ask(b"KEYS", b"*"):
            if isinstance(key, bytes) and key.endswith(name):
                (length,) = self._rig.ask(b"STRLEN", key)
                assert isinstance(length, int)
                found += length
        return found

    def close(self) -> None:
        self._rig.close()


class S3:
    def __init__(self, directory: Path) -> None:
        if not s3_packages():
            pytest.skip("obstore or moto is not installed: make engines")
        self._rig = S3Rig(directory)

    def open(self, codec: Codec) -> Store:
        port = self._rig.port
        made = self._rig.store(port)
        assert isinstance(made, s3.S3Store)
        made.close()
        return s3.S3Store(msgspec.structs.replace(made.settings, codec=codec))

    def flip(self, name: bytes) -> None:
        client, key = self._rig.client(), "kvatlas/" + name.hex()
        body = bytearray(client.get_object(Bucket=self._rig.bucket, Key=key)["Body"].read())
        body[HEADER_BYTES + 40] ^= 1
        client.put_object(Bucket=self._rig.bucket, Key=key, Body=bytes(body))

    def close(self) -> None:
        self._rig.close()


@pytest.fixture(params=[Disk, Valkey, pytest.param(S3, marks=pytest.mark.engine)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk | Valkey | S3]:
    made = request.param(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("codec", CODED)
@pytest.mark.parametrize("size_bytes", [2, 4095, 37_376, 300_001])
def test_what_comes_back_is_bit_for_bit_what_was_written(
    place: Disk | Valkey | S3, codec: Codec, size_bytes: int
) -> None:
    piece = state(b"name", size_bytes)
    store = place.open(codec)
    assert run(store.write, piece) == Report()
    assert piece.checksum == checksum_of(piece.view)  # of the raw bytes, whatever is stored
    store.close()
    for other in Codec:  # how others write says nothing of what they can read
        reader = place.open(other)
        read = blank(piece, checksum=piece.checksum)
        assert run(reader.read, read) == Report()
        assert same(piece, read)
        wrong = Piece(b"name", room(size_bytes + 1))
        assert run(reader.read, wrong).damaged == (b"name",)
        reader.close()
    if isinstance(place, Valkey) and size_bytes > 4096:
        assert place.size(b"name") < size_bytes * 0.95


@pytest.mark.parametrize("codec", CODED)
def test_a_flipped_bit_of_what_is_stored_is_damage(place: Disk | Valkey | S3, codec: Codec) -> None:
    piece = state(b"name", 37_376)
    store = place.open(codec)
    assert run(store.write, piece) == Report()
    store.close()
    place.flip(b"name")
    store = place.open(codec)
    assert run(store.read, blank(piece)).damaged == (b"name",)
    assert run(store.read, blank(piece)).failed == (b"name",)
    store.close()


def test_what_would_not_become_smaller_is_stored_as_it_is(tmp_path: Path) -> None:
    place = Valkey(tmp_path)
    store = place.open(Codec.PLANES)
    noise = Piece(b"noise", room(250_000))
    noise.view[:] = random.Random(1).randbytes(250_000)
    assert run(store.write, noise) == Report()
    assert place.size(b"noise") == HEADER_BYTES + 250_000
    read = blank(noise)
    assert run(store.read, read) == Report()
    assert same(noise, read)
    store.close()
    place.close()
