"""One engine's KV events as the doctor hears them: beside the gateway, changing nothing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import msgspec
import zmq
import zmq.asyncio
import zmq.utils.monitor

from kvatlas.core.events import Batch, BlockStored
from kvatlas.service.event_socket import END_OF_REPLAY
from kvatlas.service.feed import Source
from kvatlas.service.wire import PAYLOAD_BYTES_MAX, Decoder

_KEPT_MAX = 4096  # batches; a busy engine sends a few hundred in the time that this takes
_KEPT_BYTES_MAX = 64 << 20
_SEQ_BYTES = 8
_ENOUGH_TOKENS = 8
TOKEN_BYTES = 4


class Ear:
    """A stream, heard since `open`. ``error``: why nothing can be heard."""

    def __init__(self, context: zmq.asyncio.Context, source: Source) -> None:
        self.source = source
        self.error = ""
        self.gap = ""
        self.malformed = 0
        self.batches: list[Batch] = []
        self._expected: int | None = None
        self._left_bytes = _KEPT_BYTES_MAX
        self._context = context
        self._decoder = Decoder()
        self._sub: zmq.asyncio.Socket | None = None
        self._task: asyncio.Task[None] | None = None
        self._news = asyncio.Event()

    async def open(self, patience_s: float) -> None:
        """Connects, and waits until the other side is there."""
        if self.source.bind:
            self.error = f"{self.source.endpoint}: the engine connects to the gateway there"
            return
        self._sub = self._context.socket(zmq.SUB)
        monitor = self._sub.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        try:
            self._sub.set(zmq.MAXMSGSIZE, PAYLOAD_BYTES_MAX)
            self._sub.set(zmq.IPV6, 1)
            self._sub.subscribe(self.source.topic.encode())
            self._sub.connect(self.source.endpoint)
            await asyncio.wait_for(monitor.recv_multipart(), patience_s)
        except TimeoutError:
            self.error = f"{self.source.endpoint}: nobody there publishes"
        except zmq.ZMQError as error:
            self.error = f"{self.source.endpoint}: {error}"
        finally:
            self._sub.disable_monitor()
            monitor.close(0)
        if not self.error:
            self._task = asyncio.create_task(self._listen(self._sub), name="doctor's ear")

    async def close(self) -> None:
        """Closes its socket."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if self._sub is not None:
            self._sub.close(0)

    def stored(self, ids: bytes, since: int = 0) -> list[BlockStored]:
        """Events that tell of this prompt, but for those in the first ``since`` batches; those that
        follow each other in one chain as one. ``ids``: uint32, little endian."""
        runs = (run for batch in self.batches[since:] for run in _runs(batch))
        return [run for run in runs if _tells(run, ids)]

    async def until_stored(self, ids: bytes, patience_s: float) -> bool:
        """Whether such an event came, or comes in this time."""
        seen = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                while not self.error and not self.stored(ids, seen):
                    seen = len(self.batches)
                    self._news.clear()
                    await self._news.wait()
        return bool(self.stored(ids, seen))

    async def replayed(self, patience_s: float) -> str:
        """Asks again for all that was heard: "" where the same came, else what went wrong."""
        if not self.batches:
            return "nothing was heard that could be asked for again"
        heard = {batch.seq: batch for batch in self.batches}
        dealer = self._context.socket(zmq.DEALER)
        again: dict[int, Batch] = {}
        try:
            dealer.set(zmq.IPV6, 1)
            dealer.connect(self.source.replay)
            await dealer.send_multipart([b"", min(heard).to_bytes(_SEQ_BYTES, "big")])
            async with asyncio.timeout(patience_s):
                await self._again(dealer, again)
        except TimeoutError:
            return f"{self.source.replay}: no answer within {patience_s:g} s"
        except zmq.ZMQError as error:
            return f"{self.source.replay}: {error}"
        finally:
            dealer.close(0)
        for seq, batch in heard.items():
            if seq not in again:
                return f"batch {seq} did not come again"
            if again[seq].events != batch.events:
                return f"batch {seq} came again with other events"
        return ""

    async def _again(self, dealer: zmq.asyncio.Socket, again: dict[int, Batch]) -> None:
        """Until the mark of the end, or as many as were heard."""
        last = self.batches[-1].seq
        while True:
            frames = await dealer.recv_multipart()
            if len(frames) < 2 or frames[-2] == END_OF_REPLAY:
                return
            seq = int.from_bytes(frames[-2], "big")
            again[seq] = self._decoder.decode(seq, frames[-1])
            if seq >= last:
                return

    async def _listen(self, sub: zmq.asyncio.Socket) -> None:
        while True:
            frames = await sub.recv_multipart()
            if len(frames) < 2 or len(frames[-2]) != _SEQ_BYTES:
                self.malformed += 1
                continue
            batch = self._decoder.decode(int.from_bytes(frames[-2], "big"), frames[-1])
            self.malformed += batch.malformed
            if self._expected not in (None, batch.seq):
                self.gap = self.gap or f"batch {self._expected} was expected, {batch.seq} came"
            self._expected = batch.seq + 1
            self._left_bytes -= len(frames[-1])
            if len(self.batches) < _KEPT_MAX and self._left_bytes >= 0:
                self.batches.append(batch)
            self._news.set()


def _runs(batch: Batch) -> Iterator[BlockStored]:
    """SGLang sends an event for each page: those of one chain are put together."""
    run: BlockStored | None = None
    for event in batch.events:
        if not isinstance(event, BlockStored) or not event.hashes:
            continue
        if run is not None and event.parent == run.hashes[-1] and event.group == run.group:
            hashes, tokens = (*run.hashes, *event.hashes), run.tokens + event.tokens
            run = msgspec.structs.replace(run, hashes=hashes, tokens=tokens)
            continue
        if run is not None:
            yield run
        run = event
    if run is not None:
        yield run


def _tells(run: BlockStored, ids: bytes) -> bool:
    """Whether it is of this prompt: by its first block, or where blocks are small, by enough
    tokens anywhere in it, as other prompts may begin with the same one."""
    whole = run.block_tokens * TOKEN_BYTES
    if run.parent is None and run.block_tokens >= _ENOUGH_TOKENS:
        return len(run.tokens) >= whole and ids.startswith(run.tokens[:whole])
    piece = run.tokens[: _ENOUGH_TOKENS * TOKEN_BYTES]
    at = ids.find(piece) if len(piece) == _ENOUGH_TOKENS * TOKEN_BYTES else -1
    return at >= 0 and at % TOKEN_BYTES == 0
