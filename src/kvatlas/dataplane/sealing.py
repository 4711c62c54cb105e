"""Values at rest, sealed by AES-256-GCM under their tenant's key: whoever has none reads nothing.

The construction is XAES-256-GCM (c2sp.org/XAES-256-GCM): 24 random bytes are the nonce, the first
twelve of them make a key for this one value out of the tenant's, the others are the nonce of plain
AES-256-GCM under it. So nothing has to be counted, by no agent and not across agents that share a
key: at random nonces of 96 bits alone a key would have to be changed well before 2^32 values, which
a node's disk writes in weeks, and every agent would have to know what the others have written.

What is sealed is the value as it would be stored (in its codec) and its checksum; the label beside
it (`records.SealedLabel`) is the associated data. Bytes that were moved to another name, tenant,
index, generation or fingerprint do not open. The checksum (XXH3 of the value's own bytes) stays:
whoever wrote it may have summed before the bytes went wrong, and later tiers compare with it; it
takes a sixth of the time that the seal does. It is not in the clear: a sum of state tells whoever
computes the state of a guessed prompt whether the guess was right.

Opening is in place: the bytes come from the medium to where they belong. Sealing goes to room of
the calling thread, since the value itself is read meanwhile. Both leave the interpreter's lock
alone while they work (the stores' threads do it, one value each, while others wait for the medium).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import threading

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from kvatlas.dataplane.extents import whole
from kvatlas.dataplane.keystore import DataKey, KeyProvider
from kvatlas.dataplane.records import SUM_BYTES, Label, SealedLabel, pack
from kvatlas.errors import StoreError

NONCE_BYTES = 24
_TAG_BYTES = 16
_HALF = NONCE_BYTES // 2
_BLOCK_BYTES = 16
_HUGE_BYTES = 2 << 20
_OWNER = re.compile(r"([0-9a-f]{24})(?:\..*)?", re.ASCII | re.DOTALL)


class Sealer:
    """For any number of threads."""

    def __init__(self, keys: KeyProvider) -> None:
        self.keys = keys
        self._local = threading.local()

    def seal(self, label: Label, stored: memoryview, into: memoryview) -> SealedLabel:
        """Fill ``into``, as long as ``stored``. Raises KeyMissing where there is no key to be
        had."""
        key = self.keys.current(tenant_of(label.tenant))
        nonce = os.urandom(NONCE_BYTES)
        fields = msgspec.structs.asdict(label) | {"checksum": b""}
        bare = SealedLabel(**fields, key=key.id, nonce=nonce)
        sealing = Cipher(*_one_time(key.secret, nonce)).encryptor()
        sealing.authenticate_additional_data(pack(bare))
        sealing.update_into(stored, into)
        closed = sealing.update(label.checksum) + sealing.finalize()
        return msgspec.structs.replace(bare, closed=closed + sealing.tag)

    def open(self, label: SealedLabel, stored: memoryview, into: memoryview) -> bytes:
        """Fill ``into``, which may be ``stored``; the checksum of the value. Nothing in ``into`` is
        to be used when this fails. Raises KeyMissing, KeyDropped, and StoreError where it is not
        what was sealed."""
        if len(label.nonce) != NONCE_BYTES or len(label.closed) != SUM_BYTES + _TAG_BYTES:
            raise StoreError("this is no seal")
        key = self.key_of(label)
        bare = msgspec.structs.replace(label, closed=b"")
        cipher, mode = _one_time(key.secret, label.nonce, label.closed[SUM_BYTES:])
        opening = Cipher(cipher, mode).decryptor()
        opening.authenticate_additional_data(pack(bare))
        opening.update_into(stored, into)
        checksum = opening.update(label.closed[:SUM_BYTES])
        try:
            opening.finalize()
        except InvalidTag:
            raise StoreError("this is not what was sealed") from None
        return checksum

    def key_of(self, label: SealedLabel) -> DataKey:
        """What opens a value with this label. Raises KeyMissing, KeyDropped."""
        return self.keys.get(tenant_of(label.tenant), label.key)

    def room(self, size_bytes: int) -> memoryview:
        """Pages of the calling thread's own, the same ones the next time; huge ones where the
        kernel gives them, of which a disk's driver has fewer to look up."""
        there: memoryview | None = getattr(self._local, "room", None)
        if there is None or len(there) < size_bytes:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            made = mmap.mmap(-1, whole(size_bytes, _HUGE_BYTES), flags)
            with contextlib.suppress(OSError):
                made.madvise(mmap.MADV_HUGEPAGE)
            self._local.room = there = memoryview(made)
        return there[:size_bytes]


def tenant_of(owner: str) -> str:
    """Whose key seals what an owner (`core.forgetting`) has: the tenant's, by its tag, over all
    epochs and sessions. Nobody's for whom nobody vouched: clients choose such salts as they like,
    and each would make a key."""
    found = _OWNER.fullmatch(owner)
    return found[1] if found is not None else ""


def _one_time(
    secret: bytes, nonce: bytes, tag: bytes | None = None
) -> tuple[algorithms.AES, modes.GCM]:
    """The key of one value, and the mode with its nonce: XAES-256-GCM."""
    block = Cipher(algorithms.AES(secret), modes.ECB()).encryptor()
    zero = int.from_bytes(block.update(bytes(_BLOCK_BYTES)), "big")
    mask = zero << 1 & (1 << 128) - 1 ^ (0x87 if zero >> 127 else 0)
    halves = [
        (int.from_bytes(bytes((0, n, 0x58, 0)) + nonce[:_HALF], "big") ^ mask).to_bytes(
            _BLOCK_BYTES, "big"
        )
        for n in (1, 2)
    ]
    return algorithms.AES(block.update(b"".join(halves))), modes.GCM(nonce[_HALF:], tag)
