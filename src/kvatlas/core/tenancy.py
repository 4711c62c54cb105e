"""Tenants: what parts know them by, the cache salt that proves it, and who may share a prompt.

Gateways and agents have one secret in common. With it a gateway makes the salt of a tenant whose
credentials it has checked; engines carry it as they carry any salt, and agents read it back. No
part but the gateway needs a list of tenants, and none but the gateway ever sees a name.

Up to `TenantSalt.public_tokens` a prompt is what an operator has named public: its blocks there
are everybody's, those behind are of the tenant, or of one session of it, alone. The salt binds the
very tokens: where an engine computes other ones than the gateway took the prompt to be, nothing of
it is public.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import unicodedata

import msgspec

from kvatlas.core.forgetting import TAG_CHARS
from kvatlas.core.keys import PUBLIC, Keyring, Scope, salt_scope

NAME_CHARS_MAX = 128
EPOCH_MAX = (1 << 53) - 1
PUBLIC_TOKENS_MAX = 99_999_999
SALT_CHARS_MAX = 128  # vLLM 0.32 takes no longer one
_MAC_CHARS = 32
_MARK_CHARS = 12
_PERIODS = 1 << 32
_NO_SESSION = "-"
_SALT = re.compile(
    r"kva1\.([0-9a-f]{24})\.(0|[1-9][0-9]{0,15})\.([0-9a-f]{24}|-)"
    r"\.(?:0|([1-9][0-9]{0,7})-([0-9a-f]{12}))\.([0-9a-f]{32})",
    re.ASCII,
)
#: By path: these and whatever normal forms make of others. By sight: what only looks like them.
_SLASHES = "/\\\u2044\u2215\u2216\u29f5\u29f8\u29f9\ufe68\uff0f\uff3c"
_HIDDEN = ("C", "Zl", "Zp")  # control, format, private, unassigned; line and paragraph ends


class TenantSalt(msgspec.Struct, frozen=True):
    """What a salt says. ``tag`` and ``session`` are tags, not names; "" for no session.
    ``public_mark``: which tokens the public ones are (`mark_of`); "" where none are."""

    tag: str
    epoch: int
    session: str = ""
    public_tokens: int = 0
    public_mark: str = ""


class Sharing(msgspec.Struct, frozen=True):
    """Who may share a prompt's blocks: everybody up to ``public_tokens``, then the scope.
    ``tenant``: whose they are there, by tag; "" where nobody's name was proved."""

    scope: Scope = PUBLIC
    public_tokens: int = 0
    public_mark: str = ""
    tenant: str = ""

    def of(self, ring: Keyring, tokens: bytes | memoryview) -> Sharing:
        """The same for the ``tokens`` that an engine really computes: what its salt calls public
        is public only where they begin with it."""
        size = 4 * self.public_tokens
        data = memoryview(tokens).cast("B")
        if not size or (
            len(data) >= size
            and hmac.compare_digest(mark_of(ring, prefix_digest(data[:size])), self.public_mark)
        ):
            return self
        return Sharing(self.scope, tenant=self.tenant)


EVERYBODY = Sharing()


def checked_name(name: str) -> str:
    """A tenant's or session's name in its one form (NFC). Raises ValueError that says what is
    wrong with it: names are shown to people and stand in paths and commands."""
    if not name or len(name) > NAME_CHARS_MAX:
        raise ValueError(f"a name has 1 to {NAME_CHARS_MAX} characters, not {len(name)}")
    for char in name:
        category = unicodedata.category(char)
        if category.startswith(_HIDDEN):
            raise ValueError(f"U+{ord(char):04X} ({category}) cannot be seen: not in a name")
    plain = unicodedata.normalize("NFKC", name)
    if any(char in _SLASHES for char in name + plain):
        raise ValueError("slashes, and what looks like one, are not for names")
    if not plain.strip(". ") or plain.strip() != plain:
        raise ValueError("a name does not consist of dots, nor begin or end with a space")
    normal = unicodedata.normalize("NFC", name)
    if len(normal) > NAME_CHARS_MAX:
        raise ValueError(f"a name has 1 to {NAME_CHARS_MAX} characters, not {len(normal)}")
    return normal


def tag_of(ring: Keyring, name: str) -> str:
    """What all parts but the gateway know a tenant by: 24 hex digits; "" stays nobody.
    Raises ValueError for what is no name."""
    if not name:
        return ""
    return ring.proof(b"tenant\0" + checked_name(name).encode()).hex()[:TAG_CHARS]


def session_of(ring: Keyring, tag: str, name: str) -> str:
    """The tag of a session, which is one of that tenant alone; "" stays none."""
    if not name:
        return ""
    text = f"{tag}\0{checked_name(name)}"
    return ring.proof(b"session\0" + text.encode()).hex()[:TAG_CHARS]


