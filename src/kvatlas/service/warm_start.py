"""A gateway that begins asks its peers what they know, and takes up the first good answer.

Whatever goes wrong, it starts cold: it then knows what the engines' replay buffers still tell. What
came of it is counted, and told to people with its reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Iterator

import msgspec
from prometheus_client.core import GaugeMetricFamily, Metric

from kvatlas.core.dispatch import Dispatcher
from kvatlas.core.keys import Keyring
from kvatlas.core.snapshot import Restore, Taken, check_format
from kvatlas.core.snapshot_frames import NONCE_BYTES, Reader
from kvatlas.errors import EngineError, SnapshotError
from kvatlas.service.agent_orders import PROOF, signed
from kvatlas.service.feed import Feed
from kvatlas.service.http import Headers
from kvatlas.service.http_client import HttpClient, Lease, Response, origin_of
from kvatlas.service.snapshots import SNAPSHOT, Offer, Slices, Wanted

log = logging.getLogger(__name__)

PEERS_MAX = 16  # asked in one start
_BUFFER_BYTES = 4 << 20  # then the peer has to wait
_SAID_BYTES_MAX = 64 << 10
_OFFER_TIMEOUT_S = 2.0
_LOOK_S = 0.02


class Start(msgspec.Struct):
    """How this gateway began. ``seconds``: for asking, reading and the engines' proofs; ``age_s``:
    how old what it took was when it counted."""

    kind: str = "alone"  # nobody was to be asked; else warm or cold
    peer: str = ""
    seconds: float = 0.0
    age_s: float = 0.0
    size_bytes: int = 0
    holders: int = 0
    taken: list[str] = []
    unproved: list[str] = []  # of them: the engine had not confirmed it when the time was over
    left_out: dict[str, str] = {}
    refusals: dict[str, str] = {}  # peer → why nothing of it was taken


class WarmStart:
    """Of one gateway. `run` it when the engines were looked at, before it serves."""

    def __init__(
        self,
        ring: Keyring,
        dispatcher: Dispatcher,
        feed: Callable[[], Feed],
        client: HttpClient,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``client`` speaks to gateways alone."""
        self.start = Start()
        self._ring = ring
        self._dispatcher = dispatcher
        self._feed = feed
        self._client = client
        self._clock = clock

    async def run(self, urls: Iterable[str], timeout_s: float) -> Start:
        """Ask them in turn, in all for ``timeout_s``. Never raises for what a peer does."""
        asked = list(dict.fromkeys(url.rstrip("/") for url in urls))[:PEERS_MAX]
        start = self.start = Start()
        if not asked:
            return start
        began, until = self._clock(), asyncio.get_running_loop().time() + timeout_s
        start.kind = "cold"
        for url in asked:
            why = await self._try(url, until)
            if not why:
                break
            start.refusals[url] = why
            log.warning("no warm start from %s: %s", url, why)
        start.seconds = self._clock() - began
        log.warning(
            "%s start after %.2f s: %d block-holders of %d publishers from %s",
            *(start.kind, start.seconds, start.holders, len(start.taken), start.peer or "nobody"),
        )
        return start

    def metrics(self) -> Iterator[Metric]:
        """Figures for Prometheus."""
        start = self.start
        kind = GaugeMetricFamily("kvatlas_warm_start", "1: how it began", labels=["kind"])
        kind.add_metric([start.kind], 1)
        yield kind
        for name, text, value in (
            ("seconds", "that its beginning waited for peers", start.seconds),
            ("age_seconds", "of what a peer told, when it counted", start.age_s),
            ("holders", "block-holders that a peer told of", start.holders),
            ("bytes", "read of peers", start.size_bytes),
        ):
            yield GaugeMetricFamily(f"kvatlas_warm_start_{name}", text, value=value)

    def notes(self) -> dict[str, dict[str, str]]:
        """For health: peers that were asked in vain, and why."""
        return {"cold_start": dict(self.start.refusals) if self.start.kind == "cold" else {}}

    async def _try(self, url: str, until: float) -> str:
        """Why nothing was taken from there, "" where something was."""
        try:
            async with asyncio.timeout_at(until):
                taken = await self._take(url)
        except TimeoutError:
            return "the time for a warm start was over before it had told all"
        except (EngineError, SnapshotError) as error:
            return str(error)
        except Exception as error:  # ours; a gateway must begin all the same
            log.exception("taking up the snapshot of %s failed", url)
            return f"taking it up failed ({type(error).__name__}); see the log"
        if not taken.places:
            reasons = "; ".join(sorted(set(taken.left_out.values()))) or "it knows nobody"
            return f"it has nothing that is worth something here: {reasons}"
        start = self.start
        start.kind, start.peer, start.holders = "warm", url, taken.holders
        start.taken = sorted(map(str, taken.places))
        start.left_out = {str(p): why for p, why in taken.left_out.items()}
        await self._proofs(taken, until)
        return ""

    async def _take(self, url: str) -> Taken:
        """Raises EngineError and SnapshotError; then nothing has changed."""
        offer = await self._offer(url)
        nonce, began = secrets.token_bytes(NONCE_BYTES), self._clock()
        feed = self._feed()
        restore = Restore(self._dispatcher, feed.outdone)
        try:
            await self._read(url, Wanted(offer.life, nonce), Reader(self._ring, nonce), restore)
            taken = restore.commit()  # from here to the last place nobody else may work
        except BaseException:
            restore.give_up()
            raise
        for publisher, place in taken.places.items():
            feed.take_up(publisher, place)
        self.start.age_s = self._clock() - began
        return taken

    async def _offer(self, url: str) -> Offer:
        answer = await self._client.request("GET", url + SNAPSHOT, timeout_s=_OFFER_TIMEOUT_S)
        if answer.status != 200:
            raise EngineError(f"{url}: status {answer.status}: {answer.said()}")
        try:
            offer = msgspec.json.decode(answer.body, type=Offer)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise EngineError(f"{url}: not what a gateway offers: {error}") from error
        check_format(offer.format)
        return offer

    async def _read(self, url: str, wanted: Wanted, reader: Reader, restore: Restore) -> None:
        body, proof = signed(self._ring, SNAPSHOT, wanted)
        sink = _Sink()
        headers: Headers = [(PROOF.encode(), proof.encode())]
        origin = origin_of(url)
        exchange = asyncio.create_task(
            self._client.exchange("POST", origin, SNAPSHOT, headers, body=body, sink=sink)
        )
        exchange.add_done_callback(lambda _: sink.more.set())
        slices = Slices()
        try:
            while True:
                await sink.more.wait()
                over, data = exchange.done(), sink.take()
                self.start.size_bytes += len(data)
                reader.feed(data)
                for piece in reader.pieces():
                    restore.take(piece)
                    await slices.step()
                if over:
                    break
            await exchange
        finally:
            exchange.cancel()
            with contextlib.suppress(asyncio.CancelledError, EngineError):
                await exchange

    async def _proofs(self, taken: Taken, until: float) -> None:
        """Nothing of it is promised before its engine has told again what it had told the peer."""
        feed, loop = self._feed(), asyncio.get_running_loop()
        waits = set(taken.places)
        while waits and loop.time() < until:
            waits = {publisher for publisher in waits if not feed.idle(publisher)}
            await asyncio.sleep(_LOOK_S)
        self.start.unproved = sorted(map(str, waits))


class _Sink:
    """A peer's answer: what came and was not read yet. More than it may hold is not asked for."""

    def __init__(self) -> None:
        self.more = asyncio.Event()
        self._parts: list[bytes] = []
        self._size = 0
        self._status = 0
        self._lease: Lease | None = None

    def on_head(self, status: int, headers: Headers, lease: Lease) -> None:
        self._status, self._lease = status, lease

    def on_data(self, data: bytes) -> None:
        self._parts.append(data)
        self._size += len(data)
        if self._lease is not None and self._size > _BUFFER_BYTES:
            self._lease.pause()
        if self._status == 200:
            self.more.set()
        elif self._size > _SAID_BYTES_MAX:
            raise EngineError(f"status {self._status}, and no end of words")

    def take(self) -> bytes:
        """All that is there. Raises EngineError where it is the word of a refusal."""
        data, self._parts, size = b"".join(self._parts), [], self._size
        self._size = 0
        self.more.clear()
        if self._lease is not None and size > _BUFFER_BYTES:
            self._lease.resume()
        if self._status not in (0, 200):
            raise EngineError(f"status {self._status}: {Response(self._status, [], data).said()}")
        return data
