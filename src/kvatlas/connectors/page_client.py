"""The engine's end of the socket for engines that name their pages themselves.

Several threads of the engine ask at once; one more listens. Nothing raises because of the agent:
where it is slow, dead or new, pages are not there, which is counted, and it is left alone for a
while: at first a second, twice as long each time that it does not answer, eight at most.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from kvatlas.connectors.agent_client import AGAIN_S, HELLO_S, RETRY_S, RETRY_S_MAX, Channel, Refusal
from kvatlas.core.units import Part
from kvatlas.dataplane._copies import scatter
from kvatlas.dataplane.records import checksum_bytes
from kvatlas.errors import EngineError, StoreError
from kvatlas.service import agent_wire as wire

log = logging.getLogger(__name__)

LISTEN_S = 0.2  # how long the end of a connection may go unnoticed here

Answer = wire.Staged | wire.Present | wire.Orders
Box = queue.SimpleQueue[Answer | None]
Parts = Sequence[memoryview]


class Link:
    """A connection and the memory that came with it: both last as long as somebody uses them."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.over = False
        self.sending = threading.Lock()
        self._users = 1  # who listens
        self._lock = threading.Lock()

    def hold(self) -> bool:
        """One more user; False: it is over."""
        with self._lock:
            if not self.over:
                self._users += 1
            return not self.over

    def drop(self) -> None:
        """One less; the last one ends it."""
        with self._lock:
            self._users -= 1
            last = not self._users
        if last:
            self.channel.close()

    def send(self, message: wire.FromEngine) -> None:
        """Raises OSError and EngineError."""
        with self.sending:
            self.channel.send(message)


class Taken:
    """Pages that are verified, and stay where they are until `release`."""

    def __init__(self, client: PageClient, link: Link, staged: wire.Staged) -> None:
        self._client = client
        self._link = link
        self._request = staged.request
        self._pieces = {piece.index: piece for piece in staged.pieces}

    def has(self, index: int) -> bool:
        """Whether this page is there."""
        return index in self._pieces

    def read(self, index: int, at: int, parts: Parts) -> bool:
        """Copy what lies ``at`` bytes into a page to ``parts``; False: it is not there."""
        piece = self._pieces.get(index)
        if piece is None:
            return False
        arena = self._link.channel.arena
        if not arena.current(piece.slot):
            return False
        scatter(arena.view(piece.slot)[at:], parts)
        return arena.current(piece.slot)

    def release(self, *, used: bool) -> None:
        """Nothing of it is read any more."""
        self._client.tell(self._link, wire.Release(self._request, used))
        self._link.drop()


