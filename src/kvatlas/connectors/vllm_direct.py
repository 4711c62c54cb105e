"""A real vLLM engine without its HTTP server: requests go in one by one, events come out exactly.

For validation: after each request it is known how many batches of events the engine published,
and all of them are received before the next one. The engine is `kvatlas.connectors.vllm_inside`,
in a process of vLLM's own virtual environment; its events come over its real ZMQ publisher.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq

from kvatlas.connectors.child import Child
from kvatlas.connectors.vllm_cpu import environment, python_of
from kvatlas.errors import EngineError

ANSWER_S = 300.0  # the first one waits for vLLM's import and the building of the model
EVENT_S = 1.0  # then the missing ones are fetched from the replay socket
_END = b"\xff" * 8


class Asked(msgspec.Struct, frozen=True):
    """One request: token ids, tokens to generate (greedy, no early end), cache salt."""

    prompt: list[int]
    output_tokens: int
    salt: str = ""


class Answered(msgspec.Struct, frozen=True):
    """What the engine said: prompt tokens that it took from its cache, and its output."""

    cached_tokens: int
    output: list[int]


class _Answers(msgspec.Struct):
    answers: list[Answered]
    batches: int


class _Started(msgspec.Struct):
    engine: str
    torch: str
    pid: int


class DirectVllm(Child):
    """Used as a context manager. ``path`` directories go onto the engine's PYTHONPATH."""

    def __init__(self, venv: Path, *, name: str, log: Path, path: Sequence[Path] = ()) -> None:
        # Not beside the log: a Unix socket's path has 107 bytes at most.
        self._sockets = Path(tempfile.gettempdir()) / f"kvatlas-{uuid.uuid4().hex[:12]}"
        self._control = f"ipc://{self._sockets}/control"
        env = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        if path:
            env["PYTHONPATH"] = os.pathsep.join(str(p.absolute()) for p in path)
        script = Path(__file__).with_name("vllm_inside.py")
        argv = [python_of(venv), str(script), self._control]
        super().__init__(name, argv, log=log, env=environment(env))
        self._context = zmq.Context()
        self._asking: zmq.Socket[bytes] | None = None
        self._events: zmq.Socket[bytes] | None = None
        self._life_pid = 0
        self._lives = 0
        self._next = 0  # sequence number of the event batch to come
        self.version = ""

    def __enter__(self) -> DirectVllm:
        self._sockets.mkdir(mode=0o700)
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(grace_s=2.0)

    def ended(self) -> None:
        self._context.destroy(linger=0)
        shutil.rmtree(self._sockets, ignore_errors=True)

    def begin(self, settings: Mapping[str, Any]) -> None:
        """A new life with these arguments of `vllm.LLM`; one that runs is killed first."""
        if self._life_pid:
            os.kill(self._life_pid, signal.SIGKILL)
        for socket in (self._asking, self._events):
            if socket is not None:
                socket.close(linger=0)
        self._asking = self._context.socket(zmq.REQ)
        self._asking.connect(self._control)
        self._lives += 1
        self._next = 0
        # Endpoints of its own: nothing of the life before can be taken for this one's.
        events = f"ipc://{self._sockets}/events-{self._lives}"
        self._events = self._context.socket(zmq.SUB)
        self._events.subscribe(b"")
        self._events.connect(events)
        self._replay = f"ipc://{self._sockets}/replay-{self._lives}"
        wanted = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": events,
            "replay_endpoint": self._replay,
            "topic": "kv",
        }
        answer = self._ask({"do": "start", "settings": {**settings, "events": wanted}})
        started = msgspec.json.decode(answer, type=_Started)
        self._life_pid = started.pid
        self.version = f"{started.engine}, torch {started.torch}"

    def generate(self, requests: Sequence[Asked]) -> tuple[list[Answered], list[tuple[int, bytes]]]:
        """Runs requests together; returns their answers and every batch that it led to, with its
        sequence number, in order."""
        answer = self._ask({"do": "generate", "requests": requests})
        decoded = msgspec.json.decode(answer, type=_Answers)
        return decoded.answers, list(self._received(decoded.batches))

    def clear(self) -> None:
        """Empties the prefix cache; vLLM announces it with its next step."""
        self._ask({"do": "clear"})

    def _ask(self, request: object) -> bytes:
        assert self._asking is not None, "not started"
        self._asking.send(msgspec.json.encode(request))
        deadline = time.monotonic() + ANSWER_S
        while not self._asking.poll(1000):
            self.check()
            if time.monotonic() > deadline:
                raise EngineError(f"{self.name}: no answer in {ANSWER_S:.0f} s; see {self.log}")
        return self._asking.recv()

    def _received(self, end: int) -> list[tuple[int, bytes]]:
        assert self._events is not None
        found: list[tuple[int, bytes]] = []
        while self._next < end and self._events.poll(round(EVENT_S * 1000)):
            _, seq, payload = self._events.recv_multipart()
            number = int.from_bytes(seq, "big")
            if number > self._next:
                break  # one before it was missed: it was published before we had subscribed
            if number == self._next:
                found.append((number, payload))
                self._next += 1
        return found if self._next == end else found + self._replayed(end)

    def _replayed(self, end: int) -> list[tuple[int, bytes]]:
        socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        found: list[tuple[int, bytes]] = []
        try:
            socket.connect(self._replay)
            socket.send_multipart([b"", self._next.to_bytes(8, "big")])
            while socket.poll(5000):
                _, _, seq, payload = socket.recv_multipart()
                if seq == _END:
                    break
                number = int.from_bytes(seq, "big")
                if number == self._next < end:
                    found.append((number, payload))
                    self._next += 1
        finally:
            socket.close(linger=0)
        if self._next != end:
            raise EngineError(f"{self.name}: event batches {self._next} to {end} did not come")
        return found
