"""Listening with TLS: handshakes that cannot be used to hold anybody up, and who came in.

Until its handshake is over a connection is a plain socket here, one of at most ``handshakes_max``:
where there are more, the one that has waited longest gives way, so whoever opens many and says
nothing keeps nobody out who speaks at once. Whoever speaks plain HTTP is told so, in plain HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from kvatlas.config_tls import is_local
from kvatlas.dataplane.tls import (
    HANDSHAKE,
    Identity,
    Trust,
    WrongPart,
    asking,
    check,
    life_of,
    reason_of,
)
from kvatlas.errors import ConfigError
from kvatlas.service.http import envelope

log = logging.getLogger(__name__)

#: Where commands find the authority to believe, and a certificate and key of their own.
ENVIRONMENT = ("KVATLAS_CA", "KVATLAS_CERT", "KVATLAS_KEY")
_ACCEPT_AGAIN_S = 0.1
_LOG_S = 10.0  # between two words on refused connections
_PLAIN = envelope("this port speaks TLS only: write https://", status=400, code="tls_needed")
_PLAIN_ANSWER = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%b" % (len(_PLAIN), _PLAIN)
)


class DoorLimits(msgspec.Struct, frozen=True):
    """``handshakes_max`` connections may be about to prove themselves, each for
    ``handshake_timeout_s`` in all."""

    handshakes_max: int = 256
    handshake_timeout_s: float = 5.0


class Door:
    """Listens on one address, and hands on connections whose handshake is over."""

    def __init__(
        self,
        trust: Trust,
        protocol: Callable[[], asyncio.Protocol],
        limits: DoorLimits | None = None,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.port = 0
        self._trust = trust
        self._protocol = protocol
        self._limits = limits or DoorLimits()
        self._listeners: list[socket.socket] = []
        self._accepting: list[asyncio.Task[None]] = []
        self._shaking: dict[asyncio.Task[None], None] = {}  # in the order of their coming
        self._told_s = -_LOG_S

    @property
    def shaking(self) -> int:
        """Connections whose handshake is not over."""
        return len(self._shaking)

    async def start(self, host: str, port: int) -> None:
        """Raises OSError where the address cannot be had."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        try:
            for family, _, _, _, address in dict.fromkeys(found):
                where = (*address[:1], self.port or port, *address[2:])
                self._listeners.append(_listen(family, where))
                self.port = self._listeners[0].getsockname()[1]
        except OSError:
            self.close()
            raise
        self._accepting = [
            loop.create_task(self._accept(one), name="accept TLS") for one in self._listeners
        ]

    def close(self) -> None:
        """Nobody comes in any more; whoever is in stays."""
        for task in (*self._accepting, *self._shaking):
            task.cancel()
        for listener in self._listeners:
            listener.close()
        self._accepting, self._listeners = [], []

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, address = await loop.sock_accept(listener)
            except OSError:  # no descriptor is left, say
                self.counts["accept_failed"] += 1
                await asyncio.sleep(_ACCEPT_AGAIN_S)
                continue
            if len(self._shaking) >= self._limits.handshakes_max:
                self.counts["crowded"] += 1
                oldest = next(iter(self._shaking))
                del self._shaking[oldest]
                oldest.cancel()
            task = loop.create_task(self._admit(sock, str(address[0])))
            self._shaking[task] = None
            task.add_done_callback(self._shaken)

    def _shaken(self, task: asyncio.Task[None]) -> None:
        self._shaking.pop(task, None)

    async def _admit(self, sock: socket.socket, address: str) -> None:
        loop = asyncio.get_running_loop()
        limit_s = self._limits.handshake_timeout_s
        until = loop.time() + limit_s
        handed = False
        try:
            sock.setblocking(False)
            async with asyncio.timeout(limit_s):
                first = await _peek(sock)
            if first != HANDSHAKE:
                self._plain(sock, address, first)
                return
            handed = True  # whatever comes of it, the socket is closed there
            await loop.connect_accepted_socket(
                self._protocol,
                sock,
                ssl=self._trust.server,
                ssl_handshake_timeout=max(until - loop.time(), 0.01),
            )
            self.counts["admitted"] += 1
        except (TimeoutError, ConnectionAbortedError):
            self._refused("slow", address, f"no handshake within {limit_s:g} s")
        except ssl.SSLError as error:
            self._refused("refused", address, reason_of(error))
        except OSError as error:
            self._refused("gone", address, str(error))
        finally:
            if not handed:
                sock.close()

    def _plain(self, sock: socket.socket, address: str, first: int) -> None:
        if first < 0:
            self._refused("gone", address, "it left before it said anything")
            return
        self._refused("plain", address, "it speaks no TLS")
        with contextlib.suppress(OSError):
            sock.recv(1 << 16)  # else the answer is lost with what is not read
            sock.send(_PLAIN_ANSWER)

    def _refused(self, reason: str, address: str, why: str) -> None:
        self.counts[reason] += 1
        now = time.monotonic()
        if now - self._told_s >= _LOG_S:
            self._told_s = now
            log.warning("a connection from %s was refused: %s", address, why)


