"""Whose state it is: block bytes that spell their owner, and the judge of every hit.

What is true is known to whoever asks: a prompt's tenant, session and epoch, and up to where an
operator has named its tokens public. Keys, salts and scopes of the product have no part in it.
"""

from __future__ import annotations

from collections import Counter
from hashlib import blake2b

import msgspec

#: class → what it means.
CLASSES: dict[str, str] = {
    "cross-scope": "state of another tenant, session or epoch was used, or promised",
    "cross-model": "state of another model or adapter was used",
    "wrong-bytes": "state of other tokens was used",
    "forged": "a salt that the deployment did not make was believed",
    "label": "a unit lies under another tenant's name than its owner's",
    "quota": "a tenant holds more than its quota",
    "residual": "something is left of a tenant that was purged",
    "unbacked": "more was promised than anybody holds",
    "crash": "production code raised",
}
#: Whose the state was that a request resumed from, as seen by whoever asked.
RELATIONS = ("session", "tenant", "public-own", "public-other")
VIOLATIONS_MAX = 20


class Mark(msgspec.Struct, frozen=True, array_like=True):
    """What a block's bytes say. ``tenant``, ``session``: numbers of who had it computed; ``open``:
    up to its end the prompt was public; ``at``: the step in which it was computed."""

    tenant: int
    session: int
    epoch: int
    apart: bool  # its tenant keeps sessions apart
    open: bool
    model: str
    adapter: str
    digest: bytes
    at: int


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Mark).decode


class Prompt(msgspec.Struct):
    """One request as its sender knows it. ``salt`` is what it goes by; ``forged``: made by somebody
    without the secret. ``public_tokens``: what an operator named public of it."""

    id: str
    tokens: bytes
    tenant: int
    session: int
    epoch: int
    apart: bool
    salt: str
    adapter: str = ""
    public_tokens: int = 0
    forged: bool = False
    tag: str = ""
    digests: dict[int, bytes] = {}

    def digest(self, end: int) -> bytes:
        """Of the first ``end`` tokens."""
        found = self.digests.get(end)
        if found is None:
            found = self.digests[end] = blake2b(self.tokens[: 4 * end], digest_size=8).digest()
        return found

    def mark(self, end: int, model: str, at: int) -> bytes:
        """What the block that ends there is filled with."""
        return encode(
            Mark(
                self.tenant,
                self.session,
                self.epoch,
                self.apart,
                end <= self.public_tokens,
                model,
                self.adapter,
                self.digest(end),
                at,
            )
        )


class Violation(msgspec.Struct, frozen=True):
    """``at``: which step of its world."""

    kind: str
    at: int
    what: str


class Judge:
    """Attributes every hit to whoever wrote the state."""

    def __init__(self) -> None:
        self.at = 0
        self.hits: Counter[str] = Counter()  # by place and relation
        self.late = 0  # promises of what a store had let go
        self.found: Counter[str] = Counter()
        self.violations: list[Violation] = []

    def report(self, kind: str, what: str) -> None:
        """A violation."""
        self.found[kind] += 1
        if len(self.violations) < VIOLATIONS_MAX:
            self.violations.append(Violation(kind, self.at, what))

    def hit(self, place: str, prompt: Prompt, model: str, end: int, data: bytes) -> bool:
        """``prompt`` uses a block that ends at token ``end`` and has these bytes: may it?"""
        mark = decode(data) if data else None
        wrong = wrong_with(prompt, model, end, mark) if mark is not None else "wrong-bytes"
        if wrong or mark is None:
            asker = f"{prompt.id} of tenant {prompt.tenant} session {prompt.session}"
            self.report(wrong, f"{place}: {asker} gets {mark} at token {end}")
            return False
        self.hits[f"{place} {relation(prompt, mark)}"] += 1
        return True


def wrong_with(prompt: Prompt, model: str, end: int, mark: Mark) -> str:
    """Which class of violation it is that ``prompt`` uses this state; "" where it may."""
    if (mark.model, mark.adapter) != (model, prompt.adapter):
        return "cross-model"
    ours = (mark.tenant, mark.epoch) == (prompt.tenant, prompt.epoch)
    ours = ours and not (mark.apart and mark.session != prompt.session)
    if mark.open != (end <= prompt.public_tokens) or not (ours or mark.open):
        return "cross-scope"
    return "" if mark.digest == prompt.digest(end) else "wrong-bytes"


def relation(prompt: Prompt, mark: Mark) -> str:
    """Of `RELATIONS`."""
    if mark.open:
        return "public-own" if mark.tenant == prompt.tenant else "public-other"
    return "session" if mark.session == prompt.session else "tenant"
