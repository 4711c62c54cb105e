"""Sealed values: only the right key opens them, only under the label that they were sealed with."""

from __future__ import annotations

import hashlib
import os
import threading
from pathlib import Path

import msgspec
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher
from hypothesis import given, settings
from hypothesis import strategies as st
from sealing_kit import flipped, sealer_of

from kvatlas.dataplane import sealing
from kvatlas.dataplane.codec import Codec
from kvatlas.dataplane.keystore import DataKey, KeyMissing
from kvatlas.dataplane.records import Label, SealedLabel, checksum_bytes, pack, unpack
from kvatlas.dataplane.sealing import Sealer
from kvatlas.dataplane.tiers import framing
from kvatlas.dataplane.tiers.base import Piece, checksum_of
from kvatlas.dataplane.tiers.framing import HEADER_BYTES, Verdict
from kvatlas.errors import StoreError

PLAIN = bytes(range(256)) * 20
TAG = "0123456789abcdef01234567"
LABEL = Label(
    name=b"name",
    size_bytes=len(PLAIN),
    checksum=checksum_bytes(checksum_of(PLAIN)),
    generation=7,
    stored_bytes=len(PLAIN),
    codec=Codec.RAW,
    index=3,
    tenant=TAG + ".7",
    fingerprint=b"f" * 32,
)


class Fixed:
    """One key per tenant, out of memory."""

    def current(self, tenant: str) -> DataKey:
        return self.get(tenant, b"fixedkey")

    def get(self, tenant: str, key_id: bytes) -> DataKey:
        if key_id != b"fixedkey":
            raise KeyMissing("no such key")
        return DataKey(key_id, hashlib.sha256(tenant.encode()).digest())

    def drop(self, tenant: str) -> int:
        return 0


SEALER = Sealer(Fixed())


def sealed(plain: bytes = PLAIN, label: Label = LABEL) -> tuple[SealedLabel, bytes]:
    into = memoryview(bytearray(len(plain)))
    made = SEALER.seal(label, memoryview(plain), into)
    return made, bytes(into)


def opened(label: SealedLabel, stored: bytes) -> tuple[bytes, bytes]:
    into = memoryview(bytearray(stored))
    return SEALER.open(label, into, into), bytes(into)


@pytest.mark.parametrize(
    ("secret", "data", "wanted"),
    [
        (1, b"", "ce546ef63c9cc60765923609b33a9a1974e96e52daf2fcf7075e2271"),
        (
            3,
            b"c2sp.org/XAES-256-GCM",
            "986ec1832593df5443a179437fd083bf3fdb41abd740a21f71eb769d",
        ),
    ],
)
def test_the_construction_is_the_one_that_was_published(
    secret: int, data: bytes, wanted: str
) -> None:
    """The vectors of c2sp.org/XAES-256-GCM, one for each way the mask is made."""
    cipher = sealing._one_time(bytes([secret]) * 32, b"ABCDEFGHIJKLMNOPQRSTUVWX")
    making = Cipher(*cipher).encryptor()
    making.authenticate_additional_data(data)
    made = making.update(b"XAES-256-GCM") + making.finalize() + making.tag
    assert made.hex() == wanted


@given(st.binary(min_size=1, max_size=5000), st.integers(0, 1 << 40), st.text(max_size=20))
@settings(max_examples=50)
def test_what_was_sealed_opens(plain: bytes, generation: int, tenant: str) -> None:
    label = msgspec.structs.replace(
        LABEL, generation=generation, tenant=tenant, checksum=checksum_bytes(checksum_of(plain))
    )
    made, stored = sealed(plain, label)
    assert opened(made, stored) == (label.checksum, plain)
    assert unpack(pack(made), Label) == made


def test_nothing_of_the_value_can_be_seen() -> None:
    made, stored = sealed()
    everything = pack(made) + stored
    assert LABEL.checksum not in everything
    assert made.checksum == b""
    assert all(PLAIN[at : at + 16] not in everything for at in range(256))


def test_the_same_value_is_never_sealed_the_same_way() -> None:
    several = [sealed() for _ in range(20)]
    assert len({label.nonce for label, _ in several}) == 20
    assert len({label.closed for label, _ in several}) == 20
    assert len({stored for _, stored in several}) == 20


@pytest.mark.parametrize("at", [0, 1, 2000, -1])
@pytest.mark.parametrize("bit", [0, 7])
@pytest.mark.parametrize("where", ["stored", "sum", "tag", "nonce", "key"])
def test_a_flipped_bit_does_not_open(where: str, at: int, bit: int) -> None:
    label, stored = sealed()
    replace = msgspec.structs.replace
    match where:
        case "stored":
            stored = flipped(stored, at, bit)
        case "sum":
            label = replace(label, closed=flipped(label.closed, at % 16, bit))
        case "tag":
            label = replace(label, closed=flipped(label.closed, 16 + at % 16, bit))
        case "nonce":
            label = replace(label, nonce=flipped(label.nonce, at % 24, bit))
        case "key":
            label = replace(label, key=flipped(label.key, at % 8, bit))
    with pytest.raises(StoreError):
        opened(label, stored)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", b"other"),
        ("size_bytes", 1),
        ("checksum", b"c" * 16),
        ("generation", 8),
        ("stored_bytes", 1),
        ("codec", "zstd"),
        ("index", 4),
        ("tenant", "f" * 24 + ".7"),
        ("tenant", TAG + ".8"),
        ("tenant", TAG),
        ("tenant", ""),
        ("fingerprint", b"g" * 32),
        ("nonce", b"n" * 24),
        ("closed", b"c" * 32),
        ("closed", b""),
        ("nonce", b""),
    ],
)
def test_under_another_label_it_does_not_open(field: str, value: object) -> None:
    """Whoever can write to the medium can make a whole label, and still moves nothing."""
    label, stored = sealed()
    with pytest.raises(StoreError):
        opened(msgspec.structs.replace(label, **{field: value}), stored)