def epoch_at(epoch: int, rotation_s: float, now: float) -> int:
    """The epoch in salts: ``epoch``, which an operator raises, and the period of ``rotation_s``
    (0: none) that ``now``, in seconds since 1970, lies in. No two pairs of them come to one."""
    period = int(now // rotation_s) if rotation_s else 0
    if not 0 <= period < _PERIODS or not 0 <= epoch <= EPOCH_MAX // _PERIODS:
        raise ValueError(f"epoch {epoch}, period {period}: out of range")
    return epoch * _PERIODS + period


def prefix_digest(tokens: bytes | memoryview) -> bytes:
    """What a policy knows public tokens by (uint32, little endian): 32 bytes, without a secret."""
    digest = start_of_digest()
    digest.update(tokens)
    return digest.digest()


def start_of_digest() -> hashlib._Hash:
    """The same, to be fed piece by piece."""
    return hashlib.sha256(b"kvatlas.prefix.1\0")


def mark_of(ring: Keyring, digest: bytes) -> str:
    """What a salt says of the public tokens with that `prefix_digest`."""
    return ring.proof(b"public\0" + digest).hex()[:_MARK_CHARS]


def salt_of(ring: Keyring, salt: TenantSalt) -> str:
    """The cache salt that says so and proves it. Raises ValueError for what none can say."""
    public = f"{salt.public_tokens}-{salt.public_mark}" if salt.public_tokens else "0"
    said = f"kva1.{salt.tag}.{salt.epoch}.{salt.session or _NO_SESSION}.{public}"
    text = f"{said}.{_mac(ring, said)}"
    if read_salt(ring, text) != salt:
        raise ValueError(f"no salt can say {salt}")
    return text


def read_salt(ring: Keyring, text: str) -> TenantSalt | None:
    """What a salt says, or None where it was not made with our secret. In constant time."""
    found = _SALT.fullmatch(text)
    if found is None:
        return None
    said = text[: -_MAC_CHARS - 1]
    if not hmac.compare_digest(_mac(ring, said), found[6]):
        return None
    epoch = int(found[2])
    session = "" if found[3] == _NO_SESSION else found[3]
    if epoch > EPOCH_MAX:
        return None
    return TenantSalt(found[1], epoch, session, int(found[4] or 0), found[5] or "")


def scope_of(salt: TenantSalt) -> Scope:
    """Who shares what is not public of a prompt with this salt."""
    if salt.session:
        return Scope("session", f"{salt.tag}.{salt.epoch}.{salt.session}")
    return Scope("tenant", f"{salt.tag}.{salt.epoch}")


def sharing_of(ring: Keyring, text: str) -> Sharing:
    """Who shares a prompt with this salt. One that proves nothing is a scope of its own."""
    salt = read_salt(ring, text)
    if salt is None:
        return Sharing(salt_scope(text))
    return Sharing(scope_of(salt), salt.public_tokens, salt.public_mark, salt.tag)


class Chain:
    """Makes the keys of one prompt, block by block of ``grid_tokens``.

    Up to the public boundary they are those of a prompt that is all public; there a root of the
    scope is mixed in, so that what follows is the scope's own.
    """

    def __init__(
        self,
        ring: Keyring,
        fingerprint: bytes,
        grid_tokens: int,
        sharing: Sharing = EVERYBODY,
        adapter: str = "",
    ) -> None:
        self._ring = ring
        self._grid = grid_tokens
        self._scope = sharing.scope
        self._public = sharing.public_tokens // grid_tokens if sharing.scope != PUBLIC else 0
        first = PUBLIC if self._public else sharing.scope
        self._parent = ring.root(fingerprint, first, adapter)
        self._made = 0

    def extend(self, tokens: bytes | memoryview) -> list[bytes]:
        """Keys of the next blocks. ``tokens``: whole blocks of ids, uint32, little endian."""
        size = 4 * self._grid
        data = memoryview(tokens).cast("B")
        if len(data) % size:
            raise ValueError("whole blocks are wanted")
        left = max(0, self._public - self._made)
        if not left:
            return self._on(data)
        keys = self._on(data[: left * size])
        if self._made == self._public:
            self._parent = self._ring.turned(self._parent, self._scope)
            keys += self._on(data[left * size :])
        return keys

    def _on(self, data: memoryview) -> list[bytes]:
        keys = self._ring.chain(self._parent, data, self._grid)
        if keys:
            self._parent = keys[-1]
            self._made += len(keys)
        return keys


def _mac(ring: Keyring, said: str) -> str:
    return ring.proof(b"salt\0" + said.encode()).hex()[:_MAC_CHARS]
