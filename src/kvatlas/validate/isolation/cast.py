"""Who asks for what: tenants whose names are tricks, sessions, documents, adapters, forgeries."""

from __future__ import annotations

import random
import unicodedata

import msgspec

from kvatlas.core import tenancy
from kvatlas.core.keys import Keyring
from kvatlas.validate.isolation.marks import Prompt

#: Names that somebody who cuts, joins, folds or trims them would take for each other.
NAMES = (
    "acme",
    "ACME",
    "acme.1",
    "acme.1.-",
    "public",
    "tenant",
    "-",
    "0",
    "kva1",
    "kva1.acme",
    "lora",
    "caf\u00e9",
    "cafe",
    "\u0430cme",  # its first letter is Cyrillic
    "a:b",
    "a\u00b7b",
    "__default__",
    "null",
)
_GRID = 16
_BLOCK = 4 * _GRID
_UNITS_MAX = 6  # blocks of a prompt, or a little more


class Tenant(msgspec.Struct):
    """``apart``: its sessions share nothing with each other. ``texts``: what its prompts begin
    with, behind documents."""

    number: int
    name: str
    tag: str
    apart: bool
    epoch: int = 1
    texts: list[bytes] = []


class Cast:
    """All of one world. ``grid_tokens``: the largest of its engines."""

    def __init__(self, draw: random.Random, ring: Keyring, grid_tokens: int) -> None:
        self._draw, self._ring = draw, ring
        self._unit = 4 * grid_tokens
        names = [*NAMES[:2], *draw.sample(NAMES[2:], draw.randint(2, len(NAMES) - 2))]
        self.tenants = [
            Tenant(number, name, tenancy.tag_of(ring, name), draw.random() < 0.4)
            for number, name in enumerate(names)
        ]
        # One is called as another is known to the parts.
        self.tenants.append(
            Tenant(
                len(names), self.tenants[0].tag, tenancy.tag_of(ring, self.tenants[0].tag), False
            )
        )
        #: Public by an operator's word; not all end where a block does.
        self.documents = [self._text(1, 3) for _ in range(3)]
        self.documents += [self._text(1, 2) + draw.randbytes(4 * draw.randint(1, _GRID - 1))]
        #: What everybody says behind documents, or at once: nobody's, and the same tokens.
        self.common = [self._text(1, 2) for _ in range(4)]
        self.adapters = ["", "", "", "lora", "lora", self._salt(self.tenants[0], 0, b"")]
        self.asked: list[Prompt] = []
        self._number = 0
        self._forged: dict[str, int] = {}

    def _text(self, low: int, high: int) -> bytes:
        return self._draw.randbytes(self._unit * self._draw.randint(low, high))

    def _salt(self, tenant: Tenant, session: int, public: bytes) -> str:
        ring = self._ring
        apart = tenancy.session_of(ring, tenant.tag, f"chat {session}") if tenant.apart else ""
        mark = tenancy.mark_of(ring, tenancy.prefix_digest(public)) if public else ""
        said = tenancy.TenantSalt(tenant.tag, tenant.epoch, apart, len(public) // 4, mark)
        return tenancy.salt_of(ring, said)

    def _id(self) -> str:
        self._number += 1
        return f"r{self._number}"

    def prompt(self) -> Prompt:
        """What some tenant asks next: very often what another has asked already."""
        draw = self._draw
        tenant, session = draw.choice(self.tenants), draw.randrange(4)
        asked = self.asked
        if asked and draw.random() < 0.5:  # the same tokens, whoever it was that had them
            tokens = draw.choice(asked).tokens
            if draw.random() < 0.4:
                tokens += draw.randbytes(_BLOCK * draw.randint(1, 2))
        else:
            tokens = draw.choice(self.documents) if draw.random() < 0.6 else b""
            tokens += draw.choice(self.common) if draw.random() < 0.8 else b""
            tokens += draw.randbytes(_BLOCK * draw.randint(0, 2))
        tokens = tokens[: _UNITS_MAX * self._unit] + draw.randbytes(4 * draw.randint(1, 8))
        return self.of(tenant, session, tokens, draw.choice(self.adapters))

    def of(self, tenant: Tenant, session: int, tokens: bytes, adapter: str) -> Prompt:
        """A prompt of that tenant, as a gateway that has its credentials passes it on."""
        begins = [d for d in self.documents if tokens.startswith(d)]
        public = max(begins, key=len, default=b"")
        salt = self._salt(tenant, session, public)
        if self._draw.random() < 0.1 and not public:
            # An engine computes other tokens than the gateway took the prompt to be.
            salt = self._salt(tenant, session, self._draw.choice(self.documents))
            public = b""
        prompt = Prompt(
            self._id(),
            tokens,
            tenant.number,
            session,
            tenant.epoch,
            tenant.apart,
            salt,
            adapter,
            len(public) // 4,
            tag=tenant.tag,
            digests={},
        )
        self.asked.append(prompt)
        if len(self.asked) > 64:
            self.asked.pop(0)
        return prompt

    def forgery(self) -> Prompt | None:
        """Somebody's prompt under a salt made of theirs without the secret."""
        if not self.asked:
            return None
        draw = self._draw
        victim, other = draw.choice(self.asked), draw.choice(self.asked)
        head, tag, epoch, session, public, mac = victim.salt.split(".")
        made = {
            "another tenant's proof": (head, tag, epoch, session, public, other.salt[-32:]),
            "other public": (head, tag, epoch, session, other.salt.split(".")[4], mac),
            "more public": (
                head,
                tag,
                epoch,
                session,
                "9" + (public if public != "0" else f"9-{'0' * 12}"),
                mac,
            ),
            "another tenant": (head, other.tag, epoch, session, public, mac),
            "another epoch": (head, tag, str(int(epoch) + 1), session, public, mac),
            "no session": (head, tag, epoch, "-" if session != "-" else tag, public, mac),
            "no proof": (head, tag, epoch, session, public, "0" * 32),
            "loud": (head, tag, epoch, session, public, mac.upper()),
            "leading zero": (head, tag, "0" + epoch, session, public, mac),
            "other digits": (
                head,
                tag,
                chr(0xFF10 + int(epoch[0])) + epoch[1:],
                session,
                public,
                mac,
            ),
            "a line more": (head, tag, epoch, session, public, mac + "\n"),
            "composed": (
                unicodedata.normalize("NFD", "\u00e9") + head,
                tag,
                epoch,
                session,
                public,
                mac,
            ),
        }
        salt = ".".join(made[draw.choice(list(made))])
        if salt == victim.salt or salt in {p.salt for p in self.asked}:
            return None
        # Who sends one text is one sender, as with every salt that proves nothing.
        sender = self._forged.setdefault(salt, len(self._forged) + 1)
        return msgspec.structs.replace(
            victim,
            id=self._id(),
            salt=salt,
            forged=True,
            epoch=0,
            apart=False,
            tenant=-sender,
            session=-1,
            public_tokens=0,
            tag="",
            digests={},
        )

    def believed(self, prompt: Prompt) -> bool:
        """Whether the product takes this salt for one of the deployment's."""
        return tenancy.read_salt(self._ring, prompt.salt) is not None

    def rotate(self, tenant: Tenant) -> None:
        """A new epoch: what was before can no longer be asked for."""
        tenant.epoch += 1
