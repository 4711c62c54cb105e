"""What a gateway tells a peer that begins: its directory's soft state, while it serves on.

Who asks proves that it has the secret, as whoever orders something of an agent does
(`service.agent_orders`), and where TLS is on that it is a gateway. One publisher after the other is
held still while its claims are read, in slices of a few milliseconds; its events wait meanwhile,
those of all others are applied. At most one publisher's claims are in memory twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence

import msgspec
from prometheus_client.core import CounterMetricFamily, Metric

from kvatlas import __version__
from kvatlas.core.dispatch import Dispatcher
from kvatlas.core.keys import Keyring
from kvatlas.core.records import Place, Publisher
from kvatlas.core.snapshot import engine_pieces, shelf_pieces
from kvatlas.core.snapshot_frames import NONCE_BYTES, Writer, encoded
from kvatlas.core.snapshot_prices import prices_of
from kvatlas.core.snapshot_values import FORMAT, Piece
from kvatlas.errors import RequestError, SnapshotError
from kvatlas.service.agent_orders import ordered
from kvatlas.service.feed import Feed
from kvatlas.service.http import Request
from kvatlas.service.http_reply import Reply

SNAPSHOT = "/kvatlas/snapshot"
SLICE_S = 0.002
AT_ONCE_MAX = 1  # peers that are told at the same time
_HOLD_S = 1.0  # for what was read of a publisher to be applied; then it is left out
_HOLD_AGAIN_S = 0.001
_BYTES: tuple[bytes, bytes] = (b"content-type", b"application/octet-stream")


class Offer(msgspec.Struct, frozen=True):
    """What a gateway says before it is asked: which life of it may be, and what it writes."""

    life: str
    format: int
    version: str


class Wanted(msgspec.Struct, frozen=True):
    """A snapshot is wanted of that life, proved with the number ``nonce``."""

    life: str
    nonce: bytes


class Slices:
    """Gives way to the event loop whenever a slice is used up."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._until = self._loop.time() + SLICE_S
        self.longest_s = 0.0  # of one step, which nothing divides

    async def step(self) -> None:
        """After each piece of work."""
        now = self._loop.time()
        self.longest_s = max(self.longest_s, now - self._until + SLICE_S)
        if now >= self._until:
            await asyncio.sleep(0)
            self._until = self._loop.time() + SLICE_S


class Snapshots:
    """Of one gateway; `answer` is its page."""

    def __init__(self, ring: Keyring, dispatcher: Dispatcher, feed: Callable[[], Feed]) -> None:
        self.counts: Counter[str] = Counter()
        self._ring = ring
        self._dispatcher = dispatcher
        self._feed = feed
        self._life = secrets.token_hex(16)
        self._under_way = 0

    async def answer(self, request: Request, reply: Reply) -> None:
        """GET tells the `Offer`, POST the snapshot. Raises RequestError."""
        if request.method == "GET":
            reply.send_json(200, msgspec.to_builtins(Offer(self._life, FORMAT, __version__)))
            return
        if request.method != "POST":
            text = f"{request.method} is not allowed on {SNAPSHOT}"
            raise RequestError(text, status=405, code="method_not_allowed")
        wanted = ordered(self._ring, request, Wanted, self._life)
        if not isinstance(wanted, Wanted):
            self.counts["refused"] += 1
            raise RequestError(wanted[1], status=wanted[0], code="no_snapshot")
        if len(wanted.nonce) != NONCE_BYTES:
            raise RequestError(f"a nonce has {NONCE_BYTES} bytes", status=400, code="no_snapshot")
        if self._under_way >= AT_ONCE_MAX:
            self.counts["busy"] += 1
            text = "another peer is being told: ask again"
            raise RequestError(text, status=503, code="no_snapshot", retry_after_s=1)
        self._under_way += 1
        try:
            await self._tell(reply, Writer(self._ring, wanted.nonce))
        finally:
            self._under_way -= 1
            self.counts["told" if reply.ended else "broken_off"] += 1

    def metrics(self) -> Iterator[Metric]:
        """Figures for Prometheus."""
        told = CounterMetricFamily(
            "kvatlas_snapshots", "that peers asked for, by what came of it", labels=["outcome"]
        )
        for outcome, count in self.counts.items():
            told.add_metric([outcome], count)
        yield told

    async def _tell(self, reply: Reply, writer: Writer) -> None:
        reply.start(200, [_BYTES])
        reply.write(writer.opening())
        slices = Slices()
        async for bodies in self._parts(slices):
            for body in bodies:
                reply.write(writer.frame(body))
                await slices.step()
                if reply.paused:
                    await reply.drain()
        reply.end(writer.closing())

    async def _parts(self, slices: Slices) -> AsyncIterator[list[bytes]]:
        """Pieces as bytes, of one publisher each; then of all agents; then the prices."""
        directory = self._dispatcher.directory
        for publisher in directory.publishers():
            async with self._still([publisher]) as places:
                place = places.get(publisher)
                pieces = engine_pieces(directory, publisher, place) if place is not None else ()
                bodies = await self._read(pieces, slices)
            yield bodies
        async with self._still(directory.shelves.agents()) as places:
            bodies = await self._read(self._shelved(places), slices)
        yield bodies
        yield await self._read(prices_of(self._dispatcher), slices)

    def _shelved(self, places: Mapping[Publisher, Place]) -> Iterator[Piece]:
        """Where an agent goes or begins anew meanwhile: nothing of any."""
        shelves = self._dispatcher.directory.shelves
        own = {agent: shelves.own(agent) for agent in places}
        for piece in shelf_pieces(shelves, places):
            now = set(shelves.agents())
            if any(agent not in now or shelves.own(agent) is not own[agent] for agent in own):
                raise SnapshotError("an agent began anew")
            yield piece

    async def _read(self, pieces: Iterable[Piece], slices: Slices) -> list[bytes]:
        """None of them where their publisher's life ends before they are all read."""
        bodies: list[bytes] = []
        try:
            for piece in pieces:
                bodies.append(encoded(piece))
                await slices.step()
        except SnapshotError:
            self.counts["left_out"] += 1
            return []
        return bodies

    @contextlib.asynccontextmanager
    async def _still(
        self, publishers: Sequence[Publisher]
    ) -> AsyncIterator[dict[Publisher, Place]]:
        """Nothing that they say is applied meanwhile. Yields the places of those that have one."""
        feed = self._feed()
        try:
            async with asyncio.timeout(_HOLD_S):
                while not all(map(feed.hold, publishers)):  # noqa: ASYNC110 - it works meanwhile
                    await asyncio.sleep(_HOLD_AGAIN_S)
        except TimeoutError:
            self.counts["left_out"] += 1
            yield {}
        else:
            found = {publisher: feed.place(publisher) for publisher in publishers}
            yield {publisher: place for publisher, place in found.items() if place is not None}
        finally:
            for publisher in publishers:
                feed.release(publisher)