def test_every_field_of_a_label_is_bound() -> None:
    """One that is added gets its line above."""
    assert set(SealedLabel.__struct_fields__) == {
        *("name", "size_bytes", "checksum", "generation", "stored_bytes", "codec", "index"),
        *("tenant", "fingerprint", "key", "nonce", "closed"),
    }


def test_cut_short_and_extended_does_not_open() -> None:
    label, stored = sealed()
    for wrong in (stored[:-1], stored + b"\0", stored[1:], b""):
        with pytest.raises(StoreError):
            opened(label, wrong)


def test_two_values_that_swap_their_bytes_do_not_open() -> None:
    one, two = sealed(), sealed(PLAIN, msgspec.structs.replace(LABEL, name=b"another"))
    for label, stored in ((one[0], two[1]), (two[0], one[1])):
        with pytest.raises(StoreError):
            opened(label, stored)


@pytest.mark.parametrize("codec", list(Codec))
def test_framed_it_is_right_and_says_what_was_kept(codec: Codec, tmp_path: Path) -> None:
    sealer = sealer_of(tmp_path)
    piece = Piece(b"n" * 33, memoryview(bytearray(PLAIN)), 0, 5, TAG + ".7", b"f" * 32)
    framed = framing.coded(piece, codec, sealer)
    assert framed is not None
    head, stored = framed
    assert len(head) == HEADER_BYTES
    label = framing.unpack(head)
    read = Piece(piece.name, memoryview(bytearray(len(PLAIN))))
    if not codec:
        read.view[:] = stored
    verdict = framing.judge(
        label, read, len(stored), stored=memoryview(bytes(stored)), sealer=sealer
    )
    assert verdict is Verdict.RIGHT
    assert bytes(read.view) == PLAIN
    assert (read.checksum, read.index, read.tenant) == (piece.checksum, 5, TAG + ".7")


def test_what_is_judged_without_a_key_and_with_one(tmp_path: Path) -> None:
    sealer, strangers = sealer_of(tmp_path / "ours"), sealer_of(tmp_path / "theirs")
    piece = Piece(b"name", memoryview(bytearray(PLAIN)), tenant=TAG + ".7")

    def judged(how: Sealer | None, whose: Sealer | None) -> Verdict:
        framed = framing.coded(piece, Codec.RAW, whose)
        assert framed is not None
        into = Piece(b"name", memoryview(bytearray(framed[1])))
        return framing.judge(framing.unpack(framed[0]), into, len(PLAIN), sealer=how)

    assert judged(sealer, sealer) is judged(None, None) is Verdict.RIGHT
    assert judged(None, sealer) is judged(strangers, sealer) is Verdict.LOCKED
    assert judged(sealer, None) is Verdict.UNSEALED
    head, stored = framing.coded(piece, Codec.RAW, sealer) or (b"", memoryview(b""))
    sealer.keys.drop(TAG)
    into = Piece(b"name", memoryview(bytearray(stored)))
    verdict = framing.judge(framing.unpack(head), into, len(PLAIN), sealer=sealer)
    assert verdict is Verdict.ERASED
    assert verdict.missing
    assert verdict.goes


def test_the_longest_label_that_is_taken_has_room_when_sealed() -> None:
    for name, tenant, print_bytes in ((255, 53, 32), (1, 307, 32), (255, 0, 85)):
        piece = Piece(b"n" * name, memoryview(bytearray(b"x" * 100)))
        piece.tenant, piece.fingerprint, piece.index = "t" * tenant, b"f" * print_bytes, 1 << 31
        assert framing.fit(piece)
        framed = framing.coded(piece, Codec.ZSTD, SEALER)
        assert framed is not None
        assert len(framed[0]) == HEADER_BYTES
        piece.fingerprint += b"f"
        assert not framing.fit(piece)


@pytest.mark.parametrize(
    ("owner", "tenant"),
    [
        (TAG + ".7", TAG),
        (TAG + ".7." + "a" * 24, TAG),
        (TAG, TAG),
        ("", ""),
        ("a salt that a client made up", ""),
        (TAG.upper() + ".7", ""),
        (TAG[:-1] + ".7", ""),
        (TAG + "0.7", ""),
        ("nobody", ""),
        ("../" + TAG, ""),
    ],
)
def test_keys_go_by_the_tenant_and_not_by_epoch_session_or_salt(owner: str, tenant: str) -> None:
    assert sealing.tenant_of(owner) == tenant


def test_threads_seal_beside_each_other() -> None:
    wrong: list[object] = []

    def work(n: int) -> None:
        plain = os.urandom(200_000 + n)
        label = msgspec.structs.replace(LABEL, checksum=checksum_bytes(checksum_of(plain)))
        for _ in range(5):
            room = SEALER.room(len(plain))
            made = SEALER.seal(label, memoryview(plain), room)
            if opened(made, bytes(room)) != (label.checksum, plain):
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
