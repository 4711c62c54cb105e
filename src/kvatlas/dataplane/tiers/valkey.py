"""Values in Valkey or Redis, over RESP on plain sockets: payload goes from and to the arena.

Client libraries make a bytes object of every value and reach a fifth to a third of this. One key
per value, header first (see `framing`); values above ``chunk_bytes`` have the rest in keys of
their own, written before the one that has the header. A write never replaces what is there.

Protocol: https://valkey.io/topics/protocol (RESP 2). A server in cluster mode, or one that
demands TLS and is asked without, is refused with a clear word.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import msgspec
import xxhash

from kvatlas.core.records import Tier
from kvatlas.dataplane.codec import Codec
from kvatlas.dataplane.extents import whole
from kvatlas.dataplane.keystore import KeyMissing
from kvatlas.dataplane.records import Label
from kvatlas.dataplane.sealing import Sealer
from kvatlas.dataplane.tiers import framing
from kvatlas.dataplane.tiers.base import Entry, Finish, Life, Piece, asked
from kvatlas.dataplane.tiers.framing import HEADER_BYTES, Verdict
from kvatlas.dataplane.tiers.runs import Outcome, Refused, Runs
from kvatlas.dataplane.tiers.sockets import Address, Digest, Stream, Wrap
from kvatlas.dataplane.tls import asking, joined
from kvatlas.errors import ConfigError

CHUNK_BYTES = 64 << 20  # the server's default limit of a value is 512 MB
CHUNKS_MAX = 4096  # of a value that is removed: what its label says is not believed
SCAN_KEYS = 1000
AHEAD_BYTES = 256 << 10
_ANSWER_BYTES_MAX = 1 << 20
_CHUNK = struct.Struct("<I")
_CRLF = b"\r\n"
# Words of the server that no second try would mend, and what they are counted as.
_REASONS = {
    "OOM": "full",
    "MISCONF": "full",
    "READONLY": "read_only",
    "NOAUTH": "denied",
    "WRONGPASS": "denied",
    "NOPERM": "denied",
    "MOVED": "cluster",
    "ASK": "cluster",
    "CLUSTERDOWN": "cluster",
    "LOADING": "loading",
}


class Settings(msgspec.Struct, frozen=True):
    """Which server, and how. ``ttl_s`` 0: values stay until somebody deletes or evicts them.
    ``host`` alone (port 0) is the path of a Unix socket. ``tls``: its certificate is of ``ca``,
    else of an authority that this machine trusts; it is shown ``cert``, where there is one."""

    host: str = "127.0.0.1"
    port: int = 6379
    username: str = ""
    password: str = ""
    database: int = 0
    prefix: str = "kvatlas:"
    ttl_s: float = 0.0
    chunk_bytes: int = CHUNK_BYTES
    codec: Codec = Codec.RAW
    streams: int = 4
    queue_max: int = 1024
    deadline_s: float = 10.0
    tls: bool = False
    ca: str = ""
    cert: str = ""
    key: str = ""

    def __post_init__(self) -> None:
        """Raises ConfigError on values that cannot work."""
        if not self.host or not 0 <= self.port < 65536 or self.database < 0:
            raise ConfigError(f"valkey: {self.host!r} port {self.port} is no address of a server")
        if self.tls and not self.port:
            raise ConfigError("valkey: TLS is for host and port, not for a Unix socket")
        if not self.tls and (self.ca or self.cert or self.key):
            raise ConfigError("valkey: ca, cert and key are for TLS: write valkeys://")
        if not 0 <= self.ttl_s < 1e10 or 0 < self.ttl_s < 0.001:
            raise ConfigError(f"valkey: ttl_s is {self.ttl_s}: 0, or at least a millisecond")
        if not 1 <= self.chunk_bytes <= 256 << 20:
            raise ConfigError(f"valkey: chunk_bytes is {self.chunk_bytes}: 1 … {256 << 20}")


class Server(Stream):
    """A connection on which commands go out and answers come back."""

    def ask(self, *words: bytes) -> list[bytes | int | None]:
        """One command, its answer as a flat list. Raises Refused."""
        self.send([command(words)])
        return self.answer()

    def answer(self) -> list[bytes | int | None]:
        """Of a command whose answer is small; arrays come flat. Raises Refused, ValueError."""
        line = self.line()
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return [rest]
        if kind == b":":
            return [int(rest)]
        if kind == b"-":
            raise refusal(rest)
        if kind == b"$":
            return [self._bulk(int(rest))]
        if kind != b"*" or int(rest) > 4 * SCAN_KEYS:
            raise ValueError(f"valkey: {line[:40]!r} is no answer")
        return [part for _ in range(int(rest)) for part in self.answer()]

    def _bulk(self, size_bytes: int) -> bytes | None:
        if size_bytes < 0:
            return None
        if size_bytes > _ANSWER_BYTES_MAX:
            raise ValueError(f"valkey: an answer of {size_bytes} bytes")
        data = bytearray(size_bytes + 2)
        self.fill(memoryview(data))
        if data[size_bytes:] != _CRLF:
            raise ValueError("valkey: an answer without an end")
        return bytes(data[:size_bytes])

    def value(
        self, head: memoryview | None, target: memoryview, digest: Digest
    ) -> tuple[int, memoryview]:
        """A value straight to its place where it has that size, to a place of its own where it is
        shorter; says how long it is after its head, or -1 where it is not there, and where. Raises
        Refused, ValueError."""
        line = self.line()
        if line[:1] == b"-":
            raise refusal(line[1:])
        if line[:1] != b"$":
            raise ValueError(f"valkey: {line[:40]!r} is no value")
        size = int(line[1:])
        if size < 0:
            return -1, target[:0]
        if head is not None:
            head[:] = bytes(len(head))
            part = head[: min(size, len(head))]
            self.fill(part)
            size -= len(part)
        place = target
        if size < len(target):
            place = memoryview(bytearray(size))
        if size <= len(target):
            self.fill(place, digest)
        else:
            self.skip(size)
        end = bytearray(2)
        self.fill(memoryview(end))
        if end != _CRLF:
            raise ValueError("valkey: a value without an end")
        return size, place


class ValkeyStore:
    """See `base.Store`. ``lost`` is told when the server turns out to be another one than before
    (restarted, or failed over): what it held may be gone and is to be scanned anew."""

    tier = Tier.OBJECT
    transport: str

    def __init__(
        self,
        settings: Settings,
        lost: Callable[[str], None] | None = None,
        sealer: Sealer | None = None,
    ) -> None:
        self.settings = settings
        self._sealer = sealer
        self.transport = "tls" if settings.tls else "tcp" if settings.port else "unix"
        self._address = Address(settings.host, settings.port)
        self._prefix = settings.prefix.encode()
        self._runs = Runs[Server](
            "valkey",
            partial(Server.connect, self._address, wrap=_wrap(settings)),
            self._greet,
            streams=settings.streams,
            queue_max=settings.queue_max,
            deadline_s=settings.deadline_s,
        )
        self._life = Life(self._runs.counts, lost)

    @property
    def counts(self) -> dict[str, int]:
        """Pieces and failures by reason."""
        return self._runs.counts.all()

    def write(self, pieces: Sequence[Piece], done: Finish) -> None:
        """See `base.Store`. Chunks go before the head: a value without its end has no head."""
        self._runs.submit(pieces, self._write, done)

    def read(self, pieces: Sequence[Piece], done: Finish) -> None:
        """See `base.Store`."""
        self._runs.submit(pieces, self._read, done, into=True)

    def find(self, names: Sequence[bytes], done: Finish) -> None:
        """See `base.Shared`."""
        self._runs.submit(asked(names), self._find, done)

    def delete(self, names: Sequence[bytes]) -> None:
        """See `base.Store`. Raises OSError and Refused."""

        if not names:
            return
        server = self._runs.opened()
        try:
            for start in range(0, len(names), SCAN_KEYS):
                part = names[start : start + SCAN_KEYS]
                keys: list[bytes] = []
                for name, header in zip(part, self._headers(server, part), strict=True):
                    keys += self._keys(name, header.size_bytes if header else 0)
                _delete(server, keys)
        finally:
            server.close()

    def scan(self) -> Iterator[Entry]:
        """See `base.Store`. Raises OSError and Refused."""
        server = self._runs.opened()
        try:
            cursor = b"0"
            while True:
                server.until = time.monotonic() + self.settings.deadline_s
                pattern = _literal(self._prefix) + b"v:*"
                count = str(SCAN_KEYS).encode()
                first, *keys = server.ask(b"SCAN", cursor, b"MATCH", pattern, b"COUNT", count)
                cut = len(self._prefix) + 2
                names = [key[cut:] for key in keys if isinstance(key, bytes)]
                for name, header in zip(names, self._headers(server, names), strict=True):
                    if header is not None and header.name == name:
                        yield framing.entry(header)
                cursor = first if isinstance(first, bytes) else b"0"
                if cursor == b"0":
                    return
        finally:
            server.close()

    def labels(self) -> Iterator[Entry]:
        """See `base.Shared`: `scan` knows them."""
        return self.scan()

    def close(self) -> None:
        """See `base.Store`."""
        self._runs.close()

    # -- one run over one connection ---------------------------------------------------------------

    def _write(self, server: Server, outcome: Outcome) -> None:
        parts: list[bytes | memoryview] = []
        answers: list[int | None] = []
        room = self._room(outcome)
        for piece in outcome.open:
            before = len(parts)
            try:
                made = framing.coded(piece, self.settings.codec, self._sealer, room)
            except KeyMissing:
                answers.append(None)
                continue
            room = None if room is None else room[whole(piece.view.nbytes) :]
            if made is not None:
                header, stored = made
                for index in range(self._chunks(len(stored)), -1, -1):
                    self._set(parts, piece.name, stored, index, b"" if index else header)
            answers.append((len(parts) - before) // 3)
        server.send(parts)
        for count in answers:
            if count is None:
                outcome.fail("no key to seal it with")
                self._runs.counts.add("failed_no_key")
                continue
            if not count:  # its bytes were wrong before they came here
                outcome.damage()
                continue
            refused: Refused | None = None
            for _ in range(count):
                try:
                    server.answer()  # +OK, or null: it is there already
                except Refused as problem:
                    refused = problem
            if refused is None:
                outcome.arrive()
            else:
                outcome.fail(str(refused))
                self._runs.counts.add(f"failed_{refused.reason}")

    def _room(self, outcome: Outcome) -> memoryview | None:
        """For all of a run, sealed: what is sent is sent together."""
        if self._sealer is None:
            return None
        return self._sealer.room(sum(whole(piece.view.nbytes) for piece in outcome.open))

    def _set(
        self,
        parts: list[bytes | memoryview],
        name: bytes,
        stored: memoryview,
        index: int,
        header: bytes,
    ) -> None:
        size = self.settings.chunk_bytes
        data = stored[index * size : (index + 1) * size]
        ttl = int(self.settings.ttl_s * 1000)
        # Two writers seal one value differently: an end that one of them left is no end for the
        # other's head. What is in the clear is the same, whoever wrote it.
        tail: tuple[bytes, ...] = () if index and self._sealer is not None else (b"NX",)
        tail += (b"PX", str(ttl).encode()) if ttl else ()
        words = [b"SET", self._key(name, index)]
        start = b"*%d\r\n" % (len(words) + 1 + len(tail)) + b"".join(map(_bulk, words))
        start += b"$%d\r\n" % (len(header) + len(data)) + header
        parts += [start, data, _CRLF + b"".join(map(_bulk, tail))]

    def _read(self, server: Server, outcome: Outcome) -> None:
        head = memoryview(bytearray(HEADER_BYTES))
        size = self.settings.chunk_bytes
        going: list[bytes] = []
        pieces = list(outcome.open)
        asked = ahead_bytes = 0
        for piece in pieces:
            # Small values are asked for ahead; large ones one by one: what a server has to keep
            # ready costs it more than the wait for the next question.
            requests: list[bytes] = []
            while asked < len(pieces) and (not asked or ahead_bytes < AHEAD_BYTES):
                wanted = pieces[asked]
                ahead_bytes += wanted.view.nbytes
                asked += 1
                for index in range(self._chunks(wanted.view.nbytes) + 1):
                    requests.append(command((b"GET", self._key(wanted.name, index))))
            server.send(requests)
            ahead_bytes -= piece.view.nbytes
            found: list[int] = []
            places: list[memoryview] = []
            digest = xxhash.xxh3_128()
            for index in range(self._chunks(piece.view.nbytes) + 1):
                part = piece.view[index * size : (index + 1) * size]
                length, place = server.value(None if index else head, part, digest)
                found.append(length)
                places.append(place)
            label = framing.unpack(head)
            stored: memoryview | None = None
            if found[0] >= 0 and label is not None and label.codec:
                keys = self._chunks(label.stored_bytes) + 1
                found = found[:keys]
                stored = places[0] if keys == 1 else memoryview(b"".join(places[:keys]))
            elif found[0] >= 0 and label is not None and label.stored_bytes != piece.view.nbytes:
                # Of another size: its first key tells, how many others it has is its own affair.
                whole = found[0] == min(label.stored_bytes, size)
                found = [label.stored_bytes if whole else 0]
            verdict = None
            if min(found) >= 0:
                summed = digest.intdigest()
                verdict = framing.judge(
                    label, piece, sum(found), summed, stored, sealer=self._sealer
                )
                verdict.count(self._runs.counts)
            if verdict is None or verdict.missing:
                outcome.fail()
            elif verdict is Verdict.RIGHT:
                outcome.arrive()
            else:
                outcome.damage()
            if verdict is not None and verdict.goes:
                going += self._keys(piece.name, sum(found))
        _delete(server, going)

    def _find(self, server: Server, outcome: Outcome) -> None:
        waiting = list(outcome.open)
        keys = [self._key(piece.name, 0) for piece in waiting]
        server.send([b"".join(command((b"EXISTS", key)) for key in keys)])
        for _ in waiting:
            if server.answer() == [1]:
                outcome.arrive()
            else:
                outcome.fail()

    def _headers(self, server: Server, names: Sequence[bytes]) -> list[Label | None]:
        end = str(HEADER_BYTES - 1).encode()
        server.send([b"".join(command((b"GETRANGE", self._key(n, 0), b"0", end)) for n in names)])
        found = [server.answer()[0] for _ in names]
        return [framing.unpack(data) if isinstance(data, bytes) else None for data in found]

    def _chunks(self, size_bytes: int) -> int:
        """How many keys a value has beside the one with its header."""
        return max(0, -(-size_bytes // self.settings.chunk_bytes) - 1)

    def _keys(self, name: bytes, size_bytes: int) -> list[bytes]:
        """All that a value may have, if it is so large."""
        return [self._key(name, n) for n in range(min(self._chunks(size_bytes), CHUNKS_MAX) + 1)]

    def _key(self, name: bytes, index: int) -> bytes:
        if not index:
            return self._prefix + b"v:" + name
        return self._prefix + b"c:" + _CHUNK.pack(index) + name

    def _greet(self, server: Server) -> None:
        settings = self.settings
        if settings.password:
            user = (settings.username.encode(),) if settings.username else ()
            server.ask(b"AUTH", *user, settings.password.encode())
        if settings.database:
            server.ask(b"SELECT", str(settings.database).encode())
        info = server.ask(b"INFO", b"server")[0]
        if not isinstance(info, bytes):
            raise ValueError("valkey: no answer to INFO")
        said = dict(line.split(b":", 1) for line in info.split(_CRLF) if b":" in line)
        if b"cluster" in (said.get(b"redis_mode"), said.get(b"server_mode")):
            raise Refused("cluster", f"{self._address} is part of a cluster: not supported yet")
        self._life.seen(said.get(b"run_id", b""), f"{self._address} is not the server that it was")


def command(words: Sequence[bytes]) -> bytes:
    """As it goes over the wire."""
    return b"*%d\r\n" % len(words) + b"".join(map(_bulk, words))


def refusal(text: bytes) -> Refused:
    """What the server's error means."""
    said = text.decode("utf-8", "replace")[:200]
    reason = _REASONS.get(said.split(" ", 1)[0], "refused")
    if reason == "cluster":
        said += " (the server is part of a cluster: not supported yet)"
    return Refused(reason, said)


def _wrap(settings: Settings) -> Wrap | None:
    """Raises ConfigError for files that cannot be used."""
    if not settings.tls:
        return None
    context = asking(settings.ca, settings.cert, settings.key)
    return lambda sock, until: joined(context, sock, settings.host, until)


def _delete(server: Server, keys: Sequence[bytes]) -> None:
    for at in range(0, len(keys), SCAN_KEYS):
        server.ask(b"DEL", *keys[at : at + SCAN_KEYS])


def _bulk(word: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(word), word)


def _literal(prefix: bytes) -> bytes:
    """A prefix with nothing in it that a pattern would read as more than itself."""
    return b"".join(b"\\" + bytes([c]) if c in b"*?[]\\^-" else bytes([c]) for c in prefix)
