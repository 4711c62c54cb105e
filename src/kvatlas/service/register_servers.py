"""Connections to the server that keeps a register: the one that is named, or that primary of a
cluster which has its slot.

All that a register keeps lies in one slot, so one primary at a time is all that has to be known of
a cluster. Where it is, is asked of all servers that are known, and what most of them say counts: a
primary that was cut off still believes in itself. After a failure the next to ask looks again.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from valkey.asyncio import BlockingConnectionPool, Connection, SSLConnection, Valkey
from valkey.asyncio.cluster import ClusterParser
from valkey.asyncio.connection import AbstractConnection, UnixDomainSocketConnection
from valkey.crc import key_slot
from valkey.exceptions import ValkeyError

from kvatlas.config_register import HOSTS_MAX, Place
from kvatlas.errors import RegisterError

CONNECTIONS_MAX = 32  # each is made when it is needed first
LOOK_S = 0.5  # for servers to say where the slot is
PAUSE_S = 0.05  # after a failure, doubled up to the next
PAUSE_MAX_S = 1.0

Address = tuple[str, int]


class _Tls(SSLConnection):
    """With a context of ours: the library's own one trusts the machine's authorities too."""

    def __init__(self, *, context: ssl.SSLContext, **more: Any) -> None:
        super().__init__(**more)
        self.ssl_context.context = context


class Servers:
    """``tls`` makes the context of new connections; ``awake`` is waited for
    before any is made."""

    def __init__(
        self,
        place: Place,
        key: str,
        *,
        tls: Callable[[], ssl.SSLContext] | None = None,
        awake: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.place = place
        self._slot = key_slot(key.encode())
        self._tls = tls
        self._awake = awake
        self._known: dict[Address, None] = dict.fromkeys(place.hosts)
        self._moved: Address | None = None
        self._client: Valkey | None = None
        self._lock = asyncio.Lock()
        self._failures = 0
        self._again_s = 0.0

    async def client(self) -> Valkey:
        """The server to ask. Raises RegisterError or what the library raises."""
        async with self._lock:
            if self._client is None:
                await asyncio.sleep(max(0.0, self._again_s - time.monotonic()))
                try:
                    self._client = await self._opened()
                except BaseException:
                    self._failed()
                    raise
                self._failures = 0
            return self._client

    async def drop(self, client: Valkey, moved: Address | None = None) -> None:
        """It is not to be asked any more, ``moved`` is; None: let others say."""
        if client is not self._client:
            return
        self._client, self._moved = None, moved
        if moved is None:
            self._failed()
        await _close(client)

    async def close(self) -> None:
        if self._client is not None:
            await _close(self._client)
            self._client = None

    def _failed(self) -> None:
        pause_s = min(PAUSE_S * 2**self._failures, PAUSE_MAX_S)
        self._failures = min(self._failures + 1, 16)
        self._again_s = time.monotonic() + pause_s

    async def _opened(self) -> Valkey:
        if self._awake is not None:
            await self._awake()
        moved, self._moved = self._moved, None
        if self.place.cluster:
            return await _fit(self._to(moved or await self._primary()), cluster=True)
        return await _fit(self._to(self.place.hosts[0] if self.place.hosts else None))

    def _to(self, address: Address | None) -> Valkey:
        """A client of one server; it connects when it is asked."""
        place = self.place
        kind: type[AbstractConnection] = Connection
        more: dict[str, Any] = {"db": place.database} if place.database else {}
        if address is None:
            kind, more["path"] = UnixDomainSocketConnection, place.path
        else:
            more["host"], more["port"] = address
        if self._tls is not None:
            kind, more["context"] = _Tls, self._tls()
            more["ssl_check_hostname"] = True
        pool = BlockingConnectionPool(
            max_connections=CONNECTIONS_MAX,
            timeout=None,  # whoever waits has a deadline of his own, for all of it
            connection_class=kind,
            parser_class=ClusterParser,  # which knows MOVED from other errors
            socket_timeout=None,
            username=place.username or None,
            password=place.password or None,
            **more,
        )
        return Valkey.from_pool(pool)

    async def _primary(self) -> Address:
        asked = [asyncio.ensure_future(self._told(address)) for address in self._known]
        try:
            await asyncio.wait(asked, timeout=LOOK_S)
        finally:
            for one in asked:
                one.cancel()
            told = await asyncio.gather(*asked, return_exceptions=True)
        votes = Counter(one for one in told if isinstance(one, tuple))
        if not votes:
            faults = [one for one in told if isinstance(one, Exception)]
            if not faults:
                raise RegisterError(f"no server has slot {self._slot}, or says so", "moving")
            if "cluster support disabled" in str(faults[0]):
                raise RegisterError("no cluster: write valkey:// for a single server", "unfit")
            raise faults[0]
        return votes.most_common(1)[0][0]

    async def _told(self, address: Address) -> Address | None:
        """Who has the slot, as one server says."""
        client = self._to(address)
        try:
            slots = await send(client, "CLUSTER SLOTS")
        finally:
            await _close(client)
        found = None
        for first, last, *servers in slots:
            # The primary first; one without a host is where it was asked.
            named = [((host or b"").decode() or address[0], port) for host, port, *_ in servers]
            for one in named:
                if len(self._known) < HOSTS_MAX:
                    self._known[one] = None
            if first <= self._slot <= last:
                found = named[0]
        return found


async def send(client: Valkey, *words: bytes | str | int) -> Any:
    """One command, once. Raises what the library raises."""
    return await client.execute_command(*words)  # type: ignore[no-untyped-call]


async def _fit(client: Valkey, *, cluster: bool = False) -> Valkey:
    """It itself, where it can keep a register. Raises RegisterError where not."""
    try:
        memory, mode = await client.info("memory"), await client.info("cluster")
        policy = memory.get("maxmemory_policy", "")
        if policy.startswith("allkeys"):
            raise RegisterError(
                f"maxmemory-policy is {policy}: the server may drop what was never to be lost; "
                "set noeviction",
                "unfit",
            )
        if bool(mode.get("cluster_enabled")) != cluster:
            raise RegisterError("part of a cluster: write valkey-cluster://", "unfit")
    except BaseException:
        await _close(client)
        raise
    return client


async def _close(client: Valkey) -> None:
    with contextlib.suppress(ValkeyError, OSError):
        await client.aclose()
