"""Another agent's dram, read from its slots into ours: by NIXL (`peer_nixl`) where both sides can
and it pays, else over TCP, which is here.

A connection begins with a greeting in which both sides prove that they know the cluster's token
and the server tells its life: a restarted peer holds nothing of what was known of it. Then:
requests of up to `NAMES_MAX` names (msgpack after a length), answered in parts: how many names this
one is for, a label for each (see `framing`), the bytes of all that are there as they lie in their
slots, then a byte for each that says whether its slot was still the same when the last byte had
left: one that was recycled meanwhile is a miss.

Before it reads, a reader asks which of some names there are: the agent answers for what may be
read, and keeps that for a while (`core.agent_values.Lend`).

Reading only: a peer's dram is written by its own agent, which can be asked to pull.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from itertools import islice

import msgspec

from kvatlas.core.records import Tier
from kvatlas.dataplane.records import Label
from kvatlas.dataplane.tiers import framing, peer_nixl, peer_tls, peer_wire
from kvatlas.dataplane.tiers.base import (
    Counts,
    Entry,
    Finish,
    Life,
    Piece,
    asked,
    checksum_of,
)
from kvatlas.dataplane.tiers.dram import DramStore, Unit
from kvatlas.dataplane.tiers.framing import HEADER_BYTES, Verdict
from kvatlas.dataplane.tiers.moved import Moved
from kvatlas.dataplane.tiers.nixl import Nixl
from kvatlas.dataplane.tiers.peer_wire import (
    LENGTH,
    MISSED,
    NAMES_MAX,
    SAME,
    Request,
    ask,
    bulk,
    exactly,
)
from kvatlas.dataplane.tiers.runs import Outcome, Refused, Runs
from kvatlas.dataplane.tiers.sockets import Address, Stream
from kvatlas.dataplane.tls import Trust
from kvatlas.errors import ConfigError, StoreError

RUN_BYTES = 64 << 20
PART_NAMES = 64
PART_BYTES = 8 << 20  # of an answer, about: so much is pinned at once for one reader
MAGIC = b"KVAP\4\0\0\0"
_LIFE_BYTES = _NONCE_BYTES = _PROOF_BYTES = 16
_MISSING = b"\0" * HEADER_BYTES
_SERVER = b"server"  # before its nonce: nobody gets its proof by asking for ours


class PeerServer:
    """Lets others read an agent's dram; a thread per connection, at most ``connections_max``.

    ``send_s``: how long one answer may take; ``idle_s``: how long a connection may be silent.
    """

    def __init__(
        self,
        dram: DramStore,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: bytes = b"",
        connections_max: int = 64,
        send_s: float = 10.0,
        idle_s: float = 300.0,
        lend: Callable[[Sequence[bytes]], Collection[bytes]] | None = None,
        nixl: Nixl | None = None,
        trust: Trust | None = None,
    ) -> None:
        """Listens from now on. ``lend`` says which of some names may be read, from any thread;
        without it all that is there may. ``nixl``: of this arena; it is closed with this. Raises
        ConfigError where it cannot."""
        if connections_max < 1 or not 0 < send_s < 86400 or not 0 < idle_s < 86400:
            raise ConfigError("peer: connections_max, send_s and idle_s must be above zero")
        self.counts = Counts()
        self.life = os.urandom(_LIFE_BYTES)
        self._dram = dram
        self._token = token
        self._lend = lend or self._there
        self._nixl = nixl
        self._lender = peer_nixl.Lender(dram, nixl, _label_of, self.counts)
        self._limits = (connections_max, send_s, idle_s)
        self._trust = trust
        self.plain = _plain(trust)
        self._lock = threading.Lock()
        self._links: dict[Stream, threading.Thread] = {}
        self._closed = False
        try:
            self._listener = socket.create_server((host, port), backlog=128)
        except OSError as error:
            if nixl is not None:
                nixl.close()
            raise ConfigError(f"peer: cannot listen on {host}:{port}: {error}") from error
        self.address = Address(host, self._listener.getsockname()[1])
        self._accepting = threading.Thread(
            target=self._accept, name="kvatlas-peer-accept", daemon=True
        )
        self._accepting.start()

    @property
    def nixl(self) -> str:
        """Whether others may read by NIXL now."""
        if self._nixl is None:
            return "off"
        return "on" if self._nixl.ready() is not None else "starting"

    def close(self) -> None:
        """Ends all connections; nothing is held afterwards."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            links = dict(self._links)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        for link in links:
            link.abort()
        for thread in (self._accepting, *links.values()):
            thread.join(self._limits[1] + 1)
        if self._nixl is not None:
            self._nixl.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                self.counts.add("accept_failed")  # no descriptor is left, say
                time.sleep(0.05)
                continue
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link = Stream(sock, time.monotonic() + self._limits[1])
            with self._lock:
                full = self._closed or len(self._links) >= self._limits[0]
                if not full:
                    thread = threading.Thread(
                        target=self._serve, args=(link,), name="kvatlas-peer", daemon=True
                    )
                    self._links[link] = thread
                    thread.start()
            if full:
                self.counts.add("refused_connections")
                link.close()

    def _serve(self, link: Stream) -> None:
        try:
            if self._trust is not None:
                link.secure(partial(peer_tls.proved, self._trust, self.counts))
            self._greet(link)
            while True:
                link.until = time.monotonic() + self._limits[2]
                request = peer_wire.request(link)
                link.until = time.monotonic() + self._limits[1]
                if request.suspect:
                    self._look_at(request.names)
                    link.send([SAME])
                elif request.find:
                    lent = self._lend(request.names)
                    link.send([b"".join(SAME if n in lent else MISSED for n in request.names)])
                elif request.loan is not None:
                    self._lender.serve(link, request)
                elif request.names:
                    last = b""
                    while request.names:
                        last = self._answer(link, request.names, last)
                        link.until = time.monotonic() + self._limits[1]
                    link.send([last])
                else:
                    self._list(link, request.start)
        except TimeoutError:
            self.counts.add("connections_slow")
        except OSError:
            self.counts.add("connections_gone")
        except (ValueError, msgspec.MsgspecError):
            self.counts.add("connections_garbled")
        except Exception:  # ours; this connection ends, the counter tells
            self.counts.add("connections_fault")
        finally:
            with self._lock:
                self._links.pop(link, None)
            link.close()

    def _greet(self, link: Stream) -> None:
        nonce = os.urandom(_NONCE_BYTES)
        link.send([MAGIC, self.life, nonce])
        said = bytearray(len(MAGIC) + _PROOF_BYTES + _NONCE_BYTES)
        link.fill(memoryview(said))
        proof, asked_for = bytes(said[:-_NONCE_BYTES]), bytes(said[-_NONCE_BYTES:])
        if not hmac.compare_digest(proof, MAGIC + _proof(self._token, nonce)):
            self.counts.add("denied")
            raise ValueError("the reader does not know the token")
        link.send([_proof(self._token, _SERVER + asked_for)])

    def _answer(self, link: Stream, names: list[bytes], last: bytes) -> bytes:
        """Takes the first of ``names`` and sends ``last``, the word on the part before, and this
        part; says the word on it, which goes out with the next one: a small packet of its own
        would wake the reader for it."""
        arena = self._dram.arena
        units: list[Unit | None] = []
        try:
            views: list[memoryview] = []
            heads: list[bytes] = []
            while len(units) < min(len(names), PART_NAMES) and sum(map(len, views)) < PART_BYTES:
                name = names[len(units)]
                units.append(unit := self._dram.pin(name))
                if unit is None:
                    heads.append(_MISSING)
                    continue
                views.append(arena.view(unit.slot))
                heads.append(_label_of(name, unit, views[-1]))
            # sendmsg has copied all bytes when it returns: what is current then was sent whole.
            link.send([last, LENGTH.pack(len(units)), *heads, *views])
            same = [unit is not None and arena.current(unit.slot) for unit in units]
        finally:
            for unit in units:
                if unit is not None:
                    self._dram.unpin(unit.slot)
        del names[: len(units)]
        for unit, ok in zip(units, same, strict=True):
            self.counts.add("missing" if unit is None else "sent" if ok else "recycled")
        return b"".join(SAME if ok else MISSED for ok in same)

    def _there(self, names: Sequence[bytes]) -> Collection[bytes]:
        return {name for name in names if self._dram.has([name])}

    def _look_at(self, names: list[bytes]) -> None:
        """A reader found them wrong: where they are wrong here they go, else it was the way."""
        for name in names:
            unit = self._dram.pin(name)
            if unit is None:
                continue
            try:
                wrong = checksum_of(self._dram.arena.view(unit.slot)) != unit.checksum
            finally:
                self._dram.unpin(unit.slot)
            self.counts.add("quarantined" if unit.checksum and wrong else "suspected")
            if unit.checksum and wrong:
                self._dram.delete([name])

    def _list(self, link: Stream, start: int) -> None:
        part = islice(self._dram.scan(), start, start + NAMES_MAX)
        data = msgspec.msgpack.encode([framing.labelled(entry) for entry in part])
        link.send([LENGTH.pack(len(data)), data])


