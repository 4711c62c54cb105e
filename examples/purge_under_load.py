"""A tenant is purged while it and another one are served, and nothing of it is left.

Two nodes with memory and disk that read from each other, a gateway, stub engines; everything is a
process of its own. Requests go through the gateway, and players at the agents' sockets save and
load state of both tenants all the while. Then: `kvatlas tenant purge red`, its receipt, and a look
at the media that owes the receipt nothing. Leaves with 1 where something of red is found.

    python examples/purge_under_load.py [--receipt FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from array import array
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import xxhash

from kvatlas.config_tenants import digest_of
from kvatlas.connectors.agent_client import AgentClient
from kvatlas.connectors.child import Child, free_ports
from kvatlas.core.keys import Keyring
from kvatlas.core.tenancy import TenantSalt, epoch_at, salt_of, tag_of
from kvatlas.errors import EngineError, StoreError
from kvatlas.service import agent_wire as wire

KVATLAS = (sys.executable, "-m", "kvatlas")
MODEL = "stub"
BLOCK, BLOCKS, PROMPTS = 32, 6, 8
LOAD_S = 1.0  # before the purge, and after it
SECRET, TOKEN = "5ec7" * 16, "token of an operator"
RING = Keyring(SECRET.encode())
KEYS = {"red": "key of red", "blue": "key of blue"}
TAGS = {name: tag_of(RING, name) for name in KEYS}


def salt(name: str, epoch: int = 0) -> str:
    """What engines get with requests of a tenant."""
    return salt_of(RING, TenantSalt(TAGS[name], epoch_at(epoch, 0.0, 0.0)))


class Player:
    """Saves and loads prompts at one agent's socket, as an engine's connector does."""

    def __init__(self, path: Path) -> None:
        config = resources.files("kvatlas.validate").joinpath("configs/gqa.json").read_bytes()
        told = ("tiny",), config, "vllm", "0.32.0", "auto", BLOCK
        self.client = AgentClient(path, wire.Hello(wire.VERSION, "tiny", *told), answer_s=20.0)
        self._number = 0

    def play(self, name: str, prompt: int, epoch: int = 0) -> int:
        """One request; how many tokens of it came from the tiers."""
        self._number += 1
        request, client = f"{name} {self._number}", self.client
        tokens = array("I", [prompt * 1000 + i for i in range(BLOCKS * BLOCK + 5)]).tobytes()
        if not client.want(request, tokens, 0, 20.0, scope=salt(name, epoch)):
            return 0
        while (staged := client.staged(request)) is None:
            if not client.waits(request):
                return 0
            time.sleep(0.001)
        client.release(request, used=True)
        filled = wire.Filled(request, 0, b"", BLOCKS, (), 0, len(tokens) // 4)
        for order in client.filled(filled, memoryview(tokens)):
            client.saved(order.op, tuple(map(self._copied, order.pieces)))
        client.end(request)
        return staged.tokens

    def _copied(self, piece: wire.Piece) -> tuple[bytes, bytes]:
        channel = self.client._channel
        assert channel is not None, "an order came over it"
        view = channel.arena.view(piece.slot)
        view[:] = (xxhash.xxh3_128_digest(piece.name) * (len(view) // 16 + 1))[: len(view)]
        return piece.name, xxhash.xxh3_128_intdigest(view).to_bytes(16, "big")


class Cluster:
    """Everything, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "kvatlas.toml"
        gateway, *rest = free_ports(7)
        self.url = f"http://127.0.0.1:{gateway}"
        self.nodes = [folder / "one", folder / "two"]
        engines, pages, peers = rest[:2], rest[2:4], rest[4:]
        (folder / "secret").write_text(SECRET)
        (folder / "tenants.toml").write_text(
            "".join(
                f'[[tenant]]\nname = "{name}"\nkeys = ["{digest_of(key)}"]\n'
                for name, key in KEYS.items()
            )
        )
        (folder / "tokens").write_text(f"operator change {digest_of(TOKEN)}\n")
        keys = f'[keys]\nsecret_file = "{folder / "secret"}"\n'
        (folder / "agent.toml").write_text(keys)
        self.config.write_text(
            f'[admin]\ntokens_file = "{folder / "tokens"}"\n'
            f"[gateway]\nport = {gateway}\n{keys}"
            f'[tenants]\nfile = "{folder / "tenants.toml"}"\nreceipts = "{folder / "receipts"}"\n'
            f'[router]\ndecision_log = "{folder / "decisions.jsonl"}"\n'
            f'recording = "{folder / "recording"}"\n'
            + "".join(
                f'[[worker]]\nname = "at-{node.name}"\nurl = "http://127.0.0.1:{engine}"\n'
                f'[[agent]]\nname = "{node.name}"\nurl = "http://127.0.0.1:{port}"\n'
                f'workers = ["at-{node.name}"]\n'
                for node, engine, port in zip(self.nodes, engines, pages, strict=True)
            )
        )
        fast = "--time-scale", "0.01", "--model-name", MODEL
        self.children = [
            *(self._child("stub-engine", port, "--port", str(port), *fast) for port in engines),
            *(
                self._child(
                    "agent",
                    pages[i],
                    f"--listen={pages[i]}",
                    f"--socket={node / 'sock'}",
                    "--dram=32MB",
                    f"--disk={node / 'disk'}=64MB",
                    f"--config={folder / 'agent.toml'}",
                    f"--serve-peers=127.0.0.1:{peers[i]}",
                    f"--peer=127.0.0.1:{peers[1 - i]}",
                    "--prefill-tokens-per-s=10",
                )
                for i, node in enumerate(self.nodes)
            ),
            self._child("serve", gateway, "--config", str(self.config), health="/ready"),
        ]

    def _child(self, what: str, port: int, *options: str, health: str = "/health") -> Child:
        log, url = self.folder / f"{what}-{port}.log", f"http://127.0.0.1:{port}"
        return Child(what, [*KVATLAS, what, *options], log=log, url=url, health=health)

    def __enter__(self) -> Cluster:
        for node in self.nodes:
            node.mkdir()
        try:
            for child in self.children[:-1]:
                child.start()
            for child in self.children[:-1]:
                child.wait_ready(20.0)
            self.children[-1].start()
            self.children[-1].wait_ready(20.0)
            self.wait_for(len(self.nodes))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for child in reversed(self.children):
            child.stop()

    def wait_for(self, agents: int) -> None:
        """Until the gateway hears from so many. Raises TimeoutError."""
        page = urllib.request.Request(f"{self.url}/kvatlas/agents")
        page.add_header("x-kvatlas-admin-token", TOKEN)
        until = time.monotonic() + 20.0
        while True:
            with urllib.request.urlopen(page, timeout=20) as answer:
                if sum(node["up"] for node in json.load(answer).values()) == agents:
                    return
            if time.monotonic() > until:
                raise TimeoutError(f"the gateway does not hear from {agents} agents")
            time.sleep(0.05)

    def ask(self, name: str) -> None:
        """One request of a client through the gateway."""
        body = json.dumps({"model": MODEL, "prompt": f"what {name} asks " * 40, "max_tokens": 2})
        headers = {"content-type": "application/json", "authorization": f"Bearer {KEYS[name]}"}
        asked = urllib.request.Request(f"{self.url}/v1/completions", body.encode(), headers)
        with contextlib.suppress(urllib.error.HTTPError):
            urllib.request.urlopen(asked, timeout=20).close()

    def found(self, tag: str) -> dict[str, int]:
        """How often an owner's name stands in any file, receipts and settings apart."""
        names = [*(self.folder.glob("decisions*")), *(self.folder.glob("recording*"))]
        names += [path for node in self.nodes for path in (node / "disk").iterdir()]
        counts = {
            str(p.relative_to(self.folder)): p.read_bytes().count(tag.encode()) for p in names
        }
        return {name: count for name, count in counts.items() if count}