class PageClient:
    """What an engine asks and tells, from any thread."""

    def __init__(self, path: Path, hello: wire.Hello, *, answer_s: float, load_s: float) -> None:
        """Raises Refusal where the agent refuses, EngineError where none answers.

        ``answer_s``: how long an answer may take that needs no bytes; ``load_s``: how long pages.
        """
        self.counts: Counter[str] = Counter()
        self._path = path
        self._hello = hello
        self._answer_s = answer_s
        self._load_s = load_s
        self._lock = threading.Lock()
        self._connecting = threading.Lock()
        self._link: Link | None = None
        self._listener: threading.Thread | None = None
        self._rest_until = 0.0
        self._rest_s = RETRY_S
        self._boxes: dict[str, tuple[Link, Box]] = {}
        self._number = 0
        self._closed = False
        try:
            self._connect(HELLO_S)
        except (OSError, StoreError) as error:
            raise EngineError(
                f"no agent answers at {path}: start `kvatlas agent` first ({error})"
            ) from error

    # -- questions ------------------------------------------------------------------------------

    def look(self, hashes: bytes, first: int, *, each: bool = False) -> wire.Present:
        """Which pages there are from ``first`` on; ``each`` by itself, or in a row."""
        link = self._held()
        if link is None:
            return wire.Present("", 0, ())
        try:
            request = self._name()
            message = wire.Look(request, hashes, first, each)
            answer = self._ask(link, request, message, self._answer_s)
            return answer if isinstance(answer, wire.Present) else wire.Present("", 0, ())
        finally:
            link.drop()

    def take(self, hashes: bytes, first: int, part: Part) -> Taken | None:
        """Make pages ready from ``first`` on, as many as are there; None: none is."""
        link = self._held()
        if link is None:
            return None
        request = self._name()
        message = wire.Take(request, hashes, first, part is Part.POINT, self._load_s)
        answer = self._ask(link, request, message, self._load_s + self._answer_s)
        if isinstance(answer, wire.Staged) and answer.pieces:
            return Taken(self, link, answer)
        link.drop()
        return None

    def give(
        self,
        hashes: bytes,
        first: int,
        points: tuple[int, ...],
        parts_of: Callable[[Part, int], Parts | None],
    ) -> None:
        """Save what the agent wants of these pages; ``parts_of`` a page: where its bytes are."""
        link = self._held()
        if link is None:
            return
        try:
            request = self._name()
            message = wire.Give(request, hashes, first, points)
            answer = self._ask(link, request, message, self._answer_s)
            for order in answer.orders if isinstance(answer, wire.Orders) else ():
                sums = []
                for piece in order.pieces:
                    parts = parts_of(Part(piece.part), piece.index)
                    checksum = self._copy_out(link, piece, parts) if parts is not None else b""
                    if checksum:
                        sums.append((piece.name, checksum))
                self.tell(link, wire.Saved(order.op, tuple(sums)))
        finally:
            link.drop()

    def _copy_out(self, link: Link, piece: wire.Piece, parts: Parts) -> bytes:
        if sum(map(len, parts)) != piece.slot.size_bytes:
            self.count("page_of_another_size")
            return b""
        checksum = link.channel.arena.copy_in(piece.slot, parts)
        return checksum_bytes(checksum) if checksum else b""

    def tell(self, link: Link, message: wire.FromEngine) -> None:
        """What needs no answer; an agent that is gone does not need to hear it."""
        try:
            link.send(message)
        except (OSError, EngineError):
            self._lost(link)

    def count(self, reason: str, number: int = 1) -> None:
        """Something that did not happen, and why."""
        with self._lock:
            self.counts[reason] += number

    def close(self) -> None:
        """Ends the connection."""
        self._closed = True
        with self._lock:
            link, self._link = self._link, None
        if link is not None:
            self.tell(link, wire.Bye())
            self._end(link)
        if self._listener is not None:
            self._listener.join(2 * LISTEN_S)

    # -- the connection -------------------------------------------------------------------------

    def _name(self) -> str:
        with self._lock:
            self._number += 1
            return str(self._number)

    def _connect(self, hello_s: float) -> Link:
        link = Link(Channel(self._path, self._hello, hello_s=hello_s))
        with self._lock:
            self._link = link
        self._listener = threading.Thread(target=self._listen, args=(link,), daemon=True)
        self._listener.start()
        return link

    def _held(self) -> Link | None:
        """The connection, held; None: there is none (yet), or the agent is left alone."""
        with self._connecting:
            link = self._link
            if time.monotonic() >= self._rest_until:
                if link is None and not self._closed:
                    link = self._again()
                if link is not None and link.hold():
                    return link
        self.count("asked_nobody" if link is None or link.over else "agent_rests")
        return None

    def _again(self) -> Link | None:
        """A new connection, where the agent is back and takes us."""
        try:
            # All who ask wait for this: no longer than for an answer.
            return self._connect(min(HELLO_S, max(AGAIN_S, self._answer_s)))
        except Refusal as refusal:
            if not self.counts["refused"]:
                log.warning("the agent at %s refuses: %s", self._path, refusal)
            self.count("refused")
        except (OSError, EngineError, StoreError):
            self.count("no_agent")
        self._leave_alone()
        return None

    def _leave_alone(self) -> None:
        """For a while; what several threads find out at once is one reason for it."""
        with self._lock:
            now = time.monotonic()
            if now >= self._rest_until:
                self._rest_until = now + self._rest_s
                self._rest_s = min(2 * self._rest_s, RETRY_S_MAX)

    def _ask(
        self, link: Link, request: str, message: wire.FromEngine, wait_s: float
    ) -> Answer | None:
        box: Box = queue.SimpleQueue()
        with self._lock:
            self._boxes[request] = link, box
        self.tell(link, message)
        answer = None
        try:
            if not link.over:
                answer = box.get(timeout=wait_s)
        except queue.Empty:
            self.count("answers_late")
            self.tell(link, wire.Cancel(request))
            self._leave_alone()
        with self._lock:
            del self._boxes[request]
            if answer is not None:
                self._rest_s = RETRY_S
        while answer is None and not box.empty():  # it came just now: nobody waits any more
            self._decline(link, box.get())
        return answer

    def _decline(self, link: Link, answer: Answer | None) -> None:
        match answer:
            case wire.Staged():
                self.tell(link, wire.Release(answer.request, False))
            case wire.Orders():
                for order in answer.orders:
                    self.tell(link, wire.Saved(order.op, ()))

    def _listen(self, link: Link) -> None:
        """In a thread of its own, until the connection is over."""
        try:
            while not link.over:
                message = link.channel.receive(time.monotonic() + LISTEN_S)
                if isinstance(message, Answer):
                    with self._lock:
                        _, box = self._boxes.get(message.request, (link, None))
                        if box is not None:
                            box.put(message)
                    if box is None:
                        self._decline(link, message)
                elif message is not None:
                    raise EngineError("the agent said what nobody asked")
        except (OSError, EngineError):
            self._lost(link)
        finally:
            link.drop()

    def _lost(self, link: Link) -> None:
        if not link.over and not self._closed:
            self.count("agent_lost")
            log.warning("the agent at %s is lost: all is computed until it is back", self._path)
            self._leave_alone()
        self._end(link)

    def _end(self, link: Link) -> None:
        with self._lock:
            link.over = True
            if self._link is link:
                self._link = None
            for of, box in self._boxes.values():
                if of is link:
                    box.put(None)
