"""What a gateway orders of an agent, or asks of a peer: a POST that proves that it has the secret.

It names the life of whom is meant, and the proof is of the path, too: so that nobody else, and
nothing old, and nothing that was said to another page can order anything.
"""

from __future__ import annotations

import hmac
from typing import Protocol, TypeVar

import msgspec

from kvatlas.core.keys import Keyring
from kvatlas.errors import EngineError
from kvatlas.service.http import Request
from kvatlas.service.http_client import HttpClient

PROOF = "x-kvatlas-proof"
_ANSWER_BYTES_MAX = 1 << 20


class Order(Protocol):
    """A struct for msgpack."""

    @property
    def life(self) -> str:
        """Of whom is meant."""


T = TypeVar("T")
Kind = TypeVar("Kind", bound=Order)


def signed(ring: Keyring, path: str, order: Order) -> tuple[bytes, str]:
    """The body, and the header that proves who wrote it, for that path."""
    body = msgspec.msgpack.encode(order)
    return body, _proof(ring, path, body)


async def ask(
    client: HttpClient,
    ring: Keyring,
    url: str,
    path: str,
    order: Order,
    *,
    kind: type[T],
    timeout_s: float,
) -> T:
    """What the agent at ``url`` answers. Raises EngineError where it does not do it."""
    body, proof = signed(ring, path, order)
    url = url.rstrip("/") + path
    answer = await client.request(
        "POST",
        url,
        headers=[(PROOF.encode(), proof.encode())],
        body=body,
        timeout_s=timeout_s,
        size_max=_ANSWER_BYTES_MAX,
    )
    if answer.status != 200:
        said = answer.body[:500].decode(errors="replace")
        raise EngineError(f"{url}: status {answer.status}: {said}")
    try:
        return msgspec.json.decode(answer.body, type=kind)
    except msgspec.MsgspecError as error:
        raise EngineError(f"{url}: no answer of an agent: {error}") from error


def ordered(ring: Keyring, request: Request, kind: type[Kind], life: str) -> Kind | tuple[int, str]:
    """What one with that ``life`` is to do; or the status of its refusal, and why."""
    proof = _proof(ring, request.path, request.body)
    if not hmac.compare_digest(request.header(PROOF).encode(), proof.encode()):
        why = "give gateways and agents the same keys.secret_file"
        return 403, f"whoever asked has another secret than is here: {why}"
    try:
        order = msgspec.msgpack.decode(request.body, type=kind)
    except msgspec.MsgspecError as error:
        return 400, f"not what a gateway of this version says: {error}"
    if order.life != life:
        return 409, "this was asked of one that is no more: another life began here"
    return order


def _proof(ring: Keyring, path: str, body: bytes) -> str:
    return ring.proof(path.encode() + b"\0" + body).hex()
