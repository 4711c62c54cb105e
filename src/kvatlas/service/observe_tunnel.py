"""A pass-through to one router: the bytes of each connection as they are, both ways.

Not an HTTP proxy on purpose: what is not parsed cannot be changed. Headers and their case, chunks,
pauses, half-closed connections, upgrades and whatever is no HTTP reach the other side as they left
the first; a connection that breaks on one side breaks on the other. What passed is copied to
`Copies` after it was sent on.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from typing import Any

from kvatlas.service.http_client import Origin
from kvatlas.service.observe_copies import Copies, Kind

_LINGER_NEVER = struct.pack("ii", 1, 0)  # closing then sends RST


class Tunnel:
    """Listens on one address and connects to ``router`` once per client connection."""

    def __init__(self, router: Origin, copies: Copies) -> None:
        self.port = 0
        self.router = router
        self.copies = copies
        self.wires: set[_Wire] = set()
        self.unreached = 0  # connections that the router did not take
        self._server: asyncio.Server | None = None

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """`port` is then the real one. Raises OSError where the address cannot be had."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: _Wire(self, loop).client, host, port, backlog=1024
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def drain(self, timeout_s: float) -> bool:
        """Takes no more connections and lets those that are open end; False where some did not."""
        if self._server is not None:
            self._server.close()
        loop = asyncio.get_running_loop()
        ends_at_s = loop.time() + timeout_s
        while self.wires and loop.time() < ends_at_s:  # noqa: ASYNC110 - as `HttpServer.drain`
            await asyncio.sleep(0.01)
        return not self.wires

    async def close(self) -> None:
        """Ends everything at once."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for wire in list(self.wires):
            wire.close()
        await asyncio.sleep(0)  # lets the transports tell their protocols


class _Wire:
    """One client's connection and its other half at the router."""

    def __init__(self, tunnel: Tunnel, loop: asyncio.AbstractEventLoop) -> None:
        self.tunnel = tunnel
        self.number = 0
        self.client = _End(self, Kind.ASKED)
        self.router = _End(self, Kind.ANSWERED)
        self.client.peer, self.router.peer = self.router, self.client
        self._loop = loop
        self._connecting: asyncio.Task[None] | None = None
        self._early: list[bytes] = []
        self._met = False

    def arrived(self) -> None:
        """The client is there: what it says waits until the router is there too."""
        self.tunnel.wires.add(self)
        self.number = self.tunnel.copies.opened()
        self._connecting = self._loop.create_task(self._connect())

    async def _connect(self) -> None:
        """As long as the system tries; a router that refuses is a broken connection to us too."""
        router = self.tunnel.router
        try:
            await self._loop.create_connection(lambda: self.router, router.host, router.port)
        except (OSError, UnicodeError):
            self.tunnel.unreached += 1
            self.broken()

    def met(self) -> None:
        """The router is there: it hears what came before anything that comes now."""
        self._met = True
        if not self.client.alive:
            self.router.reset()
            return
        if self._early:
            self.router.transport.writelines(self._early)
            self._early = []
        if self.client.ended:
            self.router.transport.write_eof()
        elif self.client.open:
            self.client.transport.resume_reading()

    def early(self, data: bytes) -> None:
        """Kept until the router is there: one read of the socket, no more."""
        if not self._met and self.client.open:
            self._early.append(data)
            self.client.transport.pause_reading()

    def close(self) -> None:
        """At once."""
        if self._connecting is not None:
            self._connecting.cancel()
        self.broken()

    def broken(self) -> None:
        """Both sides see a connection that broke."""
        self.client.reset()
        self.router.reset()
        self.over()

    def over(self) -> None:
        """Once both sides are closed."""
        if not (self.client.alive or self.router.alive) and self in self.tunnel.wires:
            self.tunnel.wires.discard(self)
            self.tunnel.copies.piece(self.number, Kind.CLOSED, time.monotonic())


class _End(asyncio.Protocol):
    """One of the two sockets."""

    peer: _End

    def __init__(self, wire: _Wire, kind: Kind) -> None:
        self._wire = wire
        self._kind = kind
        self.ended = False  # it will send nothing more
        self.transport: Any = None  # uvloop's and asyncio's share no typed base

    @property
    def alive(self) -> bool:
        return self.transport is not None

    @property
    def open(self) -> bool:
        return self.transport is not None and not self.transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._kind is Kind.ASKED:
            self._wire.arrived()
        else:
            self._wire.met()

    def data_received(self, data: bytes) -> None:
        at_s = time.monotonic()
        wire = self._wire
        if self.peer.open:
            self.peer.transport.write(data)
        else:
            wire.early(data)
        wire.tunnel.copies.piece(wire.number, self._kind, at_s, data)

    def eof_received(self) -> bool:
        """Passed on; the way back stays open for what the other side still has to say."""
        self.ended = True
        peer = self.peer
        if peer.ended:
            for end in (self, peer):
                if end.open:
                    end.transport.close()
        elif peer.open:
            peer.transport.write_eof()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        peer = self.peer
        if peer.open:
            if exc is None and self.ended:
                peer.transport.close()
            else:
                peer.reset()
        self._wire.over()

    def pause_writing(self) -> None:
        if self.peer.open:
            self.peer.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.peer.open:
            self.peer.transport.resume_reading()

    def reset(self) -> None:
        """Breaks the connection so that its other end gets an error, not an end."""
        if self.transport is not None:
            sock = self.transport.get_extra_info("socket")
            if sock is not None:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NEVER)
            self.transport.abort()