class Settings(msgspec.Struct, frozen=True):
    """Which peer, and how."""

    host: str
    port: int
    token: bytes = b""
    streams: int = 2
    queue_max: int = 1024
    deadline_s: float = 10.0

    def __post_init__(self) -> None:
        """Raises ConfigError on values that cannot work."""
        if not self.host or not 0 < self.port < 65536:
            raise ConfigError(f"peer: {self.host!r} port {self.port} is no address")


class PeerStore:
    """See `base.Store`, reading only. ``lost`` is told when the peer began a new life."""

    tier = Tier.PEER

    def __init__(
        self,
        settings: Settings,
        lost: Callable[[str], None] | None = None,
        nixl: peer_nixl.Reader | str = "not_wanted",
        trust: Trust | None = None,
    ) -> None:
        """``nixl``: of this peer alone, and closed with the store; or why there is none. ``trust``:
        over TLS."""
        self.plain = _plain(trust)
        self.settings = settings
        alone = isinstance(nixl, peer_nixl.Reader) and nixl.only
        self.transport = "nixl" if alone else self.plain  # of what was read last
        self.moved = Moved()
        self.nixl = nixl
        self._address = Address(settings.host, settings.port)
        self._runs = Runs[Stream](
            "peer",
            partial(Stream.connect, self._address, wrap=peer_tls.agent_at(trust, settings.host)),
            self._greet,
            streams=settings.streams,
            queue_max=settings.queue_max,
            deadline_s=settings.deadline_s,
            run_bytes=RUN_BYTES,
        )
        self._life = Life(self._runs.counts, lost)

    @property
    def counts(self) -> dict[str, int]:
        """Pieces and failures by reason."""
        return self._runs.counts.all()

    def write(self, pieces: Sequence[Piece], done: Finish) -> None:
        """Refused: a peer's dram is its own agent's."""
        self._runs.submit(pieces, _no_write, done)

    def read(self, pieces: Sequence[Piece], done: Finish) -> None:
        """See `base.Store`."""
        self._runs.submit(pieces, self._read, done, into=True)

    def find(self, names: Sequence[bytes], done: Finish) -> None:
        """See `base.Shared`: what the peer lends for a while."""
        self._runs.submit(asked(names), _find, done)

    def delete(self, names: Sequence[bytes]) -> None:
        """Raises StoreError: a peer's dram is its own agent's."""
        raise StoreError("a peer's dram is emptied by its own agent")

    def labels(self) -> Iterator[Entry]:
        """See `base.Shared`."""
        return self.scan()

    def scan(self) -> Iterator[Entry]:
        """See `base.Store`. Raises OSError, Refused and StoreError."""
        link = self._runs.opened()
        try:
            start = 0
            while True:
                link.until = time.monotonic() + self.settings.deadline_s
                ask(link, Request([], start))
                labels = msgspec.msgpack.decode(bulk(link, 8 << 20), type=list[Label])
                yield from map(framing.entry, labels)
                if len(labels) < NAMES_MAX:
                    return
                start += len(labels)
        except (ValueError, msgspec.MsgspecError) as error:
            raise StoreError(f"peer {self._address}: its catalogue is garbled: {error}") from error
        finally:
            link.close()

    def close(self) -> None:
        """See `base.Store`."""
        self._runs.close()
        if not isinstance(self.nixl, str):
            self.nixl.close()

    def _greet(self, link: Stream) -> None:
        said = bytearray(len(MAGIC) + _LIFE_BYTES + _NONCE_BYTES)
        link.fill(memoryview(said))
        if said[: len(MAGIC)] == peer_tls.TLS_ONLY:
            raise Refused("denied", f"{self._address} speaks TLS only: give this agent [tls], too")
        if said[: len(MAGIC)] != MAGIC:
            raise Refused("foreign", f"{self._address} is no kvatlas agent of this version")
        life, nonce = bytes(said[8:24]), bytes(said[24:])
        ours = os.urandom(_NONCE_BYTES)
        link.send([MAGIC, _proof(self.settings.token, nonce), ours])
        proof = bytearray(_PROOF_BYTES)
        try:
            link.fill(memoryview(proof))
        except ConnectionError as error:
            raise Refused("denied", f"{self._address} does not let us in: the token?") from error
        if not hmac.compare_digest(proof, _proof(self.settings.token, _SERVER + ours)):
            raise Refused("denied", f"{self._address} does not know our token: it is not read")
        self._life.seen(life, f"{self._address} began a new life")

    def _read(self, link: Stream, outcome: Outcome) -> None:
        broken: list[bytes] = []
        if not isinstance(self.nixl, str):
            broken += self.nixl.borrow(link, outcome, self.moved, self._judge)
        if outcome.open:
            ask(link, Request([piece.name for piece in outcome.open]))
        while outcome.open:
            with self.moved.timed(self.plain):
                broken += self._part(link, outcome)
        if broken:
            ask(link, Request(broken, suspect=True))
            link.fill(memoryview(bytearray(1)))  # it has looked: what is wrong there is gone

    def _part(self, link: Stream, outcome: Outcome) -> list[bytes]:
        """One part of an answer, for the first of what is open. Says what is wrong there, too."""
        count = int.from_bytes(exactly(link, LENGTH.size), "little")
        if not 0 < count <= len(outcome.open):
            raise ValueError(f"{self._address}: an answer for {count} names")
        pieces = outcome.open[:count]
        heads = memoryview(exactly(link, count * HEADER_BYTES))
        labels: list[Label | None] = []
        for at in range(0, len(heads), HEADER_BYTES):
            head = heads[at : at + HEADER_BYTES]
            labels.append(label := None if head == _MISSING else framing.unpack(head))
            if label is None and head != _MISSING:  # where the next value begins is not known
                raise ValueError(f"{self._address}: an answer is garbled")
        sums = _values(link, labels, pieces)
        return self._judge(outcome, self.plain, labels, sums, exactly(link, count))

    def _judge(
        self,
        outcome: Outcome,
        transport: str,
        labels: Sequence[Label | None],
        sums: Sequence[int | None],
        flags: bytes,
    ) -> list[bytes]:
        """What became of the first that are open; ``sums`` where they were summed already. Says
        what is wrong there."""
        broken: list[bytes] = []
        pieces = outcome.open[: len(labels)]
        for piece, label, found, flag in zip(pieces, labels, sums, flags, strict=True):
            if label is None:
                outcome.fail()
                continue
            if flag == MISSED[0]:
                self._runs.counts.add("recycled")
                outcome.fail()
                continue
            verdict = framing.judge(label, piece, label.size_bytes, found)
            if flag == SAME[0] and verdict is Verdict.RIGHT:
                self.transport = transport
                self.moved.arrived(transport, piece.view.nbytes)
                outcome.arrive()
                continue
            outcome.damage()
            if verdict is Verdict.BROKEN:
                broken.append(piece.name)
        return broken


