"""Block keys: who may share, what must agree, and the chained hash over the tokens.

A key is SHA-256, keyed with the deployment's secret and chained over the whole prefix, cut to
16 bytes. The chain starts from a *root* that binds fingerprint, scope and adapter, so the same
tokens under another model, layout, tenant or adapter never share a key, and nobody without the
secret can guess one. Cutting the digest also takes away SHA-256's length extension.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

import msgspec

from kvatlas.core import native

KEY_BYTES = 16
SECRET_BYTES = 32


class Fingerprint(msgspec.Struct, frozen=True, omit_defaults=False):
    """All that must agree before KV bytes of one engine may be used by another (DESIGN §2).

    ``weights_digest`` is any text that stands for the weights and their revision; ``variant`` for
    what else makes other bytes of them: overrides, a quantization on the way in, another dtype.
    `core.compat` says in words why two of them may not share.
    """

    model: str
    weights_digest: str = ""
    tokenizer_digest: str = ""
    chat_template_digest: str = ""
    engine: str = ""
    engine_version: str = ""
    layout_digest: str = ""
    block_tokens: int = 0
    kv_dtype: str = ""
    tensor_parallel: str = ""
    draft_mode: str = ""
    hash_algorithm: str = ""
    variant: str = ""

    def canonical(self) -> Fingerprint:
        """Without what does not count: the model's name, where a digest of the weights decides."""
        return msgspec.structs.replace(self, model="") if self.weights_digest else self

    def digest(self) -> bytes:
        """32 bytes that change when any field that counts does; the same in every process."""
        fields = msgspec.json.encode(self.canonical())
        return hashlib.sha256(b"kvatlas.fingerprint.3\0" + fields).digest()

    def differences(self, other: Fingerprint) -> list[str]:
        """Names of the fields that differ, in declaration order: the reason of a refusal."""
        return [f for f in self.__struct_fields__ if getattr(self, f) != getattr(other, f)]


class Scope(msgspec.Struct, frozen=True):
    """Who may share: ``kind`` is public, tenant, session (`core.tenancy` says which) or salt: all
    who send one cache salt that proves nothing. ``id`` names it."""

    kind: str = "public"
    id: str = ""

    @property
    def owner(self) -> str:
        """What units of it are booked on and labelled with (`core.forgetting`). A text that a
        client chose never reads as a tenant's: it would be paid, sealed and purged as one."""
        return f"~{self.id}" if self.kind == "salt" else self.id


PUBLIC = Scope()


def salt_scope(text: str) -> Scope:
    """The scope of whoever sends that text as the cache salt; "" is public. Its kind is its own:
    no text that a client chooses is the scope of a tenant who proved to be one."""
    return Scope("salt", text) if text else PUBLIC


class Keyring:
    """Computes keys under one deployment secret. Stateless apart from it."""

    def __init__(self, secret: bytes) -> None:
        """Raises ValueError when the secret is shorter than 16 bytes."""
        if len(secret) < 16:
            raise ValueError("the key secret needs at least 16 bytes")
        self._secret = hashlib.sha256(b"kvatlas.secret.1\0" + secret).digest()
        self._keyed = hashlib.sha256(self._secret)

    def root(self, fingerprint: bytes, scope: Scope = PUBLIC, adapter: str = "") -> bytes:
        """The start of a chain: 16 bytes for one (fingerprint, scope, adapter)."""
        label = msgspec.json.encode([scope.kind, scope.id, adapter])
        return hmac.new(self._secret, b"root\0" + fingerprint + label, "sha256").digest()[
            :KEY_BYTES
        ]

    def turned(self, parent: bytes, scope: Scope) -> bytes:
        """Where a chain that all may share turns into one of ``scope``: what follows ``parent``
        there is chained to this."""
        label = msgspec.json.encode([scope.kind, scope.id])
        return hmac.new(self._secret, b"turn\0" + parent + label, "sha256").digest()[:KEY_BYTES]

    def proof(self, message: bytes) -> bytes:
        """32 bytes that only who has the secret can make of ``message``."""
        return hmac.new(self._secret, b"proof\0" + message, "sha256").digest()

    def chain(
        self,
        parent: bytes,
        tokens: bytes | memoryview,
        block_tokens: int,
        extras: Sequence[bytes] = (),
    ) -> list[bytes]:
        """Keys of the full blocks of ``tokens`` (uint32, little endian) that follow ``parent``.

        ``extras[i]``, where not empty, is mixed into block i's key. A last partial block has none.
        """
        size = block_tokens * 4
        if native.accelerated and not extras:
            return native.chain(self._secret, parent, tokens, size)
        start_hash = self._keyed.copy  # cheaper than a new hash and a joined copy of the block
        view = memoryview(tokens).cast("B")
        keys: list[bytes] = []
        key = parent
        for start in range(0, len(view) - size + 1, size):
            if extras and len(keys) < len(extras) and extras[len(keys)]:
                digest = start_hash()
                digest.update(key + b"extra\0" + extras[len(keys)])
                key = digest.digest()[:KEY_BYTES]
            digest = start_hash()
            digest.update(key)
            digest.update(view[start : start + size])
            key = digest.digest()[:KEY_BYTES]
            keys.append(key)
        return keys
