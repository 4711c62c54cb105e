"""The engine's end of the socket to its node's agent: in the engine's process, so it is light.

Nothing here waits longer than a few milliseconds, and nothing raises because of the agent: an
engine whose agent is slow, dead or new computes, and tries again later.
"""

from __future__ import annotations

import logging
import math
import os
import select
import socket
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from kvatlas.dataplane.arena import Arena
from kvatlas.errors import EngineError, StoreError
from kvatlas.service import agent_wire as wire

log = logging.getLogger(__name__)

HELLO_S = 5.0
AGAIN_S = 0.25  # the same, while an engine's step waits for it
SEND_S = 1.0
RETRY_S = 1.0
RETRY_S_MAX = 8.0
SEND_BYTES = 1 << 20  # as far as the system allows

Seconds = Annotated[float, msgspec.Meta(ge=0)]


class Settings(msgspec.Struct, frozen=True):
    """What an operator may say to an engine's connector: see docs/guides/tiers.md."""

    socket: str
    load_deadline_s: Seconds
    answer_s: Seconds
    weights_digest: str
    name: str


def settings_of(given: Mapping[str, Any], *, answer_s: float) -> Settings:
    """With the rest as it is where nothing is said. Raises EngineError for what is unknown or
    cannot be: a slip in ``weights_digest`` would share state between different weights."""
    if unknown := sorted(given.keys() - set(Settings.__struct_fields__)):
        raise EngineError(f"kvatlas: the connector has no setting {', '.join(unknown)}")
    if not given.get("socket"):
        raise EngineError("kvatlas: the connector's configuration needs the agent's socket")
    values = {
        "load_deadline_s": 10.0,
        "answer_s": answer_s,
        "weights_digest": "",
        "name": f"{socket.gethostname()}-{os.getpid()}",
    } | {name: value for name, value in given.items() if value != ""}
    try:
        return msgspec.convert(values, Settings, strict=False)
    except msgspec.ValidationError as error:
        raise EngineError(f"kvatlas: the connector's configuration: {error}") from error


class Refusal(EngineError):
    """The agent will not serve this engine, and says why."""


class Channel:
    """One connection. Raises OSError and EngineError; who uses it lets go of it then."""

    def __init__(
        self, path: Path, hello: wire.Hello | wire.Map, *, hello_s: float = HELLO_S
    ) -> None:
        """Connects and is welcomed. Raises Refusal where the agent refuses."""
        self._frames = wire.Frames()
        self._got: list[bytes] = []
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._sock.settimeout(hello_s)
            # A long prompt goes over in one: each time that the room is full, both wait in turn.
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
            self._sock.connect(str(path))
            self._sock.sendall(wire.frame(hello))
            self.welcome, fd = self._welcomed()
        except BaseException:
            self._sock.close()
            raise
        try:
            self.arena = Arena.open(fd)
        except StoreError:
            self._sock.close()
            raise
        finally:
            os.close(fd)
        self._sock.settimeout(SEND_S)
        self._poll = select.poll()  # select(2) raises in an engine with many open files
        self._poll.register(self._sock, select.POLLIN)

    def _welcomed(self) -> tuple[wire.Welcome, int]:
        data, fds, _, _ = socket.recv_fds(self._sock, wire.READ_BYTES, 1)
        fd = fds[0] if fds else -1
        try:
            while True:
                self._got += self._frames.add(data)
                if self._got:
                    break
                if not data:
                    raise EngineError("the agent closed the connection")
                data = self._sock.recv(wire.READ_BYTES)
            answer = wire.from_agent(self._got.pop(0))
            if isinstance(answer, wire.Refused):
                raise Refusal(answer.why)
            if not isinstance(answer, wire.Welcome) or fd < 0:
                raise EngineError("the agent did not hand over its memory")
        except BaseException:
            if fd >= 0:
                os.close(fd)
            raise
        return answer, fd

    def send(self, message: wire.FromEngine) -> None:
        """Raises OSError where the agent does not read."""
        self._sock.sendall(wire.frame(message))

    def receive(self, until: float) -> wire.FromAgent | None:
        """The next message, waiting for it until then; None: none has come."""
        while not self._got:
            left_s = max(0.0, until - time.monotonic())
            if not self._poll.poll(math.ceil(left_s * 1000)):
                return None
            data = self._sock.recv(wire.READ_BYTES)
            if not data:
                raise EngineError("the agent has ended")
            self._got += self._frames.add(data)
        return wire.from_agent(self._got.pop(0))

    def close(self) -> None:
        """The agent takes back what it held for us."""
        self._sock.close()
        self.arena.close()


