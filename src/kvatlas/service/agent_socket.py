"""An agent's Unix socket: who is connected, what of their prompts is known, when they are gone."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections import OrderedDict, deque
from pathlib import Path

from kvatlas.core.compat import Member
from kvatlas.core.keys import Keyring
from kvatlas.core.tenancy import Chain, sharing_of
from kvatlas.errors import ConfigError, EngineError
from kvatlas.service import agent_wire as wire

BACKLOG_BYTES_MAX = 64 << 20
WAITING_MAX = 1024  # connections not taken yet: all engines of a node may start at once
GONE_S = 60.0  # how long a process may live on after its connection ended


class UnprovedError(EngineError):
    """A request whose salt does not say whose it is, where that is asked for."""


class Prompt:
    """A request of an engine, as far as its tokens are known here."""

    def __init__(self, chain: Chain, grid_tokens: int, owner: str) -> None:
        """``owner``: whose what is not public of it is, by the id of the scope."""
        self._chain = chain
        self._grid = grid_tokens
        self._rest = b""
        self.tenant = owner
        self.count = 0
        self.keys: list[bytes] = []

    @classmethod
    def of(
        cls,
        ring: Keyring,
        member: Member,
        asked: wire.Want | wire.Errand,
        *,
        proved: bool = False,
    ) -> Prompt:
        """With all tokens that are known; who shares it is read from its salt. Raises EngineError,
        where it must be ``proved`` whose it is and is not."""
        if len(asked.tokens) % 4:
            raise EngineError("token ids have 4 bytes each")
        sharing = sharing_of(ring, asked.scope).of(ring, asked.tokens)
        if proved and not sharing.tenant:
            raise UnprovedError("its cache salt proves no tenant (--tenants required)")
        grid = member.layout.grid_tokens
        chain = Chain(ring, member.fingerprint.digest(), grid, sharing, asked.adapter)
        prompt = cls(chain, grid, sharing.scope.owner)
        prompt.extend(asked.tokens)
        return prompt

    def extend(self, tokens: bytes) -> None:
        """More token ids, 4 bytes each. Raises EngineError for half ones."""
        if len(tokens) % 4:
            raise EngineError("token ids have 4 bytes each")
        self.count += len(tokens) // 4
        data = memoryview(self._rest + tokens if self._rest else tokens)
        whole = len(data) // (4 * self._grid) * 4 * self._grid
        self._rest = bytes(data[whole:])
        if whole:
            self.keys += self._chain.extend(data[:whole])


class Peer:
    """One connection."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.name = ""  # of the engine, once it has said hello
        self.member: Member | None = None
        self.bye = False
        self.slow = False
        self.prompts: OrderedDict[str, Prompt] = OrderedDict()
        self._out: deque[bytes] = deque()
        self._backlog = 0
        self._more = asyncio.Event()

    def send(self, message: wire.FromAgent) -> None:
        """Queue a message; who does not read, or asked for more than a frame holds, loses its
        connection."""
        try:
            data = wire.frame(message)
        except EngineError:
            data = b""
        self._backlog += len(data)
        if not data or self._backlog > BACKLOG_BYTES_MAX:
            self.slow = True
            with contextlib.suppress(OSError):  # it has ended
                self.sock.shutdown(socket.SHUT_RDWR)  # closed, it would wake nobody
            return
        self._out.append(data)
        self._more.set()

    async def write(self) -> None:
        """Sends what is queued, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await self._more.wait()
            self._more.clear()
            while self._out:
                data = self._out.popleft()
                await loop.sock_sendall(self.sock, data)
                self._backlog -= len(data)


def listen(path: Path) -> socket.socket:
    """Raises ConfigError where another agent answers there, or nothing can be made."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.is_socket():
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                try:
                    probe.connect(str(path))
                except OSError:
                    path.unlink()  # its owner is dead
                else:
                    raise ConfigError(f"{path}: another agent answers there")
        before = os.umask(0o177)  # who may connect may read state
        try:
            sock.bind(str(path))
        finally:
            os.umask(before)
        sock.listen(WAITING_MAX)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise ConfigError(f"socket {path}: {error.strerror or error}") from error
    except ConfigError:
        sock.close()
        raise
    return sock


def process_of(sock: socket.socket) -> int | None:
    """A descriptor that tells of the other side's end; None: it has ended."""
    try:
        return os.pidfd_open(credentials_of(sock)[0])
    except OSError:
        return None


def credentials_of(sock: socket.socket) -> tuple[int, int, int]:
    """Process, user and group of the other side, as the kernel saw them connect. Raises OSError."""
    found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid, uid, gid = struct.unpack("3i", found)
    return pid, uid, gid


async def ended(process: int) -> None:
    """Waits for the end of a process whose connection is gone: until then it may copy."""
    loop = asyncio.get_running_loop()
    done = loop.create_future()

    def over() -> None:
        if not done.done():
            done.set_result(None)

    loop.add_reader(process, over)
    try:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(done, GONE_S)
    finally:
        loop.remove_reader(process)
        os.close(process)
