"""One rig per store beyond the node: a real server, and stores that reach it by any port."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from stores_kit import Server, finished, start_valkey

from kvatlas.dataplane.arena import Arena
from kvatlas.dataplane.tiers import framing, peer, valkey
from kvatlas.dataplane.tiers.base import Piece, Store, checksum_of
from kvatlas.dataplane.tiers.dram import DramStore
from kvatlas.dataplane.tiers.sockets import Address


class Rig(Protocol):
    """What the tests of faults need."""

    port: int
    writes: bool  # through the store itself

    def store(self, port: int, deadline_s: float = 10.0, lost: list[str] | None = None) -> Store:
        """A store that believes the server to be there."""

    def put(self, name: bytes, value: bytes, stored: bytes | None = None) -> None:
        """Behind the store's back; ``stored``: other bytes under the label of ``value``."""

    def kill(self) -> None: ...
    def restart(self) -> None:
        """Empty, on the same port."""

    def close(self) -> None: ...


class ValkeyRig:
    writes = True

    def __init__(self, directory: Path, *options: str) -> None:
        self._directory = directory
        self._server: Server = start_valkey(directory, *options)
        self.port = self._server.port

    def store(self, port: int, deadline_s: float = 10.0, lost: list[str] | None = None) -> Store:
        settings = valkey.Settings(port=port, deadline_s=deadline_s, streams=2, queue_max=64)
        return valkey.ValkeyStore(settings, (lost if lost is not None else []).append)

    def put(self, name: bytes, value: bytes, stored: bytes | None = None) -> None:
        head = framing.pack(Piece(name, memoryview(value))) or b""
        self.ask(b"SET", b"kvatlas:v:" + name, head + (value if stored is None else stored))

    def ask(self, *words: bytes) -> list[bytes | int | None]:
        server = valkey.Server.connect(Address("127.0.0.1", self.port), _soon())
        try:
            return server.ask(*words)
        finally:
            server.close()

    def kill(self) -> None:
        self._server.kill()

    def restart(self) -> None:
        self._server.kill()
        self._server = start_valkey(self._directory, port=self.port)

    def close(self) -> None:
        self._server.kill()


class PeerRig:
    writes = False

    def __init__(
        self, directory: Path, size_bytes: int = 16 << 20, *, verify: bool = False
    ) -> None:
        self.arena = Arena.create(size_bytes, directory=None)
        self.dram = DramStore(self.arena, verify=verify)
        self.server = peer.PeerServer(self.dram, token=b"secret", send_s=1.0)
        self.port = self.server.address[1]

    def store(self, port: int, deadline_s: float = 10.0, lost: list[str] | None = None) -> Store:
        settings = peer.Settings("127.0.0.1", port, b"secret", deadline_s=deadline_s, queue_max=64)
        return peer.PeerStore(settings, (lost if lost is not None else []).append)

    def put(self, name: bytes, value: bytes, stored: bytes | None = None) -> None:
        piece = Piece(name, memoryview(stored or value), checksum_of(value))
        finished(lambda done: self.dram.write([piece], done))

    def kill(self) -> None:
        self.server.close()

    def restart(self) -> None:
        self.server.close()
        self.dram.close()
        self.dram = DramStore(self.arena, verify=False)
        self.server = peer.PeerServer(self.dram, token=b"secret", port=self.port, send_s=1.0)

    def close(self) -> None:
        self.server.close()
        self.arena.close()


def _soon() -> float:
    return time.monotonic() + 5


RIGS: dict[str, Callable[[Path], Rig]] = {"valkey": ValkeyRig, "peer": PeerRig}
