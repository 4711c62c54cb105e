"""TLS under the peer protocol: both ends are agents, or there is no connection."""

from __future__ import annotations

import contextlib
import socket
import ssl

from kvatlas.dataplane.tiers.base import Counts
from kvatlas.dataplane.tiers.sockets import Wrap
from kvatlas.dataplane.tls import PlainPeer, Trust, joined, taken

#: Instead of a greeting, to who speaks no TLS where it must be.
TLS_ONLY = b"KVAPTLS\0"
_GREETING_BYTES = 40
_PARTS = ("agent",)


def agent_at(trust: Trust | None, host: str) -> Wrap | None:
    """For connections to a peer."""
    if trust is None:
        return None
    return lambda sock, until: joined(trust.client, sock, host, until, _PARTS)


def proved(trust: Trust, counts: Counts, sock: socket.socket, until: float) -> ssl.SSLSocket:
    """Of a connection that came in. Raises OSError."""
    try:
        return taken(trust.strict, sock, until, _PARTS)
    except PlainPeer:
        counts.add("denied_plain")
        with contextlib.suppress(OSError):
            sock.send(TLS_ONLY.ljust(_GREETING_BYTES, b"\0"))
        raise
    except ConnectionError:
        counts.add("denied_tls")
        raise