def _values(link: Stream, labels: Sequence[Label | None], pieces: Sequence[Piece]) -> list[int]:
    """Reads what follows the labels, as far as it fits into its place; checksums, or 0."""
    sums = [0] * len(labels)
    run: list[int] = []

    def take() -> None:
        for n, found in zip(run, link.receive([pieces[n].view for n in run]), strict=True):
            sums[n] = found
        run.clear()

    for n, label in enumerate(labels):
        if label is None:
            continue
        if label.size_bytes == pieces[n].view.nbytes:
            run.append(n)
            continue
        take()
        link.skip(label.size_bytes)
    take()
    return sums


def _label_of(name: bytes, unit: Unit, view: memoryview) -> bytes:
    checksum = unit.checksum or checksum_of(view)
    found = Entry(name, view.nbytes, checksum, unit.index, unit.tenant, unit.fingerprint)
    return framing.header_of(found)


def _find(link: Stream, outcome: Outcome) -> None:
    waiting = list(outcome.open)
    ask(link, Request([piece.name for piece in waiting], find=True))
    said = bytearray(len(waiting))
    link.fill(memoryview(said))
    for flag in said:
        if flag:
            outcome.arrive()
        else:
            outcome.fail()


def _plain(trust: Trust | None) -> str:
    """What carries what NIXL does not."""
    return "tcp" if trust is None else "tls"


def _no_write(link: Stream, outcome: Outcome) -> None:
    raise Refused("read_only", "a peer's dram is written by its own agent: let it pull")


def _proof(token: bytes, nonce: bytes) -> bytes:
    return hashlib.blake2b(nonce, key=token[:64], digest_size=_PROOF_BYTES).digest()
