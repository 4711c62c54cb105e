"""A Valkey Cluster of three primaries and three replicas, on free ports."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path
from typing import Any

from stores_kit import Server, start_valkey, wait_until
from valkey import Valkey
from valkey.crc import key_slot
from valkey.exceptions import ValkeyError

from kvatlas.connectors.child import free_ports
from kvatlas.service.register_calls import slot_key

SHARDS = 3
SLOTS = 16_384
NODE_TIMEOUT_MS = 1000


class Cluster:
    """Formed when it is there."""

    def __init__(self, folder: Path) -> None:
        ports = free_ports(4 * SHARDS)
        self.ports, buses = ports[: 2 * SHARDS], ports[2 * SHARDS :]
        self._buses = dict(zip(self.ports, buses, strict=True))
        self._folder = folder
        self.servers: dict[int, Server] = {}
        with contextlib.ExitStack() as stack:
            stack.callback(self.close)
            for port in self.ports:
                self.start(port)
            self._form()
            stack.pop_all()

    @property
    def url(self) -> str:
        """With two of its servers: the others are learnt."""
        hosts = ",".join(f"127.0.0.1:{port}" for port in self.ports[1::3])
        return f"valkey-cluster://{hosts}"

    def start(self, port: int) -> None:
        folder = self._folder / str(port)
        folder.mkdir(exist_ok=True)
        options = {
            "cluster-enabled": "yes",
            "cluster-port": str(self._buses[port]),
            "cluster-node-timeout": str(NODE_TIMEOUT_MS),
            "repl-diskless-sync-delay": "0",
            "cluster-replica-validity-factor": "0",
        }
        words = [word for key, value in options.items() for word in (f"--{key}", value)]
        self.servers[port] = start_valkey(folder, *words, port=port)

    def close(self) -> None:
        for server in self.servers.values():
            server.process.send_signal(signal.SIGCONT)
            server.kill()

    def ask(self, port: int, *words: str | int) -> Any:
        with Valkey(port=port) as client:
            return client.execute_command(*words)

    def primary(self, name: str) -> int:
        """The port of the server that has the register of this name, as most say."""
        slot = key_slot(slot_key(name).encode())
        said = []
        for port in self.ports:
            with contextlib.suppress(ValkeyError), Valkey(port=port, socket_timeout=1) as client:
                for first, last, primary, *_ in client.execute_command("CLUSTER SLOTS"):
                    if first <= slot <= last:
                        said.append(int(primary[1]))
        return max(set(said), key=said.count)

    def replica(self, primary: int) -> int:
        """The port of the one that follows it."""
        found = self._info(primary)["slave0"]
        return int(found["port"])

    def copied(self, primary: int) -> None:
        """Until its replica has all that it has."""
        wait_until(
            lambda: (
                self._info(primary)["slave0"]["offset"] == self._info(primary)["master_repl_offset"]
            )
        )

    def whole(self) -> None:
        """Until each of its servers thinks that all is well, and each primary has its replica."""
        wait_until(lambda: all(self._well(port) for port in self.ports))

    def _well(self, port: int) -> bool:
        info = self._info(port)
        linked = info.get("master_link_status") == "up" or bool(info.get("connected_slaves"))
        return linked and self.ask(port, "CLUSTER INFO")["cluster_state"] == "ok"

    def _info(self, port: int) -> dict[str, Any]:
        with Valkey(port=port) as client:
            return client.info("replication")  # type: ignore[no-any-return]

    def _form(self) -> None:
        first, primaries = self.ports[0], self.ports[:SHARDS]
        for index, port in enumerate(primaries):
            begin, end = (SLOTS * at // SHARDS for at in (index, index + 1))
            self.ask(port, "CLUSTER ADDSLOTSRANGE", begin, end - 1)
            self.ask(port, "CLUSTER SET-CONFIG-EPOCH", index + 1)
        for port in self.ports[1:]:
            self.ask(first, "CLUSTER MEET", "127.0.0.1", port, self._buses[port])
        wait_until(
            lambda: all(
                self.ask(port, "CLUSTER INFO")["cluster_known_nodes"] == str(2 * SHARDS)
                for port in self.ports
            )
        )
        for port, primary in zip(self.ports[SHARDS:], primaries, strict=True):
            self.ask(port, "CLUSTER REPLICATE", self.ask(primary, "CLUSTER MYID").decode())
        self.whole()
