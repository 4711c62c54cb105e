"""A snapshot's pieces as bytes, each with a proof that whoever wrote it has our secret.

A frame is 4 bytes of length, 32 of proof and a piece as MessagePack. The proof is over the number
that whoever asked has drawn, the frame's place in the order, and its bytes: so nothing can be
changed, moved, left out, or told again to somebody else.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterator

import msgspec

from kvatlas.core.keys import Keyring
from kvatlas.core.snapshot_values import FORMAT, AnyPiece, Closing, Opening, Piece
from kvatlas.errors import SnapshotError

FRAME_BYTES_MAX = 1 << 20
NONCE_BYTES = 16
_HEAD_BYTES = 4
_PROOF_BYTES = 32

_decoder = msgspec.msgpack.Decoder(AnyPiece)
_encoder = msgspec.msgpack.Encoder()


def encoded(piece: Piece) -> bytes:
    """One piece."""
    return _encoder.encode(piece)


class Writer:
    """Frames in their order."""

    def __init__(self, ring: Keyring, nonce: bytes) -> None:
        self._ring = ring
        self._nonce = nonce
        self._count = 0

    def opening(self) -> bytes:
        """The first one."""
        return self.frame(encoded(Opening(FORMAT)))

    def closing(self) -> bytes:
        """The last one."""
        return self.frame(encoded(Closing(self._count)))

    def frame(self, body: bytes) -> bytes:
        """The next one, of a piece that is `encoded`."""
        proof = _proof(self._ring, self._nonce, self._count, body)
        self._count += 1
        return b"".join((len(body).to_bytes(_HEAD_BYTES, "big"), proof, body))


class Reader:
    """The same bytes, however they are cut, as pieces."""

    def __init__(self, ring: Keyring, nonce: bytes) -> None:
        self._ring = ring
        self._nonce = nonce
        self._count = 0
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        """More of them. Not more than can be held: read what is whole first."""
        self._buffer += data

    def pieces(self) -> Iterator[AnyPiece]:
        """Those that are whole. Raises SnapshotError for what is none of ours."""
        while (body := self._frame()) is not None:
            try:
                yield _decoder.decode(body)
            except msgspec.MsgspecError as error:
                raise SnapshotError(
                    f"it has a piece that this kvatlas does not know: {error}"
                ) from error

    def _frame(self) -> bytes | None:
        buffer, start = self._buffer, _HEAD_BYTES + _PROOF_BYTES
        if len(buffer) < _HEAD_BYTES:
            return None
        size = int.from_bytes(buffer[:_HEAD_BYTES], "big")
        if size > FRAME_BYTES_MAX:
            raise SnapshotError(f"it has a piece of {size} bytes: {FRAME_BYTES_MAX} at most")
        if len(buffer) < start + size:
            return None
        proof, body = bytes(buffer[_HEAD_BYTES:start]), bytes(buffer[start : start + size])
        del buffer[: start + size]
        wanted = _proof(self._ring, self._nonce, self._count, body)
        if not hmac.compare_digest(proof, wanted):
            raise SnapshotError(
                "it was written with another secret, or changed on its way: give all gateways the "
                "same keys.secret_file"
            )
        self._count += 1
        return body


def _proof(ring: Keyring, nonce: bytes, count: int, body: bytes) -> bytes:
    return ring.proof(b"snapshot\0" + nonce + count.to_bytes(8, "big") + body)