def loaded(
    cluster: Cluster, players: list[Player], over: threading.Event
) -> list[threading.Thread]:
    """Both tenants, at both nodes and through the gateway, until it is over."""

    def keep(act: Callable[[int], object]) -> None:
        number = 0
        while not over.is_set():
            with contextlib.suppress(EngineError, StoreError, OSError):
                act(number)
            number += 1

    acts: list[Callable[[int], object]] = [
        *(lambda n, p=p: p.play(("red", "blue")[n % 2], n // 2 % PROMPTS) for p in players),
        lambda n: cluster.ask(("red", "blue")[n % 2]),
    ]
    threads = [threading.Thread(target=keep, args=(act,)) for act in acts]
    for thread in threads:
        thread.start()
    return threads


def main() -> int:
    parser = argparse.ArgumentParser(description="Purge a tenant under load.")
    parser.add_argument("--receipt", type=Path, metavar="FILE", help="keep the receipt here")
    kept = parser.parse_args().receipt
    with (
        tempfile.TemporaryDirectory(prefix="kvatlas-") as scratch,
        Cluster(Path(scratch)) as cluster,
    ):
        players = [Player(node / "sock") for node in cluster.nodes]
        over = threading.Event()
        threads = loaded(cluster, players, over)
        try:
            time.sleep(LOAD_S)
            old = f"{TAGS['red']}.0"
            before = cluster.found(old)
            receipt = kept or cluster.folder / "receipt.json"
            env = os.environ | {"KVATLAS_ADMIN_TOKEN": TOKEN}
            options = "--config", str(cluster.config), "--url", cluster.url
            purge = (*KVATLAS, "tenant", "purge", "red", *options, "--output", str(receipt))
            status = subprocess.run(purge, check=False, env=env).returncode
            time.sleep(LOAD_S)  # red goes on, with salts from before, and is served nothing of it
            left = cluster.found(old)
            verify = (*KVATLAS, "tenant", "receipt", "verify", str(receipt), *options[:2])
            status = (
                status or subprocess.run(verify, check=False, stdout=subprocess.DEVNULL).returncode
            )
        finally:
            over.set()
            for thread in threads:
                thread.join()
        again = sum(player.play("red", prompt) for player in players for prompt in range(PROMPTS))
        others = sum(player.play("blue", prompt) for player in players for prompt in range(PROMPTS))
        for player in players:
            player.client.close()
    print(f"red stood in {sum(before.values())} places of {len(before)} files; now in {left or 0}")
    print(f"tokens found again: {again} of red, {others} of blue")
    failed = bool(status or not before or left or again or not others)
    print("something is left, or nothing was shown" if failed else "nothing of red is left")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