class AgentClient:
    """What the deciding side of an engine asks and tells. For one thread."""

    def __init__(self, path: Path, hello: wire.Hello, *, answer_s: float = 0.05) -> None:
        """``answer_s``: how long a step of the engine may wait for an answer. Raises Refusal."""
        self.counts: Counter[str] = Counter()
        self._path = path
        self._hello = hello
        self._answer_s = answer_s
        self._channel: Channel | None = None
        self._described: wire.Welcome | None = None  # as at the start
        self._retry = 0.0
        self._wait_s = RETRY_S
        self._sent: dict[str, int] = {}
        self._staged: dict[str, wire.Staged] = {}
        self._wanted: dict[str, float] = {}  # until when
        self._quiet_until = 0.0
        self._connect()

    # -- the connection -------------------------------------------------------------------------

    @property
    def welcome(self) -> wire.Welcome | None:
        """Of the agent as it is now; None: there is none."""
        return self._channel.welcome if self._channel is not None else None

    @property
    def life(self) -> str:
        """The name of its memory; "": there is no agent."""
        channel = self._open()
        return channel.welcome.arena if channel is not None else ""

    def _connect(self) -> None:
        hello_s = HELLO_S if self._described is None else max(AGAIN_S, self._answer_s)
        try:
            channel = Channel(self._path, self._hello, hello_s=hello_s)
            described = msgspec.structs.replace(channel.welcome, arena="")
            if self._described not in (None, described):
                channel.close()
                raise Refusal("it describes this engine's state otherwise than the agent before it")
            self._described = described
            self._channel = channel
            self._wait_s = RETRY_S
        except Refusal:
            raise
        except (OSError, EngineError, StoreError):
            self.counts["no_agent"] += 1
        finally:
            self._retry = time.monotonic() + self._wait_s
            if self._channel is None:
                self._wait_s = min(2 * self._wait_s, RETRY_S_MAX)

    def _open(self) -> Channel | None:
        if self._channel is None and time.monotonic() >= self._retry:
            try:
                self._connect()
            except Refusal as refusal:  # at the start that ends the engine; later it goes on alone
                if not self.counts["refused"]:
                    log.warning("the agent at %s refuses this engine: %s", self._path, refusal)
                self.counts["refused"] += 1
        return self._channel

    def _lost(self) -> None:
        """It, and all that it held for us: what was staged is not used any more."""
        self.counts["agent_lost"] += 1
        log.warning("the agent at %s is lost: all is computed until it is back", self._path)
        if self._channel is not None:
            self._channel.close()
        self._channel = None
        self._sent.clear()
        self._staged.clear()
        self._wanted.clear()

    def _send(self, message: wire.FromEngine) -> bool:
        channel = self._open()
        if channel is None:
            return False
        try:
            channel.send(message)
        except (OSError, EngineError):
            self._lost()
            return False
        return True

    def _pump(self, wait_s: float, request: str = "") -> wire.Orders | None:
        """Take in what has come; with ``request`` wait for its orders, else for anything."""
        until = time.monotonic() + wait_s
        while self._channel is not None:
            try:
                message = self._channel.receive(until)
            except (OSError, EngineError):
                self._lost()
                return None
            match message:
                case None:
                    return None
                case wire.Staged():
                    self._arrived(message)
                    if not request:
                        until = 0.0
                case wire.Orders() if message.request == request:
                    return message
                case wire.Orders():
                    self._decline(message)
                case _:
                    self.counts["unexpected"] += 1
        return None

    def _arrived(self, staged: wire.Staged) -> None:
        if staged.request in self._wanted:
            del self._wanted[staged.request]
            self._staged[staged.request] = staged
        else:
            self._send(wire.Release(staged.request, False))

    def _decline(self, orders: wire.Orders) -> None:
        """They came after their step: nothing of them is copied."""
        for order in orders.orders:
            self.counts["orders_late"] += 1
            self._send(wire.Saved(order.op, ()))

    # -- loads ----------------------------------------------------------------------------------

    def want(
        self,
        request: str,
        tokens: bytes,
        local_tokens: int,
        deadline_s: float,
        *,
        scope: str = "",
        adapter: str = "",
    ) -> bool:
        """Ask how far this prompt can be resumed; False: there is nobody to ask."""
        self.release(request, used=False)
        asked = wire.Want(request, tokens, local_tokens, deadline_s, scope, adapter)
        if not self._send(asked):
            return False
        self._wanted[request] = time.monotonic() + deadline_s
        self._sent[request] = len(tokens) // 4
        self._pump(self._answer_s)
        return self._channel is not None

    def staged(self, request: str) -> wire.Staged | None:
        """The answer, once it is there."""
        if request not in self._staged:
            self._pump(0.0)
        return self._staged.get(request)

    def waits(self, request: str) -> bool:
        """Whether an answer is still to come, and in time."""
        until = self._wanted.get(request)
        if until is not None and time.monotonic() > until:
            self.counts["loads_late"] += 1
            self.cancel(request)
        return request in self._wanted

    def cancel(self, request: str) -> None:
        """Do without."""
        if request in self._wanted:
            del self._wanted[request]
            self._send(wire.Cancel(request))

    def release(self, request: str, *, used: bool) -> None:
        """What was staged is read no more."""
        if self._staged.pop(request, None) is not None:
            self._send(wire.Release(request, used))

    # -- saves ----------------------------------------------------------------------------------

    def filled(self, message: wire.Filled, tokens: memoryview) -> tuple[wire.Order, ...]:
        """What to save of it in this step; ``tokens``: all ids of the request so far."""
        since = self._sent.get(message.request)
        if since is None or time.monotonic() < self._quiet_until:
            return ()
        new = bytes(tokens[since * 4 :])
        told = wire.Filled(
            message.request,
            since,
            new,
            message.blocks,
            message.points,
            message.resumed_tokens,
            message.prompt_tokens,
        )
        if not self._send(told):
            return ()
        self._sent[message.request] = since + len(new) // 4
        orders = self._pump(self._answer_s, message.request)
        if orders is None:
            self.counts["orders_missed"] += 1
            self._quiet_until = time.monotonic() + RETRY_S  # do not hold every step up
            return ()
        if not orders.known:
            self._sent.pop(message.request, None)
        return orders.orders

    def saved(self, op: int, sums: tuple[tuple[bytes, bytes], ...]) -> None:
        """An order was carried out."""
        self._send(wire.Saved(op, sums))

    def end(self, request: str) -> None:
        """A request is over."""
        self.cancel(request)
        self._staged.pop(request, None)
        if self._sent.pop(request, None) is not None:
            self._send(wire.End(request))

    def close(self) -> None:
        """Ends the connection: nothing of the arena is touched any more."""
        if self._channel is not None:  # with nobody there is nothing to end
            self._send(wire.Bye())
        if self._channel is not None:
            self._channel.close()
            self._channel = None


def ask_status(path: Path) -> bytes:
    """What the agent at ``path`` says of itself, as JSON. Raises EngineError and OSError."""
    return ask(path, wire.AskStatus())


def ask(path: Path, message: wire.FromOperator | wire.AskStatus) -> bytes:
    """What it answers to ``message``, as JSON. Raises Refusal, and else EngineError and OSError."""
    channel = Channel(path, wire.Map(wire.VERSION))
    try:
        channel.send(message)
        answer = channel.receive(time.monotonic() + HELLO_S)
        if isinstance(answer, wire.Refused):
            raise Refusal(answer.why)
        if not isinstance(answer, wire.Status):
            raise EngineError(f"{path}: no answer from the agent")
        return answer.json
    finally:
        channel.close()
