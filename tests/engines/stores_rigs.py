"""One rig per store beyond the node: a real server, and stores that reach it by any port."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from stores_kit import Server, finished, start_valkey, wait_until

from kvatlas.connectors.child import free_ports
from kvatlas.dataplane.arena import Arena
from kvatlas.dataplane.sealing import Sealer
from kvatlas.dataplane.tiers import framing, mooncake, peer, s3, valkey
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
    sealer: Sealer | None = None

    def __init__(self, directory: Path, *options: str) -> None:
        self._directory = directory
        self._server: Server = start_valkey(directory, *options)
        self.port = self._server.port

    def store(self, port: int, deadline_s: float = 10.0, lost: list[str] | None = None) -> Store:
        settings = valkey.Settings(port=port, deadline_s=deadline_s, streams=2, queue_max=64)
        return valkey.ValkeyStore(settings, (lost if lost is not None else []).append, self.sealer)

    def put(self, name: bytes, value: bytes, stored: bytes | None = None) -> None:
        head = framing.pack(Piece(name, memoryview(value))) or b""
        self.ask(b"SET", b"kvatlas:v:" + name, head + (value if stored is None else stored))

    def stored(self, name: bytes, data: bytes | None = None) -> bytes:
        """What lies under a name, label and all; ``data`` is put in its place."""
        if data is not None:
            self.ask(b"SET", b"kvatlas:v:" + name, data)
        (found,) = self.ask(b"GET", b"kvatlas:v:" + name)
        return found if isinstance(found, bytes) else b""

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


SEGMENT = """
import os, sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
code = store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 16 << 20, "tcp", "", sys.argv[1])
print("setup", code, flush=True)
for line in sys.stdin if code == 0 else ():
    what, key, path = line.split()
    if what == "put":
        print("put", store.put(key, open(path, "rb").read()), flush=True)
    else:
        open(path, "wb").write(store.get(key))
        print("get 0", flush=True)
os._exit(0)
"""


class MooncakeRig:
    """A master and a process that gives memory; stores of ours are clients only."""

    sealer: Sealer | None = None

    def __init__(self, directory: Path, segment_bytes: int = 64 << 20) -> None:
        self._directory = directory
        self._segment_bytes = segment_bytes
        self.port, self._admin = free_ports(2)
        self.arena = Arena.create(16 << 20, directory=None)
        self._start()

    def _start(self) -> None:
        package = Path(mooncake_package())
        argv = [str(package / "mooncake_master"), "--rpc_port", str(self.port)]
        argv += ["--metrics_port", str(self._admin)]
        self.master = Server(argv, self.port, self._directory / "master.log")
        log = self._directory / "segment.log"
        with log.open("wb") as out:
            words = [f"127.0.0.1:{self.port}", str(self._segment_bytes)]
            self.segment = subprocess.Popen(
                [sys.executable, "-c", SEGMENT, *words],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
            )
        self._log = log
        self._said("setup 0")

    def _said(self, words: str) -> None:
        log = self._log
        wait_until(lambda: words in _text(log) or self.segment.poll() is not None)
        assert words in _text(log), _text(log)[-2000:]

    def store(self, port: int, deadline_s: float = 10.0, lost: list[str] | None = None) -> Store:
        settings = mooncake.Settings(
            master=f"127.0.0.1:{port}",
            admin_url=f"http://127.0.0.1:{self._admin}",
            deadline_s=deadline_s,
        )
        told = (lost if lost is not None else []).append
        return mooncake.MooncakeStore(settings, self.arena, told, self.sealer)

    def put(self, name: bytes, value: bytes, stored: bytes | None = None) -> None:
        head = framing.pack(Piece(name, memoryview(value))) or b""
        path = self._directory / "value"
        path.write_bytes(head + (value if stored is None else stored))
        self._tell("put", name, path)

    def stored(self, name: bytes, data: bytes | None = None) -> bytes:
        """As `ValkeyRig.stored`; ``data`` comes only where nothing is, as Mooncake has it."""
        path = self._directory / "value"
        if data is not None:
            path.write_bytes(data)
            self._tell("put", name, path)
        self._tell("get", name, path)
        return path.read_bytes()

    def _tell(self, what: str, name: bytes, path: Path) -> None:
        before = _text(self._log).count(f"{what} 0")
        assert self.segment.stdin is not None
        self.segment.stdin.write(f"{what} kvatlas:v:{name.hex()} {path}\n".encode())
        self.segment.stdin.flush()
        wait_until(lambda: _text(self._log).count(f"{what} 0") > before)

    def kill(self) -> None:
        for process in (self.segment, self.master.process):
            process.kill()
            process.wait()
        if self.segment.stdin is not None:
            self.segment.stdin.close()

    def restart(self) -> None:
        self.kill()
        self._start()

    def close(self) -> None:
        self.kill()
        self.arena.close()


def _text(log: Path) -> str:
    return log.read_text("utf-8", "replace")


def mooncake_package() -> str:
    """Where it is installed; "" where it is not, or cannot run."""
    found = None if mooncake.missing() else importlib.util.find_spec("mooncake")
    return "" if found is None or not found.origin else str(Path(found.origin).parent)


class S3Rig:
    """Moto's server, by HTTP."""

    writes = True
    sealer: Sealer | None = None
    bucket = "kvatlas-test"

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.port = free_ports(1)[0]
        self._start()

    def _start(self) -> None:
        argv = [sys.executable, "-m", "moto.server", "-p", str(self.port)]
        self._server = Server(argv, self.port, self._directory / "s3.log")
        self.client().create_bucket(Bucket=self.bucket)

    def client(self) -> Any:
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=f"http://127.0.0.1:{self.port}",
            aws_access_key_id="key",
            aws_secret_access_key="secret",
            region_name="us-east-1",
        )

    def store(self, port: int, deadline_s: float = 10.0, lost: list[str] | None = None) -> Store:
        settings = s3.Settings(
            self.bucket,
            f"http://127.0.0.1:{port}",
            access_key="key",
            secret_key="secret",
            retries=0,
            threads=4,
            queue_max=1024,
            deadline_s=deadline_s,
        )
        return s3.S3Store(settings, self.sealer)

    def stored(self, name: bytes, data: bytes | None = None) -> bytes:
        """As `ValkeyRig.stored`."""
        client, where = self.client(), {"Bucket": self.bucket, "Key": "kvatlas/" + name.hex()}
        if data is not None:
            client.put_object(**where, Body=data)
        found: bytes = client.get_object(**where)["Body"].read()
        return found

    def put(self, name: bytes, value: bytes, stored: bytes | None = None) -> None:
        head = framing.pack(Piece(name, memoryview(value))) or b""
        body = head + (value if stored is None else stored)
        self.client().put_object(Bucket=self.bucket, Key="kvatlas/" + name.hex(), Body=body)

    def kill(self) -> None:
        self._server.kill()

    def restart(self) -> None:
        self.kill()
        self._start()

    def close(self) -> None:
        self.kill()


def s3_packages() -> bool:
    """Whether client and server are installed."""
    return all(importlib.util.find_spec(name) for name in ("obstore", "moto", "boto3", "flask"))
