"""Receipts of purges: what was ordered, what went from where, who has not answered; signed.

A receipt is written before anybody is asked, so that it is the order, too: one that is not complete
is carried on by the next gateway that reads its folder. Whoever has the deployment's secret can
check it, and nobody else can make one.
"""

from __future__ import annotations

import hmac
import json
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from kvatlas.core.forgetting import Floor
from kvatlas.core.keys import Keyring
from kvatlas.errors import ConfigError
from kvatlas.lasting import whole_file
from kvatlas.service.agent_purge import Gone

RECEIPTS_MAX = 10_000
RECEIPT_BYTES_MAX = 16 << 20
_ID = re.compile(r"[0-9a-zA-Z-]{1,64}")


class Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one part said: the gateway itself, an agent, an engine. ``at``: seconds since 1970;
    ``error``: why it has not answered, or not done it."""

    who: str
    at: float = 0.0
    error: str = ""
    gone: tuple[Gone, ...] = ()

    @property
    def done(self) -> bool:
        """It answered, and nothing is left there."""
        return bool(self.at) and not self.error and all(gone.done for gone in self.gone)


class Receipt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of one purge. ``tenant`` is its name, ``session`` that of its session, where one alone was
    meant; ``floors`` and ``keys`` (hex) say the same to agents. ``reset``: engines were to be
    emptied, of every tenant."""

    id: str
    tenant: str
    session: str = ""
    floors: tuple[Floor, ...] = ()
    keys: tuple[str, ...] = ()
    reset: bool = False
    ordered_at: float = 0.0
    completed_at: float = 0.0
    answers: tuple[Answer, ...] = ()
    proof: str = ""

    @property
    def complete(self) -> bool:
        """Everybody has answered, and nothing is left."""
        return bool(self.completed_at)

    def missing(self) -> dict[str, str]:
        """Who has not done it, and why."""
        return {
            answer.who: answer.error or "something is left there"
            for answer in self.answers
            if not answer.done
        }

    def signed(self, ring: Keyring) -> Receipt:
        """The same, with its proof."""
        return msgspec.structs.replace(self, proof=_proof(ring, self))


def verify(ring: Keyring, data: bytes) -> Receipt:
    """The receipt in a file. Raises ConfigError where it is none, or not as it was signed."""
    try:
        receipt = msgspec.json.decode(data, type=Receipt)
        json.loads(data, object_pairs_hook=_once)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ConfigError(f"not a receipt of a purge: {error}") from error
    if not hmac.compare_digest(receipt.proof.encode(), _proof(ring, receipt).encode()):
        raise ConfigError(
            "the receipt is not as it was signed, or was signed with another keys.secret_file"
        )
    return receipt


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Of two members of one name a reader sees the first, and what was signed is the last."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"a member stands there twice, of {', '.join(found)}")
    return found


def _proof(ring: Keyring, receipt: Receipt) -> str:
    body = msgspec.json.encode(msgspec.structs.replace(receipt, proof=""))
    return ring.proof(b"receipt\0" + body).hex()


class Receipts:
    """Those of one gateway, as files in a folder."""

    def __init__(self, folder: Path, ring: Keyring) -> None:
        """Raises ConfigError where it cannot be written to, or holds what is no receipt."""
        self._folder = folder
        self._ring = ring
        self._known: dict[str, Receipt] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            paths = sorted(folder.glob("*.json"))
        except OSError as error:
            raise ConfigError(f"tenants.receipts: {folder}: {error.strerror}") from error
        for path in paths:
            try:
                receipt = verify(ring, path.read_bytes())
            except (OSError, ConfigError) as error:
                raise ConfigError(f"tenants.receipts: {path}: {error}") from error
            self._known[receipt.id] = receipt

    def __iter__(self) -> Iterator[Receipt]:
        return iter(list(self._known.values()))

    def get(self, id: str) -> Receipt | None:
        """The one of that id."""
        return self._known.get(id)

    def full(self) -> bool:
        """There is no room for another: the operator takes old ones away first."""
        return len(self._known) >= RECEIPTS_MAX

    def put(self, receipt: Receipt) -> Receipt:
        """Sign it and keep it, whatever happens to the machine afterwards. Raises OSError."""
        assert _ID.fullmatch(receipt.id), "checked by who takes orders"
        made = receipt.signed(self._ring)
        with whole_file(self._folder / f"{made.id}.json") as file:
            file.write(msgspec.json.format(msgspec.json.encode(made), indent=2) + b"\n")
        self._known[made.id] = made
        return made


def is_id(text: str) -> bool:
    """Whether a purge can be called so: it is the name of a file."""
    return bool(_ID.fullmatch(text))