def _listen(family: int, address: tuple[Any, ...]) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(address)
        made.listen(1024)
        made.setblocking(False)
    except OSError:
        made.close()
        raise
    return made


async def _peek(sock: socket.socket) -> int:
    """The first byte, which stays where it is; -1 where there is none."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def readable() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(sock.fileno(), readable)
    try:
        await ready
    finally:
        loop.remove_reader(sock.fileno())
    try:
        data = sock.recv(1, socket.MSG_PEEK)
    except OSError:
        return -1
    return data[0] if data else -1


def peer_of(transport: asyncio.BaseTransport, trust: Trust) -> tuple[bool, Identity | None]:
    """Whether the other end of a connection that came in has a certificate, and whom it names.
    Raises WrongPart."""
    session = transport.get_extra_info("ssl_object")
    der = session.getpeercert(True) if session is not None else None
    return der is not None, trust.who(der)


class Outgoing(msgspec.Struct, frozen=True):
    """How connections to one kind of part are made: ``context`` is asked for each; ``check`` gets
    the certificate of the other end, and raises WrongPart. ``plain``: to where http may be spoken
    all the same."""

    context: Callable[[], ssl.SSLContext]
    check: Callable[[bytes | None], None]
    plain: Callable[[str], bool]


def to_agents(trust: Trust) -> Outgoing:
    """From a gateway."""
    return Outgoing(lambda: trust.client, lambda der: check(der, ("agent",)), lambda host: False)


def to_gateways(trust: Trust) -> Outgoing:
    """From one of their peers."""
    return Outgoing(lambda: trust.client, lambda der: check(der, ("gateway",)), lambda host: False)


def to_engines(trust: Trust) -> Outgoing:
    """From a gateway: an engine has a certificate of the cluster, or none of it and one of
    ``tls.engines_ca``."""
    foreign = bool(trust.config.engines_ca)
    anywhere = trust.config.plain_engines
    return Outgoing(
        lambda: trust.engines,
        lambda der: check(der, ("engine",), foreign=foreign),
        lambda host: anywhere or is_local(f"//{host}"),
    )


def from_outside(
    ca: str = "", cert: str = "", key: str = "", parts: tuple[str, ...] = ("gateway", "engine")
) -> Outgoing:
    """From a command or a tool to one of ``parts``, or to what is no part of a cluster. Without
    files by those that `ENVIRONMENT` names. Raises ConfigError for files that cannot be used."""
    if not ca and not cert:
        ca, cert, key = (os.environ.get(name, "") for name in ENVIRONMENT)
    context = asking(ca, cert, key)
    if cert and life_of(Path(cert)).ends_s <= time.time():  # who is asked could say no more than no
        raise ConfigError(f"{cert} has expired: kvatlas certs issue")
    return Outgoing(lambda: context, lambda der: check(der, parts, foreign=True), lambda host: True)


def check_session(transport: asyncio.BaseTransport, outgoing: Outgoing) -> None:
    """The other end is who was wanted. Raises WrongPart."""
    session = transport.get_extra_info("ssl_object")
    if session is None:
        raise WrongPart("there is no TLS on this connection")
    outgoing.check(session.getpeercert(True))
