"""Two tenants' state on one sealed disk: nothing of it is there in the clear, and when the key of
one is dropped that one's is unreadable and the other's is not.

A real agent is played by what engines' connectors are. It is started without sealing, too, so that
the look for bytes in the clear is seen to find them. Leaves with 1 where something is not so.

    python examples/sealed_at_rest.py
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from purge_under_load import BLOCK, BLOCKS, KVATLAS, PROMPTS, SECRET, TAGS, Player

from kvatlas.connectors.agent_client import ask_status
from kvatlas.connectors.child import Child, free_ports
from kvatlas.service import agent_wire as wire

TOKENS = BLOCKS * BLOCK
WAIT_S = 30.0


class Saver(Player):
    """Remembers how the values begin that it wrote."""

    def __init__(self, path: Path, written: set[bytes]) -> None:
        super().__init__(path)
        self._written = written

    def _copied(self, piece: wire.Piece) -> tuple[bytes, bytes]:
        told = super()._copied(piece)
        channel = self.client._channel
        assert channel is not None, "an order came over it"
        self._written.add(bytes(channel.arena.view(piece.slot)[:64]))
        return told


class Node:
    """An agent with a disk; ``sealed`` with the keys in the folder, or not."""

    def __init__(self, folder: Path, *, sealed: bool) -> None:
        self.disk, self.keys = folder / "disk", folder / "keys"
        self._folder, self._sealed = folder, sealed
        self.written: set[bytes] = set()
        folder.mkdir()
        (folder / "secret").write_text(SECRET)
        (folder / "agent.toml").write_text(f'[keys]\nsecret_file = "{folder / "secret"}"\n')

    @contextmanager
    def running(self) -> Iterator[Saver]:
        """In a life of its own: nothing is in its memory but what it reads."""
        (port,) = free_ports(1)
        options = ("--dram=32MB", f"--disk={self.disk}=64MB", "--prefill-tokens-per-s=10")
        options += (f"--listen={port}", f"--socket={self._folder / 'sock'}")
        options += (f"--config={self._folder / 'agent.toml'}",)
        if self._sealed:
            options += (f"--seal-keys={self.keys}",)
        log = self._folder / "agent.log"
        agent = Child(
            "agent", [*KVATLAS, "agent", *options], log=log, url=f"http://127.0.0.1:{port}"
        )
        agent.start()
        try:
            agent.wait_ready(WAIT_S)
            yield Saver(self._folder / "sock", self.written)
        finally:
            agent.stop()

    def save(self) -> None:
        """Prompts of both tenants, down to the disk."""
        with self.running() as player:
            for prompt in range(PROMPTS):
                for name in TAGS:
                    player.play(name, prompt)
            until = time.monotonic() + WAIT_S
            while json.loads(ask_status(self._folder / "sock"))["busy"]:
                assert time.monotonic() < until, "the agent does not come to rest"
                time.sleep(0.02)

    def loaded(self) -> dict[str, int]:
        """Tokens that each tenant gets after a restart."""
        with self.running() as player:
            return {name: sum(player.play(name, n) for n in range(PROMPTS)) for name in TAGS}

    def in_the_clear(self) -> int:
        """Of the values that were written, those whose first bytes stand in a file of the disk."""
        files = [path.read_bytes() for path in self.disk.iterdir()]
        return sum(any(value in data for data in files) for value in self.written)


def keys(*words: object) -> str:
    """``kvatlas keys``."""
    command = [*KVATLAS, "keys", *map(str, words)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def main() -> int:
    wrong = 0

    def say(right: bool, what: str) -> None:
        nonlocal wrong
        wrong += not right
        print("ok   " if right else "WRONG", what, flush=True)

    everything = PROMPTS * TOKENS
    with tempfile.TemporaryDirectory() as scratch:
        plain = Node(Path(scratch) / "plain", sealed=False)
        plain.save()
        count = plain.in_the_clear()
        say(count == len(plain.written), f"not sealed: {count} values are found on the disk")

        node = Node(Path(scratch) / "sealed", sealed=True)
        print("    ", keys("init", node.keys))
        node.save()
        count = node.in_the_clear()
        say(bool(node.written) and not count, f"sealed: {count} of {len(node.written)} are found")
        found = node.loaded()
        say(found == dict.fromkeys(TAGS, everything), f"after a restart: {found} tokens")

        shutil.copytree(node.keys / "tenants", Path(scratch) / "backup")
        keys("rotate", node.keys)
        found = node.loaded()
        say(found == dict.fromkeys(TAGS, everything), f"with newer keys for both: {found}")

        config = node.keys.parent / "agent.toml"
        print("    ", keys("drop", node.keys, "red", "--config", config))
        # Somebody puts a backup of the keys back: what was dropped stays dropped.
        shutil.copytree(Path(scratch) / "backup", node.keys / "tenants", dirs_exist_ok=True)
        found = node.loaded()
        say(found == {"red": 0, "blue": everything}, f"without the keys of red: {found}")
    print("all as it should be" if not wrong else f"{wrong} things are not as they should be")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
